"""Wire format of cached blocks: one frame per part of a block.

    magic (4) | header length, u32 LE (4) | header, msgpack map | zeros up to a multiple of 64 | the part's raw bytes

A block of `block_bytes` bytes is cut into parts of `part_bytes`, the last one shorter: groups of layers, where a layer
fits. Everybody derives the same
cut from the identity and the server's `max_payload`, so part i of a name is one subject with one meaning.

The digest is SHA-256 over the part's bytes: with SHA instructions in the CPU about twice as fast as BLAKE2b.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import msgpack

from shared.cache import naming
from shared.errors import ConfigError, FrameError
from shared.messages import MAX_ID, Identity
from shared.tenants import DEFAULT_TENANT

VERSION = 2
MAGIC = b"TRKV"
PART_BYTES = 4 << 20  # most payload bytes of one part
MIN_PART_BYTES = 4 << 10
MAX_HEADER = 8 << 10  # 1,024 token ids are half of it
MAX_BLOCK_BYTES = 1 << 30
MAX_TOKENS = 1024
MAX_CODEC = 64
MAX_PARTS = MAX_BLOCK_BYTES // MIN_PART_BYTES
DIGEST_BYTES = 32
_ALIGN = 64  # bodies start on this, so that they can be viewed as any dtype
_PREFIX = struct.Struct("<4sI")
MAX_HEAD = MAX_HEADER + _PREFIX.size + _ALIGN
MAX_FRAME = PART_BYTES + MAX_HEAD

_FIELDS: dict[str, type] = {
    "v": int, "name": bytes, "parent": bytes, "tokens": bytes, "codec": str, "block_bytes": int,
    "part": int, "parts": int, "offset": int, "length": int, "digest": bytes, "producer": str, "scope": str,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class BlockMeta:
    """What identifies a block to the cache.

    `producer` says who computed it and has no effect on the name. `scope`: see `naming.Lineage`.
    """

    name: bytes
    parent: bytes
    token_ids: tuple[int, ...]
    producer: str = ""
    scope: str = DEFAULT_TENANT


def metas(root: bytes, token_ids: Sequence[int], block_size: int, producer: str = "") -> list[BlockMeta]:
    """The full blocks of `token_ids` in order; `root` is the tenant's (`naming.root`)."""
    found: list[BlockMeta] = []
    parent = root
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        tokens = tuple(token_ids[start : start + block_size])
        name = naming.child(parent, tokens)
        found.append(BlockMeta(name, parent, tokens, producer))
        parent = name
    return found


@dataclass(frozen=True, slots=True)
class Frame:
    """A decoded frame: well-formed, but not yet compared with what was asked for. `body` views the input."""

    name: bytes
    parent: bytes
    tokens: bytes
    codec: str
    block_bytes: int
    part: int
    parts: int
    offset: int
    digest: bytes
    producer: str
    scope: str
    body: memoryview


def part_bytes_for(max_payload: int, identity: Identity) -> int:
    """Part size under a server's `max_payload`: PART_BYTES, halved until a frame fits, and whole layers if they fit.

    Raises ConfigError when not even MIN_PART_BYTES would fit.
    """
    size = PART_BYTES
    while size >= MIN_PART_BYTES and size + MAX_HEAD > max_payload:
        size //= 2
    if size < MIN_PART_BYTES:
        needed = MIN_PART_BYTES + MAX_HEAD
        raise ConfigError(f"max_payload {max_payload} is too small for cache frames; they need {needed}")
    layer = identity.block_bytes // identity.layers
    alike = layer * identity.layers == identity.block_bytes  # layers of one shape, one after another
    return size - size % layer if alike and 0 < layer <= size else size


