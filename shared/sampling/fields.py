"""What requests and events say about sampling: part of the messages, and what samplers go by. No torch."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, model_validator

MAX_BIASES = 1024
BAN = -100.0
"""The lowest bias: such a token is never chosen."""
MAX_TOP_LOGPROBS = 20
MIN_LOGPROB = -9999.0
"""In place of anything lower, minus infinity included: JSON has no word for that."""

TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]
TokenIds = list[TokenId]
_DIGITS = re.compile("0|-?[1-9][0-9]{0,11}", re.ASCII)


def _integer_keys(value: object) -> object:
    """The keys of maps in JSON and msgpack are strings."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_BIASES:
        raise ValueError(f"at most {MAX_BIASES} token ids")
    return {_integer(key): bias for key, bias in value.items()}


def _integer(key: object) -> object:
    if not isinstance(key, str):
        return key
    if not _DIGITS.fullmatch(key):
        raise ValueError(f"{key!r:.20} is not a token id")
    return int(key)


def _string_keys(value: dict[int, float]) -> dict[str, float]:
    return {str(token): bias for token, bias in value.items()}


LogitBias = Annotated[
    dict[TokenId, Annotated[float, Field(ge=BAN, le=100, allow_inf_nan=False)]],
    BeforeValidator(_integer_keys),
    PlainSerializer(_string_keys),
]
Penalty = Annotated[float, Field(ge=-2, le=2, allow_inf_nan=False)]
LogProbability = Annotated[float, Field(ge=MIN_LOGPROB, le=0, allow_inf_nan=False)]


class Sampling(BaseModel):
    """How tokens are chosen: by bias and penalties, temperature, filters, in this order.

    At temperature 0 the most likely token is taken; seed and filters have no effect then.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """Drawn once and returned with the answer when unset."""
    logit_bias: LogitBias = {}
    """By token id: added to its logit before anything else. `BAN` makes it impossible."""
    repetition_penalty: Annotated[float, Field(gt=0, le=10, allow_inf_nan=False)] = 1.0
    """Divides the positive logits, and multiplies the negative ones, of tokens in the prompt or generated before."""
    frequency_penalty: Penalty = 0.0
    """Subtracted from a token's logit as often as it was generated before."""
    presence_penalty: Penalty = 0.0
    """Subtracted once from the logits of all tokens generated before."""
    min_tokens: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """The first so many tokens do not end the answer: none of them is EOS, and no stop string counts."""


class Logprob(BaseModel):
    """Of one generated token: natural logarithms of the model's own probabilities, none below `MIN_LOGPROB`.

    That is the softmax of its logits, before bias, penalties, temperature and filters.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    logprob: LogProbability
    top_ids: Annotated[TokenIds, Field(max_length=MAX_TOP_LOGPROBS)] = []
    """The most likely tokens in its place, likeliest first. It may be among them."""
    top_logprobs: Annotated[list[LogProbability], Field(max_length=MAX_TOP_LOGPROBS)] = []
    """Theirs."""

    @model_validator(mode="after")
    def _one_each(self) -> Logprob:
        if len(self.top_ids) != len(self.top_logprobs):
            raise ValueError("not as many top_logprobs as top_ids")
        return self
