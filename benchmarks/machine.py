"""What a benchmark ran on, and what processes there used."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def described() -> dict[str, Any]:
    """The machine, as of now: a busy one shows in the load average."""
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "load_average_before": os.getloadavg()[0],
    }


def line(machine: dict[str, Any]) -> str:
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gb']:g} GB, {machine['system']}, "
        f"Python {machine['python']}, load average {machine['load_average_before']:.1f} before the run"
    )


def cpu_seconds(pid: int) -> float:
    """What a running process has used, its threads with it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def family(pids: Iterable[int]) -> list[int]:
    """These processes, as far as they run, and all that they have started."""
    found: list[int] = []
    waiting = list(pids)
    while waiting:
        pid = waiting.pop()
        try:
            tasks = list(Path(f"/proc/{pid}/task").iterdir())
            waiting += [int(child) for task in tasks for child in (task / "children").read_text().split()]
        except OSError:
            continue
        found.append(pid)
    return found


def pss_mb(pid: int) -> float:
    """Its memory, shared pages by share; 0 when it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def free_port() -> int:
    """Nobody else takes it soon, as ports are given out in turn."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
