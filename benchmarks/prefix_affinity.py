"""Conversations on two decode workers that share no memory: what it is worth that a turn goes where the last was."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import dataclass, field
from typing import Any

from benchmarks.prefix_fleet import ENV, READY_S, Answer, warm_up
from benchmarks.prefix_runs import cached_share, ratio, say
from benchmarks.prefix_sets import reading
from shared.tokenizer import Tokenizer
from trine.client import Client
from trine.supervisor import Fleet

CHATS = 4
TURNS = 5
HISTORY_TOKENS = 700
"""Of each conversation's first message."""
ANSWER_TOKENS = 24
ROUNDS = 2


@dataclass(slots=True)
class Turns:
    """The turns after the first of all conversations."""

    answers: list[Answer] = field(default_factory=list)
    stayed: int = 0
    """Those served by the worker of the turn before."""

    def as_dict(self) -> dict[str, float]:
        ttfts = [answer.ttft_ms for answer in self.answers]
        return {
            "ttft_p50_ms": statistics.median(ttfts),
            "ttft_p90_ms": sorted(ttfts)[len(ttfts) * 9 // 10],
            "same_worker_share": self.stayed / len(self.answers),
            "cached_share": cached_share(self.answers),
        }


def measure_affinity(tokenizer: Tokenizer, rounds: int = ROUNDS) -> dict[str, Any]:
    """The same conversations with and without affinity, in turns; workers share blocks through NATS alone."""
    found = {"true": Turns(), "false": Turns()}
    for number in range(rounds):
        first = [reading(tokenizer, number * CHATS + chat, HISTORY_TOKENS) for chat in range(CHATS)]
        for affinity, turns in found.items():
            env = {**ENV, "TRINE_AFFINITY": affinity, "TRINE_HOST_CACHE_MB": "0"}
            with Fleet({"prefill": 1, "decode": 2}, env=env) as fleet:
                fleet.wait_ready(READY_S)
                asyncio.run(_talk(fleet, first, turns))
            say(f"affinity {affinity}: {turns.as_dict()}")
    on, off = found["true"], found["false"]
    return {
        "rows": {"with affinity": on.as_dict(), "without": off.as_dict()},
        "affinity_ttft_ratio": ratio([a.ttft_ms for a in on.answers], [a.ttft_ms for a in off.answers]),
    }


async def _talk(fleet: Fleet, first: list[str], turns: Turns) -> None:
    """Turn by turn, one request at a time; all conversations take turns."""
    async with Client(fleet.url, fleet.model) as client:
        await warm_up(client, ["decode-1", "decode-2"])
        chats = [[{"role": "user", "content": text}] for text in first]
        where = [""] * len(chats)
        for turn in range(TURNS):
            for chat, messages in enumerate(chats):
                done = await client.generate(messages=messages, max_tokens=ANSWER_TOKENS, temperature=0.0)
                if turn:
                    turns.answers.append(Answer.of(done))
                    turns.stayed += int(done.served_by.decode == where[chat])
                where[chat] = done.served_by.decode
                messages += [
                    {"role": "assistant", "content": done.text},
                    {"role": "user", "content": f"Go on with part {turn + 2}, please."},
                ]
