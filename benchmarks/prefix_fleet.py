"""Workers of the prefix benchmark, and what they say: their beats' counters, and who had a part in an answer."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType

from shared.bus.base import Incoming
from shared.bus.nats import NatsBus
from shared.codec import decode
from shared.config import DEFAULT_MODEL
from shared.errors import RequestError
from shared.messages import Beat
from shared.subjects import Subjects
from trine.client import Client
from trine.completion import Completion
from trine.supervisor import Fleet

READY_S = 120.0
BEAT_S = 0.2
FRESH_S = 20.0
PREFILL = "prefill-1"
ENV = {
    "TRINE_MODEL": DEFAULT_MODEL,
    "TRINE_KV_CODEC": "none",
    "TRINE_WEIGHTS": "native",
    "TRINE_THREADS": "1",
    "TRINE_BEAT_S": str(BEAT_S),
}


def require(holds: bool, why: str) -> None:
    """A benchmark of something else than it says is worth nothing."""
    if not holds:
        raise SystemExit(f"not what was to be measured: {why}")


@dataclass(frozen=True, slots=True)
class Answer:
    """What counts of an answer here."""

    ttft_ms: float
    """As the client saw it."""
    prompt_tokens: int
    cached_tokens: int
    decode: str
    prefill: tuple[str, ...]

    @classmethod
    def of(cls, completion: Completion) -> Answer:
        usage, by = completion.usage, completion.served_by
        return cls(
            completion.timings.ttft_ms, usage.prompt_tokens, usage.cached_tokens, by.decode, tuple(by.prefill)
        )  # fmt: skip

    def require_cold(self) -> None:
        require(self.cached_tokens == 0, f"{self} should have found nothing in a cache")
        require(self.prefill == (PREFILL,), f"{self} should have been prefilled by {PREFILL}")


@contextmanager
def decode_worker(number: int, url: str, env: Mapping[str, str] | None = None) -> Iterator[str]:
    """decode-`number` joins the workers at `url`, and leaves on SIGTERM; its name."""
    name = f"decode-{number}"
    fleet = Fleet({"decode": number}, nats=url, env={**ENV, **(env or {})})
    for other in range(1, number):
        fleet.hold(f"decode-{other}")
    with fleet:
        asyncio.run(_heard(url, fleet.model, name))
        yield name


async def _heard(url: str, model: str, name: str) -> None:
    async with Beats(url, model) as beats:
        await beats.fresh([name], READY_S)


async def warm_up(client: Client, workers: Collection[str]) -> None:
    """Requests that nothing else resembles, until each of these decode workers has done one."""
    waiting = set(workers)
    for turn in range(10):
        prompts = (f"{turn} {worker} " + "Say hello to everybody in the room. " * 8 for worker in workers)
        answers = await asyncio.gather(*(client.generate(p, max_tokens=4, temperature=0.0) for p in prompts))
        waiting -= {answer.served_by.decode for answer in answers}
        if not waiting:
            return
    require(False, f"{', '.join(sorted(waiting))} took no request")


class Beats:
    """Counters of one model's workers, from their beats."""

    def __init__(self, url: str, model: str) -> None:
        self._url = url
        self._subjects = Subjects(model)
        self._counters: dict[str, Mapping[str, int]] = {}
        self._heard: Counter[str] = Counter()
        self._news = asyncio.Event()

    async def __aenter__(self) -> Beats:
        self._bus = await NatsBus.connect(self._url, name="benchmark", wait=FRESH_S)
        await self._bus.subscribe(self._subjects.beats, self._on_beat)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._bus.close()

    async def fresh(self, workers: Collection[str], timeout: float = FRESH_S) -> Counter[str]:
        """The sum of these workers' counters now: from the second beat of each, the first may have been on its way."""
        self._heard.clear()
        try:
            async with asyncio.timeout(timeout):
                while any(self._heard[worker] < 2 for worker in workers):
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise SystemExit(f"no beats of {', '.join(sorted(workers))} within {timeout:g} s") from None
        total: Counter[str] = Counter()
        for worker in workers:
            total.update(self._counters[worker])
        return total

    async def _on_beat(self, message: Incoming) -> None:
        try:
            beat = decode(message.data, Beat)
        except RequestError:
            return
        self._counters[beat.worker] = beat.counters
        self._heard[beat.worker] += 1
        self._news.set()
