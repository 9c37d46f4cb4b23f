"""An answer from somewhere in its middle on, for whoever has lost the one that it was reading."""

from __future__ import annotations

import time
from collections.abc import Sequence

from shared.bus.base import Bus, Incoming, Stored
from shared.codec import decode_event
from shared.errors import DuplicateRequest, InvalidField, NotKept, RequestError
from shared.messages import MAX_ID, Failed
from shared.streams import REQUEST_HEADER
from shared.tenants import is_tenant
from trine.merge import Delta
from trine.stream import Stream
from trine.submit import Ask

KNOWN_S = 5.0
"""A request of which nothing is stored, and nothing heard for so long, is not known."""


class Resumed(Stream):
    """As `Stream`, of a request that was sent before: its tokens from `from_index` on, then its end.

    The answer is read from its beginning, so `completion` has all of it. Where an id was used several times, it is the
    latest request's. Leaving early cancels the request, as with any other stream. Iterating raises NotKept when nothing
    is known of the request, or not all that is needed.
    """

    def __init__(self, bus: Bus, ask: Ask, live: set[Stream], from_index: int, from_text: int | None) -> None:
        super().__init__(bus, ask, live)
        self._from_index = from_index
        self._from_text = from_text
        self._chars = 0
        self._looked = False
        self._unknown_since: float | None = None

    async def _submit(self) -> None:
        """It was sent before, and may have ended: nothing is final until what is stored of it has been read."""
        self._doubtful = True

    async def _next(self) -> list[Delta]:
        if self._looked:
            deltas = await super()._next()
        else:
            self._looked, deltas = True, await self._catch_up()
        self._give_up_on_the_unknown()
        return [rest for delta in deltas if (rest := self._rest(delta)) is not None]

    def _give_up_on_the_unknown(self) -> None:
        """Raises NotKept."""
        if self._request is not None or (self._doubtful and self._unknown_since is None):
            return
        now = time.monotonic()
        self._unknown_since = self._unknown_since or now
        if now - self._unknown_since >= KNOWN_S:
            raise NotKept(
                f"nothing is known of a request {self.id!r}: its events are no longer kept, it never was, or it waits "
                "in the queue still"
            )
        self._look_at = min(self._look_at, self._unknown_since + KNOWN_S)

    def _lost(self) -> NotKept:
        return NotKept(f"a part of the answer to {self.id!r} is no longer kept")

    def _feed(self, message: Incoming | Stored) -> list[Delta]:
        self._identify([message])
        return super()._feed(message) if self._request is not None else []

    def _identify(self, messages: Sequence[Incoming | Stored]) -> None:
        """The latest request that has the id, but for those that were refused for having it."""
        for message in reversed(messages):
            if self._request is not None:
                return
            try:
                event = decode_event(message.data)
                refused = isinstance(event, Failed) and event.code == DuplicateRequest.code
                if event.id == self.id and not refused:
                    self._request = int(message.headers[REQUEST_HEADER])
                    self._sent = True  # it is ours now: leaving cancels it
            except (RequestError, KeyError, ValueError):
                continue

    def _rest(self, delta: Delta) -> Delta | None:
        """The part of it that lies beyond what the caller has."""
        end = delta.index + len(delta.token_ids)
        begins = self._chars
        self._chars += len(delta.text)
        known = max(self._from_index - delta.index, 0)
        if self._from_text is not None:
            text = delta.text[max(self._from_text - begins, 0) :]
        else:
            text = delta.text if end > self._from_index or (not delta.token_ids and not known) else ""
        rest = Delta(
            text, delta.token_ids[known:], max(delta.index, min(self._from_index, end)), delta.logprobs[known:]
        )
        return rest if rest.token_ids or rest.text else None


def sought(model: str, tenant: str, request_id: str, from_index: int, timeout: float) -> Ask:
    """Raises InvalidField, naming the argument."""
    if not 0 < len(model) <= MAX_ID:
        raise InvalidField(f"model: a name has 1 to {MAX_ID} characters", field="model")
    if not is_tenant(tenant):
        raise InvalidField("tenant: a name is 1 to 64 letters, digits, - and _", field="tenant")
    if not 0 < len(request_id) <= MAX_ID:
        raise InvalidField(f"request_id: it has 1 to {MAX_ID} characters", field="request_id")
    if from_index < 0:
        raise InvalidField("from_index: it is a number of tokens", field="from_index")
    return Ask(request_id, model, tenant, "normal", b"", timeout, "resume")
