"""Which tokens a form lets through, place by place, and what it makes of drafts."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from shared.errors import InvalidField
from shared.messages import Guided
from shared.sampling import grammar
from shared.sampling.grammar import GrammarGuide, Vocabulary, guided_of, try_out
from shared.sampling.guide import Guide, Masks
from tests.letters import EOS, TABLE, ids, text
from tests.tiny_models import VOCAB

LETTERS = Vocabulary(TABLE, VOCAB, {EOS})
PERSON = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
}


def guide(banned: tuple[int, ...] = (), min_tokens: int = 0, vocabulary: Vocabulary = LETTERS, **form: Any) -> Guide:
    guided = Guided(**form)
    made = vocabulary.compile(guided_of(guided.canonical))
    return GrammarGuide(made, vocabulary, guided, banned=banned, min_tokens=min_tokens)


def may(mask: Masks) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())


def chars(mask: Masks) -> set[str]:
    return {"EOS" if token == EOS else TABLE[token].decode() for token in may(mask)}


def test_masks_of_a_choice_down_to_its_end() -> None:
    one = guide(choice=["yes", "yet", "no"])
    assert chars(one.masks([])[0]) == {"y", "n"} and not one.ended
    assert one.take(ids("ye")) == 2
    assert chars(one.masks([])[0]) == {"s", "t"}
    assert one.take(ids("s!")) == 1 and one.ended  # what comes after the end is no part of it


def test_masks_after_drafts_are_those_of_a_guide_that_took_them() -> None:
    said = ids('{"n": 42, "ok": false}')
    whole, ahead = guide(json_schema=PERSON), guide(json_schema=PERSON)
    for begin in range(0, len(said), 5):
        drafts = said[begin : begin + 5]
        masks = ahead.masks(drafts)
        assert len(masks) == 1 + len(drafts)
        for draft, mask in zip(drafts, masks, strict=False):
            assert may(mask) == may(whole.masks([])[0])
            whole.take([draft])
        assert ahead.take(drafts) == len(drafts)
    assert whole.ended and ahead.ended


@pytest.mark.parametrize(
    ("drafts", "kept"),
    [("yes", 3), ("yex", 2), ("x", 0), ("", 0), ("noes", 2), ("yes\x02no", 3)],
)
def test_drafts_are_cut_at_the_first_that_is_refused_and_nothing_has_changed(drafts: str, kept: int) -> None:
    one = guide(choice=["yes", "yet", "no"])
    before = may(one.masks([])[0])
    assert len(one.masks(ids(drafts))) == 1 + kept
    assert may(one.masks([])[0]) == before and not one.ended
    assert one.take(ids("no")) == 2 and one.ended


def test_an_eos_where_the_answer_may_end() -> None:
    one = guide(regex="ab+")
    assert EOS not in may(one.masks([])[0])
    assert one.take(ids("ab")) == 2 and not one.ended
    assert chars(one.masks([])[0]) == {"b", "EOS"}
    assert len(one.masks([ord("b"), EOS, ord("b")])) == 3  # nothing is checked after an EOS
    assert one.take([EOS, ord("b")]) == 1 and one.ended


def test_min_tokens_hold_the_eos_off_but_not_the_end() -> None:
    one = guide(regex="ab*", min_tokens=3)
    one.take(ids("a"))
    masks = one.masks(ids("bb"))
    assert [EOS in may(mask) for mask in masks] == [False, False, True]
    short = guide(choice=["ab"], min_tokens=9)
    assert short.take(ids("ab")) == 2 and short.ended


def test_case_109_what_is_banned_leaves_nothing() -> None:
    """Case 109: an error that names the form; as a draft it is just cut."""
    one = guide(banned=(ord("b"),), regex="a[bc]b")
    assert chars(one.masks(ids("ac"))[1]) == {"c"} and len(one.masks(ids("ac"))) == 2  # after "c" there is nothing
    one.take(ids("ac"))
    with pytest.raises(InvalidField, match="no token may follow") as caught:
        one.masks([])
    assert caught.value.field == "guided.regex"


def test_a_token_that_may_not_come_is_an_error() -> None:
    with pytest.raises(InvalidField, match="not of that form"):
        guide(choice=["a"]).take(ids("b"))


def test_a_model_without_eos_or_with_padded_logits() -> None:
    padded = Vocabulary(TABLE, VOCAB + 40, {EOS, VOCAB + 39, VOCAB + 100})
    one = guide(vocabulary=padded, regex="a*")
    assert may(one.masks([])[0]) == {ord("a"), EOS, VOCAB + 39}
    endless = guide(vocabulary=Vocabulary(TABLE[:100], 100, ()), regex="ab")
    assert endless.take(ids("ab")) == 2 and endless.ended


def test_forms_of_json() -> None:
    spaces = guide(json_object=True)
    spaces.take(ids("{" + " " * grammar.MAX_WHITESPACE))
    assert " " not in chars(spaces.masks([])[0])  # an answer is not filled with them
    assert "\t" not in chars(guide(json_object=True).masks(ids("{"))[1])  # nor any other control character
    bounded = guide(json_schema={"type": "string", "maxLength": 3})
    assert all(char >= " " for char in chars(bounded.masks(ids('"'))[1]))
    tags = guide(
        tags={"triggers": ["<t>"], "tags": [{"begin": "<t>", "json_schema": PERSON, "end": "</t>"}], "single": True}
    )
    tags.take(ids("free text <t"))
    assert tags.take(ids('>{"n":1,"ok":true}</t>')) == 22 and tags.ended
    assert guide(grammar='root ::= "a" | root "a"').take(ids("aaaa")) == 4


def follow(one: Guide, tokens: int) -> None:
    for _ in range(tokens):
        one.masks([])
        one.take(ids("a"))


@pytest.mark.parametrize(
    "form", [{"regex": "((a{1,99}){1,99}){1,99}"}, {"grammar": 'root ::= s\ns ::= s s s | s s | "a" | "b"'}]
)
def test_a_form_that_costs_too_much_ends(monkeypatch: pytest.MonkeyPatch, form: dict[str, Any]) -> None:
    monkeypatch.setattr(grammar, "BURST_S", 0.02)
    monkeypatch.setattr(grammar, "TOKEN_S", 0.0005)
    follow(guide(regex="a*"), 300)
    with pytest.raises(InvalidField, match="too ambiguous"):
        follow(guide(**form), 300)


def test_what_is_tried_out() -> None:
    sound, empty = Guided(json_schema=PERSON), Guided(grammar="root ::= root")
    try_out(LETTERS.compile(sound), LETTERS, sound)
    with pytest.raises(InvalidField, match="no token may follow"):
        try_out(LETTERS.compile(empty), LETTERS, empty)


def test_letters() -> None:
    assert text(ids('{"n": 1}')) == '{"n": 1}' and json.loads(text([3, ord("n"), 4, 5, ord("}")])) == {"n": True}
