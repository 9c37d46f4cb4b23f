"""The gateway as the NATS user that it has in production: with the rights of its role and no others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from services.decode.service import DecodeWorker
from services.gateway import sse
from shared.config import DEFAULT_MODEL
from tests.fake_engine import FakeEngine, completion
from tests.gateway_rig import GatewayRig, events, eventually, gateway_on, said
from tests.secure_rig import Secure, SecureFleet, secure_server

pytestmark = pytest.mark.anyio
KEY = "acme-key-0123456789"


@asynccontextmanager
async def secured(server: Secure) -> AsyncIterator[tuple[GatewayRig, DecodeWorker]]:
    async with SecureFleet(server) as fleet:
        worker = await fleet.decode(engine=FakeEngine(blocks=256, step_s=0.01))
        fleet._spare.append(await server.connect("gateway"))
        async with gateway_on(fleet, model_name=DEFAULT_MODEL, api_keys=f"acme:{KEY}") as rig:
            rig.http.headers["authorization"] = f"Bearer {KEY}"
            yield rig, worker


async def test_it_answers_resumes_and_cancels_for_a_tenant(tmp_path: Path) -> None:
    text = "".join(f"{token} " for token in completion([1, 2, 3], 20))
    ask = {"model": DEFAULT_MODEL, "prompt": "1 2 3", "max_tokens": 20, "stream": True}
    with secure_server(tmp_path) as server:
        async with secured(server) as (rig, worker):
            whole = events((await rig.http.post("/v1/completions", json=ask)).text)
            assert said(whole) == text and whole[-1][1] == "[DONE]"
            rest = await rig.http.get("/v1/completions", headers={sse.HEADER: whole[9][0]})
            assert said(whole[:10]) + said(events(rest.text)) == text
            await eventually(lambda: rig.running_answers == 0)
            leaving = asyncio.create_task(rig.http.post("/v1/completions", json={**ask, "max_tokens": 450}))
            await eventually(lambda: rig.running_answers == worker.load().running == 1)
            leaving.cancel()
            await eventually(lambda: rig.running_answers == worker.load().running == 0, 1.0)
            counts = [line for line in rig.gateway.metrics.render().decode().splitlines() if "requests_total{" in line]
            assert counts == [
                f'trine_requests_total{{model="{DEFAULT_MODEL}",outcome="ok"}} 2.0',
                f'trine_requests_total{{model="{DEFAULT_MODEL}",outcome="cancelled"}} 1.0',
            ]
