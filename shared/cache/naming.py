"""Names of KV blocks: a SHA-256 chain over all that determines a block's bytes.

root  = H("trine-root" | fingerprint | codec | block size | tenant | salt)
block = H("trine-block" | parent's name | token ids)

A prompt may begin with blocks that an operator has made public. Their chain has a root of its own, which all tenants
share; the first private block's parent is then H("trine-private" | last public block's name | the tenant's root).

Variable-length fields carry their length, so that no two different inputs are hashed as the same bytes.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared.messages import Identity

NAME_BYTES = 32
LAYOUT_VERSION = 1  # of the bytes inside a block; part of every fingerprint


def _digest(tag: bytes, fields: Iterable[bytes]) -> bytes:
    state = hashlib.sha256(tag + b"\0")
    for field in fields:
        state.update(struct.pack("<Q", len(field)))
        state.update(field)
    return state.digest()


PUBLIC = "=public"
"""Scope of public blocks. No tenant can have this name."""


def root(identity: Identity, tenant: str, salt: str = "") -> bytes:
    """Parent of a tenant's first block under one identity; `salt` narrows further inside the tenant."""
    sizes = struct.pack("<QQ", identity.block_size, identity.block_bytes)
    texts = (identity.fingerprint.encode(), identity.codec.encode(), tenant.encode(), salt.encode())
    return _digest(b"trine-root", (sizes, *texts))


@dataclass(frozen=True, slots=True)
class Lineage:
    """Where the chain of one prompt's blocks begins: the first `public` of them are everybody's, the rest the tenant's.

    `scope`, the tenant or PUBLIC, is where a block is stored: operators list and drop by it. It is no secret, and not
    what keeps tenants apart; the names are.
    """

    root: bytes
    tenant: str
    salt: str = ""
    public: int = 0
    public_root: bytes = b""

    @classmethod
    def of(cls, identity: Identity, tenant: str, salt: str = "", public: int = 0) -> Lineage:
        return cls(root(identity, tenant, salt), tenant, salt, public, root(identity, PUBLIC) if public else b"")

    def parent(self, index: int, names: Sequence[bytes]) -> bytes:
        """Parent of block `index`, `names` being those of the blocks before it."""
        if index == self.public:
            return _digest(b"trine-private", (names[index - 1], self.root)) if index else self.root
        return names[index - 1] if index else self.public_root

    def scope(self, index: int) -> str:
        return PUBLIC if index < self.public else self.tenant

    def extend(self, names: list[bytes], count: int, token_ids: Sequence[int], block_size: int) -> None:
        """Append names until the first `count` full blocks of `token_ids` have one."""
        for index in range(len(names), count):
            tokens = token_ids[index * block_size : (index + 1) * block_size]
            names.append(child(self.parent(index, names), tokens))


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
