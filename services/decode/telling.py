"""What a drafter is told of sequences in one ask, within what a message may have. Pure."""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Seq

from services.decode.drafters import Ask
from services.decode.sequence import Sequence
from services.decode.sessions import Session
from shared.messages import MAX_BATCH, DraftItem

MAX_TOLD = 32_768  # tokens in one ask
MAX_STATES = 512 << 10  # bytes of hidden states in one ask; of sequences beyond that none are told


class Telling:
    """`readers`: the drafters that read hidden states as the engine's are."""

    def __init__(self) -> None:
        self.readers: Collection[str] = ()
        self._states = MAX_STATES
        self._ended: dict[str, list[str]] = {}

    def fits(self, session: Session, sequence: Sequence, others: Seq[DraftItem]) -> bool:
        """Whether what its drafter is to be told of it fits into one message with `others`: the first always does."""
        told = sum(len(item.token_ids) for item in others)
        return not others or told + len(sequence.tokens) - session.told <= MAX_TOLD

    def item(self, session: Session, sequence: Sequence, k: int, more: int, others: Seq[DraftItem]) -> DraftItem:
        """`k` drafts are wanted, and `more` beyond them could be used. From now on the drafter knows all tokens."""
        told = sum(len(item.hidden) for item in others)
        reads = session.drafter in self.readers and told + len(sequence.hidden) <= self._states
        base, session.told = session.told, len(sequence.tokens)
        return DraftItem(
            session=sequence.id,
            base=base,
            token_ids=sequence.tokens[base:],
            k=k,
            more=more,
            sampling=sequence.sampling.model_copy(update={"seed": sequence.seed}),
            prompt_len=sequence.prompt_len,
            salt=sequence.lineage.salt,
            hidden=sequence.hidden if reads else b"",
        )

    def too_large(self, ask: Ask) -> bool:
        """The bus did not take it: the next has fewer hidden states. True if this one had none."""
        states = sum(len(item.hidden) for item in ask.items)
        self._states = states // 2
        return not states

    def end(self, drafter: str, session: str) -> None:
        """The drafter is to be told that this one has ended."""
        self._ended.setdefault(drafter, []).append(session)

    def take_ended(self, drafter: str) -> list[str]:
        """As many as one ask may name."""
        ended = self._ended.pop(drafter, [])
        if len(ended) > MAX_BATCH:
            self._ended[drafter] = ended[MAX_BATCH:]
        return ended[:MAX_BATCH]

    def forget(self, alive: Collection[str]) -> None:
        """All other drafters are gone."""
        self._ended = {drafter: sessions for drafter, sessions in self._ended.items() if drafter in alive}
