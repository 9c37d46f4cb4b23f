"""What Trine needs from a message bus. `memory` and `nats` implement it and pass one contract suite.

Errors: `BusDisconnected` (retry later), `StreamMissing` (re-create, retry), `SequenceConflict`, `StreamFull`,
`PermissionDenied` (whatever waits for an answer or subscribes), `ConfigError` (an existing stream or consumer differs).
Every wait takes a timeout in seconds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from shared.bus.block_link import BlockLink
from shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Incoming:
    """A message from a core subscription."""

    subject: str
    data: bytes
    reply: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stored:
    """A message read from a stream. `size` is the payload's size, also when only headers were asked for."""

    subject: str
    seq: int
    data: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    size: int = 0


class Job(Protocol):
    """A message pulled from a work queue. It comes again after `ack_wait` unless ended or held.

    `handle` names this delivery to another worker, whose `Bus.adopt` makes the same job of it.
    """

    subject: str
    data: bytes
    headers: Mapping[str, str]
    seq: int
    delivered: int  # 1 for the first delivery
    stamp: int  # when it was stored, in nanoseconds: with `seq` it tells one message from all others, for good
    age: float  # seconds since it was stored, by the server's and this host's clocks; never negative
    handle: str

    async def ack(self) -> None: ...
    async def nak(self, delay: float = 0.0) -> None: ...
    async def term(self) -> None: ...
    async def hold(self) -> None:
        """Still working: start `ack_wait` again."""
        ...


@dataclass(frozen=True)
class StreamSpec:
    name: str
    subjects: tuple[str, ...]
    retention: Literal["limits", "workqueue"] = "limits"
    storage: Literal["file", "memory"] = "memory"
    discard: Literal["old", "new"] = "old"
    max_bytes: int = -1
    max_msgs: int = -1
    max_msgs_per_subject: int = -1
    max_msg_size: int = -1
    max_age: float = 0.0  # seconds; 0 keeps for ever
    allow_direct: bool = True
    replicas: int = 1
    """Servers of a cluster that keep it: more than half of them must be up for it to be there."""


@dataclass(frozen=True)
class ConsumerSpec:
    """A durable pull consumer on a work-queue stream. It takes what matches one of `filter_subjects`, which must be
    disjoint, also from those of the stream's other consumers.
    """

    stream: str
    name: str
    filter_subjects: tuple[str, ...]
    ack_wait: float = 5.0
    max_deliver: int = -1
    max_ack_pending: int = 4096

    def __post_init__(self) -> None:
        if not self.filter_subjects:
            raise ConfigError(f"consumer {self.name} of {self.stream}: no filter_subjects")


@dataclass(frozen=True)
class StreamState:
    first_seq: int
    last_seq: int
    messages: int
    bytes: int


Handler = Callable[[Incoming], Awaitable[None]]
IndexHandler = Callable[[Stored], None]


class Subscription(Protocol):
    async def unsubscribe(self) -> None: ...


class Bus(Protocol):
    """One connection. Handlers run on the event loop; one that raises is counted and logged, never lost silently."""

    @property
    def connected(self) -> bool: ...

    @property
    def authenticated(self) -> bool | None:
        """Whether the server lets in nobody without credentials, so that its permissions bind everybody. None while
        that is not known: ask again in a moment.
        """
        ...

    @property
    def max_payload(self) -> int:
        """Largest payload, headers included, that a publish may have, slack already subtracted."""
        ...

    @property
    def counters(self) -> Mapping[str, int]:
        """At least `reconnects`, `handler_errors`, `slow_consumer`."""
        ...

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Called after each reconnect (not after the first connect)."""
        ...

    def link(self) -> BlockLink:
        """A way of its own for bulk bytes, to the same servers with the same credentials; for one thread at a time."""
        ...

    async def close(self) -> None: ...

    # Core
    async def publish(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, reply: str = ""
    ) -> None:
        """Fire and forget. Raises TooLarge, BusDisconnected (nothing is buffered while disconnected).

        A message that the server does not allow is lost; it is counted and logged.
        """
        ...

    async def request(
        self, subject: str, data: bytes, timeout: float, headers: Mapping[str, str] | None = None
    ) -> Incoming: ...

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> Subscription:
        """Callback subscription; survives reconnects. Its messages are handled in order, one at a time.

        Raises PermissionDenied.
        """
        ...

    # Streams
    async def ensure_stream(self, spec: StreamSpec) -> None:
        """Create it, or compare it with `spec`; raises ConfigError naming each field that differs."""
        ...

    async def ensure_consumer(self, spec: ConsumerSpec) -> None: ...

    async def stream_state(self, stream: str) -> StreamState: ...

    async def waiting(self, stream: str, consumer: str) -> int:
        """Messages of a work queue that this consumer has not delivered yet. Raises StreamMissing."""
        ...

    async def subject_counts(self, stream: str, subject: str) -> dict[str, int]:
        """How many messages the stream has on each subject that matches `subject`, which may have wildcards.

        Subjects that come and go meanwhile may be missing. Raises StreamMissing.
        """
        ...

    async def purge(self, stream: str, subject: str) -> int:
        """Remove all messages whose subject matches `subject`, which may have wildcards; returns how many.

        Raises StreamMissing.
        """
        ...

    async def stream_of(self, subject: str) -> str | None:
        """Name of the stream that captures `subject`, None if there is none."""
        ...

    async def append(
        self,
        subject: str,
        data: bytes | Sequence[bytes | memoryview],
        *,
        headers: Mapping[str, str] | None = None,
        expect_last: int | None = None,
        message_id: str | None = None,
        timeout: float = 5.0,
    ) -> int:
        """Publish into the stream that captures `subject` and wait for its ack; returns the sequence.

        `expect_last`: the subject's last sequence must be this (0: no message yet), else SequenceConflict.
        `message_id`: a repeat within the stream's window raises SequenceConflict too.
        Raises StreamMissing when no stream captures the subject, StreamFull when it refuses.
        """
        ...

    async def pull(self, stream: str, consumer: str, batch: int, timeout: float) -> list[Job]:
        """Up to `batch` jobs; waits up to `timeout` for the first one (0: only what is there). Empty if none came."""
        ...

    def adopt(self, stream: str, handle: str, subject: str, data: bytes, headers: Mapping[str, str]) -> Job:
        """The job that another worker pulled and handed over with its `handle`: both are one delivery of one message.

        The handle is untrusted: InvalidField unless it is one of `stream`. Nothing is asked of the server, so whether
        the message is still there is not known.
        """
        ...

    async def get_many(self, stream: str, subjects: Sequence[str], timeout: float = 5.0) -> dict[str, Stored]:
        """Last message of each subject, by subject; what is missing is left out. Complete or an error."""
        ...

    async def read(
        self, stream: str, subject: str, after: int = 0, timeout: float = 5.0, limit: int | None = None
    ) -> list[Stored]:
        """All messages on one subject with sequence > `after`, in order; with `limit`, the first so many of them."""
        ...

    async def follow(self, stream: str, subject: str, handler: IndexHandler) -> Subscription:
        """Headers-only feed of a stream's messages, existing ones first, then as they come.

        Survives reconnects and re-created streams (then starts over; handlers see repeats).
        """
        ...
