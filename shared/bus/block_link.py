"""Messages into a stream and out of it in bulk, for threads that block.

`StreamLink` (`shared.bus.bulk_stream`) implements it on a connection of its own, `BusLink` (`shared.bus.bus_link`) over
any `Bus`. A link is for one thread at a time; two threads take two links.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from shared.errors import TrineError

WINDOW_COUNT = 16
"""Acks in flight; more overrun the server's ingest queue."""


class Reader(Protocol):
    """The payload of one message, taken piece by piece. `left`: bytes not taken yet."""

    left: int

    def exactly(self, count: int) -> bytes:
        """The next `count` bytes. Raises FrameError when the message has fewer."""
        ...

    def into(self, place: memoryview) -> None:
        """The next bytes, as many as `place` has, straight into it. Raises FrameError when the message has fewer."""
        ...


Receive = Callable[[str, int, int, Reader], None]
"""(subject, sequence, bytes, payload): takes one stored message. What it leaves of the payload is thrown away."""


@dataclass(frozen=True, slots=True)
class Item:
    """A message to store: `parts` one after another, which must not change meanwhile.

    `expect_last`: the subject's last sequence must be this (0: no message yet).
    """

    subject: str
    parts: Sequence[bytes | memoryview]
    expect_last: int = 0

    @property
    def size(self) -> int:
        return sum(memoryview(part).nbytes for part in self.parts)


class BlockLink(Protocol):
    """Blocking. `deadline` is a time of `time.monotonic`, and every call ends by then."""

    def put(self, items: Sequence[Item], deadline: float) -> list[int | TrineError]:
        """Store them; returns each one's sequence, or why it is not known to be stored. Raises nothing of that kind.

        SequenceConflict: something else, or this very item from a try whose ack was lost, is there. StreamMissing: no
        stream captures the subject. TooLarge. StreamFull: the stream still refused at the deadline. PermissionDenied:
        one of the items is not allowed, and with it ends the whole call. BusDisconnected.
        """
        ...

    def get(self, stream: str, subjects: Sequence[str], receive: Receive, deadline: float) -> None:
        """Hand the last message of each subject to `receive`, each once, in order of sequence within a page. When this
        returns, the others do not exist.

        `receive` may raise FrameError: that message is dropped, the rest goes on. Its other errors end the call, and
        so does trouble: StreamMissing, PermissionDenied, BusDisconnected, BusError. What was handed over before stays
        good.
        """
        ...

    def close(self) -> None:
        """For good, from any thread; a call that waits ends."""
        ...
