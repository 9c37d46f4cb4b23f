"""Processes of servers that are measured: started, waited for, asked what they are, and ended with their children."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

READY_S = 900.0
STOP_S = 20.0


class Missing(Exception):
    """This server cannot run here; why."""


@contextmanager
def process(command: Sequence[str], env: Mapping[str, str]) -> Iterator[tuple[int, Path]]:
    """(id, its log) of a process that is ended, with all of its children, at the end."""
    with tempfile.NamedTemporaryFile(prefix="trine-peers-", suffix=".log") as log:
        process = subprocess.Popen(
            command, env=dict(env), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield process.pid, Path(log.name)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def answering(url: str, pid: int, said: Path) -> None:
    """Raises Missing when the process ends, or does not answer in time."""
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=5):
            return
        if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            raise Missing(f"it ended at start; it said last: {last_words(said)}")
        time.sleep(0.5)
    raise Missing(f"it did not answer within {READY_S:.0f} s")


def last_words(said: Path) -> str:
    lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-600:]


def asked(interpreter: str, code: str) -> str:
    """What `code` prints in that Python. Raises Missing."""
    said = subprocess.run([interpreter, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    if said.returncode:
        raise Missing(f"{interpreter}: {(said.stderr.strip().splitlines() or ['it failed'])[-1]}")
    return said.stdout.strip().splitlines()[-1]


def beside(command: str | None) -> str:
    """The Python beside an installed command."""
    return str(Path(command).resolve().parent / "python") if command else ""
