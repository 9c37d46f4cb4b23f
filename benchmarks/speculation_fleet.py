"""Two stacks on one nats-server, the same but for a drafter, and what a client sees of either.

Each stack serves under a model name of its own, so neither sees anything of the other, and no worker has to be stopped
to switch from one to the other: a request to one leaves the other idle.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import TracebackType

from benchmarks.prefix_fleet import ENV as PREFIX_ENV
from benchmarks.prefix_fleet import READY_S, Beats, require
from benchmarks.speculation_sets import Chat
from shared.engine.fingerprint import fingerprint, vocabulary_digest
from shared.tokenizer import Tokenizer
from trine.client import Client
from trine.supervisor import Fleet

DRAFTED, PLAIN = "with-drafter", "without-drafter"
ENV = PREFIX_ENV | {
    "TRINE_BEAT_S": "1",
    "TRINE_KV_MEMORY_MB": "256",
    "TRINE_CACHE_BYTES": str(128 << 20),
    "TRINE_HOST_CACHE_MB": "0",
}
WARM_UP_TOKENS = 48
USELESS_SCALE = 0.003
"""Of weights of about 73: logits of about 5, with which the most likely token gets about a third."""
_salts = count()

Arrived = Callable[[int], None]
"""Told with each arrival how many tokens there are."""


@dataclass(frozen=True, slots=True)
class How:
    """How to answer. `at_least` tokens: no end before."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    at_least: int = 0


@dataclass(frozen=True, slots=True)
class Answer:
    """What counts of an answer here."""

    token_ids: tuple[int, ...]
    arrivals: tuple[tuple[float, int], ...]
    """When tokens came, in monotonic seconds, and how many there were then."""
    drafted: int = 0
    accepted: int = 0
    drafters: tuple[str, ...] = ()
    """Those whose drafts were verified."""

    @property
    def tokens(self) -> int:
        """After the first arrival."""
        return self.arrivals[-1][1] - self.arrivals[0][1]

    @property
    def seconds(self) -> float:
        return self.arrivals[-1][0] - self.arrivals[0][0]

    @property
    def rate(self) -> float:
        """Tokens per second after the first."""
        return self.tokens / self.seconds

    def there(self, moment: float) -> tuple[float, int]:
        """The last arrival up to this moment."""
        return max((a for a in self.arrivals if a[0] <= moment), default=self.arrivals[0])

    def had(self, tokens: int) -> float:
        """When there were so many tokens."""
        return next(moment for moment, there in self.arrivals if there >= tokens)


@dataclass(frozen=True, slots=True)
class Drafter:
    fleet: Fleet
    name: str

    def signal(self, sign: signal.Signals) -> None:
        self.fleet.kill(self.name, sign)


@dataclass(frozen=True, slots=True)
class Pair:
    """One request's answers by both stacks."""

    chat: Chat
    how: How
    drafted: Answer
    plain: Answer

    @property
    def speed(self) -> float:
        return self.drafted.rate / self.plain.rate


