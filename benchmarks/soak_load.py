"""Mixed load: streams, whole answers, cancels, clients that leave or vanish, long and short, with common prefixes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from itertools import islice
from types import TracebackType
from typing import TypedDict

from benchmarks.soak_readings import Done
from shared.bus.nats import NatsBus
from shared.errors import BusError, DeadlineExceeded, InvalidField, TrineError
from trine.client import Client
from trine.stream import Stream

AT_ONCE = 16
CLIENTS = 4
LIMIT_MS = 60_000
SOON_MS = 120
PREFIXES = 6
WEIGHTS = {"whole": 4, "stream": 4, "cancel": 2, "leave": 2, "vanish": 1, "expire": 1, "refused": 1, "resume": 1}


@dataclass(frozen=True, slots=True)
class Ask:
    kind: str
    prompt: str
    max_tokens: int
    temperature: float
    """0 or 1, half each."""
    patience: int
    """Tokens until the client does what is its kind."""


class _Fields(TypedDict):
    max_tokens: int
    temperature: float
    seed: int


def asks(name: str) -> Iterator[Ask]:
    """The same sequence for each name but for the first words of prompts: no round finds the blocks of another."""
    rng = random.Random(7)
    words = [f"{rng.choice('bcdfgklmnprst')}{rng.choice('aeiou')}{rng.choice('lnrst')}" for _ in range(60)]
    starts = [f"{name} {i} " + " ".join(rng.choices(words, k=60)) for i in range(PREFIXES)]
    number = 0
    while True:
        number += 1
        start = rng.choice(starts) if rng.random() < 0.5 else f"{name} number {number}"
        rest = " ".join(rng.choices(words, k=rng.choice((2, 10, 90))))
        (kind,) = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
        yield Ask(kind, f"{start} {rest}", rng.choice((4, 24, 150)), float(rng.random() < 0.5), rng.randrange(0, 12))


class Clients:
    """Several connections that stay, and one more for each client that vanishes."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._model = model
        self._exit = AsyncExitStack()
        self._turn = 0

    async def __aenter__(self) -> Clients:
        self._open = [await self._exit.enter_async_context(Client(self._url, self._model)) for _ in range(CLIENTS)]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit.aclose()

    async def timed(self, name: str, seconds: float) -> Done:
        """As many requests as can be answered in this time."""
        ends = time.monotonic() + seconds
        return await self._run(_until(ends, asks(name)))

    async def counted(self, name: str, count: int) -> Done:
        return await self._run(islice(asks(name), count))

    async def _run(self, source: Iterable[Ask]) -> Done:
        done, line = Done(), iter(source)
        started = time.monotonic()
        await asyncio.gather(*(self._one_after_another(line, done) for _ in range(AT_ONCE)))
        done.seconds = time.monotonic() - started
        return done

    async def _one_after_another(self, line: Iterator[Ask], done: Done) -> None:
        for ask in line:
            self._turn += 1
            client = self._open[self._turn % CLIENTS]
            kinds: dict[str, Callable[[Client, Ask], Awaitable[None]]] = {
                "whole": _whole,
                "stream": _stream,
                "cancel": _cancel,
                "leave": _leave,
                "vanish": self._vanish,
                "expire": _expire,
                "refused": _refused,
                "resume": self._resume,
            }
            try:
                await kinds[ask.kind](client, ask)
            except (TrineError, AssertionError) as error:
                done.failed.append(f"{ask.kind}: {type(error).__name__}: {error}")
            else:
                done.count(ask.kind)

    async def _vanish(self, client: Client, ask: Ask) -> None:
        """Its connection is gone without a word: nobody cancels, the answer is made for nobody."""
        bus = await NatsBus.connect(self._url, name="vanishing", wait=5.0)
        stream = Client(self._url, self._model, bus=bus).stream(ask.prompt, **_fields(ask))
        await _read(stream, ask.patience, bus.close)
        await bus.close()

    async def _resume(self, client: Client, ask: Ask) -> None:
        """Another client reads the rest while the first one reads too."""
        other = self._open[(self._turn + 1) % CLIENTS]
        async with client.stream(ask.prompt, **_fields(ask)) as stream:
            had = 0
            async for delta in stream:
                had += len(delta.token_ids)
                if had > ask.patience:
                    async with other.resume(stream.id, had, timeout=LIMIT_MS / 1e3) as rest:
                        async for delta in rest:
                            had += len(delta.token_ids)
                    assert had == len(rest.completion.token_ids), f"{had} of {len(rest.completion.token_ids)} tokens"
                    break


def _until(ends: float, source: Iterator[Ask]) -> Iterator[Ask]:
    while time.monotonic() < ends:
        yield next(source)


def _fields(ask: Ask) -> _Fields:
    return {"max_tokens": ask.max_tokens, "temperature": ask.temperature, "seed": ask.patience}


async def _whole(client: Client, ask: Ask) -> None:
    answer = await client.generate(ask.prompt, deadline_ms=LIMIT_MS, **_fields(ask))
    assert len(answer.token_ids) == answer.usage.completion_tokens, "the answer has other tokens than it says"


async def _stream(client: Client, ask: Ask) -> None:
    async with client.stream(ask.prompt, deadline_ms=LIMIT_MS, **_fields(ask)) as stream:
        tokens = [token async for delta in stream for token in delta.token_ids]
    assert tuple(tokens) == tuple(stream.completion.token_ids), "the stream has other tokens than the answer"


async def _cancel(client: Client, ask: Ask) -> None:
    async with client.stream(ask.prompt, deadline_ms=LIMIT_MS, **_fields(ask)) as stream:
        had = 0
        async for delta in stream:
            had += len(delta.token_ids)
            if had > ask.patience:
                await stream.cancel()
    assert stream.completion.finish_reason in ("cancelled", "length", "stop")


async def _leave(client: Client, ask: Ask) -> None:
    async with client.stream(ask.prompt, **_fields(ask)) as stream:
        await _read(stream, ask.patience)


async def _read(stream: Stream, most: int, then: Callable[[], Awaitable[None]] | None = None) -> None:
    """Read about `most` tokens; what comes `then` happens inside the loop."""
    had = 0
    try:
        async for delta in stream:
            had += len(delta.token_ids)
            if had > most:
                if then is not None:
                    await then()
                return
    except BusError:
        if then is None:
            raise


async def _expire(client: Client, ask: Ask) -> None:
    """An answer that takes longer than the client has; a fast fleet may make it."""
    fields = _fields(ask) | {"max_tokens": 200}
    started = time.monotonic()
    try:
        await client.generate(ask.prompt, deadline_ms=SOON_MS, **fields)
    except DeadlineExceeded:
        late = time.monotonic() - started - SOON_MS / 1e3
        assert late < 2, f"told {late:.1f} s after the deadline"


async def _refused(client: Client, ask: Ask) -> None:
    try:
        await client.generate(ask.prompt, logit_bias={10**6: 1.0}, **_fields(ask))
    except InvalidField:
        return
    raise AssertionError("a bias for a token that does not exist was taken")
