"""The subscriptions of one connection: made on its client, and again on the next one."""

from __future__ import annotations

import structlog
from nats import errors
from nats.aio.subscription import Subscription as RawSubscription

from shared.bus.nats_client import Denial, NatsClient
from shared.bus.nats_inbox import Inbox
from shared.bus.nats_subscriber import Subscriber

log = structlog.get_logger(__name__)

MAX_PENDING_MESSAGES = 65_536
MAX_PENDING_BYTES = 128 << 20

Receiver = Subscriber | Inbox


class Receivers:
    def __init__(self) -> None:
        self._raw: dict[Receiver, RawSubscription] = {}

    def __len__(self) -> int:
        return len(self._raw)

    async def attach(self, client: NatsClient, receiver: Receiver) -> None:
        """Raises nats-py's errors."""
        if isinstance(receiver, Inbox):
            # Mailboxes hold what they asked for; a limit here could only lose answers.
            self._raw[receiver] = await client.subscribe(receiver.subject, cb=receiver.deliver, pending_bytes_limit=0)
        else:
            self._raw[receiver] = await client.subscribe(
                receiver.subject,
                receiver.queue,
                cb=receiver.deliver,
                pending_msgs_limit=MAX_PENDING_MESSAGES,
                pending_bytes_limit=MAX_PENDING_BYTES,
            )

    async def attach_all(self, client: NatsClient) -> None:
        for receiver in list(self._raw):
            await self.attach(client, receiver)

    async def mute(self, client: NatsClient, receiver: Receiver) -> None:
        """The server shall send it nothing more; what is on its way still comes."""
        if raw := self._raw.get(receiver):
            await client.mute(raw)

    async def drop(self, receiver: Receiver) -> None:
        raw = self._raw.pop(receiver, None)
        if raw is None:
            return
        try:
            await raw.unsubscribe()
        except errors.Error:
            log.debug("unsubscribed from a connection that is gone", subject=receiver.subject)

    def lose_all(self) -> None:
        """The connection is gone: no answer will come to what was asked on it."""
        for inbox in self._inboxes():
            inbox.lose_all()

    def deny(self, denial: Denial) -> None:
        """Tell whom it concerns."""
        if denial.publish:
            for inbox in self._inboxes():
                inbox.deny(denial.subject)
            return
        for receiver in self._raw:
            if receiver.subject.lower() == denial.subject:
                receiver.refuse()
                log.error("NATS does not let us subscribe", subject=receiver.subject)

    def _inboxes(self) -> list[Inbox]:
        return [receiver for receiver in self._raw if isinstance(receiver, Inbox)]
