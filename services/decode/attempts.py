"""Which attempts at a request its workers did not survive, and what becomes of a request that nobody survives.

A worker notes each request that it goes to work on, and takes the note back when it hands the request back or lets it
wait. An attempt whose note stands, which stored no token, and whose worker is not heard any more, died with the
request. Two such attempts in a row, with no token stored in between, are enough: the request is given up and kept as a
dead letter. The second of them ran apart (`Trials`), so a bystander of another's crashes is not given up for them.

A drained or full worker takes its note back. A worker that was killed by chance counts: nobody can tell. Then its
requests are suspected, not given up, and only those that had stored no token in that attempt.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import structlog

from shared.bus.base import Bus, Job
from shared.codec import decode, encode
from shared.errors import BusError, RequestError, SequenceConflict, StreamMissing, TooLarge, TrineError
from shared.messages import MAX_SERVERS, Attempt, DeadLetter
from shared.peers import Peers
from shared.subjects import Subjects

TRIES = 2
"""Attempts in a row that their workers did not survive, after which a request is given up."""
FRESH_BEATS = 2.0
"""A worker that was heard within so many beats' time lives. Less than it takes until a dead one's work comes again."""

log = structlog.get_logger()


def unfinished(notes: Sequence[Attempt], stored: int, before: int) -> list[Attempt]:
    """Attempts earlier than `before` whose last note says that they were at work, and which stored nothing.

    `stored`: the last attempt that stored a token, 0 if none did; what went before it is forgiven.
    """
    last = {note.attempt: note for note in notes}
    return [note for number, note in sorted(last.items()) if stored < number < before and note.busy]


class Attempts:
    """`worker` and `life` are as in this worker's beats."""

    def __init__(self, worker: str, life: str, bus: Bus, subjects: Subjects, peers: Peers, beat_s: float) -> None:
        self._worker = worker
        self._life = life
        self._bus = bus
        self._subjects = subjects
        self._peers = peers
        self._beat_s = beat_s

    async def note(self, job: Job, *, busy: bool) -> None:
        """Raises nothing. A note that is lost may cost one more try."""
        try:
            await self._bus.publish(self._subject(job), self._note(job, busy))
        except BusError as error:
            log.debug("attempt not noted", seq=job.seq, error=str(error))

    async def begin(self, job: Job) -> None:
        """Note that work on the job begins; a later delivery's note is stored when this returns.

        Raises BusError.
        """
        if job.delivered == 1:  # nothing is known against it, and it should not wait
            await self.note(job, busy=True)
        else:
            await self._bus.append(self._subject(job), self._note(job, busy=True))

    async def died(self, job: Job, stored: int) -> list[Attempt]:
        """Earlier attempts that their workers did not survive, since the attempt `stored`. Raises BusError."""
        if job.delivered == 1:
            return []
        try:
            found = await self._bus.read(self._subjects.attempt_stream, self._subject(job))
        except StreamMissing:
            return []
        notes: list[Attempt] = []
        for message in found:
            try:
                notes.append(decode(message.data, Attempt))
            except RequestError:
                continue
        return [note for note in unfinished(notes, stored, job.delivered) if not self._lives(note)]

    def _lives(self, note: Attempt) -> bool:
        """It was only slow: its job was given to somebody else, and it may still be at it."""
        since = time.monotonic() - FRESH_BEATS * self._beat_s
        return note.life == self._life or self._peers.lives(note.worker, note.life, since)

    async def bury(
        self, job: Job, request_id: str, tenant: str, error: TrineError, died: Sequence[Attempt], attempts: int
    ) -> None:
        """Keep the request for operators. Raises BusError."""
        letter = DeadLetter(
            id=request_id,
            tenant=tenant,
            subject=job.subject,
            request=job.data,
            code=error.code,
            reason=error.message,
            attempts=attempts,
            workers=[note.worker for note in died][-MAX_SERVERS:],
            at=time.time(),
        )
        log.error("request given up", request=request_id, tenant=tenant, reason=error.message, workers=letter.workers)
        try:
            await self._keep(job, letter)
        except TooLarge:  # with the letter around it, it is more than this server takes
            await self._keep(job, letter.model_copy(update={"request": b""}))

    async def _keep(self, job: Job, letter: DeadLetter) -> None:
        try:
            await self._bus.append(
                self._subjects.dead(letter.id, letter.tenant), encode(letter), message_id=f"{job.seq}-{job.stamp}"
            )
        except SequenceConflict:
            log.debug("dead letter kept before", request=letter.id)

    def _subject(self, job: Job) -> str:
        return self._subjects.attempt(job.seq, job.stamp)

    def _note(self, job: Job, busy: bool) -> bytes:
        return encode(Attempt(attempt=job.delivered, worker=self._worker, life=self._life, busy=busy))
