"""What a pool holds, in few bytes, for others to judge how much of a prompt is there. Pure.

The first bytes of the names of its blocks. When those are too many, of one in 2, 4, 8 … of them: which ones is told by
the name itself, so a reader knows whether a name would be listed. A name says all that went before it, so a long
prefix is found by any of its later blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from shared.messages import MAX_HELD, HeldBlocks

SHORT = 4  # bytes of a name; two different ones look the same once in 2**32 comparisons


def summarise(worker: str, names: Collection[bytes]) -> HeldBlocks:
    rate = 0
    while len(names) >> rate > MAX_HELD:
        rate += 1
    listed = [name[:SHORT] for name in names if _listed(name, rate)]
    return HeldBlocks(worker=worker, rate=rate, names=b"".join(listed[: 2 * MAX_HELD]))


def _listed(name: bytes, rate: int) -> bool:
    return int.from_bytes(name[SHORT : 2 * SHORT]) & ((1 << rate) - 1) == 0


class Summary:
    """Such a message to ask."""

    def __init__(self, held: HeldBlocks) -> None:
        self._rate = held.rate
        self._names = {held.names[at : at + SHORT] for at in range(0, len(held.names), SHORT)}

    def longest(self, names: Sequence[bytes]) -> int:
        """How many of `names`, from the first on, are there: never too many but for a rare mistake."""
        found = 0
        for length, name in enumerate(names, 1):
            if _listed(name, self._rate):
                if name[:SHORT] not in self._names:
                    break
                found = length
        return found
