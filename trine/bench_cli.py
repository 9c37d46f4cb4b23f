"""`trine bench`."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Annotated

import typer
from rich.console import Console

from shared.errors import InvalidField
from trine.asking import AsJson, Model, Nats
from trine.bench_load import Load
from trine.bench_sets import SETS
from trine.bench_stats import Objectives
from trine.console import EXIT_FAILED, reported

KEY = "OPENAI_API_KEY"


@reported
def bench(
    url: Annotated[str | None, typer.Option(help="An OpenAI-compatible API, instead of a fleet on NATS.")] = None,
    nats: Nats = None,
    model: Model = None,
    prompts: Annotated[str, typer.Option(help=f"Which prompts: {', '.join(SETS)}.")] = "chat",
    requests: Annotated[int, typer.Option(min=1, help="How many are sent.")] = 64,
    rate: Annotated[float | None, typer.Option(help="So many a second, on average (a Poisson process).")] = None,
    concurrency: Annotated[int | None, typer.Option(min=1, help="So many at once (8 when no rate is given).")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="At most so many tokens an answer.")] = 128,
    seed: Annotated[int, typer.Option(help="Same seed: same prompts at the same moments.")] = 0,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before, that do not count.")] = 2,
    ttft_ms: Annotated[float | None, typer.Option(help="Objective: time to the first token.")] = None,
    tpot_ms: Annotated[float | None, typer.Option(help="Objective: time per output token after the first.")] = None,
    e2e_ms: Annotated[float | None, typer.Option(help="Objective: the whole answer.")] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Give an answer up after so many seconds.")] = 600.0,
    as_json: AsJson = False,
) -> None:
    """Put a load on a running fleet, or on any OpenAI-compatible API, and say how it did.

    Exit code 1 if there were errors. The API's key is read from OPENAI_API_KEY.
    """
    from trine import bench as benching

    if prompts not in SETS:
        raise InvalidField(f"--prompts: one of {', '.join(SETS)}", field="prompts")
    if rate is None and concurrency is None:
        concurrency = 8
    plan = benching.Plan(
        load=Load(requests, max_tokens, rate, concurrency, seed),
        prompt_set=prompts,
        objectives=Objectives(ttft_ms, tpot_ms, e2e_ms),
        warmup=warmup,
        url=url,
        nats=nats,
        model=model,
        key=os.environ.get(KEY, "") if url else "",
        timeout=timeout,
    )
    found, where = asyncio.run(benching.bench(plan))
    if as_json:
        print(json.dumps({**where, "prompts": prompts, **found.as_dict()}))
    else:
        Console(highlight=False).print(benching.rendered(found, where))
    if found.errors:
        raise typer.Exit(EXIT_FAILED)
