"""Chats that are changed from turn to turn, and what of a turn's prompt can be in the cache before it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
OPERATIONS = ("append", "edit", "insert", "drop")


class Conversation(Generic[T]):
    """Messages as (role, content), the first one the system's. `say` makes the content of a message of its role."""

    def __init__(self, say: Callable[[str], T], rng: random.Random) -> None:
        self._say = say
        self._rng = rng
        self.messages: list[tuple[str, T]] = [("system", say("system"))]

    def change(self, operation: str) -> None:
        """Edit an earlier message of the user, insert a message or drop one; then the user's next one."""
        messages, anywhere = self.messages, range(1, len(self.messages))
        if operation == "edit" and (said := [i for i in anywhere if messages[i][0] == "user"]):
            messages[self._rng.choice(said)] = ("user", self._say("user"))
        elif operation == "insert":
            messages.insert(self._rng.randint(1, len(messages)), ("user", self._say("user")))
        elif operation == "drop" and anywhere:
            del messages[self._rng.choice(anywhere)]
        messages.append(("user", self._say("user")))

    def answered(self, content: T) -> None:
        self.messages.append(("assistant", content))


def turns(count: int, rng: random.Random) -> list[str]:
    """Operations of so many turns: to begin with an append, then each kind again and again in any order."""
    found = ["append"]
    while len(found) < count:
        found += rng.sample(OPERATIONS, len(OPERATIONS))
    return found[:count]


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix."""
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length


def reusable(prompt: Sequence[int], computed: Iterable[Sequence[int]], block_size: int) -> int:
    """Tokens of the prompt that are in full blocks of what was computed before. Its last token never is: its logits
    are wanted.
    """
    longest = max((common(prompt, tokens) for tokens in computed), default=0)
    return min(longest, len(prompt) - 1) // block_size * block_size
