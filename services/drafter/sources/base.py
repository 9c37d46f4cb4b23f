"""What is asked of a source of drafts, and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from services.drafter.record import Record
from services.drafter.sessions import Session
from shared.messages import Sampling


@dataclass(frozen=True, slots=True, eq=False)
class Wish:
    """Up to `k` tokens that may follow the first `length` (at least 1) of `tokens`, or `more` beyond them if it is
    known that they are likely enough.

    `tokens` is the session's list at the time of asking. Such a list only grows, so nobody needs a copy of it.
    `hidden`: the target's hidden state at the position before the last of them, float16 little-endian, if known.
    `least`: a token is not wanted if it is less likely than this that it and those before it are right.
    """

    session: Session
    tokens: list[int]
    length: int
    k: int
    sampling: Sampling
    hidden: bytes = b""
    least: float = 0.1
    more: int = 0

    @property
    def most(self) -> int:
        return self.k + self.more


class StepPlan(Protocol):
    """One step of a source."""

    @property
    def sessions(self) -> tuple[Session, ...]: ...


class Stepping(Protocol):
    """A source that guesses a token at a time, in steps for many sessions together.

    Between two steps new wishes are taken in, so nobody waits longer than a step for his turn. Not thread-safe, but
    `run`, which blocks, may run in another thread beside anything but `plan`, `commit` and `fail`.
    """

    record: Record
    step_s: float
    """Seconds of a step that adds a token."""

    @property
    def name(self) -> str: ...

    @property
    def hidden_size(self) -> int:
        """Channels of the hidden states of the target that it reads; 0: it reads none."""
        ...

    @property
    def works_ahead(self) -> bool:
        """It has something to do for later wishes while nobody waits."""
        ...

    # At any time

    @property
    def asked(self) -> bool:
        """There is something that no plan has taken in."""
        ...

    def room(self, wish: Wish) -> int:
        """Guesses that may be had for it; 0 if the source can do nothing for it."""
        ...

    def reach(self, wish: Wish, depth: int) -> int:
        """Guesses to ask for where `depth` of them pay on average: more, if it stops by itself where they do not."""
        ...

    def expected(self, wish: Wish) -> list[float]:
        """Tokens expected to be accepted of its first 1, 2, ... guesses, for as many as may be had."""
        ...

    def behind(self, wish: Wish) -> float:
        """Steps until its first new guess, beyond that one's own step."""
        ...

    def ready(self, wish: Wish) -> list[int]:
        """Guesses that are there already."""
        ...

    def kinds(self, wish: Wish, count: int) -> tuple[int, ...]:
        """Of its first `count` guesses that are there."""
        ...

    def want(self, wish: Wish, depth: int) -> None:
        """Somebody waits for `depth` guesses; with 0 it only gets ready for later wishes. The newest wish counts."""
        ...

    def waits(self, wish: Wish) -> bool:
        """False when there are enough guesses, or there will not be: `ready` says which."""
        ...

    def answered(self, wish: Wish) -> None:
        """Nobody waits any longer."""
        ...

    def end(self, session: Session) -> None:
        """The session is over."""
        ...

    # Steps

    def plan(self) -> StepPlan | None:
        """The next step; None when there is nothing to do."""
        ...

    def run(self, plan: Any) -> tuple[Sequence[Any], float]:
        """What came of it, and the seconds it took. Blocking."""
        ...

    def commit(self, plan: Any, out: Any, seconds: float) -> None:
        """The step has succeeded."""
        ...

    def fail(self, plan: Any, error: Exception) -> None:
        """The step has failed: those to blame are not drafted for again. Where they are not known, each tries alone."""
        ...
