"""`trine dead ls | show | retry`."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table

from shared.errors import InvalidField
from shared.tenants import is_tenant
from trine.asking import AsJson, Model, Nats, ask
from trine.console import reported
from trine.dead import Dead, dead, find, readable, retry

app = typer.Typer(
    help="Requests that were given up because workers died at work on them, and trying one again.",
    no_args_is_help=True,
)

Tenant = Annotated[str | None, typer.Option(help="Only this tenant's.")]
Id = Annotated[str, typer.Argument(help="The request's id.")]


@app.command("ls")
@reported
def ls(nats: Nats = None, model: Model = None, tenant: Tenant = None, as_json: AsJson = False) -> None:
    """Those that are kept, the latest first."""
    _check(tenant)
    found = ask(nats, model, lambda bus, name: dead(bus, name, tenant))
    if as_json:
        print(json.dumps([asdict(one) for one in found]))
        return
    table = Table("when", "tenant", "id", "attempts", "workers", "bytes", "reason", box=None, pad_edge=False)
    for one in found:
        workers = ", ".join(one.workers)
        table.add_row(_when(one), one.tenant, one.id, str(one.attempts), workers, decimal(one.bytes), one.code)
    Console(highlight=False).print(table)


@app.command("show")
@reported
def show(id: Id, nats: Nats = None, model: Model = None, tenant: Tenant = None, as_json: AsJson = False) -> None:
    """What happened, and the request itself, prompt included."""
    _check(tenant)
    one, request = ask(nats, model, lambda bus, name: find(bus, name, id, tenant))
    fields = readable(request)
    if as_json:
        print(json.dumps({**asdict(one), "request": fields}))
        return
    typer.echo(f"{one.id} of {one.tenant}, priority {one.priority}, {_when(one)}\n{one.code}: {one.reason}")
    typer.echo(f"attempts: {one.attempts}; workers: {', '.join(one.workers) or 'not known'}")
    typer.echo(json.dumps(fields, indent=2, ensure_ascii=False) if fields else f"not readable: {one.bytes} bytes")


@app.command("retry")
@reported
def retry_one(id: Id, nats: Nats = None, model: Model = None, tenant: Tenant = None) -> None:
    """Queue it again under the same id; the dead letter goes."""
    _check(tenant)
    seq = ask(nats, model, lambda bus, name: retry(bus, name, id, tenant))
    typer.echo(f"queued again as {seq}")


def _check(tenant: str | None) -> None:
    if tenant is not None and not is_tenant(tenant):
        raise InvalidField("--tenant: 1 to 64 letters, digits, - and _", field="tenant")


def _when(one: Dead) -> str:
    return datetime.fromtimestamp(one.at, UTC).strftime("%Y-%m-%d %H:%M:%S")
