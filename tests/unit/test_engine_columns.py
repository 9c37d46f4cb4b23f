"""Weights by column: one file for all processes of a computer, and never a broken one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from shared.engine.columns import by_column
from shared.engine.merged import Run


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRINE_CACHE_DIR", str(tmp_path))
    return tmp_path / "columns"


@pytest.fixture
def runs() -> dict[str, Run]:
    torch.manual_seed(0)
    layers = [nn.Linear(12, out, bias=False).requires_grad_(False) for out in (20, 8, 16)]
    return {"q+k": Run((layers[0], layers[1])), "o": Run((layers[2],))}


def check(found: list[torch.Tensor], runs: dict[str, Run]) -> None:
    for weight, run in zip(found, runs.values(), strict=True):
        assert torch.equal(weight, run.weight()) and weight.stride() == (1, weight.shape[0])


def files(home: Path) -> list[Path]:
    return sorted(home.glob("*.safetensors"))


def test_the_file_is_written_once_and_mapped(home: Path, runs: dict[str, Run]) -> None:
    check(by_column("a", runs), runs)
    (path,) = files(home)
    written = path.stat().st_mtime_ns
    found = by_column("a", runs)
    check(found, runs)
    assert files(home) == [path] and path.stat().st_mtime_ns == written
    assert str(path) in Path("/proc/self/maps").read_text()


def test_other_weights_have_another_file(home: Path, runs: dict[str, Run]) -> None:
    check(by_column("a", runs), runs)
    runs["o"].layers[0].weight.add_(1)
    check(by_column("b", runs), runs)
    fewer = {"o": runs["o"]}
    check(by_column("b", fewer), fewer)
    assert len(files(home)) == 3


def test_without_a_name_nothing_is_shared(home: Path, runs: dict[str, Run]) -> None:
    check(by_column("", runs), runs)
    assert not home.exists()


def test_a_cache_that_cannot_be_used_costs_memory_only(
    home: Path, runs: dict[str, Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    home.parent.joinpath("file").write_text("")
    monkeypatch.setenv("TRINE_CACHE_DIR", str(home.parent / "file"))
    check(by_column("a", runs), runs)


@pytest.mark.parametrize("content", [b"", b"x" * 100])
def test_a_broken_file_is_not_used(home: Path, runs: dict[str, Run], content: bytes) -> None:
    by_column("a", runs)
    files(home)[0].write_bytes(content)
    check(by_column("a", runs), runs)


def test_what_a_dead_process_left_is_removed(home: Path, runs: dict[str, Run]) -> None:
    by_column("a", runs)
    (path,) = files(home)
    path.unlink()
    left = path.with_name(f".{path.name}.part-dead")
    left.write_bytes(b"half")
    check(by_column("a", runs), runs)
    assert not left.exists() and files(home) == [path]
