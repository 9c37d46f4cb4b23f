"""Clients that ask without pause, in all the ways there are, and compare what they hear with what is right."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from shared.bus.nats import NatsBus
from shared.codec import decode_event
from shared.errors import (
    BusError,
    DeadlineExceeded,
    NotKept,
    Poison,
    StreamMissing,
    TrineError,
    Unavailable,
    UnknownModel,
)
from shared.subjects import Subjects
from shared.tenants import DEFAULT_TENANT
from tests.chaos.answers import Case
from tests.chaos.oracle import HUNG, LOST, Heard, Piece, Problem, judge, judge_stored
from tests.chaos.report import Report
from trine.client import Client
from trine.missed import stored_events
from trine.stream import Stream

DEADLINE_S = 60.0
LATE_S = 5.0
TRIES = 6
RETRY_S = 0.5
CONNECT_S = 20.0
PRIORITIES = ("high", "normal", "normal", "low")
EPOCH_S = 3.0
"""So long a prompt's blocks may be shared; then it is as new."""
CANCELLED, LEFT = 0.15, 0.15
"""Shares of requests that are cancelled under way, and whose client goes away and comes back."""
READ_S = 5.0
BEFORE_S = 10.0
"""A fault so long before a request can still kill who works on it. Two workers must have died before it is given up."""


@dataclass
class Try:
    """One request."""

    id: str
    case: Case
    options: dict[str, object]
    heard: Heard
    sent: float


