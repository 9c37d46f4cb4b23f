"""What the report says of each result, in tables of Markdown: numbers rounded to what they are good for."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.newcomer import STEPS

Result = Mapping[str, Any]
Cell = str | float | None


def table(header: Sequence[str], rows: Iterable[Sequence[Cell]]) -> list[str]:
    """Columns of numbers stand to the right."""
    cells = [[shown(cell) for cell in row] for row in rows]
    sides = ["---:" if all(_NUMBER.match(row[i]) for row in cells) else "---" for i in range(len(header))]
    return ["| " + " | ".join(header) + " |", f"|{'|'.join(sides)}|", *("| " + " | ".join(row) + " |" for row in cells)]


_NUMBER = re.compile(r"(?:× |\+ )?[\d.,]+(?: %)?$|–$")


def shown(value: Cell) -> str:
    """Three digits that count; a dash for what was not measured."""
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    if abs(value) >= 100 or float(value).is_integer():
        return f"{value:,.0f}"
    return f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"


def percent(share: float | None, digits: int = 0) -> str:
    return "–" if share is None else f"{100 * share:.{digits}f} %"


def bars(result: Result) -> list[str]:
    """Those that the benchmark is held to, missed ones marked; nothing where it has none."""
    found = result.get("bars", {})
    rows = [(n, b["value"], b["bar"], "met" if b["passed"] else "**missed**") for n, b in found.items()]
    return ["", *table(("bar", "measured", "wanted", ""), rows)] if rows else []


def prefix(result: Result) -> list[str]:
    rows = []
    for name, row in result["rows"].items():
        cold = row.get("cold_ttft_ms", row.get("without_cache_ttft_p50_ms"))
        warm = row.get("warm_ttft_ms", row.get("ttft_p50_ms"))
        rows.append((name.replace("_", " "), cold, warm, warm / cold, percent(row.get("cached_share"))))
    return table(("", "computed, ms", "from the cache, ms", "ratio", "prompt tokens not computed"), rows)


def kv_quant(result: Result) -> list[str]:
    rows = [
        (
            model,
            codec,
            percent(result["bytes_per_token"][codec]["over_fp16"]),
            f"× {row['ratio']:.4f}",
            percent(row["top1_agreement"], 1),
            f"{row['mean_kl']:.5f}",
        )
        for model, found in result.items()
        if isinstance(found, Mapping) and "ratio" in found.get("int8", {})
        for codec, row in found.items()
    ]
    return table(("model", "codec", "bytes of fp16", "perplexity", "same most likely token", "mean KL"), rows)


def memory(result: Result) -> list[str]:
    names = {
        "waste": "places in blocks in use without a token",
        "waste_peak": "the same, worst moment",
        "waste_contiguous_prompt_and_max_tokens": "had each request its prompt + max_tokens reserved",
        "waste_contiguous_context": "had each request the whole context reserved",
    }
    pools = {name: row for name, row in result.items() if isinstance(row, Mapping) and "blocks" in row}
    header = ("", *(f"a pool of {row['blocks']:,} blocks" for row in pools.values()))
    return table(header, [(text, *(percent(row[key], 1) for row in pools.values())) for key, text in names.items()])


def speed(name: str, row: Result) -> float:
    """Of all answers together; where drafts cannot help, the median over answers, as the benchmark judges it."""
    helpless = name.startswith(("useless", "control"))
    return float(row["speed_median"] if helpless else row.get("speed", row["speed_median"]))


def speculation(result: Result) -> list[str]:
    rows = [
        (
            name,
            row.get("with_drafter_tokens_per_s"),
            row.get("without_tokens_per_s"),
            speed(name, row),
            percent(row.get("acceptance_rate")),
            row.get("drafted_per_token"),
        )
        for name, row in result["rows"].items()
        if "speed_median" in row
    ]
    return table(("", "tokens/s with", "without", "speed", "drafts accepted", "drafts per token"), rows)


def decode(result: Result) -> list[str]:
    rates = result["tokens_per_second"]
    columns = list(dict.fromkeys(column for row in rates.values() for column in row))
    rows = [(name, *(row.get(column) for column in columns)) for name, row in rates.items()]
    return table(("tokens/s, one thread", *(f"batch {column}" for column in columns)), rows)


def transfer(result: Result) -> list[str]:
    rows = [(name, row["MB/s"], row["CPU-s/GB"]) for name, row in result["rows"].items()]
    return table(("", "MB/s", "CPU-s per GB"), rows)


def gateway(result: Result) -> list[str]:
    rows = [(name.replace("_", " "), r["median"], r["lowest"], r["highest"]) for name, r in result["rows"].items()]
    return table(("", "median", "lowest round", "highest"), rows)


def failover(result: Result) -> list[str]:
    rows = [
        (", ".join(kill["leads"]), kill["recovery_s"], kill["next_finished_s"], kill["pause_s"])
        for kill in result["kills"]
    ]
    header = ("the killed server led", "asked then, answered after, s", "next answer after, s", "longest pause, s")
    return [*table(header, rows), "", f"{result['requests']} requests in all, {len(result['wrong'])} answered wrong."]


def simulate(result: Result) -> list[str]:
    lines: list[str] = []
    for title, rows in result["tables"].items():
        first = next(iter(rows.values()))["tokens_per_s"]
        found = [
            (
                name,
                row["tokens_per_s"],
                row["tokens_per_s"] / first,
                row["ttft_ms"]["p50"],
                row["tpot_ms"]["p50"],
                percent(row["busy"]["NATS"]),
                str(row["limit"]),
            )
            for name, row in rows.items()
        ]
        header = (title, "tokens/s", "over the first", "TTFT p50, ms", "TPOT p50, ms", "NATS busy", "limit")
        lines += ["", *table(header, found)]
    return lines[1:]


def simulate_check(result: Result) -> list[str]:
    rows = [
        (
            case,
            _MEASURES[name],
            pair["real"],
            pair["simulated"],
            f"{pair['error']:+.0%}".replace("%", " %"),
            "yes" if name in result["judged"][case] else "",
        )
        for case, row in result["rows"].items()
        for name, pair in row.items()
    ]
    return table(("fleet", "", "real", "simulated", "error", "judged"), rows)


_MEASURES = {"tokens_per_s": "tokens/s", "ttft_ms": "TTFT p50, ms", "tpot_ms": "TPOT p50, ms"}


def newcomer(result: Result) -> list[str]:
    return table(("since the first command", "seconds"), [(what, result[name]) for name, what in STEPS.items()])


def peers(result: Result) -> list[str]:
    names = [server["name"] for server in result["servers"]]
    rows = [
        (
            row["title"],
            *((row["servers"].get(name) or {}).get("median") for name in names),
            f"**{row['best']}**",
        )
        for row in result["rows"].values()
    ]
    pss = ("memory after the runs, MB", *(server["pss_mb"] for server in result["servers"]), "")
    lines = table(("", *names, "best"), [*rows, pss])
    told = [f"{s['name']} {s['version']} ({s['settings']})" for s in result["servers"]]
    return [*lines, "", "; ".join(told) + ".", *_left_out({**result["missing"], **result["failed"]})]


def interference(result: Result) -> list[str]:
    rows = [
        (
            name,
            r["itl_p99_ms"],
            f"{shown(r['itl_p99_lowest_ms'])} to {shown(r['itl_p99_highest_ms'])}",
            r["itl_max_ms"],
            r["itl_p50_ms"],
            r["tokens_per_s"],
            f"{r['prompts_answered']:g} of {r['prompts']:g}",
        )
        for name, r in result["rows"].items()
    ]
    rounds = f"of {result['rounds']} rounds"
    header = ("", "p99, ms", rounds, "longest, ms", "p50, ms", "tokens/s", "prompts answered in time")
    lines = table(header, rows)
    best = [f"Best peer, {name.replace('_', ' ')}: {peer}." for name, peer in result["best_peers"].items()]
    return [*lines, "", *best, *_left_out(result["left_out"])]


def _left_out(reasons: Mapping[str, str]) -> list[str]:
    return (
        ["", *(f"- {name}: left out: {' '.join(why.split()) or 'no reason given'}" for name, why in reasons.items())]
        if reasons
        else []
    )


TABLES: Mapping[str, Callable[[Result], list[str]]] = {
    "prefix": prefix,
    "kv_quant": kv_quant,
    "memory": memory,
    "speculation": speculation,
    "decode": decode,
    "transfer": transfer,
    "gateway": gateway,
    "failover": failover,
    "simulate": simulate,
    "simulate_check": simulate_check,
    "newcomer": newcomer,
    "peers": peers,
    "interference": interference,
}
