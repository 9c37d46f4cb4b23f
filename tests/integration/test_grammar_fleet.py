"""Answers in a form through a whole fleet: many at once with a drafter, continued by another worker, refused alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection
from functools import cache
from typing import Any

import pytest
import xgrammar

from shared.engine.engine import Engine
from shared.errors import InvalidField, TrineError, Unavailable
from shared.messages import Guided
from shared.sampling.grammar import GrammarGuide, Vocabulary, guided_of
from shared.sampling.guide import Guide
from tests import tiny_models
from tests.fleet_rig import FleetRig
from tests.letters import EOS, TABLE, Letters, ids

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["red", "blue"]}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["kind", "n"],
}
LONG = {"type": "array", "items": SCHEMA, "minItems": 2, "maxItems": 4}


class Here:
    """Implements `Guides` without a process of its own."""

    def __init__(self) -> None:
        self.vocabulary = Vocabulary(TABLE, tiny_models.VOCAB, {EOS})
        self._compiled = cache(self._compile)

    def _compile(self, canonical: str) -> xgrammar.CompiledGrammar:
        try:
            return self.vocabulary.compile(guided_of(canonical))
        except RuntimeError as error:
            raise InvalidField(str(error), field="guided") from None

    async def guide(self, guided: Guided, *, banned: Collection[int], min_tokens: int) -> Guide:
        grammar = self._compiled(guided.canonical)
        return GrammarGuide(grammar, self.vocabulary, guided, banned=banned, min_tokens=min_tokens)

    async def close(self) -> None:
        pass


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tiny_models.write(tmp_path_factory.mktemp("llama"), tiny_models.ARCHITECTURES["llama"])
    return Engine.load(folder, block_size=4, kv_blocks=2)


def another(engine: Engine) -> Engine:
    return engine.sibling("none", 400)


def rig_of_letters() -> FleetRig:
    rig = FleetRig()
    rig.tokenizer, rig.guides = Letters(), Here()  # type: ignore[assignment]
    return rig


def wish(number: int, **more: Any) -> dict[str, Any]:
    form = {"guided": {"json_schema": SCHEMA}, "logit_bias": {ord(space): -100 for space in " \n\r"}}  # short answers
    return {
        "token_ids": ids(f"number {number}"),
        "temperature": number % 2,
        "seed": number,
        "max_tokens": 120,
        **form,
        **more,
    }


async def test_case_48_sixteen_at_once_with_a_drafter(engine: Engine) -> None:
    """Case 48: all valid, and what they are without a drafter."""
    async with rig_of_letters() as rig:
        await rig.decode(engine=another(engine), draft_depth=4, draft_wait_ms=500, draft_adaptive=False)
        client = rig.client()
        alone = await asyncio.gather(*(client.generate(**wish(n)) for n in range(16)))
        await rig.drafter(engine=another(engine))
        drafted = await asyncio.gather(*(client.generate(**wish(n)) for n in range(16)))
        for one, other in zip(alone, drafted, strict=True):
            said = json.loads(one.text)
            assert said["kind"] in ("red", "blue") and 0 <= said["n"] <= 99 and one.finish_reason == "stop"
            assert (one.text, one.token_ids) == (other.text, other.token_ids)
        assert sum(answer.usage.drafted_tokens for answer in drafted) > 0
        await rig.quiet()


async def test_a_form_is_followed_on_by_whoever_continues_the_answer(engine: Engine) -> None:
    wishes = wish(1, guided={"json_schema": LONG}, max_tokens=200)
    async with rig_of_letters() as rig:
        for number in (1, 2):
            await rig.decode(f"decode-{number}", engine=another(engine))
        alone = await rig.client().generate(**wishes)
        stream = rig.client().stream(**wishes)
        said = 0
        async for delta in stream:
            said += len(delta.token_ids)
            if said > 20 and len(rig.workers) == 2:
                await rig.kill(next(n for n, w in rig.workers.items() if w.load().running))
        answer = stream.completion
        assert answer.attempts == 2 and (answer.text, answer.finish_reason) == (alone.text, "stop")
        assert 2 <= len(json.loads(answer.text)) <= 4


class Compiling(Here):
    """Until it is closed, which makes it give up."""

    def __init__(self) -> None:
        super().__init__()
        self.closed = asyncio.Event()

    async def guide(self, *_: Any, **__: Any) -> Guide:
        await self.closed.wait()
        raise Unavailable("the compiler of forms is gone")

    async def close(self) -> None:
        self.closed.set()
        await asyncio.sleep(0.2)


async def test_who_stops_while_a_form_is_compiled_leaves_the_request_to_another(engine: Engine) -> None:
    async with rig_of_letters() as rig:
        rig.guides = Compiling()
        first = await rig.decode("decode-1", engine=another(engine), drain_s=0.1)
        asking = asyncio.create_task(rig.client().generate(**wish(1)))
        async with asyncio.timeout(5):
            while not first.load().running:
                await asyncio.sleep(0.01)
        rig.guides = Here()
        await rig.decode("decode-2", engine=another(engine))
        await rig.drain("decode-1")
        assert (await asking).served_by.decode == "decode-2"
        assert first.counters["failed_unavailable"] == 0


async def refused(client: Any, **more: Any) -> TrineError:
    with pytest.raises(TrineError) as caught:
        await client.generate(**wish(0, **more))
    return caught.value


async def test_case_109_forms_that_cannot_be_had_are_refused_alone(engine: Engine) -> None:
    """Case 109: the neighbour's answer is as ever."""
    bans = {str(token): -100 for token in ids("ab")}
    async with rig_of_letters() as rig:
        await rig.decode(engine=another(engine))
        client = rig.client()
        before = await client.generate(**wish(3))
        neighbour = asyncio.create_task(client.generate(**wish(3)))
        for more in (
            {"guided": {"json_schema": {"type": "nothing"}}},
            {"guided": {"grammar": "root ::= root"}},
            {"guided": {"regex": "x[ab]y"}, "logit_bias": bans},
        ):
            error = await refused(client, **more)
            assert error.code == "invalid_field" and (error.field or "").startswith("guided"), error.message
        assert (await neighbour).text == before.text
        await rig.quiet()
        rig.guides = None
        await rig.kill("decode-1")
        await rig.decode("decode-2", engine=another(engine))
        assert (await refused(client)).code == "invalid_field"
