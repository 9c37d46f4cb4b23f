"""A checksum for blocks that never leave the machine: five times as fast as SHA-256, against accidents alone.

The body is a table of 64-bit words, ROW words a row. Each row gives one number, the sum of its words times odd
constants (multilinear hashing, Carter & Wegman 1979) modulo 2**64; each column gives the XOR of its words. SHA-256
over these numbers and the bytes after the last whole row is the checksum. One changed word always changes its row's
sum; moved words and rows change sums or their order. Modulo 2**64 two changed top bits of one row cancel in its sum,
but they are in two columns.

Whoever wants to can make two bodies with one checksum. It may only guard bytes that nobody can write who could not
as well write into this process; on the wire it is SHA-256 (`frames.sha256`).
"""

from __future__ import annotations

import hashlib

import numpy as np

ROW = 512  # words: few numbers are left to hash, and a row stays in the first-level cache
# Splitmix64 of 0 … 511, made odd. Any fixed constants do that look random.
_Z = (np.arange(1, ROW + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)).astype("<u8")
_Z = (_Z ^ (_Z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
_Z = (_Z ^ (_Z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
_ODD = (_Z ^ (_Z >> np.uint64(31))) | np.uint64(1)


def checksum(body: memoryview) -> bytes:
    """32 bytes; releases the GIL nearly throughout. `body` is contiguous, of any length."""
    body = body.cast("B")
    whole = len(body) - len(body) % (8 * ROW)
    table = np.frombuffer(body[:whole], dtype="<u8").reshape(-1, ROW)
    state = hashlib.sha256(len(body).to_bytes(8, "little"))
    state.update(table @ _ODD)
    state.update(np.bitwise_xor.reduce(table, axis=0))
    state.update(body[whole:])
    return state.digest()
