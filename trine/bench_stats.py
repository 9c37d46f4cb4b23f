"""What a load test says: percentiles of latencies, goodput, tokens per second. Pure.

Names are those of the field: TTFT is the time to the first token, TPOT the mean time per output token after the first,
ITL the time between two pieces of a stream, E2E the whole answer. Goodput counts the answers that meet every objective
given (DistServe, Zhong et al. 2024).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

PERCENTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class Record:
    """One request, as its client saw it. Times are seconds of one clock."""

    due: float
    """When it was to be sent; waiting for the client's own reasons counts."""
    pieces: list[float] = field(default_factory=list)
    """When each piece of text came."""
    ended: float = 0.0
    tokens: int = 0
    """Of the answer, as the server counts them."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    error: str = ""
    """What went wrong, in a word or a number; empty for a whole answer."""

    @property
    def ttft(self) -> float | None:
        return self.pieces[0] - self.due if self.pieces else None

    @property
    def tpot(self) -> float | None:
        """None for an answer in fewer than two pieces: it has no pace."""
        if len(self.pieces) < 2 or self.tokens < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.tokens - 1)

    @property
    def e2e(self) -> float:
        return self.ended - self.due

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.pieces, self.pieces[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class Objectives:
    """Service level objectives, in milliseconds; None: anything will do. An answer without a pace meets any TPOT."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def met(self, record: Record) -> bool:
        if record.error:
            return False
        measured = (record.ttft, self.ttft_ms), (record.tpot, self.tpot_ms), (record.e2e, self.e2e_ms)
        return all(bound is None or value is None or value * 1e3 <= bound for value, bound in measured)


def percentile(values: Sequence[float], percent: float) -> float:
    """By linear interpolation between the nearest ranks, as numpy does; NaN of nothing."""
    if not values:
        return math.nan
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def spread(values: Iterable[float | None]) -> dict[str, float] | None:
    """Mean and percentiles, in milliseconds, of seconds; None of nothing."""
    there = [value * 1e3 for value in values if value is not None]
    if not there:
        return None
    found = {"mean": sum(there) / len(there)}
    return found | {f"p{percent}": percentile(there, percent) for percent in PERCENTILES}


@dataclass(frozen=True, slots=True)
class Report:
    """Latencies are of whole answers alone, in milliseconds."""

    requests: int
    completed: int
    errors: Mapping[str, int]
    seconds: float
    """From when the first request was due to the end of the last."""
    requests_per_s: float
    output_tokens_per_s: float
    total_tokens_per_s: float
    """Prompts with them."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_ms: Mapping[str, float] | None
    tpot_ms: Mapping[str, float] | None
    itl_ms: Mapping[str, float] | None
    e2e_ms: Mapping[str, float] | None
    objectives: Mapping[str, float | None]
    goodput_per_s: float
    """Answers a second that meet all objectives."""
    good_share: float
    """Of all requests."""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def report(records: Sequence[Record], objectives: Objectives) -> Report:
    """Raises ValueError for no records at all."""
    whole = [record for record in records if not record.error]
    seconds = max(max(record.ended for record in records) - min(record.due for record in records), 1e-9)
    good = sum(map(objectives.met, records))
    output = sum(record.tokens for record in whole)
    prompts = sum(record.prompt_tokens for record in whole)
    return Report(
        requests=len(records),
        completed=len(whole),
        errors=dict(Counter(record.error for record in records if record.error).most_common()),
        seconds=seconds,
        requests_per_s=len(whole) / seconds,
        output_tokens_per_s=output / seconds,
        total_tokens_per_s=(prompts + output) / seconds,
        prompt_tokens=prompts,
        cached_tokens=sum(record.cached_tokens for record in whole),
        output_tokens=output,
        ttft_ms=spread(record.ttft for record in whole),
        tpot_ms=spread(record.tpot for record in whole),
        itl_ms=spread(gap for record in whole for gap in record.gaps),
        e2e_ms=spread(record.e2e for record in whole),
        objectives=asdict(objectives),
        goodput_per_s=good / seconds,
        good_share=good / len(records),
    )
