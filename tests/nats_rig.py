"""`FleetRig` on a real server."""

from __future__ import annotations

from typing import cast

from shared.bus.memory import MemoryBus
from shared.bus.nats import NatsBus
from tests.fleet_rig import FleetRig


class NatsRig(FleetRig):
    """Connections are made beforehand, two a worker and one a client: the rig takes them without waiting."""

    def __init__(self, spare: list[NatsBus]) -> None:
        super().__init__()
        self._spare = spare

    def bus(self, owner: str = "test") -> MemoryBus:
        bus = cast("MemoryBus", self._spare.pop())  # the same but for what breaks a bus in memory
        self._buses.setdefault(owner, []).append(bus)
        return bus
