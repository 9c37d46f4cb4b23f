"""Streams that break, clients that leave or stop reading, and going on where one stopped."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx2
import openai
import pytest

from services.decode.service import DecodeWorker
from services.gateway import sse
from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import MODEL, FleetRig
from tests.gateway_rig import GatewayRig, events, eventually, gateway_on, said

pytestmark = pytest.mark.anyio
PROMPT = "1 2 3 4 5"
STEP_S = 0.02


def text(count: int) -> str:
    return "".join(f"{token} " for token in completion([1, 2, 3, 4, 5], count))


def body(count: int, **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": PROMPT, "max_tokens": count, "stream": True, **more}


@pytest.fixture
async def fleet() -> AsyncIterator[FleetRig]:
    async with FleetRig() as fleet:
        await fleet.decode(engine=FakeEngine(blocks=1024, context=2048, step_s=STEP_S))
        yield fleet


@pytest.fixture
async def rig(fleet: FleetRig) -> AsyncIterator[GatewayRig]:
    async with gateway_on(fleet) as rig:
        yield rig


def served(fleet: FleetRig) -> int:
    worker = fleet.workers["decode-1"]
    assert isinstance(worker, DecodeWorker)
    return worker.load().running + worker.load().waiting


async def begun(response: httpx2.Response, count: int) -> str:
    """The stream's text up to its event number `count`; the connection stays as it is."""
    found = ""
    async for piece in response.aiter_text():
        found += piece
        if len(events(found)) >= count:
            break
    return found


def tokens(found: list[tuple[str, Any]]) -> list[str]:
    choices = [choice for _, data in found if data != "[DONE]" for choice in data["choices"]]
    return [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]


class TestTrouble:
    async def test_without_a_spare_worker_the_client_is_told_so(self, fleet: FleetRig, rig: GatewayRig) -> None:
        """Case 87."""
        async with rig.openai() as client:
            stream = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=500, stream=True)
            pieces = []
            with pytest.raises(openai.APIError, match="no decode worker for model 'fake' was heard") as told:  # noqa: PT012
                async for chunk in stream:
                    pieces.append(chunk.choices[0])
                    if len(pieces) == 5:
                        await fleet.kill("decode-1")
        assert told.value.code == "no_workers"
        assert all(piece.finish_reason is None for piece in pieces)
        assert text(500).startswith("".join(piece.text for piece in pieces))
        ready = await rig.http.get("/ready")  # case 123
        assert (ready.status_code, ready.json()["reason"]) == (503, "no decode worker is heard")
        refused = await rig.http.post("/v1/completions", json=body(5))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_workers")
        assert int(refused.headers["retry-after"]) >= 1
        assert (await rig.http.get("/health")).status_code == 200

    async def test_another_worker_goes_on_with_a_stream(self, fleet: FleetRig, rig: GatewayRig) -> None:
        """Case 57."""
        async with rig.http.stream("POST", "/v1/completions", json=body(40)) as response:
            pieces = response.aiter_text()
            found = await anext(pieces)
            await fleet.decode("decode-2", engine=FakeEngine(blocks=1024, context=2048))
            await fleet.kill("decode-1")
            async for piece in pieces:
                found += piece
        assert said(events(found)) == text(40)
        assert events(found)[-1][1] == "[DONE]"

    async def test_nats_away(self, fleet: FleetRig, rig: GatewayRig) -> None:
        """Case 73."""
        (bus,) = fleet._buses["gateway"]
        bus.disconnect()
        refused = await rig.http.post("/v1/completions", json=body(5))
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "bus_disconnected")
        assert (await rig.http.get("/ready")).json()["reason"] == "NATS is not reachable"
        bus.reconnect()
        await eventually(lambda: rig.gateway.trouble() is None)
        assert said(events((await rig.http.post("/v1/completions", json=body(5))).text)) == text(5)


