"""Failure cases of quantised KV met in the field: across the wire, after a restart, and in what the model says.

The fleet here is real services with a tiny random model on the memory bus; distributions are the default model's. Real
processes are in `tests/e2e/test_codecs.py`.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from shared.config import DEFAULT_MODEL
from shared.engine.engine import Engine
from shared.engine.model import Model, load
from shared.engine.quality import compare, compare_all
from shared.engine.span import Span
from shared.engine.weights import resolve
from shared.messages import ChatMessage, Sampling
from shared.tokenizer import Tokenizer
from tests.e2e.prompts import PROMPTS
from tests.fleet_rig import FleetRig, joins_unheard
from tests.tiny_models import ARCHITECTURES, VOCAB, write
from trine.completion import Completion

B = 8
SEQUENCES = [[random.Random(n).randrange(3, VOCAB) for _ in range(n)] for n in (101, 64, 39)]
PROMPT = SEQUENCES[0]
COUNT = 30


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(write(tmp_path_factory.mktemp("tiny"), ARCHITECTURES["llama"]))


def engine(model: Model, codec: str, block_size: int = B, slots: int = 8) -> Engine:
    made = Engine.of(
        model,
        fingerprint="tiny",
        vocabulary="fake-vocabulary",
        block_size=block_size,
        kv_blocks=64,
        kv_codec=codec,
        slots=slots,
        lookahead=4,
    )
    made.info = replace(made.info, eos_ids=frozenset())
    return made


def alone(engine: Engine, prompt: Sequence[int], sampling: Sampling, seed: int) -> list[int]:
    """The text by one engine, one sequence, one token at a time: no cache, no drafts, no neighbours."""
    size = engine.info.block_size
    tokens, done = list(prompt), 0
    table = tuple(range(-(-(len(prompt) + COUNT) // size)))
    while len(tokens) < len(prompt) + COUNT:
        span = Span(tuple(tokens[done:]), done, table, 1, seed, sampling)
        done = len(tokens)
        tokens += engine.step([span])[0]
    return tokens[len(prompt) :]


async def ask(rig: FleetRig, prompt: Sequence[int] = PROMPT, temperature: float = 0.0) -> Completion:
    return await rig.client().generate(token_ids=list(prompt), max_tokens=COUNT, temperature=temperature, seed=5)


async def ask_all(rig: FleetRig, temperature: float) -> list[Completion]:
    """All sequences at once, so that they share steps."""
    return await asyncio.gather(*(ask(rig, prompt, temperature) for prompt in SEQUENCES))


@pytest.mark.anyio
@pytest.mark.timeout(30)
@pytest.mark.parametrize(
    ("codec", "temperature"), [("none", 0.0), ("int8", 1.0), ("fp8_e4m3", 0.0), ("int4", 0.0), ("int4", 1.0)]
)
async def test_case_26_local_remote_and_restarted_decode_say_the_same(
    model: Model, codec: str, temperature: float
) -> None:
    sampling = Sampling(temperature=temperature, seed=5)
    expected = [alone(engine(model, codec, slots=1), prompt, sampling, 5) for prompt in SEQUENCES]
    async with FleetRig() as rig:
        eager: dict[str, Any] = {"draft_depth": 4, "draft_wait_ms": 200, "draft_adaptive": False}
        decode = {"block_size": B, "step_tokens": 24, **eager}
        await rig.prefill(engine=engine(model, codec), block_size=B)
        await rig.drafter(engine=engine(model, "none"), block_size=B)
        await rig.decode("decode-1", engine(model, codec), **decode)
        remote = await ask_all(rig, temperature)
        assert all((a.served_by.prefill, a.usage.cached_tokens) == (["prefill-1"], 0) for a in remote)
        assert sum(a.usage.accepted_tokens for a in remote) > 0
        await asyncio.sleep(0.1)  # what was generated is published too
        await rig.kill("decode-1")
        await rig.decode("decode-2", engine(model, codec), **decode)
        warm = await ask_all(rig, temperature)
        assert [a.usage.cached_tokens for a in warm] == [(len(prompt) - 1) // B * B for prompt in SEQUENCES]
        assert all(a.served_by.prefill == [] for a in warm)
    async with FleetRig() as rig:
        await rig.decode(engine=engine(model, codec), block_size=B, draft_depth=0, step_tokens=24)
        local = await ask_all(rig, temperature)
        assert all((a.usage.cached_tokens, a.served_by.prefill) == (0, []) for a in local)
    for answers in (remote, warm, local):
        assert [list(answer.token_ids) for answer in answers] == expected


@pytest.mark.anyio
@pytest.mark.timeout(30)
@pytest.mark.parametrize(("codec", "block_size", "named"), [("fp8_e4m3", B, "codec: "), ("int8", 16, "block_size: ")])
async def test_case_7_kv_made_under_another_setting_is_not_used(
    model: Model, codec: str, block_size: int, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fp8 and int8 with 8 tokens a block have blocks of nearly the same bytes, and mean other numbers by them."""
    joins_unheard(monkeypatch)
    async with FleetRig() as rig:
        await rig.prefill(engine=engine(model, "int8"), block_size=B)
        await rig.decode("decode-1", engine(model, "int8"), block_size=B)
        await ask(rig)
        await asyncio.sleep(0.1)
        await rig.kill("decode-1")
        with capture_logs() as logs:
            changed = await rig.decode("decode-1", engine(model, codec, block_size), block_size=block_size)
        cold = await ask(rig)
        assert (cold.usage.cached_tokens, cold.served_by.prefill) == (0, [])
        assert list(cold.token_ids) == alone(
            engine(model, codec, block_size, slots=1), PROMPT, Sampling(temperature=0), 5
        )
        assert changed.counters["mismatched_peers"] == 1
        said = [line["differs"] for line in logs if line["event"] == "not pairing with a peer that differs"]
        assert len(said) == 2, "by both sides"
        assert all(any(difference.startswith(named) for difference in differs) for differs in said)
        await rig.kill("prefill-1")
        await rig.prefill(engine=engine(model, codec, block_size), block_size=block_size)
        assert (await ask(rig)).usage.cached_tokens == (len(PROMPT) - 1) // block_size * block_size


