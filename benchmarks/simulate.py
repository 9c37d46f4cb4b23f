"""What more workers bring, as a discrete-event simulation: `python -m benchmarks.simulate [--json]`.

The project's own schedulers (prefill, decode, affinity, drafting policy) run on a virtual clock. Steps cost what was
measured on one machine (`--calibrate`, kept in benchmarks/data); NATS costs what it was measured to take per byte and
message. It shows how far each role scales, and whether NATS, the cache or the drafters are the limit first. `--check`
compares it with real fleets of one and two workers on this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.simulate_costs import DATA, Costs, load, scaled
from benchmarks.simulate_fleet import Fleet
from benchmarks.simulate_world import BUSY, Load, Shape

SHIPPED = DATA / "simulate_costs.json"
GiB = 1 << 30
Row = tuple[str, dict[str, Any]]
COLUMNS = ("tokens/s", "over first", "first token ms", "ms/token", "busiest", "NATS MB/s", "NATS asked", "limit")


def apart(costs: Costs) -> Costs:
    """Each worker with a core and its memory to itself."""
    return replace(costs, cores=1 << 20, contention=0.0)


def by_decode(costs: Costs) -> list[Row]:
    ask = Load(96, 64, 48, concurrency=32)
    return [_row(f"{n} decode", Shape(0, n), apart(costs), ask) for n in (1, 2, 4)]


def by_prefill(costs: Costs) -> list[Row]:
    """No more prompts at once than workers: with more or longer ones, decode workers lose patience and compute them."""
    ask = Load(32, 512, 8, concurrency=4)
    return [_row(f"{n} prefill, 4 decode", Shape(n, 4), apart(costs), ask) for n in (1, 2, 4)]


def by_drafter(costs: Costs) -> list[Row]:
    """Sixteen decode workers with one answer each: most is to be gained there, and most is asked of drafters."""
    ask = Load(64, 64, 96, concurrency=16)
    sure = replace(apart(costs), acceptance=0.7)
    return [_row(f"16 decode, {n} drafters, 70 % accepted", Shape(0, 16, n), sure, ask) for n in (0, 1, 2, 4)]


def by_sharing(costs: Costs) -> list[Row]:
    """Four machines; of prompts of 1,024 tokens a part was asked before, by anybody."""
    found = []
    for shared in (0.0, 0.5, 0.9):
        ask = Load(96, 1024, 16, concurrency=8, shared=shared, groups=8)
        found.append(_row(f"{shared:.0%} of prompts shared", Shape(1, 1, machines=4), costs, ask))
    for room in (GiB, GiB // 16):
        shape = Shape(1, 1, machines=4, stream_bytes=room, machine_bytes=0, pool_blocks=160)
        ask = Load(96, 1024, 16, concurrency=8, shared=0.9, groups=8)
        found.append(_row(f"90%, small pools, {room >> 20} MiB in NATS alone", shape, costs, ask))
    return found


def by_machines(costs: Costs, largest: int, prompt: int, output: int) -> list[Row]:
    """Machines with a prefill and a decode worker each, and one NATS server for all. Beyond 100 % it is asked for more
    than it can do: blocks come too late to be of use, and workers compute them again."""
    found, machines = [], 1
    while machines <= largest:
        ask = Load(6 * machines, prompt, output, concurrency=3 * machines)
        found.append(_row(f"{machines} machines", Shape(1, 1, machines=machines), costs, ask))
        machines *= 4
    return found


def by_speed(costs: Costs) -> list[Row]:
    """Four machines whose steps take so many times less, as with accelerators: the bus stays what it is."""
    ask = Load(64, 1024, 64, concurrency=16)
    return [
        _row(f"{faster} times as fast", Shape(1, 1, machines=4), scaled(costs, faster), ask) for faster in (1, 10, 100)
    ]


def _row(name: str, shape: Shape, costs: Costs, ask: Load) -> Row:
    return name, Fleet(shape, costs).run(ask).as_dict()


def tables(costs: Costs, largest: int) -> dict[str, Callable[[], list[Row]]]:
    return {
        "decode workers, 32 chats at once, a core each": lambda: by_decode(costs),
        "prefill workers, four cold prompts of 512 tokens at once, a core each": lambda: by_prefill(costs),
        "drafters": lambda: by_drafter(costs),
        "the prefix cache": lambda: by_sharing(costs),
        "machines, chats of 64 + 64 tokens": lambda: by_machines(costs, largest, 64, 64),
        "machines, cold prompts of 1,024 tokens + 32": lambda: by_machines(costs, max(largest // 4, 1), 1024, 32),
        "faster machines": lambda: by_speed(costs),
    }


def shown(title: str, rows: list[Row]) -> str:
    lines = ["", title, f"  {'':<42}" + "".join(f"{column:>15}" for column in COLUMNS)]
    for name, row in rows:
        busy = {role: share for role, share in row["busy"].items() if role != "NATS"}
        role = max(busy, key=lambda r: busy[r])
        cells = (
            f"{row['tokens_per_s']:,.1f}", f"{row['tokens_per_s'] / rows[0][1]['tokens_per_s']:.2f}",
            f"{row['ttft_ms']['p50']:,.0f}", f"{row['tpot_ms']['p50']:,.1f}", f"{role} {busy[role]:.0%}",
            f"{row['nats_mb_per_s']:,.1f}", f"{row['busy']['NATS']:.0%}", row["limit"],
        )  # fmt: skip
        lines.append(f"  {name:<42}" + "".join(f"{cell:>15}" for cell in cells))
        blocks = {tier: share for tier, share in row["prompt_blocks"].items() if share >= 0.005}
        lines.append(f"  {'':<42}  prompts: " + ", ".join(f"{share:.0%} {tier}" for tier, share in blocks.items()))
    return "\n".join(lines)


def findings(found: dict[str, list[Row]]) -> list[str]:
    """What the tables say of limits, in words."""
    lines = []
    for title, rows in found.items():
        first, last = rows[0][1], rows[-1][1]
        gain = last["tokens_per_s"] / first["tokens_per_s"]
        limited = next((name for name, row in rows if row["busy"]["NATS"] >= BUSY), None)
        end = f"NATS is the limit from {limited} on" if limited else f"the limit is {last['limit']}, not NATS"
        lines.append(f"{title}: from {rows[0][0]} to {rows[-1][0]} {gain:.2f} times the tokens; {end}")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--costs", type=Path, default=SHIPPED, help="measured step costs (those that ship)")
    parser.add_argument("--calibrate", action="store_true", help="measure this machine and write them to --costs")
    parser.add_argument("--check", action="store_true", help="compare with real fleets on this machine (minutes)")
    parser.add_argument("--rounds", type=int, default=3, help="of each real run (3)")
    parser.add_argument(
        "--paced", action="store_true", help="with --check: engines that only take their time, for a busy machine"
    )
    parser.add_argument("--largest", type=int, default=1024, help="most machines (1024)")
    parser.add_argument("--speed", type=float, default=1.0, help="steps so many times as fast as measured (1)")
    given = parser.parse_args()

    def say(line: str) -> None:
        print(line, file=sys.stderr if given.json else sys.stdout, flush=True)

    if given.calibrate:
        from benchmarks.simulate_calibrate import calibrate  # torch

        result = calibrate(given.costs, say)
        print(json.dumps(result) if given.json else f"wrote {result['file']}; fit {result['fit']}")
        return
    costs = load(given.costs)
    if given.check:
        from benchmarks.simulate_check import check, check_paced

        result = {"machine": costs.machine, **(check_paced if given.paced else check)(costs, given.rounds, say)}
        worst = result["bars"]["worst_error"]
        print(json.dumps(result) if given.json else f"largest error {worst['value']:.0%}")
        sys.exit(0 if worst["passed"] else 1)
    costs = scaled(costs, given.speed)
    found: dict[str, list[Row]] = {}
    for title, rows in tables(costs, given.largest).items():
        found[title] = rows()
        if not given.json:
            print(shown(title, found[title]), flush=True)
    said = findings(found)
    if given.json:
        shown_ = {title: dict(rows) for title, rows in found.items()}
        print(json.dumps({"machine": costs.machine, "tables": shown_, "findings": said}))
        return
    print("\n".join(["", *said]))


if __name__ == "__main__":
    main()
