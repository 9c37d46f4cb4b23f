"""How attention is cut into programs. A function of capacities and shapes alone, never of a step's contents."""

from __future__ import annotations

from dataclasses import dataclass

from shared.kernels.call import power_of_two

SHORT = 16
"""Up to so many query tokens per sequence count as short: decode steps and verification of drafts."""
_LEAST_SPLIT, _MOST_SPLITS = 256, 32


@dataclass(frozen=True, slots=True)
class Tiling:
    """A program's tile: `rows` queries × heads of one KV head, against `keys` at a time.

    The context is cut into `splits` parts of `split_size` positions, both powers of two.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    splits: int
    split_size: int


def tiling(*, queries: int, context: int, share: int, width: int, itemsize: int, quantised: bool, hip: bool) -> Tiling:
    """For up to `queries` query tokens per sequence over up to `context` positions.

    `share`: query heads per KV head. `width`: columns of the widest of keys and values, whose dtype when multiplied has
    `itemsize` bytes.
    """
    short = queries <= SHORT
    # Short ones are bound by memory: all rows of a sequence in one tile, as small as a matrix product may be. Long ones
    # are bound by products: 128 rows, 64 if the accumulator [rows, width] would fill the registers.
    most = max(64 if short or width * itemsize > 256 else 128, power_of_two(share))
    rows = min(max(16, power_of_two(queries * share)), most)
    # Keys and values of a stage take 2 * keys * width * itemsize bytes of shared memory, 32 KiB at most. Keys wait for
    # their block ids, so that it takes 5 stages to have two tiles of keys in flight, in 70 KiB. Long tiles rather leave
    # room for a second program. Decoding takes registers, hence fewer keys. gfx942 has 64 KiB in all.
    keys = 64 if width * itemsize <= (128 if hip else 256) and not quantised else 32 if width * itemsize <= 512 else 16
    stages = 2 if hip else 5 if short else 3
    warps = 8 if rows >= 128 or rows * width > 64 * 128 else 4  # the accumulator: at most 64 registers of a thread
    # Parts of fixed size at fixed positions, so that a decode step and a verification add up alike. 256 positions are
    # enough work to pay for storing a part (3 % of the traffic); 32 parts are enough programs for one sequence.
    split_size = max(_LEAST_SPLIT, power_of_two(-(-context // _MOST_SPLITS)))
    splits = power_of_two(-(-context // split_size)) if short else 1
    return Tiling(rows, keys, warps, stages, splits, split_size)
