"""A fleet on one machine: nats-server if wanted, workers and gateways, started, watched, restarted and stopped."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from services.decode.config import DecodeSettings
from services.drafter.config import DrafterSettings
from services.prefill.config import PrefillSettings
from shared.bus import login as logins
from shared.bus.embedded import EmbeddedNats
from shared.bus.login import NOBODY, Login
from shared.config import DEFAULT_NATS_URL, Settings
from shared.errors import ConfigError, TrineError, Unavailable
from shared.streams import MEMORY_STREAMS
from shared.subjects import ROLES
from trine.gateways import Address, addresses, await_gateways
from trine.process import Child, LogSink, worker_env
from trine.readiness import Counts, Progress, await_ready
from trine.restart import RestartPolicy
from trine.settings import checked

_SETTINGS: dict[str, type[Settings]] = {
    "prefill": PrefillSettings,
    "decode": DecodeSettings,
    "drafter": DrafterSettings,
}
GATEWAY = "gateway"
POLL_S = 0.05
START_S = 20.0
CONNECT_S = 10.0
STOP_S = 10.0
GRACE_S = 1.0
"""Workers that are still there so long after their draining time are killed."""
TAIL_LINES = 40


@dataclass
class _Place:
    """A worker's place in the fleet, or a gateway's, filled by one child process after another."""

    name: str
    role: str
    address: Address | None = None
    """Of a gateway."""
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    child: Child | None = None
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=TAIL_LINES))
    due: float = 0.0  # when to start it next, in monotonic seconds
    held: bool = False  # not to be started again
    starts: int = 0


class Fleet:
    """Workers of one model on this machine. A context manager, or `start` and `stop`; all blocking, no event loop.

        with Fleet({"prefill": 1, "decode": 2, "drafter": 1}) as fleet:
            fleet.wait_ready(120)
            ... Client(fleet.url, fleet.model) ...

    `counts` are of workers, by role, and of `gateway`s, whose addresses are in `gateways`.
    `nats` is a URL, or "embedded" for a server of the fleet's own on NATS' usual port ("embedded:PORT" for another
    one, 0 being any free one), with its store in a temporary folder. `env` overrides settings of all workers by their
    environment names (`TRINE_BLOCK_SIZE` …), `role_env` those of one role. Workers are named `decode-1` …; one that
    dies is started again (`RestartPolicy`), one that keeps refusing its configuration ends the fleet, and `failure`
    says why. `log` gets (name, line) of what they write, from reader threads. Raises ConfigError for bad settings.
    """

    def __init__(
        self,
        counts: Counts,
        *,
        nats: str = "embedded:0",
        env: Mapping[str, str] | None = None,
        role_env: Mapping[str, Mapping[str, str]] | None = None,
        log: LogSink = lambda name, line: None,
    ) -> None:
        if unknown := set(counts) - {*ROLES, GATEWAY}:
            raise ConfigError(f"no such role: {', '.join(sorted(unknown))}; roles are {', '.join((*ROLES, GATEWAY))}")
        self.counts = {role: counts.get(role, 0) for role in ROLES}
        """Of workers."""
        self.failure: str | None = None
        self.tokenizer: Path | None = None
        """The model's folder, for gateways, where it is known before the start."""
        self._nats_url = nats
        self._env = dict(env or {})
        self._role_env = role_env or {}
        self._log = log
        for role, n in self.counts.items():
            if n:
                checked(_SETTINGS[role], {**self._env, **self._role_env.get(role, {})})
        self.settings = checked(Settings, self._env)
        self.nats = _embedded(nats, self.settings.cache_bytes)
        self.login = NOBODY if self.nats else Login.of(self.settings)
        """Of who wants to talk to the fleet. A server of its own lets everybody of this machine in."""
        names = {f"{role}-{i}": role for role in ROLES for i in range(1, self.counts[role] + 1)}
        self._places = {name: _Place(name, role) for name, role in names.items()}
        listens = addresses(counts.get(GATEWAY, 0), {**self._env, **self._role_env.get(GATEWAY, {})})
        self.gateways = [address.url for address in listens]
        for i, address in enumerate(listens, 1):
            self._places[f"{GATEWAY}-{i}"] = _Place(f"{GATEWAY}-{i}", GATEWAY, address)
        self._lock = threading.RLock()
        self._started, self._stopping, self._at_once = threading.Event(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="supervisor", daemon=True)

    @property
    def url(self) -> str:
        return self.nats.url if self.nats else self._nats_url

    @property
    def model(self) -> str:
        """The name clients ask for."""
        return self.settings.served_name

    @property
    def _drain_s(self) -> float:
        return float(worker_env("", "", "", self._env)["TRINE_DRAIN_S"])

    def start(self) -> None:
        """Start the server and all workers; `wait_ready` waits until they work. Raises TrineError."""
        self._thread.start()
        if not self._started.wait(START_S) and self.failure is None:
            self.failure = f"the fleet did not start within {START_S:g} s"
        if self.failure is not None:
            self.stop()
            raise Unavailable(self.failure)

    def stop(self) -> None:
        """Stop the workers (SIGTERM, then by force), then the server: within 5 s. A Ctrl-C meanwhile: by force."""
        self._stopping.set()
        deadline = time.monotonic() + STOP_S + self._drain_s
        while self._thread.is_alive() and time.monotonic() < deadline:
            try:
                self._thread.join(POLL_S)
            except KeyboardInterrupt:
                self._at_once.set()

    def __enter__(self) -> Fleet:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.stop()

    def wait_ready(self, timeout: float, progress: Progress = lambda _: None) -> None:
        """Wait for beats of all workers, then for gateways. Raises Unavailable, with last lines of what is missing."""
        from shared.bus.nats import NatsBus

        deadline = time.monotonic() + timeout

        async def wait() -> None:
            bus = await NatsBus.connect(self.url, name="trine-supervisor", login=self.login, wait=CONNECT_S)
            try:
                await await_ready(bus, self.model, self.counts, timeout, progress=progress, failed=lambda: self.failure)
            finally:
                await bus.close()

        try:
            asyncio.run(wait())
            # Without a decode worker, there is nothing that a gateway could be ready for.
            await_gateways(
                self.gateways if self.counts["decode"] else [],
                max(0.0, deadline - time.monotonic()),
                lambda: self.failure,
            )
        except Unavailable as error:
            raise Unavailable("\n".join([error.message, *self._last_words()])) from None

    def wait(self) -> None:
        """Stay until the fleet fails; raises Unavailable then."""
        while self.failure is None:
            time.sleep(POLL_S)
        raise Unavailable(self.failure)

    def pids(self) -> dict[str, int]:
        """Process ids of the workers and gateways that run, by name."""
        with self._lock:
            places = self._places.values()
            return {p.name: p.child.pid for p in places if p.child is not None and p.child.exit_code is None}

    def restarts(self) -> dict[str, int]:
        """How often each worker was started again."""
        with self._lock:
            return {place.name: max(0, place.starts - 1) for place in self._places.values()}

    def tail(self, name: str) -> list[str]:
        """The last lines that a worker wrote."""
        return list(self._places[name].tail)

    def kill(self, name: str, sign: signal.Signals = signal.SIGKILL) -> int:
        """Send a signal to a worker; returns its process id. Raises Unavailable when it does not run."""
        with self._lock:
            child = self._places[name].child
            if child is None or child.exit_code is not None:
                raise Unavailable(f"{name} does not run")
            child.send(sign)
            return child.pid

    def hold(self, name: str) -> None:
        """Do not start this worker again when it ends."""
        self._places[name].held = True

    def release(self, name: str) -> None:
        """Start a held worker again, now if it has ended."""
        self._places[name].held = False
        self._places[name].due = 0.0

    def _last_words(self) -> list[str]:
        """The last line of each process that was started more than once."""
        return [f"{p.name}: {p.tail[-1]}" for p in self._places.values() if p.starts > 1 and p.tail]

    # The rest runs in the supervising thread, which starts every child: the kernel ends children with their starter.

    def _supervise(self) -> None:
        try:
            if self.nats:
                self.nats.start()
            self._look()
        except (TrineError, OSError) as error:
            self.failure = str(error)
        self._started.set()
        while self.failure is None and not self._stopping.wait(POLL_S):
            try:
                self._look()
            except (TrineError, OSError) as error:
                self.failure = str(error)
        self._end_all()

    def _look(self) -> None:
        if self.nats and not self.nats.running:
            self._log("supervisor", "nats-server ended; starting it again")
            self.nats.start()
        with self._lock:
            for place in self._places.values():
                if place.child is not None and (code := place.child.exit_code) is not None:
                    self._bury(place, place.child, code)
                if self.failure is not None:
                    return
                if place.child is None and not place.held and time.monotonic() >= place.due:
                    self._fill(place)

    def _bury(self, place: _Place, child: Child, code: int) -> None:
        child.join_log()
        place.child = None
        delay = place.policy.died(child.lived, code)
        if delay is None:
            self.failure = "\n".join([f"{place.name} refuses its configuration; it said last:", *list(place.tail)[-5:]])
            return
        place.due = time.monotonic() + delay
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        then = "it is held" if place.held else f"starting it again in {delay:.1f} s"
        self._log("supervisor", f"{place.name} {how} after {child.lived:.1f} s; {then}")

    def _fill(self, place: _Place) -> None:
        own = {f"TRINE_{name.upper()}": "" for name in logins.SETTINGS} if self.nats else {}
        overrides = {**self._env, **self._role_env.get(place.role, {}), **own, **self._for_gateway(place.address)}
        env = worker_env(place.name, self.url, place.role, overrides)
        place.child = Child(place.name, f"services.{place.role}", env, place.tail, self._log)
        place.starts += 1

    def _for_gateway(self, address: Address | None) -> dict[str, str]:
        if address is None:
            return {}
        folder = os.environ.get("TRINE_TOKENIZER") or self.tokenizer
        return {**address.env, "TRINE_TOKENIZER": str(folder or "")}

    def _end_all(self) -> None:
        children = [place.child for place in self._places.values() if place.child is not None]
        self._signal(children, signal.SIGTERM, self._drain_s + GRACE_S)
        self._signal(children, signal.SIGKILL, GRACE_S)
        if self.nats:
            self.nats.stop()

    def _signal(self, children: list[Child], sign: signal.Signals, patience: float) -> None:
        """Send `sign` to those that run and wait for them to end, unless a second Ctrl-C says not to."""
        for child in children:
            child.send(sign)
        deadline = time.monotonic() + patience
        while any(child.exit_code is None for child in children) and time.monotonic() < deadline:
            if sign is not signal.SIGKILL and self._at_once.is_set():
                return
            time.sleep(POLL_S / 5)


def _embedded(nats: str, cache_bytes: int) -> EmbeddedNats | None:
    """The server that `nats` asks for, None for a URL. Raises ConfigError."""
    kind, _, port = nats.partition(":")
    if kind != "embedded":
        return None
    if port and not (port.isdigit() and int(port) < 1 << 16):
        raise ConfigError(f"nats: {port!r} is no port; write embedded, embedded:PORT or nats://HOST:PORT")
    number = int(port) if port else int(DEFAULT_NATS_URL.rsplit(":", 1)[1])
    return EmbeddedNats(number, max_memory_store=cache_bytes + MEMORY_STREAMS)
