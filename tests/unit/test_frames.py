"""Cache frames: what is written is read back without a copy, and nothing else passes."""

from __future__ import annotations

import hashlib
import os
import pickle
import struct
import tracemalloc
from dataclasses import replace

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.cache import frames, naming
from shared.cache.frames import MAX_HEADER, PART_BYTES, BlockMeta
from shared.errors import ConfigError, FrameError
from shared.messages import Identity

IDENTITY = Identity(fingerprint="f" * 64, codec="int8", block_size=4, block_bytes=1000)
ROOT = naming.root(IDENTITY, "t")
META = frames.metas(ROOT, [5, 6, 7, 8], 4, "prefill-1")[0]
PAYLOAD = memoryview(os.urandom(1000))


def wire(meta: BlockMeta = META, payload: memoryview = PAYLOAD, part_bytes: int = PART_BYTES) -> list[bytes]:
    return [head + bytes(body) for head, body in frames.encode(meta, payload, IDENTITY, part_bytes)]


def pack(body: bytes = bytes(PAYLOAD), **changes: object) -> bytes:
    """A frame with the right header but for `changes`; a value of None leaves the field out."""
    header = {
        "v": 2, "name": META.name, "parent": META.parent, "tokens": naming.pack_tokens(META.token_ids), "codec": "int8",
        "block_bytes": 1000, "part": 0, "parts": 1, "offset": 0, "length": len(body),
        "digest": hashlib.sha256(body).digest(), "producer": "", "scope": "default",
    } | changes  # fmt: skip
    packed = msgpack.packb({key: value for key, value in header.items() if value is not None})
    prefix = struct.pack("<4sI", b"TRKV", len(packed)) + packed
    return prefix + bytes(-len(prefix) % 64) + body


def check(data: bytes, part: int = 0, part_bytes: int = PART_BYTES) -> frames.Frame:
    frame = frames.decode(data)
    frames.verify(frame, META, IDENTITY, part, part_bytes)
    return frame


def test_a_block_round_trips_in_one_part():
    (data,) = wire()
    frame = check(data)
    assert bytes(frame.body) == bytes(PAYLOAD)
    assert frame.producer == "prefill-1"
    assert check(pack()).body == PAYLOAD, "the hand-made frame of these tests is a good one"


def test_nothing_is_copied():
    ((head, body),) = frames.encode(META, PAYLOAD, IDENTITY, PART_BYTES)
    assert body.obj is PAYLOAD.obj
    assert len(head) % 64 == 0
    data = head + bytes(body)
    assert frames.decode(data).body.obj is data


@settings(deadline=None)
@given(block_bytes=st.integers(1, 1500), part_bytes=st.integers(7, 700))
def test_any_cut_round_trips(block_bytes, part_bytes):
    identity = IDENTITY.model_copy(update={"block_bytes": block_bytes})
    payload = memoryview(bytes(i % 251 for i in range(block_bytes)))
    cut = frames.encode(META, payload, identity, part_bytes)
    assert len(cut) == frames.part_count(block_bytes, part_bytes)
    joined = b""
    for part, (head, body) in enumerate(cut):
        frame = frames.decode(head + bytes(body))
        frames.verify(frame, META, identity, part, part_bytes)
        joined += frame.body
    assert joined == bytes(payload)


def test_payloads_of_any_shape_are_bytes():
    shaped = memoryview(bytes(1000)).cast("B", (10, 100))
    assert b"".join(bytes(body) for _, body in frames.encode(META, shaped, IDENTITY, 300)) == bytes(1000)


def test_every_flipped_bit_is_noticed():
    """Whatever single byte of a frame is damaged, in the header or behind it, the frame is refused - or is the same."""
    (data,) = wire()
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x10
        try:
            frame = check(bytes(damaged))
        except FrameError:
            continue
        assert replace(frame, producer=META.producer) == check(data), f"byte {position} was damaged unnoticed"


