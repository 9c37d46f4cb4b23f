"""The check that a worker makes before it joins: is the model still itself with this KV codec?"""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from services.prefill.config import PrefillSettings
from shared.config import Settings
from shared.engine import calibration
from shared.engine.calibration import Verdict, built_in_text, calibrated, judge, windows
from shared.engine.engine import Engine
from shared.engine.quality import Quality, compare
from shared.errors import ConfigError, InvalidField, ModelError
from shared.worker import load_engine
from tests.ruined_model import write_ruined

ROOT = Path(__file__).resolve().parents[2]
GOOD = Quality(perplexity=20.1, baseline_perplexity=20.0, ratio=1.005, top1_agreement=0.98, mean_kl=0.001, tokens=500)


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ruined(tmp_path_factory.mktemp("healthy"), outlier=0.0)


@pytest.fixture(scope="module")
def ruined(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ruined(tmp_path_factory.mktemp("ruined"))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder of the test's own."""
    monkeypatch.setenv("TRINE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The codec of each measurement that was really made."""
    seen: list[str] = []

    def counting(baseline: Engine, candidate: Engine, windows: list[list[int]]) -> Quality:
        seen.append(candidate.identity.codec)
        return compare(baseline, candidate, windows)

    monkeypatch.setattr(calibration, "compare", counting)
    return seen


def engine(folder: Path, codec: str = "int8", block_size: int = 16) -> Engine:
    return Engine.load(folder, block_size=block_size, kv_blocks=2, kv_codec=codec)


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ({}, Verdict.OK),
        ({"ratio": 1.05, "top1_agreement": 0.90}, Verdict.OK),
        ({"ratio": 1.051}, Verdict.POOR),
        ({"top1_agreement": 0.899}, Verdict.POOR),
        ({"ratio": 1.25, "top1_agreement": 0.80}, Verdict.POOR),
        ({"ratio": 1.251}, Verdict.RUINED),
        ({"top1_agreement": 0.799}, Verdict.RUINED),
        ({"ratio": math.inf}, Verdict.RUINED),
        ({"ratio": math.nan}, Verdict.RUINED),
        ({"top1_agreement": math.nan}, Verdict.RUINED),
        ({"ratio": 0.97}, Verdict.OK),
    ],
)
def test_verdicts(figures: dict[str, float], verdict: Verdict) -> None:
    assert judge(replace(GOOD, **figures)) is verdict  # type: ignore[arg-type]


@pytest.mark.parametrize(("tokens", "longest", "cut"), [(10, 100, [10]), (10, 10, [10]), (11, 10, [5, 5]), (2, 9, [2])])
def test_windows_are_even_and_fit(tokens: int, longest: int, cut: list[int]) -> None:
    found = windows(range(tokens), longest)
    assert [len(window) for window in found] == cut
    assert [t for window in found for t in window] == list(range(sum(cut)))


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_text_too_short_to_predict_anything_is_refused(tokens: int) -> None:
    with pytest.raises(InvalidField, match="two tokens"):
        windows(range(tokens), 100)


def test_the_text_is_installed_with_the_package() -> None:
    assert len(built_in_text()) > 4000
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    installed = [f for pattern in packaged["shared.engine"] for f in (ROOT / "shared/engine").glob(pattern)]
    assert ROOT / "shared/engine/data/calibration.txt" in installed


def test_codec_none_changes_nothing(healthy: Path) -> None:
    quality = calibrated(engine(healthy, "none"), healthy)
    assert quality.ratio == pytest.approx(1.0)
    assert quality.mean_kl == pytest.approx(0.0)
    assert quality.top1_agreement == 1.0
    assert quality.tokens > 400  # two windows: the model's context is shorter than the text


def test_it_is_measured_once_per_model_codec_and_block_size(
    healthy: Path, ruined: Path, measured: list[str], cache: Path
) -> None:
    first = calibrated(engine(healthy), healthy)
    assert calibrated(engine(healthy), healthy) == first
    assert measured == ["int8"]
    calibrated(engine(healthy, "fp8_e4m3"), healthy)
    calibrated(engine(healthy, block_size=8), healthy)
    assert calibrated(engine(ruined), ruined) != first
    assert measured == ["int8", "fp8_e4m3", "int8", "int8"]
    assert len(list((cache / "calibration").glob("*.json"))) == 4


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: "[]",
        lambda text: json.dumps({**json.loads(text), "key": {}}),
        lambda text: json.dumps({**json.loads(text), "quality": {}}),
        lambda text: text.replace('"ratio": ', '"ratio": "", "x": '),
        lambda text: json.dumps({**json.loads(text), "quality": {**json.loads(text)["quality"], "ratio": "1"}}),
    ],
)
def test_a_damaged_record_is_measured_again(
    healthy: Path, measured: list[str], cache: Path, damage: Callable[[str], str]
) -> None:
    subject = engine(healthy)
    first = calibrated(subject, healthy)
    (record,) = (cache / "calibration").glob("*.json")
    record.write_text(damage(record.read_text()))
    assert calibrated(subject, healthy) == first
    assert measured == ["int8", "int8"]
    calibrated(subject, healthy)
    assert measured == ["int8", "int8"], "the record is whole again"


def test_without_a_cache_folder_it_is_measured_each_time(healthy: Path, measured: list[str], cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    subject = engine(healthy)
    assert calibrated(subject, healthy) == calibrated(subject, healthy)
    assert measured == ["int8", "int8"]


def test_a_tokenizer_that_makes_nothing_of_the_text_is_named(healthy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "built_in_text", lambda: "a")
    with pytest.raises(ModelError, match="TRINE_KV_CHECK=off"):
        calibrated(engine(healthy), healthy)


def settings(folder: Path, **fields: str) -> Settings:
    return PrefillSettings(model=str(folder), kv_memory_mb=1, **fields)  # type: ignore[arg-type]


def test_a_worker_refuses_a_codec_that_ruins_its_model(ruined: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine(settings(ruined, kv_codec="int4"), ruined, slots=2)
    assert caught.value.field == "kv_codec"
    for said in ("int4", "perplexity", "%", "trine check", "TRINE_KV_CHECK=warn"):
        assert said in caught.value.message


def test_or_serves_it_with_a_warning(ruined: Path) -> None:
    with capture_logs() as logs:
        assert load_engine(settings(ruined, kv_codec="int4", kv_check="warn"), ruined, slots=2).identity.codec == "int4"
    (said,) = [line for line in logs if line["event"] == "KV codec measured"]
    assert (said["log_level"], said["verdict"], said["codec"]) == ("warning", "ruined", "int4")
    assert said["top1_agreement"] < 0.8


def test_or_does_not_look(ruined: Path, measured: list[str]) -> None:
    load_engine(settings(ruined, kv_codec="int4", kv_check="off"), ruined, slots=2)
    load_engine(settings(ruined), ruined, slots=2)
    assert measured == []


def test_a_codec_that_suits_the_model_is_said_to(healthy: Path) -> None:
    with capture_logs() as logs:
        load_engine(settings(healthy, kv_codec="int8"), healthy, slots=2)
    (said,) = [line for line in logs if line["event"] == "KV codec measured"]
    assert (said["log_level"], said["verdict"]) == ("info", "ok")
