"""Names of KV blocks: a SHA-256 chain over all that determines a block's bytes.

root  = H("trine-root" | fingerprint | codec | block size | tenant)
block = H("trine-block" | parent's name | token ids)

Variable-length fields carry their length, so that no two different inputs are hashed as the same bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence

from shared.messages import Identity

NAME_BYTES = 32
LAYOUT_VERSION = 1  # of the bytes inside a block; part of every fingerprint


def _digest(tag: bytes, fields: Iterable[bytes]) -> bytes:
    state = hashlib.sha256(tag + b"\0")
    for field in fields:
        state.update(struct.pack("<Q", len(field)))
        state.update(field)
    return state.digest()


def root(identity: Identity, tenant: str) -> bytes:
    """Parent of a tenant's first block under one identity."""
    sizes = struct.pack("<QQ", identity.block_size, identity.block_bytes)
    return _digest(b"trine-root", (identity.fingerprint.encode(), identity.codec.encode(), sizes, tenant.encode()))


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian u32. Raises OverflowError for an id outside u32."""
    try:
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    except struct.error as error:
        raise OverflowError(f"token ids must be integers from 0 to 2**32 - 1: {error}") from None


def unpack_tokens(data: bytes) -> list[int]:
    """The inverse of `pack_tokens`. Raises ValueError unless `data` is a whole number of ids."""
    if len(data) % 4:
        raise ValueError(f"{len(data)} bytes are not a whole number of token ids")
    return list(struct.unpack(f"<{len(data) // 4}I", data))


def child(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name of the block of `token_ids` that follows `parent`."""
    return _digest(b"trine-block", (parent, pack_tokens(token_ids)))


def chain(parent: bytes, token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Names of the full blocks of `token_ids`; a last, unfull block has no name."""
    names: list[bytes] = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = child(parent, token_ids[start : start + block_size])
        names.append(parent)
    return names
