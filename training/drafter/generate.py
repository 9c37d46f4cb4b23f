"""The target answers prompts, many at once, and its thoughts are written down.

A shard is a function of its prompts, the target and the number of slots alone: conversations are taken up longest
first as slots become free, and every random number belongs to one conversation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch
from torch import Tensor

from shared.engine.engine import Engine
from shared.engine.span import Span
from shared.errors import ModelError
from training.drafter.dialogue import Dialogue
from training.drafter.prompts import Prompt
from training.drafter.shards import Conversation, Shard

Told = Callable[[int, int], None]
"""Of every step: answer tokens made, conversations finished."""
_PERIOD, _LOOPING = 16, 48
"""An answer ends when its last 48 tokens repeat every 16 or fewer: loops are easy to draft and teach nothing."""
_REFILL = 8
"""Slots are filled when so large a share of them (an eighth) is free: one pass over several prompts costs less."""


@dataclass(slots=True)
class _Talk:
    """A conversation under way. `told` counts the answer tokens of the present turn."""

    number: int
    prompt: Prompt
    table: tuple[int, ...]
    tokens: list[int]
    rng: Random
    turn: int = 0
    told: int = 0
    done: int = 0
    """Tokens whose KV is in the pool."""
    scored: list[int] = field(default_factory=list)
    top_ids: list[np.ndarray] = field(default_factory=list)
    top_logp: list[np.ndarray] = field(default_factory=list)

    def span(self) -> Span:
        return Span(tuple(self.tokens[self.done :]), self.done, self.table, rows=1)

    def finished(self, k: int) -> Conversation:
        empty = np.zeros((0, k))
        return Conversation(
            np.array(self.tokens, np.int32),
            np.array(self.scored, np.int32),
            np.stack(self.top_ids).astype(np.int32) if self.top_ids else empty.astype(np.int32),
            np.stack(self.top_logp).astype(np.float16) if self.top_logp else empty.astype(np.float16),
        )


class Generator:
    """Answers prompts with `engine`, whose pool it has to itself."""

    def __init__(self, engine: Engine, dialogue: Dialogue, *, slots: int, top_k: int, context: int) -> None:
        """`context`: tokens of a conversation at most; the pool must hold `slots` of them (see `blocks_for`)."""
        self._engine, self._dialogue = engine, dialogue
        self._slots, self._k = slots, top_k
        self._context = min(context, engine.info.context_length)
        self._blocks = -(-self._context // engine.info.block_size)

    @staticmethod
    def blocks_for(slots: int, context: int, block_size: int) -> int:
        return slots * -(-context // block_size)

    def shard(self, prompts: Sequence[Prompt], told: Told) -> Shard:
        """Their conversations, in the order of `prompts`. Raises ModelError when the target's output is not finite."""
        waiting = sorted(range(len(prompts)), key=lambda i: (sum(prompts[i].max_tokens), -i))
        free = [tuple(range(i * self._blocks, (i + 1) * self._blocks)) for i in range(self._slots)]
        running: list[_Talk] = []
        results: dict[int, Conversation] = {}
        while waiting or running:
            if waiting and (not running or len(free) * _REFILL >= self._slots):
                while waiting and free:
                    number = waiting.pop()
                    running.append(self._begin(number, prompts[number], free.pop()))
            ended = self._step(running)
            for talk in ended:
                running.remove(talk)
                free.append(talk.table)
                results[talk.number] = talk.finished(self._k)
            told(len(running) + len(ended), len(ended))
        return Shard.of([results[i] for i in range(len(prompts))])

    def _begin(self, number: int, prompt: Prompt, table: tuple[int, ...]) -> _Talk:
        tokens = self._dialogue.opening(prompt)[: self._context - 1]
        return _Talk(number, prompt, table, tokens, Random(prompt.seed))

    def _step(self, running: Sequence[_Talk]) -> list[_Talk]:
        """One token for each. Returns the conversations that are over."""
        logits = self._engine.forward([talk.span() for talk in running])
        values, ids = logits.topk(self._k, dim=-1)
        logp = (values - logits.logsumexp(-1, keepdim=True)).cpu()
        if not logp.isfinite().all():
            raise ModelError("the target's output is not finite")
        chosen = ids[:, 0].tolist()
        warm = [i for i, talk in enumerate(running) if talk.prompt.temperature > 0]
        if warm:
            talks = [running[i] for i in warm]
            tokens = _drawn(logits[warm], [t.prompt.temperature for t in talks], [t.rng.random() for t in talks])
            for i, token in zip(warm, tokens, strict=True):
                chosen[i] = token
        top_ids, top_logp = ids.cpu().numpy(), logp.numpy()
        over = []
        for i, talk in enumerate(running):
            talk.done = len(talk.tokens)
            talk.scored.append(talk.done - 1)
            talk.top_ids.append(top_ids[i].astype(np.int32))
            talk.top_logp.append(top_logp[i].astype(np.float16))
            if not self._goes_on(talk, chosen[i]):
                over.append(talk)
        return over

    def _goes_on(self, talk: _Talk, token: int) -> bool:
        talk.tokens.append(token)
        talk.told += 1
        ended = token in self._engine.info.eos_ids
        spent = talk.told >= talk.prompt.max_tokens[talk.turn] or looping(talk.tokens[-talk.told :])
        if len(talk.tokens) >= self._context:
            return False
        if not (ended or spent):
            return True
        if talk.turn + 1 == len(talk.prompt.turns):
            return False
        following = self._dialogue.follow_up(talk.prompt.turns[talk.turn + 1])
        if ended and following[:1] == [token]:  # the template writes the end of the answer, too
            following = following[1:]
        talk.turn, talk.told = talk.turn + 1, 0
        talk.tokens += following
        return len(talk.tokens) < self._context


def looping(tokens: Sequence[int]) -> bool:
    """Whether the last `_LOOPING` tokens are one short text again and again."""
    tail = tokens[-_LOOPING:]
    return len(tail) == _LOOPING and any(tail[p:] == tail[:-p] for p in range(1, _PERIOD + 1))


def _drawn(logits: Tensor, temperatures: Sequence[float], uniforms: Sequence[float]) -> list[int]:
    """Of each row of `logits` [rows, vocab] the token at which the cumulative probability passes its uniform number."""
    heat = torch.tensor(temperatures, device=logits.device)[:, None]
    cumulated = torch.softmax(logits / heat, -1).cumsum(-1, dtype=torch.float64)
    level = torch.tensor(uniforms, dtype=torch.float64, device=logits.device)[:, None] * cumulated[:, -1:]
    tokens: list[int] = torch.searchsorted(cumulated, level, right=True)[:, 0].clamp_(max=logits.shape[-1] - 1).tolist()
    return tokens
