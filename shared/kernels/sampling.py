"""Gumbel-max sampling on the device: the rule of `shared.sampling.noise`, for all rows of a step at once.

A program scores a stretch of one row's vocabulary and keeps its best token; a second kernel takes the best of those.
Scores are float64, as on the CPU, so that both choose the same tokens; the words of noise are the same bit for bit.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from shared.sampling.noise import STREAM

BLOCK = 256
"""Philox counters per program, each good for four neighbouring tokens: enough programs for one row of 100k tokens."""
BAD = -1
"""In place of a token, for a row without a finite maximum."""

_STREAM = tl.constexpr(STREAM)


@triton.jit
def _words(seed, position, counters):  # type: ignore[no-untyped-def]
    """The four words of each counter (int32 tensor); `seed` and `position` int64 scalars."""
    zeros = counters * 0
    low = zeros + (position & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = zeros + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    return tl.philox(seed, counters, low, high, zeros + _STREAM)


@triton.jit
def _score(row, ids, vocab, top, temperature, word):  # type: ignore[no-untyped-def]
    """float64; -inf beyond the vocabulary and for masked tokens. `temperature` 0 means greedy: no noise."""
    logits = tl.load(row + ids, mask=ids < vocab, other=-float("inf")).to(tl.float64)
    score = logits - top
    if temperature > 0:
        u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
        score = score / temperature - tl.log(-tl.log(u))
    return score


@triton.jit
def _contend(  # type: ignore[no-untyped-def]
    logits, stride, tops, temperatures, seeds, positions, scores, tokens, vocab, BLOCK: tl.constexpr
):
    """Program (r, p): the best of tokens [4 * BLOCK * p, 4 * BLOCK * (p + 1)) of row r, equal ones by lower id."""
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    counters = part * BLOCK + tl.arange(0, BLOCK)
    row = logits + index * stride
    top = tl.load(tops + index).to(tl.float64)
    temperature = tl.load(temperatures + index)
    words = _words(tl.load(seeds + index), tl.load(positions + index), counters)
    best = _score(row, counters * 4, vocab, top, temperature, words[0])
    winner = counters * 4
    for lane in tl.static_range(1, 4):
        score = _score(row, counters * 4 + lane, vocab, top, temperature, words[lane])
        winner = tl.where(score > best, counters * 4 + lane, winner)
        best = tl.maximum(score, best)
    highest = tl.max(best, axis=0)
    at = index * tl.num_programs(1) + part
    tl.store(scores + at, highest)
    tl.store(tokens + at, tl.min(tl.where(best == highest, winner, vocab), axis=0))


@triton.jit
def _decide(  # type: ignore[no-untyped-def]
    scores, tokens, tops, out, parts, vocab, BAD: tl.constexpr, PARTS: tl.constexpr
):
    """Program r: the best of row r's parts, or BAD if its largest logit is NaN or infinite."""
    index = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    score = tl.load(scores + index * parts + part, mask=part < parts, other=-float("inf"))
    token = tl.load(tokens + index * parts + part, mask=part < parts, other=vocab)
    best = tl.min(tl.where(score == tl.max(score, axis=0), token, vocab), axis=0)
    top = tl.load(tops + index)
    usable = tl.abs(top) < float("inf")  # false for NaN
    tl.store(out + index, tl.where(usable, best, BAD).to(tl.int64))


def gumbel_argmax(logits: Tensor, tops: Tensor, temperatures: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The token of each row of `logits` [rows, vocab], int64 [rows]; BAD for rows that have none.

    `tops` [rows] are the rows' largest logits before any filter (NaN if one is NaN); filtered tokens are -inf in
    `logits`. `temperatures` float64, 0 for greedy rows; `seeds` and `positions` int64, their 64 bits as they are. All
    on one device. Nothing waits for the device.
    """
    rows, vocab = logits.shape
    parts = triton.cdiv(vocab, 4 * BLOCK)
    scores = torch.empty(rows, parts, dtype=torch.float64, device=logits.device)
    tokens = torch.empty(rows, parts, dtype=torch.int32, device=logits.device)
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        _contend[(rows, parts)](
            logits, logits.stride(0), tops, temperatures, seeds, positions, scores, tokens, vocab, BLOCK=BLOCK
        )
        _decide[(rows,)](scores, tokens, tops, out, parts, vocab, BAD=BAD, PARTS=triton.next_power_of_2(parts))
    return out
