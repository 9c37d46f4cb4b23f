"""`trine plan` as a command: what it takes, what it refuses, what it assumes."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from trine import plan_cli
from trine.cli import app
from trine.plan_metrics import NOTHING, Observed, observed, parse

GIVEN = ["plan", "--params", "8", "--hardware", "h100", "--load", "3", "--acceptance", "0.6"]
CPU = ["--hardware", "cpu", "--memory-gb", "24", "--bandwidth", "13", "--tflops", "0.075"]
SMOL = ["plan", "--params", "0.135", "--layers", "30", "--heads", "9", "--kv-heads", "3", "--head-dim", "64"]


def asked(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_the_command() -> None:
    found = asked(*GIVEN)
    assert found["workers"]["decode"] == 1
    assert found["workers"] in [one["workers"] for one in found["designs"]]
    assert "one NATS server" in CliRunner().invoke(app, GIVEN).stdout


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--metrics", "file:///etc/passwd"], "--metrics"),
        (["--memory-gb", "80"], "--bandwidth"),
        (["--acceptance", "60"], "--acceptance: 60 is not within 0 and 0.99"),
        (["--params", "inf"], "--params"),
        (["--params", "nan"], "--params"),
        (["--params", "-1"], "--params"),
        (["--active", "0"], "--active"),
        (["--active", "9"], "--active"),
        (["--dtype-bytes", "-2"], "--dtype-bytes"),
        (["--dtype-bytes", "0"], "--dtype-bytes"),
        (["--heads", "0"], "--heads"),
        (["--load", "nan"], "--load"),
        (["--draft-cost", "-1"], "--draft-cost"),
    ],
    ids=lambda part: " ".join(part) if isinstance(part, list) else "",
)
def test_what_makes_no_sense_is_refused(arguments: list[str], reason: str) -> None:
    result = CliRunner().invoke(app, [*GIVEN, *arguments])
    assert result.exit_code == 1 and result.stderr.startswith("trine: ") and reason in result.stderr
    assert "unexpected" not in result.stderr


def test_a_model_that_is_not_there_is_named() -> None:
    assert "no folder or GGUF file '/no/such'" in CliRunner().invoke(app, ["plan", "--model", "/no/such"]).stderr


def test_width_of_weights_says_nothing_of_kv() -> None:
    narrow, wide = asked(*SMOL, *CPU, "--dtype-bytes", "1"), asked(*SMOL, *CPU)
    assert narrow["model"]["dtype_bytes"] == 1 and wide["model"]["dtype_bytes"] == 4
    assert narrow["kv_bytes_per_token"] == wide["kv_bytes_per_token"] == 30 * 3 * 64 * 2 * 4
    assert asked(*SMOL, "--hardware", "h100", "--dtype-bytes", "1")["kv_bytes_per_token"] == 30 * 3 * 64 * 2 * 2


def test_the_built_in_model_is_planned_for_without_a_word() -> None:
    found = asked("plan", *CPU)
    assert found["model"]["params"] == pytest.approx(134.5e6, rel=0.01)
    assert found["model"]["kv_dtype_bytes"] == 4


PAGE = """trine_request_duration_seconds_count{{model="m"}} {answers}
trine_prompt_tokens_total{{model="m"}} {prompt}
trine_generation_tokens_total{{model="m"}} {output}
trine_worker_accepted_tokens_total{{model="m",worker="d"}} {output}
trine_worker_cut_drafts_total{{model="m",worker="d"}} 0
"""


def watching(monkeypatch: pytest.MonkeyPatch, before: str, after: str) -> None:
    """As if the gateway's page said so, and ten seconds later so."""

    def watch(url: str, seconds: float, model: str | None) -> Observed:
        return observed(parse(before), parse(after), 10.0, model)

    monkeypatch.setattr(plan_cli, "watch", watch)


ON_A_FLEET = ["plan", "--params", "8", "--hardware", "h100", "--metrics", "http://127.0.0.1:1/metrics"]


def test_what_is_seen_is_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    watching(monkeypatch, PAGE.format(answers=0, prompt=0, output=0), PAGE.format(answers=20, prompt=6000, output=1000))
    found = asked(*ON_A_FLEET)
    assert (found["load"]["requests_per_s"], found["load"]["prompt"], found["load"]["output"]) == (2.0, 300.0, 50.0)
    assert found["observed"]["acceptance"] == 1.0
    assert found["load"]["drafting"]["acceptance"] == 0.99, "what was seen may be too good to plan with"
    assert found["assumed"] == {}
    assert asked(*ON_A_FLEET, "--prompt", "70")["load"]["prompt"] == 70, "what is given counts for more"


def test_an_idle_fleet_is_planned_for_by_a_load_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    page = PAGE.format(answers=20, prompt=6000, output=1000)
    watching(monkeypatch, page, page)
    result = CliRunner().invoke(app, ON_A_FLEET)
    assert "nothing was answered meanwhile" in result.stdout
    assert "neither given nor seen, so assumed: --load 1" in result.stdout
    found = asked(*ON_A_FLEET, "--load", "7")
    assert found["load"]["requests_per_s"] == 7 and "load" not in found["assumed"]


def test_every_number_that_may_be_seen_has_one_that_is_assumed() -> None:
    known, assumed = plan_cli._known({}, NOTHING)
    assert known == assumed == plan_cli.ASSUMED
