"""The lives of the last answers, for the tenants that asked for them: times and counts, never a text. Pure."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from trine.completion import Completion

KEPT = 40
"""Answers of each tenant."""
_SECRET = re.compile("(?<=-[0-9a-f]{8})[0-9a-f]{24}")
"""What is not told of an id: whoever knows all of it may read the answer's text, for as long as that is kept."""


@dataclass(frozen=True, slots=True)
class Answer:
    """`queue_ms` to `decode_ms` follow each other, and together are the time that the client waited.

    Queue: until a worker had it in its pool, ways included. Transfer: fetching blocks of its prompt. Prefill:
    computing what was left of it, here or elsewhere, up to the first token. Decode: the other tokens.
    """

    id: str
    model: str
    ended: float
    """Unix time."""
    queue_ms: float
    transfer_ms: float
    prefill_ms: float
    decode_ms: float
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    finish_reason: str
    attempts: int
    decode: str
    prefill: tuple[str, ...]
    drafter: tuple[str, ...]

    @classmethod
    def of(cls, done: Completion, ended: float) -> Answer:
        times = done.timings
        first = times.ttft_ms or times.total_ms
        # A worker that took over tells of its own attempt, which may have begun after the first token was there.
        prefill = min(max(times.prefill_ms, 0.0), first)
        transfer = min(max(times.transfer_ms, 0.0), first - prefill)
        return cls(
            id=done.id,
            model=done.model,
            ended=round(ended, 3),
            queue_ms=round(first - prefill - transfer, 2),
            transfer_ms=round(transfer, 2),
            prefill_ms=round(prefill, 2),
            decode_ms=round(max(times.total_ms - first, 0.0), 2),
            **done.usage.model_dump(),
            finish_reason=done.finish_reason,
            attempts=done.attempts,
            decode=done.served_by.decode,
            prefill=tuple(done.served_by.prefill),
            drafter=tuple(done.served_by.drafter),
        )


class Recent:
    """By tenant: who asks has a key, so there are no more tenants than keys."""

    def __init__(self) -> None:
        self._answers: dict[str, deque[Answer]] = {}

    def add(self, tenant: str, answer: Answer) -> None:
        """One that is there already was read once more: its life is that of the first time."""
        kept = self._answers.setdefault(tenant, deque(maxlen=KEPT))
        if all(known.id != answer.id for known in kept):
            kept.appendleft(answer)

    def of(self, tenant: str) -> list[dict[str, Any]]:
        """The latest first."""
        return [asdict(answer) | {"id": _SECRET.sub("", answer.id)} for answer in self._answers.get(tenant, ())]
