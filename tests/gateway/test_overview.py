"""What `/fleet` tells, and whom."""

from __future__ import annotations

import json
from collections.abc import Mapping
from types import MappingProxyType

import pytest

from services.gateway.overview import overview
from services.gateway.recent import KEPT, Answer, Recent
from shared.messages import ServedBy, Usage
from tests.fleet_rig import FleetRig
from tests.gateway_rig import gateway_on
from trine.completion import ClientTimings, Completion
from trine.roster import Roster

LONG = f"cmpl-{'0123456789abcdef' * 2}-1"


def completion(id: str = "a", timings: Mapping[str, float] = MappingProxyType({})) -> Completion:
    times = {
        "ttft_ms": 100.0,
        "tpot_ms": 10.0,
        "total_ms": 250.0,
        "queue_ms": 5.0,
        "transfer_ms": 20.0,
        "prefill_ms": 50.0,
    }
    return Completion(
        id, "m", "secret text", (1, 2), "stop", 7, Usage(prompt_tokens=4), ClientTimings(**{**times, **timings}),
        ServedBy(decode="d-1", prefill=["p-1"]), 1,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("timings", "phases"),
    [
        ({}, (30, 20, 50, 150)),
        ({"ttft_ms": 0.0}, (180, 20, 50, 0)),
        ({"ttft_ms": 60.0}, (0, 10, 50, 190)),
        ({"ttft_ms": 30.0, "prefill_ms": 9e9, "transfer_ms": -1.0}, (0, 0, 30, 220)),
        ({"total_ms": 90.0, "ttft_ms": 90.0}, (20, 20, 50, 0)),
    ],
)
def test_phases_follow_each_other_and_are_the_whole_time(timings: dict[str, float], phases: tuple[float, ...]) -> None:
    answer = Answer.of(completion(timings=timings), 1.0)
    assert (answer.queue_ms, answer.transfer_ms, answer.prefill_ms, answer.decode_ms) == phases


def test_a_tenant_sees_its_own_last_answers_and_no_text() -> None:
    recent = Recent()
    for number in range(KEPT + 5):
        recent.add("acme", Answer.of(completion(f"a-{number}"), 1.0))
    recent.add("globex", Answer.of(completion(LONG), 2.0))
    recent.add("globex", Answer.of(completion(LONG), 9.0))  # the end of a stream that was read once more
    told = overview(Roster(1.0), recent, "globex", None, 0.0, 5.0)
    assert [(answer["id"], answer["ended"]) for answer in told["answers"]] == [("cmpl-01234567-1", 2.0)]
    assert overview(Roster(1.0), recent, "nobody", "why", 0.0, 5.0)["answers"] == []
    mine = recent.of("acme")
    assert (len(mine), mine[0]["id"]) == (KEPT, f"a-{KEPT + 4}")
    assert "secret" not in json.dumps(mine)


@pytest.mark.anyio
async def test_over_http() -> None:
    head = {"authorization": "Bearer 0123456789abcdef"}
    body = {"model": "fake", "prompt": [list(range(30))], "max_tokens": 6, "n": 2}
    async with FleetRig() as fleet:
        await fleet.decode()
        await fleet.prefill()
        async with gateway_on(fleet, api_keys="default:0123456789abcdef") as rig:
            assert (await rig.http.get("/fleet")).status_code == 401
            assert (await rig.http.post("/v1/completions", json=body, headers=head)).status_code == 200
            await rig.hears(fleet)
            told = (await rig.http.get("/fleet", headers=head)).json()
            await fleet.kill("decode-1")
            await fleet.decode("decode-2")
            await rig.http.post("/v1/completions", json={**body, "n": 1}, headers=head)
            again = (await rig.http.get("/fleet", headers=head)).json()
    (model,) = told["models"]
    assert [(row["role"], row["worker"], row["blocks"]) for row in model["workers"]] == [
        ("prefill", "prefill-1", 128),
        ("decode", "decode-1", 128),
    ]
    assert model["served"] and told["trouble"] is None
    first, second = told["answers"]
    assert (first["prompt_tokens"], first["completion_tokens"], first["decode"]) == (30, 6, "decode-1")
    assert min(first["prefill_ms"], second["prefill_ms"]) > 0
    warm = again["answers"][0]
    assert (warm["decode"], warm["cached_tokens"]) == ("decode-2", 28)
    assert warm["transfer_ms"] > 0, "another worker's pool had them, and the cache"
