"""Reply addresses. Unlike the requests of nats-py they end the moment the connection is lost, may have many answers,
and do not lose a job: one that comes when nobody waits any more is handed to `stray`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from nats.aio.msg import Msg

from shared.errors import BusDisconnected


class Mailbox:
    """The answers to one request, in the order they came. A context manager: `with inbox.open() as box`."""

    def __init__(self, inbox: Inbox, token: str) -> None:
        self.subject = f"{inbox.prefix}.{token}"
        self._inbox = inbox
        self._token = token
        self._messages: deque[Msg] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._lost = False

    async def next(self, deadline: float) -> Msg | None:
        """The next answer, None if the loop's clock reaches `deadline` first. Raises BusDisconnected."""
        while not self._messages:
            if self._lost:
                raise BusDisconnected("the connection to NATS was lost while waiting for an answer")
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

    def lose(self) -> None:
        """The connection is gone and no further answer will come."""
        self._lost = True
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
        self._open: dict[str, Mailbox] = {}
        self._count = 0

    def open(self) -> Mailbox:
        self._count += 1
        token = str(self._count)
        box = self._open[token] = Mailbox(self, token)
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
        for box in self._open.values():
            box.lose()
