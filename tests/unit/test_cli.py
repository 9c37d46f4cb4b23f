"""The command line as a user runs it: a process, against a real nats-server and a fake worker."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Iterator

import pytest

from shared.bus.embedded import EmbeddedNats
from shared.bus.nats import NatsBus
from shared.messages import Sampling
from tests.commands import Run, run, start
from tests.fakes import FakeDecode

pytestmark = pytest.mark.anyio
TEXT = "what is the capital of France"


@pytest.fixture(scope="module")
def nats() -> Iterator[EmbeddedNats]:
    with EmbeddedNats() as server:
        yield server


@pytest.fixture
async def fake(nats: EmbeddedNats) -> AsyncIterator[FakeDecode]:
    bus = await NatsBus.connect(nats.url, name="fake", wait=5)
    async with FakeDecode(bus) as fake:
        yield fake
    await bus.close()


async def ask(nats: EmbeddedNats, *arguments: str, stdin: str = "") -> Run:
    return await run("generate", "--nats", nats.url, "--model", "fake", *arguments, stdin=stdin)


async def test_generate_prints_the_answer_and_nothing_else(nats: EmbeddedNats, fake: FakeDecode) -> None:
    done = await ask(nats, TEXT)
    assert (done.code, done.out, done.err) == (0, TEXT + "\n", "")
    (request,) = fake.requests
    assert [(m.role, m.content) for m in request.messages or ()] == [("user", TEXT)]


async def test_json_is_one_object_with_all_facts(nats: EmbeddedNats, fake: FakeDecode) -> None:
    done = await ask(nats, TEXT, "--json", "--seed", "5")
    assert done.out.count("\n") == 1
    answer = json.loads(done.out)
    assert set(answer) == {
        "id", "model", "text", "finish_reason", "seed", "usage", "timings", "served_by", "attempts",
    }  # fmt: skip
    assert set(answer["usage"]) == {
        "prompt_tokens", "cached_tokens", "completion_tokens", "drafted_tokens", "accepted_tokens",
    }  # fmt: skip
    assert set(answer["timings"]) >= {"ttft_ms", "tpot_ms"}
    assert (answer["text"], answer["seed"], answer["model"], answer["finish_reason"]) == (TEXT, 5, "fake", "stop")
    assert answer["served_by"] == {"decode": "decode-1", "prefill": [], "drafter": []}


async def test_every_option_reaches_the_worker(nats: EmbeddedNats, fake: FakeDecode) -> None:
    options = (
        "--raw --temperature 0.5 --top-k 3 --top-p 0.9 --min-p 0.1 --seed 9 --max-tokens 2 --stop X --stop Y "
        "--min-tokens 1 --repetition-penalty 1.1 --frequency-penalty -0.5 --presence-penalty 2"
    )
    done = await ask(nats, "-", *options.split(), "--timeout", "7", "--priority", "high", stdin="one two three")
    assert done.out == "one two\n"
    (request,) = fake.requests
    assert (request.prompt, request.stops, request.max_tokens, request.deadline_ms) == (
        "one two three",
        ("X", "Y"),
        2,
        7000,
    )
    assert request.sampling == Sampling(
        temperature=0.5,
        top_k=3,
        top_p=0.9,
        min_p=0.1,
        seed=9,
        min_tokens=1,
        repetition_penalty=1.1,
        frequency_penalty=-0.5,
        presence_penalty=2.0,
    )
    await ask(nats, "hi", "--system", "Be brief.")
    assert [m.role for m in fake.requests[1].messages or ()] == ["system", "user"]


async def test_settings_come_from_the_environment_too(nats: EmbeddedNats, fake: FakeDecode) -> None:
    done = await run("generate", TEXT, TRINE_NATS_URL=nats.url, TRINE_MODEL_NAME="fake")
    assert (done.code, done.out) == (0, TEXT + "\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--model", "nope"], "trine: no decode worker for model 'nope'; running: fake"),
        (["hi", "--temperature", "-1"], "trine: temperature: Input should be greater than or equal to 0"),
        (["hi", "--priority", "urgent"], "trine: priority: one of high, normal, low"),
        (["hi", "--raw", "--system", "x"], "trine: --system needs a chat; leave out --raw"),
    ],
)
async def test_what_is_wrong_is_said_in_one_line(
    nats: EmbeddedNats, fake: FakeDecode, arguments: list[str], message: str
) -> None:
    done = await ask(nats, *arguments)
    assert (done.code, done.out, done.err.strip()) == (1, "", message)


async def test_no_server_says_how_to_get_one() -> None:
    done = await run("generate", "hi", "--nats", "nats://127.0.0.1:1")
    assert (done.code, done.out) == (1, "")
    assert done.err.count("\n") == 1
    assert "trine up" in done.err
    assert "--nats" in done.err


async def test_a_deadline_ends_it(nats: EmbeddedNats, fake: FakeDecode) -> None:
    fake.stop()
    started = time.monotonic()
    done = await ask(nats, "hi", "--timeout", "0.5")
    assert (done.code, done.err.strip()) == (1, "trine: no complete answer within 0.5 s")
    assert time.monotonic() - started < 20


@pytest.mark.parametrize(
    "arguments", [["generate"], ["generate", "hi", "--nonsense"], ["up", "--decode", "-1"], ["fly"]]
)
async def test_usage_errors_exit_with_2(arguments: list[str]) -> None:
    assert (await run(*arguments)).code == 2


async def test_ctrl_c_cancels_and_exits_with_130(nats: EmbeddedNats, fake: FakeDecode) -> None:
    fake._pause = 0.2
    process = await start("generate", "--nats", nats.url, "--model", "fake", " ".join(["word"] * 200))
    assert process.stdout is not None
    assert await process.stdout.read(4) == b"word"
    process.send_signal(signal.SIGINT)
    out, err = await process.communicate()
    done = Run(process.returncode or 0, out, err)
    assert (done.code, done.err) == (130, "")
    async with asyncio.timeout(5):
        while not fake.cancelled:
            await asyncio.sleep(0.01)
    assert fake.cancelled == {fake.requests[-1].id}


async def test_a_reader_that_leaves_early_is_no_error_message(nats: EmbeddedNats, fake: FakeDecode) -> None:
    fake._pause = 0.05
    process = await start("generate", "--nats", nats.url, "--model", "fake", " ".join(["word"] * 100))
    assert process.stdout is not None
    assert await process.stdout.read(4) == b"word"
    process.stdout._transport.close()  # type: ignore[attr-defined]
    assert process.stderr is not None
    assert await process.stderr.read() == b""
    assert await process.wait() == 1


async def test_up_refuses_bad_settings_before_it_starts_anything() -> None:
    for arguments, message in (
        (["--block-size", "0"], "TRINE_BLOCK_SIZE: Input should be greater than or equal to 1"),
        (["--block-size", "2", "--kv-codec", "int4"], "TRINE_KV_CODEC: int4 needs a block size of at least 4"),
        (["--draft-depth", "99"], "TRINE_DRAFT_DEPTH: Input should be less than or equal to 64"),
        (["--nats", "embedded:x"], "'x' is no port"),
        (["--model", "/no/such/model"], "no folder or GGUF file '/no/such/model'"),
    ):
        done = await run("up", *arguments)
        assert (done.code, done.out) == (1, "")
        assert message in done.err
        assert done.err.count("\n") == 1


async def test_version_and_help() -> None:
    assert (await run("--version")).out.startswith("trine 0.")
    shown = (await run("--help")).out
    assert all(command in shown for command in ("up", "generate", "check", "demo"))
