"""Pulling jobs from a work queue.

A pull is one raw request, `no_wait` with `expires`: the server gives what is there at once, else waits for a first
message. It is never cut short by cancelling nats-py's `fetch`, which leaves a request behind that swallows a job.
Here a pull that is cancelled retires its inbox: the server forgets the request, and a job on its way goes back at once
(its `delivered` count has then gone up by one).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from nats.aio.msg import Msg

from shared.bus.ack import Ack, parse_ack, parse_handle
from shared.bus.base import Job
from shared.bus.nats_api import Api
from shared.bus.nats_client import status_of, user_headers
from shared.bus.nats_connection import NO_RESPONDERS, Connection, NoAnswer
from shared.bus.nats_inbox import Inbox, Mailbox
from shared.bus.server_clock import ServerClock
from shared.errors import BusDisconnected, BusError, StreamMissing

SILENCE = 0.25
"""A consumer with `max_ack_pending` messages out does not answer a `no_wait` request; so long is waited for it."""
GRACE = 0.1
"""How long to wait for the next message of a batch that has begun, for the same reason."""
LATE = 2.0
"""How long after `expires` the server's answer may come."""

NOTHING_THERE = 404
EXPIRED = 408
CONFLICT = 409


class NatsJob:
    """A delivery that is acked on `handle`, which `ack` spells out."""

    def __init__(
        self,
        connection: Connection,
        clock: ServerClock,
        ack: Ack,
        handle: str,
        subject: str,
        data: bytes,
        headers: Mapping[str, str],
    ) -> None:
        self.handle = handle
        self.subject = subject
        self.data = data
        self.headers = headers
        self.seq = ack.seq
        self.delivered = ack.delivered
        self.stamp = ack.stamp
        self.age = clock.age(ack.stamp / 1e9, asyncio.get_running_loop().time(), time.time())
        self._connection = connection

    async def ack(self) -> None:
        await self._connection.send(self.handle, b"+ACK")

    async def nak(self, delay: float = 0.0) -> None:
        order = json.dumps({"delay": round(delay * 1e9)}) if delay > 0 else ""
        await self._connection.send(self.handle, f"-NAK {order}".rstrip().encode())

    async def term(self) -> None:
        await self._connection.send(self.handle, b"+TERM")

    async def hold(self) -> None:
        await self._connection.send(self.handle, b"+WPI")


class Queues:
    def __init__(self, connection: Connection, api: Api) -> None:
        self._connection = connection
        self._api = api
        self._idle: list[Inbox] = []

    async def pull(self, stream: str, consumer: str, batch: int, timeout: float) -> list[Job]:
        # One inbox for each pull in progress: a delivery keeps the subject that the job was published on, so the
        # inbox is all that tells whose it is.
        inbox = self._idle.pop() if self._idle else await self._connection.open_inbox()
        messages: list[Msg] = []
        answered = False
        try:
            subject = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}"
            with inbox.open(subject) as box:
                answered = await self._collect(box, stream, consumer, batch, timeout, messages)
            return [self._job(message) for message in messages]
        except BaseException:
            for message in messages:
                inbox.stray(message)
            raise
        finally:
            if answered or not self._connection.connected:
                self._idle.append(inbox)  # no request of ours is left on the server
            else:
                await self._connection.retire(inbox)

    def adopt(self, stream: str, handle: str, subject: str, data: bytes, headers: Mapping[str, str]) -> Job:
        """Raises InvalidField."""
        ack = parse_handle(stream, handle)
        return NatsJob(self._connection, self._api.clock, ack, handle, subject, data, headers)

    def _job(self, message: Msg) -> Job:
        ack = parse_ack(message.reply)
        headers, handle = user_headers(message), message.reply
        return NatsJob(self._connection, self._api.clock, ack, handle, message.subject, message.data, headers)

    async def _collect(
        self, box: Mailbox, stream: str, consumer: str, batch: int, timeout: float, messages: list[Msg]
    ) -> bool:
        """Fill `messages`. True if the server is done with the request, False if it may still send."""
        ask: dict[str, Any] = {"batch": batch, "no_wait": True}
        if timeout > 0:
            ask["expires"] = round(timeout * 1e9)
        await self._connection.send(box.asks, json.dumps(ask).encode(), None, box.subject)
        now = asyncio.get_running_loop().time
        deadline = now() + (timeout + LATE if timeout > 0 else SILENCE)
        while len(messages) < batch:
            message = await box.next(deadline)
            if message is None:
                if timeout > 0 and not messages:
                    raise NoAnswer(f"consumer {consumer} of {stream} does not answer")
                return False
            status = status_of(message)
            if status is None:
                messages.append(message)
                deadline = now() + GRACE
            elif status in (NOTHING_THERE, EXPIRED):
                return True
            elif messages:
                return True  # hand out what came; the next pull meets the trouble again
            else:
                raise await self._trouble(stream, consumer, status, message)
        return True

    async def _trouble(self, stream: str, consumer: str, status: int, message: Msg) -> BusError:
        text = (message.headers or {}).get("Description", "").strip()
        if status == NO_RESPONDERS:
            await self._api.consumer(stream, consumer)
            return BusDisconnected(f"consumer {consumer} of {stream} does not answer")
        if status == CONFLICT and "deleted" in text.lower():
            return StreamMissing(f"consumer {consumer} of {stream}: {text}")
        if status == CONFLICT and ("shutdown" in text.lower() or "leadership" in text.lower()):
            return BusDisconnected(f"consumer {consumer} of {stream}: {text}")
        return BusError(f"consumer {consumer} of {stream}: {status} {text}")
