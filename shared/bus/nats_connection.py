"""One connection to NATS over nats-py, with what nats-py leaves to its users.

It waits for a server that is not there yet, comes back after every loss, also after those that nats-py takes for the
end, buffers nothing while disconnected, refuses what the server would cut the connection for, ends waiting requests
when the connection goes or the server denies them, and reports errors as counters and few log lines.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import structlog
from nats import errors
from nats.aio.msg import Msg

from shared.bus.base import Handler, Incoming
from shared.bus.login import NOBODY, Login
from shared.bus.nats_anonymous import Access
from shared.bus.nats_client import FLUSH_TIMEOUT, NatsClient, denial_in, dial, status_of, user_headers
from shared.bus.nats_inbox import Inbox, Mailbox
from shared.bus.nats_receivers import Receiver, Receivers
from shared.bus.nats_subscriber import Subscriber
from shared.bus.nats_trouble import Trouble
from shared.bus.wire import header_bytes, new_inbox, user_of
from shared.errors import BusDisconnected, BusError, ConfigError, PermissionDenied, TooLarge

log = structlog.get_logger(__name__)

SLACK = 4096
"""Bytes of a message kept for the headers that we add ourselves and for NATS's framing."""
CLOSE_TIMEOUT = 2.0
REVIVE_EVERY = 5.0
NO_RESPONDERS = 503


class NoAnswer(BusDisconnected):
    """The connection stands, but an answer did not come in time."""


