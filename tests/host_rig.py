"""Processes that share blocks through a folder and die in it; run as `python -m tests.host_rig MODE FOLDER SEED`.

One process that has nothing but the cache loaded forks the others, so that a life costs milliseconds. It prints what
came of it as JSON. Exit codes of the forked: WRONG bytes were read, or the BOUND was broken, or another exception (1).
"""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from shared.cache import frames, host_folder, host_room, naming
from shared.cache.frames import BlockMeta
from shared.cache.host import HostBlocks, Usage
from shared.messages import Identity

IDENTITY = Identity(fingerprint="f" * 64, codec="none", block_size=4, block_bytes=50_000)
METAS = frames.metas(naming.root(IDENTITY, "t"), range(4 * 48), 4, "worker-1")
BOUND = 16 * (56 << 10)
WORKERS = 4
WRONG, BROKEN_BOUND = 3, 4
CALLS = (
    "close", "fstat", "fstatvfs", "ftruncate", "mkdir", "open", "pread", "pwrite", "readv", "rename", "rmdir",
    "scandir", "stat", "unlink", "utime", "writev",
)  # fmt: skip


def payload(meta: BlockMeta) -> memoryview:
    return memoryview((meta.name * (IDENTITY.block_bytes // 32 + 1))[: IDENTITY.block_bytes])


def fork(life: Callable[[], None]) -> int:
    """Start a process that lives `life` and does nothing else."""
    if pid := os.fork():
        return pid
    code = 1
    try:
        life()
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        os._exit(code)


def opened(folder: Path) -> HostBlocks:
    host = HostBlocks(folder, IDENTITY, BOUND)
    if not host.open():
        raise RuntimeError(host.trouble)
    return host


def read(host: HostBlocks, meta: BlockMeta) -> bool:
    dest = bytearray(IDENTITY.block_bytes)
    found = host.get([(meta, memoryview(dest))]) != [None]
    if found and dest != payload(meta):
        raise SystemExit(WRONG)
    return found


def check_bound(host: HostBlocks) -> None:
    if host.usage().bytes > BOUND:
        raise SystemExit(BROKEN_BOUND)


# Many at once, killed at random


def use(folder: Path, seed: int, report: int) -> None:
    """A worker's life until SIGTERM."""
    rng = random.Random(seed)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    host = opened(folder)
    while not ended:
        meta = METAS[int(rng.triangular(0, len(METAS), 0))]
        act = rng.random()
        if act < 0.5:
            read(host, meta)
        elif act < 0.95:
            host.put(meta, payload(meta))
        elif act < 0.97:
            host.drop([meta.name])
        elif act < 0.99:
            check_bound(host)
        else:
            host.close()
            if not host.open():
                raise RuntimeError(host.trouble)
    os.write(report, (json.dumps(dict(host.counters)) + "\n").encode())
    host.close()


def stress(folder: Path, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    reader, report = os.pipe()
    seeds = iter(range(seed * 1000, seed * 1000 + 1000))

    def start() -> int:
        own = next(seeds)
        return fork(lambda: use(folder, own, report))

    living = [start() for _ in range(WORKERS)]
    codes: Counter[int] = Counter()
    end = time.monotonic() + 1.5
    while time.monotonic() < end:
        time.sleep(rng.uniform(0.0, 0.06))
        place = rng.randrange(WORKERS)
        os.kill(living[place], signal.SIGKILL)
        codes[os.waitstatus_to_exitcode(os.waitpid(living[place], 0)[1])] += 1
        living[place] = start()
    time.sleep(0.2)
    for pid in living:
        os.kill(pid, signal.SIGTERM)
    for pid in living:
        codes[os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])] += 1
    os.close(report)
    with os.fdopen(reader) as lines:
        counters = sum((Counter(json.loads(line)) for line in lines), Counter[str]())
    return {"codes": codes, "counters": counters, "left": folder.exists()}


# One, killed or frozen at each of its calls of the system in turn


def stop_at(number: int, sent: int) -> None:
    """Send this process `sent` before its call `number` of the system, counted from here."""
    left = [number]

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def counting(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                os.kill(os.getpid(), sent)
            return call(*args, **options)

        return counting

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    fcntl.flock = counted(fcntl.flock)


def life(folder: Path, number: int, sent: int) -> None:
    """Everything once: joining, a hit, a damaged block, a put that evicts, leaving."""
    stop_at(number, sent)
    host = HostBlocks(folder, IDENTITY, BOUND)
    if host.open():
        for meta in METAS[:3]:
            read(host, meta)
            host.put(meta, payload(meta))
    host.close()


def each_call(folder: Path, sent: int, survivor: bool) -> dict[str, Any]:
    """With a survivor that goes on beside the dead or frozen one, or with a successor that finds what it left."""
    host_room.WAIT_S = host_folder.JOIN_WAIT_S = 0.005
    number, problems = 0, []
    while True:
        number += 1
        host = HostBlocks(folder, IDENTITY, BOUND)
        if survivor:
            host.open()
            for meta in METAS[1:17]:
                host.put(meta, payload(meta))
            os.truncate(folder / METAS[1].name.hex(), 10)
        pid = fork(partial(life, folder, number, sent))
        status = os.waitpid(pid, os.WUNTRACED)[1]
        frozen = os.WIFSTOPPED(status)
        if not survivor:
            host.open()
            if host.usage() != Usage() and not frozen:
                problems.append(f"{number}: leftovers stay")
        went_on = [host.put(meta, payload(meta)) and read(host, meta) for meta in METAS[20:23]]
        check_bound(host)
        if frozen:
            os.kill(pid, signal.SIGCONT)
            status = os.waitpid(pid, 0)[1]
        elif not all(went_on):
            problems.append(f"{number}: puts fail beside the dead")
        if any(went_on) and not host.available:
            problems.append(f"{number}: puts without taking part")
        if os.waitstatus_to_exitcode(status) not in (0, -signal.SIGKILL):
            problems.append(f"{number}: exit code {os.waitstatus_to_exitcode(status)}")
        host.close()
        opened(folder).close()  # who was killed last of all leaves that to the next one
        if folder.exists():
            problems.append(f"{number}: the folder stays")
        if os.waitstatus_to_exitcode(status) == 0 and not frozen:
            return {"calls": number - 1, "problems": problems}


# Coming and going


def come_and_go(folder: Path, turns: int) -> None:
    meta = METAS[os.getpid() % len(METAS)]
    for _ in range(turns):
        host = opened(folder)
        if not host.put(meta, payload(meta)) or not (folder / meta.name.hex()).exists() or not read(host, meta):
            raise SystemExit(WRONG)
        host.close()


def churn(folder: Path) -> dict[str, Any]:
    pids = [fork(lambda: come_and_go(folder, 150)) for _ in range(WORKERS)]
    codes = Counter(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids)
    return {"codes": codes, "left": folder.exists()}


def main(mode: str, folder: Path, seed: int) -> dict[str, Any]:
    if mode == "stress":
        return stress(folder, seed)
    if mode == "churn":
        return churn(folder)
    what, who = mode.split("-")
    return each_call(folder, signal.SIGKILL if what == "killed" else signal.SIGSTOP, who == "survivor")


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
