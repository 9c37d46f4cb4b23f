"""What `/fleet` tells: the fleet as its workers' beats tell it, and the caller's own last answers. Pure.

Everybody who may ask sees the same fleet; of answers, only those of the caller's tenant, and never a text.
"""

from __future__ import annotations

from typing import Any

from services.gateway.recent import Recent
from trine.picture import picture
from trine.roster import Roster


def overview(roster: Roster, recent: Recent, tenant: str, trouble: str | None, now: float, at: float) -> dict[str, Any]:
    """`now`: of the roster's clock; `at`: Unix time; `trouble`: why requests are refused, if they are."""
    return {
        "at": round(at, 3),
        "trouble": trouble,
        "models": [row.as_dict() for row in picture(roster, now)],
        "answers": recent.of(tenant),
    }
