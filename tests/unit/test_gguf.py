"""GGUF files that are not what they say: a ModelError, before anything is reserved or looped over."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors import safe_open

from shared.engine import gguf_header
from shared.engine.gguf import convert
from shared.errors import ModelError
from tests import tiny_gguf

U32, U64 = struct.Struct("<I"), struct.Struct("<Q")
Change = Callable[[bytes], bytes]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return tiny_gguf.write(tmp_path_factory.mktemp("gguf") / "tiny.gguf").read_bytes()


def at(place: int, new: bytes) -> Change:
    return lambda data: data[:place] + new + data[place + len(new) :]


def after(text: bytes, skip: int, new: bytes) -> Change:
    """Puts `new` so many bytes behind the first `text`."""
    return lambda data: at(data.index(text) + len(text) + skip, new)(data)


BEFORE_SHAPE, BEFORE_TYPE, BEFORE_PLACE = 4, 20, 24  # bytes, of a matrix, after its name
HOSTILE: dict[str, tuple[Change, str]] = {
    "no GGUF": (at(0, b"GGML"), "not a GGUF file"),
    "another version": (at(4, U32.pack(4)), "not a GGUF file"),
    "big-endian": (at(4, b"\0\0\0\3"), "not a GGUF file"),
    "empty": (lambda data: b"", "too short"),
    "cut off": (lambda data: data[:200], "cut off|longer than it is"),
    "without the last weights": (lambda data: data[:-64], "beyond its end"),
    "tensors without end": (at(8, U64.pack(2**64 - 1)), "tensors"),
    "fields without end": (at(16, U64.pack(2**64 - 1)), "fields"),
    "a key without end": (at(24, U64.pack(2**63)), "name of"),
    "an array without end": (after(b"tokenizer.ggml.token_type", 8, U64.pack(2**64 - 1)), "elements"),
    "an array of arrays": (after(b"tokenizer.ggml.token_type", 4, U32.pack(9)), "array of type 9"),
    "a text without end": (after(b"tokenizer.ggml.model", 4, U64.pack(2**64 - 1)), "longer than it is"),
    "a type that is none": (after(b"tokenizer.ggml.model", 0, U32.pack(99)), "type 99"),
    "a key twice": (lambda data: data.replace(b"tokenizer.ggml.bos_token_id", b"tokenizer.ggml.eos_token_id"), "twice"),
    "a tensor twice": (lambda data: data.replace(b"blk.0.attn_k.weight", b"blk.0.attn_q.weight"), "twice"),
    "more layers than tensors": (after(b"llama.block_count", 4, U32.pack(1 << 19)), "layers"),
    "heads without end": (after(b"llama.attention.head_count", 4, U32.pack(2**31)), "head_count"),
    "no number": (after(b"llama.rope.freq_base", 4, struct.pack("<f", float("nan"))), "nan"),
    "a hundred dimensions": (after(b"output_norm.weight", 0, U32.pack(100)), "dimensions"),
    "a shape beyond all words": (after(b"token_embd.weight", BEFORE_SHAPE, U64.pack(2**63)), "shape"),
    "a shape beyond the file": (after(b"token_embd.weight", BEFORE_SHAPE, U64.pack(2**40)), "beyond its end"),
    "an empty tensor": (after(b"token_embd.weight", BEFORE_SHAPE, U64.pack(0)), "shape"),
    "an unknown type of tensor": (after(b"token_embd.weight", BEFORE_TYPE, U32.pack(77)), "type that is not known"),
    "two tensors in one place": (after(b"blk.0.attn_q.weight", BEFORE_PLACE, U64.pack(0)), "overlap"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_header_that_is_not_sound_is_refused_at_once(whole: bytes, name: str, tmp_path: Path) -> None:
    change, why = HOSTILE[name]
    path = tmp_path / "x.gguf"
    path.write_bytes(change(whole))
    assert path.read_bytes() != whole
    began = time.monotonic()
    with pytest.raises(ModelError, match=why):
        gguf_header.check(path)
    assert time.monotonic() - began < 1.0


def test_a_sound_file_is_converted(whole: bytes, tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(whole)
    (tmp_path / "out").mkdir()
    convert(tmp_path / "x.gguf", tmp_path / "out", lambda stage, done: None)
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert "model.layers.0.self_attn.q_proj.weight" in file.keys()  # noqa: SIM118


def test_what_only_the_libraries_find_is_a_model_error_too(tmp_path: Path) -> None:
    """They raise KeyError, RuntimeError, IndexError, ZeroDivisionError and bare Exception."""
    made: dict[str, Callable[[Path], object]] = {
        "merges of nothing known": lambda path: tiny_gguf.write(path, merges=["é é"]),
        "a shape that is not the model's": lambda path: tiny_gguf.write(path, feed_forward_length=40),
        "no heads": lambda path: tiny_gguf.write(path, attention__head_count=0),
        "heads that divide nothing": lambda path: tiny_gguf.write(path, attention__head_count_kv=3),
        "no channels": lambda path: tiny_gguf.write(path, embedding_length=0),
    }
    (tmp_path / "out").mkdir()
    for name, make in made.items():
        make(tmp_path / "x.gguf")
        gguf_header.check(tmp_path / "x.gguf")
        with pytest.raises(ModelError, match="cannot be converted"):
            convert(tmp_path / "x.gguf", tmp_path / "out", lambda stage, done: None)
        assert not list((tmp_path / "out").iterdir()), name
