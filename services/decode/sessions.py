"""A sequence as a drafter knows it: what it was told, what it guessed, what came true of that. Plain data, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

from services.decode.depth import NOTHING, Acceptance, Prospect
from shared.messages import Draft

MAX_GAP = 8  # steps between two asks on suspicion; what they may cost in all is bounded elsewhere
PAUSE = 64  # steps, doubled each time, in which a drafter that does not take it on is not told all of it again
MAX_PAUSE = 8192


@dataclass(slots=True)
class Guess:
    """An answer: `tokens` may follow the first `position`; `right` of them came true so far.

    `chances`: of each, in the drafter's own opinion; empty if it has none. `whole`: as many as were asked for, so
    that there might have been more.
    """

    drafter: str
    source: str
    position: int
    tokens: tuple[int, ...]
    chances: tuple[float, ...] = ()
    whole: bool = True
    right: int = 0

    @property
    def left(self) -> tuple[int, ...]:
        return self.tokens[self.right :]


@dataclass(slots=True)
class Session:
    """`told` of the sequence's tokens are known to `drafter`, of which `acceptance` tells what to expect."""

    drafter: str
    acceptance: Acceptance
    told: int = 0
    guess: Guess | None = None
    probing: bool = False
    """It was asked about beside a step, and there is no answer yet."""
    gap: int = 1
    probe_at: int = 0
    """The number of the step beside which it may be asked about next."""
    refused: int = 0
    """Times that the drafter did not have it, since it last drafted for it."""
    resume_at: int = 0
    """The number of the step from which on it may be asked about at all."""

    def held(self, room: int) -> int:
        """Drafts that are here, up to `room`."""
        return min(len(self.guess.left), room) if self.guess else 0

    def prospect(self, room: int) -> Prospect:
        """Of those."""
        if self.guess is None:
            return Prospect()
        guess = self.guess
        said = guess.chances[guess.right :]
        return Prospect(self.acceptance.held(guess.source, guess.right, self.held(room), said))

    def follow(self, tokens: list[int]) -> None:
        """Compare the guess with what came, whether it was verified in a step or not; keep what may still come true."""
        guess = self.guess
        if guess is None:
            return
        for token in tokens[guess.position + guess.right : guess.position + len(guess.tokens)]:
            hit = token == guess.left[0]
            said = guess.chances[guess.right] if guess.chances else None
            self.acceptance.see(guess.source, guess.right, hit, said)
            if not guess.right:
                self.encourage(hit)
            if not hit:
                self.guess = None
                return
            guess.right += 1
        if not guess.left:
            if not guess.whole:
                self.acceptance.ended(guess.source)
            self.guess = None

    def take(self, drafter: str, draft: Draft, wanted: int, depth: int) -> bool:
        """An answer of this drafter, asked for `wanted` tokens, of which no more than `depth` are of use.

        False for one about another sequence of that name: an id may be used again before a late answer comes.
        """
        if self.drafter != drafter or draft.position > self.told:
            return False
        self.acceptance.answered(draft.source)
        self.refused = 0
        tokens, chances = tuple(draft.token_ids[:depth]), tuple(draft.chances[:depth])
        self.guess = Guess(drafter, draft.source, draft.position, tokens, chances, len(tokens) == wanted)
        return True

    def nothing(self) -> None:
        """The drafter has nothing for it."""
        self.acceptance.answered(NOTHING)
        self.encourage(False)

    def unknown(self, base: int, step: int) -> None:
        """The drafter does not have it, and is told everything again: at once if it has forgotten it for once."""
        self.told = 0
        if base == 0 or self.refused:
            self.refuse(step)
        else:
            self.refused = 1

    def refuse(self, step: int) -> None:
        """The drafter cannot have it: it is too long, or there is no room for it."""
        self.resume_at = step + min(PAUSE << min(self.refused, 16), MAX_PAUSE)
        self.refused += 1

    def encourage(self, good: bool) -> None:
        """The next ask on suspicion comes sooner or later."""
        self.gap = 1 if good else min(2 * self.gap, MAX_GAP)