class Asker:
    """One that asks one thing after the other."""

    def __init__(self, name: str, url: str, model: str, seed: int, cases: Sequence[Case], report: Report) -> None:
        self._name = name
        self._url = url
        self._model = model
        self._rng = random.Random(seed)
        self._cases = cases
        self._report = report
        self._asked = 0

    async def run(self, stop: asyncio.Event) -> None:
        while not stop.is_set():
            async with self._client() as client:
                for _ in range(8):  # then with another connection
                    if not stop.is_set():
                        await self._ask(client)
                        await asyncio.sleep(self._rng.uniform(0.0, 0.3))

    @contextlib.asynccontextmanager
    async def _client(self) -> AsyncIterator[Client]:
        bus = await self._connect()
        try:
            async with Client(self._url, self._model, bus=bus) as client:
                yield client
        finally:
            await bus.close()

    async def _connect(self) -> NatsBus:
        return await NatsBus.connect(self._url, name=f"trine-client-{self._name}", wait=CONNECT_S)

    async def _ask(self, client: Client) -> None:
        """Until it is answered: who is refused asks again."""
        case, way = self._rng.choice(self._cases), self._rng.random()
        self._asked += 1
        outcome = "completed"
        for number in range(TRIES):
            asked = self._try(case, f"{self._name}-{self._asked}-{number}")
            try:
                async with asyncio.timeout(DEADLINE_S + LATE_S):
                    outcome = await self._once(client, asked, way) or outcome
                    found = [*judge(case.expected, asked.heard), *await self._stored(client, asked)]
            except (TimeoutError, DeadlineExceeded) as error:
                found = [Problem(HUNG, f"{len(asked.heard.token_ids)} tokens, then: {error!r}")]
            except Poison as error:
                if self._report.blows(asked.sent - BEFORE_S) < 2:
                    found = [Problem(LOST, error.message)]
                else:
                    await self._refused(error, number)
                    outcome = "retried"
                    continue
            except (Unavailable, BusError, UnknownModel) as error:
                await self._refused(error, number)
                outcome = "retried"
                continue
            except TrineError as error:
                found = [Problem(LOST, f"{error.code}: {error.message}")]
            self._done(asked, outcome, found)
            return
        self._report.ended(f"{self._name}-{self._asked}", outcome, [Problem(LOST, f"refused {TRIES} times")])

    async def _refused(self, error: TrineError, number: int) -> None:
        self._report.refusals[error.code] += 1
        await asyncio.sleep(RETRY_S * (number + 1))

    def _done(self, asked: Try, outcome: str, found: list[Problem]) -> None:
        if asked.heard.reason == "cancelled":
            outcome = "cancelled"
        how = f"{asked.id} ({asked.options}, {len(asked.case.token_ids)} prompt tokens)"
        self._report.ended(how, outcome, found)

    def _try(self, case: Case, name: str) -> Try:
        options: dict[str, object] = {
            **case.options,
            "priority": self._rng.choice(PRIORITIES),
            "cache_salt": str(time.monotonic() // EPOCH_S),
            "deadline_ms": int(DEADLINE_S * 1e3),
        }
        return Try(name, case, options, Heard(), time.monotonic())

    async def _once(self, client: Client, asked: Try, way: float) -> str | None:
        """Raises what the request ended with; returns how it was answered if not in the plain way."""
        expected = len(asked.case.expected.token_ids)
        turn = self._rng.randrange(expected)
        if way < CANCELLED:
            stream = self._stream(client, asked)
            await self._consume(stream, asked, cancel_at=turn)
        elif way < CANCELLED + LEFT:
            stream = await self._leave_and_resume(client, asked, turn)
        else:
            stream = self._stream(client, asked)
            await self._consume(stream, asked)
        self._end(stream, asked)
        return "resumed" if CANCELLED <= way < CANCELLED + LEFT else None

    def _stream(self, client: Client, asked: Try) -> Stream:
        return client.stream(token_ids=asked.case.token_ids, id=asked.id, **asked.options)  # type: ignore[arg-type]

    async def _consume(self, stream: Stream, asked: Try, *, cancel_at: int | None = None) -> None:
        async for delta in stream:
            asked.heard.pieces.append(Piece(delta.index, delta.token_ids, delta.text))
            if cancel_at is not None and len(asked.heard.token_ids) > cancel_at and not asked.heard.cancelled:
                asked.heard.cancelled = True
                await stream.cancel()

    async def _leave_and_resume(self, client: Client, asked: Try, turn: int) -> Stream:
        """A client of its own vanishes with its connection; another one reads on from where it was."""
        bus = await self._connect()
        async with Client(self._url, self._model, bus=bus) as first:
            stream = self._stream(first, asked)
            iterator = aiter(stream)
            async for delta in iterator:
                asked.heard.pieces.append(Piece(delta.index, delta.token_ids, delta.text))
                if len(asked.heard.token_ids) > turn:
                    break
            else:
                return stream
            await bus.close()
            with contextlib.suppress(BusError):
                await iterator.aclose()  # type: ignore[attr-defined]
        return await self._resume(client, asked)

    async def _resume(self, client: Client, asked: Try) -> Stream:
        tokens, text = len(asked.heard.token_ids), len(asked.heard.text)
        while True:
            stream = client.resume(asked.id, tokens, from_text=text, timeout=DEADLINE_S)
            try:
                await self._consume(stream, asked)
            except NotKept:
                if time.monotonic() - asked.sent > DEADLINE_S / 2:
                    raise
                continue
            return stream

    def _end(self, stream: Stream, asked: Try) -> None:
        completion, heard, now = stream.completion, asked.heard, time.monotonic()
        heard.reason, heard.seed, heard.usage = completion.finish_reason, completion.seed, completion.usage
        heard.attempts, served = completion.attempts, completion.served_by
        roles = {"decode"} | {role for role in ("prefill", "drafter") if getattr(served, role)}
        self._report.attempts[completion.attempts] += 1
        self._report.finished(roles, asked.sent, now)

    async def _stored(self, client: Client, asked: Try) -> list[Problem]:
        """What the event stream says, if it can be read now.

        A worker whose stream was lost tells all of it again, in several messages: the end may come after we look.
        """
        bus, subjects = client._connected(), Subjects(self._model)
        given_up, found = time.monotonic() + READ_S, list[Problem]()
        while time.monotonic() < given_up:
            try:
                stored = await stored_events(bus, subjects, asked.id, DEFAULT_TENANT, 0, READ_S)
            except (StreamMissing, BusError):
                return []
            if not (found := judge_stored(asked.case.expected, [decode_event(event.data) for event in stored])):
                break
            await asyncio.sleep(RETRY_S)
        return found
