"""When an answer ends, and which of its text may be shown so far. Pure; no torch.

Text is held back while it could still turn out not to belong to the answer: an unfinished UTF-8 character, or a tail
that is the beginning of a stop string. Everything depends on the token ids alone, so feeding a new `Completion` the
tokens of an interrupted one brings it to the same state through the same deltas.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

Reason = Literal["stop", "length"]


class Detokenizer(Protocol):
    """Token ids in, text out: one sequence, in order."""

    def push(self, token_id: int) -> str:
        """The text that is complete with this token; empty while a character is unfinished."""

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character."""


@dataclass(frozen=True, slots=True)
class Delta:
    """What one token adds to the visible text, and why the answer ends with it, if it does."""

    text: str
    finished: Reason | None = None


class StopMatcher:
    """Finds one stop string in text that arrives character by character (Knuth, Morris and Pratt 1977)."""

    __slots__ = ("_fallback", "matched", "stop")

    def __init__(self, stop: str) -> None:
        if not stop:
            raise ValueError("an empty stop string matches everywhere")
        self.stop = stop
        self._fallback = self._borders(stop)
        self.matched = 0
        """Length of the longest tail of the text so far that is a beginning of the stop string."""

    @staticmethod
    def _borders(stop: str) -> list[int]:
        """For each n: the longest proper beginning of stop[:n] that is also its end."""
        borders = [0, 0]
        for char in stop[1:]:
            n = borders[-1]
            while n and stop[n] != char:
                n = borders[n]
            borders.append(n + (stop[n] == char))
        return borders

    def advance(self, char: str) -> bool:
        """Take the next character; True when the stop string ends with it."""
        while self.matched and self.stop[self.matched] != char:
            self.matched = self._fallback[self.matched]
        self.matched += self.stop[self.matched] == char
        if self.matched < len(self.stop):
            return False
        self.matched = self._fallback[self.matched]  # of the next one, should this one not count
        return True


class Completion:
    """One answer from its first token to its last.

    It ends with the first of: an EOS token; the first character at which some stop string is complete, the text being
    cut before that string (before the longest, if several end there); the `max_tokens`-th token. A stop wins over the
    length when one token brings both. EOS tokens count as tokens and show no text. A stop string that the first
    `min_tokens` tokens complete is ordinary text; that they are no EOS is the sampler's business.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        eos_ids: Collection[int],
        stops: Sequence[str],
        max_tokens: int,
        min_tokens: int = 0,
    ) -> None:
        """Raises ValueError for an empty stop string or less than one token."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; an answer has at least one token")
        self._detokenizer = detokenizer
        self._eos_ids = frozenset(eos_ids)
        self._matchers = [StopMatcher(stop) for stop in stops]
        self._max_tokens = max_tokens
        self._min_tokens = min_tokens
        self._held = ""
        self._shown: list[str] = []
        self._ended = False
        self.token_count = 0
        self.finished: Reason | None = None

    @property
    def text(self) -> str:
        """All visible text so far: the deltas joined."""
        return "".join(self._shown)

    def push(self, token_id: int) -> Delta:
        """Take the next token. Raises ValueError when the answer has ended: such a token is not part of it."""
        if self._ended:
            raise ValueError("the answer has ended")
        self.token_count += 1
        if token_id in self._eos_ids:
            return self._end("stop")
        text, stopped = self._scan(self._detokenizer.push(token_id))
        if stopped:
            self._ended, self.finished = True, "stop"
        elif self.token_count == self._max_tokens:
            return self._end("length", text)
        return self._show(text)

    def flush(self) -> str:
        """Release what is held back when the answer is ended from outside (cancelled, out of time).

        No token is taken after that, and `finished` stays None: the reason is the caller's. Empty if it had ended.
        """
        return "" if self._ended else self._end(None).text

    def _end(self, reason: Reason | None, text: str = "") -> Delta:
        rest, stopped = self._scan(self._detokenizer.flush())
        self._ended, self.finished = True, "stop" if stopped else reason
        if not stopped:
            rest, self._held = rest + self._held, ""
        return self._show(text + rest)

    def _show(self, text: str) -> Delta:
        if text:
            self._shown.append(text)
        return Delta(text, self.finished)

    def _scan(self, text: str) -> tuple[str, bool]:
        """(what may be shown of the held-back and the new text, whether a stop string is complete)."""
        if not self._matchers:
            return text, False
        pending = self._held + text
        for end, char in enumerate(text, start=len(self._held) + 1):
            cut = max((len(m.stop) for m in self._matchers if m.advance(char)), default=0)
            if cut and self.token_count > self._min_tokens:
                self._held = ""
                return pending[: end - cut], True
        keep = len(pending) - max((m.matched for m in self._matchers), default=0)
        self._held = pending[keep:]
        return pending[:keep], False
