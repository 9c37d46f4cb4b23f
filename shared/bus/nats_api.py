"""JetStream's API: questions and orders about streams and consumers, answered in JSON."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from shared.bus.base import ConsumerSpec, StreamSpec, StreamState
from shared.bus.nats_client import status_of
from shared.bus.nats_connection import NO_RESPONDERS, Connection
from shared.bus.server_clock import ServerClock
from shared.bus.wire import check_filter
from shared.errors import BusDisconnected, BusError, ConfigError, PermissionDenied, StreamMissing

TIMEOUT = 5.0
SCAN_TIMEOUT = 30.0
"""For what makes the server look at every message of a stream."""

# JetStream's error numbers: https://github.com/nats-io/nats-server/blob/main/server/errors.json
CONSUMER_NOT_FOUND = 10014
STREAM_NOT_FOUND = 10059
NAME_IN_USE = frozenset({10013, 10058, 10148})
NO_ROOM = frozenset({10002, 10023, 10028, 10047})
NO_PEERS = 10005
"""A cluster has fewer servers with room just now than the stream shall have replicas; or it only starts."""
NOT_CLUSTERED = 10074


class ApiError(BusError):
    """JetStream refused. `status` is like HTTP's, `number` says exactly what."""

    def __init__(self, message: str, status: int, number: int) -> None:
        super().__init__(message)
        self.status = status
        self.number = number


def parse_answer(data: bytes) -> dict[str, Any]:
    """The JSON object in an answer. Raises StreamMissing or ApiError for the error in it, BusError for other bytes."""
    try:
        answer = json.loads(data)
    except (ValueError, RecursionError):
        answer = None
    if not isinstance(answer, dict):
        raise BusError(f"not an answer of JetStream: {data[:80]!r}")
    error = answer.get("error")
    if not isinstance(error, dict):
        return answer
    status, number = (n if type(n) is int else 0 for n in (error.get("code"), error.get("err_code")))
    text = str(error.get("description", "refused"))
    if number in (STREAM_NOT_FOUND, CONSUMER_NOT_FOUND):
        raise StreamMissing(text)
    raise ApiError(text, status, number)


@dataclass(frozen=True)
class StreamInfo:
    config: dict[str, Any]
    created: str
    state: StreamState


