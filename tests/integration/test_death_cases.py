"""Failure cases of split prefill and decode met in the field: workers die, and the answer is that of one life."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from services.decode.service import DecodeWorker
from shared.detokenizer import Detokenizer
from shared.engine.span import Span
from tests.block_faults import ask, prompt
from tests.cache_rig import eventually
from tests.fake_engine import FakeEngine, FakeTokenizer, completion, logprob
from tests.fleet_rig import FleetRig
from tests.streamed import consume, words
from trine.completion import Completion

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
T_MS = 10_000
"""The deadline of requests whose workers die: they are answered long before."""


class Gated(FakeEngine):
    """Takes its first step when `begin` is set, and the one that would choose the token for position `at` when `gate`
    is: what has come in until then is a few steps apart at most."""

    def __init__(self, at: int, **options: Any) -> None:
        super().__init__(blocks=512, **options)
        self.begin, self.gate = threading.Event(), threading.Event()
        self._at = at

    def step(self, spans: Sequence[Span]) -> list[list[int]]:
        self.begin.wait(20)
        if any(span.start + len(span.token_ids) >= self._at for span in spans):
            self.gate.wait(20)
        return super().step(spans)


async def kill(rig: FleetRig, name: str, engine: Gated) -> None:
    """In the middle of a step, whose outcome nobody hears of, when all before it has been told."""
    await asyncio.sleep(0.2)
    killing = asyncio.create_task(rig.kill(name))
    await asyncio.sleep(0.02)  # its connections are gone
    engine.gate.set()
    await killing


async def test_case_54_prefill_dies_in_mid_prompt_with_and_without_a_spare() -> None:
    async with FleetRig() as rig:
        decode = await rig.decode(local_prefill_tokens=0, prefill_patience_s=4.0)
        for number, spare in enumerate((False, True)):
            slow = FakeEngine(blocks=128, step_s=0.1)
            victim = await rig.prefill(f"victim-{number}", slow)
            task = asyncio.create_task(ask(rig.client(), prompt(120, number), deadline_ms=T_MS))
            await eventually(lambda: victim.counters["computed_blocks"] >= 4)  # noqa: B023
            if spare:
                await rig.prefill("spare")
            await rig.kill(f"victim-{number}")
            answer = await task
            assert ("spare" in answer.served_by.prefill) == spare
            assert answer.timings.total_ms < T_MS
        assert decode.counters["prefill_given_up"] == 1, "without a spare it was computed here"
        await rig.quiet()


async def test_case_56_what_a_dead_worker_had_taken_and_what_it_had_not_begun() -> None:
    async with FleetRig() as rig:
        engine = Gated(at=24)
        await rig.decode("decode-1", engine, max_running=2)
        tasks = [asyncio.create_task(ask(rig.client(), prompt(20, n), 20, deadline_ms=T_MS)) for n in range(7)]
        engine.begin.set()
        await eventually(lambda: rig.workers["decode-1"].load().running == 2)
        await asyncio.sleep(0.1)
        await rig.decode("decode-2", max_running=2)
        await kill(rig, "decode-1", engine)
        answers = await asyncio.gather(*tasks)
        assert {answer.served_by.decode for answer in answers} == {"decode-2"}
        await rig.quiet()


class Fragments(FakeTokenizer):
    """Tokens are pieces of characters: half an emoji, the other half, and a letter with most of a euro sign."""

    PARTS = (b"\xf0\x9f", b"\x99\x82", b"a\xe2\x82", b"\xacz")

    def detokenizer(self) -> Any:
        return Detokenizer([self.PARTS[token % 4] for token in range(self.vocab_size)])

    def text(self, tokens: Sequence[int]) -> str:
        return b"".join(self.PARTS[token % 4] for token in tokens).decode(errors="replace")


P, CUT = 30, 20


@pytest.mark.parametrize("cut", [CUT, 1])
async def test_case_57_decode_dies_and_text_ends_and_usage_are_those_of_one_life(cut: int) -> None:
    """All at once, all cut at the same token."""
    async with FleetRig() as rig:
        engine = Gated(at=P + cut, seeded=True)
        await rig.decode("decode-1", engine, max_running=16, step_tokens=512)
        client, seed = rig.client(), 7

        def said(number: int) -> list[int]:
            return completion(prompt(P, number), 100, seed)

        def begin(number: int, **wishes: Any) -> asyncio.Task[Completion]:
            tokens = {"token_ids": prompt(P, number), "max_tokens": 100, "seed": seed}
            return asyncio.create_task(consume(client.stream(**{**tokens, **wishes})))

        plain = [begin(n, temperature=n) for n in range(2)]
        # Stop strings that begin before the cut and end after it; one that is held back and never ends.
        stops = {n: words(said(n)[max(cut - 5, 0) : cut + n]) for n in (2, 3, 4)}
        stopping = {n: begin(n, stop=stop) for n, stop in stops.items()}
        never = begin(5, stop=words(said(5)[: cut + 5]) + "never")
        # The stop comes early, and counts only after `min_tokens`: after the cut, it is not there again.
        least = begin(6, stop=words(said(6)[:1]), min_tokens=cut + 5, max_tokens=cut + 5)
        exact = [begin(7 + n, max_tokens=cut + n) for n in range(3)]
        scored = begin(10, logprobs=True, top_logprobs=2)

        await eventually(lambda: rig.workers["decode-1"].load().running == 11)
        await asyncio.sleep(0.2)  # they are looking for their blocks
        engine.begin.set()
        await rig.decode("decode-2", FakeEngine(blocks=512, seeded=True), max_running=16)
        await eventually(lambda: min(stored(rig).values()) >= cut - 4)
        await kill(rig, "decode-1", engine)

        for number, task in enumerate(plain):
            answer = await task
            check(answer, said(number), "length")
            assert answer.attempts == 2
        for number, task in stopping.items():
            whole = said(number)[: cut + number]
            answer = await task
            assert list(answer.token_ids) == whole
            assert answer.text == words(whole)[: -len(stops[number])]
            assert (answer.finish_reason, answer.usage.completion_tokens) == ("stop", cut + number)
        check(await never, said(5), "length")
        check(await least, said(6)[: cut + 5], "length")
        for number, task in enumerate(exact):
            check(await task, said(7 + number)[: cut + number], "length")
        answer = await scored
        check(answer, said(10), "length")
        assert list(answer.logprobs) == [logprob(token, 2) for token in said(10)]
        await rig.quiet()


def stored(rig: FleetRig) -> dict[str, int]:
    """How many tokens of each request the first worker has told."""
    worker = rig.workers["decode-1"]
    assert isinstance(worker, DecodeWorker)
    return {request.generate.id: request.events._stored for request in worker._desk.requests.values()}


def check(answer: Completion, tokens: list[int], reason: str) -> None:
    assert list(answer.token_ids) == tokens
    assert answer.text == words(tokens)
    assert answer.finish_reason == reason
    assert answer.usage.prompt_tokens == P
    assert answer.usage.completion_tokens == len(tokens)
    assert answer.usage.cached_tokens == 0


async def test_case_57_a_character_that_the_death_cuts_in_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.fleet_rig.FakeTokenizer", Fragments)
    async with FleetRig() as rig:
        engine = Gated(at=P + CUT)
        await rig.decode("decode-1", engine, max_running=16, step_tokens=512)
        client = rig.client()
        streams = [client.stream(token_ids=prompt(P, n), max_tokens=60, id=str(n)) for n in range(12)]
        tasks = [asyncio.create_task(consume(stream)) for stream in streams]
        await eventually(lambda: rig.workers["decode-1"].load().running == 12)
        await asyncio.sleep(0.2)  # they are looking for their blocks
        engine.begin.set()
        await rig.decode("decode-2", FakeEngine(blocks=512), max_running=16)
        await eventually(lambda: min(stored(rig).values()) >= CUT - 4)
        told = stored(rig)
        await kill(rig, "decode-1", engine)
        cut = 0
        for number, task in enumerate(tasks):
            answer, tokens = await task, completion(prompt(P, number), 60)
            assert list(answer.token_ids) == tokens
            assert answer.text == Fragments().text(tokens)
            assert answer.attempts == 2
            before, after = tokens[told[str(number)] - 1 :][:2]
            cut += (before % 4, after % 4) in {(0, 1), (2, 3)}
        assert cut > 0, "some character begins before the death and ends after it"
