"""What a client gets back."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from shared.messages import Finished, ServedBy, Timings, Usage
from shared.sampling.fields import Logprob
from trine.merge import EventMerger


@dataclass(frozen=True, slots=True)
class ClientTimings:
    """Milliseconds as the client saw them; the last three are what the worker reports."""

    ttft_ms: float
    """From publishing the request to its first token (0 when there was none)."""
    tpot_ms: float
    """Mean time per output token after the first (0 when there were fewer than two)."""
    total_ms: float
    queue_ms: float
    transfer_ms: float
    """Before the first token: fetching blocks of the prompt from the shared cache."""
    prefill_ms: float
    """Before the first token: computing the rest, here or by a prefill worker."""


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished answer."""

    id: str
    model: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: Literal["stop", "length", "cancelled"]
    seed: int
    """Ask again with this seed (and the same prompt and settings) to get the same text."""
    usage: Usage
    timings: ClientTimings
    served_by: ServedBy
    attempts: int
    """1, or more when workers were replaced on the way."""
    logprobs: tuple[Logprob, ...] = ()
    """One for each token, if they were asked for."""

    def as_dict(self) -> dict[str, Any]:
        """For JSON. Token ids are left out, the text says the same, and what belongs to single tokens."""
        return {
            "id": self.id,
            "model": self.model,
            "text": self.text,
            "finish_reason": self.finish_reason,
            "seed": self.seed,
            "usage": self.usage.model_dump(),
            "timings": {name: round(value, 2) for name, value in asdict(self.timings).items()},
            "served_by": self.served_by.model_dump(),
            "attempts": self.attempts,
        }


class Stopwatch:
    """Turns the moments of a request, in seconds of one monotonic clock, into timings."""

    def __init__(self, published: float) -> None:
        self._published = published
        self._first = self._last = 0.0
        self._tokens = 0
        self._first_batch = 0

    def tokens(self, count: int, now: float) -> None:
        if self._tokens == 0:
            self._first, self._first_batch = now, count
        self._tokens += count
        self._last = now

    def timings(self, now: float, reported: Timings) -> ClientTimings:
        later = self._tokens - self._first_batch
        return ClientTimings(
            ttft_ms=(self._first - self._published) * 1e3 if self._tokens else 0.0,
            tpot_ms=(self._last - self._first) / later * 1e3 if later else 0.0,
            total_ms=(now - self._published) * 1e3,
            queue_ms=reported.queue_ms,
            transfer_ms=reported.transfer_ms,
            prefill_ms=reported.prefill_ms,
        )


def completion(model: str, merged: EventMerger, end: Finished, timings: ClientTimings) -> Completion:
    usage = end.usage
    if usage.completion_tokens < len(merged.token_ids):
        # The event stream was lost, and with it what a worker that only had to end the request could have known.
        usage = usage.model_copy(update={"completion_tokens": len(merged.token_ids)})
    return Completion(
        id=end.id,
        model=model,
        text=merged.text,
        token_ids=tuple(merged.token_ids),
        finish_reason=end.reason,
        seed=end.seed,
        usage=usage,
        timings=timings,
        served_by=end.served_by,
        attempts=merged.attempt,
        logprobs=tuple(merged.logprobs) if len(merged.logprobs) == len(merged.token_ids) else (),
    )
