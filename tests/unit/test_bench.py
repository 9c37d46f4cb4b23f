"""`trine bench`: what it computes, when it sends, what it reads, and from whom."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import islice, pairwise, repeat

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.gateway_worker import Worker
from shared.config import Settings
from shared.errors import InvalidField
from shared.subjects import Subjects
from tests.fleet_rig import MODEL, FleetRig
from trine.bench_http import HttpTarget, first_model
from trine.bench_load import Load, drive
from trine.bench_nats import NatsTarget
from trine.bench_sets import SETS, Prompt, prompts
from trine.bench_sse import HttpError, StreamParser
from trine.bench_stats import Objectives, Record, percentile, report
from trine.cli import app
from trine.client import Client

HELLO = repeat(Prompt("11 22 33"))
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(text: str) -> bytes:
    return b"%x\r\n%s\r\n" % (len(text), text.encode())


def content(text: str) -> str:
    return f"data: {json.dumps({'choices': [{'delta': {'content': text}}]})}\n\n"


USAGE = 'data: {"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":3,"prompt_tokens_details":null}}\n\n'
ANSWER = (
    HEAD + chunk(content("") + content("a")) + chunk(content("b")) + chunk(USAGE + "data: [DONE]\n\n") + b"0\r\n\r\n"
)


class TestStats:
    @given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
    def test_percentiles_are_those_of_numpy(self, values: list[float], percent: float) -> None:
        assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)), rel=1e-6, abs=1e-6)

    def test_of_nothing_there_is_no_percentile(self) -> None:
        assert math.isnan(percentile([], 50))

    def test_a_report(self) -> None:
        records = [
            Record(0.0, [0.1, 0.2, 0.4], 0.5, tokens=4, prompt_tokens=10, cached_tokens=8),
            Record(1.0, [1.4], 1.5, tokens=1, prompt_tokens=10),
            Record(1.0, [1.1], 2.0, tokens=1, error="timeout"),
        ]
        found = report(records, Objectives(ttft_ms=200))
        assert (found.requests, found.completed, found.errors, found.seconds) == (3, 2, {"timeout": 1}, 2.0)
        assert (found.output_tokens, found.output_tokens_per_s, found.total_tokens_per_s) == (5, 2.5, 12.5)
        assert (found.prompt_tokens, found.cached_tokens, found.requests_per_s) == (20, 8, 1.0)
        assert found.ttft_ms and found.ttft_ms["p50"] == pytest.approx(250)
        assert found.tpot_ms and found.tpot_ms["mean"] == pytest.approx(100)  # of the one that has a pace
        assert found.itl_ms and found.itl_ms["p50"] == pytest.approx(150)
        assert found.e2e_ms and found.e2e_ms["p99"] == pytest.approx(500)
        assert found.goodput_per_s == 0.5 and found.good_share == pytest.approx(1 / 3)

    def test_an_objective_is_met_at_its_bound(self) -> None:
        record = Record(0.0, [0.25, 0.75], 1.0, tokens=2)
        assert Objectives(250, 500, 1000).met(record)
        assert not Objectives(ttft_ms=249).met(record)
        assert not Objectives(tpot_ms=499).met(record)
        assert not Objectives(e2e_ms=999).met(record)
        record.error = "500"
        assert not Objectives().met(record)

    def test_failures_alone_have_no_latencies(self) -> None:
        found = report([Record(0.0, ended=1.0, error="503")], Objectives())
        assert (found.ttft_ms, found.itl_ms, found.output_tokens_per_s) == (None, None, 0.0)
        json.dumps(found.as_dict(), allow_nan=False)


class Recorded:
    """A target that answers after a while, and counts."""

    def __init__(self, seconds: float = 0.005) -> None:
        self.seconds = seconds
        self.now = self.most = 0

    async def ask(self, prompt: Prompt, max_tokens: int, record: Record) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        await asyncio.sleep(self.seconds)
        self.now -= 1
        record.ended = record.due + self.seconds


class TestLoad:
    def test_arrivals_are_a_poisson_process_that_the_seed_decides(self) -> None:
        def gaps(seed: int) -> list[float]:
            at = list(Load(4001, 1, rate=50.0, seed=seed).arrivals())
            assert at[0] == 0.0
            return [b - a for a, b in pairwise(at)]

        assert gaps(1) == gaps(1) != gaps(2)
        assert np.mean(gaps(1)) == pytest.approx(1 / 50, rel=0.05)
        assert np.std(gaps(1)) == pytest.approx(1 / 50, rel=0.08)  # as wide as it is long

    @pytest.mark.parametrize("which", [{}, {"rate": 1.0, "concurrency": 1}, {"rate": 0.0}, {"rate": math.nan}])
    def test_a_load_is_of_one_kind(self, which: dict[str, float]) -> None:
        with pytest.raises(InvalidField):
            Load(1, 1, **which)  # type: ignore[arg-type]

    @pytest.mark.anyio
    async def test_so_many_at_once(self) -> None:
        target = Recorded()
        records = await drive(target, HELLO, Load(20, 1, concurrency=4))
        assert (len(records), target.most) == (20, 4)

    @pytest.mark.anyio
    async def test_a_rate_does_not_wait_for_answers(self) -> None:
        target = Recorded(0.3)
        records = await drive(target, HELLO, Load(20, 1, rate=200.0))
        assert (len(records), target.most) == (20, 20)


class TestSets:
    @pytest.mark.parametrize("name", SETS)
    def test_same_seed_same_prompts(self, name: str) -> None:
        some = list(islice(prompts(name, 3), 100))
        assert some == list(islice(prompts(name, 3), 100)) != list(islice(prompts(name, 4), 100))
        assert all(message["content"].strip() for prompt in some for message in prompt.messages)

    @pytest.mark.parametrize("name", ["chat", "code", "long"])
    def test_no_two_share_a_block(self, name: str) -> None:
        assert len({prompt.user[:12] for prompt in islice(prompts(name, 0), 200)}) == 200

    def test_a_long_one_is_long_and_rag_and_agent_share_their_beginnings(self) -> None:
        assert all(4500 < len(prompt.user) < 5000 for prompt in islice(prompts("long", 0), 5))
        assert len({prompt.system for prompt in islice(prompts("rag", 0), 100)}) == 5
        assert len({prompt.system for prompt in islice(prompts("agent", 0), 100)}) == 1


class TestParser:
    @given(st.lists(st.integers(1, len(ANSWER) - 1)))
    def test_it_does_not_matter_how_bytes_come(self, cuts: list[int]) -> None:
        parser, places = StreamParser(), [0, *sorted(cuts), len(ANSWER)]
        events = [e for a, b in pairwise(places) for e in parser.feed(ANSWER[a:b])]
        assert len(events) == 5 and events[-1] == b"[DONE]"
        assert parser.done and parser.reusable

    def test_without_chunks_the_length_or_the_end_tells(self) -> None:
        parser = StreamParser()
        assert parser.feed(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\ndata: a\n\n") == [b"a"]
        assert parser.done and parser.reusable
        parser = StreamParser()
        assert parser.feed(b"HTTP/1.1 200 OK\r\n\r\ndata: a\r\n\r\ndata:b\n\n: comment\n\n") == [b"a", b"b"]
        assert not parser.done
        parser.end()
        assert parser.done and not parser.reusable

    @pytest.mark.parametrize(
        ("answer", "why"),
        [
            (b"HTTP/1.1 503 Busy\r\n\r\n", "503"),
            (b"SSH-2.0-x\r\n\r\n", "not HTTP"),
            (HEAD + b"zz\r\n", "not a chunk"),
            (b"HTTP/1.1 200 OK\r\nx: " + b"y" * 70_000, "endless headers"),
        ],
    )
    def test_what_is_no_such_answer(self, answer: bytes, why: str) -> None:
        with pytest.raises(HttpError, match=why):
            StreamParser().feed(answer)

    @pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200", HEAD + b"5\r\nda", ANSWER[:-5]])
    def test_an_answer_that_is_cut_off(self, answer: bytes) -> None:
        parser = StreamParser()
        parser.feed(answer)
        with pytest.raises(HttpError, match="cut off"):
            parser.end()


@asynccontextmanager
async def served(answers: Iterator[bytes | None]) -> AsyncIterator[tuple[str, list[bytes]]]:
    """An API that answers a request with the next of these bytes, and closes the connection for None."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
                asked.append(head + await reader.readexactly(length))
                if (answer := next(answers)) is None:
                    break
                writer.write(answer)
        except asyncio.IncompleteReadError:
            pass
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


