"""A simulated fleet: its workers on machines, a queue, a bus, a cache; and a load that is asked of it. Pure."""

from __future__ import annotations

from collections import deque

from benchmarks.simulate_cache import Cache, Hits
from benchmarks.simulate_clock import Bus, Clock, Machine
from benchmarks.simulate_costs import Costs
from benchmarks.simulate_decode import DecodeWorker
from benchmarks.simulate_drafter import Drafter
from benchmarks.simulate_prefill import Job, PrefillWorker
from benchmarks.simulate_world import Load, Request, Result, Shape
from services.decode.affinity import Affinity
from shared.cache.summary import summarise
from shared.messages import Beat
from shared.messages import Load as WorkerLoad

REQUEST_MESSAGES = 12
"""Of a request beside its tokens: publish, pull, acks, notes and beats."""
BEAT_S = 1.0
MOST_KNOWN = 32
"""Decode workers beyond which what each pool holds is not simulated: it takes long, and a random one holds little."""
LONGEST_S = 100_000.0


class _Jobs:
    def __init__(self, clock: Clock, latency_s: float, workers: list[PrefillWorker]) -> None:
        self._clock, self._latency_s, self._workers = clock, latency_s, workers
        self._waiting: deque[Job] = deque()
        self._known: set[bytes] = set()
        self._turn = 0

    def put(self, job: Job) -> None:
        if job.name not in self._known:
            self._known.add(job.name)
            self._waiting.append(job)
            self._clock.after(self._latency_s, self._offer)

    def pull(self) -> Job | None:
        return self._waiting.popleft() if self._waiting else None

    def ended(self, job: Job) -> None:
        self._known.discard(job.name)

    def _offer(self) -> None:
        """In turn, as a queue serves those that wait."""
        for _ in range(len(self._workers)):
            if not self._waiting:
                return
            self._turn = (self._turn + 1) % len(self._workers)
            self._workers[self._turn].look()


