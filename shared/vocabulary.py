"""Which token has which id, and how two vocabularies differ. No torch.

A drafter can guess for a target only if both spell every id alike; that both have equally many says nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from shared.errors import ModelError

EXAMPLES = 5


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokens: Mapping[int, str]
    """By id, as the tokenizer's file spells them."""
    added: frozenset[int]
    """Ids that the file adds to its model's own: chat markers and the like."""
    special: frozenset[int]
    """Those of them that are control tokens."""

    @classmethod
    def load(cls, folder: Path) -> Vocabulary:
        """From tokenizer.json in a model's folder. Raises ModelError when it cannot be read."""
        path = folder / "tokenizer.json"
        try:
            spec = json.loads(path.read_bytes())
            added = spec.get("added_tokens") or []
            return cls(
                dict(pairs(spec)),
                frozenset(token["id"] for token in added),
                frozenset(token["id"] for token in added if token.get("special")),
            )
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from None

    @property
    def size(self) -> int:
        """One more than the largest id."""
        return max(self.tokens, default=-1) + 1


def pairs(spec: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Ids and tokens of a tokenizer.json, added tokens last. Raises ValueError, LookupError, TypeError, AttributeError
    for what is none."""
    vocab = spec["model"]["vocab"]
    own = [(i, t) for t, i in vocab.items()] if isinstance(vocab, dict) else [(i, t[0]) for i, t in enumerate(vocab)]
    added = [(token["id"], token["content"]) for token in spec.get("added_tokens") or []]
    return [(int(index), token) for index, token in own + added]


@dataclass(frozen=True, slots=True)
class Difference:
    """What an id is in either vocabulary; None where there is no such id."""

    token_id: int
    target: str | None
    drafter: str | None

    def __str__(self) -> str:
        def named(token: str | None, whose: str) -> str:
            return f"not in the {whose}'s" if token is None else f"{token!r} in the {whose}'s"

        return f"{self.token_id} is {named(self.target, 'target')} and {named(self.drafter, 'drafter')}"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of a target's vocabulary and its drafter's, id by id."""

    target_size: int
    drafter_size: int
    different: int
    """Ids that both have, as other tokens."""
    missing: int
    """Ids that only the target has."""
    extra: int
    """Ids that only the drafter has: a draft with one is never accepted."""
    special: int
    """Ids that are the same token, but a control token in one alone; drafts are the same whichever it is."""
    added: int
    """Ids that are the same token, but an added one in one alone; the same goes for them."""
    examples: tuple[Difference, ...]
    """The first few, those that matter most first."""

    @classmethod
    def of(cls, target: Vocabulary, drafter: Vocabulary) -> Comparison:
        ours, theirs = target.tokens, drafter.tokens
        shared = sorted(ours.keys() & theirs.keys())
        different = [i for i in shared if ours[i] != theirs[i]]
        missing, extra = sorted(ours.keys() - theirs.keys()), sorted(theirs.keys() - ours.keys())
        same = set(shared) - set(different)
        shown = islice((i for ids in (different, missing, extra) for i in ids), EXAMPLES)
        return cls(
            target_size=target.size,
            drafter_size=drafter.size,
            different=len(different),
            missing=len(missing),
            extra=len(extra),
            special=len((target.special ^ drafter.special) & same),
            added=len((target.added ^ drafter.added) & same),
            examples=tuple(Difference(i, ours.get(i), theirs.get(i)) for i in shown),
        )

    @property
    def refusal(self) -> str | None:
        """Why the drafter is of no use: some of the target's ids mean something else to it, or nothing."""
        if not self.different and not self.missing:
            return None
        parts = [("ids that are other tokens", self.different), ("ids that the drafter lacks", self.missing)]
        counts = ", ".join(f"{what}: {count:,}" for what, count in parts if count)
        sizes = f"{self.target_size:,} ids in the target's, {self.drafter_size:,} in the drafter's"
        return f"the vocabularies differ ({sizes}); {counts}; {self.examples[0]}"
