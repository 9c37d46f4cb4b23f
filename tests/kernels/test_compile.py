"""Kernels compiled ahead of time for NVIDIA's Ampere and Hopper and AMD's CDNA 3, without any of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from shared.engine.codecs.registry import CODECS
from tests.kernels.ahead import TARGETS, Case, every

FAST = [
    Case("none", "prefill", "plain", "64x64", "sm_90"),
    Case("int8", "decode", "all", "64x64", "sm_80"),
    Case("fp8_e4m3", "decode", "plain", "64x64", "gfx942"),
    Case("int4", "decode", "plain", "64x64", "sm_90"),
]


def compiled(cases: Sequence[Case], cache: Path) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.run(  # noqa: PLW1510
        [sys.executable, "-m", "tests.kernels.ahead", *map(str, cases)],
        env=environment | {"TRITON_CACHE_DIR": str(cache)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return [json.loads(line) for line in process.stdout.splitlines()]


def check(cases: Sequence[Case], cache: Path) -> set[str]:
    """The names of the kernels."""
    lines = compiled(cases, cache)
    assert {line["case"] for line in lines} == {str(case) for case in cases}
    for line in lines:
        assert line["code"] > 0 and line["shared"] <= line["limit"], line
    return {line["kernel"] for line in lines}


@pytest.mark.slow
def test_each_codec_and_target(tmp_path: Path) -> None:
    assert check(FAST, tmp_path) == {"_write", "_write_values_in_groups", "_seal", "_keep", "attend", "merge"}
    assert {case.codec for case in FAST} == set(CODECS) and {case.target for case in FAST} == set(TARGETS)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("codec", "target"),
    [(codec, target) for codec in CODECS for target in TARGETS if target != "gfx942" or codec == "none"],
)
def test_every_variant(codec: str, target: str, tmp_path: Path) -> None:
    """For AMD, which nobody has run it on, one codec has to do."""
    check([case for case in every() if (case.codec, case.target) == (codec, target)], tmp_path)
