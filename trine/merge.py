"""Merge a request's events into one answer, whatever order, duplicates and attempts they arrive in. No I/O, no clock.

Events reach a client twice (live, and from the event stream when it looks for what it missed), and from two workers
when one took over from another. `EventMerger` hands out every token and every piece of text once and in order.

How text stays exact: an event's text starts where the events before it ended. The merger remembers, for each token
index at which an event began or ended, how much text there was (`_marks`). An event is usable when its first index
has such a mark and is not beyond what has been delivered; whatever it brings beyond that is new. The event stream
holds an unbroken chain from index 0, so reading it always makes the merger complete.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

from shared.errors import Unavailable
from shared.messages import Failed, Finished, Tokens
from shared.sampling.fields import Logprob

MAX_PENDING = 4096
"""Events kept that cannot be used yet; more are dropped, since the event stream has them."""


@dataclass(frozen=True, slots=True)
class Delta:
    """New tokens, the first at `index` of the completion, and the text they add. Either may be empty."""

    text: str
    token_ids: tuple[int, ...]
    index: int
    logprobs: tuple[Logprob, ...] = ()
    """One for each token, if the request asked for them."""


class EventMerger:
    """Feed events in any order; get deltas in order. One merger per request."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.text = ""
        self.logprobs: list[Logprob] = []
        """One for each token, or fewer: events may come without."""
        self.attempt = 0
        """Highest attempt seen."""
        self._marks = {0: 0}
        self._pending: list[Tokens] = []  # by index, of equal ones the higher attempt first
        self._end: Finished | Failed | None = None

    @property
    def terminal(self) -> Finished | Failed | None:
        """The last event, once everything before it has been delivered."""
        return None if isinstance(self._end, Finished) and self.missing else self._end

    @property
    def missing(self) -> bool:
        """Something beyond what has been delivered is known to exist; the event stream has it."""
        have = len(self.token_ids)
        if isinstance(self._end, Finished):
            return have < self._end.usage.completion_tokens
        return any(_end(event) > have for event in self._pending)

    def feed(self, event: Tokens | Finished | Failed, *, stored: bool = False) -> list[Delta]:
        """What this event makes deliverable. Raises Unavailable when it contradicts what was delivered before.

        `stored`: it was read from the event stream, so it counts. A live one may be the word of a worker that has lost
        the request: the stream refuses it, but whoever listens hears it. Of two attempts the later is then believed.
        """
        doubtful = not stored and event.attempt < self.attempt
        self.attempt = max(self.attempt, event.attempt)
        if isinstance(event, Tokens):
            if not self._pending and self._usable(event):  # nearly always
                return _telling([self._apply(event, stored)])
            if len(self._pending) < MAX_PENDING:
                insort(self._pending, event, key=lambda e: (e.index, -e.attempt))
        elif not doubtful:
            self._end = event
        return self._release(stored)

    def _release(self, stored: bool) -> list[Delta]:
        deltas: list[Delta] = []
        while ready := [event for event in self._pending if self._usable(event)]:
            self._pending = [event for event in self._pending if not self._usable(event)]
            deltas += [self._apply(event, stored) for event in ready]
        return _telling(deltas)

    def _usable(self, event: Tokens) -> bool:
        return event.index in self._marks and event.index <= len(self.token_ids)

    def _apply(self, event: Tokens, stored: bool) -> Delta:
        have, end = len(self.token_ids), _end(event)
        if event.index == have and self._marks[have] == len(self.text):  # it goes on where all before it ended
            return self._append(
                event.token_ids, event.text, event.logprobs or [], end, len(self.text) + len(event.text)
            )
        known = self.token_ids[event.index : end]
        whole = self.text[: self._marks[event.index]] + event.text
        grows = end >= have and whole.startswith(self.text)
        if event.token_ids[: len(known)] != known or not (grows or self.text.startswith(whole)):
            if not stored and event.attempt < self.attempt:
                return Delta("", (), have)
            raise Unavailable(
                f"attempt {event.attempt} contradicts, from token {event.index} on, what was delivered before"
            )
        logprobs = (event.logprobs or [])[len(known) :]
        return self._append(event.token_ids[len(known) :], whole[len(self.text) :], logprobs, end, len(whole))

    def _append(self, ids: list[int], text: str, logprobs: list[Logprob], end: int, characters: int) -> Delta:
        """What is new of an event that ends at token `end`, when there are so many characters."""
        have = len(self.token_ids)
        self.token_ids += ids
        self.logprobs += logprobs
        self.text += text
        self._marks[end] = min(characters, self._marks.get(end, characters))
        return Delta(text, tuple(ids), have, tuple(logprobs))


def _telling(deltas: list[Delta]) -> list[Delta]:
    return [delta for delta in deltas if delta.token_ids or delta.text]


def _end(event: Tokens) -> int:
    return event.index + len(event.token_ids)
