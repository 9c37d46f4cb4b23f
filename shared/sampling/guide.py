"""Where an answer stands in the form that it must have (`shared.messages.Guided`), as services see it. No torch.

A row of logits is masked before anything else is done to it, so that the form decides what may come and everything
else decides among that as it does without a form. The noise stays that of seed and position: the same request gets
the same answer with drafts and without, in any batch, and from whoever continues it.

- An EOS may come where the answer may end, and nothing else may where it must. Where nothing else may, the answer ends
  of itself, at once and whatever `min_tokens` says.
- What `logit_bias` bans stays banned, and until `min_tokens` an EOS does. Where that leaves nothing, the request fails.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

from shared.messages import Guided

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

Masks: TypeAlias = "npt.NDArray[np.int32]"
"""A row of ceil(vocabulary / 32) words for each place: bit `t % 32` of word `t // 32` is set if token `t` may come."""


class Guide(Protocol):
    """One sequence's. Its methods may take a while; one thread at a time may call them."""

    @property
    def ended(self) -> bool:
        """The answer is complete: nothing may follow."""
        ...

    def masks(self, drafts: Sequence[int]) -> Masks:
        """What may come next, and after each of the `drafts` up to the first that may not come or that nothing may
        follow: [1 + those drafts, words]. What comes after a draft that completes the answer means nothing.

        Changes nothing. Raises InvalidField where nothing may come, and for forms that cost too much to follow.
        """
        ...

    def take(self, tokens: Sequence[int]) -> int:
        """These come next. Returns how many are part of the answer: none after the one that completes it.

        Raises InvalidField for a token that may not come, and for forms that cost too much to follow.
        """
        ...


class Guides(Protocol):
    async def guide(self, guided: Guided, *, banned: Collection[int], min_tokens: int) -> Guide:
        """At the beginning of an answer that has none of the tokens `banned`, and no EOS before `min_tokens` tokens.

        Raises InvalidField for a form that cannot be had, Unavailable when it cannot be found out in time.
        """
        ...

    async def close(self) -> None: ...
