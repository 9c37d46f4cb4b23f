"""NATS's protocol as bulk transfer speaks it: what is sent byte by byte, and what is refused."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.bus import bulk_wire
from shared.bus.bulk_wire import Delivery, Info, Server, parse_servers
from shared.errors import BusError, ConfigError, TooLarge


@pytest.mark.parametrize(
    ("url", "server"),
    [
        ("nats://host", Server("host", 4222)),
        ("host:4333", Server("host", 4333)),
        ("host", Server("host", 4222)),
        ("tls://host:1", Server("host", 1, tls=True)),
        ("nats://[::1]:5", Server("::1", 5)),
        ("nats://user:pass@host", Server("host", 4222, False, "user", "pass")),
        ("user:pass@host:1", Server("host", 1, False, "user", "pass")),
        ("nats://token@host", Server("host", 4222, False, "token", None)),
        ("nats://user:@host", Server("host", 4222, False, "user", "")),
        ("nats://u:p%41ss@host", Server("host", 4222, False, "u", "p%41ss")),  # as nats-py sends it
    ],
)
def test_an_address(url: str, server: Server) -> None:
    assert parse_servers(url) == [server]


def test_several_addresses() -> None:
    servers = parse_servers("nats://u:p@a:1, tls://b")
    assert servers == [Server("a", 1, False, "u", "p"), Server("b", 4222, True)]


@pytest.mark.parametrize("url", ["", "nats://", "nats://u:secret@", "ws://u:secret@h", "h:x", "h:99999", "a,,b"])
def test_what_is_no_address(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_servers(url)
    assert caught.value.field == "nats_url"
    assert "secret" not in str(caught.value)


def test_credentials_show_nowhere() -> None:
    for server in (Server("h", 1, False, "u", 'se"cret'), Server("h", 1, False, 'se"cret')):
        assert "cret" not in repr(server)
        assert server.label == "h:1"
        assert "cret" not in server.quoted(b"bad: " + bulk_wire.connect_command(server, "n"))
        assert "cret" not in server.quoted(b"x" * 500 + b'se"cret')
        assert server.quoted(b"'Stale\x1b[2J Connection\xff'") == "'Stale?[2J Connection\ufffd'"
        assert len(server.quoted(b"x" * 5000)) <= 200
    assert Server("h", 1, False, "user", "p").quoted(b"no user") == "no user"


def test_the_connect_command_logs_in() -> None:
    def said(server: Server) -> dict[str, object]:
        verb, _, options = bulk_wire.connect_command(server, "me").partition(b" ")
        assert verb == b"CONNECT"
        assert options.endswith(b"}\r\n") and options.count(b"\n") == 1
        parsed: dict[str, object] = json.loads(options)
        assert parsed["headers"] is True and parsed["no_responders"] is True and parsed["verbose"] is False
        assert parsed["name"] == "me"
        return {k: v for k, v in parsed.items() if k in ("user", "pass", "auth_token")}

    assert said(Server("h", 1)) == {}
    assert said(Server("h", 1, False, "u", "p\n")) == {"user": "u", "pass": "p\n"}
    assert said(Server("h", 1, False, "u", "")) == {"user": "u", "pass": ""}
    assert said(Server("h", 1, False, "t")) == {"auth_token": "t"}


def test_info() -> None:
    line = b'INFO {"headers":true,"max_payload":1048576,"tls_required":true,"more":[1]}'
    assert bulk_wire.parse_info(line) == Info(1048576, True, False)
    assert bulk_wire.parse_info(b'info {"headers":true,"max_payload":9e3}'.replace(b"9e3", b"9" * 30)).max_payload == (
        64 << 20
    )


@pytest.mark.parametrize(
    "line",
    [
        b"", b"INFO", b"INFO {", b"INFO []", b"INFO 1", b'HTTP {"headers":true,"max_payload":1}',
        b"INFO " + b"[" * 50_000,
        b'INFO {"max_payload":1}', b'INFO {"headers":true}', b'INFO {"headers":true,"max_payload":0}',
        b'INFO {"headers":true,"max_payload":true}', b'INFO {"headers":true,"max_payload":"1"}',
        b'INFO {"headers":1,"max_payload":1}', b"INFO \xff\xfe",
    ],
)  # fmt: skip
def test_what_is_no_info(line: bytes) -> None:
    with pytest.raises(BusError):
        bulk_wire.parse_info(line)


def test_deliveries() -> None:
    assert bulk_wire.parse_delivery(b"MSG a.b 1 5") == Delivery("a.b", 0, 5)
    assert bulk_wire.parse_delivery(b"MSG a.b 1 reply 0") == Delivery("a.b", 0, 0)
    assert bulk_wire.parse_delivery(b"hmsg a.b 1 12 17") == Delivery("a.b", 12, 5)
    assert bulk_wire.parse_delivery(b"HMSG a.b 1 reply 12 12") == Delivery("a.b", 12, 0)


@pytest.mark.parametrize(
    "line",
    [
        b"", b"MSG", b"MSG a 1", b"MSG a 1 r x 5", b"MSG a 1 -5", b"MSG a 1 +5", b"MSG a 1 5_0", b"MSG a 1 5.0",
        b"MSG a 1 \xc2\xb2", b"HMSG a 1 5", b"HMSG a 1 0 5", b"HMSG a 1 6 5", b"HMSG a 1 r 5 -5", b"PUB a 5",
    ],
)  # fmt: skip
def test_what_is_no_delivery(line: bytes) -> None:
    with pytest.raises(BusError):
        bulk_wire.parse_delivery(line)


def test_headers() -> None:
    assert bulk_wire.parse_headers(b"NATS/1.0\r\nA: b\r\nC:d:e\r\n\r\n") == (None, {"A": "b", "C": "d:e"})
    assert bulk_wire.parse_headers(b"NATS/1.0 503\r\n\r\n") == (503, {})
    assert bulk_wire.parse_headers(b"NATS/1.0 404 Message Not Found\r\n\r\n") == (404, {})
    assert bulk_wire.parse_headers(b"NATS/1.0 what\r\nno colon\r\n\r\n") == (None, {})
    assert bulk_wire.parse_headers(b"NATS/1.0\r\nNats-Subject: forged\r\nNats-Subject: true\r\n\r\n")[1] == {
        "Nats-Subject": "true"
    }
    for block in (b"", b"\r\n\r\n", b"HTTP/1.1 200\r\n\r\n", b"NATS/1.05\r\n\r\n"):
        with pytest.raises(BusError):
            bulk_wire.parse_headers(block)


def test_publishing_byte_by_byte() -> None:
    assert bulk_wire.publish("a.b", "r", {}, 5) == b"PUB a.b r 5\r\n"
    headers = b"NATS/1.0\r\nK: v\r\n\r\n"
    assert (
        bulk_wire.publish("a.b", "r", {"K": "v"}, 5)
        == b"HPUB a.b r %d %d\r\n" % (len(headers), len(headers) + 5) + headers
    )


@pytest.mark.parametrize("subject", ["", "a b", "a\r\nPUB b 0", "a\tb", "a\n"])
def test_a_subject_cannot_smuggle_a_command(subject: str) -> None:
    with pytest.raises(BusError):
        bulk_wire.publish(subject, "r", {}, 1)


def test_a_subject_that_the_server_would_cut_the_connection_for() -> None:
    with pytest.raises(TooLarge):
        bulk_wire.publish("a" * 4090, "r", {}, 1)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for parse in (bulk_wire.parse_info, bulk_wire.parse_delivery, bulk_wire.parse_headers):
        for prefix in (b"", b"INFO ", b"MSG a ", b"HMSG a 1 ", b"NATS/1.0"):
            with contextlib.suppress(BusError):
                parse(prefix + data)
