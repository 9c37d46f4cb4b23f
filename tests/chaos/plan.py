"""Which faults come when: drawn from a seed, so that a run can be had again. No I/O, no clock."""

from __future__ import annotations

import random
from dataclasses import dataclass

from shared.subjects import ROLES

SERVER = "nats"
CLIENTS = "trine-client"
FLEET = {"prefill": 2, "decode": 2, "drafter": 1}
"""Workers of each role."""
KINDS: dict[str, tuple[str, ...]] = {
    **{f"{act} {role}": tuple(f"{role}-{n + 1}" for n in range(FLEET[role]))
       for act in ("kill", "stop", "drain") for role in ROLES},
    "kill nats": (SERVER,),
    "restart nats": (SERVER,),
    "stop nats": (SERVER,),
    "cut": ("prefill-1", "prefill-2", "decode-1", "decode-2", "drafter-1", CLIENTS),
    "reset": ("prefill-1", "decode-1", "decode-2", "drafter-1", CLIENTS),
    "slow": ("prefill-2", "decode-1", "decode-2", "drafter-1", CLIENTS),
    "cut bulk": ("prefill-1", "prefill-2", "decode-1", "decode-2"),
    "reset bulk": ("prefill-1", "prefill-2", "decode-1", "decode-2"),
    "jump clock": ("prefill-1", "decode-1", "decode-2", "drafter-1"),
    "fill disk": ("prefill-1", "prefill-2", "decode-1", "decode-2"),
    "damage host cache": (SERVER,),
    "fill queue": (SERVER,),
    "fill cache": (SERVER,),
    "fill prefill queue": (SERVER,),
    "corrupt blocks": (SERVER,),
    "hostile messages": (SERVER,),
    "forge drafts": (SERVER,),
}  # fmt: skip
"""Every kind of fault, and whom it can hit."""
SHORTEST_S, LONGEST_S = 1.0, 8.0
PACE_S = 6.0
HURRIED_PACE_S = 3.5
SHORT_RUN_S = 240.0
QUIET_S = 6.0
"""At both ends of a run nothing happens for so long."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong. Times in seconds, `at` from the beginning of the load."""

    at: float
    kind: str
    victim: str
    lasts: float
    seed: int
    """Of what is random about it, such as bytes."""

    @property
    def role(self) -> str:
        """The role that a request needs in order to show that the fleet has recovered."""
        return next((role for role in ROLES if self.victim.startswith(role)), "decode")


def plan(seed: int, seconds: float) -> list[Fault]:
    """Faults of a run of `seconds`, by time. All kinds come equally often, give or take one; short runs are denser."""
    rng = random.Random(seed)
    pace = HURRIED_PACE_S if seconds <= SHORT_RUN_S else PACE_S
    faults: list[Fault] = []
    left: list[str] = []
    at = QUIET_S
    while at < seconds - QUIET_S:
        if not left:
            left = rng.sample(list(KINDS), len(KINDS))
        kind = left.pop()
        lasts = rng.uniform(SHORTEST_S, LONGEST_S)
        faults.append(Fault(at, kind, rng.choice(KINDS[kind]), lasts, rng.randrange(1 << 32)))
        at += pace * rng.uniform(0.6, 1.4)
    return faults
