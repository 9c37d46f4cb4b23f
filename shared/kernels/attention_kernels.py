"""Paged attention: one kernel for prefill, decode and verification, over any codec's bytes.

A program takes a tile of queries of one sequence and all query heads of one KV head, as rows of one matrix, so that
keys and values are read once for all of them; and walks over the keys with the online softmax (Milakov & Gimelshein
2018; FlashAttention-2, Dao 2023). Few queries over a long context are split over programs (Flash-Decoding); `merge`
then joins the parts by their log-sum-exp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from shared.kernels.load import channels_of, load_keys, load_values, raw_keys

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _locate(  # type: ignore[no-untyped-def]
    tile, query_starts, sequences, QUERIES: tl.constexpr, ONE_TILE: tl.constexpr
):
    """(sequence, number of its first query) of a tile. Sequence s has tiles from `query_starts[s] // QUERIES + s` on,
    and maybe one too many, so that where they lie needs no table."""
    if ONE_TILE:
        sequence = tile
        first = 0
    else:
        low = 0
        high = sequences
        while low < high:
            middle = (low + high) // 2
            if tl.load(query_starts + middle) // QUERIES + middle <= tile:
                low = middle + 1
            else:
                high = middle
        sequence = low - 1
        first = (tile - tl.load(query_starts + sequence) // QUERIES - sequence) * QUERIES
    return sequence, first


@triton.jit
def _scores(  # type: ignore[no-untyped-def]
    query, keys, factors, visible, scale, SOFTCAP: tl.constexpr, COMPUTE: tl.constexpr
):
    """In base 2, -inf where not `visible`."""
    if tl.float32 == COMPUTE:  # not in tf32
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee")
    else:
        scores = tl.dot(query, tl.trans(keys))
    scores = scores * factors[None, :] * scale
    if SOFTCAP > 0:
        tanh = 1.0 - 2.0 / (tl.exp2(scores * (2.0 / SOFTCAP * _LOG2E)) + 1.0)
        scores = SOFTCAP * tanh
    return tl.where(visible, scores * _LOG2E, -float("inf"))


@triton.jit
def _accumulate(  # type: ignore[no-untyped-def]
    scores, values, top, total, sums, COMPUTE: tl.constexpr
):
    """One more tile of keys into the running maximum, denominator and numerator."""
    new_top = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(new_top == -float("inf"), 0.0, new_top)  # nothing seen yet: no inf - inf
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    total = total * shrink + tl.sum(weights, axis=1)
    if tl.float32 == COMPUTE:
        more = tl.dot(weights, values, input_precision="ieee")
    else:
        more = tl.dot(weights.to(COMPUTE), values)
    return new_top, total, sums * shrink[:, None] + more


@triton.jit
def _fold(  # type: ignore[no-untyped-def]
    q, keys, factors, visible, at, seen, V, VS, VZ, table, head, positions, position, scale, top, total, sums,
    V_BLOCK: tl.constexpr, VS_BLOCK: tl.constexpr, VZ_BLOCK: tl.constexpr, CODEC: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, KV_HEADS: tl.constexpr, V_DIM: tl.constexpr, V_COLUMNS: tl.constexpr,
    V_HALF: tl.constexpr, V_RUN: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """A tile of keys, those `visible` [ROWS, KEYS] unless the window hides them."""
    if WINDOW > 0:
        visible &= positions[None, :] > position[:, None] - WINDOW
    scores = _scores(q, keys, factors, visible, scale, SOFTCAP, COMPUTE)
    values = load_values(
        V, VS, VZ, table, at, seen, head, V_BLOCK, VS_BLOCK, VZ_BLOCK,
        CODEC, BLOCK_SIZE, KV_HEADS, V_DIM, V_COLUMNS, V_HALF, V_RUN, KEYS, COMPUTE,
    )  # fmt: skip
    return _accumulate(scores, values, top, total, sums, COMPUTE)


@triton.jit
def _store(  # type: ignore[no-untyped-def]
    out, part_sums, part_logs, at_row, valid, split, splits, top, total, sums,
    V_DIM: tl.constexpr, V_COLUMNS: tl.constexpr, V_HALF: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The average over what has been seen: nothing by padded rows, and maybe by others in this split."""
    sums = sums / tl.where(total > 0, total, 1.0)[:, None]
    channel, valid_channel = channels_of(V_COLUMNS, V_HALF, V_DIM)
    stored = valid[:, None] & valid_channel[None, :]
    if SPLIT:
        at_part = at_row * splits + split
        tl.store(part_sums + (at_part * V_DIM)[:, None] + channel[None, :], sums, mask=stored)
        tl.store(part_logs + at_part, top + tl.log2(tl.where(total > 0, total, 1.0)), mask=valid)
    else:
        tl.store(out + (at_row * V_DIM)[:, None] + channel[None, :], sums.to(out.dtype.element_ty), mask=stored)


