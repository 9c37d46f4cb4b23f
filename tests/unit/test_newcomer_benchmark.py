"""The newcomer's path: the first token is what follows a question, and a demo that fails is no result."""

from __future__ import annotations

import io
import subprocess
from pathlib import Path

import pytest

from benchmarks.newcomer import STEPS, first_answer, run

DEMO = "demo:\n\tmkdir .venv && touch .venv/.installed\n\t@printf 'ready\\n\\n[a question] What?\\n> '; sleep 0.2; {}\n"


@pytest.mark.parametrize("said", [b"x\n> P", b"\n[q]\n>  \n Paris", b"a > b\n\n> 1"])
def test_the_first_token_is_what_follows_a_question(said: bytes) -> None:
    assert first_answer(io.BytesIO(said))


@pytest.mark.parametrize("said", [b"", b"Installing > x", b"\n> ", b"\n>  \n"])
def test_anything_else_is_none(said: bytes) -> None:
    assert not first_answer(io.BytesIO(said))


def repository(folder: Path, ending: str) -> Path:
    (folder / "Makefile").write_text(DEMO.format(ending))
    for words in (["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "a"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def test_a_clone_is_made_and_each_step_is_timed(tmp_path: Path) -> None:
    result = run(repository(tmp_path, "printf 'Paris'; sleep 0.2"))
    times = [result[name] for name in STEPS]
    assert times == sorted(times) and times[-1] - times[-2] > 0.15


@pytest.mark.parametrize("level", [None, "1"], ids=["alone", "under make"])
@pytest.mark.parametrize("ending", ["echo 'no room' >&2", "printf Paris; echo 'no room' >&2; exit 1"])
def test_a_demo_that_fails_is_told_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str, level: str | None
) -> None:
    monkeypatch.delenv("MAKELEVEL", raising=False)
    if level:
        monkeypatch.setenv("MAKELEVEL", level)
    with pytest.raises(SystemExit, match="no room"):
        run(repository(tmp_path, ending))