def part_count(block_bytes: int, part_bytes: int) -> int:
    return max(1, -(-block_bytes // part_bytes))


def check_identity(identity: Identity) -> None:
    """Raise ConfigError unless blocks of this identity can be framed at all."""
    if not 0 < identity.block_bytes <= MAX_BLOCK_BYTES or not 0 < identity.block_size <= MAX_TOKENS:
        raise ConfigError(f"a block can have {MAX_TOKENS} tokens and {MAX_BLOCK_BYTES} bytes; {identity} exceeds that")
    if len(identity.codec) > MAX_CODEC:
        raise ConfigError(f"a codec's name can have {MAX_CODEC} characters, not {len(identity.codec)}")


def check_block(block: BlockMeta, nbytes: int, identity: Identity) -> None:
    """Raise FrameError unless a payload of `nbytes` bytes can be this block under this identity."""
    if nbytes != identity.block_bytes or len(block.token_ids) != identity.block_size:
        _refuse(
            f"a block of {len(block.token_ids)} tokens and {nbytes} bytes; "
            f"the identity says {identity.block_size} and {identity.block_bytes}"
        )
    if len(block.name) != naming.NAME_BYTES or len(block.parent) != naming.NAME_BYTES or len(block.producer) > MAX_ID:
        _refuse("name, parent or producer have the wrong length")


def sha256(body: memoryview) -> bytes:
    return hashlib.sha256(body).digest()


def encode(
    block: BlockMeta, payload: memoryview, identity: Identity, part_bytes: int
) -> list[tuple[bytes, memoryview]]:
    """(head, body) of each part; bodies view `payload`, which must not change while they are in use.

    Hashes the payload: call it off the event loop. Raises FrameError when the block contradicts `identity`.
    """
    check_block(block, payload.nbytes, identity)
    payload = payload.cast("B")
    common = {
        "v": VERSION, "name": block.name, "parent": block.parent, "tokens": naming.pack_tokens(block.token_ids),
        "codec": identity.codec, "block_bytes": len(payload), "parts": part_count(len(payload), part_bytes),
        "producer": block.producer, "scope": block.scope,
    }  # fmt: skip
    frames: list[tuple[bytes, memoryview]] = []
    for part in range(part_count(len(payload), part_bytes)):
        body = payload[part * part_bytes : (part + 1) * part_bytes]
        own = {"part": part, "offset": part * part_bytes, "length": len(body), "digest": sha256(body)}
        frames.append((_head(common | own), body))
    return frames


def _head(header: dict[str, Any]) -> bytes:
    packed: bytes = msgpack.packb(header, use_bin_type=True)
    return _PREFIX.pack(MAGIC, len(packed)) + packed + bytes(-(_PREFIX.size + len(packed)) % _ALIGN)


def decode(data: bytes | memoryview) -> Frame:
    """The frame in `data`, its body a view of it. Raises FrameError for anything that is not one."""
    view = memoryview(data).cast("B")
    if not _PREFIX.size <= len(view) <= MAX_FRAME:
        _refuse(f"{len(view)} bytes are no frame")
    end = _header_end(view)
    return _frame(view[:end], view[end + -end % _ALIGN :])


def decode_apart(head: bytes, body: memoryview) -> Frame:
    """The frame whose head and body do not lie in one piece.

    Raises FrameError when `head` is not exactly the head of a body of that length.
    """
    view = memoryview(head)
    if len(view) < _PREFIX.size or len(view) != (end := _header_end(view)) + -end % _ALIGN:
        _refuse(f"{len(view)} bytes are no frame's head")
    return _frame(view[:end], body)


def read_head(take: Callable[[int], bytes]) -> bytes:
    """The head of a frame that arrives piece by piece: `take(n)` gives its next n bytes. Raises FrameError."""
    prefix = take(_PREFIX.size)
    end = _header_end(memoryview(prefix), arrived=False)
    return prefix + take(end + -end % _ALIGN - _PREFIX.size)


def _header_end(view: memoryview, arrived: bool = True) -> int:
    magic, size = _PREFIX.unpack_from(view)
    if magic != MAGIC or size > MAX_HEADER or (arrived and _PREFIX.size + size > len(view)):
        _refuse("no frame: wrong magic or header length")
    return _PREFIX.size + int(size)


def _frame(head: memoryview, body: memoryview) -> Frame:
    header = _unpack(head[_PREFIX.size :])
    _check_header(header, len(body))
    fields = {key: header[key] for key in _FIELDS if key not in ("v", "length")}
    return Frame(body=body, **fields)


def _unpack(packed: memoryview) -> dict[str, Any]:
    try:
        header = msgpack.unpackb(packed, raw=False, strict_map_key=True, max_ext_len=0, max_array_len=0, max_map_len=16)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise FrameError(f"unreadable header: {type(error).__name__}") from None
    if not isinstance(header, dict):
        _refuse("the header is no map")
    if header.get("v") != VERSION:
        _refuse(f"frame version {header.get('v')!r:.20}; {VERSION} is known")
    if header.keys() != _FIELDS.keys() or any(type(header[key]) is not kind for key, kind in _FIELDS.items()):
        _refuse("header fields are missing, unknown or of another type")
    return header


def _check_header(h: dict[str, Any], body: int) -> None:
    hashes = (h["name"], h["parent"], h["digest"])
    if any(len(value) != naming.NAME_BYTES for value in hashes) or len(h["tokens"]) % 4:
        _refuse("name, parent, digest or tokens have the wrong length")
    if len(h["producer"]) > MAX_ID or len(h["scope"]) > MAX_ID:
        _refuse("the producer's name or the scope is too long")
    if not (0 < h["block_bytes"] <= MAX_BLOCK_BYTES and 0 <= h["part"] < h["parts"] <= MAX_PARTS):
        _refuse("block size or part number out of range")
    if h["length"] != body or h["offset"] < 0 or h["offset"] + body > h["block_bytes"]:
        _refuse(f"the header speaks of {h['length']!r:.20} bytes, {body} are there")


def verify(frame: Frame, block: BlockMeta, identity: Identity, part: int, part_bytes: int) -> None:
    """Raise FrameError unless the frame is part `part` of exactly the block that was asked for, undamaged.

    Hashes the body: call it off the event loop.
    """
    tokens = naming.pack_tokens(block.token_ids)
    asked = (block.name, block.parent, tokens, identity.codec, identity.block_bytes, block.scope)
    if (frame.name, frame.parent, frame.tokens, frame.codec, frame.block_bytes, frame.scope) != asked:
        _refuse("the frame belongs to another block: name, parent, tokens, codec, size or scope differ")
    if frame.name != naming.child(frame.parent, block.token_ids):
        _refuse("the name does not follow from parent and tokens")
    offset = part * part_bytes
    length = min(part_bytes, identity.block_bytes - offset)
    cut = (part, part_count(identity.block_bytes, part_bytes), offset, length)
    if (frame.part, frame.parts, frame.offset, len(frame.body)) != cut:
        _refuse("the block is cut into other parts")
    if sha256(frame.body) != frame.digest:
        _refuse("the bytes do not have the digest they claim")


def _refuse(why: str) -> NoReturn:
    raise FrameError(why)
