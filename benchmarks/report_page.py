"""The report as a page of Markdown, and its few most important lines for the README."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import machine
from benchmarks.peers_runs import ROWS as ROWS_OF_PEERS
from benchmarks.report_plots import PLOTS
from benchmarks.report_runs import BENCHMARKS, Benchmark, Saved
from benchmarks.report_tables import TABLES, bars, percent, shown, table

START, END = "<!-- bench: start -->", "<!-- bench: end -->"
Result = Mapping[str, Any]


def page(results: Mapping[str, Saved]) -> str:
    lines = [
        "# Results",
        "",
        "Written by `make bench` from `benchmarks/results`; [benchmarks](benchmarks.md) says how each is measured.",
        "Where a model is needed it is SmolLM2-135M-Instruct in fp32; `memory`, `gateway` and `failover` have engines",
        "that cost nothing, `simulate` plays costs that were measured. What counts are ratios, measured side by side",
        "in one run where there are two sides; absolute numbers are those of a small machine. All bars are shown, also",
        "missed ones.",
        "",
        *headline(results),
    ]
    for benchmark in BENCHMARKS:
        if benchmark.name in results:
            lines += ["", *section(benchmark, results[benchmark.name])]
    missing = [f"`{b.command}`" for b in BENCHMARKS if b.name not in results]
    if missing:
        lines += ["", f"Not measured yet: {', '.join(missing)}."]
    return "\n".join(lines) + "\n"


def section(benchmark: Benchmark, saved: Saved) -> list[str]:
    lines = [f"## {benchmark.name}", "", benchmark.meaning, ""]
    if benchmark.name in PLOTS:
        lines += [*picture(benchmark), ""]
    lines += [*TABLES[benchmark.name](saved["result"]), *bars(saved["result"]), ""]
    return [*lines, f"`{saved['command']}`, {saved['at']} UTC, {saved['took_s']} s; {machine.line(saved['machine'])}."]


def picture(benchmark: Benchmark) -> list[str]:
    stem = f"images/results/{benchmark.name}"
    return [
        "<picture>",
        f'  <source media="(prefers-color-scheme: dark)" srcset="{stem}-dark.svg">',
        f'  <img src="{stem}-light.svg" alt="{benchmark.meaning}">',
        "</picture>",
    ]


def headline(results: Mapping[str, Saved]) -> list[str]:
    """A row for each thing that Trine is for, as far as it was measured; each names its command."""
    rows = [
        (text, ROWS[name, text](results[name]["result"]), f"`benchmarks.{name}`")
        for name, text in ROWS
        if name in results
    ]
    return table(("", "", ""), rows) if rows else []


def with_headline(readme: str, rows: list[str]) -> str:
    """Raises ValueError where the README has no place for them."""
    before, start, rest = readme.partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"README.md: {START} and {END} are missing")
    return "\n".join([before + START, "", *rows, "", END + after])


def _prefix(result: Result) -> str:
    pool, host, nats = (shown(result[f"warm_over_cold_{tier}"]) for tier in ("same_worker", "host_tier", "nats"))
    return f"{pool} from the worker's own pool, {host} from the machine's memory, {nats} from NATS alone"


def _sets(result: Result) -> str:
    shares = " and ".join(percent(result[f"{name}_cached_share"]) for name in ("rag", "agent"))
    ratios = " and ".join(shown(result[f"{name}_ttft_ratio"]) for name in ("rag", "agent"))
    return f"{shares} of prompt tokens not computed; first token in {ratios} of the time"


def _codecs(result: Result) -> str:
    model = next(rows for name, rows in result.items() if name.startswith("smollm2"))
    return "; ".join(
        f"{codec}: {percent(result['bytes_per_token'][codec]['over_fp16'])}, × {model[codec]['ratio']:.4f}, "
        f"{percent(model[codec]['top1_agreement'], 1)}"
        for codec in ("int8", "int4")
    )


def _memory(result: Result) -> str:
    reserved = percent(result["roomy"]["waste_contiguous_context"])
    return f"{percent(result['waste'], 1)} of the places hold no token; {reserved} with a whole context reserved"


def _drafts(result: Result) -> str:
    names = {
        "quotations": "quote_speed",
        "edits of code": "edit_speed",
        "open chat": "chat_speed",
        "8 at once": "batch_speed",
    }
    return ", ".join(f"{name} {result[key]:.2f}" for name, key in names.items())


def _gateway(result: Result) -> str:
    return f"+ {result['ttft_added_ms']:.1f} ms; {result['tokens_per_s']:,.0f} tokens per second"


def _newcomer(result: Result) -> str:
    return f"{result['first_token_s'] / 60:.1f} minutes, {result['installed_s'] / 60:.1f} of them for pip"


def _failover(result: Result) -> str:
    return f"answers go on after {result['recovery_median_s']} s in the median, {len(result['wrong'])} wrong"


def _peers(result: Result) -> str:
    """Of the best peer's in each row: times that are best below 1, rates that are best above."""
    found = []
    for name, row in result["rows"].items():
        others = [r["median"] for server, r in row["servers"].items() if server != "Trine" and r]
        if others and (own := row["servers"].get("Trine")):
            best = max(others) if ROWS_OF_PEERS[name].higher else min(others)
            what = row["title"].rpartition(", ")[0].partition(" (")[0]
            found.append(f"{what}: {shown(own['median'] / best)}")
    names = ", ".join(server["name"] for server in result["servers"] if server["name"] != "Trine")
    return f"over the best of {names}: {'; '.join(found)}" if found else "no peer was installed"


def _interference(result: Result) -> str:
    found = []
    for name, peer in result["best_peers"].items():
        every = name.replace("_", " ")
        p99, rate = (result["bars"][f"{what}_ratio_{name}"]["value"] for what in ("p99", "rate"))
        own, other = (result["rows"][row]["itl_max_ms"] for row in (f"Trine (tuned), {every}", peer))
        found.append(
            f"{every}, beside {peer.rpartition(',')[0]}: {p99:.2f} of its p99, at {rate:.2f} of its tokens, the "
            f"longest pause {shown(own)} ms where its was {shown(other)}"
        )
    return "; ".join(found) or "no peer was installed"


ROWS = {
    ("prefix", "**Prefix cache**: time to the first token, warm / cold, prompts of 1,024 tokens"): _prefix,
    ("prefix", "questions over the same documents, tasks for the same tools"): _sets,
    ("kv_quant", "**KV in 8 bits, in 4 bits**: bytes of fp16, perplexity, same most likely token"): _codecs,
    ("memory", "**Paging**: KV memory in use, under a mixed load"): _memory,
    ("speculation", "**Drafts**: tokens per second with / without"): _drafts,
    ("peers", "**Beside other servers**, same weights and cores: times (less is better) and tokens/s"): _peers,
    (
        "interference",
        "**Running answers while prompts of 1,024 tokens arrive**, tuned, pauses beside the best peer's",
    ): _interference,
    (
        "gateway",
        "**The gateway**, beside plain NATS: time to the first token; streamed by one process on one core",
    ): _gateway,
    ("newcomer", "**From `git clone` to the first token**, everything installed on the way"): _newcomer,
    ("failover", "**Trust**: a leader of NATS killed under load"): _failover,
}
"""By benchmark and what the row is about: what its result says of it."""
