"""The shared prefix cache of a simulated fleet: which block is where, and who waits for which. Pure."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from benchmarks.simulate_clock import Bus, Clock


@dataclass(slots=True)
class Tier:
    """The oldest blocks go first, as in the stream and in a machine's memory."""

    room: int
    """Blocks."""
    blocks: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def put(self, name: bytes) -> None:
        if name not in self.blocks:
            self.blocks[name] = None
            while len(self.blocks) > self.room:
                self.blocks.popitem(last=False)


@dataclass(slots=True)
class Hits:
    """Blocks of prompts, by where they were found."""

    pool: int = 0
    machine: int = 0
    nats: int = 0
    prefill: int = 0
    """Computed by a prefill worker for this request or another one at the same time."""
    computed: int = 0
    """By the decode worker itself."""


class Cache:
    """One stream, and the memory of each machine."""

    def __init__(self, clock: Clock, bus: Bus, block_bytes: int, stream_bytes: int, machine_bytes: int) -> None:
        self._clock = clock
        self._bus = bus
        self._block_bytes = block_bytes
        self._machine_room = machine_bytes // block_bytes
        self._stream = Tier(stream_bytes // block_bytes)
        self._machines: dict[int, Tier] = defaultdict(lambda: Tier(self._machine_room))
        self._waiting: dict[bytes, list[Callable[[], None]]] = {}
        self.flights: dict[bytes, int] = {}
        """Blocks that are being computed or on their way, and by which worker."""

    def longest(self, machine: int, names: Sequence[bytes]) -> int:
        """How many of `names`, from the first on, are somewhere."""
        near = self._machines[machine].blocks
        for length, name in enumerate(names):
            if name not in near and name not in self._stream.blocks:
                return length
        return len(names)

    def fetch(self, machine: int, names: Sequence[bytes], done: Callable[[int, int], None]) -> None:
        """All of these, which are there: `done(from the machine's memory, from NATS)`."""
        near = sum(name in self._machines[machine].blocks for name in names)
        far = len(names) - near
        for name in names:
            self._machines[machine].put(name)  # read once, shared with its neighbours
        seconds = near * self._block_bytes / self._bus.rates.memory_bytes_per_s

        def arrived() -> None:
            self._clock.after(seconds, lambda: done(near, far))

        if far:
            self._bus.send(far * self._block_bytes, far + 1, arrived)
        else:
            arrived()

    def publish(self, machine: int, names: Sequence[bytes], done: Callable[[], None] = lambda: None) -> None:
        """Neighbours find them at once, others when they have been sent; `done` then."""
        for name in names:
            self._machines[machine].put(name)
            if self._machine_room:
                self._told(name)
        new = [name for name in names if name not in self._stream.blocks]

        def stored() -> None:
            for name in names:
                self._stream.put(name)
                self.flights.pop(name, None)
                self._told(name)
            done()

        self._bus.send(len(new) * self._block_bytes, 2 * len(new), stored)

    def wait(self, name: bytes, call: Callable[[], None]) -> None:
        """`call` once, when the block can be fetched (perhaps not by a worker of another machine yet)."""
        self._waiting.setdefault(name, []).append(call)

    def _told(self, name: bytes) -> None:
        for call in self._waiting.pop(name, ()):
            self._clock.after(self._bus.rates.latency_s, call)
