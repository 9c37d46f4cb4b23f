"""Reply addresses. Unlike the requests of nats-py they end the moment the connection is lost or the server denies the
request, may have many answers, and do not lose a job: one that comes when nobody waits any more is handed to `stray`.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable

from nats.aio.msg import Msg

from shared.errors import BusDisconnected, BusError, PermissionDenied


class Mailbox:
    """The answers to one request, in the order they came. A context manager: `with inbox.open(asks) as box`.

    `asks` is the subject that the request goes to, `subject` where its answers come.
    """

    def __init__(self, inbox: Inbox, token: str, asks: str) -> None:
        self.asks = asks
        self.subject = f"{inbox.prefix}.{token}"
        self._inbox = inbox
        self._token = token
        self._messages: deque[Msg] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended: BusError | None = None

    async def next(self, deadline: float) -> Msg | None:
        """The next answer, None if the loop's clock reaches `deadline` first. Raises what `end` was told."""
        while not self._messages:
            if self._ended is not None:
                raise self._ended
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._waiter
            except TimeoutError:
                return None
            finally:
                self._waiter = None
        return self._messages.popleft()

    def put(self, message: Msg) -> None:
        self._messages.append(message)
        self._wake()

    def end(self, error: BusError) -> None:
        """No further answer will come."""
        self._ended = error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __enter__(self) -> Mailbox:
        return self

    def __exit__(self, *_: object) -> None:
        self._inbox.close(self._token)
        for message in self._messages:
            self._inbox.stray(message)


class Inbox:
    """One subscription on `prefix.*` and the mailboxes open on it.

    A message of a stream keeps its own subject, so it cannot name its mailbox: it goes to the oldest one. Pulls and
    followers therefore have an inbox each.
    """

    def __init__(self, prefix: str, stray: Callable[[Msg], None]) -> None:
        self.prefix = prefix
        self.stray = stray
        self.subject = f"{prefix}.*"
        self._open: dict[str, Mailbox] = {}
        self._refused = False

    def open(self, asks: str) -> Mailbox:
        # Not to be guessed: who hears a request, an event or a draft's ask, reads the inbox in it, and could have the
        # server or a worker answer a later one in it.
        token = secrets.token_hex(8)
        box = self._open[token] = Mailbox(self, token, asks)
        if self._refused:
            box.end(self._no_subscription())
        return box

    def close(self, token: str) -> None:
        self._open.pop(token, None)

    async def deliver(self, message: Msg) -> None:
        head, _, token = message.subject.rpartition(".")
        box = self._open.get(token) if head == self.prefix else next(iter(self._open.values()), None)
        if box is None:
            self.stray(message)
        else:
            box.put(message)

    def lose_all(self) -> None:
        """The connection is gone."""
        self._refused = False  # the next one subscribes again
        for box in self._open.values():
            box.end(BusDisconnected("the connection to NATS was lost while waiting for an answer"))

    def refuse(self) -> None:
        """The server does not let us subscribe here, so no answer will ever come."""
        self._refused = True
        for box in self._open.values():
            box.end(self._no_subscription())

    def deny(self, asks: str) -> None:
        """The server has not let through what was published to `asks`, here in lower case."""
        for box in self._open.values():
            if box.asks.lower() == asks:
                box.end(PermissionDenied(f"NATS does not let us publish to {box.asks}"))

    def _no_subscription(self) -> PermissionDenied:
        return PermissionDenied(f"NATS does not let us subscribe to {self.subject}, where answers come")
