"""Answers in a form: with drafts and without, in a batch and alone, and where bias leaves nothing of it."""

from __future__ import annotations

import json
from collections.abc import Collection
from functools import cache
from typing import Any

import pytest
import xgrammar

from shared.engine.engine import Engine
from shared.errors import InvalidField
from shared.messages import Guided
from shared.sampling.grammar import GrammarGuide, Vocabulary, guided_of
from shared.sampling.guide import Guide
from tests import tiny_models
from tests.letters import EOS, TABLE, Letters, ids, text
from tests.one_worker import Answer, OneWorker, knowing

VOCABULARY = Vocabulary(TABLE, tiny_models.VOCAB, {EOS})
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "n": {"type": "integer", "minimum": 0, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "n", "tags"],
}


@cache
def compiled(canonical: str) -> xgrammar.CompiledGrammar:
    return VOCABULARY.compile(guided_of(canonical))


def guide(guided: Guided, banned: Collection[int]) -> Guide:
    return GrammarGuide(compiled(guided.canonical), VOCABULARY, guided, banned=banned)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tiny_models.write(tmp_path_factory.mktemp("llama"), tiny_models.ARCHITECTURES["llama"])
    return Engine.load(folder, block_size=4, kv_blocks=256)


def request(number: int, temperature: float, **more: Any) -> dict[str, Any]:
    prompt = ids(f"request {number}")
    return {"token_ids": prompt, "temperature": temperature, "seed": number, "max_tokens": 120, **more}


def requests(temperature: float) -> list[dict[str, Any]]:
    """Forms of several kinds, and neighbours without one."""
    forms: list[dict[str, Any] | None] = [
        {"json_schema": SCHEMA},
        None,
        {"regex": "[a-z]{3}-[0-9]{2,4}"},
        {"choice": ["yes", "no", "perhaps"]},
        None,
        {"json_schema": SCHEMA},
    ]
    return [
        request(n, temperature, **({"guided": form} if form else {"max_tokens": 20})) for n, form in enumerate(forms)
    ]


def check(answer: Answer) -> None:
    said = json.loads(answer.completion.text)
    assert list(said) == ["name", "n", "tags"] and 0 <= said["n"] <= 999 and len(said["name"]) <= 5
    assert set(said["tags"]) <= {"red", "blue"} and answer.finished == "stop"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_case_48_drafts_and_neighbours_change_nothing(engine: Engine, temperature: float) -> None:
    """Case 48: forms and drafts. Also drafts that run beyond the end, and those that the form refuses."""
    worker = OneWorker(engine, guide, Letters())
    asked = requests(temperature)
    plain = worker.run(asked)
    for answer in (plain[0], plain[5]):
        check(answer)
    truths = [answer.tokens for answer in plain]
    right = (knowing(truths, 4), knowing(truths, 5, wrong=0.3))
    for drafter in (*right, lambda _: ids('{"na')):
        drafted = worker.run(asked, drafter)
        assert [a.said for a in drafted] == [a.said for a in plain]
        assert sum(a.accepted for a in drafted) > 20 or drafter not in right
    for number in (0, 2):
        assert worker.run([asked[number]])[0].said == plain[number].said  # alone
    unguided = worker.run([{**fields, "guided": None} for fields in asked])
    assert [unguided[n].tokens for n in (1, 4)] == [truths[n] for n in (1, 4)]


def test_case_109_a_form_and_a_bias_that_leave_nothing(engine: Engine) -> None:
    """Case 109: an error for that request only, with the tokens up to there; its neighbours' answers are as ever."""
    worker = OneWorker(engine, guide, Letters())
    asked = requests(1.0)
    gold = worker.run(asked)
    bans = {str(token): -100.0 for token in ids("7")}
    dead = request(9, 1.0, guided={"regex": "ab7c"}, logit_bias=bans)
    for drafter in (None, knowing([*(a.tokens for a in gold), ids("ab7c")], 4)):
        *others, hopeless = worker.run([*asked, dead], drafter)
        assert isinstance(hopeless.error, InvalidField) and hopeless.error.field == "guided.regex"
        assert text(hopeless.tokens) == "ab"
        assert [a.said for a in others] == [a.said for a in gold]


def test_what_else_chooses_tokens_chooses_within_the_form(engine: Engine) -> None:
    """Penalties, bias, minimum length, stop strings, log-probabilities."""
    worker = OneWorker(engine, guide, Letters())
    form = {"guided": {"regex": "[ab]{2,40}"}, "max_tokens": 60}
    biased, held, stopped, plain = worker.run(
        [
            request(0, 0.0, logit_bias={str(ord("a")): 100.0, str(EOS): -90.0}, **form),
            request(1, 1.0, min_tokens=30, **form),
            request(2, 1.0, stop=["bb"], logit_bias={str(ord("b")): 100.0, str(ord("a")): -100.0}, **form),
            request(3, 1.0, logprobs=True, top_logprobs=2, frequency_penalty=2.0, repetition_penalty=1.5, **form),
        ]
    )
    assert biased.said == (ids("a" * 40), "a" * 40, "stop")  # an EOS was unlikely, and then there was no more
    assert len(held.tokens) >= 30 and set(held.tokens) <= {*ids("ab"), EOS}
    assert stopped.said == (ids("bb"), "", "stop")
    own = worker.run([request(3, 1.0, logprobs=True, top_logprobs=2, max_tokens=1)])[0]
    assert plain.logprobs[0].top_ids == own.logprobs[0].top_ids  # the model's own, not those of the form
    short = worker.run([request(4, 1.0, guided={"choice": ["abc"]}, max_tokens=3)])[0]
    assert short.said == (ids("abc"), "abc", "stop")  # the form ends the answer, not the length
    cut = worker.run([request(4, 1.0, guided={"choice": ["abc"]}, max_tokens=2)])[0]
    assert cut.said == (ids("ab"), "ab", "length")
