"""A simulated decode worker: the real scheduler and drafting policy, a machine's time in place of an engine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from benchmarks.simulate_cache import Cache, Hits
from benchmarks.simulate_clock import Bus, Clock, Machine
from benchmarks.simulate_costs import Costs
from benchmarks.simulate_drafter import Drafter
from benchmarks.simulate_loading import Loader, Queue
from benchmarks.simulate_world import BLOCK, LINEAGE, VOCABULARY, Request, Shape
from services.decode.drafters import Ask
from services.decode.scheduler import DecodeScheduler
from services.decode.sequence import Outcome, Sequence, Work
from services.decode.speculation import DraftBook
from shared.cache.blocks import BlockAllocator
from shared.engine.base import Sampled
from shared.messages import Draft, Sampling

CONTEXT = 8192
EVENT_BYTES, EVENT_MESSAGES = 300, 3
"""Of a sequence's tokens of one step: published, acked and heard."""
GREEDY = Sampling(temperature=0.0)


class Fleet(Protocol):
    """What a worker sees of the others."""

    def want(self, worker: DecodeWorker) -> None:
        """It has room for a request, which comes at once or later."""

    def elsewhere(self, worker: DecodeWorker, names: list[bytes]) -> DecodeWorker | None:
        """Who should have a prompt of these blocks instead."""

    def finished(self, request: Request) -> None: ...


class DecodeWorker:
    def __init__(
        self,
        number: int,
        machine: int,
        shape: Shape,
        costs: Costs,
        clock: Clock,
        cores: Machine,
        bus: Bus,
        cache: Cache,
        jobs: Queue | None,
        drafters: Mapping[str, Drafter],
        fleet: Fleet,
    ) -> None:
        self.name = f"decode-{number}"
        self._shape, self._costs, self._clock, self._cores = shape, costs, clock, cores
        self._bus, self._cache, self._machine = bus, cache, machine
        self._drafters, self._fleet = drafters, fleet
        self.allocator = BlockAllocator(shape.pool_blocks, BLOCK)
        self.scheduler = DecodeScheduler(
            self.allocator,
            block_size=BLOCK,
            context_length=CONTEXT,
            max_running=shape.max_running,
            step_tokens=shape.step_tokens,
            mixed_tokens=shape.mixed_tokens,
        )
        self.hits = Hits()
        self._loader = Loader(number, machine, shape, clock, cache, self.scheduler, jobs, self.hits, self._step)
        self._book = DraftBook(
            shape.draft_depth, VOCABULARY, longest_wait=shape.draft_wait_s, step_tokens=shape.step_tokens
        )
        self._requests: dict[str, tuple[Request, Sequence]] = {}
        self._taking = False
        self._stepping = False
        self.busy_s = 0.0
        self.drafted = self.accepted = self.steps = 0

    # Taking requests

    def look(self) -> None:
        """There may be room: one request at a time is taken in."""
        if self.scheduler.has_room and not self._taking:
            self._taking = True
            self._fleet.want(self)

    def take(self, request: Request) -> None:
        self._clock.after(self._costs.intake_s, lambda: self._taken(request))

    def _taken(self, request: Request) -> None:
        self._taking = False
        sequence = Sequence(
            request.id,
            list(request.prompt),
            len(request.prompt),
            LINEAGE,
            request.output,
            GREEDY,
            seed=0,
        )
        sequence.name_blocks((len(sequence.tokens) - 1) // BLOCK, BLOCK)
        if (other := self._fleet.elsewhere(self, sequence.names)) is not None:
            self._clock.after(2 * self._bus.rates.latency_s, lambda: other.serve(request, sequence))
        else:
            self.serve(request, sequence)
        self.look()

    def serve(self, request: Request, sequence: Sequence) -> None:
        self._requests[request.id] = request, sequence
        self.scheduler.submit(sequence)
        self._step()

    def _admit(self) -> None:
        admitted = self.scheduler.admit()
        for sequence in admitted:
            self._loader.load(sequence)
        if admitted:
            self.look()

    # Steps

    def _step(self) -> None:
        if self._stepping:
            return
        self._admit()
        works = self.scheduler.plan()
        if not works:
            return
        self._stepping = True
        self.steps += 1
        started = self._clock.now
        seconds = self._costs.step_s([w.span for w in works])

        def done() -> None:
            took = self._clock.now - started
            self.busy_s += took
            if self._drafters and all(len(w.span.token_ids) == 1 + w.drafts for w in works):
                engine_s = took * seconds / (seconds + self._costs.host_s)
                self._book.stepped(len(works), len(works) + sum(w.drafts for w in works), engine_s)
            self._complete(works)

        self._cores.run(seconds + self._costs.host_s, done)

    def _complete(self, works: list[Work]) -> None:
        sampled = [Sampled(self._sampled(work)) for work in works]
        for outcome in self.scheduler.complete(works, sampled):
            self._deliver(outcome)
        self._draft()

    def _sampled(self, work: Work) -> list[int]:
        request, first = self._requests[work.sequence.id][0], len(work.sequence.tokens)
        return [request.target(first + row) for row in range(work.span.rows)]

    def _deliver(self, outcome: Outcome) -> None:
        sequence = outcome.sequence
        request, _ = self._requests[sequence.id]
        if outcome.filled:
            self._cache.publish(self._machine, [sequence.names[i] for i in outcome.filled])
            self.hits.computed += sum(i < sequence.prompt_len // BLOCK for i in outcome.filled)
        if not outcome.tokens:
            return
        self.drafted += outcome.drafted
        self.accepted += outcome.accepted
        request.last = self._clock.now + self._bus.rates.latency_s
        request.first = request.first or request.last
        request.tokens += len(outcome.tokens)
        self._bus.note(EVENT_BYTES, EVENT_MESSAGES)
        if request.tokens >= request.output:
            self.scheduler.end(sequence)
            self._book.end(sequence.id)
            del self._requests[sequence.id]
            self._fleet.finished(request)
            self.look()

    # Drafts

    def _generating(self) -> list[Sequence]:
        return [sequence for _, sequence in self._requests.values() if sequence.generating]

    def _draft(self) -> None:
        """Ask, wait as long as it is worth, and take the next step."""
        if not self._drafters:
            self._next()
            return
        asks, wait = self._book.plan(self._generating(), list(self._drafters))
        open_ = set(map(id, asks))
        over = False

        def go_on() -> None:
            nonlocal over
            if over:
                return
            over = True
            for ask in asks:
                if id(ask) in open_:
                    self._book.missed(ask)
            for probe in self._book.probes(self._generating()):
                self._ask(probe, lambda: None)
            self._book.settle(self._generating())
            self._next()

        if not asks:
            go_on()
            return
        for ask in asks:

            def answered(ask: Ask = ask) -> None:
                open_.discard(id(ask))
                if not open_:
                    go_on()

            self._ask(ask, answered)
        self._clock.after(wait, go_on)

    def _ask(self, ask: Ask, done: Callable[[], None]) -> None:
        asked, latency = self._clock.now, self._bus.rates.latency_s
        self._bus.note(EVENT_BYTES * len(ask.items), 2)
        self._book.take_ended(ask.drafter)

        def arrived(drafts: list[Draft]) -> None:
            self._book.answered(ask, drafts, (), self._clock.now - asked)
            done()

        def answer(drafts: list[Draft]) -> None:
            self._clock.after(latency, lambda: arrived(drafts))

        self._clock.after(latency, lambda: self._drafters[ask.drafter].ask(ask, answer))

    def _next(self) -> None:
        self._stepping = False
        self._step()