class Connection:
    """See the module. `name` shows in the server's list of connections; `url` may list several servers."""

    def __init__(self, url: str, name: str, login: Login = NOBODY) -> None:
        self._servers = url.split(",")
        self._name = name
        self._login = login.at(url)
        self._trouble = Trouble(self._servers, name)
        self.counters = self._trouble.counters
        self.handler_failed = self._trouble.handler_failed
        self._client = NatsClient()
        self._receivers = Receivers()
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._revival: asyncio.Task[None] | None = None
        self._access = Access(name, self.spawn, login.tls)
        self._inbox = Inbox(self._new_prefix(), lambda _: None)

    # Life

    async def open(self, wait: float | None) -> None:
        """Connect, waiting up to `wait` seconds (None: for ever) for a server.

        Raises BusDisconnected when none came, ConfigError when it refuses our credentials.
        """
        self._client = await dial(self._servers, self._name, self._login, wait, self)
        await self._attach(self._inbox)

    @property
    def connected(self) -> bool:
        return self._client.is_connected and not self._closing

    @property
    def authenticated(self) -> bool | None:
        return self._client.asks_for_credentials and self._access.refuses(self._client.connected_url)

    @property
    def max_payload(self) -> int:
        return self._client.max_payload - SLACK

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> None:
        self._callbacks.append(callback)

    async def close(self) -> None:
        if self._closing:
            return
        if self.connected:
            try:
                await self.flush(CLOSE_TIMEOUT)
            except BusError:
                log.info("NATS did not take the last messages before closing", name=self._name)
        self._closing = True
        self._receivers.lose_all()
        self._client.forget_pings()
        for task in self._tasks:
            if task is not asyncio.current_task():
                task.cancel()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT):
                await self._client.close()
        except (TimeoutError, OSError, errors.Error):
            log.info("the connection to NATS did not close in order", name=self._name)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work` beside everything else until it ends or the connection closes."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.handler_failed("background task", error)

    # Messages

    async def publish(
        self, subject: str, data: bytes, headers: Mapping[str, str] | None = None, reply: str = ""
    ) -> None:
        """Raises TooLarge, BusDisconnected."""
        self.check_size(data, headers)
        await self.send(subject, data, dict(headers) if headers else None, reply)

    def check_size(self, data: bytes, headers: Mapping[str, str] | None) -> None:
        """Raises TooLarge for what the server would cut the connection for."""
        size = len(data) + header_bytes(headers)
        if size > self.max_payload:
            raise TooLarge(f"{size} bytes with headers; the bus takes at most {self.max_payload}")

    async def send(self, subject: str, data: bytes, headers: dict[str, str] | None = None, reply: str = "") -> None:
        """`publish` for messages whose size was checked: `headers` may take `SLACK` bytes more."""
        self._require()
        try:
            await self._client.publish(subject, data, reply, headers)
        except errors.MaxPayloadError:
            raise TooLarge(f"{len(data)} bytes; the bus takes at most {self.max_payload}") from None
        except errors.Error as error:
            raise self._translate(error) from None
        self._require()

    async def call(self, subject: str, data: bytes, deadline: float, headers: dict[str, str] | None = None) -> Msg:
        """Send a request and return its first answer, which may be a status message.

        Raises BusDisconnected when the connection goes or the loop's clock reaches `deadline` before, PermissionDenied.
        """
        with self._inbox.open(subject) as box:
            await self.send(subject, data, headers, box.subject)
            answer = await box.next(deadline)
        if answer is None:
            raise NoAnswer(f"no answer on {subject} in time")
        return answer

    async def request(
        self, subject: str, data: bytes, timeout: float, headers: Mapping[str, str] | None = None
    ) -> Incoming:
        """Raises TooLarge, PermissionDenied, BusDisconnected (at once when nobody listens on `subject`)."""
        self.check_size(data, headers)
        deadline = asyncio.get_running_loop().time() + timeout
        answer = await self.call(subject, data, deadline, dict(headers) if headers else None)
        if status_of(answer) == NO_RESPONDERS:
            raise BusDisconnected(f"nobody answers on {subject}")
        return Incoming(answer.subject, answer.data, answer.reply, user_headers(answer))

    async def flush(self, timeout: float) -> None:
        """Wait until the server has handled all that was sent before, and has said what it denies of it.

        Raises BusDisconnected.
        """
        self._require()
        pong = await self._client.ping()
        await asyncio.wait({pong}, timeout=timeout)
        if not pong.done():
            raise NoAnswer("NATS does not answer")
        if pong.cancelled():
            raise BusDisconnected("the connection to NATS was lost")

    def mailbox(self, asks: str) -> Mailbox:
        """For a request to `asks` with many answers."""
        return self._inbox.open(asks)

    async def subscribe(self, subject: str, handler: Handler, queue: str) -> Subscriber:
        """Raises PermissionDenied, BusDisconnected."""
        self._require()
        subscriber = Subscriber(subject, queue, handler, partial(self.handler_failed, subject), self.drop)
        await self._attach(subscriber)
        try:
            await self.flush(FLUSH_TIMEOUT)  # from here on the server delivers to it, whoever publishes
            if subscriber.refused:
                raise PermissionDenied(f"NATS does not let us subscribe to {subject}")
        except BaseException:
            await self.drop(subscriber)
            raise
        return subscriber

    async def open_inbox(self) -> Inbox:
        """An inbox for the messages of a stream. A job that comes when nobody waits for it goes back at once."""
        inbox = Inbox(self._new_prefix(), self._hand_back)
        await self._attach(inbox)
        return inbox

    async def retire(self, inbox: Inbox) -> None:
        """Give up an inbox on which the server may still send: what is on its way goes back at once."""
        if self.connected:
            # Before anything that is sent later, so that no job is sent here after it.
            await self._receivers.mute(self._client, inbox)
        self.spawn(self._drop_when_quiet(inbox))

    async def _drop_when_quiet(self, inbox: Inbox) -> None:
        try:
            await self.flush(FLUSH_TIMEOUT)
        except BusDisconnected:
            log.debug("an inbox is given up with its connection", name=self._name)
        await self.drop(inbox)

    async def drop(self, receiver: Receiver) -> None:
        await self._receivers.drop(receiver)

    # What nats-py tells us

    async def _attach(self, receiver: Receiver) -> None:
        try:
            await self._receivers.attach(self._client, receiver)
        except errors.Error as error:
            raise self._translate(error) from None

    async def _revive(self) -> None:
        """nats-py counts some errors of the server as final. They are not: start over with a new client."""
        while not self._client.is_connected:
            try:
                self._client = await dial(self._servers, self._name, self._login, None, self)
                await self._receivers.attach_all(self._client)
                self.on_return()
            except (BusError, ConfigError, errors.Error) as error:
                log.error("NATS connection cannot be made anew", error=str(error), name=self._name)
                await asyncio.sleep(REVIVE_EVERY)

    def on_lost(self, client: NatsClient) -> None:
        if client is not self._client:
            return
        if not self._closing:
            log.warning("NATS connection lost", name=self._name)
        self._receivers.lose_all()

    def on_return(self) -> None:
        self.counters["reconnects"] += 1
        log.info("NATS connection restored", name=self._name)
        self._access.forget()
        for callback in self._callbacks:
            self.spawn(self._call_back(callback))

    def on_end(self, client: NatsClient) -> None:
        idle = self._revival is None or self._revival.done()
        if client is self._client and idle and not self._closing:
            self._revival = self.spawn(self._revive())

    def on_error(self, error: Exception) -> None:
        self._trouble.reported(error)
        if denial := denial_in(error):
            self._receivers.deny(denial)

    async def _call_back(self, callback: Callable[[], Awaitable[None]]) -> None:
        try:
            await callback()
        except Exception as error:
            self.handler_failed("reconnect", error)

    # Helpers

    def _new_prefix(self) -> str:
        return new_inbox(self._login.user or user_of(self._servers[0]), self._login.inbox)

    def _hand_back(self, message: Msg) -> None:
        if message.reply.startswith("$JS.ACK.") and self.connected:
            self.spawn(self._nak(message.reply))

    async def _nak(self, reply: str) -> None:
        try:
            await self.send(reply, b"-NAK")
        except BusDisconnected:
            log.debug("a job could not be handed back; it comes again after ack_wait", name=self._name)

    def _require(self) -> None:
        if not self.connected:
            raise BusDisconnected("the bus is closed" if self._closing else "not connected to NATS")

    def _translate(self, error: errors.Error) -> BusError:
        if isinstance(error, errors.BadSubjectError):
            return BusError("not a valid subject")
        return BusDisconnected(f"NATS: {error or type(error).__name__}")
