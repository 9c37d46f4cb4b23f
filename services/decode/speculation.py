"""Whom to ask for drafts, what to tell them, and which answers to believe. Pure: no I/O, no clock, no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from services.decode.sequence import Sequence
from shared.messages import MAX_BATCH, Draft, DraftItem
from shared.peers import rendezvous

MISSES_TO_PAUSE = 4
MAX_PAUSE = 256  # steps


@dataclass(slots=True)
class _Known:
    """What a drafter was told about a sequence."""

    drafter: str
    tokens: int = 0


@dataclass(slots=True)
class _Patience:
    """A drafter that keeps missing the deadline is left alone for a growing number of steps, then tried again."""

    misses: int = 0
    pause: int = 0
    resume_at: int = 0


class DraftBook:
    """Bookkeeping of drafts for the sequences of one decode worker."""

    def __init__(self, depth: int, vocab_size: int) -> None:
        self.depth = depth
        self._vocab = vocab_size
        self._known: dict[str, _Known] = {}
        self._patience: dict[str, _Patience] = {}
        self._ended: dict[str, list[str]] = {}
        self._step = 0

    def next_step(self) -> None:
        self._step += 1

    def asks(self, sequences: Iterable[Sequence], drafters: list[str]) -> dict[str, list[DraftItem]]:
        """Per drafter, what to ask for. A sequence stays with its drafter while that one lives."""
        out: dict[str, list[DraftItem]] = {}
        if not self.depth:
            return out
        for sequence in sequences:
            room = min(self.depth, sequence.max_tokens - sequence.generated - 1)
            drafter = rendezvous(sequence.id, drafters)
            if room <= 0 or drafter is None or self._paused(drafter):
                continue
            out.setdefault(drafter, []).append(self._item(sequence, drafter, room))
        return out

    def _item(self, sequence: Sequence, drafter: str, k: int) -> DraftItem:
        known = self._known.get(sequence.id)
        if known is None or known.drafter != drafter or known.tokens > len(sequence.tokens):
            known = self._known[sequence.id] = _Known(drafter)
        base, known.tokens = known.tokens, len(sequence.tokens)
        sampling = sequence.sampling.model_copy(update={"seed": sequence.seed})
        return DraftItem(session=sequence.id, base=base, token_ids=sequence.tokens[base:], k=k, sampling=sampling)

    def take(self, sequence: Sequence, draft: Draft) -> bool:
        """Use an answer if it continues the sequence as it is now and every id is a token; else ignore it."""
        fits = draft.position == len(sequence.tokens) and sequence.generating
        if not fits or any(not 0 <= t < self._vocab for t in draft.token_ids):
            return False
        sequence.drafts = tuple(draft.token_ids[: self.depth])
        return True

    def unknown(self, sessions: Iterable[str]) -> None:
        """The drafter lost these: tell it everything next time."""
        for session in sessions:
            self._known.pop(session, None)

    def answered(self, drafter: str) -> None:
        self._patience.pop(drafter, None)

    def missed(self, drafter: str, sessions: Iterable[str]) -> None:
        """It did not answer in time. Whether it got what it was told is unknown, so it is told all of it again."""
        self.unknown(sessions)
        patience = self._patience.setdefault(drafter, _Patience())
        patience.misses += 1
        if patience.misses >= MISSES_TO_PAUSE:
            patience.pause = min(max(patience.pause * 2, MISSES_TO_PAUSE), MAX_PAUSE)
            patience.resume_at = self._step + patience.pause

    def _paused(self, drafter: str) -> bool:
        patience = self._patience.get(drafter)
        return patience is not None and self._step < patience.resume_at

    def end(self, session: str) -> None:
        if (known := self._known.pop(session, None)) is not None:
            self._ended.setdefault(known.drafter, []).append(session)

    def take_ended(self, drafter: str) -> list[str]:
        """Sessions to tell `drafter` the end of."""
        ended = self._ended.pop(drafter, [])
        if len(ended) > MAX_BATCH:
            self._ended[drafter] = ended[MAX_BATCH:]
        return ended[:MAX_BATCH]
