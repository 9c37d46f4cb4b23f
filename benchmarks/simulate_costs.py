"""What a step costs, as measured on one machine, and the file that keeps it. Pure.

A step's seconds are a sum of what it has: weights to read, positions to multiply, rows for the LM head, KV to read.
Each part's weight is found by calibration (`benchmarks.simulate_calibrate`), none of them negative.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from shared.engine.span import Span
from shared.errors import ConfigError

DATA = Path(__file__).parent / "data"
FEW = 6
"""Up to so many positions are multiplied while the weights are read, and cost next to nothing; further ones do."""
PARTS = ("step", "head", "few", "many", "rows", "sequences", "context", "attention")


def parts(spans: Sequence[Span]) -> list[float]:
    """How much of each of `PARTS` a step has."""
    positions = sum(len(span.token_ids) for span in spans)
    rows = sum(span.rows for span in spans)
    context = sum(span.start + len(span.token_ids) for span in spans)
    attention = sum(len(s.token_ids) * (s.start + len(s.token_ids) / 2) for s in spans if len(s.token_ids) > 1)
    few, many = float(min(positions, FEW)), float(max(positions - FEW, 0))
    return [1.0, float(rows > 0), few, many, float(rows), float(len(spans)), float(context), attention]


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds, of one thread with the machine to itself, where nothing else is said."""

    weights: dict[str, float]
    """Seconds of one of each of `PARTS`."""
    contention: float
    """What a step takes more for each other core that is busy, as a share."""
    cores: int
    block_bytes: int
    host_s: float
    """Of a step, beside the engine: planning, texts, events."""
    intake_s: float
    """From a request's publication to its admission: queue, notes, tokenising, with nothing else to do."""
    draft_base_s: float
    draft_token_s: float
    """An answer of a drafter: of any, and of each drafted token of each sequence."""
    acceptance: float
    machine: dict[str, Any] = field(default_factory=dict)
    fit: dict[str, float] = field(default_factory=dict)
    """How far the sum was from what was measured, as shares: median and largest."""

    def step_s(self, spans: Sequence[Span]) -> float:
        return sum(self.weights[name] * amount for name, amount in zip(PARTS, parts(spans), strict=True))

    def save(self, path: Path) -> None:
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def load(path: Path) -> Costs:
    """Raises ConfigError for a file that is none of ours."""
    try:
        found = Costs(**json.loads(path.read_bytes()))
        if set(found.weights) != set(PARTS) or min(found.weights.values()) < 0 or found.cores < 1:
            raise ValueError("not the weights of this version")
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path}: {error}; make one with --calibrate") from None
    return found


def fitted(samples: Sequence[tuple[Sequence[float], float]]) -> tuple[dict[str, float], dict[str, float]]:
    """Weights for (amounts of the parts, seconds), by least squares of the relative errors, none negative; and the fit.

    Coordinate descent: each weight in turn becomes the best that is not negative, until none changes.
    """
    rows = [[amount / seconds for amount in amounts] for amounts, seconds in samples]
    weights = [0.0] * len(PARTS)
    errors = [-1.0] * len(rows)
    squares = [sum(row[i] ** 2 for row in rows) for i in range(len(PARTS))]
    for _ in range(20_000):
        moved = 0.0
        for i, square in enumerate(squares):
            if not square:
                continue
            new = max(weights[i] - sum(row[i] * e for row, e in zip(rows, errors, strict=True)) / square, 0.0)
            step = new - weights[i]
            if step:
                errors = [e + step * row[i] for row, e in zip(rows, errors, strict=True)]
                weights[i] = new
                moved = max(moved, abs(step) * square**0.5)
        if moved < 1e-7:
            break
    off = sorted(abs(e) for e in errors)
    return dict(zip(PARTS, weights, strict=True)), {"median": off[len(off) // 2], "largest": off[-1]}


def scaled(costs: Costs, faster: float) -> Costs:
    """A machine on which steps and drafts take so many times less; what the host does stays as it is."""
    return replace(
        costs,
        weights={name: weight / faster for name, weight in costs.weights.items()},
        draft_base_s=costs.draft_base_s / faster,
        draft_token_s=costs.draft_token_s / faster,
    )
