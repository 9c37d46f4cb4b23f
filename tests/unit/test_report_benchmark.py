"""The report of all benchmarks: what it keeps, what it says, and that what is committed is what the results say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report_runs
from benchmarks.report import ROOT, peer_arguments, write
from benchmarks.report_page import END, START, headline, page, with_headline
from benchmarks.report_plots import PLOTS, drawn
from benchmarks.report_runs import BENCHMARKS, Benchmark, kept, measured, public, told
from benchmarks.report_tables import TABLES, bars, shown, table
from benchmarks.report_theme import THEMES

GATEWAY: dict[str, Any] = {
    "command": "python -m benchmarks.gateway --json",
    "at": "2026-01-02 03:04",
    "took_s": 61,
    "machine": {
        "cpu": "A CPU", "cores": 2, "memory_gb": 8.0, "system": "Linux", "python": "3.11", "load_average_before": 0.5
    },
    "result": {
        "ttft_added_ms": 0.71,
        "tokens_per_s": 6051.8,
        "rows": {"ttft_added_ms": {"median": 0.71, "lowest": 0.5, "highest": 0.9}},
        "bars": {"ttft_added_ms": {"value": 0.71, "bar": "<= 0.6", "passed": False}},
    },
}  # fmt: skip


def test_every_benchmark_has_a_table_and_every_picture_a_benchmark() -> None:
    names = {benchmark.name for benchmark in BENCHMARKS}
    assert set(TABLES) == names and set(PLOTS) <= names


def test_all_that_make_bench_runs_fit_into_45_minutes() -> None:
    assert sum(b.minutes for b in BENCHMARKS if not b.extra) < 45


def test_a_result_is_the_last_line_whatever_was_said_before() -> None:
    assert told('starting\n{"a": 1}\n') == {"a": 1}
    assert told("") is None and told("no json") is None and told("[1]") is None


def fake(body: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Benchmark:
    """A benchmark whose module is this text."""
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / "benchmarks" / "told_here.py").write_text(body)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Benchmark("told_here", 0.05, "meaning", peers=True)


def test_a_run_is_kept_also_when_it_misses_a_bar(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    body = "import json, sys\nprint(json.dumps({'argv': sys.argv[1:]}))\nsys.exit(1)"
    saved = measured(fake(body, monkeypatch, tmp_path), ["--llama-server", "there"], lambda line: None)
    assert saved is not None
    assert saved["result"] == {"argv": ["--json", "--llama-server", "there"]} and saved["machine"]["cores"] >= 1


@pytest.mark.parametrize(
    ("body", "why"), [("raise SystemExit('broken')", "no result"), ("import time; time.sleep(60)", "ended after")]
)
def test_one_that_fails_or_hangs_says_so_and_is_left(
    body: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(report_runs, "LONGER", 0.5)
    said: list[str] = []
    assert measured(fake(body, monkeypatch, tmp_path), [], said.append) is None
    assert said[-1].startswith(f"told_here: {why}")


def test_a_missed_bar_is_told() -> None:
    assert any("**missed**" in line and "<= 0.6" in line for line in bars(GATEWAY["result"]))
    assert "**missed**" in page({"gateway": GATEWAY})


def test_a_missed_bar_of_any_benchmark_is_told() -> None:
    """Those that keep bars keep them where the report looks."""
    for name in ("memory", "kv_quant"):
        source = (ROOT / "benchmarks" / f"{name}.py").read_text()
        assert '"bars": judged(' in source, name


def test_reasons_are_kept_without_paths_and_without_the_words_of_others() -> None:
    failed = {
        "llama.cpp": "HTTP 500; it said last: secret",
        "vLLM": "not installed for /home/me/bin/python: gone",
        "x": "",
    }
    kept_ = public({"failed": failed, "rows": {"a": "/not/a/reason"}})
    assert kept_["failed"] == {"llama.cpp": "HTTP 500", "vLLM": "not installed for …: gone", "x": ""}
    assert kept_["rows"] == {"a": "/not/a/reason"}


def test_a_peer_that_failed_is_in_no_picture_and_named_below_the_table() -> None:
    value = {"median": 10.0, "lowest": 9.0, "highest": 11.0}
    servers = [
        {"name": name, "version": "1", "settings": "as it comes", "pss_mb": 1.0, "cpu_seconds": 1.0}
        for name in ("Trine", "broken")
    ]
    rows = {
        name: {"title": name, "servers": {"Trine": value}, "trine_over": {}, "best": "Trine"}
        for name in ("batch_1", "at_once_4", "ttft_cold_ms")
    }
    result = {"servers": servers, "missing": {"vLLM": ""}, "failed": {"broken": "HTTP 500"}, "rows": rows}
    assert "- broken: left out: HTTP 500" in TABLES["peers"](result)
    assert "- vLLM: left out: no reason given" in TABLES["peers"](result)
    figure = PLOTS["peers"](result, THEMES[0])
    drawn_lines = [line for axes in figure.axes for line in axes.get_lines()]
    assert len(drawn_lines) == 2, "the rate and the first token of one server"


def test_the_headline_sets_trine_beside_the_best_peer_of_each_row() -> None:
    def row(title: str, **medians: float) -> dict[str, Any]:
        return {"title": title, "servers": {name: {"median": m} for name, m in medians.items()}, "best": "?"}

    rows = {
        "ttft_cold_ms": row("first token, cold, ms", Trine=30.0, a=20.0, b=40.0),
        "batch_1": row("batch 1 (64 in), tokens/s", Trine=30.0, a=20.0, b=40.0),
    }
    servers = [{"name": name} for name in ("Trine", "a", "b")]
    said = headline({"peers": {"result": {"servers": servers, "rows": rows}}})[-1]
    assert "over the best of a, b: first token, cold: 1.50; batch 1: 0.75 |" in said
    alone = {"ttft_cold_ms": row("first token, cold, ms", Trine=30.0)}
    assert "no peer" in headline({"peers": {"result": {"servers": servers[:1], "rows": alone}}})[-1]


def test_what_was_not_measured_is_named_and_has_no_row() -> None:
    said = page({"gateway": GATEWAY})
    assert "Not measured yet:" in said and "`python -m benchmarks.peers --json`" in said
    assert len(headline({"gateway": GATEWAY})) == 3


def test_the_readme_keeps_everything_but_its_table() -> None:
    readme = f"before\n{START}\nold\n{END}\nafter\n"
    assert with_headline(readme, ["new"]) == f"before\n{START}\n\nnew\n\n{END}\nafter\n"
    with pytest.raises(ValueError, match="bench: start"):
        with_headline("no place", [])


def test_numbers_stand_to_the_right() -> None:
    assert table(("what", "x"), [("a", 1234.5), ("b", None)]) == [
        "| what | x |",
        "|---|---:|",
        "| a | 1,234 |",
        "| b | – |",
    ]
    assert [shown(v) for v in (0.0361, 0.123, 12.34, 3.0)] == ["0.036", "0.12", "12.3", "3"]


def test_a_picture_is_the_same_for_the_same_results_in_both_themes() -> None:
    row = {"with_drafter_tokens_per_s": 20.0, "without_tokens_per_s": 10.0, "speed_median": 2.0}
    saved = {**GATEWAY, "result": {"rows": {"chat": row, "texts": {"same": 1}}}}
    first = drawn({"speculation": saved})
    assert sorted(first) == ["speculation-dark.svg", "speculation-light.svg"] and first == drawn({"speculation": saved})
    assert first["speculation-dark.svg"] != first["speculation-light.svg"]


def test_the_report_is_written_beside_a_readme(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "README.md").write_text(f"{START}\n{END}\n")
    files = write({"gateway": GATEWAY}, tmp_path)
    assert [file.name for file in files] == ["results.md", "README.md"]
    assert "6,052 tokens per second" in (tmp_path / "README.md").read_text()


def test_what_is_committed_is_what_the_results_say() -> None:
    """`python -m benchmarks.report --draw` writes it again. Of pictures only the names are compared."""
    results = kept()
    assert results, "benchmarks/results is empty"
    assert (ROOT / "docs" / "results.md").read_text() == page(results)
    readme = (ROOT / "README.md").read_text()
    assert readme == with_headline(readme, headline(results))
    pictures = {f"{name}-{theme}.svg" for name in PLOTS if name in results for theme in ("light", "dark")}
    assert {file.name for file in (ROOT / "docs" / "images" / "results").glob("*")} == pictures


def test_peers_are_passed_on() -> None:
    from argparse import Namespace

    nobody = Namespace(vllm_python=None, llama_server=None, transformers_python=None, peers=None)
    assert peer_arguments(nobody) == []
    some = Namespace(vllm_python="a", llama_server=None, transformers_python="b", peers=["vLLM"])
    assert peer_arguments(some) == ["--vllm-python", "a", "--transformers-python", "b", "--only", "vLLM"]


def test_results_are_one_json_object_each() -> None:
    for file in report_runs.RESULTS.glob("*.json"):
        assert set(json.loads(file.read_text())) == {"command", "at", "took_s", "machine", "result"}
