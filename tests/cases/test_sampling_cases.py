"""What requests say about sampling, kept to with drafts and without: penalties, bias, lengths, ends, log-probabilities.

A tiny model in float32 over a real engine. Answers are compared whole: without drafts, with drafts that are right, and
with drafts of which some are wrong.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from shared.engine.engine import Engine
from shared.engine.span import Span
from shared.errors import InvalidField
from tests import tiny_models
from tests.one_worker import Answer, OneWorker, knowing

K = 4
LENGTH = 16
PROMPT = [random.Random(5).randrange(3, tiny_models.VOCAB) for _ in range(11)]
GREEDY: dict[str, Any] = {"token_ids": PROMPT, "temperature": 0, "max_tokens": LENGTH}
NEVER = ()


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> OneWorker:
    folder = tiny_models.write(tmp_path_factory.mktemp("llama"), tiny_models.ARCHITECTURES["llama"])
    return OneWorker(Engine.load(folder, block_size=4, kv_blocks=400))


def asked(*fields: dict[str, Any]) -> list[dict[str, Any]]:
    return [{**GREEDY, **f} for f in fields]


def answers(worker: OneWorker, requests: Sequence[dict[str, Any]], eos: tuple[int, ...] = NEVER) -> list[Answer]:
    """Those without drafts, after making sure that drafts change nothing."""
    alone = worker.run(requests, eos=eos)
    truths = [a.tokens for a in alone]
    for wrong in (0.0, 0.3):
        drafted = worker.run(requests, knowing(truths, K, wrong), eos)
        assert [a.said for a in drafted] == [a.said for a in alone]
        assert [len(a.logprobs) for a in drafted] == [len(a.logprobs) for a in alone]
        for answer in drafted:
            rounds = (len(answer.tokens) - 1) // (K + 1)
            assert wrong > 0 or answer.accepted >= rounds * K
            assert rounds < 3 or 0 < answer.accepted < answer.drafted or wrong == 0
    return alone


def text(tokens: Sequence[int]) -> str:
    return "".join(f"{token} " for token in tokens)


STEERED: dict[str, dict[str, Any]] = {
    "frequency": {"frequency_penalty": 1},
    "presence": {"presence_penalty": 1},
    "repetition": {"repetition_penalty": 1.2},
    "rewarded": {"frequency_penalty": -2, "presence_penalty": -2, "repetition_penalty": 0.5},
    "all": {
        "frequency_penalty": 1,
        "presence_penalty": 1,
        "repetition_penalty": 1.2,
        "logit_bias": {str(t): t % 7 - 3 for t in range(100)},
        "min_tokens": 12,
        "stop": "never",
    },
}


@pytest.mark.parametrize("temperature", [0, 0.7, 1.2])
def test_case_44_penalties_and_bias_see_the_same_history(worker: OneWorker, temperature: float) -> None:
    how = {"temperature": temperature, "seed": 7}
    plain, *steered = answers(worker, asked(how, *({**how, **s} for s in STEERED.values())))
    assert all(len(a.tokens) == LENGTH for a in steered)
    if temperature == 0:
        assert all(a.tokens != plain.tokens for a in steered), "one has no effect"


def test_case_44_a_banned_token_is_absent_and_a_forced_one_is_alone(worker: OneWorker) -> None:
    frequent = Counter(worker.run(asked({}), eos=NEVER)[0].tokens).most_common(1)[0][0]
    banned = [{"temperature": t, "seed": 1, "logit_bias": {frequent: -100}} for t in (0, 1.2)]
    *without, forced = answers(worker, asked(*banned, {"logit_bias": {frequent: 100}}))
    assert all(frequent not in a.tokens for a in without)
    assert set(forced.tokens) == {frequent}


@pytest.mark.parametrize("position", range(K + 2))
def test_case_36_eos_inside_a_block_ends_the_answer_there(worker: OneWorker, position: int) -> None:
    requests = asked({"frequency_penalty": 2})
    plain = worker.run(requests, eos=NEVER)[0].tokens
    end = plain.index(plain[position]) + 1
    for drafter in (None, knowing([plain], K)):  # which drafts beyond the end
        (answer,) = worker.run(requests, drafter, eos=(plain[position],))
        assert answer.said == (plain[:end], text(plain[: end - 1]), "stop")


def test_case_37_a_stop_string_and_the_limit_in_one_block(worker: OneWorker) -> None:
    """The stop string is complete with the seventh token."""
    requests = asked({"frequency_penalty": 2})
    plain = worker.run(requests, eos=NEVER)[0].tokens
    limits = range(6, 8 + K)
    stopped = asked(*({**requests[0], "stop": text(plain[5:7]), "max_tokens": limit} for limit in limits))
    expected = [(plain[:6], text(plain[:6]), "length"), *[(plain[:7], text(plain[:5]), "stop")] * (len(limits) - 1)]
    for drafter in (None, knowing([plain] * len(limits), K), knowing([plain] * len(limits), K, 0.3)):
        assert [a.said for a in worker.run(stopped, drafter, eos=NEVER)] == expected


def test_case_38_no_token_too_many(worker: OneWorker) -> None:
    limits = range(1, 2 * K + 2)
    found = answers(worker, asked(*({"max_tokens": n, "presence_penalty": 0.5, "logprobs": True} for n in limits)))
    for limit, answer in zip(limits, found, strict=True):
        assert answer.said == (found[-1].tokens[:limit], text(found[-1].tokens[:limit]), "length")
        assert answer.completion.token_count == len(answer.logprobs) == limit


def test_case_41_logprobs_are_the_models_own_with_drafts_and_without(worker: OneWorker) -> None:
    how: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1.2, "seed": 3},
        {**STEERED["all"], "temperature": 0.7, "seed": 4},
    )
    requests = asked(*({**h, "logprobs": True, "top_logprobs": 5} for h in how))
    truths = [a.tokens for a in worker.run(requests, eos=NEVER)]
    expected = [reference(worker, truth) for truth in truths]
    for drafter in (None, knowing(truths, K), knowing(truths, K, 0.3)):
        found = worker.run(requests, drafter, eos=NEVER)
        assert [a.tokens for a in found] == truths
        for answer, rows in zip(found, expected, strict=True):
            for token, one, row in zip(answer.tokens, answer.logprobs, rows, strict=True):
                assert one.logprob == pytest.approx(row[token].item(), abs=1e-4)
                assert one.top_logprobs == pytest.approx(row.topk(5).values.tolist(), abs=1e-4)
                by_id = dict(zip(one.top_ids, one.top_logprobs, strict=True))
                assert by_id.get(token, one.logprob) == one.logprob
        assert [p.top_ids[0] for p in found[0].logprobs] == truths[0], "greedy tokens are not the likeliest"


def reference(worker: OneWorker, answer: Sequence[int]) -> Any:
    """The model's log-probabilities at the place of each token, computed in one piece."""
    assert isinstance(worker.engine, Engine)
    tokens = (*PROMPT, *answer)
    logits = worker.engine.forward([Span(tokens, 0, tuple(range(40)), len(tokens))])
    return logits[len(PROMPT) - 1 : -1].double().log_softmax(-1)


