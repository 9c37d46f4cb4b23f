"""What is right about an answer, and what is not. No I/O, no clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from shared.messages import Failed, Finished, Tokens, Usage

WRONG, DUPLICATED, LOST, HUNG = "wrong", "duplicated", "lost", "hung"
FATAL = (LOST, DUPLICATED, HUNG, WRONG)
"""What must never happen."""


@dataclass(frozen=True)
class Expected:
    """An answer that nothing disturbed."""

    prompt_tokens: int
    token_ids: tuple[int, ...]
    text: str
    reason: str
    seed: int
    cut: tuple[str, ...]
    """The text of an answer that is cancelled after 0, 1, 2 … tokens: what was held back then is shown."""


@dataclass(frozen=True)
class Piece:
    """New tokens and text, as a client was given them."""

    index: int
    token_ids: tuple[int, ...]
    text: str


@dataclass
class Heard:
    """All that a client heard of one request."""

    pieces: list[Piece] = field(default_factory=list)
    reason: str | None = None
    seed: int | None = None
    usage: Usage = field(default_factory=Usage)
    cancelled: bool = False
    """The client has asked for an end."""
    attempts: int = 1
    """Workers that have tried."""

    @property
    def token_ids(self) -> list[int]:
        return [token for piece in self.pieces for token in piece.token_ids]

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True)
class Problem:
    """One of `FATAL`, and what exactly."""

    kind: str
    what: str


def judge(expected: Expected, heard: Heard) -> list[Problem]:
    """Of an answer that has come to its end."""
    return [*_sequence(heard), *_content(expected, heard), *_usage(expected, heard)]


def _sequence(heard: Heard) -> list[Problem]:
    count = 0
    for piece in heard.pieces:
        if piece.index != count:
            kind = DUPLICATED if piece.index < count else LOST
            return [Problem(kind, f"token {piece.index} where {count} was due")]
        count += len(piece.token_ids)
    return []


def _content(expected: Expected, heard: Heard) -> list[Problem]:
    tokens, text = tuple(heard.token_ids), heard.text
    if heard.reason == "cancelled" and heard.cancelled:
        if tokens != expected.token_ids[: len(tokens)]:
            return [Problem(WRONG, f"cancelled after {_first_difference(expected.token_ids, tokens)}")]
        right = expected.cut[len(tokens)]
        # What a dead worker held back went with it, if the event stream went too.
        known = text == right or (heard.attempts > 1 and right.startswith(text))
        return [] if known else [Problem(WRONG, f"text {text!r} for {right!r}, cancelled")]
    if tokens != expected.token_ids:
        short = len(tokens) < len(expected.token_ids) and tokens == expected.token_ids[: len(tokens)]
        return [Problem(LOST if short else WRONG, _first_difference(expected.token_ids, tokens))]
    if text != expected.text:
        return [Problem(WRONG, f"text {text!r} for {expected.text!r}")]
    if heard.reason != expected.reason:
        return [Problem(WRONG, f"reason {heard.reason} for {expected.reason}")]
    return [] if heard.seed == expected.seed else [Problem(WRONG, f"seed {heard.seed} for {expected.seed}")]


def _usage(expected: Expected, heard: Heard) -> list[Problem]:
    usage, said = heard.usage, len(heard.token_ids)
    right = (
        usage.completion_tokens == said
        and usage.prompt_tokens == expected.prompt_tokens
        and 0 <= usage.cached_tokens <= usage.prompt_tokens
        and 0 <= usage.accepted_tokens <= usage.drafted_tokens
    )
    return [] if right else [Problem(WRONG, f"{usage!r} for {said} tokens after {expected.prompt_tokens}")]


def _first_difference(expected: Sequence[int], tokens: Sequence[int]) -> str:
    same = next((n for n, (a, b) in enumerate(zip(expected, tokens, strict=False)) if a != b), None)
    same = min(len(expected), len(tokens)) if same is None else same
    return f"token {same}: {list(tokens[same : same + 3])} of {len(tokens)} for {list(expected[same : same + 3])}"


def judge_stored(expected: Expected, events: Sequence[Tokens | Finished | Failed]) -> list[Problem]:
    """What the event stream has of a request that has ended; nothing, if the server lost it since.

    Whoever wrote them: one unbroken sequence from token 0 to one last event.
    """
    count = 0
    said: list[int] = []
    for place, event in enumerate(events):
        if not isinstance(event, Tokens):
            after = len(events) - place - 1
            return [Problem(DUPLICATED, f"{after} events after the last one")] if after else _ending(expected, said)
        if event.index != count:
            kind = DUPLICATED if event.index < count else LOST
            return [Problem(kind, f"stored: token {event.index} where {count} was due")]
        count += len(event.token_ids)
        said += event.token_ids
    return [Problem(LOST, f"stored: no end after {count} tokens")] if events else []


def _ending(expected: Expected, said: list[int]) -> list[Problem]:
    if tuple(said) == expected.token_ids[: len(said)]:
        return []
    return [Problem(WRONG, f"stored: {_first_difference(expected.token_ids, said)}")]
