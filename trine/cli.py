"""The command line: all of `trine`'s commands, and those that start fleets."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

from shared import telemetry
from shared.bus.wire import without_login
from shared.errors import InvalidField
from trine.bench_cli import bench
from trine.cache_cli import app as cache_app
from trine.chat_cli import chat
from trine.console import EXIT_FAILED, log_printer, progress_bar, reported
from trine.dead_cli import app as dead_app
from trine.generate_cli import generate
from trine.plan_cli import plan
from trine.settings import variables
from trine.status_cli import models, show_status, top

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False)
READY_S = 300.0


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trine {importlib.metadata.version('trine')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """LLM serving as prefill, decode and drafter actors on NATS, with a shared prefix cache.

    Settings are also read from TRINE_* variables of the same names; flags come first.
    """
    telemetry.configure("error")  # on stderr: stdout is for answers


@reported
def up(
    model: Annotated[str, typer.Option(help="A folder, a GGUF file, a hub id, or the built-in default.")] = "",
    model_name: Annotated[str, typer.Option(help="The name clients ask for; from the model's when empty.")] = "",
    drafter_model: Annotated[
        str, typer.Option(help="A draft head's folder, or a small model; empty: the head that comes with Trine.")
    ] = "",
    prefill: Annotated[int, typer.Option(min=0, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers.")] = 1,
    drafter: Annotated[int, typer.Option(min=0, help="Drafters.")] = 1,
    gateway: Annotated[int, typer.Option(min=0, help="Gateways: OpenAI's API, on --port and those after it.")] = 1,
    host: Annotated[str | None, typer.Option(help="Where gateways listen; 127.0.0.1 unless given.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="8000 unless given; 0: any free one.")] = None,
    nats: Annotated[
        str, typer.Option(help="nats://HOST:PORT, or embedded, or embedded:PORT.", envvar="TRINE_NATS_URL")
    ] = "embedded",
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block.")] = None,
    kv_memory_mb: Annotated[int | None, typer.Option(help="KV pool of each worker.")] = None,
    kv_codec: Annotated[str | None, typer.Option(help="none, int8, fp8_e4m3 or int4: how KV is stored.")] = None,
    kv_check: Annotated[
        str | None, typer.Option(help="refuse, warn or off: what to do with a codec that ruins the model.")
    ] = None,
    weights: Annotated[str | None, typer.Option(help="native, or int8: linear layers in 8 bits (CPU).")] = None,
    cache_bytes: Annotated[int | None, typer.Option(help="Size of the shared prefix cache.")] = None,
    draft_depth: Annotated[int | None, typer.Option(help="Tokens drafted per step; 0: no speculation.")] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads per worker; unset: those that no other uses.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
) -> None:
    """Start nats-server, workers and a gateway on this machine, restart those that die, stop all with Ctrl-C."""
    given: dict[str, Any] = {
        "model": model,
        "model_name": model_name,
        "drafter_model": drafter_model,
        "block_size": block_size,
        "kv_memory_mb": kv_memory_mb,
        "kv_codec": kv_codec,
        "kv_check": kv_check,
        "weights": weights,
        "cache_bytes": cache_bytes,
        "draft_depth": draft_depth,
        "threads": threads,
        "host": host,
        "port": port,
        "log_level": log_level,
    }
    counts = {"prefill": prefill, "decode": decode, "drafter": drafter, "gateway": gateway}
    _run_fleet(counts, nats, variables(given))


def _run_fleet(counts: dict[str, int], nats: str, env: dict[str, str]) -> None:
    from shared import drafters
    from trine.prepare import prepare
    from trine.supervisor import Fleet

    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        env = {"TRINE_LOG_FORMAT": os.environ.get("TRINE_LOG_FORMAT", "console"), **env}
    fleet = Fleet(counts, nats=nats, env=env, log=log_printer(console))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # both end the fleet in order
    try:
        with progress_bar(console) as progress:
            drafter = env.get("TRINE_DRAFTER_MODEL", "")
            fleet.tokenizer = prepare(fleet.settings.model, progress)
            if drafters.needs_weights(drafter) and drafter != fleet.settings.model:
                prepare(drafter, progress)
        with fleet:
            fleet.wait_ready(READY_S)
            there = ", ".join(f"{n} {role}" for role, n in fleet.counts.items() if n)
            http = "".join(f", {url}/v1" for url in fleet.gateways)
            typer.echo(f"ready: {fleet.model} at {without_login(fleet.url)} ({there}){http}; Ctrl-C stops")
            fleet.wait()
    except KeyboardInterrupt:
        return  # this is how it is meant to end


@reported
def check(
    model: Annotated[str, typer.Option(help="A folder, a GGUF file, a hub id, or the built-in default.")] = "",
    kv_codec: Annotated[str | None, typer.Option(help="int8, fp8_e4m3 or int4; all of them when not given.")] = None,
    weights: Annotated[str | None, typer.Option(help="native, or int8: measure these instead.")] = None,
    block_size: Annotated[int | None, typer.Option(help="Tokens per KV block.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads.")] = None,
    text: Annotated[Path | None, typer.Option(help="Measure on this text, not on the built-in English.")] = None,
    drafter: Annotated[
        str, typer.Option(help="Try this drafter instead: a draft head's folder, `shipped`, or a model.")
    ] = "",
    drafter_layers: Annotated[
        int | None, typer.Option(help="Try the model's own first layers as the drafter instead.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")] = False,
) -> None:
    """Measure what a KV codec costs a model, or what a drafter brings it, before it serves.

    Exit code 1 if the codec ruins the model, or the drafter does not fit it.
    """
    env = variables(
        {"model": model, "kv_codec": kv_codec, "weights": weights, "block_size": block_size, "threads": threads}
    )
    with progress_bar(Console(stderr=True, highlight=False)) as progress:
        found: dict[str, Any]
        shown: RenderableType
        if drafter or drafter_layers is not None:
            if text is not None:
                raise InvalidField("--text is for KV codecs; a drafter is tried on built-in tasks", field="text")
            from trine import check_drafter

            pair = check_drafter.check(drafter, drafter_layers, env, progress)
            found, shown, failed = pair.as_dict(), check_drafter.rendered(pair), not pair.fits
        else:
            from trine.check import check, table

            report = check(env, text, progress)
            found, shown, failed = report.as_dict(), table(report), report.ruined
    if as_json:
        print(json.dumps(found))
    else:
        Console(highlight=False).print(shown)
    if failed:
        raise typer.Exit(EXIT_FAILED)


@reported
def access(
    model: Annotated[list[str] | None, typer.Option(help="A served model's name; may be given several times.")] = None,
    tenant: Annotated[list[str] | None, typer.Option(help="A tenant's name; may be given several times.")] = None,
) -> None:
    """Print users with least permissions for nats-server's configuration (docs/security.md)."""
    from shared.config import Settings
    from trine.access import configuration

    typer.echo(configuration(model or [Settings().served_name], tenant or []), nl=False)


@reported
def demo(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, nothing else.")] = False,
) -> None:
    """Start a whole fleet, stream an answer, show the prefix cache and speculation at work, stop."""
    from trine.demo import run

    run(as_json)


STARTING, ASKING, LOOKING, MEASURING, RUNNING = "Start", "Ask", "Look", "Plan and measure", "Run it in earnest"
app.command(rich_help_panel=STARTING)(demo)
app.command(rich_help_panel=STARTING)(up)
app.command(rich_help_panel=ASKING)(chat)
app.command(rich_help_panel=ASKING)(generate)
app.command("status", rich_help_panel=LOOKING)(show_status)
app.command(rich_help_panel=LOOKING)(top)
app.command(rich_help_panel=LOOKING)(models)
app.command(rich_help_panel=MEASURING)(plan)
app.command(rich_help_panel=MEASURING)(bench)
app.command(rich_help_panel=MEASURING)(check)
app.add_typer(cache_app, name="cache", rich_help_panel=RUNNING)
app.add_typer(dead_app, name="dead", rich_help_panel=RUNNING)
app.command(rich_help_panel=RUNNING)(access)


def main() -> None:
    app()


if __name__ == "__main__":
    main()
