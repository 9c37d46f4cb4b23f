"""Core subscriptions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from nats.aio.msg import Msg

from shared.bus.base import Handler, Incoming
from shared.bus.handling import run_handler
from shared.bus.nats_client import user_headers


class Subscriber:
    """A core subscription: its handler runs for one message at a time, in order.

    `failed` is told of its errors; `drop` ends the subscription on the connection.
    """

    def __init__(
        self,
        subject: str,
        queue: str,
        handler: Handler,
        failed: Callable[[BaseException], None],
        drop: Callable[[Subscriber], Awaitable[None]],
    ) -> None:
        self.subject = subject
        self.queue = queue
        self._handler = handler
        self._failed = failed
        self._drop = drop
        self.refused = False
        self._running = False
        self._closed = False

    async def deliver(self, message: Msg) -> None:
        if self._closed:
            return
        self._running = True
        incoming = Incoming(message.subject, message.data, message.reply, user_headers(message))
        try:
            # nats-py would end the subscription for a handler that awaited something cancelled.
            await run_handler(self._handler, incoming, self._failed)
        finally:
            self._running = False
        if self._closed:
            await self._drop(self)

    def refuse(self) -> None:
        """The server does not let us subscribe."""
        self.refused = True

    async def unsubscribe(self) -> None:
        """No call of the handler starts after this; one that runs may finish."""
        self._closed = True
        if not self._running:
            await self._drop(self)
