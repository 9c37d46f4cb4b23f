"""A fleet's picture on a terminal. Pure: rows in, renderables out. Names come from the bus and are shown as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from shared.bus.wire import without_login
from trine.console import COLOURS
from trine.picture import ModelRow, WorkerRow
from trine.plain import name
from trine.roster import State
from trine.series import Number
from trine.status import Status, StreamRow

BARS = " ▁▂▃▄▅▆▇█"
POOL = 12
"""Columns of the bar that shows how full a pool is."""
SPARK = 60
"""Seconds in a line of bars, one each."""
STATES = {State.SERVING: "●", State.JOINING: "◔", State.DRAINING: "◑", State.SILENT: "✕"}
STYLES = {State.SERVING: "", State.JOINING: "yellow", State.DRAINING: "yellow", State.SILENT: "red"}
NONE = "–"


def shown_status(found: Status) -> RenderableType:
    guarded = {True: "asks who one is", False: "lets everybody in", None: ""}[found.guarded]
    head = Text.assemble(("NATS ", "bold"), without_login(found.nats), f"  {guarded}")
    if found.streams is None:
        streams: RenderableType = Text("streams: this user may not ask", style="dim")
    else:
        streams = _streams(found.streams)
    return Group(head, Text(), *_fleet(found.models), streams)


def shown_top(models: Sequence[ModelRow], address: str, clock: str) -> RenderableType:
    """One frame of `trine top`."""
    head = Text.assemble(("trine top ", "bold"), (f"{without_login(address)}  {clock}  Ctrl-C leaves", "dim"))
    return Group(head, Text(), *_fleet(models))


def shown_models(models: Sequence[ModelRow]) -> Table:
    table = _table("model", "served", "workers", "running", "queued", "tokens/s")
    for row in models:
        alive = sum(worker.state is not State.SILENT for worker in row.workers)
        cells = (str(alive), str(row.running), _count(row.queued), f"{row.tokens_s:.1f}")
        table.add_row(Text(name(row.model)), "yes" if row.served else "no", *cells)
    return table


def _fleet(models: Sequence[ModelRow]) -> list[RenderableType]:
    if not models:
        return [Text("nobody is heard; `trine up` starts a fleet on this machine", style="yellow"), Text()]
    parts: list[RenderableType] = []
    for row in models:
        parts += [_figures(row), *_pulse(row), _workers(row.workers), Text()]
    return parts


def _figures(row: ModelRow) -> Text:
    served = ("served", "green") if row.served else ("not served: no decode worker", "red")
    jobs = f" (+{row.prefill_queued} waiting)" if row.prefill_queued else ""
    facts = [
        f"{_count(row.queued)} waiting",
        f"{row.running} running",
        f"{row.tokens_s:.1f} tokens/s",
        f"{row.prefilling} prefills{jobs}",
        f"cache {_percent(row.cache_hit)}",
        f"drafts {_percent(row.acceptance)}",
    ]
    return Text.assemble((name(row.model), "bold"), "  ", served, "  ", " · ".join(facts))


def _pulse(row: ModelRow) -> list[Text]:
    """Tokens of each second, when there were any."""
    values = [value or 0 for value in row.history.get("tokens", [])[-SPARK:]]
    return [Text(spark(values), style=COLOURS["decode"])] if any(values) else []


def spark(values: Sequence[Number]) -> str:
    """A bar for each value, the largest as high as a line."""
    most = max(values, default=0)
    return "".join(BARS[round(value / most * (len(BARS) - 1))] if most else BARS[0] for value in values)


def _workers(rows: Sequence[WorkerRow]) -> Table:
    table = _table("role", "worker", "state", "running", "waiting", "KV blocks in use", "tokens/s")
    for row in rows:
        style = COLOURS[row.role]
        alive = row.state is not State.SILENT
        state = row.state.value if alive else f"silent for {row.silent_s:.0f} s"
        table.add_row(
            Text(row.role, style=style),
            Text(name(row.worker)),
            Text(
                f"{STATES[row.state]} {state}", style="" if row.state is State.SERVING else "yellow" if alive else "red"
            ),
            str(row.running) if alive else NONE,
            str(row.waiting) if alive else NONE,
            _pool(row, style) if alive and row.blocks else Text(NONE),
            f"{row.tokens_s:.1f}" if alive and row.role == "decode" else NONE,
        )
    return table


def _pool(row: WorkerRow, style: str) -> Text:
    used = max(row.blocks - row.free_blocks, 0)
    full = min(round(used / row.blocks * POOL), POOL)
    return Text.assemble(("█" * full, style), ("░" * (POOL - full), "dim"), f" {used}/{row.blocks}")


def _streams(rows: Sequence[StreamRow]) -> Table:
    table = _table("model", "stream", "messages", "bytes")
    for row in rows:
        table.add_row(Text(name(row.model)), row.stream, str(row.messages), decimal(row.bytes))
    return table


TEXTS = {"model", "stream", "role", "worker", "state", "served"}


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, justify="left" if column in TEXTS else "right", no_wrap=True)
    return table


def _count(value: int | None) -> str:
    return NONE if value is None else str(value)


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.0%}"
