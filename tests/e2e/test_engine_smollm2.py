"""The default model over paged KV gives the logits that plain transformers gives, on natural text."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from shared.config import DEFAULT_MODEL
from shared.engine.engine import Engine
from shared.engine.span import Span
from shared.engine.weights import resolve
from shared.messages import Sampling

B = 16
LENGTHS = [1, B - 1, B, B + 1, 2 * B, 3 * B + 5]
TOLERANCE = 5e-4
GREEDY = Sampling(temperature=0.0)
TEXT = (
    "The lighthouse keeper climbed the stairs every evening at dusk, counting each of the 199 steps aloud so that he "
    "would not lose his place. From the lamp room he could see the harbour, the two islands beyond it and, on clear "
    "nights, the lights of fishing boats strung along the horizon. He wrote the weather in a ledger: wind, cloud, "
    "temperature, and a remark. On the third of March he wrote that a whale had passed close to the rocks. Nobody "
    "else in the village had seen it, but the children asked him about it for weeks, and the story grew with every "
    "telling. By summer the whale was as long as the church, and it had looked at him with one calm, enormous eye."
)


class Gold:
    """Plain transformers over the same folder: logits of a whole text, computed once."""

    def __init__(self, folder: Path) -> None:
        self.tokens = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        with torch.inference_mode():
            self.logits = model(torch.tensor([self.tokens]), use_cache=False).logits[0]
            start = torch.tensor([self.tokens[:40]])
            self.continuation = model.generate(start, max_new_tokens=24, do_sample=False)[0, 40:].tolist()


@pytest.fixture(scope="module")
def gold() -> Gold:
    return Gold(resolve(DEFAULT_MODEL))


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= TOLERANCE
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


def table(first: int, length: int) -> tuple[int, ...]:
    """Blocks in falling order, so that position and place in the pool never agree by accident."""
    return tuple(range(first + -(-length // B) - 1, first - 1, -1))


def span(gold: Gold, start: int, end: int, blocks: tuple[int, ...], rows: int) -> Span:
    return Span(tuple(gold.tokens[start:end]), start, blocks, rows, 0, GREEDY)


def test_facts_about_the_model(smollm2_engine: Engine) -> None:
    info = smollm2_engine.info
    assert (info.context_length, info.vocab_size, info.eos_ids) == (8192, 49152, frozenset({2}))
    assert (info.layers, info.block_bytes) == (30, 30 * 2 * B * 3 * 64 * 4)


@pytest.mark.parametrize("length", LENGTHS)
def test_prefill(smollm2_engine: Engine, gold: Gold, length: int) -> None:
    got = smollm2_engine.forward([span(gold, 0, length, table(9, length), length)])
    same(got, gold.logits[:length])


@pytest.mark.parametrize("length", [*LENGTHS[2:], 130])
def test_a_prefix_computed_elsewhere(smollm2_engine: Engine, gold: Gold, length: int) -> None:
    """As the shared cache does it: the bytes of full blocks are read, and written into other places."""
    there, here, full = table(0, length), table(100, length), (length - 1) // B
    smollm2_engine.forward([span(gold, 0, length, there, 0)])
    for source, target in zip(there[:full], here[:full], strict=True):
        smollm2_engine.write_block(target, bytes(smollm2_engine.read_block(source)))
    got = smollm2_engine.forward([span(gold, full * B, length, here, length - full * B)])
    same(got, gold.logits[full * B : length])


def test_chunks_decode_steps_and_verifications(smollm2_engine: Engine, gold: Gold) -> None:
    blocks = table(30, 120)
    for start, end in [(0, 70), (70, 71), (71, 72), (72, 77), (77, 86), (86, 87), (87, 120)]:
        same(smollm2_engine.forward([span(gold, start, end, blocks, end - start)]), gold.logits[start:end])


def test_rejected_drafts_leave_no_trace(smollm2_engine: Engine, gold: Gold) -> None:
    """Wrong tokens beyond the accepted ones are overwritten by the next step."""
    blocks = table(50, 64)
    smollm2_engine.forward([span(gold, 0, 30, blocks, 0)])
    wrong = replace(span(gold, 30, 31, blocks, 1), token_ids=(gold.tokens[30], 5, 6, 7, 8), rows=5)
    same(smollm2_engine.forward([wrong])[:1], gold.logits[30:31])
    same(smollm2_engine.forward([span(gold, 31, 50, blocks, 19)]), gold.logits[31:50])


def test_a_mixed_batch(smollm2_engine: Engine, gold: Gold) -> None:
    cases = [(0, 100, 1), (63, 64, 1), (20, 21, 1), (16, 53, 37), (40, 45, 5), (0, 1, 1), (130, 131, 1), (15, 16, 0)]
    first, spans, expected = 0, [], []
    for start, end, rows in cases:
        blocks = table(first, end)
        first += len(blocks)
        if start:
            smollm2_engine.forward([span(gold, 0, start, blocks, 0)])
        spans.append(span(gold, start, end, blocks, rows))
        expected.append(gold.logits[end - rows : end])
    same(smollm2_engine.forward(spans), torch.cat(expected))


def test_greedy_text_is_that_of_generate(smollm2_engine: Engine, gold: Gold) -> None:
    blocks, tokens = table(200, 80), list(gold.tokens[:40])
    done = 0
    while len(tokens) < 40 + len(gold.continuation):
        step = Span(tuple(tokens[done:]), done, blocks, 1, 0, GREEDY)
        done = len(tokens)
        tokens += smollm2_engine.step([step])[0]
    assert tokens[40:] == gold.continuation