@pytest.mark.anyio
class TestHttp:
    async def test_answers_on_one_connection(self) -> None:
        async with served(iter([ANSWER, ANSWER])) as (url, asked), HttpTarget(f"{url}/v1", "m", key="k") as target:
            records = await drive(target, HELLO, Load(2, 3, concurrency=1))
        for record in records:
            assert (record.error, record.tokens, record.prompt_tokens, len(record.pieces)) == ("", 3, 7, 2)
            assert record.due <= record.pieces[0] <= record.pieces[1] <= record.ended
        head, _, body = asked[0].partition(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/chat/completions HTTP/1.1\r\n") and b"authorization: Bearer k" in head
        assert json.loads(body)["max_tokens"] == 3 and json.loads(body)["stream"] is True

    async def test_a_kept_connection_that_the_server_has_closed(self) -> None:
        async with served(iter([ANSWER, None, ANSWER])) as (url, asked), HttpTarget(url, "m") as target:
            records = await drive(target, HELLO, Load(2, 3, concurrency=1))
        assert [record.error for record in records] == ["", ""] and len(asked) == 3  # the second on the first's

    async def test_what_else_is_asked_for(self) -> None:
        async with (
            served(iter([ANSWER])) as (url, asked),
            HttpTarget(url, "m", extra=lambda most: {"min_tokens": most, "stream_options": None}) as target,
        ):
            await target.ask(Prompt("a"), 5, Record(0.0))
        body = json.loads(asked[0].partition(b"\r\n\r\n")[2])
        assert body["min_tokens"] == 5 and "stream_options" not in body

    @pytest.mark.parametrize(
        ("answer", "error"),
        [
            (b"HTTP/1.1 429 Slow\r\ncontent-length: 0\r\n\r\n", "429"),
            (HEAD + chunk('data: {"error":{"message":"x"}}\n\n'), "error event"),
            (HEAD + chunk("data: no\n\n"), "not JSON"),
            (HEAD + chunk("data: [DONE]\n\n") + b"0\r\n\r\n", "empty"),
            (None, "cut off"),
            (HEAD, "timeout"),
        ],
    )
    async def test_what_goes_wrong_is_counted_by_kind(self, answer: bytes | None, error: str) -> None:
        async with served(iter([answer])) as (url, _), HttpTarget(url, "m", timeout=0.3) as target:
            await target.ask(Prompt("a"), 1, record := Record(0.0))
        assert record.error == error and record.ended > 0

    async def test_nobody_there(self) -> None:
        async with served(iter([])) as (url, _):
            pass
        async with HttpTarget(url, "m") as target:
            await target.ask(Prompt("a"), 1, record := Record(0.0))
        assert record.error == "ConnectionRefusedError"
        with pytest.raises(InvalidField, match="no models at"):
            await first_model(url)

    async def test_who_lists_no_models(self) -> None:
        empty = "\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
        answers = [f"HTTP/1.1 401 No{empty}", "INFO {}\r\n", f"HTTP/1.1 302 There\r\nlocation: /login{empty}", ""]
        async with served(answer.encode() or None for answer in answers) as (url, asked):
            with pytest.raises(InvalidField, match="it wants a key in OPENAI_API_KEY"):
                await first_model(url)
            with pytest.raises(InvalidField, match=r"no models at .*INFO"):  # a NATS server
                await first_model(url)
            with pytest.raises(InvalidField, match="no models at"):
                await first_model(url, "secret")
        assert [b"secret" in each for each in asked] == [False, False, True, False], "a key is for nobody else"

    @pytest.mark.parametrize("url", ["localhost:8000", "ftp://x", "http://"])
    async def test_an_address_that_is_none(self, url: str) -> None:
        with pytest.raises(InvalidField, match="is not http"):
            HttpTarget(url, "m")


@pytest.mark.anyio
async def test_a_fleet_on_the_bus() -> None:
    async with FleetRig() as fleet:
        await fleet.decode()
        async with Client(model=MODEL, bus=fleet.bus("client")) as client:
            records = await drive(NatsTarget(client, 5.0), HELLO, Load(4, 6, concurrency=2))
            refused = await drive(NatsTarget(client, 5.0), repeat(Prompt("")), Load(1, 10**9, concurrency=1))
    assert [(r.error, r.tokens) for r in records] == [("", 6)] * 4
    assert all(r.due < r.pieces[0] < r.ended for r in records)
    assert refused[0].error


@pytest.mark.anyio
async def test_the_worker_whose_model_costs_nothing_answers_as_others_do() -> None:
    async with FleetRig() as fleet:
        worker = Worker(fleet.bus("worker"), Subjects(MODEL), 0.001)
        serving = asyncio.create_task(worker.serve(Settings()))
        async with Client(model=MODEL, bus=fleet.bus("client")) as client:
            records = await drive(NatsTarget(client, 5.0), HELLO, Load(6, 5, concurrency=3))
        serving.cancel()
        await asyncio.wait([serving])
    assert [(r.error, r.tokens, len(r.pieces)) for r in records] == [("", 5, 5)] * 6


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (["--rate", "1", "--concurrency", "2"], "a rate or a concurrency"),
        (["--prompts", "poems"], "one of chat"),
        (["--url", "nowhere", "--model", "m"], "is not http"),
    ],
)
def test_a_command_that_cannot_be(arguments: list[str], why: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 1 and why in result.stderr
