"""One connection to NATS over nats-py, with what nats-py leaves to its users.

It waits for a server that is not there yet, comes back after every loss, also after those that nats-py takes for the
end, buffers nothing while disconnected, refuses what the server would cut the connection for, ends waiting requests
when the connection goes, and reports errors as counters and few log lines.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from functools import partial
from typing import Any

import structlog
from nats import errors
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription as RawSubscription

from shared.bus.base import Handler, Incoming
from shared.bus.nats_client import FLUSH_TIMEOUT, NatsClient, dial, status_of, user_headers, without_credentials
from shared.bus.nats_inbox import Inbox, Mailbox
from shared.bus.nats_subscriber import Subscriber
from shared.bus.wire import header_bytes
from shared.errors import BusDisconnected, BusError, ConfigError, TooLarge

log = structlog.get_logger(__name__)

SLACK = 4096
"""Bytes of a message kept for the headers that we add ourselves and for NATS's framing."""
CLOSE_TIMEOUT = 2.0
LOG_EVERY = 5.0
NO_RESPONDERS = 503
MAX_PENDING_MESSAGES = 65_536
MAX_PENDING_BYTES = 128 << 20


class NoAnswer(BusDisconnected):
    """The connection stands, but an answer did not come in time."""


class Connection:
    """See the module. `name` shows in the server's list of connections; `url` may list several servers."""

    def __init__(self, url: str, name: str) -> None:
        self.counters = {"reconnects": 0, "handler_errors": 0, "slow_consumer": 0, "errors": 0}
        self._servers = url.split(",")
        self._name = name
        self._client = NatsClient()
        self._raw: dict[Subscriber | Inbox, RawSubscription] = {}
        self._callbacks: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._logged_at = float("-inf")
        self._closing = False
        self._revival: asyncio.Task[None] | None = None
        self._inbox = Inbox(self._new_prefix(), lambda _: None)

    # Life

    async def open(self, wait: float | None) -> None:
        """Connect, waiting up to `wait` seconds (None: for ever) for a server.

        Raises BusDisconnected when none came, ConfigError when it refuses our credentials.
        """
        self._client = await dial(self._servers, self._name, wait, self)
        await self._attach(self._inbox)

    @property
    def connected(self) -> bool:
        return self._client.is_connected and not self._closing

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
        for inbox in self._inboxes():
            inbox.lose_all()
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

    def handler_failed(self, where: str, error: BaseException) -> None:
        self.counters["handler_errors"] += 1
        log.error("bus handler failed", subject=where, exc_info=error)

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

        Raises BusDisconnected when the connection goes or the loop's clock reaches `deadline` before.
        """
        with self._inbox.open() as box:
            await self.send(subject, data, headers, box.subject)
            answer = await box.next(deadline)
        if answer is None:
            raise NoAnswer(f"no answer on {subject} in time")
        return answer

    async def request(self, subject: str, data: bytes, timeout: float) -> Incoming:
        """Raises TooLarge, BusDisconnected (at once when nobody listens on `subject`)."""
        self.check_size(data, None)
        deadline = asyncio.get_running_loop().time() + timeout
        answer = await self.call(subject, data, deadline)
        if status_of(answer) == NO_RESPONDERS:
            raise BusDisconnected(f"nobody answers on {subject}")
        return Incoming(answer.subject, answer.data, answer.reply, user_headers(answer))

    async def flush(self, timeout: float) -> None:
        """Wait until the server has handled all that was sent before. Raises BusDisconnected."""
        with self._inbox.open() as box:
            await self.send(box.subject, b"")
            if await box.next(asyncio.get_running_loop().time() + timeout) is None:
                raise NoAnswer("NATS does not answer")

    def mailbox(self) -> Mailbox:
        """For a request with many answers."""
        return self._inbox.open()

    async def subscribe(self, subject: str, handler: Handler, queue: str) -> Subscriber:
        self._require()
        subscriber = Subscriber(subject, queue, handler, partial(self.handler_failed, subject), self.drop)
        await self._attach(subscriber)
        try:
            await self.flush(FLUSH_TIMEOUT)  # from here on the server delivers to it, whoever publishes
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
        raw = self._raw.get(inbox)
        if raw is not None and self.connected:
            await self._client.mute(raw)  # before anything that is sent later, so that no job is sent here after it
        self.spawn(self._drop_when_quiet(inbox))

    async def _drop_when_quiet(self, inbox: Inbox) -> None:
        try:
            await self.flush(FLUSH_TIMEOUT)
        except BusDisconnected:
            log.debug("an inbox is given up with its connection", name=self._name)
        await self.drop(inbox)

    async def drop(self, receiver: Subscriber | Inbox) -> None:
        raw = self._raw.pop(receiver, None)
        if raw is None:
            return
        try:
            await raw.unsubscribe()
        except errors.Error:
            log.debug("unsubscribed from a connection that is gone", name=self._name)

    # What nats-py tells us

    async def _attach(self, receiver: Subscriber | Inbox) -> None:
        try:
            if isinstance(receiver, Inbox):
                # Mailboxes hold what they asked for; a limit here could only lose answers.
                self._raw[receiver] = await self._client.subscribe(
                    f"{receiver.prefix}.*", cb=receiver.deliver, pending_bytes_limit=0
                )
            else:
                self._raw[receiver] = await self._client.subscribe(
                    receiver.subject,
                    receiver.queue,
                    cb=receiver.deliver,
                    pending_msgs_limit=MAX_PENDING_MESSAGES,
                    pending_bytes_limit=MAX_PENDING_BYTES,
                )
        except errors.Error as error:
            raise self._translate(error) from None

    async def _revive(self) -> None:
        """nats-py counts some errors of the server as final. They are not: start over with a new client."""
        while not self._client.is_connected:
            try:
                self._client = await dial(self._servers, self._name, None, self)
                for receiver in list(self._raw):
                    await self._attach(receiver)
                self.on_return()
            except (BusError, ConfigError) as error:
                log.error("NATS connection cannot be made anew", error=str(error), name=self._name)
                await asyncio.sleep(LOG_EVERY)

    def on_lost(self, client: NatsClient) -> None:
        if client is not self._client:
            return
        if not self._closing:
            log.warning("NATS connection lost", name=self._name)
        for inbox in self._inboxes():
            inbox.lose_all()

    def on_return(self) -> None:
        self.counters["reconnects"] += 1
        log.info("NATS connection restored", name=self._name)
        for callback in self._callbacks:
            self.spawn(self._call_back(callback))

    def on_end(self, client: NatsClient) -> None:
        idle = self._revival is None or self._revival.done()
        if client is self._client and idle and not self._closing:
            self._revival = self.spawn(self._revive())

    def on_error(self, error: Exception) -> None:
        self.counters["slow_consumer" if isinstance(error, errors.SlowConsumerError) else "errors"] += 1
        now = asyncio.get_running_loop().time()
        if now - self._logged_at >= LOG_EVERY:
            self._logged_at = now
            text = str(error) or type(error).__name__
            log.warning("NATS error", server=without_credentials(self._servers), error=text, name=self._name)

    async def _call_back(self, callback: Callable[[], Awaitable[None]]) -> None:
        try:
            await callback()
        except Exception as error:
            self.handler_failed("reconnect", error)

    # Helpers

    def _inboxes(self) -> list[Inbox]:
        return [self._inbox, *(r for r in self._raw if isinstance(r, Inbox) and r is not self._inbox)]

    def _new_prefix(self) -> str:
        return f"_INBOX.{secrets.token_hex(11)}"

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
