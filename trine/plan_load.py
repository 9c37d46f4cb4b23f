"""What a deployment is planned for."""

from __future__ import annotations

from dataclasses import dataclass, field

from shared.errors import InvalidField
from trine.plan_cost import Drafting

MOST_ACCEPTANCE = 0.99
"""Drafts that are always right would be worth any depth."""


@dataclass(frozen=True, slots=True)
class Load:
    """Means over requests. `shared`: the share of prompt tokens that other requests had before. Seconds."""

    requests_per_s: float
    prompt: float
    output: float
    ttft_s: float
    tpot_s: float
    shared: float = 0.0
    drafting: Drafting = field(default_factory=Drafting)
    one_machine: bool = False
    """All workers are on one machine: blocks pass through its memory."""

    @property
    def computed(self) -> float:
        """Tokens of a prompt that are computed, its last ones; a worker always computes the very last."""
        return max(self.prompt * (1.0 - self.shared), 1.0)

    @property
    def cached(self) -> float:
        """Tokens that come out of a cache, a prompt's first ones: workers fetch what there is, always."""
        return self.prompt - self.computed

    def check(self) -> None:
        """Raises InvalidField."""
        bounds = {
            "load": (self.requests_per_s, 1e-6, 1e6),
            "prompt": (self.prompt, 1, 1 << 21),
            "output": (self.output, 1, 1 << 21),
            "ttft-ms": (self.ttft_s * 1e3, 1, 1e7),
            "tpot-ms": (self.tpot_s * 1e3, 0.01, 1e6),
            "shared-prefix": (self.shared, 0, 1),
            "acceptance": (self.drafting.acceptance, 0, MOST_ACCEPTANCE),
            "draft-cost": (self.drafting.cost, 0, 1),
        }
        for name, (value, low, high) in bounds.items():
            if not low <= value <= high:
                raise InvalidField(f"--{name}: {value:g} is not within {low:g} and {high:g}", field=name)
