"""Refused requests are answered where their client listens, whatever their bytes are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgpack
import pytest

from services.decode.refusal import SMALL, Refusals, readable_id
from shared.bus.base import Incoming
from shared.bus.memory import MemoryBroker, MemoryBus
from shared.codec import decode_event
from shared.errors import InvalidField
from shared.messages import MAX_ID, Failed
from shared.streams import REQUEST_HEADER, event_stream
from shared.subjects import Subjects
from shared.telemetry import Counters

SUBJECTS = Subjects("m")
HUGE = b"x" * (6 << 20)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'{"id":"a1","prompt":3}', "a1"),
        ('{"id":"ä😀"}'.encode(), "ä😀"),
        (msgpack.packb({"id": "a1", "prompt": 3}), "a1"),
        (b'{"id":"a1","prompt":"' + HUGE + b'"}', "a1"),
        (b'{"id" : "a1","prompt":' + b"[" * SMALL, "a1"),
        (b'{"id":"a1","prompt":' + b"[" * 5000, "a1"),
        (b'{"prompt":"' + HUGE + b'","id":"a1"}', None),
        (b'{"id":"\\ud800"}', None),
        (b'{"id":"\\ud83d\\ude00"}', "😀"),
        (b'{"id":"\xff"}', "\ufffd"),
        (b'{"id":""}', None),
        (b'{"id":7}', None),
        (b'{"id":["a1"]}', None),
        (b'{"id":"' + b"i" * MAX_ID + b'"}', "i" * MAX_ID),
        (b'{"id":"' + b"i" * (MAX_ID + 1) + b'"}', None),
        (b"{}", None),
        (b"", None),
        (b"garbage", None),
        (bytes(range(256)), None),
        (b"\x91" * 5000, None),
        (msgpack.packb({"v": 1, "id": "a1", "prompt": HUGE}), "a1"),
        (msgpack.packb({"prompt": HUGE, "id": "a1"}), None),
        (b"\xdf\xff\xff\xff\xff\xa1v\x01\xa2id\xa2a1", "a1"),
        (b"\x82\xa1v" + b"\x91" * 5000 + b"\x01\xa2id\xa2a1", None),
        (msgpack.packb({"id": b"a1"}), None),
        (msgpack.packb(["id", "a1"]), None),
        (msgpack.packb({"id": msgpack.ExtType(5, b"a1")}), None),
        (msgpack.packb({"id": "a1"})[:-1], None),
        (b"\x81\xa2id\xa3\xed\xa0\x80", None),  # a lone surrogate in UTF-8
    ],
)
def test_the_id_is_made_out_or_given_up(data: bytes, expected: str | None) -> None:
    found = readable_id(data)
    assert found == expected
    if found is not None:
        SUBJECTS.events(found)  # can be spelled


@dataclass
class Job:
    """A message of the queue; remembers how it was ended."""

    data: bytes
    seq: int = 7
    subject: str = SUBJECTS.request("normal")
    headers: Mapping[str, str] = field(default_factory=dict)
    delivered: int = 1
    stamp: int = 0
    age: float = 0.0
    handle: str = ""
    ended: list[str] = field(default_factory=list)

    async def ack(self) -> None:
        self.ended.append("ack")

    async def nak(self, delay: float = 0.0) -> None:
        self.ended.append("nak")

    async def term(self) -> None:
        self.ended.append("term")

    async def hold(self) -> None:
        self.ended.append("hold")


class Desk:
    """A `Refusals` on a bus of its own."""

    def __init__(self, **bus: Any) -> None:
        self.bus = MemoryBus(MemoryBroker(), **bus)
        self.refusals = Refusals(self.bus, SUBJECTS, "w", Counters(), self.ensure)

    async def ensure(self) -> None:
        await self.bus.ensure_stream(event_stream(SUBJECTS))

    async def stored(self, request_id: str) -> list[tuple[str, Any]]:
        found = await self.bus.read(SUBJECTS.event_stream, SUBJECTS.events(request_id))
        return [(m.headers[REQUEST_HEADER], decode_event(m.data)) for m in found]


@pytest.mark.anyio
async def test_one_failed_event_in_the_format_of_the_request_names_the_request() -> None:
    desk = Desk()
    await desk.ensure()
    job = Job(b'{"id":"a1","prompt":3}')
    await desk.refusals.refuse(job, InvalidField("prompt: not a string", field="prompt"))
    [(request, event)] = await desk.stored("a1")
    assert request == "7"
    assert isinstance(event, Failed)
    assert (event.id, event.code, event.field) == ("a1", "invalid_field", "prompt")
    assert job.ended == ["term"]


@pytest.mark.anyio
async def test_without_a_readable_id_the_refusal_goes_to_the_subject_of_refusals() -> None:
    desk = Desk()
    heard: list[bytes] = []

    async def on_refused(message: Incoming) -> None:
        heard.append(message.data)

    await desk.bus.subscribe(SUBJECTS.refused(), on_refused)
    job = Job(b'{"id":"\\ud800","prompt":"1"}')
    await desk.refusals.refuse(job, InvalidField("id: not Unicode", field="id"))
    await desk.bus.publish("elsewhere", b"")
    event = decode_event(heard[0])
    assert isinstance(event, Failed)
    assert event.id == "seq-7"
    assert job.ended == ["term"]


@pytest.mark.anyio
async def test_a_lost_event_stream_is_created_again_and_the_request_stays_queued() -> None:
    desk = Desk()
    job = Job(b'{"id":"a1"}')
    await desk.refusals.refuse(job, InvalidField("no"))
    assert job.ended == []
    await desk.refusals.refuse(job, InvalidField("no"))
    assert len(await desk.stored("a1")) == 1
    assert job.ended == ["term"]


@pytest.mark.anyio
async def test_a_refusal_that_no_message_can_hold_ends_the_request_not_the_worker() -> None:
    desk = Desk(max_payload=100)
    await desk.ensure()
    job = Job(b'{"id":"a1"}')
    await desk.refusals.refuse(job, InvalidField("x" * 1000))
    assert await desk.stored("a1") == []
    assert job.ended == ["term"]
