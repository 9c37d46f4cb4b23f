"""Answers requests for models that nobody serves: no stream captures them, so without this nobody would."""

from __future__ import annotations

import json

import structlog

from services.decode.refusal import failed, readable_id
from shared.bus.base import Bus, Incoming
from shared.bus.listening import listen
from shared.bus.wire import INBOX
from shared.codec import encode, format_of
from shared.errors import BusError, UnknownModel
from shared.subjects import ALL_REQUESTS, Subjects, model_of, tenant_of_request

QUEUE = "trine-unrouted"  # one worker of the whole fleet answers
NO_SUCH_STREAM = json.dumps({"error": {"code": 404, "err_code": 10059, "description": "stream not found"}}).encode()

log = structlog.get_logger()


class Unrouted:
    """Listens to the requests of all models. Those that a stream captures are not its business."""

    def __init__(self, bus: Bus, subjects: Subjects) -> None:
        self._bus = bus
        self._subjects = subjects

    async def start(self) -> None:
        await listen(self._bus, ALL_REQUESTS, self._on_request, queue=QUEUE)

    async def _on_request(self, message: Incoming) -> None:
        try:
            model, tenant = model_of(message.subject), tenant_of_request(message.subject)
        except ValueError:
            return  # no model or tenant has such a name
        if model == self._subjects.model:
            return
        try:
            if await self._bus.stream_of(message.subject) is None:
                await self._answer(model, tenant, message)
        except BusError as error:
            log.debug("request for another model not looked at", model=model, error=str(error))

    async def _answer(self, model: str, tenant: str, message: Incoming) -> None:
        log.info("request for a model that nobody serves", model=model[:80])
        if message.reply.startswith(INBOX):  # elsewhere this worker's rights would publish what the asker's may not
            await self._bus.publish(message.reply, NO_SUCH_STREAM)
        if (request_id := readable_id(message.data)) is not None:
            told = f"no worker serves {model!r:.80}; this fleet serves {self._subjects.model!r}"
            event = failed(request_id, 1, UnknownModel(told, field="model"))
            await self._bus.publish(Subjects(model).events(request_id, tenant), encode(event, format_of(message.data)))