class Sides:
    """A client of either stack. Each request has a `cache_salt` of its own: no answer helps a later one."""

    def __init__(self, url: str, tokenizer: Tokenizer) -> None:
        self._url = url
        self._tokenizer = tokenizer
        self._exit = AsyncExitStack()

    async def __aenter__(self) -> Sides:
        self._clients = {
            name: await self._exit.enter_async_context(Client(self._url, name)) for name in (DRAFTED, PLAIN)
        }
        self.beats = await self._exit.enter_async_context(Beats(self._url, DRAFTED))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._exit.aclose()

    async def answer(self, side: str, chat: Chat, how: How, arrived: Arrived = lambda tokens: None) -> Answer:
        arrivals: list[tuple[float, int]] = []
        stream = self._clients[side].stream(
            messages=chat.messages,
            max_tokens=how.max_tokens,
            min_tokens=how.at_least,
            temperature=how.temperature,
            seed=how.seed,
            cache_salt=f"{next(_salts)}",
        )
        async with stream:
            async for delta in stream:
                arrivals.append((time.monotonic(), len(delta.token_ids) + (arrivals[-1][1] if arrivals else 0)))
                arrived(arrivals[-1][1])
        done = stream.completion
        usage = done.usage
        by = tuple(done.served_by.drafter)
        answer = Answer(done.token_ids, tuple(arrivals), usage.drafted_tokens, usage.accepted_tokens, by)
        require(done.attempts == 1, f"{side} needed {done.attempts} attempts")
        require(answer.tokens > 0, f"{side} answered {chat.user[:60]!r} with next to nothing")
        require(usage.prompt_tokens == len(self._tokenizer.chat(chat.messages)), "the prompt has other tokens")
        require(side == DRAFTED or (not answer.drafted and not answer.drafters), "somebody drafted for the plain stack")
        return answer

    async def pair(self, chat: Chat, how: How, first: str) -> Pair:
        """One answer after the other, `first` saying whose comes first."""
        sides = (DRAFTED, PLAIN) if first == DRAFTED else (PLAIN, DRAFTED)
        answers = {side: await self.answer(side, chat, how) for side in sides}
        return Pair(chat, how, answers[DRAFTED], answers[PLAIN])

    async def batch(self, side: str, chats: Sequence[Chat], how: How) -> list[Answer]:
        return list(await asyncio.gather(*(self.answer(side, chat, how) for chat in chats)))

    async def guesses(self, worker: Drafter) -> int:
        """Tokens that it has drafted so far."""
        counted = await self.beats.fresh([worker.name])
        return sum(count for name, count in counted.items() if name.startswith("drafted_"))

    async def warm_up(self, chats: Sequence[Chat]) -> None:
        """What a worker learns of its machine it has learned before anything is measured."""
        for chat in chats:
            for side in (DRAFTED, PLAIN):
                await self.answer(side, chat, How(WARM_UP_TOKENS))


@contextmanager
def stacks() -> Iterator[str]:
    """The decode workers of both stacks; the URL."""
    with (
        Fleet({"decode": 1}, env=ENV | {"TRINE_MODEL_NAME": PLAIN}) as plain,
        Fleet({"decode": 1}, nats=plain.url, env=ENV | {"TRINE_MODEL_NAME": DRAFTED}) as drafted,
    ):
        plain.wait_ready(READY_S)
        drafted.wait_ready(READY_S)
        yield plain.url


@contextmanager
def drafter(url: str, number: int, env: Mapping[str, str]) -> Iterator[Drafter]:
    """drafter-`number` joins one of the stacks at `url`, as one that nobody there has met."""
    fleet = Fleet({"drafter": number}, nats=url, env={**ENV, "TRINE_MODEL_NAME": DRAFTED, **env})
    for other in range(1, number):
        fleet.hold(f"drafter-{other}")
    with fleet:
        found = Drafter(fleet, f"drafter-{number}")
        asyncio.run(_heard(url, found.name))
        yield found


async def _heard(url: str, worker: str) -> None:
    async with Beats(url, DRAFTED) as beats:
        await beats.fresh([worker], READY_S)


def useless(target: Path, folder: Path) -> None:
    """A draft head of the usual size with random weights, and as sure of its guesses as one that knows."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    from shared.engine.draft_release import Release

    config = AutoConfig.from_pretrained(target)
    about = {
        "kind": "draft_head",
        "format": 1,
        "target": {
            "name": "useless",
            "fingerprint": fingerprint(target),
            "vocabulary": vocabulary_digest(target),
        },
        "hidden_size": config.hidden_size,
        "window": 2,
        "width": 1536,
        "proposable": 8192,
        "vocab_size": config.vocab_size,
        "rms_norm_eps": config.rms_norm_eps,
    }
    rng, tensors = torch.Generator().manual_seed(0), {}
    for name, (kind, shape) in Release.model_validate(about).shapes().items():
        if kind == "I8":
            tensors[name] = torch.randint(-127, 128, shape, dtype=torch.int8, generator=rng)
        elif kind == "I32":
            tensors[name] = torch.randperm(config.vocab_size, generator=rng)[: shape[0]].int()
        else:
            tensors[name] = torch.full(shape, USELESS_SCALE if name.endswith("scale") else 1.0)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(about), encoding="utf-8")