def test_truncation_at_any_length_is_noticed():
    (data,) = wire()
    for length in range(len(data)):
        with pytest.raises(FrameError):
            check(data[:length])
    with pytest.raises(FrameError):
        check(data + b"\0")


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300) | st.binary(max_size=200).map(lambda b: b"TRKV" + struct.pack("<I", len(b)) + b))
def test_garbage_is_a_frame_error_and_nothing_else(data):
    with pytest.raises(FrameError):
        frames.decode(data)


@pytest.mark.parametrize(
    "changes",
    [
        {"v": 1},
        {"v": True},
        {"v": None},
        {"name": b"short"},
        {"name": "x" * 32},
        {"parent": b""},
        {"digest": b"1" * 31},
        {"tokens": b"12345"},
        {"tokens": [5, 6, 7, 8]},
        {"codec": b"int8"},
        {"codec": None},
        {"extra": 1},
        {"producer": "p" * 129},
        {"scope": "s" * 129},
        {"scope": None},
        {"block_bytes": 0},
        {"block_bytes": -1},
        {"block_bytes": 2**40},
        {"block_bytes": 2**63},
        {"block_bytes": 1000.0},
        {"block_bytes": 999},
        {"part": -1},
        {"part": 1},
        {"part": True},
        {"parts": 0},
        {"parts": 2**40},
        {"offset": -1},
        {"offset": 1},
        {"offset": 2**62},
        {"length": 2**31},
        {"length": 999},
        {"length": -1},
    ],
    ids=lambda change: " ".join(f"{k}={v!r:.12}" for k, v in change.items()),
)
def test_hostile_headers_are_refused_when_decoding(changes):
    with pytest.raises(FrameError):
        frames.decode(pack(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"name": b"n" * 32},
        {"parent": b"p" * 32},
        {"tokens": naming.pack_tokens([5, 6, 7, 9])},
        {"tokens": naming.pack_tokens([5, 6, 7])},
        {"codec": "int4"},
        {"block_bytes": 2000},
        {"digest": b"d" * 32},
        {"parts": 2, "block_bytes": 1000},
        {"parts": 2, "part": 1},
    ],
    ids=" ".join,
)
def test_a_good_frame_of_something_else_is_not_ours(changes):
    frame = frames.decode(pack(**changes))
    with pytest.raises(FrameError):
        frames.verify(frame, META, IDENTITY, 0, PART_BYTES)


def test_a_name_must_follow_from_parent_and_tokens():
    """Also when asker and frame agree on it, as they would under a truncated or forged name."""
    forged = BlockMeta(b"n" * 32, META.parent, META.token_ids)
    with pytest.raises(FrameError, match="does not follow"):
        frames.verify(frames.decode(pack(name=forged.name)), forged, IDENTITY, 0, PART_BYTES)


def test_parts_cannot_be_swapped():
    first, second, *_ = wire(part_bytes=400)
    check(first, 0, 400)
    check(second, 1, 400)
    with pytest.raises(FrameError):
        check(second, 0, 400)


def test_pickles_are_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "pwned"), "w"))

    bomb = pickle.dumps(Bomb())
    head = struct.pack("<4sI", b"TRKV", len(bomb)) + bomb
    for data in (bomb, head, pack(body=bomb), pack(tokens=bomb)):
        with pytest.raises(FrameError):
            check(data)
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize(
    "header",
    [
        b"\x91" * 4000,  # nested arrays
        b"\x81\xa1v" * 2000,  # nested maps
        b"\xc6\xff\xff\xff\xff",  # 4 GiB of bytes
        b"\xdf\xff\xff\xff\xff",  # a map of 4 G entries
        b"\xdd\xff\xff\xff\xff",  # an array of 4 G entries
        b"\xc9\xff\xff\xff\xff\x01",  # an extension of 4 GiB
        b"\xd6\xff\x00\x00\x00\x00",  # a timestamp
        b"\xc0",
        b"",
    ],
    ids=["arrays", "maps", "bytes", "map", "array", "ext", "timestamp", "nil", "empty"],
)
def test_bombs_are_refused_before_memory_is_taken(header):
    data = struct.pack("<4sI", b"TRKV", len(header)) + header + bytes(100)
    tracemalloc.start()
    try:
        with pytest.raises(FrameError):
            frames.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, 1, MAX_HEADER + 1, 2**32 - 1])