@triton.jit
def attend(  # type: ignore[no-untyped-def]
    out, part_sums, part_logs, query, new_keys, tail, K, KS, KM, KU, V, VS, VZ, sinks,
    tables, query_starts, starts, slots, scale, sequences, max_blocks, ring, splits, split_size,
    query_token, query_head, key_token, key_head,
    K_BLOCK: tl.constexpr, KS_BLOCK: tl.constexpr, KM_BLOCK: tl.constexpr, KU_BLOCK: tl.constexpr,
    V_BLOCK: tl.constexpr, VS_BLOCK: tl.constexpr, VZ_BLOCK: tl.constexpr,
    CODEC: tl.constexpr, SEALED: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEADS: tl.constexpr, KV_HEADS: tl.constexpr,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, K_COLUMNS: tl.constexpr, V_COLUMNS: tl.constexpr,
    K_HALF: tl.constexpr, V_HALF: tl.constexpr, V_RUN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SPLIT: tl.constexpr, ONE_TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Program (tile, KV head, split)."""
    head, split = tl.program_id(1), tl.program_id(2)
    SHARE: tl.constexpr = HEADS // KV_HEADS
    QUERIES: tl.constexpr = ROWS // SHARE
    sequence, first = _locate(tl.program_id(0), query_starts, sequences, QUERIES, ONE_TILE)
    begin = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - begin
    if first >= count:  # padding
        return
    start = tl.load(starts + sequence)
    table = tables + sequence.to(tl.int64) * max_blocks

    # Positions that any query of the tile sees, within this split. Tiles and splits lie at fixed positions, so that a
    # query's sums are taken in one order, whatever else is in its tile.
    high = start + tl.minimum(first + QUERIES, count)
    sealed_high = (high - 1) // BLOCK_SIZE * BLOCK_SIZE if SEALED else high
    low = tl.maximum(start + first - WINDOW + 1, 0) if WINDOW > 0 else 0
    if SPLIT:
        low = tl.maximum(low, split * split_size)
        high = tl.minimum(high, split * split_size + split_size)
        sealed_high = tl.minimum(sealed_high, high)
    if low >= high:
        return

    # Rows are (query, head) pairs. One that is padding stands before position 0 and sees nothing.
    row = tl.arange(0, ROWS)
    asked = first + row // SHARE
    valid = (row // SHARE < QUERIES) & (asked < count)
    position = tl.where(valid, start + asked, -1)
    token, own_head = (begin + asked).to(tl.int64), head * SHARE + row % SHARE
    channel, valid_channel = channels_of(K_COLUMNS, K_HALF, K_DIM)
    at_query = (token * query_token + own_head * query_head)[:, None] + channel[None, :]
    q = tl.load(query + at_query, mask=valid[:, None] & valid_channel[None, :], other=0.0).to(COMPUTE)
    top = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    sums = tl.zeros((ROWS, V_COLUMNS), tl.float32)
    if sinks is not None and not SPLIT:
        top = tl.load(sinks + own_head, mask=valid, other=0.0).to(tl.float32) * _LOG2E
        total += 1.0

    for at in range(low // KEYS * KEYS, sealed_high, KEYS):
        positions = at + tl.arange(0, KEYS)
        seen = (positions >= low) & (positions < sealed_high)
        keys, factors = load_keys(
            K, KS, KM, KU, table, at, seen, head, K_BLOCK, KS_BLOCK, KM_BLOCK, KU_BLOCK,
            CODEC, BLOCK_SIZE, KV_HEADS, K_DIM, K_COLUMNS, K_HALF, KEYS, COMPUTE,
        )  # fmt: skip
        end = position // BLOCK_SIZE * BLOCK_SIZE if SEALED else position + 1
        visible = seen[None, :] & (positions[None, :] < end[:, None])
        top, total, sums = _fold(
            q, keys, factors, visible, at, seen, V, VS, VZ, table, head, positions, position, scale, top, total, sums,
            V_BLOCK, VS_BLOCK, VZ_BLOCK, CODEC, BLOCK_SIZE, KV_HEADS, V_DIM, V_COLUMNS, V_HALF, V_RUN, KEYS, WINDOW,
            SOFTCAP, COMPUTE,
        )  # fmt: skip

    if SEALED:  # the keys of the blocks that the queries are in
        low = tl.maximum(low, (start + first) // BLOCK_SIZE * BLOCK_SIZE)
        slot = tl.load(slots + sequence)
        for at in tl.range(low // KEYS * KEYS, high, KEYS, num_stages=1):  # few: no shared memory for them
            positions = at + tl.arange(0, KEYS)
            seen = (positions >= low) & (positions < high)
            keys = raw_keys(
                new_keys, tail, positions, seen, start, begin, slot, ring, key_token, key_head, head, KV_HEADS, K_DIM,
                K_COLUMNS, K_HALF,
            ).to(COMPUTE)  # fmt: skip
            own_block = positions[None, :] // BLOCK_SIZE == (position // BLOCK_SIZE)[:, None]
            visible = seen[None, :] & own_block & (positions[None, :] <= position[:, None])
            top, total, sums = _fold(
                q, keys, tl.full((KEYS,), 1.0, tl.float32), visible, at, seen, V, VS, VZ, table, head, positions,
                position, scale, top, total, sums, V_BLOCK, VS_BLOCK, VZ_BLOCK, CODEC, BLOCK_SIZE, KV_HEADS, V_DIM,
                V_COLUMNS, V_HALF, V_RUN, KEYS, WINDOW, SOFTCAP, COMPUTE,
            )  # fmt: skip

    at_row = token * HEADS + own_head
    _store(out, part_sums, part_logs, at_row, valid, split, splits, top, total, sums, V_DIM, V_COLUMNS, V_HALF, SPLIT)


@triton.jit
def merge(  # type: ignore[no-untyped-def]
    out, part_sums, part_logs, sinks, positions, token_blocks,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, V_COLUMNS: tl.constexpr, SPLITS: tl.constexpr, SPLIT_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Program (token, head): its parts, weighted by their share of the softmax. Sinks take part here, once."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channel = tl.arange(0, V_COLUMNS)
    if tl.load(token_blocks + token) < 0:  # padding
        nothing = tl.zeros((V_COLUMNS,), out.dtype.element_ty)
        tl.store(out + (token * HEADS + head) * V_DIM + channel, nothing, mask=channel < V_DIM)
        return
    position = tl.load(positions + token).to(tl.int32)
    split = tl.arange(0, SPLITS)
    # Others were not written for this token.
    live = split <= position // SPLIT_SIZE
    if WINDOW > 0:
        live &= split >= tl.maximum(position - WINDOW + 1, 0) // SPLIT_SIZE
    where = (token * HEADS + head) * SPLITS + split
    logs = tl.load(part_logs + where, mask=live, other=-float("inf"))
    top = tl.max(logs, axis=0)
    if sinks is not None:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2E
        top = tl.maximum(top, sink)
    weights = tl.exp2(logs - top)
    total = tl.sum(weights, axis=0)
    if sinks is not None:
        total += tl.exp2(sink - top)
    sums = tl.load(
        part_sums + (where * V_DIM)[:, None] + channel[None, :],
        mask=live[:, None] & (channel < V_DIM)[None, :],
        other=0.0,
    )
    merged = tl.sum(sums * (weights / total)[:, None], axis=0)
    tl.store(out + (token * HEADS + head) * V_DIM + channel, merged.to(out.dtype.element_ty), mask=channel < V_DIM)
