"""What is fuzzed: for each family of decoders, valid bytes to start from and a check that holds for any bytes.

A check returns when the bytes gave a value that says the same when it is encoded again, or the decoder's typed error.
Whatever else happens is a bug and is raised.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from shared import subjects
from shared.bus import bulk_wire, wire
from shared.bus.nats_api import parse_answer
from shared.cache import frames, naming
from shared.cache.frames import BlockMeta
from shared.codec import Format, decode, decode_event, encode, format_of
from shared.errors import BusError, ConfigError, FrameError, RequestError
from shared.messages import MESSAGE_TYPES, Event, Failed, Generate, Identity, Message
from shared.subjects import Subjects
from shared.tenants import DEFAULT_TENANT

IDENTITY = Identity(fingerprint="f", codec="int8", block_size=4, block_bytes=200)
PART = 128
SUBJECTS = Subjects("a model")
LONGEST_ERROR = 8192
"""Characters. An error goes back to a client, so bytes must not blow it up."""


@dataclass(frozen=True)
class Target:
    seeds: Callable[[], Sequence[bytes]]
    check: Callable[[bytes], None]


def _tellable(error: RequestError) -> None:
    """Clients hear of it, in either encoding."""
    assert len(error.message) <= LONGEST_ERROR and len(error.field or "") <= LONGEST_ERROR
    failed = Failed(id="x", code=error.code, message=error.message, field=error.field)
    for format in Format:
        assert decode_event(encode(failed, format)) == failed


def check_message(data: bytes) -> None:
    for kind in MESSAGE_TYPES:
        try:
            message = decode(data, kind)
        except RequestError as error:
            _tellable(error)
        else:
            _same_again(message, format_of(data) if issubclass(kind, Generate | Event) else Format.MSGPACK)


def _same_again(message: Message, came_as: Format) -> None:
    again = encode(message, came_as)
    assert decode(again, type(message)) == message


def message_seeds() -> list[bytes]:
    from tests.unit.test_messages import EXAMPLES

    found = [encode(message) for message in EXAMPLES]
    return found + [encode(m, Format.JSON) for m in EXAMPLES if isinstance(m, Generate | Event)]


def block() -> tuple[BlockMeta, bytes]:
    """The one that frames are asked for."""
    parent, tokens = naming.root(IDENTITY, "t"), (1, 2, 3, 4)
    return BlockMeta(naming.child(parent, tokens), parent, tokens, "worker", "t"), bytes(range(200))


def frame_seeds() -> list[bytes]:
    meta, payload = block()
    return [head + bytes(body) for head, body in frames.encode(meta, memoryview(payload), IDENTITY, PART)]


def check_frame(data: bytes) -> None:
    """What passes for a part of the block has that part's very bytes, arrived whole or piece by piece."""
    with contextlib.suppress(FrameError):
        head = frames.read_head(_Pieces(data))
        frames.decode_apart(head, memoryview(data)[len(head) :])
    try:
        frame = frames.decode(data)
    except FrameError:
        return
    meta, payload = block()
    for part in range(frames.part_count(len(payload), PART)):
        try:
            frames.verify(frame, meta, IDENTITY, part, PART)
        except FrameError:
            continue
        assert bytes(frame.body) == payload[part * PART : (part + 1) * PART]


class _Pieces:
    """`take` of `frames.read_head`: a reader refuses more than there is."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def __call__(self, count: int) -> bytes:
        assert count <= frames.MAX_HEAD, "room is asked for that no head needs"
        if not 0 <= count <= len(self._data) - self._at:
            raise FrameError("too short")
        self._at += count
        return self._data[self._at - count : self._at]


def wire_seeds() -> list[bytes]:
    return [
        b'INFO {"headers":true,"max_payload":1048576,"tls_required":false}',
        b"MSG _INBOX.a.1 1 5",
        b"HMSG _INBOX.a.1 1 reply 40 45",
        b"NATS/1.0 404 No Messages\r\n\r\n",
        b"NATS/1.0\r\nNats-Subject: trine.m.kv.t.00.0\r\nNats-Sequence: 7\r\n\r\n",
        b'{"stream":"S","seq":7}',
        b'{"error":{"code":404,"err_code":10059,"description":"stream not found"}}',
        b"nats://user:secret@127.0.0.1:4222,tls://[::1]:1",
    ]


def check_wire(data: bytes) -> None:
    with contextlib.suppress(BusError):
        info = bulk_wire.parse_info(data)
        assert 0 < info.max_payload <= bulk_wire.MAX_PAYLOAD
    with contextlib.suppress(BusError):
        delivery = bulk_wire.parse_delivery(data)
        assert delivery.payload >= 0 and delivery.headers >= 0
    with contextlib.suppress(BusError):
        status, _ = bulk_wire.parse_headers(data)
        assert status is None or 0 <= status <= 999
    with contextlib.suppress(BusError):
        parse_answer(data)
    text = data.decode("utf-8", "replace")
    with contextlib.suppress(ConfigError):
        assert bulk_wire.parse_servers(text)
    wire.user_of(text), wire.without_login(text), wire.names_user(text)
    assert wire.matches(">", text)


def subject_seeds() -> list[bytes]:
    name = bytes(32)
    found = [
        SUBJECTS.request("low", "acme"), SUBJECTS.block(name, 3, "acme"), SUBJECTS.cancel("é.*", "acme"),
        SUBJECTS.again("r"), SUBJECTS.dead("r", DEFAULT_TENANT), SUBJECTS.beat("decode", "d 1"), SUBJECTS.claims,
    ]  # fmt: skip
    return [subject.encode() for subject in found]


READERS: tuple[Callable[[str], Any], ...] = (
    subjects.model_of, subjects.last, subjects.priority_of, subjects.tenant_of_request, subjects.cancelled_of,
    subjects.asked_again, subjects.dead_of, subjects.block_of,
)  # fmt: skip


def check_subject(data: bytes) -> None:
    subject = data.decode("utf-8", "replace")
    if subject.count(".") < 2:
        return  # nobody subscribes to such
    for read in READERS:
        with contextlib.suppress(ValueError):
            read(subject)


TARGETS = {
    "messages": Target(message_seeds, check_message),
    "frames": Target(frame_seeds, check_frame),
    "wire": Target(wire_seeds, check_wire),
    "subjects": Target(subject_seeds, check_subject),
}

BOMBS = (
    b"\x91" * 5000, b"\x81\xa1v" * 3000,
    b"[" * 20_000, b'{"id":' * 5000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xd6\xff\0\0\0\0",
    b"\xcf" + b"\xff" * 8, b"\xcb\x7f\xf8" + bytes(6), b"9" * 5000, b"TRKV\xff\xff\xff\xff",
    msgpack.packb({"shape": [2**31, 2**31]}), struct.pack("<Q", 2**63),
)  # fmt: skip
"""Nesting without end, lengths beyond all memory, numbers beyond all words: spliced into what is valid."""
