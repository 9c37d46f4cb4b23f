"""Lets requests into the pool, and gets what they need before their first step: the form of the answer, and blocks."""

from __future__ import annotations

import time
from collections.abc import Callable

import anyio
import structlog

from services.decode.desk import Desk
from services.decode.loading import Loader
from services.decode.request import Request, banned_tokens
from services.decode.scheduler import DecodeScheduler
from shared.errors import InvalidField, RequestError, TrineError, Unavailable
from shared.lifecycle import Phase
from shared.sampling.guide import Guides

log = structlog.get_logger()


class Admission:
    """`ready` is called when there may be something to compute, `room_changed` when there may be room for others.

    `guides`: see `DecodeWorker`.
    """

    def __init__(
        self,
        scheduler: DecodeScheduler,
        desk: Desk,
        loader: Loader,
        guides: Guides | None,
        *,
        spawn: Callable[..., None],
        ready: Callable[[], None],
        room_changed: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._desk = desk
        self._loader = loader
        self._guides = guides
        self._spawn = spawn
        self._ready = ready
        self._room_changed = room_changed

    def admit(self) -> None:
        """Whoever has room now."""
        admitted = self._scheduler.admit()
        for sequence in admitted:
            self._spawn(self._load, self._desk.requests[sequence.id], sequence.epoch)
        if admitted:
            self._room_changed()

    async def _load(self, request: Request, epoch: int) -> None:
        if request.sequence.epoch != epoch:
            return  # preempted before this task's first step
        request.admitted = request.admitted or time.monotonic()
        try:
            if not await self._guided(request, epoch):
                self._ready()
                return
            left = request.deadline - time.monotonic()
            with request.trace.loading(sequence := request.sequence):
                await self._loader.load(sequence, left, request.prefilled_by.update, remotely=not request.suspect)
            request.events.cached_tokens = request.sequence.cached_tokens or 0
        except (RequestError, Unavailable) as error:
            self._desk.fail(request, error)
        except Exception:
            log.exception("loading failed", request=request.key)
            self._desk.fail(request, TrineError("internal error while loading the prompt's KV"))
        self._ready()

    async def _guided(self, request: Request, epoch: int) -> bool:
        """See to the form that the answer must have. False: there is nothing to load for it (any more)."""
        sequence, guided = request.sequence, request.generate.guided
        if guided is None or sequence.guide is not None:
            return True
        if self._guides is None:
            raise InvalidField("guided: this worker has nothing to see to the form of an answer with", field="guided")
        banned = banned_tokens(sequence.sampling)
        guide = await self._guides.guide(guided, banned=banned, min_tokens=sequence.sampling.min_tokens)
        await anyio.to_thread.run_sync(guide.take, sequence.tokens[sequence.prompt_len :])  # of earlier attempts
        if sequence.epoch != epoch or sequence.phase is not Phase.LOADING:
            return False
        sequence.guide = guide
        if sequence.complete:  # the last attempt died before saying it
            self._desk.finish(request, "stop")
            self.admit()
            self._room_changed()
        return not sequence.complete