def test_case_41_who_does_not_ask_is_told_nothing(worker: OneWorker) -> None:
    found = answers(worker, asked({}, {"logprobs": True}, {"logprobs": False}, {"logprobs": True, "top_logprobs": 0}))
    assert [len(a.logprobs) for a in found] == [0, LENGTH, 0, LENGTH]
    assert all(p.top_ids == [] for p in found[1].logprobs)


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_case_45_min_tokens_around_the_natural_end(worker: OneWorker, temperature: float) -> None:
    how = {"temperature": temperature, "seed": 2}
    plain = worker.run(asked(how), eos=NEVER)[0].tokens
    eos = (plain[6], plain[9])
    natural = next(i for i, token in enumerate(plain) if token in eos)
    least = (0, natural, natural + 1, natural + 2, LENGTH - 1, LENGTH)
    found = answers(worker, asked(*({**how, "min_tokens": n} for n in least)), eos)
    for min_tokens, answer in zip(least, found, strict=True):
        assert all(i >= min_tokens for i, token in enumerate(answer.tokens) if token in eos)
        if min_tokens <= natural:
            assert answer.tokens == plain[: natural + 1]
        else:
            assert len(answer.tokens) > natural + 1


def test_case_45_stop_strings_count_after_min_tokens_only(worker: OneWorker) -> None:
    plain = worker.run(asked({}), eos=NEVER)[0].tokens
    stop = text(plain[3:4])
    ends = [i + 1 for i, token in enumerate(plain) if text([token]).endswith(stop)]
    found = answers(worker, asked(*({"stop": stop, "min_tokens": n} for n in range(8))))
    assert [len(a.tokens) for a in found] == [min([e for e in ends if e > n], default=LENGTH) for n in range(8)]


def test_case_46_seeds(worker: OneWorker) -> None:
    how = {"temperature": 1.0, "frequency_penalty": 0.5}
    alone = [worker.run(asked({**how, "seed": 7}), eos=NEVER)[0].tokens for _ in range(2)]
    batch = [a.tokens for a in answers(worker, asked({**how, "seed": 7}, *[how] * 7))]
    assert alone == [batch[0]] * 2
    unseeded = {tuple(tokens) for tokens in batch[1:]}
    assert len(unseeded) == 7
    worker.stamp += 1  # another time in the queue, as after a restart
    assert unseeded.isdisjoint(tuple(a.tokens) for a in worker.run(asked(*[how] * 7), eos=NEVER))


def test_case_43_one_token_of_prompt(worker: OneWorker) -> None:
    how = {"token_ids": [5], "seed": 1, "repetition_penalty": 1.3}
    answers(worker, asked(how, {**how, "temperature": 1}))


def test_case_101_tiny_temperatures_give_the_greedy_text(worker: OneWorker) -> None:
    for steering in ({}, STEERED["all"]):
        temperatures = (0, 1e-320, 1e-9, 1e-6, 1e-5)
        found = worker.run(asked(*({**steering, "temperature": t} for t in temperatures)), eos=NEVER)
        assert [a.said for a in found] == [found[0].said] * len(temperatures)


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"logit_bias": {128: 1}}, "logit_bias.128"),
        ({"logit_bias": {5: 1, 2**31 - 1: 1}}, f"logit_bias.{2**31 - 1}"),
        ({"logit_bias": dict.fromkeys(range(128), -100)}, "logit_bias"),
        ({"logit_bias": {t: -100 for t in range(128) if t != 2}, "min_tokens": 1}, "logit_bias"),
    ],
)
def test_cases_103_and_109_bias_that_the_model_cannot_have(
    worker: OneWorker, fields: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidField) as caught:
        worker.run(asked(fields))
    assert caught.value.field == field
    (good,) = worker.run(asked({"logit_bias": {t: -100 for t in range(128) if t != 2}}))
    assert good.tokens == [2]
