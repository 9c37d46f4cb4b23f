"""NATS's service API, asked as `nats micro` asks it, with the shipped configuration; and metrics of a secured fleet."""

from __future__ import annotations

import json
from typing import Any

import pytest
from nats.micro.service import ServiceInfo, ServicePing, ServiceStats

from shared.bus.base import Incoming
from shared.bus.memory import MemoryBus
from shared.bus.nats import NatsBus
from shared.config import DEFAULT_MODEL
from shared.errors import PermissionDenied
from shared.micro import Micro, Report
from shared.subjects import SERVICES, Subjects, service_subjects
from tests.fleet_rig import FleetRig
from tests.gateway_rig import eventually, gateway_on
from tests.secure_rig import SecureFleet, secure_server

pytestmark = pytest.mark.anyio
EVERYBODY = {"trine-decode", "trine-prefill", "trine-drafter", "trine-gateway"}


async def asked(bus: NatsBus, subject: str, answers: int) -> list[dict[str, Any]]:
    """What so many processes answer."""
    heard: list[dict[str, Any]] = []

    async def note(message: Incoming) -> None:
        heard.append(json.loads(message.data))

    inbox = f"_INBOX.operator.{subject.replace('.', '-').replace('$', '')}"
    subscription = await bus.subscribe(inbox, note)
    await bus.publish(subject, b"", reply=inbox)
    await eventually(lambda: len(heard) == answers)
    await subscription.unsubscribe()
    return heard


async def test_an_operator_finds_the_fleet(tmp_path_factory: pytest.TempPathFactory) -> None:
    with secure_server(tmp_path_factory.mktemp("certificates")) as server:
        async with SecureFleet(server) as fleet:
            await fleet.decode(draft_adaptive=False)
            await fleet.decode("decode-2")
            await fleet.prefill()
            await fleet.drafter()
            fleet._spare.append(await server.connect("gateway"))
            key = "acme-key-0123456789"
            async with gateway_on(fleet, model_name=DEFAULT_MODEL, worker="gate.1", api_keys=f"acme:{key}") as rig:
                body = {"model": DEFAULT_MODEL, "prompt": list(range(60)), "max_tokens": 9}
                for field in ({}, {"logit_bias": {"5000": 1}}):
                    await rig.http.post(
                        "/v1/completions", json={**body, **field}, headers={"authorization": f"Bearer {key}"}
                    )
                operator = await server.connect("operator")
                pings = [ServicePing.from_dict(d) for d in await asked(operator, "$SRV.PING", 5)]
                assert {ping.type for ping in pings} == {"io.nats.micro.v1.ping_response"}
                assert {ping.name for ping in pings} == EVERYBODY
                assert len({ping.id for ping in pings}) == 5
                assert {p.metadata["state"] for p in pings} == {"serving"}
                assert {p.metadata["role"] for p in pings} == {name.removeprefix("trine-") for name in EVERYBODY}
                assert "gate=2E1" in {ping.id for ping in pings}

                for told in await asked(operator, "$SRV.INFO.trine-decode", 2):
                    info = ServiceInfo.from_dict(told)
                    assert (info.name, info.type) == ("trine-decode", "io.nats.micro.v1.info_response")
                    assert info.metadata["model"] == DEFAULT_MODEL
                    (endpoint,) = info.endpoints
                    assert (endpoint.name, endpoint.subject) == ("generate", Subjects(DEFAULT_MODEL).requests[0])

                stats = [ServiceStats.from_dict(d) for d in await asked(operator, "$SRV.STATS", 5)]
                counts = {name: [s.endpoints[0] for s in stats if s.name == name] for name in EVERYBODY}
                assert sum(e.num_requests for e in counts["trine-decode"]) == 2
                assert sum(e.num_errors for e in counts["trine-decode"]) == 1
                assert (counts["trine-gateway"][0].num_requests, counts["trine-gateway"][0].num_errors) == (2, 1)
                assert counts["trine-prefill"][0].num_requests == 1
                assert counts["trine-drafter"][0].num_requests > 0
                data = counts["trine-prefill"][0].data or {}
                assert data["counters"]["prefill_tokens"] == 56 and data["blocks"] == 128

                for verb in ("PING", "INFO", "STATS"):
                    (one,) = await asked(operator, f"$SRV.{verb}.trine-decode.decode-2", 1)
                    assert one["id"] == "decode-2"
                # What beats say of queues, this user of NATS could not ask for.
                name = f'{{model="{DEFAULT_MODEL}",priority="normal"}}'
                await eventually(
                    lambda: f"trine_queue_waiting_requests{name} 0.0" in rig.gateway.metrics.render().decode()
                )
                await operator.close()
                assert all(worker.bus.counters["denied"] == 0 for worker in fleet.workers.values())


async def test_nobody_is_answered_elsewhere_or_about_other_things() -> None:
    bus, heard = MemoryBus(), []

    async def note(message: Incoming) -> None:
        heard.append(message.subject)

    await Micro(bus, "decode", "decode-1", lambda: Report("generate", "x", 0, 0, 0)).start()
    await bus.subscribe(">", note)
    await bus.publish("$SRV.PING", b"", reply="trine.m.tok.somebody")
    await bus.publish("$SRV.SCHEMA", b"", reply="_INBOX.a")
    await bus.publish("$SRV.PING.trine-prefill", b"", reply="_INBOX.a")
    await bus.publish("$SRV.PING.trine-decode.decode-2", b"", reply="_INBOX.a")
    await bus.publish("$SRV.PING", b"", reply="_INBOX.b")
    await eventually(lambda: "_INBOX.b" in heard)
    assert [subject for subject in heard if not subject.startswith(SERVICES[:5])] == ["_INBOX.b"]
    await bus.close()


async def test_a_worker_that_may_not_be_found_serves_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A NATS server whose users were printed before."""
    subscribe = MemoryBus.subscribe

    async def older(self: MemoryBus, subject: str, *more: Any, **named: Any) -> Any:
        if subject in service_subjects("decode", "decode-1"):
            raise PermissionDenied(f"NATS does not let us subscribe to {subject}")
        return await subscribe(self, subject, *more, **named)

    monkeypatch.setattr(MemoryBus, "subscribe", older)
    async with FleetRig() as rig:
        await rig.decode()
        assert (await rig.client().generate(token_ids=[1, 2], max_tokens=2)).usage.completion_tokens == 2
