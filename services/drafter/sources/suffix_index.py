"""Where the last tokens of a sequence occurred before, in a text that grows at its end and is forgotten at its start.

What a suffix tree answers, from hash chains as LZ77 compressors have them: for every place the last place before it
where the same `n` tokens ended. A tree holds an object per node; this holds a few integers per token, takes tokens in
any portions and forgets the oldest ones again. The longest match is found among the `CANDIDATES` most recent ones.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

GRAMS = (5, 2, 1)
"""Lengths that have a chain, longest first. With a match of one of them shorter ones are not looked for."""
LONGEST = 32
"""A longer match is not compared any further."""
CANDIDATES = 32
ENOUGH = 8
"""Of the longest there can be, so many say it all."""
BREAK = -1
"""Stands between texts that have nothing to do with each other. No token has this id."""
_NONE = 0

Match = tuple[int, int]
"""Tokens that are the same, and the index in `tokens` at which they end."""


class _Chain:
    """The places (1 is after the first token that there ever was) where the same `n` tokens end, latest first."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.last: dict[int, int] = {}
        self.before = array("q")

    def extend(self, tokens: Sequence[int], known: int, length: int, run: int, gone: int) -> None:
        """Take in the ends `known + 1` to `length`; what stands before `run` is another text."""
        first = max(known + 1, run + self.n)
        self.before.extend([_NONE] * (min(first - 1, length) - known))
        piece, last, before = tokens[max(first - self.n, 0) : length], self.last, self.before
        for end, gram in enumerate(zip(*(piece[i:] for i in range(self.n)), strict=False), first + gone):
            key = hash(gram)
            before.append(last.get(key, _NONE))
            last[key] = end

    def forget(self, tokens: Sequence[int], count: int, gone: int) -> None:
        """The first `count` tokens go, and with them every place whose `n` tokens begin there."""
        last = self.last
        piece = tokens[: count + self.n - 1]
        for end, gram in enumerate(zip(*(piece[i:] for i in range(self.n)), strict=False), self.n + gone):
            key = hash(gram)
            if last.get(key) == end:
                del last[key]
        del self.before[:count]

    def ends(self, gram: Sequence[int], gone: int) -> Iterator[int]:
        """Indices, latest first."""
        end = self.last.get(hash(tuple(gram)), _NONE)
        while end > gone:
            yield end - gone
            end = self.before[end - gone - 1]


class SuffixIndex:
    """Of `tokens`, which its owner may only append to. Index up to where they should be found: `follow`."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.known = 0
        self._gone = 0
        self._run = 0
        self._chains = tuple(_Chain(n) for n in GRAMS)

    def follow(self, length: int) -> None:
        """Take in the first `length` tokens; about a microsecond for each that is new."""
        if length > self.known:
            for chain in self._chains:
                chain.extend(self.tokens, self.known, length, self._run, self._gone)
            self.known = length

    def part(self) -> None:
        """What follows is another text."""
        self.tokens.append(BREAK)
        self.follow(len(self.tokens))
        self._run = self.known

    def forget(self, count: int) -> None:
        """The first `count` tokens leave. All must be known."""
        for chain in self._chains:
            chain.forget(self.tokens, count, self._gone)
        del self.tokens[:count]
        self._gone += count
        self.known -= count
        self._run = max(self._run - count, 0)

    def matches(self, recent: Sequence[int], before: int) -> list[Match]:
        """Of the places that end before index `before` those where most of the `recent` tokens end, best first.

        With a match of at least 5 only such ones are looked at, else with one of at least 2; of equal ones the latest
        comes first.
        """
        for chain in self._chains:
            if len(recent) < chain.n:
                continue
            found: list[Match] = []
            whole = 0
            for tried, end in enumerate(chain.ends(recent[-chain.n :], self._gone)):
                if tried > CANDIDATES or whole == ENOUGH:
                    break
                if end < before and (same := _common(self.tokens, end, recent)) >= chain.n:
                    found.append((same, end))
                    whole += same == LONGEST
            if found:
                found.sort(reverse=True)
                return found[:CANDIDATES]
        return []


def _common(tokens: Sequence[int], end: int, recent: Sequence[int]) -> int:
    """How many tokens before `end` are the last ones of `recent`. Most often few; many are compared by slices."""
    same, most = 0, min(end, len(recent))
    while same < most and tokens[end - 1 - same] == recent[-1 - same]:
        same += 1
        if same == GRAMS[0]:
            break
    else:
        return same
    if tokens[end - most : end - same] == recent[len(recent) - most : len(recent) - same]:
        return most
    most -= 1
    while same < most:
        middle = (same + most + 1) // 2
        if tokens[end - middle : end - same] == recent[len(recent) - middle : len(recent) - same]:
            same = middle
        else:
            most = middle - 1
    return same
