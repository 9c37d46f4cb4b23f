"""Wiring that every worker's `__main__` shares: logs, weights, connections, signals, exit codes."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import anyio
import structlog
from pydantic import ValidationError

from shared import telemetry, tracing
from shared.actor import Actor, Role
from shared.bus.base import Bus
from shared.bus.login import Login
from shared.bus.nats import NatsBus
from shared.config import Settings, worker_name
from shared.cores import Cores
from shared.engine.base import StepEngine
from shared.engine.threads import openmp
from shared.errors import ConfigError, ModelError
from shared.heap import keep_what_is_loaded

if TYPE_CHECKING:
    from shared.engine.draft_head import DraftHead
    from shared.engine.engine import Engine
    from shared.engine.quality import Quality

TRACES_S = 2.0
"""How long the last traces may take to be sent."""
EXIT_CONFIG = 2  # a restart cannot help; the supervisor gives up on it

Connect = Callable[[str], Awaitable[Bus]]
S = TypeVar("S", bound=Settings)
T = TypeVar("T")
Make = Callable[[S, str, Connect], Awaitable[Actor]]


def main(role: Role, kind: type[S], make: Make[S]) -> NoReturn:
    """Run one worker until SIGTERM, configured by the environment.

    `make(settings, worker's name, connect)` builds it; `connect(purpose)` opens a bus connection. Exits with 0 after
    draining, 2 for a configuration that cannot work, 1 for anything else.
    """
    try:
        settings = kind()
    except ValidationError as error:
        telemetry.configure(role=role)
        for wrong in error.errors(include_url=False, include_input=False):
            variable = "TRINE_" + ".".join(str(p) for p in wrong["loc"]).upper()
            structlog.get_logger().error("cannot start", setting=variable, reason=wrong["msg"])
        sys.exit(EXIT_CONFIG)
    worker = worker_name(settings, role)
    telemetry.configure(settings.log_level, settings.log_format, role=role, worker=worker)
    os.environ.update(openmp(settings.threads, os.environ))  # torch is not imported yet
    try:
        anyio.run(_live, role, settings, worker, make, backend_options={"use_uvloop": sys.platform != "win32"})
    except* (ConfigError, ModelError) as group:
        for leaf in _leaves(group):
            structlog.get_logger().error("cannot start", reason=str(leaf))
        sys.exit(EXIT_CONFIG)
    # Everything is said and done; taking torch apart object by object would only delay the exit by seconds.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _live(role: Role, settings: S, worker: str, make: Make[S]) -> None:
    login = Login.of(settings)
    connections: list[Bus] = []

    async def connect(purpose: str) -> Bus:
        bus = await NatsBus.connect(settings.nats_url, name=f"{worker}/{purpose}", login=login)
        connections.append(bus)
        return bus

    actors: list[Actor] = []
    tracing.configure(settings, role, worker)
    try:
        async with anyio.create_task_group() as group:
            group.start_soon(_stop_on_signals, actors, group.cancel_scope)
            actors.append(await make(settings, worker, connect))
            keep_what_is_loaded()
            await actors[0].run()
            group.cancel_scope.cancel()
    finally:
        with anyio.CancelScope(shield=True), anyio.move_on_after(5):
            for bus in connections:
                await bus.close()
            await anyio.to_thread.run_sync(tracing.tracer().close, TRACES_S)


async def _stop_on_signals(actors: list[Actor], scope: anyio.CancelScope) -> None:
    """The first SIGTERM or SIGINT begins draining, the second ends at once. Who does not serve yet ends at any."""
    with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for received in signals:
            if not actors or not actors[0].ready.is_set() or actors[0].draining.is_set():
                structlog.get_logger().warning("stopping at once", signal=received.name)
                scope.cancel()
                return
            actors[0].draining.set()


def _leaves(group: BaseExceptionGroup[Exception]) -> list[BaseException]:
    return [
        leaf
        for error in group.exceptions
        for leaf in (_leaves(error) if isinstance(error, BaseExceptionGroup) else [error])
    ]


def model_folder(model: str) -> Path:
    """The local folder of a model, converted if need be. Blocking."""
    from shared.engine.weights import resolve

    return resolve(model)


async def in_passing_thread(function: Callable[..., T], *args: object) -> T:
    """What `function`, a blocking one, returns, in a thread that ends with it. What loads a model goes here.

    OpenMP keeps a team for each thread that has called torch, as long as it lives, and once there are more threads than
    cores none of them turns while it waits: see `shared.engine.threads`.
    """

    def run() -> T:
        with ThreadPoolExecutor(1, thread_name_prefix="passing") as pool:
            return pool.submit(function, *args).result()

    return await anyio.to_thread.run_sync(run)


def load_engine(
    settings: Settings, folder: Path, *, slots: int, lookahead: int = 0, generates: bool = True
) -> StepEngine:
    """The paged engine that the settings ask for, for at most `slots` sequences at once. Blocking.

    A sequence may go back up to `lookahead` tokens that it guessed. `generates`: see `Engine.load`. Raises ConfigError
    for a KV codec that ruins the model, unless told only to warn.
    """
    if (cores := Cores.of(settings)) is not None:
        cores.yields = not generates
    engine = _load(
        settings,
        folder,
        cores=cores,
        kv_codec=settings.kv_codec,
        slots=slots,
        lookahead=lookahead,
        generates=generates,
    )
    if settings.kv_codec != "none" and settings.kv_check != "off":
        from shared.engine.calibration import calibrated

        started = time.monotonic()
        quality = calibrated(engine, folder)
        vet(settings, quality, time.monotonic() - started)
    return engine


def vet(settings: Settings, quality: Quality, seconds: float) -> None:
    """Say what the KV codec costs. Raises ConfigError, with the figures, when it ruins the model."""
    from shared.engine.calibration import Verdict, judge

    verdict = judge(quality)
    if verdict is Verdict.RUINED and settings.kv_check == "refuse":
        raise ConfigError(
            f"KV codec {settings.kv_codec} ruins this model: perplexity {quality.perplexity:.4g} instead of "
            f"{quality.baseline_perplexity:.4g}, {quality.top1_agreement:.0%} of the most likely tokens unchanged; "
            "`trine check` shows what others cost, --kv-codec none costs nothing, TRINE_KV_CHECK=warn serves it anyway",
            field="kv_codec",
        )
    log = structlog.get_logger()
    (log.info if verdict is Verdict.OK else log.warning)(
        "KV codec measured",
        verdict=verdict.value,
        codec=settings.kv_codec,
        perplexity_ratio=round(quality.ratio, 4),
        top1_agreement=round(quality.top1_agreement, 4),
        mean_kl=round(quality.mean_kl, 5),
        seconds=round(seconds, 2),
    )


def load_draft_engine(settings: Settings, folder: Path, layers: int | None) -> StepEngine:
    """As `load_engine`, of the first `layers` layers if given. A drafter's KV is its own: stored as it is."""
    return _load(settings, folder, layers=layers)


def load_draft_head(settings: Settings, folder: Path, target: Path) -> DraftHead:
    """The draft head in `folder`, for the model in the folder `target`. Blocking. Raises ConfigError, ModelError."""
    from shared.engine.draft_head import DraftHead

    return DraftHead.load(folder, target, threads=settings.threads)


def _load(settings: Settings, folder: Path, cores: Cores | None = None, **more: Any) -> Engine:
    from shared.engine.engine import Engine

    return Engine.load(
        folder,
        block_size=settings.block_size,
        kv_blocks=settings.kv_blocks,
        kv_memory_mb=settings.kv_memory_mb,
        weights=settings.weights,
        threads=settings.threads,
        cores=cores,
        **more,
    )
