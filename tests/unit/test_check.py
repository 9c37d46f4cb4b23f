"""`trine check` as a user runs it, on a tiny model that few bits ruin and on one that they do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shared.errors import ConfigError, InvalidField, ModelError
from tests.ruined_model import write_ruined
from trine.check import check

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ruined(tmp_path_factory.mktemp("ruined"))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRINE_")}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "trine.cli", "check", "--threads", "1", *arguments],
        check=False, cwd=ROOT, env={**clean, "COLUMNS": "160"}, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "rich" in loaded
    assert "torch" not in loaded, "the command line itself never loads torch"
    done.stderr = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("import time:"))
    assert "Traceback" not in done.stderr
    return done


def test_every_codec_in_one_table(model: Path) -> None:
    done = run("--model", str(model), "--block-size", "8")
    assert done.returncode == 1, "one of them ruins it"
    rows = {line.split()[1]: line.split()[-2] for line in done.stdout.splitlines() if "%" in line}
    assert rows == {"int8": "ruined", "fp8_e4m3": "ok", "int4": "ruined"}
    assert "blocks of 8" in done.stdout
    assert "measuring int4" in done.stderr


@pytest.mark.slow
def test_int8_weights_as_json_on_a_text_of_ones_own(tmp_path: Path) -> None:
    model, text = write_ruined(tmp_path / "healthy", outlier=0.0), tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 4)
    done = run("--model", str(model), "--weights", "int8", "--text", str(text), "--json")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("\n") == 1
    report = json.loads(done.stdout)
    assert set(report) == {"model", "weights", "block_size", "tokens", "perplexity", "bytes_per_token", "codecs"}
    assert (report["model"], report["weights"], report["block_size"], report["tokens"]) == ("healthy", "int8", 16, 179)
    costs = {cost["codec"]: cost for cost in report["codecs"]}
    assert list(costs) == ["none", "int8", "fp8_e4m3", "int4"]
    assert costs["none"]["mean_kl"] > 0, "the baseline has native weights"
    assert costs["int4"]["mean_kl"] > costs["none"]["mean_kl"]
    assert costs["int4"]["bytes_per_token"] < costs["int8"]["bytes_per_token"] < costs["none"]["bytes_per_token"]
    assert set(costs["none"]) == {
        "codec", "bytes_per_token", "perplexity", "ratio", "top1_agreement", "mean_kl", "verdict",
    }  # fmt: skip


def test_what_is_wrong_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="TRINE_KV_CODEC: Input should be"):
        check({"TRINE_KV_CODEC": "int5"})
    with pytest.raises(ConfigError, match="TRINE_WEIGHTS: Input should be"):
        check({"TRINE_WEIGHTS": "int3"})
    with pytest.raises(ConfigError, match="int4 needs a block size"):
        check({"TRINE_KV_CODEC": "int4", "TRINE_BLOCK_SIZE": "1"})
    with pytest.raises(InvalidField, match="cannot be read") as caught:
        check({}, tmp_path / "none.txt")
    assert caught.value.field == "text"
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(InvalidField, match="utf-8"):
        check({}, tmp_path / "latin")


def test_no_model_is_one_clear_line() -> None:
    with pytest.raises(ModelError, match="no folder or GGUF file '/no/such'"):
        check({"TRINE_MODEL": "/no/such"})
