"""`python -m tests.chaos --minutes 15 [--seed N] [--json FILE]`: a fleet under attack; are its answers right?

Exits with 1 when a request was lost, doubled, hung or answered wrongly, when a worker ended that nobody had ended, or
when the fleet does not come to rest at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import secrets
import sys
import tempfile
import time
from pathlib import Path

from shared.bus.nats import NatsBus
from tests.chaos.answers import Case, cases, write_model
from tests.chaos.faults import Faults
from tests.chaos.fleet import ChaosFleet
from tests.chaos.load import CONNECT_S, DEADLINE_S, LATE_S, Asker
from tests.chaos.plan import Fault, plan
from tests.chaos.report import Report

ASKERS = 4


async def run(seed: int, seconds: float, folder: Path) -> Report:
    """Logs of all processes stay in `folder`."""
    report = Report(seed)
    model = await asyncio.to_thread(write_model, folder / "chaos")
    asked = await asyncio.to_thread(cases, model, seed)
    async with ChaosFleet(model, folder) as fleet:
        bus = await NatsBus.connect(fleet.server.url, name="chaos", wait=CONNECT_S)
        try:
            await _under_load(fleet, bus, report, asked, plan(seed, seconds), seconds)
            report.problems += await fleet.settle(bus)
        finally:
            await bus.close()
        await fleet.drain()
        report.problems += fleet.problems
    return report


async def _under_load(
    fleet: ChaosFleet, bus: NatsBus, report: Report, asked: list[Case], faults: list[Fault], seconds: float
) -> None:
    model, stop = fleet.workers.model, asyncio.Event()
    clients = [
        asyncio.create_task(Asker(f"c{n}", fleet.proxy.url, model, report.seed + n, asked, report).run(stop))
        for n in range(ASKERS)
    ]
    chaos, start = Faults(fleet, bus, model), time.monotonic()
    injected = [asyncio.create_task(_inject(chaos, fault, start, report)) for fault in faults]
    try:
        await asyncio.sleep(seconds)
        await asyncio.wait_for(asyncio.gather(*injected), 2 * DEADLINE_S)
        stop.set()
        await asyncio.wait_for(asyncio.gather(*clients), 2 * (DEADLINE_S + LATE_S))
    finally:
        for task in (*injected, *clients):
            task.cancel()
        await asyncio.gather(*injected, *clients, return_exceptions=True)


async def _inject(chaos: Faults, fault: Fault, start: float, report: Report) -> None:
    await asyncio.sleep(max(0.0, start + fault.at - time.monotonic()))
    print(f"{time.monotonic() - start:7.1f} s  {fault.kind}: {fault.victim}, {fault.lasts:.1f} s", file=sys.stderr)
    await chaos.inject(fault, lambda: report.injected(fault, time.monotonic()))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=15.0)
    parser.add_argument("--seed", type=int, help="drawn and printed when not given")
    parser.add_argument("--json", type=Path, help="write the report there, too")
    parser.add_argument("--logs", type=Path, help="keep the processes' logs in this folder, which must not exist")
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 31) if options.seed is None else options.seed
    print(f"seed {seed}", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="trine-chaos-") as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        report = asyncio.run(run(seed, options.minutes * 60, folder))
    if options.json:
        options.json.write_text(json.dumps(report.as_dict(), indent=1) + "\n")
    print(report.text())
    sys.exit(report.failed)


if __name__ == "__main__":
    main()
