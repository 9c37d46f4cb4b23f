"""From places where the last tokens occurred before to the tokens that are likely to follow now.

As in SuffixDecoding (Oliaro et al. 2024): the continuations of all matches of at least some length are one tree, whose
branches are weighted by how many of them go there; of the paths for several lengths the one counts that promises the
most accepted tokens, the sum of the products of the chances along it. A chance is how often guesses of its kind came
true so far; so the draft is as long as the match is good.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.drafter.sources.suffix_index import BREAK, LONGEST, Match

BUCKETS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, LONGEST)  # match lengths from which on a bucket begins
SUPPORTS = 4  # one place says so; all of several; most; the largest part
KINDS = len(BUCKETS) * SUPPORTS
_BUCKET = [max(sum(b <= length for b in BUCKETS) - 1, 0) for length in range(LONGEST + 1)]
_LENGTH_PRIORS = (0.25, 0.45, 0.55, 0.65, 0.7, 0.75, 0.8, 0.85, 0.88, 0.9, 0.92)  # as measured on answers of SmolLM2
_SUPPORT_PRIORS = (0.95, 1.05, 0.55, 0.25)
PRIORS = tuple(of_length * of_support for of_length in _LENGTH_PRIORS for of_support in _SUPPORT_PRIORS)


@dataclass(frozen=True, slots=True)
class Continuation:
    token_ids: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()
    expected: float = 0.0
    """Tokens that are expected to be accepted."""


@dataclass(frozen=True, slots=True)
class Text:
    """Where matches were found: the first `length` of `tokens`. With `loops` its end is where the draft goes on."""

    tokens: Sequence[int]
    length: int
    loops: bool

    def at(self, index: int, drafts: Sequence[int]) -> int:
        if index < self.length:
            return self.tokens[index]
        return drafts[index - self.length] if self.loops else BREAK


def kind_of(match: int, votes: int, voters: int) -> int:
    """Of a token that `votes` of `voters` places of a match of at least `match` tokens have next."""
    support = (0 if voters == 1 else 1) if votes == voters else (2 if 2 * votes >= voters else 3)
    return _BUCKET[min(match, LONGEST)] * SUPPORTS + support


def continuation(
    text: Text, matches: Sequence[Match], k: int, chance: Callable[[int], float], least: float
) -> Continuation:
    """The best path of at most `k` tokens; `matches` the longest first, `chance` of a kind.

    It ends before a token that is reached and right with less chance than `least`.
    """
    best = Continuation()
    for same, count in _levels(matches):
        path = _path(text, matches[:count], same, k, chance, least)
        if path.expected > best.expected:
            best = path
    return best


def _levels(matches: Sequence[Match]) -> list[tuple[int, int]]:
    """Least lengths to try, each half the one before, and how many matches are so long."""
    levels: list[tuple[int, int]] = []
    least = matches[0][0] if matches else 0
    while least and (not levels or levels[-1][1] < len(matches)):
        count = sum(same >= least for same, _ in matches)
        if not levels or count > levels[-1][1]:
            levels.append((least, count))
        least //= 2
    return levels


def _path(
    text: Text, matches: Sequence[Match], same: int, k: int, chance: Callable[[int], float], least: float
) -> Continuation:
    """At each step the token that most of the places have next that agree so far. All match in `same` tokens."""
    places = [end for _, end in matches]
    drafts: list[int] = []
    kinds: list[int] = []
    through, expected = 1.0, 0.0
    for depth in range(k):
        votes: dict[int, list[int]] = {}
        for end in places:
            votes.setdefault(text.at(end + depth, drafts), []).append(end)
        votes.pop(BREAK, None)
        if not votes:
            break
        token, agreeing = max(votes.items(), key=lambda vote: len(vote[1]))  # of equal ones that of the best match
        kind = kind_of(same + depth, len(agreeing), sum(map(len, votes.values())))
        through *= chance(kind)
        if through < least:
            break
        drafts.append(token)
        kinds.append(kind)
        expected += through
        places = agreeing
    return Continuation(tuple(drafts), tuple(kinds), expected)
