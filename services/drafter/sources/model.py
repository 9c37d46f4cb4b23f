"""A small model as the source of drafts, run through the same paged engine as the target.

It chooses with the target's own noise for each position (design: Gumbel coupling), so at any temperature a draft
is as likely to be the target's choice as the two distributions allow.

It works in single steps: between two of them new wishes are taken in, so nobody waits longer than a step for his turn.
When nobody waits it guesses on, as if its guesses were accepted, or reads prompts that nobody could wait for.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from services.drafter.record import Record
from services.drafter.sessions import Session
from services.drafter.sources.base import Wish
from services.drafter.sources.blame import Blame
from services.drafter.sources.chain import Chain
from shared.cache.blocks import BlockAllocator
from shared.cache.naming import Lineage
from shared.engine.base import StepEngine
from shared.engine.span import Span

SHORT = 16  # tokens that are computed in a step with others; more of them are read in a step of their own
READ_STEPS = 2.0  # a step that reads may take about so many times as long as another
MIN_READ, MAX_READ = 32, 512  # tokens of such a step
READ_EVERY = 4  # steps after which it is the turn of who waits for his prompt to be read
AHEAD_CHANCE = 0.2  # least chance that a guess ahead is of use
PRIORS = (0.55, 0.65, 0.7, 0.7)  # by depth in the draft, the last for all deeper ones
SMOOTHING = 0.2


@dataclass(frozen=True, slots=True)
class Plan:
    """One step."""

    sessions: tuple[Session, ...]
    spans: tuple[Span, ...]


def by_depth(count: int) -> tuple[int, ...]:
    """Kinds of the first `count` guesses of an answer."""
    return tuple(min(depth, len(PRIORS) - 1) for depth in range(count))


class ModelSource:
    """Keeps its own small KV per session. When its pool is full, those least recently drafted for lose theirs."""

    name = "model"
    works_ahead = True
    hidden_size = 0

    def __init__(self, engine: StepEngine) -> None:
        self.record = Record(PRIORS)
        self._engine = engine
        self._info = engine.info
        self._eos_ids = frozenset(i for i in engine.info.eos_ids if i < engine.info.vocab_size)
        self._allocator = BlockAllocator(engine.info.kv_blocks, engine.info.block_size)
        self._chains: dict[Session, Chain] = {}  # least recently drafted for first
        self._wishes: dict[Session, tuple[Wish, int]] = {}  # that no plan has taken in, and how many guesses
        self._ended: list[Session] = []
        self._blame = Blame()
        self._since_read = 0
        self.step_s, self._token_s = self._measure()

    def _measure(self) -> tuple[float, float]:
        """Seconds of a single step, the first of which warms up, and of each token more."""
        took: list[float] = []
        tokens = min(MIN_READ, self._info.block_size * self._info.kv_blocks, self._info.context_length)
        for count in (1, 1, 1, tokens):
            table = self._allocator.allocate(self._allocator.blocks_for(count))
            started = time.monotonic()
            self._engine.step([Span((0,) * count, 0, tuple(table), 1)])
            took.append(max(time.monotonic() - started, 1e-6))
            self._allocator.release(table)
        return took[2], max(took[3] - took[2], 0.0) / tokens

    # At any time

    @property
    def asked(self) -> bool:
        """There is something that no plan has taken in."""
        return bool(self._wishes or self._ended)

    def ready(self, wish: Wish) -> list[int]:
        """Guesses that are there already: the same that it would make now."""
        chain = self._chains.get(wish.session)
        return chain.ready(wish)[: wish.k] if chain else []

    def kinds(self, wish: Wish, count: int) -> tuple[int, ...]:
        return by_depth(count)

    def expected(self, wish: Wish) -> list[float]:
        return self.record.expected(by_depth(self.room(wish)), wish.session.fits[self.name])

    def reach(self, wish: Wish, depth: int) -> int:
        return depth

    def behind(self, wish: Wish) -> float:
        """Steps' time to read what it has not read, beyond the step of the first new guess."""
        if not self.room(wish):
            return 0.0
        chain = self._begun(wish)
        missing = wish.length + len(chain.ready(wish)) - chain.kept(wish)
        return max(missing - 1, 0) * self._token_s / self.step_s

    def room(self, wish: Wish) -> int:
        """Guesses that the model's context has room for; none for a session that it fails at."""
        return 0 if wish.session in self._blame.barred else max(min(wish.k, self._info.context_length - wish.length), 0)

    def want(self, wish: Wish, depth: int) -> None:
        """Somebody waits for `depth` guesses; with 0 it only reads and guesses ahead. The newest wish counts."""
        if self.room(wish):
            self._wishes[wish.session] = (wish, min(depth, self.room(wish)))

    def waits(self, wish: Wish) -> bool:
        """False when there are enough guesses, or there will not be: `ready` says which."""
        if (queued := self._wishes.get(wish.session)) is not None:
            return queued[0] is wish and len(self.ready(wish)) < queued[1]
        chain = self._chains.get(wish.session)
        return chain is not None and chain.wish is wish and chain.waited_for

    def answered(self, wish: Wish) -> None:
        """Nobody waits any longer; it goes on ahead."""
        queued, chain = self._wishes.get(wish.session), self._chains.get(wish.session)
        if queued is not None and queued[0] is wish:
            self._wishes[wish.session] = (wish, 0)
        if chain is not None and chain.wish is wish:
            chain.wanted = 0

    def end(self, session: Session) -> None:
        """The session is over: its blocks are free with the next plan."""
        self._wishes.pop(session, None)
        self._ended.append(session)

    # Steps

    def plan(self) -> Plan | None:
        """The next step; None when there is nothing to do."""
        self._take_in()
        while batch := self._turn():
            batch = list(self._blame.turn(batch))
            ahead = not self._chains[batch[0]].waited_for
            ready = [s for s in batch if self._cover(s, spare=batch, ahead=ahead)]
            if ready:
                return Plan(tuple(ready), tuple(self._span(self._chains[s]) for s in ready))
        return None

    def run(self, plan: Plan) -> tuple[list[list[int]], float]:
        """The tokens, and the seconds it took. Blocking; raises what the engine raises."""
        started = time.monotonic()
        out = self._engine.step(plan.spans)
        return out, time.monotonic() - started

    def commit(self, plan: Plan, out: Sequence[Sequence[int]], seconds: float) -> None:
        """The step has succeeded."""
        self._note(plan, seconds)
        self._blame.passed(plan.sessions)
        for session, span, tokens in zip(plan.sessions, plan.spans, out, strict=True):
            chain = self._chains[session]
            chain.computed = span.start + len(span.token_ids)
            chain.guess(tokens)
            self._name(chain)

    def fail(self, plan: Plan, error: Exception) -> None:
        """The step has failed: those to blame are not drafted for again. Where they are not known, each tries it alone.

        What the others hold is as it was: a step writes only beyond that.
        """
        for session in self._blame.failed(plan.sessions, error):
            self._drop(session)
            self._wishes.pop(session, None)

    def _take_in(self) -> None:
        ended, self._ended = self._ended, []
        for session in ended:
            self._drop(session)
            self._blame.ended(session)
        wishes, self._wishes = self._wishes, {}
        for session, (wish, depth) in wishes.items():
            chain = self._begun(wish)
            self._chains[session] = self._chains.pop(session)
            chain.follow(wish)
            chain.adjust(wish, self._eos_ids)
            self._allocator.release(chain.blocks_to_leave(self._info.block_size))
            chain.wanted, chain.target = depth, self._ahead(wish, depth)

    def _begun(self, wish: Wish) -> Chain:
        """The session's chain; a new one begins with what the pool holds of its prompt."""
        chain = self._chains.get(wish.session)
        if chain is None:
            tenant, salt = wish.session.scope
            chain = Chain(Lineage.of(self._engine.identity, tenant, salt), wish.tokens, wish.sampling)
            size, names = self._info.block_size, chain.names
            while len(names) < (wish.length - 1) // size and self._allocator.peek(names[-1:]) == len(names[-1:]):
                chain.lineage.extend(names, len(names) + 1, wish.tokens, size)
            chain.table = self._allocator.match(names)
            del names[len(chain.table) :]
            chain.computed = chain.length = len(names) * size
            self._chains[wish.session] = chain
        return chain

    def _ahead(self, wish: Wish, depth: int) -> int:
        """Guesses to make in all: one at least, and those that may well be of use at the next ask."""
        most = min(depth + 1 + wish.k, self._info.context_length - wish.length)
        through, fit = 1.0, wish.session.fits[self.name]
        for count, kind in enumerate(by_depth(most)):
            through *= self.record.chance(kind, fit)
            if through < AHEAD_CHANCE:
                return max(count, 1)
        return most

    def _turn(self) -> list[Session]:
        """Who steps now: those that are waited for, then guesses ahead, then prompts that nobody waits for."""
        waited = [s for s, c in self._chains.items() if c.waited_for]
        short = self._short(waited)
        long = [s for s in waited if s not in short]
        if long and (not short or self._since_read >= READ_EVERY):
            return long[:1]
        if short:
            return short
        going = [s for s, c in self._chains.items() if not c.resting]
        return self._short(going) or going[:1]

    def _short(self, sessions: Iterable[Session]) -> list[Session]:
        return [s for s in sessions if self._chains[s].missing <= SHORT]

    def _cover(self, session: Session, *, spare: Sequence[Session], ahead: bool) -> bool:
        """Blocks for all its tokens, if need be those of sessions that nobody waits for, but none of `spare`.

        False when there are not enough: the session gives back what it has, so that others fit. Guesses `ahead` cost
        nobody else his blocks; reading does those who have rested for longest.
        """
        chain = self._chains[session]
        needed = self._allocator.blocks_for(chain.length + len(chain.guesses)) - len(chain.table)
        if needed > self._allocator.available and ahead and chain.guesses:
            chain.target = 0
            return False
        resting = [s for s, c in self._chains.items() if not c.waited_for and s not in spare and s is not session]
        if needed > self._allocator.available + sum(len(self._chains[s].table) for s in resting):
            self._drop(session)
            return False
        for other in resting:
            if needed <= self._allocator.available:
                break
            self._drop(other)
        if needed > self._allocator.available:  # some of those blocks are others' too
            self._drop(session)
            return False
        chain.table += self._allocator.allocate(max(needed, 0))
        return True

    def _span(self, chain: Chain) -> Span:
        """The next tokens whose KV is missing; a guess if these are all."""
        tokens = chain.step_tokens(SHORT if chain.missing <= SHORT else self._read())
        rows = int(len(tokens) == chain.missing)
        return Span(
            tuple(tokens),
            chain.computed,
            tuple(chain.table),
            rows,
            chain.sampling.seed or 0,
            chain.sampling,
            adjustments=chain.adjustments,
        )

    def _read(self) -> int:
        """Tokens of a step that only reads."""
        most = READ_STEPS * self.step_s / max(self._token_s, 1e-9)
        return int(min(max(most, MIN_READ), MAX_READ))

    def _name(self, chain: Chain) -> None:
        """Name the blocks that are full of true tokens: sessions to come with the same beginning find them."""
        size, named = self._info.block_size, len(chain.names)
        full = min(chain.computed, chain.length) // size
        chain.lineage.extend(chain.names, full, chain.tokens, size)
        for index in range(named, full):
            self._allocator.commit(chain.table[index], chain.names[index])

    def _drop(self, session: Session) -> None:
        self._blame.passed([session])  # what it is suspected for is gone
        if (chain := self._chains.pop(session, None)) is not None:
            self._allocator.release(chain.table)

    def _note(self, plan: Plan, seconds: float) -> None:
        tokens = sum(len(s.token_ids) for s in plan.spans)
        self._since_read = self._since_read + 1 if tokens <= SHORT * len(plan.spans) else 0
        if tokens <= 2 * len(plan.spans):
            self.step_s += (seconds - self.step_s) * SMOOTHING
        elif self._since_read == 0:
            self._token_s += (max(seconds - self.step_s, 0.0) / tokens - self._token_s) * SMOOTHING