class TestLeaving:
    @pytest.mark.parametrize("stream", [True, False])
    async def test_all_choices_are_cancelled(self, fleet: FleetRig, rig: GatewayRig, stream: bool) -> None:
        """Case 90."""
        writer = await rig.ask("/v1/completions", body(1500, n=3, stream=stream))
        await eventually(lambda: served(fleet) == 3)
        writer.close()
        left = time.monotonic()
        await eventually(lambda: served(fleet) == 0 and rig.running_answers == 0)
        assert time.monotonic() - left < 1.0
        assert b'trine_requests_total{model="fake",outcome="cancelled"} 1.0' in rig.gateway.metrics.render()

    async def test_who_does_not_read_is_cut_off(self, fleet: FleetRig, rig: GatewayRig) -> None:
        """Case 91: the connection goes, and with it what it kept."""
        listening = rig.server.servers[0].sockets[0]
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)  # the system keeps megabytes else
        writer = await rig.ask("/v1/completions", body(1500, n=16, logprobs=20))
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await eventually(lambda: served(fleet) == 16)
        async with asyncio.timeout(20):
            while rig.running_answers:
                await asyncio.sleep(0.05)
        assert said(events((await rig.http.post("/v1/completions", json=body(5))).text)) == text(5)
        writer.close()


class TestResuming:
    async def test_from_any_event_on_while_it_runs_and_when_it_has_ended(self, rig: GatewayRig) -> None:
        ask = body(30, logprobs=0, stream_options={"include_usage": True})
        async with rig.http.stream("POST", "/v1/completions", json=ask) as response:
            pieces = response.aiter_text()
            first = await anext(pieces)
            last_id = events(first)[-1][0]
            again = rig.http.post("/v1/completions", json=ask, headers={sse.HEADER: last_id})
            while_it_runs = asyncio.create_task(again)
            whole = events(first + "".join([piece async for piece in pieces]))
        rest = events((await while_it_runs).text)
        assert said(events(first)) + said(rest) == text(30) == said(whole)
        assert rest[-2][1]["usage"] == whole[-2][1]["usage"]
        assert len(tokens(whole)) == 30
        for number, (event_id, _) in enumerate(whole[:-1]):
            if number % 7 == 0 or number > 28:
                later = events((await rig.http.get("/v1/completions", headers={sse.HEADER: event_id})).text)
                assert said(whole[: number + 1]) + said(later) == text(30)
                assert tokens(whole[: number + 1]) + tokens(later) == tokens(whole)
                assert later[-1][1] == "[DONE]"

    async def test_several_choices_of_a_chat(self, rig: GatewayRig) -> None:
        ask = {**body(12, n=2), "messages": [{"role": "user", "content": PROMPT}]}
        del ask["prompt"]
        whole = events((await rig.http.post("/v1/chat/completions", json=ask)).text)
        middle = len(whole) // 2
        event_id = next(event_id for event_id, _ in reversed(whole[:middle]) if event_id)
        rest = events((await rig.http.post("/v1/chat/completions", json=ask, headers={sse.HEADER: event_id})).text)
        for choice in (0, 1):
            both = [
                (event_id, {"choices": [c for c in data["choices"] if c["index"] == choice]})
                for event_id, data in [*whole[:middle], *rest]
                if data != "[DONE]"
            ]
            assert said(both) == text(12)
        roles = [c["delta"].get("role") for _, data in rest if data != "[DONE]" for c in data["choices"]]
        assert "assistant" not in roles  # both have begun

    async def test_an_id_of_nobodys_making(self, rig: GatewayRig) -> None:
        for event_id in (
            "",
            "x",
            "cmpl-12:3.4",
            f"chatcmpl-{'0' * 32}:1.1",
            f"cmpl-{'0' * 32}:-1.1",
            f"cmpl-{'0' * 32}:1.1" + ",1.1" * 16,
        ):
            answer = await rig.http.get("/v1/completions", headers={sse.HEADER: event_id})
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "last_event_id"), event_id


class TestEnding:
    async def test_streams_finish_and_nothing_new_begins(self, rig: GatewayRig) -> None:
        """Case 124."""
        async with rig.http.stream("POST", "/v1/completions", json=body(30)) as response:
            pieces = response.aiter_text()
            found = await anext(pieces)
            rig.server.handle_exit(15, None)
            async for piece in pieces:
                found += piece
        assert said(events(found)) == text(30) and events(found)[-1][1] == "[DONE]"
        await asyncio.wait_for(rig.running, 3)
        with pytest.raises(httpx2.ConnectError):
            await rig.http.get("/health")

    async def test_what_takes_too_long_ends_with_an_error(self, fleet: FleetRig) -> None:
        async with gateway_on(fleet, drain_s=0.3) as rig, rig.openai() as client:
            stream = await client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=1500, stream=True)
            rig.server.handle_exit(15, None)
            with pytest.raises(openai.APIError, match="shutting down"):
                async for _ in stream:
                    pass
            await asyncio.wait_for(rig.running, 3)
            await eventually(lambda: served(fleet) == 0)
