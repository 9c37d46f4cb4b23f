"""Which models are served, from the beats of their workers. Time is passed in: no clock here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from services.gateway.problems import Problem
from shared.bus.base import Incoming
from shared.codec import decode
from shared.errors import RequestError
from shared.messages import Beat
from shared.subjects import Subjects, model_of

MAX_WORKERS = 4096
MAX_MODELS = 256
"""On a NATS server that lets everybody in, anybody may say that a model is served."""


@dataclass(slots=True)
class Heard:
    beat: Beat
    at: float


class Fleet:
    """`timeout`: a worker that has not been heard for so many seconds is gone."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._workers: dict[tuple[str, str, str], Heard] = {}
        self._models: dict[str, float] = {}
        """When each was first heard of."""

    def hear(self, message: Incoming, now: float) -> None:
        """Anything that comes on a beat's subject. What is no beat is passed over."""
        try:
            beat, model = decode(message.data, Beat), model_of(message.subject)
            if message.subject != Subjects(model).beat(beat.role, beat.worker):
                return  # whoever may publish there is somebody else
        except (RequestError, ValueError, IndexError):
            return
        if len(self._workers) >= MAX_WORKERS:
            self._forget(now)
        if len(self._workers) >= MAX_WORKERS or (model not in self._models and len(self._models) >= MAX_MODELS):
            return
        self._models.setdefault(model, now)
        self._workers[model, beat.role, beat.worker] = Heard(beat, now)

    def workers(self, now: float) -> Iterator[tuple[str, Beat]]:
        """(model, beat) of all that live."""
        self._forget(now)
        for (model, _, _), heard in self._workers.items():
            yield model, heard.beat

    def served(self, now: float) -> dict[str, float]:
        """Models with a decode worker that takes requests: when each was first heard of."""
        live = {model for model, beat in self.workers(now) if beat.role == "decode" and not beat.draining}
        return {model: self._models[model] for model in sorted(live)}

    def answering(self, model: str, now: float) -> bool:
        """Whether somebody lives who may be at work on a request, or finish it while it drains."""
        return any(beat.role == "decode" and of == model for of, beat in self.workers(now))

    def require(self, model: str, now: float) -> None:
        """Raises a 404 for a model that nobody serves where others are, a 503 where one is missing for now."""
        served = self.served(now)
        if model in served:
            return
        running = f"; running: {', '.join(served)}" if served else ""
        if model in self._models or not served:
            told = f"no decode worker for model {model!r:.140} is heard{running}"
            raise Problem(503, told, "no_workers", param="model", retry_after=2)
        raise Problem(404, f"no model {model!r:.140} is served here{running}", "model_not_found", param="model")

    def _forget(self, now: float) -> None:
        for name in [name for name, heard in self._workers.items() if now - heard.at > self._timeout]:
            del self._workers[name]
