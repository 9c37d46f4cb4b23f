"""What changes one sequence's logits before its tokens are chosen, and the counts that it takes. Pure; no torch.

For each token, in this order (that of vLLM and `transformers`):

1. `logit_bias` is added; `BAN` gives -inf;
2. if it is in the prompt or was generated: divided by `repetition_penalty` where positive, else multiplied with it
   (Keskar et al. 2019, "CTRL: a conditional transformer language model");
3. `frequency_penalty` times the number of times it was generated is subtracted, and `presence_penalty` if that is not 0
   (OpenAI's API);
4. an EOS gives -inf in the place of the first `min_tokens` tokens.

Whoever keeps the sequence tells which tokens it has for good (`take`). A row that chooses after guessed tokens names
them, and nothing of them remains.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from copy import copy
from typing import TypeAlias

from shared.sampling.fields import BAN, Sampling

Integers: TypeAlias = "array[int]"


class Adjustments:
    """Not thread-safe: nobody may call `take` while a step reads it."""

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int], eos_ids: Collection[int]
    ) -> None:
        """`eos_ids` must be tokens of the vocabulary, as those of `logit_bias` and all others."""
        self.sampling = sampling
        self.bias_ids = array("q", sampling.logit_bias)
        self.bias = array("d", (-float("inf") if b <= BAN else b for b in sampling.logit_bias.values()))
        self._eos_ids = array("q", sorted(eos_ids))
        self._may_end_from = len(prompt) + sampling.min_tokens
        self._ids = array("q")
        self._counts = array("q")
        self._places: dict[int, int] = {}
        self.penalises = sampling.repetition_penalty != 1 or bool(
            sampling.frequency_penalty or sampling.presence_penalty
        )
        if sampling.repetition_penalty != 1:
            for token in prompt:
                _count(token, 0, self._ids, self._counts, self._places)
        self.take(generated)

    @classmethod
    def of(
        cls, sampling: Sampling, prompt: Sequence[int], generated: Sequence[int], eos_ids: Collection[int]
    ) -> Adjustments | None:
        """None where nothing is to be changed, which costs nothing."""
        adjustments = cls(sampling, prompt, generated, eos_ids)
        return adjustments if adjustments.penalises or sampling.logit_bias or sampling.min_tokens else None

    def take(self, tokens: Sequence[int]) -> None:
        """These were generated next."""
        for token in tokens if self.penalises else ():
            _count(token, 1, self._ids, self._counts, self._places)

    def fork(self) -> Adjustments:
        """Another one that has taken the same so far."""
        other = copy(self)
        other._ids, other._counts, other._places = self._ids[:], self._counts[:], self._places.copy()
        return other

    def counts(self, guessed: Sequence[int] = ()) -> tuple[Integers, Integers]:
        """The tokens that penalties apply to and how often each was generated (0: it is in the prompt only).

        As if `guessed` had been generated too. Not to be changed.
        """
        if not guessed:
            return self._ids, self._counts
        ids, counts, new = self._ids[:], self._counts[:], dict[int, int]()
        for token in guessed:
            if (place := self._places.get(token)) is not None:
                counts[place] += 1
            else:
                _count(token, 1, ids, counts, new)
        return ids, counts

    def held_off(self, position: int) -> Integers:
        """EOS ids that may not be the token at `position` of the sequence."""
        return self._eos_ids if position < self._may_end_from else array("q")


def _count(token: int, times: int, ids: Integers, counts: Integers, places: dict[int, int]) -> None:
    if (place := places.setdefault(token, len(ids))) == len(ids):
        ids.append(token)
        counts.append(0)
    counts[place] += times
