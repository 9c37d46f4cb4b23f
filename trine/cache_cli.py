"""`trine cache ls | stat | drop`."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from shared.cache.naming import PUBLIC
from shared.errors import InvalidField
from shared.tenants import is_tenant
from trine.asking import AsJson, Model, Nats, ask
from trine.cache import SHOWN, DropReport, Share, Stat, drop, shares, stat
from trine.console import EXIT_FAILED, reported

app = typer.Typer(
    help="The shared prefix cache: what it holds, how it does, and dropping from it.", no_args_is_help=True
)


@app.command("ls")
@reported
def ls(nats: Nats = None, model: Model = None, as_json: AsJson = False) -> None:
    """Blocks and bytes in the stream, by tenant."""
    found = ask(nats, model, shares)
    if as_json:
        print(json.dumps([asdict(share) for share in found]))
    else:
        _print(_listed(found))


@app.command("stat")
@reported
def show_stat(nats: Nats = None, model: Model = None, as_json: AsJson = False) -> None:
    """Hits, misses, rejects, evictions and bytes by tier, of each worker and of all."""
    found = ask(nats, model, stat)
    if as_json:
        print(json.dumps({**asdict(found), "totals": found.totals}))
    else:
        _print(_counted(found))


@app.command("drop")
@reported
def drop_blocks(
    nats: Nats = None,
    model: Model = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's blocks.")] = None,
    public: Annotated[bool, typer.Option("--public", help="Only the blocks of public prefixes.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every tenant's blocks.")] = False,
    as_json: AsJson = False,
) -> None:
    """Remove cached blocks from the stream, from shared memory and from all workers' pools."""
    if [tenant is not None, public, everything].count(True) != 1:
        raise InvalidField("say what to drop: --tenant NAME, --public or --all", field="tenant")
    if tenant is not None and not is_tenant(tenant):
        raise InvalidField("--tenant: 1 to 64 letters, digits, - and _", field="tenant")
    scope = PUBLIC if public else tenant
    report = ask(nats, model, lambda bus, name: drop(bus, name, scope))
    if as_json:
        print(json.dumps({**asdict(report), "done": [done.model_dump() for done in report.done]}))
    else:
        typer.echo(_dropped(report))
    if report.silent:
        raise typer.Exit(EXIT_FAILED)


def _print(table: Table) -> None:
    Console(highlight=False).print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left")
    return table


def _listed(found: list[Share]) -> Table:
    table = _table("tenant", "blocks", "bytes")
    for share in found:
        table.add_row(SHOWN.get(share.tenant, share.tenant), str(share.blocks), decimal(share.bytes))
    table.add_row("all", str(sum(s.blocks for s in found)), decimal(sum(s.bytes for s in found)))
    return table


TIERS = {"pool": "pool_", "host": "host_", "stream": ""}
COUNTS = ("hit", "miss", "reject", "evicted", "bytes_in", "bytes_out")


def _counted(found: Stat) -> Table:
    """A row for each worker and tier; `joined` beside the stream's."""
    table = _table("worker", "tier", *(name.replace("_", " ") for name in COUNTS), "joined")
    for worker, counters in [*found.counters.items(), ("all", found.totals)]:
        for number, (tier, prefix) in enumerate(TIERS.items()):
            cells = [_cell(name, counters.get(prefix + name)) for name in COUNTS]
            joined = _cell("joined", counters.get("joined")) if tier == "stream" else ""
            table.add_row("" if number else worker, tier, *cells, joined)
    table.caption = f"{found.stream_blocks} blocks, {decimal(found.stream_bytes)} in the stream of {found.model}"
    return table


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return decimal(value) if name.startswith("bytes") else str(value)


def _dropped(report: DropReport) -> str:
    pool, host = sum(d.pool_blocks for d in report.done), sum(d.host_blocks for d in report.done)
    told = (
        f"{report.messages} messages of the stream, {host} blocks in shared memory, {pool} in {len(report.done)} pools"
    )
    return told + (f"; no answer from {', '.join(report.silent)}" if report.silent else "")
