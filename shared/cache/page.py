"""One batched get: parts go straight into their blocks' places as they arrive, and are checked afterwards. Blocking."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.bus.block_link import BlockLink, Reader
from shared.cache import frames
from shared.cache.frames import BlockMeta, Frame
from shared.errors import FrameError, TrineError
from shared.messages import Identity
from shared.subjects import Subjects


@dataclass(frozen=True, slots=True)
class _Part:
    meta: BlockMeta
    number: int
    place: memoryview


@dataclass(frozen=True, slots=True)
class _Arrival:
    part: _Part
    sequence: int
    frame: Frame


@dataclass(frozen=True, slots=True)
class Whole:
    """A block that is here, whole and right: who computed it, and the sequence of each part."""

    producer: str
    sequences: tuple[int, ...]


class Page:
    """`receive` in a thread, then `check` in a thread: the next page may arrive while this one is checked."""

    def __init__(
        self, batch: Sequence[tuple[BlockMeta, memoryview]], subjects: Subjects, identity: Identity, part_bytes: int
    ) -> None:
        """`batch`: what is wanted, and where its bytes go."""
        self.whole: dict[bytes, Whole] = {}
        self.damaged: dict[tuple[bytes, int], int] = {}
        """The sequence of each bad part, by (name, part)."""
        self.failed = False
        """The bus was in trouble: what is missing may exist."""
        self._stream = subjects.block_stream
        self._identity = identity
        self._part_bytes = part_bytes
        self._parts = frames.part_count(identity.block_bytes, part_bytes)
        self._arrivals: list[_Arrival] = []
        self._wanted = {
            subjects.block(meta.name, part, meta.scope): _Part(
                meta, part, place[part * part_bytes : (part + 1) * part_bytes]
            )
            for meta, place in batch
            for part in range(self._parts)
        }

    def receive(self, link: BlockLink, deadline: float) -> None:
        try:
            link.get(self._stream, list(self._wanted), self._take, deadline)
        except TrineError:
            self.failed = True

    def _take(self, subject: str, sequence: int, size: int, reader: Reader) -> None:
        part = self._wanted[subject]
        try:
            head = frames.read_head(reader.exactly)
            if reader.left != part.place.nbytes:
                raise FrameError(f"{subject}: {reader.left} bytes; the part has {part.place.nbytes}")
            reader.into(part.place)
            self._arrivals.append(_Arrival(part, sequence, frames.decode_apart(head, part.place)))
        except FrameError:
            self.damaged[part.meta.name, part.number] = sequence
            raise

    def check(self) -> None:
        good: dict[bytes, dict[int, _Arrival]] = {}
        for arrival in self._arrivals:
            part = arrival.part
            try:
                frames.verify(arrival.frame, part.meta, self._identity, part.number, self._part_bytes)
            except FrameError:
                self.damaged[part.meta.name, part.number] = arrival.sequence
            else:
                good.setdefault(part.meta.name, {})[part.number] = arrival
        for name, parts in good.items():
            if len(parts) == self._parts:
                sequences = tuple(parts[number].sequence for number in range(self._parts))
                self.whole[name] = Whole(parts[0].frame.producer, sequences)

    @property
    def gone(self) -> set[bytes]:
        """Blocks that are not in the stream as they should be."""
        if self.failed:
            return {name for name, _ in self.damaged}
        return {part.meta.name for part in self._wanted.values()} - self.whole.keys()
