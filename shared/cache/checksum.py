"""A checksum for blocks that never leave the machine: eight times as fast as SHA-256, against accidents alone.

The body is a table of 64-bit words, ROW words a row. Each row gives one number, the sum of its words modulo 2**64;
each column gives the XOR of its words. SHA-256 over these numbers and the bytes after the last whole row is the
checksum. Any change of up to three words shows: a column with one changed word has another XOR, so all of them would
have to be in one column, and then each is alone in its row, whose sum differs. So does a word, a row or a page
that moved, or two that changed places. More changes are missed only if they leave every sum and every XOR as it was:
the same two words swapped in two rows, for instance. That takes a pattern, not chance.

Whoever wants to can make two bodies with one checksum. It may only guard bytes that nobody can write who could not
as well write into this process; on the wire it is SHA-256 (`frames.sha256`).
"""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

import numpy as np

DIGEST_BYTES = 32
_LENGTHS = struct.Struct("<QQ")
ROW = 512  # words: few numbers are left to hash, and a row stays in the first-level cache


class Sums(NamedTuple):
    """What is hashed of a body: 64-bit numbers, and the bytes after the last whole row, which view the body."""

    rows: memoryview
    columns: memoryview
    rest: memoryview


def sums(body: memoryview) -> Sums:
    """Of contiguous bytes, of any length. Nearly all of the work, and the GIL is released for it."""
    whole = len(body) // (8 * ROW)
    table = np.frombuffer(body, dtype="<u8", count=whole * ROW).reshape(whole, ROW)
    rows, columns = np.add.reduce(table, axis=1), np.bitwise_xor.reduce(table, axis=0)
    return Sums(rows.data, columns.data, body[whole * 8 * ROW :])


def checksum(label: bytes, body: Sums) -> bytes:
    """DIGEST_BYTES bytes that tell of any damage to a body, or that it is not the body with this label."""
    state = hashlib.sha256(_LENGTHS.pack(len(label), len(body.rows)) + label)
    state.update(body.rows)
    state.update(body.columns)
    state.update(body.rest)
    return state.digest()
