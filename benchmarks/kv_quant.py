"""What each KV codec costs: bytes per token, and how far the model's predictions move.

`python -m benchmarks.kv_quant [--json]`. Two models with real weights: the default one, and the same weights in a
Qwen2-shaped model whose k_proj has biases of 100 and -100 in the first and the last layer, as checkpoints of that
family have (see `planted`). The text is `trine/data/texts`, English of several kinds, read as one sequence; only
positions with at least 1,024 tokens of context count. Nothing is random, so one run is enough.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from benchmarks.bars import judged
from shared.config import DEFAULT_MODEL
from shared.engine.attention import NAME
from shared.engine.codecs.registry import CODECS
from shared.engine.engine import Engine
from shared.engine.model import Model, load
from shared.engine.pool import BlockLayout
from shared.engine.quality import compare_all
from shared.engine.weights import resolve
from shared.tokenizer import Tokenizer

BLOCK_SIZE = 16
CONTEXT = 1024
LEAST_TOKENS = 4096
BIAS = 100.0
PLANTED = "qwen2-planted-bias"
BYTES = {"int8": 0.54, "fp8_e4m3": 0.54, "int4": 0.31}
RATIO = {"int8": 1.005, "fp8_e4m3": 1.02, "int4": 1.05}
"""Of perplexity over that of codec none, on either model."""


def text() -> str:
    files = sorted((Path(__file__).parents[1] / "trine/data/texts").glob("*.txt"))
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)


def planted(folder: Path, model: Model) -> Model:
    """The weights of a Llama-shaped model in a Qwen2-shaped one, with a bias on a few key channels.

    In each KV head of the first and the last layer, the two channels that rotary embedding turns slowest (one pair) get
    100 and -100. Rotated by nearly the same angle everywhere, they add nearly the same to all scores of a query, and
    softmax takes no notice; so the model still works, while its keys have channels far larger than the rest.
    """
    source = model.module.config
    kept = (
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
        "tie_word_embeddings",
    )  # fmt: skip
    config = Qwen2Config(**{name: getattr(source, name) for name in kept})
    config._attn_implementation = NAME
    module: Any = Qwen2ForCausalLM(config)
    # From the file: a loaded model has let go of weights that it computes with in another form.
    missing = module.load_state_dict(AutoModelForCausalLM.from_pretrained(folder).state_dict(), strict=False)
    if missing.unexpected_keys or any(not key.endswith("_proj.bias") for key in missing.missing_keys):
        raise SystemExit(f"{DEFAULT_MODEL} is not Llama-shaped")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("_proj.bias"):
                parameter.zero_()
        for layer in (module.model.layers[0], module.model.layers[-1]):
            heads = layer.self_attn.k_proj.bias.view(source.num_key_value_heads, -1)
            heads[:, heads.shape[1] // 2 - 1], heads[:, -1] = BIAS, -BIAS
    return Model.of(module.to(device=model.device, dtype=model.dtype), model.eos_ids)


def measure(name: str, model: Model, token_ids: Sequence[int]) -> dict[str, dict[str, Any]]:
    """By codec: its quality, the bar for its perplexity ratio, and whether it passes."""
    print(f"{name}: {len(token_ids)} tokens with {len(CODECS)} codecs", file=sys.stderr, flush=True)
    started = time.monotonic()
    blocks = -(-len(token_ids) // BLOCK_SIZE)
    engines = {
        codec: Engine.of(
            model, fingerprint=name, vocabulary=name, block_size=BLOCK_SIZE, kv_blocks=blocks, kv_codec=codec, slots=1
        )
        for codec in CODECS
    }
    baseline = engines.pop("none")
    found = compare_all(baseline, list(engines.values()), [token_ids], skip=CONTEXT)
    print(f"{name}: done in {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
    return {
        codec: {**asdict(quality), "bar": RATIO[codec], "passed": quality.ratio <= RATIO[codec]}
        for codec, quality in zip(engines, found, strict=True)
    }


def relative_bytes(model: Model) -> dict[str, dict[str, Any]]:
    """By codec: bytes per token, scales included, over those of fp16."""
    fp16 = sum(2 * shape.kv_heads * (shape.k_dim + shape.v_dim) for shape in model.shapes) * BLOCK_SIZE
    sizes = {name: BlockLayout.of(model.shapes, BLOCK_SIZE, model.dtype, CODECS[name]).block_bytes for name in BYTES}
    return {
        name: {"over_fp16": size / fp16, "bar": BYTES[name], "passed": size / fp16 <= BYTES[name]}
        for name, size in sizes.items()
    }


def run() -> dict[str, Any]:
    folder = resolve(DEFAULT_MODEL)
    token_ids = Tokenizer.load(folder).encode(text())
    if len(token_ids) < CONTEXT + 1 + LEAST_TOKENS:
        raise SystemExit(f"the texts have {len(token_ids)} tokens; {CONTEXT + 1 + LEAST_TOKENS} are needed")
    model = load(folder)
    sizes = relative_bytes(model)
    found = {
        DEFAULT_MODEL: measure(DEFAULT_MODEL, model, token_ids),
        PLANTED: measure(PLANTED, planted(folder, model), token_ids),
    }
    values = {f"{codec}, bytes of fp16": row["over_fp16"] for codec, row in sizes.items()}
    bars: dict[str, tuple[str, float]] = {f"{codec}, bytes of fp16": ("<=", bar) for codec, bar in BYTES.items()}
    for name, rows in found.items():
        values |= {f"{codec}, perplexity, {name}": row["ratio"] for codec, row in rows.items()}
        bars |= {f"{codec}, perplexity, {name}": ("<=", RATIO[codec]) for codec in rows}
    told = {"context": CONTEXT, "block_size": BLOCK_SIZE, "bytes_per_token": sizes, **found}
    return {**told, "bars": judged(values, bars)}


def table(result: dict[str, Any]) -> str:
    lines = [f"{'codec':<10}{'bytes / fp16':>14}   {'bar':<6}"]
    for codec, row in result["bytes_per_token"].items():
        lines.append(f"{codec:<10}{row['over_fp16']:>14.4f}   {row['bar']:<6}{'' if row['passed'] else ' MISSED'}")
    for name in (DEFAULT_MODEL, PLANTED):
        some = next(iter(result[name].values()))
        lines += ["", f"{name}: perplexity {some['baseline_perplexity']:.3f} on {some['tokens']} tokens"]
        lines.append(f"{'codec':<10}{'ppl ratio':>14}   {'bar':<6}{'same top-1':>12}{'mean KL':>10}")
        for codec, row in result[name].items():
            lines.append(
                f"{codec:<10}{row['ratio']:>14.4f}   {row['bar']:<6}{row['top1_agreement']:>12.4f}"
                f"{row['mean_kl']:>10.5f}{'' if row['passed'] else ' MISSED'}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    result = run()
    print(json.dumps(result) if arguments.json else table(result))


if __name__ == "__main__":
    main()
