"""Three nats-servers with the configuration of deploy/cluster: leaders are killed under load, and nothing is lost."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.cluster import Cluster, leaders, stream_info
from benchmarks.failover import REPLICAS, STREAMS, SUBJECTS, Load, kill_leader, under_load
from shared.bus.base import Bus
from shared.bus.embedded import EmbeddedNats
from shared.bus.login import Login
from shared.bus.nats import NatsBus
from shared.codec import decode_event
from shared.config import DEFAULT_MODEL, Settings
from shared.errors import BusError, ConfigError
from shared.messages import Tokens
from shared.streams import decode_streams, event_stream
from shared.subjects import Subjects
from tests.secure_rig import USERS, certificates
from trine.access import variable

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(90)]


@pytest.mark.slow
async def test_the_leader_of_each_stream_is_killed_under_load(record_property: Callable[[str, object], None]) -> None:
    async with Cluster() as cluster, under_load(cluster) as (fleet, load, bus):
        for stream in STREAMS:
            replicas = 1 if stream == SUBJECTS.block_stream else REPLICAS
            assert (await stream_info(bus, stream))["config"]["num_replicas"] == replicas
        left = [SUBJECTS.block_stream, *STREAMS[:-1]]
        while left:
            if left[0] == SUBJECTS.block_stream:
                await blocks_are_away(cluster, load, bus)
                left = left[1:]
            else:
                kill = await kill_leader(cluster, load, bus, left[0])
                left = [stream for stream in left if stream not in kill.leads]
                record_property("recovery_s", kill.recovery_s)
                print(f"{kill.recovery_s:.2f} s after the loss of {', '.join(kill.leads)}")
        assert load.wrong == []
        assert len(load.finished) > 20
        assert all(worker.bus.connected for worker in fleet.workers.values())
        for request in load.asked[:-20]:
            await is_gapless(bus, request)


async def blocks_are_away(cluster: Cluster, load: Load, bus: Bus) -> None:
    """The one server that has the blocks is gone: requests are answered."""
    server = cluster.servers[(await leaders(bus, STREAMS))[SUBJECTS.block_stream]]
    server.kill()
    await load.ask()
    async with asyncio.timeout(15):
        for _ in range(3):
            await load.ask()
    assert not server.running
    server.start()
    await cluster.steady()
    await asyncio.sleep(1.0)


async def is_gapless(bus: Bus, request: str) -> None:
    """From index 0 to one last event, nothing missing and nothing twice."""
    events = [decode_event(e.data) for e in await bus.read(SUBJECTS.event_stream, SUBJECTS.events(request, "default"))]
    written = [event for event in events if isinstance(event, Tokens)]
    assert [event.index for event in written] == [
        sum(len(e.token_ids) for e in written[:i]) for i in range(len(written))
    ]
    assert [isinstance(event, Tokens) for event in events] == [True] * len(written) + [False]


@pytest.fixture(scope="module")
def alone() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as server:
        yield server


async def test_one_server_keeps_no_replicas(alone: EmbeddedNats) -> None:
    bus = await NatsBus.connect(alone.url, name="test", wait=5)
    for spec in decode_streams(SUBJECTS, Settings(nats_replicas=3)):
        with pytest.raises(ConfigError, match=f"TRINE_NATS_REPLICAS: stream {spec.name}"):
            await bus.ensure_stream(spec)
    await bus.close()


async def test_other_replicas_than_those_of_the_fleet_are_refused(alone: EmbeddedNats) -> None:
    bus = await NatsBus.connect(alone.url, name="test", wait=5)
    await bus.ensure_stream(event_stream(SUBJECTS))
    with pytest.raises(ConfigError, match="num_replicas is 1, expected 3"):
        await bus.ensure_stream(replace(event_stream(SUBJECTS), replicas=3))
    await bus.close()


async def test_the_secured_cluster_asks_who_somebody_is(tmp_path: Path) -> None:
    certificates(tmp_path, "localhost", "127.0.0.1")
    env = {variable(user): f"pw-of-{user}" for user in USERS}
    env |= {"TRINE_NATS_SERVER_CERT": f"{tmp_path}/server.pem", "TRINE_NATS_SERVER_KEY": f"{tmp_path}/server.key"}
    env |= {"TRINE_NATS_CA": f"{tmp_path}/ca.pem"}
    async with Cluster("secure.conf", env) as cluster:
        tls = ssl.create_default_context(cafile=tmp_path / "ca.pem")
        bus = await NatsBus.connect(cluster.url, name="test", login=Login("decode", "pw-of-decode", tls), wait=10)
        spec = event_stream(Subjects(DEFAULT_MODEL), replicas=3)
        async with asyncio.timeout(20):
            while True:
                try:
                    await bus.ensure_stream(spec)
                    break
                except BusError:
                    await asyncio.sleep(0.2)
        found = (await stream_info(bus, spec.name))["cluster"]
        assert {found["leader"], *(peer["name"] for peer in found["replicas"])} == {"a", "b", "c"}
        await bus.close()
        with pytest.raises(ConfigError, match="refuses our credentials"):
            await NatsBus.connect(cluster.url, name="test", login=Login("decode", "wrong", tls), wait=3)
