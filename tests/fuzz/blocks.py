"""Fuzz targets of the shared cache's blocks as they come from the bus: frames, and pages of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from shared.bus.block_link import Item, Receive
from shared.cache import frames, naming
from shared.cache.frames import BlockMeta
from shared.cache.page import Page
from shared.errors import BusDisconnected, FrameError, TrineError
from shared.messages import MAX_ID, Identity
from shared.subjects import Subjects

IDENTITY = Identity(fingerprint="f", codec="int8", block_size=4, block_bytes=200)
PART = 128
SUBJECTS = Subjects("a model")
NEXT = b"|NEXT|"
BROKEN = b"|BROKEN|"


def blocks() -> list[tuple[BlockMeta, bytes]]:
    """Those that are asked for."""
    metas = frames.metas(naming.root(IDENTITY, "t"), range(1, 9), 4, "worker")
    return [
        (BlockMeta(m.name, m.parent, m.token_ids, m.producer, "t"), bytes(range(i, 200 + i)))
        for i, m in enumerate(metas)
    ]


def block() -> tuple[BlockMeta, bytes]:
    return blocks()[0]


def seeds_of_frames() -> list[bytes]:
    meta, payload = block()
    return [head + bytes(body) for head, body in frames.encode(meta, memoryview(payload), IDENTITY, PART)]


def check_frames(data: bytes) -> None:
    """What passes for a part of the block has that part's size and the bytes of the digest that it came with. Whoever
    may write blocks can give wrong bytes their right digest, and the fuzzer finds out how: it sees what is compared.
    """
    with contextlib.suppress(FrameError):
        head = frames.read_head(_Pieces(data).exactly)
        frames.decode_apart(head, memoryview(data)[len(head) :])
    try:
        frame = frames.decode(data)
    except FrameError:
        return
    meta, payload = block()
    for part in range(frames.part_count(len(payload), PART)):
        try:
            frames.verify(frame, meta, IDENTITY, part, PART)
        except FrameError:
            continue
        assert len(frame.body) == len(payload[part * PART : (part + 1) * PART])
        assert frames.sha256(frame.body) == frame.digest and frame.digest in data


class _Pieces:
    """A message's payload as a link hands it out: it refuses more than there is."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.left = len(data)

    def exactly(self, count: int) -> bytes:
        assert count <= frames.MAX_HEAD, "room is asked for that no head needs"
        return self._take(count)

    def into(self, place: memoryview) -> None:
        place[:] = self._take(place.nbytes)

    def _take(self, count: int) -> bytes:
        if not 0 <= count <= self.left:
            raise FrameError("too short")
        at = len(self._data) - self.left
        self.left -= count
        return self._data[at : at + count]


class _Link:
    """Answers a batched get with what it was given: messages, each for the subject that its first byte says."""

    def __init__(self, data: bytes) -> None:
        said, broken, _ = data.partition(BROKEN)
        self._messages, self._broken = said.split(NEXT), bool(broken)

    def get(self, stream: str, subjects: Sequence[str], receive: Receive, deadline: float) -> None:
        left = list(subjects)
        for sequence, message in enumerate(self._messages, 1):
            if not message or message[0] >= len(left):
                continue
            reader = _Pieces(message[1:])
            with contextlib.suppress(FrameError):
                receive(left.pop(message[0]), sequence, reader.left, reader)
        if self._broken:
            raise BusDisconnected("in the middle")

    def put(self, items: Sequence[Item], deadline: float) -> list[int | TrineError]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def seeds_of_pages() -> list[bytes]:
    parts = [
        head + bytes(body)
        for meta, data in blocks()
        for head, body in frames.encode(meta, memoryview(data), IDENTITY, PART)
    ]
    right = NEXT.join(b"\0" + part for part in parts)
    mixed = NEXT.join([b"\1" + parts[0], b"\0" + parts[1], b"\0" + parts[2][:-1], b"\0" + parts[3] + b"x"])
    return [right, right + BROKEN, mixed, b"\0" + parts[0]]


def check_pages(data: bytes) -> None:
    """A block is whole if each part has come with its digest; of every other one it is known that it is not there or is
    damaged."""
    wanted = [(meta, payload, memoryview(bytearray(len(payload)))) for meta, payload in blocks()]
    page = Page([(meta, place) for meta, _, place in wanted], SUBJECTS, IDENTITY, PART)
    page.receive(_Link(data), deadline=0.0)
    page.check()
    names = {meta.name for meta, _, _ in wanted}
    for meta, payload, place in wanted:
        if whole := page.whole.get(meta.name):
            parts = [place[start : start + PART] for start in range(0, len(payload), PART)]
            assert all(frames.sha256(part) in data for part in parts) and len(whole.sequences) == len(parts)
            assert len(whole.producer) <= MAX_ID  # whoever it is: nothing proves that
    damaged = {name for name, _ in page.damaged}
    assert damaged <= names - page.whole.keys()
    assert page.gone == (damaged if page.failed else names - page.whole.keys())
