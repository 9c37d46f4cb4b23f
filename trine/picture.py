"""A fleet at one moment, as `trine status`, `trine top` and the gateway show it. Pure: heard beats in, rows out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shared.subjects import ROLES
from trine.roster import JOB_QUEUES, OWN_S, REQUEST_QUEUES, Heard, Model, Roster, State, bounded
from trine.series import Number

RATE_S = 10
"""Seconds that tokens a second are taken over."""
SHARE_S = 60
"""Seconds that shares are taken over: requests are fewer than tokens."""
HISTORY = {"tokens": "generated_tokens", **{name: name for name in ("running", "queued", "prefilling")}}
"""What a `ModelRow` tells of each second, and its name in `Model.history`."""


@dataclass(frozen=True, slots=True)
class WorkerRow:
    role: str
    worker: str
    state: State
    silent_s: float
    """Since its last beat."""
    running: int
    """Requests, jobs, or steps of a drafter that it is at work on."""
    waiting: int
    """What it has taken that waits."""
    free_blocks: int
    blocks: int
    """In its KV pool; 0: it has none."""
    tokens_s: float
    codec: str


@dataclass(frozen=True, slots=True)
class ModelRow:
    """One model's part of the fleet. Shares are None while nothing was asked, or drafted."""

    model: str
    served: bool
    """Whether a decode worker takes requests."""
    workers: tuple[WorkerRow, ...]
    running: int
    """Requests that decode workers are at work on."""
    queued: int | None
    """Requests that no decode worker has taken."""
    prefilling: int
    prefill_queued: int | None
    tokens_s: float
    cache_hit: float | None
    """Of the prompt tokens of late: those whose KV was there before."""
    acceptance: float | None
    """Of the tokens drafted of late: those that were right."""
    history: Mapping[str, list[Number | None]] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def picture(roster: Roster, now: float) -> list[ModelRow]:
    """Models of which a worker is remembered, by name. `now`: of the roster's clock."""
    roster.forget(now)
    return [_model(roster, name, model, now) for name, model in sorted(roster.models.items()) if model.workers]


def _model(roster: Roster, name: str, model: Model, now: float) -> ModelRow:
    rows = sorted(
        (_worker(roster, heard, now) for heard in model.workers.values()),
        key=lambda row: (ROLES.index(row.role), row.worker),
    )
    decode = [row for row in rows if row.role == "decode" and row.state is not State.SILENT]
    prefill = [row for row in rows if row.role == "prefill" and row.state is not State.SILENT]
    history = model.history
    requests, jobs = model.waiting(REQUEST_QUEUES, now), model.waiting(JOB_QUEUES, now)
    return ModelRow(
        model=name,
        served=any(row.state is State.SERVING for row in decode),
        workers=tuple(rows),
        running=sum(row.running for row in decode),
        queued=requests,
        prefilling=sum(row.running for row in prefill),
        prefill_queued=jobs,
        tokens_s=round(history.rate("generated_tokens", RATE_S, now), 2),
        cache_hit=_share(history.total("cached_tokens", SHARE_S, now), history.total("prompt_tokens", SHARE_S, now)),
        acceptance=_share(
            history.total("accepted_tokens", SHARE_S, now), history.total("drafted_tokens", SHARE_S, now)
        ),
        history={shown: history.values(kept, now) for shown, kept in HISTORY.items()},
    )


def _worker(roster: Roster, heard: Heard, now: float) -> WorkerRow:
    beat, state = heard.beat, roster.state(heard, now)
    return WorkerRow(
        role=beat.role,
        worker=beat.worker,
        state=state,
        silent_s=round(max(now - heard.at, 0.0), 1),
        running=bounded(beat.load.running),
        waiting=bounded(beat.load.waiting),
        free_blocks=bounded(beat.load.free_blocks),
        blocks=bounded(beat.load.blocks),
        tokens_s=0.0 if state is State.SILENT else round(heard.tokens.rate("generated_tokens", OWN_S, now), 2),
        codec=beat.identity.codec if beat.identity else "",
    )


def _share(part: Number, whole: Number) -> float | None:
    return round(min(part / whole, 1.0), 4) if whole else None
