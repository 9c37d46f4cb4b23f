"""Which models are served, from the beats of their workers. Time is passed in: no clock here."""

from __future__ import annotations

from collections.abc import Iterator

from services.gateway.problems import Problem
from shared.bus.base import Incoming
from shared.messages import Beat
from trine.roster import Roster


class Fleet:
    """`timeout`: a worker that has not been heard for so many seconds is gone."""

    def __init__(self, timeout: float) -> None:
        self.roster = Roster(timeout)

    def hear(self, message: Incoming, now: float) -> None:
        """Anything that comes on a beat's subject. What is no beat is passed over."""
        self.roster.hear(message, now)

    def workers(self, now: float) -> Iterator[tuple[str, Beat]]:
        """(model, beat) of all that live."""
        return self.roster.live(now)

    def served(self, now: float) -> dict[str, float]:
        """Models with a decode worker that takes requests: when each was first heard of."""
        live = {model for model, beat in self.workers(now) if beat.role == "decode" and not beat.draining}
        return {model: self.roster.models[model].since for model in sorted(live)}

    def answering(self, model: str, now: float) -> bool:
        """Whether somebody lives who may be at work on a request, or finish it while it drains."""
        return any(beat.role == "decode" and of == model for of, beat in self.workers(now))

    def require(self, model: str, now: float) -> None:
        """Raises a 404 for a model that nobody serves where others are, a 503 where one is missing for now."""
        served = self.served(now)
        if model in served:
            return
        running = f"; running: {', '.join(served)}" if served else ""
        if model in self.roster.models or not served:
            told = f"no decode worker for model {model!r:.140} is heard{running}"
            raise Problem(503, told, "no_workers", param="model", retry_after=2)
        raise Problem(404, f"no model {model!r:.140} is served here{running}", "model_not_found", param="model")
