"""Whom to ask for drafts, for how many, how long to wait, which answers to believe. Pure: no I/O, no clock, no torch.

Every sequence has its own expectation of what drafts bring it (`depth.Acceptance`), learned by comparing what was
guessed with the tokens that came, whether the guess was verified in a step or not. Where drafting does not pay, nobody
waits and nothing is verified; but now and then the drafter is asked beside a step that runs anyway, and its guess
compared: that costs nothing but the drafter's own time, which is kept to a `ProbeBudget`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq

from services.decode.costs import StepCosts
from services.decode.depth import HOPELESS, Acceptance, Prospect, allot
from services.decode.drafters import LEAST, UNREAD, Ask, DrafterState
from services.decode.probing import FREE_PROBES, PROBE_DEPTH, ProbeBudget
from services.decode.sequence import Sequence
from services.decode.sessions import Session
from services.decode.telling import Telling
from shared.messages import MAX_SESSION_TOKENS, Draft, DraftItem
from shared.peers import rendezvous

MEMORY = 10.0  # answers that a sequence's expectation remembers


class DraftBook:
    """Bookkeeping of drafts for the sequences of one decode worker.

    A caller alternates `plan`, `probes` and `settle` with steps, and tells the time of each (`stepped`); what becomes
    of asks may be told at any time.
    """

    def __init__(
        self, depth: int, vocab_size: int, *, longest_wait: float, step_tokens: int, adaptive: bool = True
    ) -> None:
        """`longest_wait` in seconds; not `adaptive`: always `depth` drafts and `longest_wait`."""
        self.depth = depth
        self._vocab = vocab_size
        self._longest_wait = longest_wait
        self._step_tokens = step_tokens
        self._adaptive = adaptive
        self._costs = StepCosts()
        self._sessions: dict[str, Session] = {}
        self._drafters: dict[str, DrafterState] = {}
        self._telling = Telling()
        self._budget = ProbeBudget()
        self._disturbed = False
        """A drafter may be at work beside the coming step, which tells nothing of what a step costs then."""
        self._step = 0

    # Steps

    def stepped(self, sequences: int, positions: int, seconds: float) -> None:
        """A step of generating sequences only took so long, for one position each and all their drafts."""
        if not self._disturbed:
            self._costs.see(sequences, positions, seconds)
        self._budget.step(seconds)

    def plan(
        self, sequences: Seq[Sequence], drafters: Seq[str], readers: Collection[str] = ()
    ) -> tuple[list[Ask], float]:
        """What to ask before the next step of these generating `sequences`, and the seconds to wait for the answers.

        `readers`: those of the drafters that read hidden states as the engine's are.
        """
        self._step += 1
        self._telling.readers = readers
        self._drafters = {d: self._drafters.get(d) or DrafterState() for d in drafters}
        self._telling.forget(self._drafters)
        if not self.depth or not sequences:
            return [], 0.0
        for sequence in sequences:
            self._attend(sequence)
        cost = self._costs.line(len(sequences))
        if not self._adaptive:
            depths, wait = [self._room(s) for s in sequences], self._longest_wait
        elif cost is None or not self._costs.sure(len(sequences)):
            return [], 0.0
        else:
            in_vain = min(self._longest_wait, cost.at(float(len(sequences))))
            each = -(-len(sequences) // max(len(self._drafters), 1))
            arrivals = {d: s.arrivals(each, self.depth, in_vain) for d, s in self._drafters.items()}
            prospects = [self._prospect(s, arrivals) for s in sequences]
            bend = self._costs.bend(len(sequences))
            allotment = allot(prospects, cost, self._spare(sequences), self._longest_wait, bend)
            depths, wait = allotment.depths, allotment.wait
        items: dict[str, list[DraftItem]] = {}
        for sequence, depth in zip(sequences, depths, strict=True):
            session = self._sessions[sequence.id]
            if depth > self._held(sequence) and self._may_wait(sequence) and self._fits_in(sequence, items):
                items.setdefault(session.drafter, []).append(self._item(sequence, depth, items))
        least = self._least(len(sequences))
        return [self._open(Ask(d, asked, awaited=True, least=least)) for d, asked in items.items()], wait

    def probes(self, sequences: Iterable[Sequence]) -> list[Ask]:
        """What to ask beside the next step, for those that have no drafts and may want some. Nobody waits for it."""
        items: dict[str, list[DraftItem]] = {}
        for sequence in sequences:
            session = self._sessions.get(sequence.id)
            if session is None or session.guess is not None or not self._room(sequence):
                continue
            drafter = self._drafters.get(session.drafter)
            due_at = max(session.probe_at, session.resume_at)
            if drafter is None or self._step < due_at or not drafter.may_probe(self._step):
                continue
            if self._budget.spent and drafter.heard > FREE_PROBES and not self._to_be_read(sequence):
                continue
            if not self._adaptive and not drafter.doubted:
                continue
            if not self._fits_in(sequence, items):
                continue
            session.probing, session.probe_at = True, self._step + session.gap
            item = self._item(sequence, min(PROBE_DEPTH, self._room(sequence)), items)
            items.setdefault(session.drafter, []).append(item)
        self._disturbed = bool(items) or any(drafter.open for drafter in self._drafters.values())
        paid = not self._budget.spent
        return [self._open(Ask(d, asked, awaited=False, paid=paid)) for d, asked in items.items()]

    def settle(self, sequences: Iterable[Sequence]) -> list[tuple[Sequence, str]]:
        """Give each of the generating `sequences` the drafts worth verifying; returns those that have some, with
        drafter and source."""
        here = [s for s in sequences if s.id in self._sessions]
        if not here:
            return []
        for sequence in here:
            self._sessions[sequence.id].follow(sequence.tokens)
        cost = self._costs.line(len(here))
        if self._adaptive and not self._costs.sure(len(here)):
            depths = [0] * len(here)
        elif self._adaptive and cost is not None:
            prospects = [self._sessions[s.id].prospect(self._room(s)) for s in here]
            depths = allot(prospects, cost, self._spare(here), 0.0, self._costs.bend(len(here))).depths
        else:
            depths = [self._held(s) for s in here]
        out = []
        for sequence, depth in zip(here, depths, strict=True):
            guess = self._sessions[sequence.id].guess
            sequence.drafts = guess.left[:depth] if guess else ()
            if guess and sequence.drafts:
                out.append((sequence, f"{guess.drafter}:{guess.source}"))
        return out

    def _least(self, sequences: int) -> float:
        """Chance of a draft that pays for checking it: what a position costs, in tokens that a step would bring."""
        cost = self._costs.line(sequences)
        if cost is None or not self._adaptive:
            return LEAST if self._adaptive else 0.0
        return min(max(sequences * cost.slope / max(cost.at(float(sequences)), 1e-9), HOPELESS), 1.0)

    def _spare(self, sequences: Seq[Sequence]) -> int:
        return max(self._step_tokens - len(sequences), 0)

    def _room(self, sequence: Sequence) -> int:
        if len(sequence.tokens) > MAX_SESSION_TOKENS:
            return 0
        return max(min(self.depth, sequence.max_tokens - sequence.generated - 1), 0)

    def _held(self, sequence: Sequence) -> int:
        return self._sessions[sequence.id].held(self._room(sequence))

    def _prospect(self, sequence: Sequence, arrivals: dict[str, Seq[float]]) -> Prospect:
        session, room = self._sessions[sequence.id], self._room(sequence)
        here = session.prospect(room)
        if session.drafter not in arrivals or not self._may_wait(sequence):
            return here
        in_time = self._drafters[session.drafter].in_time
        right, coming = session.acceptance.asked(room)
        asked, coming = [in_time * chance for chance in right], [in_time * chance for chance in coming]
        return Prospect(here.held, asked, arrivals[session.drafter][:room], coming)

    def _may_wait(self, sequence: Sequence) -> bool:
        session = self._sessions[sequence.id]
        drafter = self._drafters.get(session.drafter)
        if drafter is None or session.probing or self._step < session.resume_at or not drafter.may_wait():
            return False
        return not self._adaptive or (drafter.heard > 0 and len(sequence.tokens) - session.told <= UNREAD)

    def _to_be_read(self, sequence: Sequence) -> bool:
        """Whether the drafter should read this prompt now because drafts for it are expected to pay."""
        session = self._sessions[sequence.id]
        drafter, cost = self._drafters[session.drafter], self._costs.line(1)
        if len(sequence.tokens) - session.told <= UNREAD or drafter.doubted or not drafter.heard or cost is None:
            return False
        arrivals = drafter.arrivals(1, self.depth, min(self._longest_wait, cost.at(1.0)))
        right, coming = session.acceptance.asked(self.depth)
        prospect = Prospect((), right, arrivals, coming)
        return bool(allot([prospect], cost, self.depth, self._longest_wait).depths[0])

    # Sessions

    def _attend(self, sequence: Sequence) -> None:
        """Find the sequence's drafter, with which it stays while that lives, and see what became of the last guess."""
        drafter = rendezvous(sequence.id, list(self._drafters)) or ""
        session = self._sessions.get(sequence.id)
        if session is None or (session.drafter != drafter and drafter):
            known = self._drafters.get(drafter)
            expected = known.acceptance.child(MEMORY) if known else Acceptance(MEMORY)
            self.end(sequence.id)
            session = self._sessions[sequence.id] = Session(drafter, expected)
        session.follow(sequence.tokens)

    def _fits_in(self, sequence: Sequence, items: Mapping[str, Seq[DraftItem]]) -> bool:
        session = self._sessions[sequence.id]
        return self._telling.fits(session, sequence, items.get(session.drafter, ()))

    def _item(self, sequence: Sequence, k: int, items: Mapping[str, Seq[DraftItem]]) -> DraftItem:
        """Of an ask that has `items` already."""
        session = self._sessions[sequence.id]
        return self._telling.item(session, sequence, k, self._room(sequence) - k, items.get(session.drafter, ()))

    def end(self, session: str) -> None:
        if (known := self._sessions.pop(session, None)) is not None and known.told:
            self._telling.end(known.drafter, session)

    def take_ended(self, drafter: str) -> list[str]:
        """Sessions to tell `drafter` the end of."""
        return self._telling.take_ended(drafter)

    # Asks

    def _open(self, ask: Ask) -> Ask:
        self._drafters[ask.drafter].open[ask.awaited] = ask
        return ask

    def missed(self, ask: Ask) -> None:
        """It is not here in time. It may still come and be of use; until then nobody waits for this drafter."""
        if (drafter := self._drafters.get(ask.drafter)) is not None:
            drafter.doubted = True

    def lost(self, ask: Ask) -> None:
        """No answer will come, or none that makes sense. The drafter is told everything again the next time."""
        for _, session in self._closed(ask):
            session.told = 0
        if (drafter := self._drafters.get(ask.drafter)) is not None:
            drafter.lost(ask, self._step)

    def unsent(self, ask: Ask) -> None:
        """The bus takes no message so large: the next has fewer hidden states, or does without its largest item. The
        drafter has heard nothing."""
        if (drafter := self._drafters.get(ask.drafter)) is not None:
            drafter.closed(ask)
        bare = self._telling.too_large(ask)
        for item, session in self._closed(ask):
            session.told = min(session.told, item.base)
            if item is ask.largest and bare:
                session.refuse(self._step)

    def answered(self, ask: Ask, drafts: Iterable[Draft], unknown: Iterable[str], seconds: float) -> int:
        """Take in an answer; returns how many of its drafts are forged or misplaced and therefore ignored.

        `seconds`: how long it took. What comes true of a late one is no use to verify any more, but tells how good the
        drafter is; what is left beyond that is as good as new.
        """
        drafter, drafts = self._drafters.get(ask.drafter), list(drafts)
        if drafter is not None:
            in_time = seconds <= self._longest_wait and not (ask.awaited and drafter.doubted)
            drafter.answered(ask, max((len(d.token_ids) for d in drafts), default=0), seconds, in_time)
        if ask.paid:
            self._budget.spend(seconds)
        asked = {i.session: i for i in ask.items}
        missing = set(unknown)
        for item, session in self._closed(ask):
            if item.session in missing:
                session.unknown(item.base, self._step)
        ignored = 0
        for draft in drafts:
            if draft.session not in asked or not self._fits(draft, asked[draft.session]):
                ignored += 1
            elif draft.token_ids:
                ignored += not self._take(ask.drafter, draft, asked.pop(draft.session).k)
        for name, item in asked.items():
            busy = name in missing or len(item.token_ids) > UNREAD  # reading
            if not busy and (known := self._sessions.get(name)) is not None:
                known.nothing()
        return ignored

    def _closed(self, ask: Ask) -> list[tuple[DraftItem, Session]]:
        """No more will come of this ask. What it was about, as far as that is still its drafter's."""
        known = [(item, s) for item in ask.items if (s := self._sessions.get(item.session))]
        found = [(item, session) for item, session in known if session.drafter == ask.drafter]
        for _, session in found:
            session.probing &= ask.awaited
        return found

    def _fits(self, draft: Draft, item: DraftItem) -> bool:
        """Whether it continues what was asked about, with tokens that exist."""
        return draft.position == item.base + len(item.token_ids) and all(t < self._vocab for t in draft.token_ids)

    def _take(self, drafter: str, draft: Draft, wanted: int) -> bool:
        session = self._sessions.get(draft.session)
        return session is None or session.take(drafter, draft, wanted, self.depth)
