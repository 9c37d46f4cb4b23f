"""The drafter: answers asks for draft tokens. It can slow nobody down: late drafts are not awaited."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile

import anyio
import anyio.lowlevel

from services.drafter.asks import NOTHING, Ask
from services.drafter.config import DrafterSettings
from services.drafter.scheduler import Askers, Option, Trials, choose, worth_working
from services.drafter.sessions import Session, SessionTable
from services.drafter.sources.base import Stepping, StepPlan, Wish
from services.drafter.sources.continuation import Continuation
from services.drafter.sources.head import usable
from services.drafter.sources.suffix import SuffixSource
from shared.actor import Actor
from shared.bus.base import Bus, Incoming
from shared.bus.listening import listen
from shared.codec import decode, encode
from shared.errors import ConfigError, RequestError, TrineError
from shared.messages import MAX_SESSION_TOKENS, DraftAsk, DraftItem, Load
from shared.micro import Report
from shared.telemetry import Spent
from shared.tracing import Attributes, Kind

MAX_PENDING = 256
SWEEP_S = 10.0
AT_ONCE_S = 0.004
"""A step so short is made by the event loop itself: waking another thread and coming back takes a good part of that."""
ON_THE_WAY = 0.1
"""Share of the time an asker waits that its ask and the answer take on the bus."""


class DrafterWorker(Actor):
    """The suffix source answers when the ask arrives, and so does the model with what it has guessed ahead. Further
    guesses are made in single steps, for the asks of all decode workers together.
    """

    role = "drafter"

    def __init__(
        self,
        settings: DrafterSettings,
        bus: Bus,
        worker: str,
        *,
        suffix: SuffixSource | None,
        model: Stepping | None,
        vocabulary: str,
        vocab_size: int,
    ) -> None:
        """With both sources each wish is answered by the one that promises more in the time. Raises ConfigError."""
        if suffix is None and model is None:
            raise ConfigError("a drafter needs a source of drafts", field="draft_source")
        super().__init__(settings, bus, worker)
        self._suffix = suffix
        self._model = model
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._sessions = SessionTable(settings.session_tokens)
        self._records = {source.name: source.record for source in (suffix, model) if source}
        self._askers = Askers()
        self._trials = Trials() if model is None or model.works_ahead else Trials.cheap()
        self._pending: list[Ask] = []
        self._to_step = anyio.Event()
        self._to_index = anyio.Event()
        self._stepping = False
        self._spent = Spent()

    def vocabulary(self) -> str:
        return self._vocabulary

    def hidden_size(self) -> int:
        return self._model.hidden_size if self._model else 0

    def more_counters(self) -> Mapping[str, int]:
        return self._spent.counts

    def load(self) -> Load:
        return Load(running=int(self._stepping), waiting=len(self._pending))

    def report(self, counters: Mapping[str, int]) -> Report:
        bad, subject = counters.get("bad_messages", 0), self.subjects.draft(self.worker)
        return Report("draft", subject, counters.get("asks", 0) + bad, bad, counters.get("step_ms", 0))

    async def setup(self) -> None:
        await listen(self.bus, self.subjects.draft(self.worker), self._on_ask)

    def side_tasks(self) -> dict[str, Callable[[], Awaitable[None]]]:
        return {"model": self._steps, "index": self._index, "sweep": self._sweep}

    async def drain(self) -> None:
        """Nothing to hand back: decode workers see the beat and ask elsewhere."""

    # Asks

    async def _on_ask(self, message: Incoming) -> None:
        try:
            asked = decode(message.data, DraftAsk)
        except RequestError as error:
            self.counters["bad_messages"] += 1
            self.log.warning("bad ask", error=error.message, field=error.field)
            return
        self.counters["asks"] += 1
        now = time.monotonic()
        asker_s = self._askers.asks(asked.worker, now)
        wait_s = asked.wait_ms / 1e3 * (1 - ON_THE_WAY)
        ask = Ask(asked.worker, message.reply, wait_s, now + wait_s)
        if message.headers:  # most asks are not traced
            told: Attributes = {"trine.worker": self.worker, "trine.sequences": len(asked.items)}
            ask.span = self.tracer.begin("draft", Kind.SERVER, message.headers, told)
        self._take_in(asked, ask, now)
        self._answer(ask, asker_s or wait_s)
        self._wake()
        if ask.open and len(self._pending) >= MAX_PENDING:
            self._settle_all(ask)
        if ask.open:
            self._pending.append(ask)
        else:
            await self._send(ask)

    def _take_in(self, asked: DraftAsk, ask: Ask, now: float) -> None:
        """Bring the sessions up to date and list what is wanted."""
        for name in asked.ended:
            self._sessions.end((asked.worker, name))
        named = Counter(i.session for i in asked.items)
        ask.unknown = [name for name, times in named.items() if times > 1]  # which of them to believe?
        told = [(i, self._update(asked.worker, i, now)) for i in asked.items if named[i.session] == 1]
        self._end_over()
        for item, session in told:
            if session is None:
                ask.unknown.append(item.session)
                continue
            self._learn(session)
            hidden = self._hidden(item)
            length, more = len(session.tokens), item.more
            wish = Wish(session, session.tokens, length, item.k, item.sampling, hidden, asked.least, more)
            ask.wishes.append(wish)

    def _update(self, worker: str, item: DraftItem, now: float) -> Session | None:
        """The session as it is told now; a session told what cannot be is dropped."""
        length = item.base + len(item.token_ids)
        highest = max([0, *item.token_ids, *item.sampling.logit_bias])
        if 0 < length <= MAX_SESSION_TOKENS and highest < self._vocab_size:
            return self._sessions.update(worker, item, now)
        self._sessions.end((worker, item.session))
        return None

    def _hidden(self, item: DraftItem) -> bytes:
        """The target's hidden state, if this worker reads such ones and it is one."""
        if not item.hidden or not self.hidden_size():
            return b""
        if usable(item.hidden, self.hidden_size()):
            return item.hidden
        self.counters["bad_hidden"] += 1
        return b""

    def _learn(self, session: Session) -> None:
        """Compare the last answer with what the target took, once something of that is known."""
        guess = session.guess
        if guess is not None and len(session.tokens) > guess.position:
            self._records[guess.source].learn(guess, session.tokens, session.fits[guess.source])
            session.guess = None

    # Which source

    def _answer(self, ask: Ask, asker_s: float) -> None:
        """Answer what can be answered at once; the rest is left to the model."""
        quick = [self._suffix.draft(w) if self._suffix else NOTHING for w in ask.wishes]
        depths = self._depths(ask, quick, asker_s)
        for wish, found, depth in zip(ask.wishes, quick, depths, strict=True):
            if self._model and depth:
                depth = self._model.reach(wish, depth)
                self._model.want(wish, depth)
            if self._model and depth and self._model.waits(wish):
                ask.open[wish] = (found, depth)
            else:
                self._settle(ask, wish, found, depth)

    def _depths(self, ask: Ask, quick: list[Continuation], asker_s: float) -> list[int]:
        """For each wish the model's guesses to wait for. Where the model is on trial, `quick` promises nothing."""
        model = self._model
        if model is None or self._suffix is None:
            return [model.room(w) if model else 0 for w in ask.wishes]
        options = [self._option(model, w, found) for w, found in zip(ask.wishes, quick, strict=True)]
        budget_s = max(ask.wait_s - (model.step_s if self._stepping else 0.0), 0.0)
        depths = choose(options, asker_s=asker_s, step_s=model.step_s, budget_s=budget_s)
        for index, (wish, option) in enumerate(zip(ask.wishes, options, strict=True)):
            if depths[index]:
                self._trials.paid()
            elif model.works_ahead and worth_working(option, asker_s=asker_s, step_s=model.step_s):
                model.want(wish, 0)
            elif option.model and self._trials.due():
                model.want(wish, 0)
                depths[index] = option.depth(max(int(budget_s / model.step_s), 1))
                quick[index] = replace(quick[index], expected=0.0)
        return depths

    def _option(self, model: Stepping, wish: Wish, found: Continuation) -> Option:
        return Option(found.expected, model.expected(wish), len(model.ready(wish)), model.behind(wish))

    def _settle(self, ask: Ask, wish: Wish, found: Continuation, depth: int) -> None:
        """Answer with what promises more by now: what was found, or of the model's guesses those up to `depth`."""
        guesses = self._of_target(self._model.ready(wish)[:depth]) if self._model and depth else []
        if self._model and guesses and self._model.expected(wish)[len(guesses) - 1] > found.expected:
            self._reply(ask, wish, self._model.name, guesses, self._model.kinds(wish, len(guesses)))
        else:
            self._reply(ask, wish, SuffixSource.name, found.token_ids, found.kinds)
        if self._model and depth:
            self._model.answered(wish)

    def _reply(self, ask: Ask, wish: Wish, source: str, tokens: Sequence[int], kinds: Sequence[int]) -> None:
        fit = wish.session.fits[source]
        chances = [self._records[source].chance(kind, fit) for kind in kinds]
        ask.answer(wish, source, tuple(tokens), tuple(kinds), chances)
        self.counters[f"drafted_{source}"] += len(tokens)

    def _of_target(self, guesses: Sequence[int]) -> list[int]:
        """Those before the first id that the target does not have: a draft model may have more."""
        known = list(takewhile(lambda token: token < self._vocab_size, guesses))
        self.counters["guesses_cut"] += len(guesses) - len(known)
        return known

    def _settle_all(self, ask: Ask) -> None:
        for wish, (found, depth) in list(ask.open.items()):
            self._settle(ask, wish, found, depth)

    async def _send(self, ask: Ask) -> None:
        self._askers.answered(ask.worker, time.monotonic())
        ask.span.set({"trine.drafted_tokens": sum(len(draft.token_ids) for draft in ask.drafts)})
        ask.span.end()
        if not ask.reply:
            return
        try:
            await self.bus.publish(ask.reply, encode(ask.message(self.worker)))
        except TrineError as error:
            self.counters["answers_unsent"] += 1
            self.log.debug("answer not sent", error=str(error))

    # The model

    async def _steps(self) -> None:
        """Step while there is something to do; between two steps answer those whose guesses are there."""
        while True:
            await self._to_step.wait()
            self._to_step = anyio.Event()
            while self._model and (plan := self._model.plan()):
                self._stepping = True
                await self._step(self._model, plan)
                self._stepping = False
                await self._answer_pending(self._model)
            if self._model:
                await self._answer_pending(self._model)

    async def _step(self, model: Stepping, plan: StepPlan) -> None:
        """A model that fails must not cost the other source."""
        try:
            if len(plan.sessions) * model.step_s <= AT_ONCE_S:
                out, seconds = model.run(plan)
                await anyio.lowlevel.checkpoint()
            else:
                out, seconds = await self.in_engine(model.run, plan)
            self._spent.add(round(seconds * 1e9))
            model.commit(plan, out, seconds)
        except Exception as error:
            self.counters["draft_errors"] += 1
            self.log.exception("no drafts: the step failed", sessions=len(plan.sessions))
            model.fail(plan, error)

    async def _answer_pending(self, model: Stepping) -> None:
        """Those that have what they wait for, or cannot wait for another step."""
        last_call = time.monotonic() + model.step_s
        done = [a for a in self._pending if a.until < last_call or not any(model.waits(w) for w in a.open)]
        self._pending = [a for a in self._pending if a not in done]
        for ask in done:
            self._settle_all(ask)
            await self._send(ask)

    # Beside the asks

    def _wake(self) -> None:
        if self._model and self._model.asked:
            self._to_step.set()
        if self._suffix and self._suffix.behind:
            self._to_index.set()

    async def _index(self) -> None:
        """Take in long texts, a piece at a time: asks are answered in between."""
        while True:
            await self._to_index.wait()
            self._to_index = anyio.Event()
            while self._suffix and self._suffix.behind:
                self._suffix.work()
                await anyio.lowlevel.checkpoint()

    async def _sweep(self) -> None:
        """End what askers that are gone have left."""
        while True:
            await anyio.sleep(SWEEP_S)
            self._sessions.expire(time.monotonic())
            self._end_over()

    def _end_over(self) -> None:
        for session in self._sessions.take_ended():
            if self._suffix:
                self._suffix.end(session)
            if self._model:
                self._model.end(session)
        self._wake()
