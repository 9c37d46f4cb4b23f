"""Following a stream: an ordered, headers-only consumer that makes itself anew whenever it cannot be trusted."""

from __future__ import annotations

import asyncio
import json
import secrets
from typing import Any

import structlog
from nats.aio.msg import Msg

from shared.bus.ack import parse_ack
from shared.bus.base import IndexHandler, Stored
from shared.bus.nats_api import Api
from shared.bus.nats_client import status_of, user_headers
from shared.bus.nats_connection import Connection
from shared.bus.nats_inbox import Inbox, Mailbox
from shared.bus.nats_queue import EXPIRED
from shared.errors import BusError, StreamMissing

log = structlog.get_logger(__name__)

BATCH = 500
EXPIRES = 30.0
HEARTBEAT = 2.0
LINGER = 30.0
"""The server forgets a consumer that nobody asked for so long."""
PAUSE = 0.02
RETRY = 0.5
HEARTBEAT_STATUS = 100


class Follower:
    """Gives every message of `stream` on `subject` to `handler`, in order, for as long as it is open.

    It keeps the last sequence it saw and goes on from there after a lost connection or a gap. A stream created anew
    (its creation time differs) is read from its beginning.
    """

    def __init__(self, connection: Connection, api: Api, stream: str, subject: str, handler: IndexHandler) -> None:
        self._connection = connection
        self._api = api
        self._stream = stream
        self._subject = subject
        self._handler = handler
        self._created = ""
        self._last = 0
        self._consumer = ""
        self._inbox: Inbox | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Raises StreamMissing, BusDisconnected."""
        await self._create()
        self._inbox = await self._connection.open_inbox()
        self._task = self._connection.spawn(self._run(self._inbox))

    async def unsubscribe(self) -> None:
        if self._task is not None:
            self._task.cancel()
        if self._inbox is not None:
            await self._connection.drop(self._inbox)
        if self._connection.connected:
            self._connection.spawn(self._delete(self._consumer))

    async def _run(self, inbox: Inbox) -> None:
        while True:
            try:
                with inbox.open(f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}") as box:
                    await self._consume(box)
            except StreamMissing:
                log.debug("a followed stream is missing", stream=self._stream)
            except BusError as error:
                log.debug("following anew", stream=self._stream, reason=str(error))
            await asyncio.sleep(PAUSE)
            await self._create_again()

    async def _create_again(self) -> None:
        while True:
            try:
                return await self._create()
            except BusError as error:
                log.debug("cannot follow yet", stream=self._stream, reason=str(error))
            await asyncio.sleep(RETRY)

    async def _create(self) -> None:
        created = (await self._api.stream(self._stream)).created
        if created != self._created:
            self._created, self._last = created, 0
        name = f"follow-{secrets.token_hex(8)}"
        config: dict[str, Any] = {
            "name": name,
            "filter_subject": self._subject,
            "deliver_policy": "by_start_sequence",
            "opt_start_seq": self._last + 1,
            "ack_policy": "none",
            "headers_only": True,
            "mem_storage": True,
            "num_replicas": 1,
            "inactive_threshold": round(LINGER * 1e9),
        }
        order = {"stream_name": self._stream, "config": config}
        await self._api.ask(f"CONSUMER.CREATE.{self._stream}.{name}.{self._subject}", order)
        self._consumer = name

    async def _consume(self, box: Mailbox) -> None:
        """Hand on messages until the consumer is gone or has skipped one. Raises BusDisconnected."""
        ask = {"batch": BATCH, "expires": round(EXPIRES * 1e9), "idle_heartbeat": round(HEARTBEAT * 1e9)}
        expected = 1
        now = asyncio.get_running_loop().time
        while True:
            await self._connection.send(box.asks, json.dumps(ask).encode(), None, box.subject)
            wanted = BATCH
            while wanted:
                message = await box.next(now() + 2 * HEARTBEAT)
                if message is None:
                    return
                status = status_of(message)
                if status == HEARTBEAT_STATUS:
                    continue
                if status == EXPIRED:
                    break
                if status is not None:
                    return
                delivery = parse_ack(message.reply)
                if delivery.consumer_seq != expected:
                    return
                expected += 1
                wanted -= 1
                self._last = delivery.seq
                self._hand_on(message, delivery.seq)

    def _hand_on(self, message: Msg, seq: int) -> None:
        size = (message.headers or {}).get("Nats-Msg-Size", "0")
        stored = Stored(message.subject, seq, b"", user_headers(message), int(size) if size.isdigit() else 0)
        try:
            self._handler(stored)
        except Exception as error:
            self._connection.handler_failed(self._subject, error)

    async def _delete(self, consumer: str) -> None:
        try:
            await self._api.ask(f"CONSUMER.DELETE.{self._stream}.{consumer}")
        except BusError:
            log.debug("the server forgets a consumer by itself", consumer=consumer)
