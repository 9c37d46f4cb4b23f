"""Whether a source is worth asking. Pure: no I/O, no clock, no torch.

A source whose guesses keep being wrong is left out, and tried again now and then.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.drafter.sessions import Session

WINDOW = 32.0  # guesses that the running hit rate remembers
MIN_RATE = 0.1
PROBE_EVERY = 64


@dataclass(slots=True)
class SourceScore:
    """How often a source's first guess came true, over about the last `WINDOW` guesses."""

    rate: float = 0.5
    seen: int = 0
    passed_over: int = 0

    def record(self, hit: bool) -> None:
        self.seen += 1
        self.rate += (float(hit) - self.rate) / min(self.seen + 1.0, WINDOW)

    def worth_trying(self) -> bool:
        """False while it has been wrong too often; every `PROBE_EVERY`-th call is a probe."""
        if self.seen < WINDOW or self.rate >= MIN_RATE:
            return True
        self.passed_over += 1
        return self.passed_over % PROBE_EVERY == 0


def record_outcome(session: Session, scores: dict[str, SourceScore]) -> None:
    """Compare the last answer's first token with what the target took at its place, once that is known."""
    position, tokens, source = session.guessed
    if tokens and len(session.tokens) > position:
        scores[source].record(session.tokens[position] == tokens[0])
        session.guessed = (0, (), "")
