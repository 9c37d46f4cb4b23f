"""Log-probabilities of chosen tokens, and how they travel."""

from __future__ import annotations

import json
import math

import pytest
import torch
from pydantic import ValidationError

from shared.codec import Format, decode_event, encode
from shared.errors import InvalidField
from shared.messages import Tokens
from shared.sampling.fields import MAX_TOP_LOGPROBS, MIN_LOGPROB, Logprob
from shared.sampling.logprobs import logprobs


def test_they_are_the_log_softmax() -> None:
    logits = torch.randn(5, 500, generator=torch.Generator().manual_seed(2)) * 4
    tokens = [3, 499, 0, 7, 77]
    tops = [None, 0, 1, 20, None]
    found = logprobs(logits, tokens, tops)
    assert [f is None for f in found] == [top is None for top in tops]
    for row, token, top, one in zip(logits.double().log_softmax(-1), tokens, tops, found, strict=True):
        if one is None or top is None:
            continue
        assert one.logprob == pytest.approx(row[token].item(), abs=2e-6)
        assert one.top_ids == row.topk(top).indices.tolist()
        assert one.top_logprobs == pytest.approx(row.topk(top).values.tolist(), abs=2e-6)


def test_more_are_asked_for_than_there_are() -> None:
    (one,) = logprobs(torch.zeros(1, 3), [1], [20])
    assert one is not None
    assert len(one.top_ids) == 3 and one.logprob == pytest.approx(-math.log(3), abs=1e-6)


def test_what_json_cannot_say_is_a_least_number() -> None:
    logits = torch.full((1, 4), -math.inf)
    logits[0, 1], logits[0, 2] = 3e38, -3e38
    found = logprobs(logits, [0], [4])[0]
    assert found is not None
    assert found.logprob == MIN_LOGPROB
    assert found.top_logprobs == [0.0, MIN_LOGPROB, MIN_LOGPROB, MIN_LOGPROB]
    event = Tokens(id="r", index=0, token_ids=[0], logprobs=[found])
    assert "Infinity" not in encode(event, Format.JSON).decode()
    assert decode_event(encode(event, Format.JSON)) == decode_event(encode(event)) == event


GOOD = {"logprob": -0.5, "top_ids": [1], "top_logprobs": [-0.5]}


@pytest.mark.parametrize(
    "logprobs",
    [
        [],
        [GOOD],
        [GOOD] * 3,
        [GOOD, {**GOOD, "logprob": 0.5}],
        [GOOD, {**GOOD, "logprob": float("nan")}],
        [GOOD, {**GOOD, "logprob": -1e5}],
        [GOOD, {**GOOD, "logprob": None}],
        [GOOD, {**GOOD, "top_ids": [1, 2]}],
        [GOOD, {**GOOD, "top_ids": [-1]}],
        [GOOD, {**GOOD, "top_ids": [1] * 21, "top_logprobs": [-0.5] * 21}],
    ],
)
def test_events_with_others_are_refused(logprobs: list[dict[str, object]]) -> None:
    body = {"v": 1, "type": "tokens", "id": "r", "index": 0, "token_ids": [1, 2], "logprobs": logprobs}
    with pytest.raises(InvalidField):
        decode_event(json.dumps(body).encode())


def test_an_event_says_one_for_each_token_or_none() -> None:
    assert "logprobs" not in json.loads(encode(Tokens(id="r", index=0, token_ids=[1]), Format.JSON))
    with pytest.raises(ValidationError):
        Tokens(id="r", index=0, token_ids=[1, 2], logprobs=[Logprob(logprob=-1.0)])


@pytest.mark.parametrize("format", list(Format))
def test_the_largest_event_fits_a_message(format: Format) -> None:
    from services.decode.events import MAX_EVENT_LOGPROBS, MAX_EVENT_TOKENS

    many = list(range(2**31 - MAX_TOP_LOGPROBS, 2**31))
    one = Logprob(logprob=-12.345678, top_ids=many, top_logprobs=[-12.345678] * MAX_TOP_LOGPROBS)
    count = MAX_EVENT_LOGPROBS
    event = Tokens(id="r" * 128, index=0, token_ids=[2**31 - 1] * count, text="é" * 8 * count, logprobs=[one] * count)
    assert len(encode(event, format)) < 500_000
    assert count < MAX_EVENT_TOKENS
