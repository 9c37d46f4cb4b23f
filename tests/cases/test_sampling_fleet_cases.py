"""Sampling parameters through a whole fleet: what clients get with a drafter, after a death, for impossible wishes."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from shared.bus.base import Incoming
from shared.codec import decode_event
from shared.engine.engine import Engine
from shared.errors import InvalidField
from shared.messages import Failed, Tokens
from shared.sampling.fields import Logprob
from shared.subjects import Subjects
from tests import tiny_models
from tests.fleet_rig import MODEL, FleetRig
from trine.completion import Completion

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

SUBJECTS = Subjects(MODEL)
PROMPT = [random.Random(5).randrange(3, tiny_models.VOCAB) for _ in range(11)]
STEERING: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 1,
    "presence_penalty": 1,
    "logit_bias": {2: -100, 5: 1.5},
    "min_tokens": 8,
    "logprobs": True,
    "top_logprobs": 5,
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tiny_models.write(tmp_path_factory.mktemp("llama"), tiny_models.ARCHITECTURES["llama"])
    return Engine.load(folder, block_size=4, kv_blocks=2)


def another(engine: Engine) -> Engine:
    return engine.sibling("none", 128)


def check_same(one: Completion, other: Completion, count: int) -> None:
    assert (one.text, one.token_ids, one.finish_reason) == (other.text, other.token_ids, other.finish_reason)
    for answer in (one, other):
        assert answer.usage.completion_tokens == len(answer.token_ids) == len(answer.logprobs) == count
    for a, b in zip(one.logprobs, other.logprobs, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=1e-4)
        assert len(a.top_ids) == 5


@pytest.mark.parametrize("temperature", [0, 1.2])
async def test_cases_41_44_and_45_with_a_drafter_and_without(engine: Engine, temperature: float) -> None:
    wishes = {**STEERING, "token_ids": PROMPT, "temperature": temperature, "seed": 3, "max_tokens": 30}
    async with FleetRig() as rig:
        await rig.decode(engine=another(engine))
        alone = await rig.client().generate(**wishes)
        await rig.kill("decode-1")
        await rig.decode("decode-2", engine=another(engine), draft_depth=4, draft_wait_ms=500, draft_adaptive=False)
        await rig.drafter(engine=another(engine))
        drafted = await rig.client().generate(**wishes)
        assert 20 < drafted.usage.accepted_tokens <= drafted.usage.drafted_tokens
        check_same(alone, drafted, 30)
        assert 2 not in drafted.token_ids
        await rig.quiet()


async def test_an_answer_continued_elsewhere_is_penalised_and_reported_alike(engine: Engine) -> None:
    wishes = {**STEERING, "token_ids": PROMPT, "temperature": 1.0, "seed": 3, "max_tokens": 100}
    async with FleetRig() as rig:
        for number in (1, 2):
            await rig.decode(f"decode-{number}", engine=another(engine))
        alone = await rig.client().generate(**wishes)
        stream = rig.client().stream(**wishes)
        said: list[Logprob] = []
        async for delta in stream:
            said += delta.logprobs
            assert len(said) == delta.index + len(delta.token_ids)
            if len(said) > 10 and len(rig.workers) == 2:
                await rig.kill(next(n for n, w in rig.workers.items() if w.load().running))
        assert stream.completion.attempts == 2
        assert tuple(said) == stream.completion.logprobs
        check_same(alone, stream.completion, 100)


class Raw:
    """Publishes bytes as anybody can, and waits for the end."""

    def __init__(self, rig: FleetRig) -> None:
        self._bus = rig.bus()
        self._asked = 0

    async def ask(self, **fields: Any) -> Any:
        self._asked += 1
        end: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        async def on_event(message: Incoming) -> None:
            event = decode_event(message.data)
            if not isinstance(event, Tokens):
                end.set_result(event)

        await self._bus.subscribe(SUBJECTS.events(f"raw-{self._asked}"), on_event)
        data = json.dumps({"id": f"raw-{self._asked}", "token_ids": PROMPT, "max_tokens": 3, **fields}).encode()
        await self._bus.publish(SUBJECTS.request("normal"), data)
        return await asyncio.wait_for(end, 5)


IMPOSSIBLE: list[tuple[dict[str, Any], str]] = [
    *(
        ({field: value}, field)
        for field in ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
        for value in (float("nan"), float("inf"), 1e308, -3, "1")
    ),
    *(({"top_p": value}, "top_p") for value in (0, -1, 1.1)),
    ({"top_k": -1}, "top_k"),
    *(
        ({"logit_bias": bias}, "logit_bias")
        for bias in (
            *({key: 1} for key in ("128", "-1", "abc", str(10**9))),
            *({"5": value} for value in (1e9, float("nan"), "1", None)),
            {str(n): 0 for n in range(100_000)},
            dict.fromkeys(map(str, range(128)), -100),
        )
    ),
    ({"logit_bias": {str(t): -100 for t in range(128) if t != 2}, "min_tokens": 1}, "logit_bias"),
    ({"min_tokens": 4}, "min_tokens"),
    ({"logprobs": True, "top_logprobs": 128}, "top_logprobs"),
]


async def test_cases_100_102_103_and_109_what_cannot_be_is_refused_alone(engine: Engine) -> None:
    """With neighbours that run on, and a request that is answered as ever afterwards."""
    async with FleetRig() as rig:
        await rig.decode(engine=another(engine))
        client, raw = rig.client(), Raw(rig)
        probe: dict[str, Any] = {"token_ids": PROMPT, "temperature": 0, "max_tokens": 60}
        before = await client.generate(**probe)
        neighbour = asyncio.create_task(client.generate(**probe))
        for fields, field in IMPOSSIBLE:
            refused = await raw.ask(**fields)
            assert isinstance(refused, Failed), fields
            assert (refused.code, (refused.field or "").partition(".")[0]) == ("invalid_field", field), fields
            assert len(refused.message) < 300
        assert (await neighbour).text == (await client.generate(**probe)).text == before.text
        nulls = await raw.ask(temperature=None, top_p=None, logit_bias=None, frequency_penalty=None, logprobs=None)
        assert nulls.reason == "length"
        edges = await raw.ask(top_k=9_999_999, min_p=1, top_p=1e-9, repetition_penalty=1e-9, logit_bias={"127": 100})
        assert edges.usage.completion_tokens == 3
        await rig.quiet()


async def test_the_client_refuses_what_it_can_know(engine: Engine) -> None:
    async with FleetRig() as rig:
        for fields, field in ((f, n) for f, n in IMPOSSIBLE if n not in ("logit_bias", "min_tokens")):
            with pytest.raises(InvalidField) as caught:
                rig.client().stream(token_ids=PROMPT, **fields)
            assert caught.value.field == field