class Fleet:
    def __init__(self, shape: Shape, costs: Costs) -> None:
        self._shape, self._costs = shape, costs
        self.clock = Clock()
        self.bus = Bus(self.clock, shape.bus)
        self._cache = Cache(self.clock, self.bus, costs.block_bytes, shape.stream_bytes, shape.machine_bytes)
        self._open: dict[str, Request] = {}
        self._queue: deque[Request] = deque()
        self._wanting: deque[DecodeWorker] = deque()
        self._done: list[Request] = []
        self._after: deque[Request] = deque()
        self._prefill: list[PrefillWorker] = []
        self._drafters: dict[str, Drafter] = {}
        self._decode: list[DecodeWorker] = []
        self._jobs = _Jobs(self.clock, shape.bus.latency_s, self._prefill)
        machines = [Machine(self.clock, costs.cores, costs.contention) for _ in range(shape.machines)]
        self._build(machines)
        self._known = shape.affinity and 1 < len(self._decode) <= MOST_KNOWN
        self._affinity = Affinity(16)
        self._beats: list[Beat] = []
        self._told: dict[str, int] = {}

    def _build(self, machines: list[Machine]) -> None:
        shape, costs = self._shape, self._costs
        for place, cores in enumerate(machines):
            for _ in range(shape.prefill):
                number = -1 - len(self._prefill)
                self._prefill.append(
                    PrefillWorker(
                        number, place, shape, costs, self.clock, cores, self._cache, self._jobs.pull, self._jobs.ended
                    )
                )
            for _ in range(shape.drafter):
                name = f"drafter-{len(self._drafters)}"
                self._drafters[name] = Drafter(name, costs, self.clock, cores, self._open)
        jobs = self._jobs if self._prefill else None
        for place, cores in enumerate(machines):
            for _ in range(shape.decode):
                self._decode.append(
                    DecodeWorker(
                        len(self._decode), place, shape, costs, self.clock, cores, self.bus, self._cache, jobs,
                        self._drafters, self,
                    )
                )  # fmt: skip

    # What workers see

    def want(self, worker: DecodeWorker) -> None:
        self._wanting.append(worker)
        self._match()

    def elsewhere(self, worker: DecodeWorker, names: list[bytes]) -> DecodeWorker | None:
        if not self._known:
            return None
        mine = worker.allocator.peek(names)
        others = [beat for beat in self._beats if beat.worker != worker.name]
        name = self._affinity.choose(names, mine, worker.scheduler.running, others)
        if name is None:
            return None
        self._affinity.took(name)
        other = next(w for w in self._decode if w.name == name)
        return other if other.scheduler.has_room else None

    def finished(self, request: Request) -> None:
        del self._open[request.id]
        self._done.append(request)
        self.bus.note(1000, REQUEST_MESSAGES)
        if self._after:
            self._ask(self._after.popleft())

    # Running

    def run(self, load: Load) -> Result:
        chances = load.acceptances or (self._costs.acceptance,) * load.requests
        asked = zip(load.prompts(), load.outputs(), chances, strict=True)
        requests = [Request(f"r{i}", prompt, output, 0.0, chance) for i, (prompt, output, chance) in enumerate(asked)]
        if load.rate:
            for request, at in zip(requests, load.arrivals(), strict=True):
                self.clock.after(at, lambda request=request: self._ask(request))  # type: ignore[misc]
        else:
            for request in requests[: load.concurrency]:
                self._ask(request)
            self._after.extend(requests[load.concurrency :])
        for worker in self._decode:
            worker.look()
        if self._known:
            self._beat()
        self.clock.run(lambda: len(self._done) == len(requests), LONGEST_S)
        return self._result()

    def _ask(self, request: Request) -> None:
        request.asked = self.clock.now
        self._open[request.id] = request
        self.clock.after(self.bus.rates.latency_s, lambda: self._arrived(request))

    def _arrived(self, request: Request) -> None:
        self._queue.append(request)
        self._match()

    def _match(self) -> None:
        while self._queue and self._wanting:
            self._wanting.popleft().take(self._queue.popleft())

    def _beat(self) -> None:
        """One view for all: each real worker has its own, some milliseconds apart."""
        self._beats = [
            Beat(
                role="decode",
                worker=w.name,
                load=WorkerLoad(running=w.scheduler.running, waiting=w.scheduler.waiting),
            )
            for w in self._decode
        ]
        for worker in self._decode:
            if self._told.get(worker.name) != worker.allocator.changes:
                self._told[worker.name] = worker.allocator.changes
                self._affinity.observe(summarise(worker.name, worker.allocator.names()))
        self.clock.after(BEAT_S / 4, self._beat)

    def _result(self) -> Result:
        done = self._done
        seconds = max((r.last for r in done), default=0.0) - min((r.asked for r in done), default=0.0)
        hits = Hits()
        for worker in self._decode:
            for name in ("pool", "machine", "nats", "prefill", "computed"):
                setattr(hits, name, getattr(hits, name) + getattr(worker.hits, name))
        roles = {
            "prefill": [w.busy_s for w in self._prefill],
            "decode": [w.busy_s for w in self._decode],
            "drafter": [w.busy_s for w in self._drafters.values()],
        }
        busy = {role: sum(each) / len(each) / max(seconds, 1e-9) for role, each in roles.items() if each}
        return Result(
            seconds=seconds,
            requests=len(done),
            tokens=sum(r.tokens for r in done),
            ttft_s=tuple(r.first - r.asked for r in done),
            tpot_s=tuple((r.last - r.first) / (r.tokens - 1) for r in done if r.tokens > 1),
            busy={**busy, "NATS": self.bus.busy_s / max(seconds, 1e-9)},
            hits=hits,
            nats_bytes=self.bus.bytes,
            nats_messages=self.bus.messages,
            drafted=sum(w.drafted for w in self._decode),
            accepted=sum(w.accepted for w in self._decode),
            steps=sum(w.steps for w in self._decode),
        )
