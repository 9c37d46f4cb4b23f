"""What changes the logits of one session's next token, kept up to date from ask to ask. Pure."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from services.drafter.sources.base import Wish
from shared.messages import Sampling
from shared.sampling.adjustments import Adjustments


@dataclass(slots=True, eq=False)
class Adjusting:
    """Long answers are not counted through again at every ask."""

    _adjustments: Adjustments | None = None
    """They have taken what was generated of the first `_taken` of `_tokens`."""
    _taken: int = 0
    _tokens: list[int] | None = None
    _sampling: Sampling | None = None

    def at(self, wish: Wish, eos_ids: Collection[int]) -> Adjustments | None:
        """After all tokens of the wish. What the last call returned must not be in use any more."""
        prompt_len, tokens, length = wish.session.prompt_len, wish.tokens, wish.length
        if self._tokens is not tokens or self._taken > length or self._sampling != wish.sampling:
            prompt, generated = tokens[: min(prompt_len, length)], tokens[prompt_len:length]
            self._adjustments = Adjustments.of(wish.sampling, prompt, generated, eos_ids)
        elif self._adjustments is not None:
            self._adjustments.take(tokens[self._taken : length])
        self._taken, self._tokens, self._sampling = length, tokens, wish.sampling
        return self._adjustments