class Api:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self.clock = ServerClock()

    async def ask(
        self, subject: str, payload: dict[str, Any] | None = None, timeout: float = TIMEOUT
    ) -> dict[str, Any]:
        """Raises StreamMissing, ApiError, BusDisconnected (also when JetStream is not there)."""
        asked = asyncio.get_running_loop().time()
        data = json.dumps(payload).encode() if payload else b""
        answer = await self._connection.call(f"$JS.API.{subject}", data, asked + timeout)
        if status_of(answer) == NO_RESPONDERS:
            raise BusDisconnected("JetStream is not available on this NATS server")
        told = parse_answer(answer.data)
        self.clock.hear(told.get("ts"), asked, asyncio.get_running_loop().time())
        return told

    async def stream(self, name: str) -> StreamInfo:
        info = await self._of_stream("INFO", name)
        state = info["state"]
        return StreamInfo(
            info["config"],
            info["created"],
            StreamState(state["first_seq"], state["last_seq"], state["messages"], state["bytes"]),
        )

    async def subject_counts(self, stream: str, subject: str) -> dict[str, int]:
        check_filter(subject)
        counts: dict[str, int] = {}
        offset, total = 0, 1
        while offset < total:
            ask = {"subjects_filter": subject, "offset": offset}
            info = await self._of_stream("INFO", stream, ask, SCAN_TIMEOUT)
            page: dict[str, int] = info["state"].get("subjects") or {}
            if not page:
                break  # they went away meanwhile, or there are none
            counts |= page
            offset, total = offset + len(page), info.get("total", 0)
        return counts

    async def purge(self, stream: str, subject: str) -> int:
        check_filter(subject)
        answer = await self._of_stream("PURGE", stream, {"filter": subject}, SCAN_TIMEOUT)
        purged: int = answer.get("purged", 0)
        return purged

    async def _of_stream(
        self, verb: str, name: str, payload: dict[str, Any] | None = None, timeout: float = TIMEOUT
    ) -> dict[str, Any]:
        try:
            return await self.ask(f"STREAM.{verb}.{name}", payload, timeout)
        except StreamMissing:
            raise StreamMissing(f"stream {name} does not exist") from None

    async def consumer(self, stream: str, name: str) -> dict[str, Any]:
        """A consumer's configuration."""
        config: dict[str, Any] = (await self._of_consumer(stream, name))["config"]
        return config

    async def waiting(self, stream: str, name: str) -> int:
        count: int = (await self._of_consumer(stream, name)).get("num_pending", 0)
        return count

    async def _of_consumer(self, stream: str, name: str) -> dict[str, Any]:
        try:
            return await self.ask(f"CONSUMER.INFO.{stream}.{name}")
        except StreamMissing as error:
            raise StreamMissing(f"consumer {name} of {stream}: {error}") from None

    async def stream_of(self, subject: str) -> str | None:
        names = (await self.ask("STREAM.NAMES", {"subject": subject})).get("streams") or [None]
        name: str | None = names[0]
        return name

    async def ensure_stream(self, spec: StreamSpec) -> None:
        wanted = _stream_config(spec)
        what = f"stream {spec.name}"
        try:
            found = (await self.stream(spec.name)).config
        except StreamMissing:
            try:
                await self.ask(f"STREAM.CREATE.{spec.name}", wanted)
                return
            except PermissionDenied:
                # As shipped, decode workers may create streams, and nobody else.
                raise StreamMissing(f"{what} does not exist yet, and our NATS user may not create it") from None
            except ApiError as error:
                # Perhaps another worker was faster: then the name is in use, or there is no room for a second one.
                try:
                    found = (await self.stream(spec.name)).config
                except StreamMissing:
                    room = f" (max_bytes {spec.max_bytes}, {spec.storage}: see its max_{spec.storage}_store)"
                    raise _refusal(what, error, room) from None
        _compare(what, found, wanted)

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        wanted = _consumer_config(spec)
        what = f"consumer {spec.name} of stream {spec.stream}"
        try:
            found = await self.consumer(spec.stream, spec.name)
        except StreamMissing:
            order = {"stream_name": spec.stream, "config": wanted, "action": "create"}
            try:
                await self.ask(f"CONSUMER.CREATE.{spec.stream}.{spec.name}", order)
                return
            except StreamMissing:
                raise StreamMissing(f"stream {spec.stream} does not exist") from None
            except ApiError as error:
                if error.number not in NAME_IN_USE:
                    raise _refusal(what, error) from None
            found = await self.consumer(spec.stream, spec.name)
        _compare(what, _with_filters(found), wanted)


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _stream_config(spec: StreamSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "subjects": list(spec.subjects),
        "retention": spec.retention,
        "storage": spec.storage,
        "discard": spec.discard,
        "max_bytes": spec.max_bytes,
        "max_msgs": spec.max_msgs,
        "max_msgs_per_subject": spec.max_msgs_per_subject,
        "max_msg_size": spec.max_msg_size,
        "max_age": _nanoseconds(spec.max_age),
        "allow_direct": spec.allow_direct,
        "num_replicas": spec.replicas,
    }


def _consumer_config(spec: ConsumerSpec) -> dict[str, Any]:
    return {
        "name": spec.name,
        "durable_name": spec.name,
        "filter_subjects": list(spec.filter_subjects),
        "ack_policy": "explicit",
        "ack_wait": _nanoseconds(spec.ack_wait),
        "max_deliver": spec.max_deliver,
        "max_ack_pending": spec.max_ack_pending,
    }


def _with_filters(found: dict[str, Any]) -> dict[str, Any]:
    """A consumer's configuration with its filters as a list: the server may tell a single one in a field of its own."""
    filters = found.get("filter_subjects") or [found.get("filter_subject", "")]
    return {**found, "filter_subjects": filters}


def _refusal(what: str, error: ApiError, room: str = "") -> BusError | ConfigError:
    if error.number in NO_ROOM:
        return ConfigError(f"{what}: the NATS server has too little room for it{room}: {error}")
    if error.status == NO_RESPONDERS or error.number == NO_PEERS:
        return BusDisconnected(f"{what}: {error}")
    if error.number == NOT_CLUSTERED:
        return ConfigError(f"TRINE_NATS_REPLICAS: {what}: {error}", field="nats_replicas")
    return ConfigError(f"{what}: {error}")


def _compare(what: str, found: dict[str, Any], wanted: dict[str, Any]) -> None:
    def readable(field: str, value: Any) -> str:
        return f"{value / 1e9:g} s" if field in ("max_age", "ack_wait") and isinstance(value, int) else f"{value}"

    def same(a: Any, b: Any) -> bool:
        return sorted(a) == sorted(b) if isinstance(a, list) and isinstance(b, list) else bool(a == b)

    differences = [
        f"{field} is {readable(field, found.get(field))}, expected {readable(field, value)}"
        for field, value in wanted.items()
        if not same(found.get(field), value)
    ]
    if differences:
        raise ConfigError(f"{what} exists with another configuration: {'; '.join(differences)}")
