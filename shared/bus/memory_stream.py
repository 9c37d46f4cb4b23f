"""A stream and its work-queue consumers as plain objects: no I/O, and the time is an argument.

`now` is in seconds on any clock that never runs backwards. The rules are those of a JetStream stream with one replica;
the contract suite holds both to them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from shared.bus.base import ConsumerSpec, StreamSpec, StreamState
from shared.bus.wire import header_bytes, matches
from shared.errors import SequenceConflict, StreamFull, TooLarge

DEDUPE_WINDOW = 120.0
_OVERHEAD = 16
_generations = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Record:
    subject: str
    seq: int
    data: bytes
    headers: Mapping[str, str]
    stored: float

    @property
    def size(self) -> int:
        return len(self.data) + header_bytes(self.headers)

    @property
    def cost(self) -> int:
        """What it counts towards `max_bytes`."""
        return self.size + len(self.subject) + _OVERHEAD


class MemoryStream:
    """Messages in order of sequence, with the limits of `spec`.

    `generation` differs between two streams of one name, so that a reader notices a re-created one.
    """

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.generation = next(_generations)
        self.consumers: dict[str, MemoryConsumer] = {}
        self._records: dict[int, Record] = {}
        self._by_subject: dict[str, dict[int, None]] = {}
        self._ids: dict[str, float] = {}
        self._bytes = 0
        self._last_seq = 0

    def captures(self, subject: str) -> bool:
        return any(matches(pattern, subject) for pattern in self.spec.subjects)

    def append(
        self,
        subject: str,
        data: bytes,
        headers: Mapping[str, str],
        now: float,
        expect_last: int | None = None,
        message_id: str | None = None,
    ) -> int:
        """Store a message and return its sequence. Raises TooLarge, SequenceConflict, StreamFull."""
        self.expire(now)
        record = Record(subject, self._last_seq + 1, data, dict(headers), now)
        if 0 <= self.spec.max_msg_size < record.size:
            raise TooLarge(f"{record.size} bytes; stream {self.spec.name} takes at most {self.spec.max_msg_size}")
        if message_id is not None and message_id in self._ids:
            raise SequenceConflict(f"message id {message_id} was stored before in {self.spec.name}")
        if expect_last is not None and expect_last != self.last_of(subject):
            raise SequenceConflict(f"{subject}: last sequence is {self.last_of(subject)}, not {expect_last}")
        self._refuse_if_full(record)
        self._store(record)
        if message_id is not None:
            self._ids[message_id] = now
        self._enforce_limits(subject)
        return record.seq

    def last_of(self, subject: str) -> int:
        """Sequence of the last message on `subject`, 0 without one."""
        return next(reversed(self._by_subject.get(subject, {})), 0)

    def last(self, subject: str) -> Record | None:
        return self._records.get(self.last_of(subject))

    def get(self, seq: int) -> Record | None:
        return self._records.get(seq)

    def on_subject(self, subject: str, after: int) -> list[Record]:
        return [self._records[seq] for seq in self._by_subject.get(subject, ()) if seq > after]

    def after(self, seq: int) -> Iterator[Record]:
        """Messages with a higher sequence, in order."""
        first = max(seq + 1, self.state().first_seq)
        yield from (record for s in range(first, self._last_seq + 1) if (record := self._records.get(s)))

    def remove(self, seq: int) -> None:
        record = self._records.pop(seq, None)
        if record is None:
            return
        self._bytes -= record.cost
        on_subject = self._by_subject[record.subject]
        del on_subject[seq]
        if not on_subject:
            del self._by_subject[record.subject]

    def counts(self, pattern: str) -> dict[str, int]:
        """Number of messages on each subject that matches."""
        return {subject: len(seqs) for subject, seqs in self._by_subject.items() if matches(pattern, subject)}

    def purge(self, pattern: str) -> int:
        """Remove what is on subjects that match; returns how many messages that were."""
        gone = [seq for subject in self.counts(pattern) for seq in self._by_subject[subject]]
        for seq in gone:
            self.remove(seq)
            for consumer in self.consumers.values():
                consumer.forget(seq)
        return len(gone)

    def expire(self, now: float) -> None:
        """Forget what is older than `max_age`, and message ids older than their window."""
        max_age = self.spec.max_age
        window = min(DEDUPE_WINDOW, max_age) if max_age else DEDUPE_WINDOW
        while self._ids and now - next(iter(self._ids.values())) >= window:
            del self._ids[next(iter(self._ids))]
        while max_age and self._records and now - self._oldest().stored >= max_age:
            self.remove(self._oldest().seq)

    def state(self) -> StreamState:
        first = self._oldest().seq if self._records else (self._last_seq + 1 if self._last_seq else 0)
        return StreamState(first, self._last_seq, len(self._records), self._bytes)

    def _oldest(self) -> Record:
        return next(iter(self._records.values()))

    def _refuse_if_full(self, record: Record) -> None:
        spec = self.spec
        if spec.discard == "old":
            return
        if 0 <= spec.max_msgs <= len(self._records) or 0 <= spec.max_bytes < self._bytes + record.cost:
            raise StreamFull(f"stream {spec.name} is full")

    def _store(self, record: Record) -> None:
        self._last_seq = record.seq
        self._records[record.seq] = record
        self._by_subject.setdefault(record.subject, {})[record.seq] = None
        self._bytes += record.cost

    def _enforce_limits(self, subject: str) -> None:
        spec = self.spec
        on_subject = self._by_subject[subject]
        while 0 <= spec.max_msgs_per_subject < len(on_subject):
            self.remove(next(iter(on_subject)))
        while 0 <= spec.max_msgs < len(self._records) or 0 <= spec.max_bytes < self._bytes:
            self.remove(self._oldest().seq)


@dataclass
class _Delivery:
    record: Record
    due: float
    """When it may be delivered again."""
    delivered: int = 1


@dataclass
class MemoryConsumer:
    """Explicit acks: what is neither acked nor held for `ack_wait` seconds is delivered again."""

    spec: ConsumerSpec
    stream: MemoryStream
    _cursor: int = 0
    _pending: dict[int, _Delivery] = field(default_factory=dict)

    def take(self, batch: int, now: float) -> list[tuple[Record, int]]:
        """Up to `batch` messages with their delivery counts; those that come again go first."""
        taken: list[tuple[Record, int]] = []
        for seq, delivery in list(self._pending.items()):
            if len(taken) == batch:
                return taken
            if delivery.due > now:
                continue
            if self.stream.get(seq) is None or 0 <= self.spec.max_deliver <= delivery.delivered:
                del self._pending[seq]  # past max_deliver the message itself stays in the stream
                continue
            delivery.delivered += 1
            delivery.due = now + self.spec.ack_wait
            taken.append((delivery.record, delivery.delivered))
        for record in self.stream.after(self._cursor):
            if len(taken) == batch or 0 < self.spec.max_ack_pending <= len(self._pending):
                break
            self._cursor = record.seq
            if any(matches(pattern, record.subject) for pattern in self.spec.filter_subjects):
                self._pending[record.seq] = _Delivery(record, now + self.spec.ack_wait)
                taken.append((record, 1))
        return taken

    @property
    def waiting(self) -> int:
        """Messages that were not delivered yet."""
        filters = self.spec.filter_subjects
        return sum(any(matches(f, record.subject) for f in filters) for record in self.stream.after(self._cursor))

    def next_due(self) -> float | None:
        """When the earliest of the delivered messages may come again; None when none is out."""
        return min((delivery.due for delivery in self._pending.values()), default=None)

    def done(self, seq: int) -> None:
        """Acked or terminated. An ack that comes late, after a redelivery, counts all the same."""
        self._pending.pop(seq, None)
        if self.stream.spec.retention == "workqueue":
            self.stream.remove(seq)

    def forget(self, seq: int) -> None:
        """The stream has it no more."""
        self._pending.pop(seq, None)

    def again(self, seq: int, due: float) -> None:
        """Deliver it again at `due` unless it is ended before."""
        if delivery := self._pending.get(seq):
            delivery.due = due
