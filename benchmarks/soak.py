"""What a fleet keeps after a load: memory, blocks, requests, consumers, subscriptions, connections, handles, threads.

`python -m benchmarks.soak [--minutes 10] [--model MODEL] [--json]`. Real processes (1 prefill, 2 decode, 1 drafter) on
a real nats-server. A warm-up fills all that is meant to fill up; then three rounds of the same mixed load, each
followed by a time without any. The warm-up's prompts are asked twice, the second time with the host's blocks gone, so
that all ways of fetching them have their connections. Readings are taken after the warm-up and after each round.

The model is a tiny random one unless `--model` names another: the same processes, with small weights, so that a leak is
a larger share of what they have, and many more requests go through them in the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable
from typing import Any

from benchmarks.bars import tabled
from benchmarks.soak_fleet import NAME, Soaked, Watch, soaked
from benchmarks.soak_load import Clients
from benchmarks.soak_readings import Done, judge

ROUNDS = 3
IDLE = 0.25
"""Of the time of a round, for which there is no load; never less than REST_S."""
REST_S = 12.0
"""The server keeps consumers of followers that have gone for 9 s, and pools of threads shrink after 10 s."""
EQUAL = 0.9
"""Of what the warm-up did in its time: so many requests has each round."""


async def soak(target: Soaked, minutes: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Warm-up and rounds within about `minutes`."""
    share = minutes * 60 / (ROUNDS + 1)
    rest = max(REST_S, IDLE * share)
    async with Watch(target) as watch, Clients(target.server.url, NAME) as clients:
        warm_up = await clients.timed("warm-up", max(share - rest, 5.0) / 2)
        count = int(2 * sum(warm_up.ended.values()) * EQUAL)
        watch.forget_host_blocks()
        await clients.counted("warm-up", count // 2)
        readings = [await watch.quiet(rest)]
        rounds: list[Done] = []
        for number in range(1, ROUNDS + 1):
            watch.most_in_use = 0
            done = await clients.counted(f"round {number}", count)
            done.blocks_in_use = watch.most_in_use
            rounds.append(done)
            readings.append(await watch.quiet(rest))
            say(f"round {number}: {sum(done.ended.values())} requests, {len(done.failed)} failed, {done.seconds:.0f} s")
    return judge(readings, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for warm-up and rounds together")
    parser.add_argument("--model", help="a folder or a name, as TRINE_MODEL; a tiny random model unless given")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with soaked(arguments.model) as target:
        result = asyncio.run(soak(target, arguments.minutes, lambda line: print(line, file=sys.stderr, flush=True)))
    print(json.dumps(result) if arguments.json else "\n".join(tabled(result)))
    if not all(bar["passed"] for bar in result["bars"].values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
