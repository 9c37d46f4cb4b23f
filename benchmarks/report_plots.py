"""The report's pictures, each in a light and a dark version, as SVG that is the same for the same results."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from benchmarks.report_runs import Saved
from benchmarks.report_tables import speed
from benchmarks.report_theme import LABELS, THEMES, Theme
from benchmarks.simulate_world import BUSY

Result = Mapping[str, Any]
Plot = Callable[[Result, Theme], Figure]


def drawn(results: Mapping[str, Saved]) -> dict[str, str]:
    """By file name: the pictures of all results that have one."""
    files = {}
    for name, plot in PLOTS.items():
        if name not in results:
            continue
        for theme in THEMES:
            with matplotlib.rc_context(theme.style):
                files[f"{name}-{theme.name}.svg"] = _svg(plot(results[name]["result"], theme))
    return files


def _svg(figure: Figure) -> str:
    out = io.StringIO()
    figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _panels(count: int, height: float, width: float = 8.0) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = [figure.add_subplot(1, count, i + 1) for i in range(count)]
    return figure, axes


def _numbers(axes: Axes, *, x: bool = False, y: bool = False) -> None:
    """Logarithmic axes with plain numbers on them."""
    for wanted, scale, axis in ((x, axes.set_xscale, axes.xaxis), (y, axes.set_yscale, axes.yaxis)):
        if wanted:
            scale("log")
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
            axis.set_minor_formatter(NullFormatter())


def prefix(result: Result, theme: Theme) -> Figure:
    """Seconds to the first token, cold and warm."""
    figure, (axes,) = _panels(1, 3.2)
    rows = [(LABELS.get(name, name), *_cold_and_warm(row)) for name, row in result["rows"].items()][::-1]
    for place, (_, cold, warm) in enumerate(rows):
        axes.barh(place + 0.19, cold, 0.34, color=theme.quiet, label="computed" if place == 0 else None)
        axes.barh(place - 0.19, warm, 0.34, color=theme.colors[0], label="from the cache" if place == 0 else None)
        axes.annotate(f"{cold:.1f} s", (cold, place + 0.19), xytext=(4, 0), textcoords="offset points", va="center")
        axes.annotate(f"{warm:.2f} s", (warm, place - 0.19), xytext=(4, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [name for name, *_ in rows])
    axes.set_xlabel("seconds to the first token (median)")
    axes.margins(x=0.12)
    axes.legend(loc="lower right")
    return figure


def _cold_and_warm(row: Result) -> tuple[float, float]:
    cold, warm = ("cold_ttft_ms", "warm_ttft_ms")
    if cold not in row:
        cold, warm = ("without_cache_ttft_p50_ms", "ttft_p50_ms")
    return row[cold] / 1e3, row[warm] / 1e3


def kv_quant(result: Result, theme: Theme) -> Figure:
    """Bytes against perplexity."""
    figure, (axes,) = _panels(1, 3.2)
    models = [
        name for name, rows in result.items() if isinstance(rows, dict) and "int8" in rows and "ratio" in rows["int8"]
    ]
    for model, color, marker in zip(models, theme.colors, "os", strict=False):
        rows = result[model]
        sizes = [100 * result["bytes_per_token"][codec]["over_fp16"] for codec in rows]
        losses = [100 * (row["ratio"] - 1) for row in rows.values()]
        axes.plot(sizes, losses, marker, color=color, markersize=7, label=model)
        if model == models[0]:
            for codec, x, y in zip(rows, sizes, losses, strict=True):
                axes.annotate(codec, (x, y), xytext=(9, 0), textcoords="offset points", va="center")
    axes.plot([100], [0], "o", color=theme.quiet, markersize=7)
    axes.annotate("none (fp16)", (100, 0), xytext=(-9, 0), textcoords="offset points", va="center", ha="right")
    axes.set_xlim(0, 105)
    axes.margins(y=0.12)
    axes.set_xlabel("bytes of a token's KV, scales included, % of fp16")
    axes.set_ylabel("perplexity, + %")
    axes.legend(loc="upper right")
    return figure


def speculation(result: Result, theme: Theme) -> Figure:
    """Speed with drafts over speed without, by kind of answer."""
    figure, (axes,) = _panels(1, 3.4)
    rows = [(name, row) for name, row in result["rows"].items() if "speed_median" in row][::-1]
    for place, (name, row) in enumerate(rows):
        value = speed(name, row)
        axes.barh(place, value, 0.6, color=theme.colors[0] if value >= 1 else theme.quiet)
        if "speed_most" in row:
            axes.plot([row["speed_least"], row["speed_most"]], [place, place], color=theme.ink, linewidth=1)
        end = max(value, row.get("speed_most", value))
        axes.annotate(f"{value:.2f}", (end, place), xytext=(5, 0), textcoords="offset points", va="center")
    axes.axvline(1, color=theme.ink, linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(rows)), [LABELS.get(name, name) for name, _ in rows])
    axes.set_xlabel("tokens per second, with drafter / without (lines: single answers)")
    axes.margins(x=0.1)
    return figure


def peers(result: Result, theme: Theme) -> Figure:
    """Tokens per second by requests at once; time to the first token."""
    figure, (rate, first) = _panels(2, 3.4)
    colors = _colored(result, theme)
    at_once = {1: "batch_1", 4: "at_once_4", 8: "at_once_8", 16: "at_once_16"}
    for server, color in colors.items():
        points = [(n, result["rows"][row]["servers"][server]["median"]) for n, row in _there(result, at_once, server)]
        if points:
            rate.plot(*zip(*points, strict=True), "o-", color=color, label=server, markersize=5)
    _numbers(rate, x=True)
    rate.set_xticks(list(at_once))
    rate.set_ylim(bottom=0)
    rate.set_xlabel("requests at once")
    rate.set_ylabel("tokens per second")
    rate.legend()
    kinds = {"cold": "ttft_cold_ms", "same": "ttft_same_ms", "shared": "ttft_shared_ms"}
    for server, color in colors.items():
        places = {row: place for place, row in enumerate(kinds.values())}
        points = [
            (places[r], result["rows"][r]["servers"][server]["median"] / 1e3) for _, r in _there(result, kinds, server)
        ]
        if points:
            first.plot(*zip(*points, strict=True), "o", color=color, markersize=7)
    _numbers(first, y=True)
    first.margins(x=0.25)
    first.set_xticks(range(len(kinds)), ["1,024 tokens,\ncold", "the same\nagain", "same 1,000,\nanother end"])
    first.set_ylabel("seconds to the first token")
    return figure


def _there(result: Result, names: Mapping[Any, str], server: str) -> list[tuple[Any, str]]:
    rows = result["rows"]
    return [(key, row) for key, row in names.items() if row in rows and server in rows[row]["servers"]]


def _colored(result: Result, theme: Theme) -> dict[str, str]:
    names = [server["name"] for server in result["servers"]]
    return dict(zip(names, theme.colors, strict=False))


def interference(result: Result, theme: Theme) -> Figure:
    """The longest pauses of running streams, and what they get."""
    rates = sorted({name.rpartition(", every ")[2] for name in result["rows"]}, key=lambda r: -float(r.split()[0]))
    names = list(dict.fromkeys(name.rpartition(", every ")[0] for name in result["rows"]))[::-1]
    figure, panels = _panels(len(rates), 0.8 + 0.42 * len(names))
    for axes, every in zip(panels, rates, strict=True):
        for place, name in enumerate(names):
            row = result["rows"].get(f"{name}, every {every}")
            if row is None:
                continue
            color = theme.colors[0] if name.startswith("Trine") else theme.quiet
            axes.barh(place, row["itl_p99_ms"], 0.62, color=color)
            label = f"{row['itl_p99_ms']:,.0f} ms, {row['tokens_per_s']:.0f}/s"
            axes.annotate(label, (row["itl_p99_ms"], place), xytext=(4, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(names)), names if axes is panels[0] else [""] * len(names))
        axes.set_xlabel(f"p99 between two tokens, ms; tokens per second\n(a prompt of 1,024 tokens every {every})")
        axes.margins(x=0.45)
    return figure


def simulate(result: Result, theme: Theme) -> Figure:
    """What more workers bring; what more machines bring, and from where on NATS is the limit."""
    figure, (workers, machines) = _panels(2, 3.4)
    tables = result["tables"]
    for (title, label), color in zip(_WORKERS.items(), theme.colors, strict=False):
        rows = list(_started(tables, title).items())
        counts = [
            int(name.split(" drafters")[0].split()[-1]) if "drafters" in name else int(name.split()[0])
            for name, _ in rows
        ]
        rates = [row["tokens_per_s"] / rows[0][1]["tokens_per_s"] for _, row in rows]
        workers.plot(counts, rates, "o-", color=color, label=label, markersize=5)
    workers.set_xlabel("workers of the kind")
    workers.set_ylabel("tokens per second, first point = 1")
    workers.set_xticks([0, 1, 2, 4])
    workers.legend()
    for (title, label), color in zip(_MACHINES.items(), theme.colors, strict=False):
        rows = list(_started(tables, title).items())
        counts, rates = [int(name.split()[0]) for name, _ in rows], [row["tokens_per_s"] for _, row in rows]
        machines.plot(counts, rates, "o-", color=color, label=label, markersize=5)
        full = [(c, r) for c, r, (_, row) in zip(counts, rates, rows, strict=True) if row["busy"]["NATS"] >= BUSY]
        if full:
            machines.plot(*zip(*full, strict=True), "o", color=theme.paper, markeredgecolor=color, markersize=5)
    _numbers(machines, x=True, y=True)
    machines.set_xlabel("machines of two cores (hollow: one NATS server is full)")
    machines.set_ylabel("tokens per second")
    machines.legend()
    return figure


_WORKERS = {
    "decode workers": "decode (32 chats)",
    "prefill workers": "prefill (cold prompts)",
    "drafters": "drafters (16 decode)",
}
_MACHINES = {"machines, chats": "chats", "machines, cold": "cold prompts of 1,024 tokens"}


def _started(tables: Mapping[str, Any], title: str) -> Mapping[str, Any]:
    return next((rows for name, rows in tables.items() if name.startswith(title)), {})


PLOTS: Mapping[str, Plot] = {
    "prefix": prefix,
    "kv_quant": kv_quant,
    "speculation": speculation,
    "peers": peers,
    "interference": interference,
    "simulate": simulate,
}
