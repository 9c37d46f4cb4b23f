"""One child process of the supervisor: a worker with its settings in the environment and its log in a pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path

LogSink = Callable[[str, str], None]
"""Called with (worker's name, line) from the child's reader thread."""

PACKAGES = Path(__file__).resolve().parents[1]
DRAIN_S = 3.0
"""How long workers may finish running work when the fleet stops, unless TRINE_DRAIN_S says otherwise."""

# Runs in the child before it becomes the worker: asks the kernel to kill it when its parent ends (1 is
# PR_SET_PDEATHSIG), and checks that the parent has not ended in between. Done here and not in a `preexec_fn`, which
# may deadlock in a process that has other threads.
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def python(*arguments: str) -> list[str]:
    """Command that runs our modules, whatever files the current folder holds, and that never outlives this process.

    On Linux the kernel ends the child with the *thread* that started it, so that thread has to stay.
    """
    command = [sys.executable, "-P", *arguments]
    if sys.platform == "linux":
        command = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid()), *command]
    return command


def environment(extra: Mapping[str, str]) -> dict[str, str]:
    """This process's environment plus `extra`, with our packages importable from anywhere."""
    path = os.pathsep.join(filter(None, [str(PACKAGES), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **extra}


def worker_env(name: str, url: str, role: str, overrides: Mapping[str, str]) -> dict[str, str]:
    """Environment of a worker on this machine. Those that run the model share its cores by who is at work
    (`shared.cores`); a drafter's model is so small that a second core does not help.

    What `overrides` says comes before what this process's environment says, and that before our defaults.
    """
    defaults = {"TRINE_THREADS": "1" if role == "drafter" else "0", "TRINE_DRAIN_S": f"{DRAIN_S:g}"}
    chosen = {**{key: os.environ.get(key, value) for key, value in defaults.items()}, **overrides}
    threads = {} if chosen["TRINE_THREADS"] == "0" else {"OMP_NUM_THREADS": chosen["TRINE_THREADS"]}
    return {**chosen, **threads, "TRINE_NATS_URL": url, "TRINE_WORKER": name}


class Child:
    """A started worker; the last lines it writes go to `tail`, all of them to `sink`."""

    def __init__(self, name: str, module: str, env: Mapping[str, str], tail: deque[str], sink: LogSink) -> None:
        self.name = name
        self._tail = tail
        self._started = time.monotonic()
        # A session of its own: a Ctrl-C in the terminal reaches the supervisor alone, which stops its workers in order.
        self._process = subprocess.Popen(
            python("-m", module),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment(env),
            start_new_session=True,
            text=True,
            errors="replace",
        )
        self._reader = threading.Thread(target=self._read, args=(sink,), name=f"log-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """None while it runs; negative for the signal that ended it."""
        return self._process.poll()

    @property
    def lived(self) -> float:
        """Seconds since it was started."""
        return time.monotonic() - self._started

    def send(self, sign: signal.Signals) -> None:
        """Send a signal; nothing happens to one that has ended."""
        self._process.send_signal(sign)

    def join_log(self) -> None:
        """Wait for the last lines of one that has ended."""
        self._reader.join(1.0)

    def _read(self, sink: LogSink) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as pipe:
            for line in pipe:
                self._tail.append(line.rstrip("\n"))
                sink(self.name, line.rstrip("\n"))
