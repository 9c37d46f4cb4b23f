"""Answers in OpenAI's shapes, whole and in chunks. Pure.

A chunk of an answer and the whole one are objects with the same id, time and model; `logprobs` are there when they
were asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.gateway.requests import Kind
from services.gateway.sse import Position
from services.gateway.token_texts import TokenTexts
from services.gateway.tool_stream import ToolStream, message_of
from shared.messages import Usage
from shared.sampling.fields import Logprob
from trine.completion import Completion
from trine.merge import Delta


@dataclass(slots=True)
class Shape:
    """Of one HTTP answer. `include_usage`: chunks say that their usage is null, as OpenAI's do. `tools`: names of those
    that may be called.
    """

    kind: Kind
    id: str
    created: int
    model: str
    texts: TokenTexts
    include_usage: bool = False
    tools: tuple[str, ...] = ()

    def begin(self, choice: int) -> dict[str, Any] | None:
        """The chunk before the first of a choice's text, where there is one."""
        if self.kind is Kind.TEXT:
            return None
        content = None if self.tools else ""
        return self._chunk([{"index": choice, "delta": {"role": "assistant", "content": content}, **_OPEN}])

    def tool_streams(self, positions: Sequence[Position]) -> list[ToolStream]:
        """One for each choice, or none where nothing may be called."""
        return [ToolStream(self.tools, self._choice_id(i), have) for i, have in enumerate(positions) if self.tools]

    def part(self, choice: int, delta: dict[str, Any], new: Delta) -> dict[str, Any]:
        """Of a message that may call tools; `new` has the log-probabilities that go with it."""
        logprobs = self._logprobs(new.token_ids, new.logprobs, 0)
        return self._chunk([{"index": choice, "delta": delta, **_OPEN, "logprobs": logprobs}])

    def delta(self, choice: int, delta: Delta, offset: int) -> dict[str, Any]:
        """`offset`: characters of the answer before it."""
        logprobs = self._logprobs(delta.token_ids, delta.logprobs, offset)
        if self.kind is Kind.TEXT:
            return self._chunk([{"index": choice, "text": delta.text, **_OPEN, "logprobs": logprobs}])
        return self._chunk([{"index": choice, "delta": {"content": delta.text}, **_OPEN, "logprobs": logprobs}])

    def end(self, choice: int, reason: str, delta: dict[str, Any] | None = None) -> dict[str, Any]:
        """`delta`: what is left of a message that may call tools."""
        body: dict[str, Any] = {"text": ""} if self.kind is Kind.TEXT else {"delta": delta or {}}
        return self._chunk([{"index": choice, **body, "logprobs": None, "finish_reason": reason}])

    def usage(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The last chunk."""
        return {**self._chunk([]), "usage": usage}

    def whole(self, completions: Sequence[Completion], usage: dict[str, Any]) -> dict[str, Any]:
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        name = "text_completion" if self.kind is Kind.TEXT else "chat.completion"
        return {**self._head(name), "choices": choices, "usage": usage}

    def _choice(self, index: int, completion: Completion) -> dict[str, Any]:
        logprobs = self._logprobs(completion.token_ids, completion.logprobs, 0)
        if self.kind is Kind.TEXT:
            text: dict[str, Any] = {"text": completion.text}
            return {"index": index, **text, "logprobs": logprobs, "finish_reason": completion.finish_reason}
        message: dict[str, Any] = {"role": "assistant", "content": completion.text, "refusal": None}
        if self.tools:
            message = message_of(completion.text, self.tools, self._choice_id(index))
        reason = end_reason(completion.finish_reason, "tool_calls" in message)
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": reason}

    def _choice_id(self, choice: int) -> str:
        return f"{self.id}/{choice}"

    def _head(self, name: str) -> dict[str, Any]:
        return {"id": self.id, "object": name, "created": self.created, "model": self.model}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        head = self._head("text_completion" if self.kind is Kind.TEXT else "chat.completion.chunk")
        return {**head, "choices": choices, **({"usage": None} if self.include_usage else {})}

    # Logprobs

    def _logprobs(self, token_ids: Sequence[int], logprobs: Sequence[Logprob], offset: int) -> dict[str, Any] | None:
        if not logprobs:
            return None
        pairs = list(zip(token_ids, logprobs, strict=True))
        return (
            self._listed(pairs, offset)
            if self.kind is Kind.TEXT
            else {"content": [self._told(*pair) for pair in pairs], "refusal": None}
        )

    def _told(self, token_id: int, own: Logprob) -> dict[str, Any]:
        top = [self._token(*each) for each in zip(own.top_ids, own.top_logprobs, strict=True)]
        return {**self._token(token_id, own.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self.texts.bytes_of(token_id)
        return {
            "token": self.texts.text_of(token_id),
            "logprob": logprob,
            "bytes": None if raw is None else list(raw),
        }

    def _listed(self, pairs: Sequence[tuple[int, Logprob]], offset: int) -> dict[str, Any]:
        """The older API's: a list of each thing."""
        tokens = [self.texts.text_of(token_id) for token_id, _ in pairs]
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        tops = [
            {self.texts.text_of(token): value for token, value in zip(own.top_ids, own.top_logprobs, strict=True)}
            for _, own in pairs
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [own.logprob for _, own in pairs],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


_OPEN = {"logprobs": None, "finish_reason": None}


def end_reason(reason: str, called: bool) -> str:
    """`called`: the message calls tools."""
    return "tool_calls" if called and reason == "stop" else reason


def usage_of(usages: Sequence[Usage], prompts: Sequence[int]) -> dict[str, Any]:
    """Of all choices together. A prompt counts once, however many choices it has; `prompts` says which each is of.

    Cached is what was so for every choice: the first of them may have warmed the cache for the others.
    """
    by_prompt: dict[int, list[Usage]] = {}
    for prompt, usage in zip(prompts, usages, strict=True):
        by_prompt.setdefault(prompt, []).append(usage)
    prompt_tokens = sum(group[0].prompt_tokens for group in by_prompt.values())
    cached = sum(min(usage.cached_tokens for usage in group) for group in by_prompt.values())
    completion_tokens = sum(usage.completion_tokens for usage in usages)
    accepted = sum(usage.accepted_tokens for usage in usages)
    drafted = sum(usage.drafted_tokens for usage in usages)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": max(drafted - accepted, 0),
        },
    }
