"""Measure a running fleet, or anything that speaks OpenAI's API, under one load."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trine.bench_http import HttpTarget, first_model
from trine.bench_load import Load, Target, drive
from trine.bench_nats import NatsTarget
from trine.bench_sets import Prompt, prompts
from trine.bench_stats import Objectives, Report, report
from trine.client import Client
from trine.plain import plain


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of whom. Without a `url` it is the fleet at `nats`."""

    load: Load
    prompt_set: str
    objectives: Objectives
    warmup: int = 0
    """Requests before, that do not count: one at a time."""
    url: str | None = None
    nats: str | None = None
    model: str | None = None
    key: str = ""
    timeout: float = 600.0


async def bench(plan: Plan) -> tuple[Report, dict[str, Any]]:
    """What was measured, and what it was measured on. Raises a TrineError when the target cannot be reached at all."""
    asked = prompts(plan.prompt_set, plan.load.seed)
    async with _target(plan) as (target, where):
        if plan.warmup:
            await drive(target, _other(plan), replace(plan.load, rate=None, concurrency=1, requests=plan.warmup))
        records = await drive(target, asked, plan.load)
    return report(records, plan.objectives), where


def _other(plan: Plan) -> Iterator[Prompt]:
    """The same set in another order, so that what is measured is not what was asked just before."""
    return islice(prompts(plan.prompt_set, plan.load.seed + 1), plan.warmup)


@asynccontextmanager
async def _target(plan: Plan) -> AsyncIterator[tuple[Target, dict[str, Any]]]:
    async with contextlib.AsyncExitStack() as stack:
        if plan.url is None:
            client = await stack.enter_async_context(Client(plan.nats, plan.model))
            yield NatsTarget(client, plan.timeout), {"target": "nats", "model": client.model}
        else:
            model = plan.model or await first_model(plan.url, plan.key)
            target = HttpTarget(plan.url, model, key=plan.key, timeout=plan.timeout)
            yield await stack.enter_async_context(target), {"target": plan.url, "model": model}


def rendered(found: Report, where: Mapping[str, Any]) -> RenderableType:
    """For a terminal."""
    table = Table(box=None, pad_edge=False)
    table.add_column("ms")
    columns = ("mean", "p50", "p90", "p95", "p99")
    for column in columns:
        table.add_column(column, justify="right")
    for name, spread in _latencies(found):
        table.add_row(name, *(f"{spread[column]:,.1f}" if spread else "–" for column in columns))
    errors = ", ".join(f"{count} × {what}" for what, count in found.errors.items()) or "none"
    lines = [
        f"{where['model']} at {where['target']}",
        f"{found.completed} of {found.requests} answers in {found.seconds:.1f} s; errors: {errors}",
        f"{found.output_tokens_per_s:,.1f} tokens/s written, {found.total_tokens_per_s:,.1f} with the prompts; "
        f"{found.requests_per_s:.2f} answers/s",
        f"prompts: {found.prompt_tokens:,} tokens, {found.cached_tokens:,} of them cached",
        *_goodput(found),
    ]
    # Names and reasons in them are others'.
    return Group(*(Text(plain(line)) for line in lines), Text(), table)


def _latencies(found: Report) -> list[tuple[str, Mapping[str, float] | None]]:
    return [
        ("first token (TTFT)", found.ttft_ms),
        ("per later token (TPOT)", found.tpot_ms),
        ("between pieces (ITL)", found.itl_ms),
        ("whole answer (E2E)", found.e2e_ms),
    ]


def _goodput(found: Report) -> list[str]:
    asked = [f"{name.removesuffix('_ms').upper()} ≤ {v:g} ms" for name, v in found.objectives.items() if v is not None]
    if not asked:
        return []
    return [f"goodput: {found.goodput_per_s:.2f} answers/s ({found.good_share:.0%}) with {', '.join(asked)}"]
