"""The bus on NATS: core messages and JetStream over one connection."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from shared.bus.base import (
    ConsumerSpec,
    Handler,
    Incoming,
    IndexHandler,
    Job,
    Stored,
    StreamSpec,
    StreamState,
    Subscription,
)
from shared.bus.block_link import BlockLink
from shared.bus.bulk_stream import StreamLink
from shared.bus.login import NOBODY, Login
from shared.bus.nats_api import Api
from shared.bus.nats_connection import Connection
from shared.bus.nats_follow import Follower
from shared.bus.nats_queue import Queues
from shared.bus.nats_stream import Streams
from shared.bus.wire import DEFAULT_MAX_PENDING


class NatsBus:
    """`await NatsBus.connect(url, name=...)`. Implements `shared.bus.base.Bus`; needs an asyncio event loop."""

    def __init__(self, connection: Connection, url: str, name: str, login: Login, max_pending: int) -> None:
        self._connection = connection
        self._url = url
        self._login = login
        self._name = name
        self._max_pending = max_pending
        self._api = Api(connection)
        self._streams = Streams(connection, self._api, max_pending)
        self._queues = Queues(connection, self._api)

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        name: str,
        login: Login = NOBODY,
        wait: float | None = None,
        max_pending: int = DEFAULT_MAX_PENDING,
    ) -> NatsBus:
        """Connect to `url` (several servers: separated by commas), waiting up to `wait` seconds for a server.

        `wait` None waits for ever and logs every few seconds that it does. `max_pending` must not be more than the
        server's. Raises BusDisconnected when no server came in time, ConfigError when it refuses our credentials.
        """
        connection = Connection(url, name, login)
        await connection.open(wait)
        return cls(connection, url, name, login, max_pending)

    @property
    def connected(self) -> bool:
        return self._connection.connected

    @property
    def authenticated(self) -> bool | None:
        """Two things, found out for the server of each connection anew: its first words ask for credentials, and it
        has refused a connection of ours without any, tried beside this one (a server whose accounts have no users but
        the system's asks for credentials, and does without). That takes a moment, and is tried when somebody asks.

        Not looked at: other servers of a cluster, other ways in (leaf nodes, WebSocket, MQTT), and a configuration
        that is reloaded while the connection stands.
        """
        return self._connection.authenticated

    @property
    def max_payload(self) -> int:
        return self._connection.max_payload

    @property
    def counters(self) -> Mapping[str, int]:
        return self._connection.counters

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._connection.on_reconnect(callback)

    def link(self) -> BlockLink:
        return StreamLink(self._url, f"{self._name}/bulk", login=self._login, max_pending=self._max_pending)

    async def close(self) -> None:
        """Send what is left, then end. Takes a few seconds at most; handlers that still run are cancelled."""
        await self._connection.close()

    async def publish(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, reply: str = ""
    ) -> None:
        await self._connection.publish(subject, data, headers, reply)

    async def request(
        self, subject: str, data: bytes, timeout: float, headers: Mapping[str, str] | None = None
    ) -> Incoming:
        return await self._connection.request(subject, data, timeout, headers)

    async def subscribe(self, subject: str, handler: Handler, queue: str = "") -> Subscription:
        return await self._connection.subscribe(subject, handler, queue)

    async def ensure_stream(self, spec: StreamSpec) -> None:
        await self._api.ensure_stream(spec)

    async def ensure_consumer(self, spec: ConsumerSpec) -> None:
        await self._api.ensure_consumer(spec)

    async def stream_state(self, stream: str) -> StreamState:
        return (await self._api.stream(stream)).state

    async def waiting(self, stream: str, consumer: str) -> int:
        return await self._api.waiting(stream, consumer)

    async def subject_counts(self, stream: str, subject: str) -> dict[str, int]:
        return await self._api.subject_counts(stream, subject)

    async def purge(self, stream: str, subject: str) -> int:
        return await self._api.purge(stream, subject)

    async def stream_of(self, subject: str) -> str | None:
        return await self._api.stream_of(subject)

    async def append(
        self,
        subject: str,
        data: bytes | Sequence[bytes | memoryview],
        *,
        headers: Mapping[str, str] | None = None,
        expect_last: int | None = None,
        message_id: str | None = None,
        timeout: float = 5.0,
    ) -> int:
        return await self._streams.append(subject, data, headers, expect_last, message_id, timeout)

    async def pull(self, stream: str, consumer: str, batch: int, timeout: float) -> list[Job]:
        return await self._queues.pull(stream, consumer, batch, timeout)

    def adopt(self, stream: str, handle: str, subject: str, data: bytes, headers: Mapping[str, str]) -> Job:
        return self._queues.adopt(stream, handle, subject, data, headers)

    async def get_many(self, stream: str, subjects: Sequence[str], timeout: float = 5.0) -> dict[str, Stored]:
        return await self._streams.get_many(stream, subjects, timeout)

    async def read(
        self, stream: str, subject: str, after: int = 0, timeout: float = 5.0, limit: int | None = None
    ) -> list[Stored]:
        return await self._streams.read(stream, subject, after, timeout, limit)

    async def follow(self, stream: str, subject: str, handler: IndexHandler) -> Subscription:
        follower = Follower(self._connection, self._api, stream, subject, handler)
        await follower.start()
        return follower
