"""What the peers are measured by: one round of each row on one server, under the load that all of them get."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.prefix_sets import reading
from shared.tokenizer import Tokenizer
from trine.bench_http import HttpTarget
from trine.bench_load import Load, drive
from trine.bench_sets import Prompt
from trine.bench_stats import Record, percentile

SETTLE_S = 1.0
"""Between a prompt and the same one again: caches may still be written to."""
TAILS = (
    "Name the person of whom the first of these texts tells the most, and say in two sentences what they do in it.",
    "Write a list of the five most important facts that the second of these texts states, each in a line of its own.",
)
"""About 24 tokens each."""
AT_ONCE = (4, 8, 16)


@dataclass(frozen=True, slots=True)
class Row:
    """`higher`: more of it is better."""

    title: str
    higher: bool


ROWS = {
    "ttft_cold_ms": Row("first token, 1,024 tokens cold, ms", False),
    "ttft_same_ms": Row("the same prompt again, ms", False),
    "ttft_shared_ms": Row("same 1,000 tokens, another tail, ms", False),
    "batch_1": Row("batch 1 (64 in, 128 out), tokens/s", True),
    **{f"at_once_{n}": Row(f"{n} at once (128 in, 64 out), tokens/s", True) for n in AT_ONCE},
    "itl_p99_8_ms": Row("between tokens at 8, p99, ms", False),
}


@dataclass(slots=True)
class Texts:
    """Prompts that no server has seen: each number is used once by every server, in the same order."""

    tokenizer: Tokenizer
    number: int = 0

    def sized(self, size: int) -> str:
        self.number += 1
        return reading(self.tokenizer, self.number, size)


class Failed(Exception):
    """A server did not do what the row needs; what it did."""


async def measure(target: HttpTarget, texts: Texts, small: bool) -> dict[str, float]:
    """One round of all rows. `small`: of a few tokens, to see that it works. Raises Failed."""
    return {
        **await first_tokens(target, texts, 64 if small else 1000),
        **await paces(target, texts, 8 if small else 1),
    }


async def first_tokens(target: HttpTarget, texts: Texts, size: int) -> dict[str, float]:
    context = texts.sized(size)
    found = {}
    for name, tail in (("ttft_cold_ms", TAILS[0]), ("ttft_same_ms", TAILS[0]), ("ttft_shared_ms", TAILS[1])):
        (record,) = await _asked(target, iter([Prompt(f"{context}\n{tail}")]), Load(1, 2, concurrency=1))
        found[name] = (record.pieces[0] - record.due) * 1e3
        await asyncio.sleep(SETTLE_S)
    return found


async def paces(target: HttpTarget, texts: Texts, less: int) -> dict[str, float]:
    """All of a row's requests are sent at once; `less` divides how many tokens they are of."""
    single = await _asked(target, iter([Prompt(texts.sized(64))]), Load(1, 128 // less, concurrency=1))
    found = {"batch_1": rate(single)}
    for count in AT_ONCE:
        prompts = [Prompt(texts.sized(128)) for _ in range(count)]
        records = await _asked(target, iter(prompts), Load(count, 64 // less, concurrency=count))
        found[f"at_once_{count}"] = rate(records)
        if count == 8:
            found["itl_p99_8_ms"] = percentile([gap for r in records for gap in r.gaps], 99) * 1e3
    return found


def rate(records: Sequence[Record]) -> float:
    """Tokens a second, from the first request to the end of the last answer."""
    seconds = max(r.ended for r in records) - min(r.due for r in records)
    return sum(r.tokens for r in records) / seconds


async def _asked(target: HttpTarget, prompts: Iterator[Prompt], load: Load) -> list[Record]:
    records = await drive(target, prompts, load)
    for record in records:
        if record.error:
            raise Failed(record.error)
    return records
