"""Every decoder of bytes from others: only a value that says the same again, or its typed error, and little memory."""

from __future__ import annotations

import ast
import json
import math
import struct
import tracemalloc
from pathlib import Path

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.codec import decode
from shared.engine.fingerprint import read_json, tensor_digests, vocabulary_digest
from shared.errors import ModelError, RequestError
from shared.messages import DeadLetter
from tests.fuzz.targets import BOMBS, TARGETS, target
from tests.unit.test_messages import EXAMPLES

ROOT = Path(__file__).parents[2]
MOST_MEMORY = 8 << 20
DECODERS = sorted(TARGETS.keys() - {"bodies"})  # whose bytes are choices: see test_schemas


def mutated(seeds: list[bytes]) -> st.SearchStrategy[bytes]:
    """Valid bytes cut off, extended, flipped, spliced with others, with two places swapped, or with a bomb inside."""

    @st.composite
    def one(draw: st.DrawFn) -> bytes:
        data = draw(st.sampled_from(seeds))
        for _ in range(draw(st.integers(0, 3))):
            a, b = sorted(draw(st.tuples(*[st.integers(0, len(data))] * 2)))
            other = draw(st.sampled_from([*seeds, *BOMBS]))
            data = draw(
                st.sampled_from(
                    [
                        data[:a],
                        data + other,
                        data[:a] + bytes(x ^ 0xFF for x in data[a : a + 1]) + data[a + 1 :],
                        data[:a] + other[a:],
                        data[:a] + data[b:],
                        data[:a] + other + data[b:],
                        data[b:] + data[a:b] + data[:a],
                    ]
                )
            )
        return data

    return one()


@pytest.mark.parametrize("name", DECODERS)
def test_seeds_and_bombs_hold_little_memory(name: str) -> None:
    chosen = target(name)
    for seed in chosen.seeds():
        chosen.check(seed)
    tracemalloc.start()
    try:
        for number, bomb in enumerate(BOMBS):
            for seed in chosen.seeds()[number % 3 :: 3]:
                chosen.check(seed[:-1] + bomb)
                chosen.check(bomb + seed)
        assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("name", DECODERS)
def test_mutants_give_a_value_or_the_typed_error(name: str) -> None:
    chosen = target(name)

    @settings(max_examples=200, deadline=2000)
    @given(mutated(list(chosen.seeds())))
    def holds(data: bytes) -> None:
        chosen.check(data)

    holds()


FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "pandas.read_pickle"}


def forbidden(tree: ast.AST) -> list[str]:
    """What could run code that comes as data."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module] if node.module.split(".")[0] in FORBIDDEN_MODULES else []
            found += [n for a in node.names if (n := f"{node.module}.{a.name}") in FORBIDDEN_CALLS]
        elif isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            pickles = [k for k in node.keywords if k.arg == "allow_pickle" and ast.unparse(k.value) != "False"]
            found += [name] if name in FORBIDDEN_CALLS or pickles else []
    return found


def test_nothing_that_runs_code_from_data_is_used() -> None:
    for bad in ("import pickle", "from torch import load", "x = eval(y)", "np.load(f, allow_pickle=True)"):
        assert forbidden(ast.parse(bad))
    found = {
        str(path.relative_to(ROOT)): uses
        for folder in ("services", "shared", "trine")
        for path in (ROOT / folder).rglob("*.py")
        if (uses := forbidden(ast.parse(path.read_bytes())))
    }
    assert found == {}


@pytest.mark.parametrize("at", [math.nan, math.inf, 1e300, -1.0])
def test_a_dead_letter_s_time_is_a_time(at: float) -> None:
    good = next(message for message in EXAMPLES if isinstance(message, DeadLetter)).model_dump()
    with pytest.raises(RequestError, match="at"):
        decode(msgpack.packb({"v": 1, **good, "at": at}), DeadLetter)


def test_deep_json_in_a_model_s_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRINE_CACHE_DIR", str(tmp_path / "cache"))
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("[" * 100_000)
    with pytest.raises(ModelError):
        read_json(tmp_path / "config.json")
    with pytest.raises(ModelError):
        vocabulary_digest(tmp_path)


def test_tensors_that_overlap_are_refused(tmp_path: Path) -> None:
    """A header of a few megabytes could have a large file hashed a hundred thousand times."""
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
    header = json.dumps({"x": entry, "y": entry}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ModelError, match="overlap"):
        tensor_digests(path)


def test_a_producer_that_is_no_text_makes_a_damaged_file() -> None:
    """Its checksum is right: nothing but a bug writes such a file, and a read still is a miss."""
    target("host").check(b"\x88" + bytes(31) + bytes(range(200)))


@pytest.mark.parametrize("offsets", [[-4, 4], [8, 4], [0], [0, 1.5], ["0", "4"], [0, 1 << 70], None])
def test_offsets_that_are_none_are_refused(tmp_path: Path, offsets: object) -> None:
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ModelError):
        tensor_digests(path)
