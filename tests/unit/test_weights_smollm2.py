"""The default model's conversion: its tokenizer and template are those that the GGUF file describes."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import AutoTokenizer, GenerationConfig

from shared.config import DEFAULT_MODEL
from shared.engine.weights import BUILT_IN, packaged_gguf, resolve


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def described() -> Any:
    """What the GGUF file says, read by the format's own library."""
    from gguf import GGUFReader

    return GGUFReader(packaged_gguf(BUILT_IN[DEFAULT_MODEL]))


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


def said(described: Any, key: str) -> Any:
    return described.fields[f"tokenizer.{key}"].contents()


def test_vocabulary_merges_and_special_tokens(folder: Path, tokenizer: Tokenizer, described: Any) -> None:
    tokens = said(described, "ggml.tokens")
    assert [tokenizer.id_to_token(i) for i in range(len(tokens))] == tokens
    assert tokenizer.get_vocab_size() == len(tokens) == 49152
    written = json.loads((folder / "tokenizer.json").read_bytes())
    assert [" ".join(m) if isinstance(m, list) else m for m in written["model"]["merges"]] == said(
        described, "ggml.merges"
    )
    control = {i for i, kind in enumerate(said(described, "ggml.token_type")) if kind == 3}
    assert {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special} == control


def test_chat_template_and_ids_that_end_a_text(folder: Path, described: Any) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == said(described, "chat_template")
    assert tokenizer.eos_token_id == said(described, "ggml.eos_token_id") == 2
    assert GenerationConfig.from_pretrained(folder).eos_token_id == 2
    assert tokenizer.model_max_length == 8192
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert isinstance(chat, str) and chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer("<|im_start|>user\nHi<|im_end|>")["input_ids"][0] == 1


# Merges are applied within pieces. GPT-2 keeps the space before a number in the number's piece; SmolLM's vocabulary
# was made with every digit on its own, so the space stays behind.
@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("in 123 days", ["in", "Ġ", "1", "2", "3", "Ġdays"]),
        ("a  42", ["a", "ĠĠ", "4", "2"]),
        ("x=10;\n\n  y", ["x", "=", "1", "0", ";", "ĊĊĠ", "Ġy"]),
    ],
)
def test_digits_stand_alone(tokenizer: Tokenizer, text: str, tokens: list[str]) -> None:
    assert tokenizer.encode(text).tokens == tokens
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


# The first is case 33's. No normaliser, so any text comes back as it was.
MIXED = [
    "Café déjà vu – 123 😊",
    "नमस्ते दुनिया, आज १५ तारीख है",
    "你好，世界！今天是2024年",
    "def f(x):\n    return [x ** 2 for _ in range(10)]\t# a\r\n",
    "   three  spaces\n\n\n\ttabs \u00a0 nbsp  ",
    "½ ٣ Ⅷ 👩‍👩‍👧 🇩🇪 ďábelské العربية",
    "",
]


@pytest.mark.parametrize("text", MIXED)
def test_mixed_scripts(folder: Path, tokenizer: Tokenizer, described: Any, text: str) -> None:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert ids == AutoTokenizer.from_pretrained(folder)(text)["input_ids"]
    assert ids == by_definition(text, described)


def by_definition(text: str, described: Any) -> list[int]:
    """Byte-level BPE as the GGUF file describes it: split, then merge the earliest-ranked pair until none is left."""
    tokens = {token: i for i, token in enumerate(said(described, "ggml.tokens"))}
    ranks = {tuple(merge.split(" ")): i for i, merge in enumerate(said(described, "ggml.merges"))}
    ids: list[int] = []
    for piece in pieces(text):
        parts = [BYTE_LETTERS[byte] for byte in piece.encode()]
        while len(parts) > 1:
            pairs = list(pairwise(parts))
            best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
            if best not in ranks:
                break
            at = pairs.index(best)
            parts[at : at + 2] = ["".join(best)]
        ids += [tokens[part] for part in parts]
    return ids


def pieces(text: str) -> list[str]:
    """llama.cpp's rule for `tokenizer.ggml.pre = smollm`: each \\p{N} alone, the rest by GPT-2's pattern."""
    import regex  # type: ignore[import-untyped]

    gpt2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    return [
        piece
        for part in regex.split(r"(\p{N})", text)
        for piece in ([part] if regex.fullmatch(r"\p{N}", part) else gpt2.findall(part))
    ]


def _byte_letters() -> dict[int, str]:
    """GPT-2's printable letter for each byte."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in plain}
    letters.update({byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in letters)})
    return letters


BYTE_LETTERS = _byte_letters()


def test_weights_are_the_dequantised_ones_and_the_head_is_tied(folder: Path, described: Any) -> None:
    from gguf import dequantize

    tensors = {t.name: t for t in described.tensors}
    with safe_open(folder / "model.safetensors", "np") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118 - not a dict
        for name, stored in {
            "token_embd.weight": "model.embed_tokens.weight",
            "blk.7.ffn_down.weight": "model.layers.7.mlp.down_proj.weight",
            "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
            "output_norm.weight": "model.norm.weight",
        }.items():
            source = tensors[name]
            values = file.get_tensor(stored)
            assert str(values.dtype) == "float32"
            assert (values == dequantize(source.data, source.tensor_type)).all()