def test_a_header_length_is_not_believed(size):
    (data,) = wire()
    with pytest.raises(FrameError):
        frames.decode(data[:4] + struct.pack("<I", size) + data[8:])


def test_a_header_may_not_grow_beyond_its_bound():
    with pytest.raises(FrameError, match="header length"):
        frames.decode(pack(tokens=bytes(MAX_HEADER)))


def test_oversized_frames_are_refused_unread():
    with pytest.raises(FrameError):
        frames.decode(b"TRKV" + bytes(frames.MAX_FRAME))


@pytest.mark.parametrize(
    ("meta", "nbytes"),
    [
        (META, 999),
        (replace(META, token_ids=(1, 2, 3)), 1000),
        (replace(META, name=b"x"), 1000),
        (replace(META, producer="p" * 129), 1000),
    ],
)
def test_what_contradicts_the_identity_is_not_written(meta, nbytes):
    with pytest.raises(FrameError):
        frames.encode(meta, memoryview(bytes(nbytes)), IDENTITY, PART_BYTES)


def test_the_largest_possible_header_fits():
    identity = Identity(fingerprint="f", codec="é" * frames.MAX_CODEC, block_size=frames.MAX_TOKENS, block_bytes=1)
    meta = frames.metas(naming.root(identity, "t"), [2**32 - 1] * 1024, 1024, "😊" * 128)[0]
    ((head, body),) = frames.encode(meta, memoryview(b"x"), identity, PART_BYTES)
    assert len(head) <= frames.MAX_FRAME - PART_BYTES
    frames.verify(frames.decode(head + bytes(body)), meta, identity, 0, PART_BYTES)


@pytest.mark.parametrize(
    ("max_payload", "expected"),
    [
        (64 << 20, 4 << 20),
        ((4 << 20) + (16 << 10), 4 << 20),
        (4 << 20, 2 << 20),
        (1 << 20, 512 << 10),
        (64 << 10, 32 << 10),
    ],
)
def test_parts_fit_the_servers_max_payload(max_payload, expected):
    identity = IDENTITY.model_copy(update={"block_bytes": 8 << 20})
    assert frames.part_bytes_for(max_payload, identity) == expected


@pytest.mark.parametrize(
    ("block_bytes", "layers", "expected"),
    [
        (737_280, 30, 21 * 24_576),  # SmolLM2 in fp32: 21 layers and 9
        (737_280 - 16, 30, 512 << 10),  # layers of different sizes
        (30 << 20, 30, 512 << 10),  # a layer does not fit
        (30 << 19, 30, 512 << 10),
        (1000, 10, (512 << 10) // 100 * 100),
    ],
)
def test_parts_are_whole_layers(block_bytes, layers, expected):
    identity = IDENTITY.model_copy(update={"block_bytes": block_bytes, "layers": layers})
    assert frames.part_bytes_for(1 << 20, identity) == expected


@pytest.mark.parametrize("max_payload", [0, 4096, 12 << 10])
def test_a_max_payload_too_small_for_any_frame_is_a_config_error(max_payload):
    with pytest.raises(ConfigError, match="max_payload"):
        frames.part_bytes_for(max_payload, IDENTITY)


@pytest.mark.parametrize(
    "changes", [{"block_bytes": 0}, {"block_bytes": 2**31}, {"block_size": 1025}, {"codec": "c" * 65}]
)
def test_identities_that_cannot_be_framed_are_config_errors(changes):
    frames.check_identity(IDENTITY)
    with pytest.raises(ConfigError):
        frames.check_identity(IDENTITY.model_copy(update=changes))


def test_metas_are_the_named_chain():
    found = frames.metas(ROOT, list(range(11)), 4, "w")
    assert [m.name for m in found] == naming.chain(ROOT, list(range(11)), 4)
    assert [m.parent for m in found] == [ROOT, found[0].name]
    assert found[1].token_ids == (4, 5, 6, 7)
