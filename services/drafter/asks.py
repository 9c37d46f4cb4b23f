"""An ask on its way to an answer. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.drafter.record import Guess
from services.drafter.sources.base import Wish
from services.drafter.sources.continuation import Continuation
from shared.messages import Draft, Drafts
from shared.tracing import UNTRACED, Span

NOTHING = Continuation()


@dataclass(slots=True, eq=False)
class Ask:
    """Of one decode worker. `open` wishes wait for so many guesses of the model; should that come to nothing, there is
    what a quicker source found.
    """

    worker: str
    reply: str
    wait_s: float
    until: float
    """On this worker's monotonic clock: an answer that is sent later comes too late."""
    unknown: list[str] = field(default_factory=list)
    wishes: list[Wish] = field(default_factory=list)
    drafts: list[Draft] = field(default_factory=list)
    open: dict[Wish, tuple[Continuation, int]] = field(default_factory=dict)
    span: Span = UNTRACED

    def answer(
        self, wish: Wish, source: str, tokens: tuple[int, ...], kinds: tuple[int, ...], chances: list[float]
    ) -> None:
        """`kinds` and `chances` of each token: see `record` and `Draft`."""
        self.open.pop(wish, None)
        if not tokens:
            return
        session = wish.session
        session.guess = Guess(source, wish.length, tokens, kinds)
        draft = Draft(
            session=session.key[1], position=wish.length, token_ids=list(tokens), source=source, chances=chances
        )
        self.drafts.append(draft)

    def message(self, worker: str) -> Drafts:
        return Drafts(worker=worker, drafts=self.drafts, unknown=self.unknown)
