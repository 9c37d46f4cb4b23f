"""The client library: ask a model served on NATS, from asyncio. Needs neither torch nor a tokenizer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal, TypedDict, Unpack

from shared import telemetry
from shared.bus.base import Bus
from shared.bus.login import Login
from shared.config import Settings
from shared.errors import BusDisconnected, BusError, InvalidField
from shared.messages import ChatMessage, Guided, Tool
from shared.subjects import Subjects
from shared.tenants import DEFAULT_TENANT
from shared.tracing import HEADER, parent_of
from trine.beats import listen
from trine.completion import Completion
from trine.resume import Resumed, sought
from trine.stream import Stream
from trine.submit import DEFAULT_DEADLINE_S, prepare

CONNECT_S = 5.0
CANCEL_AGAIN_S = (0.0, 0.5, 1.0, 2.0, 2.0)
"""Pauses before each of the cancels of a request that was given up while NATS was away; a worker is back sooner."""

Priority = Literal["high", "normal", "low"]


class Params(TypedDict, total=False):
    """How to answer; all optional. See `shared.messages.Generate` and `Sampling` for meanings and bounds."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    logit_bias: dict[int, float]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    max_tokens: int
    min_tokens: int
    stop: str | list[str]
    logprobs: bool
    top_logprobs: int
    tools: Sequence[Tool | dict[str, Any]]
    guided: Guided | dict[str, Any]
    cache_salt: str
    deadline_ms: int


class ClientSettings(Settings):
    tenant: str = DEFAULT_TENANT
    """Whose requests these are. The NATS server's permissions must allow it."""


class Client:
    """A connection to NATS for one program; use it for as many requests at once as you like.

    `url`, `model` and `tenant` default to what `TRINE_NATS_URL`, `TRINE_MODEL_NAME` (or `TRINE_MODEL`) and
    `TRINE_TENANT` say, `login` to `TRINE_NATS_USER` and its like. Entering raises
    BusDisconnected when NATS does not answer. Leaving cancels what is still being answered.
    """

    def __init__(
        self,
        url: str | None = None,
        model: str | None = None,
        *,
        tenant: str | None = None,
        login: Login | None = None,
        bus: Bus | None = None,
    ) -> None:
        settings = ClientSettings()
        self._login = login or Login.of(settings)
        self.url = url or settings.nats_url
        self.model = model or settings.served_name
        self.tenant = tenant or settings.tenant
        self._given = bus
        self._bus: Bus | None = bus
        self._live: set[Stream] = set()

    async def __aenter__(self) -> Client:
        telemetry.to_stderr()
        if self._bus is None:
            from shared.bus.nats import NatsBus

            self._bus = await NatsBus.connect(self.url, name="trine-client", login=self._login, wait=CONNECT_S)
        self._bus.on_reconnect(self._recheck)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        for stream in list(self._live):
            await stream.close()
        if self._bus is not None and self._given is None:
            await self._bus.close()
        self._bus = None

    async def generate(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage | dict[str, Any]] | None = None,
        token_ids: Sequence[int] | None = None,
        model: str | None = None,
        priority: Priority = "normal",
        id: str | None = None,
        traceparent: str | None = None,
        **params: Unpack[Params],
    ) -> Completion:
        """The whole answer to a raw `prompt`, a chat (`messages`) or `token_ids`. Raises what `Stream` raises."""
        stream = self.stream(
            prompt,
            messages=messages,
            token_ids=token_ids,
            model=model,
            priority=priority,
            id=id,
            traceparent=traceparent,
            **params,
        )
        async with stream:
            async for _ in stream:
                pass
        return stream.completion

    def stream(
        self,
        prompt: str | None = None,
        *,
        messages: Sequence[ChatMessage | dict[str, Any]] | None = None,
        token_ids: Sequence[int] | None = None,
        model: str | None = None,
        priority: Priority = "normal",
        id: str | None = None,
        traceparent: str | None = None,
        **params: Unpack[Params],
    ) -> Stream:
        """The answer as it comes. Raises InvalidField or TooLarge at once for a request that cannot be sent.

        `traceparent` (W3C) is the trace that it belongs to; unless given, the program's own current one, if it has one.
        """
        bus = self._connected()
        if traceparent is not None and not parent_of({HEADER: traceparent}):
            raise InvalidField("traceparent: not one of version 00", field="traceparent")
        fields = {
            "prompt": prompt,
            "messages": None if messages is None else list(messages),
            "token_ids": None if token_ids is None else list(token_ids),
            **params,
        }
        ask = prepare(model or self.model, self.tenant, priority, id, fields, bus.max_payload)
        return Stream(bus, replace(ask, parent=traceparent or ""), self._live)

    def resume(
        self,
        request_id: str,
        from_index: int = 0,
        *,
        from_text: int | None = None,
        model: str | None = None,
        timeout: float = DEFAULT_DEADLINE_S,
    ) -> Stream:
        """The rest of an answer of which somebody has the first `from_index` tokens, running or ended.

        Tokens come gapless from `from_index` on; `completion` has all of the answer. Text is exact if `from_text` says
        how many characters are there already; else it begins with the event of token `from_index`, as a client has it
        that counts the tokens of whole deltas. Events are kept for 30 minutes. Leaving early cancels the request.

        Iterating raises what the request ended with; NotKept when nothing, or not enough, is known of it any more;
        DeadlineExceeded after `timeout` seconds. Raises InvalidField at once.
        """
        ask = sought(model or self.model, self.tenant, request_id, from_index, timeout)
        return Resumed(self._connected(), ask, self._live, from_index, from_text)

    async def cancel(self, id: str, model: str | None = None) -> None:
        """Stop a request of this tenant. Nothing happens when nobody has it."""
        await self._connected().publish(Subjects(model or self.model).cancel(id, self.tenant), b"")

    async def models(self, timeout: float = 1.5) -> list[str]:
        """Models whose workers are heard within `timeout` seconds."""
        return sorted({model for model, _ in await listen(self._connected(), timeout)})

    def _connected(self) -> Bus:
        if self._bus is None:
            raise BusDisconnected("the client is not open: use `async with Client() as client`")
        return self._bus

    async def _recheck(self) -> None:
        for stream in self._live:
            stream.recheck()
        await self._pay_cancels()

    async def _pay_cancels(self) -> None:
        """Cancel what was given up while NATS was away. Several times: workers come back within seconds of us."""
        owing = [stream for stream in self._live if stream.owes_cancel]
        if not owing:
            return
        for pause in CANCEL_AGAIN_S:
            await asyncio.sleep(pause)
            asked = {(stream.model, stream.id) for stream in self._live if not stream.owes_cancel}
            for stream in owing:
                if not stream.expired and (stream.model, stream.id) not in asked:
                    with contextlib.suppress(BusError):
                        await stream.cancel()
        self._live.difference_update(owing)
