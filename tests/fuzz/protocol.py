"""Fuzz targets of NATS's own protocol, as the bulk connection reads it, and of subjects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from shared import subjects
from shared.bus import bulk_wire, wire
from shared.bus.nats_api import parse_answer
from shared.errors import BusError, ConfigError
from shared.subjects import Subjects
from shared.tenants import DEFAULT_TENANT

SUBJECTS = Subjects("a model")


def seeds_of_wire() -> list[bytes]:
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


def seeds_of_subjects() -> list[bytes]:
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


def check_subjects(data: bytes) -> None:
    subject = data.decode("utf-8", "replace")
    if subject.count(".") < 2:
        return  # nobody subscribes to such
    for read in READERS:
        with contextlib.suppress(ValueError):
            read(subject)