# What docs/kv-codecs.md promises of the default model: mean KL in nats, share of equal most likely tokens.
BOUNDS = {"int8": (0.002, 0.97), "fp8_e4m3": (0.01, 0.93), "int4": (0.03, 0.90)}
CONTEXT, POSITIONS = 1024, 1024


@pytest.fixture(scope="module")
def real() -> Engine:
    return Engine.load(resolve(DEFAULT_MODEL), block_size=16, kv_blocks=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_case_22_the_distribution_holds_at_long_context(real: Engine) -> None:
    texts = Path(__file__).parents[2].joinpath("trine/data/texts").glob("*.txt")
    whole = "\n\n".join(path.read_text(encoding="utf-8") for path in sorted(texts))
    ids, length = Tokenizer.load(resolve(DEFAULT_MODEL)).encode(whole), CONTEXT + POSITIONS
    baseline, *candidates = (real.sibling(codec, length // 16) for codec in ("none", *BOUNDS))
    found = compare_all(baseline, candidates, [ids[:length]], skip=CONTEXT - 1)
    for (codec, (most, least)), quality in zip(BOUNDS.items(), found, strict=True):
        print(codec, quality)
        assert quality.tokens == POSITIONS
        assert quality.mean_kl <= most, codec
        assert quality.top1_agreement >= least, codec


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_case_23_fp8_needs_no_calibration_data(real: Engine) -> None:
    """Its scales come from each token itself. Short prompts in a chat template are where few bits show most."""
    tokenizer = Tokenizer.load(resolve(DEFAULT_MODEL))
    windows = [tokenizer.chat([ChatMessage(role="user", content=p)]) for p in PROMPTS[:20]]
    quality = compare(real.sibling("none", 32), real.sibling("fp8_e4m3", 32), windows)
    print(quality)
    assert quality.mean_kl <= 0.03
    assert quality.top1_agreement >= 0.88
