"""What the chaos suite takes for right: also of an answer that is cancelled at its very end."""

from __future__ import annotations

from typing import Any, cast

from shared.tokenizer import Tokenizer
from tests.chaos.answers import case_of
from tests.letters import EOS, Letters, ids, text


class Readable(Letters):
    def decode(self, tokens: list[int]) -> str:
        return text(tokens)


def cut_texts(said: str, **question: Any) -> tuple[str, ...]:
    asked = {"token_ids": [65], "max_tokens": 20, "seed": 1, **question}
    return case_of(asked, [*ids(said), EOS], frozenset({EOS}), cast("Tokenizer", Readable())).expected.cut


def test_who_cancels_is_shown_what_was_held_back() -> None:
    assert cut_texts("ab.", stop=".!") == ("", "a", "ab", "ab.", "ab.")


def test_a_stop_string_that_is_complete_is_no_part_of_the_answer_whoever_ends_it() -> None:
    assert cut_texts("ab.!cd", stop=".!") == ("", "a", "ab", "ab.", "ab")
