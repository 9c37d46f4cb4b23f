"""Turns of a conversation as token ids, in the target's own chat format. No torch."""

from __future__ import annotations

from typing import Protocol

from shared.errors import ModelError
from shared.messages import ChatMessage
from shared.tokenizer import Tokenizer
from training.drafter.prompts import Prompt


class Dialogue(Protocol):
    def opening(self, prompt: Prompt) -> list[int]:
        """All that stands before the first answer."""
        ...

    def follow_up(self, turn: str) -> list[int]:
        """What stands between the text of one answer and the next answer, with the user's `turn` in it."""
        ...


class ChatDialogue:
    """By the target's chat template."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._head = tokenizer.chat([ChatMessage(role="user", content="a")])

    def opening(self, prompt: Prompt) -> list[int]:
        system = [ChatMessage(role="system", content=prompt.system)] if prompt.system else []
        return self._tokenizer.chat([*system, ChatMessage(role="user", content=prompt.turns[0])])

    def follow_up(self, turn: str) -> list[int]:
        """Raises ModelError for a template that writes earlier turns differently once there are later ones."""
        messages = [ChatMessage(role="user", content="a"), ChatMessage(role="assistant", content="")]
        whole = self._tokenizer.chat([*messages, ChatMessage(role="user", content=turn)])
        if whole[: len(self._head)] != self._head:
            raise ModelError("the chat template rewrites earlier turns: conversations cannot go on token by token")
        return whole[len(self._head) :]
