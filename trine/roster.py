"""Workers that were heard lately, of all models: what they last said, and what their counters did. Pure: no clock here.

Whoever may publish beats may say anything in them: what is kept is bounded, in number and in size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from shared.bus.base import Incoming
from shared.messages import Beat
from shared.messages.base import MAX_NUMBER
from shared.subjects import PRIORITIES, Subjects
from trine.beats import beat_of
from trine.series import Series

MAX_WORKERS = 4096
MAX_MODELS = 256
SHOWN_S = 60.0
"""So long a worker is remembered that fell silent without having said that it leaves."""
HISTORY_S = 120
OWN_S = 10
"""Seconds of a single worker's history."""
COUNTED = ("generated_tokens", "prompt_tokens", "cached_tokens", "drafted_tokens", "accepted_tokens")
"""Counters in the beats of decode workers."""
REQUEST_QUEUES = tuple(Subjects.request_consumer(priority) for priority in PRIORITIES)
JOB_QUEUES = (Subjects("any").prefill_consumer,)
QUEUES = (*REQUEST_QUEUES, *JOB_QUEUES)
"""Consumers of work queues."""
QUEUE_S = 30.0
"""A queue of which no worker has told for so long is not known any more."""
GAUGES = {"running": "decode", "prefilling": "prefill"}
"""What the workers of a role are at work on, as it was when the second began."""


class State(StrEnum):
    SERVING = "serving"
    JOINING = "joining"
    DRAINING = "draining"
    SILENT = "silent"


@dataclass(slots=True)
class Heard:
    """A worker's last beat, and when it came."""

    beat: Beat
    at: float
    tokens: Series = field(default_factory=lambda: Series(OWN_S))


@dataclass(slots=True)
class Model:
    """What was heard of one model."""

    since: float
    workers: dict[tuple[str, str], Heard] = field(default_factory=dict)
    """By role and name."""
    history: Series = field(default_factory=lambda: Series(HISTORY_S))
    queued: dict[str, tuple[int, float]] = field(default_factory=dict)
    """By consumer (`QUEUES`): what waits in its queue as a worker last told, and when that was."""

    def waiting(self, queues: Sequence[str], now: float) -> int | None:
        """In these together, as told of late; None when nobody has told of any."""
        told = [self.queued[name] for name in queues if name in self.queued]
        known = [count for count, at in told if now - at < QUEUE_S]
        return sum(known) if known else None


class Roster:
    """`timeout`: a worker that has not been heard for so many seconds is silent, and counts as dead."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._count = 0
        self.models: dict[str, Model] = {}
        """All that were ever heard of."""

    def hear(self, message: Incoming, now: float) -> None:
        """Anything that comes on a beat's subject. What is no beat is passed over."""
        if (heard := beat_of(message)) is None:
            return
        name, beat = heard
        model = self.models.get(name)
        if (model is None or (beat.role, beat.worker) not in model.workers) and not self._room(model, now):
            return  # those that are known go on being heard
        self._note(self.models.setdefault(name, Model(now)), beat, now)

    def _room(self, model: Model | None, now: float) -> bool:
        """For a worker more, of a model that is known or not."""
        if self._count >= MAX_WORKERS:
            self.forget(now, self._timeout)
        return self._count < MAX_WORKERS and (model is not None or len(self.models) < MAX_MODELS)

    def _note(self, model: Model, beat: Beat, now: float) -> None:
        known = model.workers.get((beat.role, beat.worker))
        if known is None:
            self._count += 1
            known = model.workers[beat.role, beat.worker] = Heard(beat, now)
            known.tokens.add(COUNTED[0], 0, now)  # from here on it is known how many there were
        else:
            self._count_up(model, known, beat, now)
            known.beat, known.at = beat, now
        self._note_queues(model, beat, now)
        if not model.history.has(now):
            model.history.add(COUNTED[0], 0, now)
            live = [h.beat for h in model.workers.values() if self.state(h, now) is not State.SILENT]
            for name, role in GAUGES.items():
                model.history.put(name, sum(bounded(b.load.running) for b in live if b.role == role), now)

    def _note_queues(self, model: Model, beat: Beat, now: float) -> None:
        told = {name: (beat.load.queued[name], now) for name in QUEUES if name in beat.load.queued}
        model.queued |= told
        if told.keys() & set(REQUEST_QUEUES) and (waiting := model.waiting(REQUEST_QUEUES, now)) is not None:
            model.history.put("queued", waiting, now)

    def _count_up(self, model: Model, known: Heard, beat: Beat, now: float) -> None:
        """A process that is new under the name has counted from 0. Of one that is heard for the first time nobody
        knows since when."""
        before = known.beat.counters if known.beat.life == beat.life else {}
        for counter in COUNTED:
            more = bounded(beat.counters.get(counter, 0)) - bounded(before.get(counter, 0))
            if more > 0:
                model.history.add(counter, more, now)
                if counter == COUNTED[0]:
                    known.tokens.add(counter, more, now)

    def state(self, heard: Heard, now: float) -> State:
        if now - heard.at > self._timeout:
            return State.SILENT
        if heard.beat.joining:
            return State.JOINING
        return State.DRAINING if heard.beat.draining else State.SERVING

    def live(self, now: float) -> Iterator[tuple[str, Beat]]:
        """(model, beat) of all that are not silent."""
        for name, model in self.models.items():
            for heard in model.workers.values():
                if self.state(heard, now) is not State.SILENT:
                    yield name, heard.beat

    def forget(self, now: float, after: float = SHOWN_S) -> None:
        """Those that are silent for longer; those that had said that they leave, as soon as they are silent."""
        for model in self.models.values():
            for key, heard in list(model.workers.items()):
                if now - heard.at > (self._timeout if heard.beat.draining else max(after, self._timeout)):
                    del model.workers[key]
                    self._count -= 1


def bounded(number: int) -> int:
    """As a count that every reader of JSON can tell from its neighbours."""
    return min(max(number, 0), MAX_NUMBER)
