"""What the HTTP front has behind it: the bus, the fleet that is heard there, who may ask, and how much."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, cast

import structlog

from services.gateway import sse
from services.gateway.config import GatewaySettings
from services.gateway.fleet import Fleet
from services.gateway.keys import Caller, KeyTable
from services.gateway.limits import Admission
from services.gateway.metrics import Metrics
from services.gateway.overview import overview
from services.gateway.problems import Problem
from services.gateway.recent import Answer, Recent
from services.gateway.reply import Reply
from services.gateway.requests import Call
from services.gateway.shapes import Shape
from services.gateway.sse import Position
from services.gateway.token_texts import TokenTexts
from services.gateway.traces import traced
from shared.bus.base import Bus, Incoming
from shared.bus.login import NOBODY, Login
from shared.bus.nats import NatsBus
from shared.config import worker_name
from shared.errors import BusError, ConfigError, InvalidField
from shared.micro import Micro, Report
from shared.subjects import ALL_BEATS
from shared.tracing import UNTRACED, Span
from trine.client import Client
from trine.completion import Completion
from trine.stream import Stream

RETRY_S = 0.5
log = structlog.get_logger()


class Gateway:
    """One per process. `bus`: use this connection, which then stays open, instead of one that the settings describe.

    Raises ConfigError for settings that cannot work.
    """

    def __init__(self, settings: GatewaySettings, bus: Bus | None = None) -> None:
        self.settings = settings
        self.keys = KeyTable.parse(_entries(settings))
        self.fleet = Fleet(settings.peer_timeout_s)
        self._recent = Recent()
        self.name = worker_name(settings, "gateway")
        self.metrics = Metrics(self.fleet, self.name, lambda: self._bus.counters if self._bus else {})
        self.admission = Admission(settings.key_concurrency, settings.key_rate, settings.key_burst)
        self.metrics.inflight.set_function(lambda: self.admission.running)
        self.draining = False
        self.failure: ConfigError | None = None
        """Why the gateway can never work; `on_failure` is called then."""
        self.on_failure: Callable[[], None] = lambda: None
        self._texts = _texts(settings)
        self._login = NOBODY if bus else Login.of(settings)
        self._given = bus
        self._bus = bus
        self._clients: dict[str, Client] = {}
        self._over = False
        self._clock = time.time() - time.monotonic()
        self._connecting: asyncio.Task[None] | None = None

    # Life

    async def start(self) -> None:
        """Returns at once: NATS is connected to when it is there, and until then every request is refused."""
        if len(self.keys):
            log.info("API keys are asked for", keys=len(self.keys))
        else:
            log.warning("no API keys are set: everybody who reaches this port may ask, as tenant 'default'")
        self._connecting = asyncio.create_task(self._connect())

    async def close(self) -> None:
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        for client in self._clients.values():
            await client.close()
        if self._bus is not None and self._given is None:
            await self._bus.close()

    def drain(self) -> None:
        """From now on nothing new is begun."""
        self.draining = True

    def end(self) -> None:
        """What is still running ends with an error."""
        self._over = True

    async def _connect(self) -> None:
        try:
            if self._bus is None:
                self._bus = await NatsBus.connect(self.settings.nats_url, name=self.name, login=self._login)
            await Micro(self._bus, "gateway", self.name, self._report).start()
            while True:  # also while it is not permitted: permissions can be reloaded
                with contextlib.suppress(BusError):
                    await self._bus.subscribe(ALL_BEATS, self._on_beat)
                    break
                await asyncio.sleep(RETRY_S)
        except ConfigError as error:
            log.error("cannot start", reason=error.message)
            self.failure = error
            self.on_failure()
        else:
            log.info("connected to NATS")

    async def _on_beat(self, message: Incoming) -> None:
        self.fleet.hear(message, time.monotonic())

    # State

    def _report(self) -> Report:
        requests, errors = self.metrics.outcomes()
        told = {"worker": self.name, "state": self.trouble() or "serving", "models": ", ".join(self.models())}
        return Report("http", "/v1", requests, errors, 0, told, {"inflight": self.admission.running})

    def trouble(self) -> str | None:
        """Why a request would be refused now; None when it would not."""
        if self.draining:
            return "the gateway is shutting down"
        if self._bus is None or not self._bus.connected:
            return "NATS is not reachable"
        if not self.fleet.served(time.monotonic()):
            return "no decode worker is heard"
        return None

    def models(self) -> dict[str, float]:
        """Those that requests are taken for, and the Unix time since when."""
        if self._bus is None or not self._bus.connected:
            return {}
        return {model: self._clock + since for model, since in self.fleet.served(time.monotonic()).items()}

    def overview(self, caller: Caller) -> dict[str, Any]:
        """The fleet as it is heard, and the caller's own last answers."""
        roster, now = self.fleet.roster, time.monotonic()
        return overview(roster, self._recent, caller.tenant, self.trouble(), now, now + self._clock)

    # Requests

    async def answer(self, call: Call, caller: Caller, headers: Mapping[str, str]) -> Reply:
        """`headers` of the HTTP request. Raises a Problem, or what `Client.stream` raises, for what is not sent."""
        self._require(call.model)
        base = f"{call.kind.value}-{uuid.uuid4().hex}"
        client = await self._client(caller.tenant)
        ids = sse.request_ids(base, len(call.choices))
        more: dict[str, Any] = {"model": call.model, "deadline_ms": int(self.settings.request_s * 1e3)}
        with traced(call, base, headers) as span:
            more |= span.headers
            streams = [
                client.stream(**choice.fields, id=request_id, **more)
                for choice, request_id in zip(call.choices, ids, strict=True)
            ]
            return self._reply(call, base, streams, [Position() for _ in streams], caller, span)

    async def resume(self, call: Call, caller: Caller, base: str, positions: list[Position]) -> Reply:
        """The rest of the answer `base`, from where the client has it. Raises a Problem, or InvalidField."""
        self._require(call.model)
        if len(positions) > self.settings.max_choices:
            raise InvalidField("Last-Event-ID: it is of more answers than one request may have", field="last_event_id")
        client = await self._client(caller.tenant)
        streams: list[Stream] = [
            client.resume(
                request_id,
                0 if call.tools else position.tokens,
                from_text=0 if call.tools else position.characters,  # calls are found in all of the text
                model=call.model,
                timeout=self.settings.request_s,
            )
            for request_id, position in zip(sse.request_ids(base, len(positions)), positions, strict=True)
        ]
        return self._reply(call, base, streams, positions, caller)

    def _reply(
        self,
        call: Call,
        base: str,
        streams: list[Stream],
        positions: list[Position],
        caller: Caller,
        span: Span = UNTRACED,
    ) -> Reply:
        texts = self._texts if call.model == self.settings.served_name else TokenTexts()
        return Reply(
            call,
            Shape(call.kind, base, int(time.time()), call.model, texts, call.include_usage, call.tools),
            streams,
            positions,
            metrics=self.metrics,
            keepalive_s=self.settings.keepalive_s,
            check=self._checks(call.model),
            ended=self.admission.enter(caller.key, len(streams), time.monotonic()),
            completed=partial(self._completed, caller.tenant),
            span=span,
        )

    def _completed(self, tenant: str, completion: Completion) -> None:
        self._recent.add(tenant, Answer.of(completion, time.time()))

    def _require(self, model: str) -> None:
        if self.draining:
            raise Problem(503, "the gateway is shutting down", "shutting_down", retry_after=1)
        if self._bus is None or not self._bus.connected:
            raise Problem(503, "NATS is not reachable", "bus_disconnected", retry_after=1)
        self.fleet.require(model, time.monotonic())

    def _checks(self, model: str) -> Callable[[bool], None]:
        """Raises a Problem when an answer of this model cannot be expected any more."""
        alone_since: float | None = None

        def check(idle: bool) -> None:
            nonlocal alone_since
            if self._over:
                raise Problem(503, "the gateway is shutting down; ask again", "shutting_down", retry_after=1)
            if not idle:
                return
            now = time.monotonic()
            if self.fleet.answering(model, now):
                alone_since = None
                return
            alone_since = alone_since or now
            if now - alone_since >= self.settings.worker_wait_s:
                told = f"no decode worker for model {model!r:.140} was heard for {now - alone_since:.0f} s"
                raise Problem(503, told, "no_workers", retry_after=2)

        return check

    async def _client(self, tenant: str) -> Client:
        if tenant not in self._clients:
            client = Client(model=self.settings.served_name, tenant=tenant, login=NOBODY, bus=cast("Bus", self._bus))
            self._clients[tenant] = client
            await client.__aenter__()
        return self._clients[tenant]


def _entries(settings: GatewaySettings) -> str:
    texts = [settings.api_keys.get_secret_value()]
    if settings.api_keys_file:
        try:
            texts.append(Path(settings.api_keys_file).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            told = f"TRINE_API_KEYS_FILE: cannot read {settings.api_keys_file}: {reason}"
            raise ConfigError(told, field="api_keys_file") from None
        if not KeyTable.parse(texts[1]):
            raise ConfigError("TRINE_API_KEYS_FILE: there is no key in it", field="api_keys_file")
    return "\n".join(texts)


def _texts(settings: GatewaySettings) -> TokenTexts:
    if settings.tokenizer:
        return TokenTexts.load(Path(settings.tokenizer))
    folder = Path(settings.model)
    return TokenTexts.load(folder) if (folder / "tokenizer.json").is_file() else TokenTexts()
