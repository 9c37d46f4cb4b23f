"""The bulk connection to NATS: logging in, servers that die, hang and lie, and what is sent when."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.bus import bulk_link
from shared.bus.base import StreamSpec
from shared.bus.block_link import Item, Reader
from shared.bus.bulk_link import BulkLink
from shared.bus.bulk_stream import StreamLink
from shared.bus.bulk_wire import parse_servers
from shared.bus.embedded import EmbeddedNats
from shared.bus.login import Login
from shared.bus.nats import NatsBus
from shared.errors import (
    BusDisconnected,
    BusError,
    ConfigError,
    FrameError,
    SequenceConflict,
    StreamFull,
    StreamMissing,
    TrineError,
)
from tests.lying_server import CERTIFICATE, MAX_PAYLOAD, LyingServer, Peer, Turn, free_port, nats_server

MiB = 1 << 20
MAX_PENDING = 8 * MiB
SPEC = StreamSpec("B", ("b.>",), max_bytes=128 * MiB, max_msgs_per_subject=1)


def soon(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def put(link: StreamLink, *subjects: str, data: bytes = b"x", within: float = 5.0) -> list[int | TrineError]:
    return link.put([Item(subject, (data,)) for subject in subjects], soon(within))


def get(link: StreamLink, *subjects: str, within: float = 5.0) -> dict[str, bytes]:
    found: dict[str, bytes] = {}

    def receive(subject: str, seq: int, size: int, reader: Reader) -> None:
        assert subject not in found
        found[subject] = reader.exactly(size)

    link.get("B", subjects, receive, soon(within))
    return found


def kinds(answers: list[int | TrineError]) -> list[type]:
    return [type(answer) for answer in answers]


def make_stream(url: str) -> None:
    async def make() -> None:
        bus = await NatsBus.connect(url, name="test", wait=5)
        await bus.ensure_stream(SPEC)
        await bus.close()

    asyncio.run(make())


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedNats]:
    with EmbeddedNats(max_payload=MAX_PAYLOAD, max_pending=MAX_PENDING) as running:
        make_stream(running.url)
        yield running


@pytest.fixture
def link(server: EmbeddedNats) -> Iterator[StreamLink]:
    made = StreamLink(server.url, "test", max_pending=MAX_PENDING)
    yield made
    made.close()


class TestLogin:
    @pytest.mark.parametrize(
        ("config", "login", "wrong"),
        [
            ('authorization { user: u, password: "p%41ss" }', "u:p%41ss", "u:sesame"),
            ('authorization { token: "t%41k" }', "t%41k", "sesame"),
        ],
        ids=["password", "token"],
    )
    def test_as_the_control_connection_does(self, tmp_path: Path, config: str, login: str, wrong: str) -> None:
        with nats_server(tmp_path, config) as address:
            make_stream(f"nats://{login}@{address}")
            link = StreamLink(f"nats://{login}@{address}", "x")
            assert put(link, "b.a") == [1]
            assert get(link, "b.a") == {"b.a": b"x"}
            link.close()
            refused = StreamLink(f"nats://{wrong}@{address}", "x")
            (answer,) = put(refused, "b.b")
            assert isinstance(answer, ConfigError)
            with pytest.raises(ConfigError, match="refuses our credentials") as caught:
                get(refused, "b.a")
            assert "sesame" not in f"{caught.value}{answer}{caught.value!r}"

    def test_with_tls(self, tmp_path: Path, server: EmbeddedNats) -> None:
        config = 'tls { cert_file: "{folder}/cert.pem", key_file: "{folder}/key.pem" }'
        trusting = ssl.create_default_context(cadata=CERTIFICATE)
        data = os.urandom(900_000)
        with nats_server(tmp_path, config) as address:
            self._make_stream_with_tls(f"tls://{address}", trusting)
            for number, scheme in enumerate(("nats", "tls")):  # the server requires it in any case
                link = StreamLink(f"{scheme}://{address}", "x", login=Login(tls=trusting))
                subjects = [f"b.{number}.{i}" for i in range(20)]
                assert kinds(put(link, *subjects, data=data)) == [int] * 20
                assert get(link, *subjects) == dict.fromkeys(subjects, data)
                link.close()
            strict = StreamLink(f"tls://u:sesame@{address}", "x")
            (answer,) = put(strict, "b.a")
            assert isinstance(answer, BusDisconnected)
            assert "certificate" in str(answer)
        for url, context in ((server.url, trusting), (server.url.replace("nats", "tls"), None)):
            with pytest.raises(BusError, match="does not offer TLS"):
                get(StreamLink(url, "x", login=Login(tls=context)), "b.a")

    def _make_stream_with_tls(self, url: str, trusting: ssl.SSLContext) -> None:
        link = BulkLink(parse_servers(url), "maker", trusting)
        created: list[bytes] = []
        with link.operation(soon()):
            link.connect()
            config = b'{"name":"B","subjects":["b.>"],"storage":"memory","allow_direct":true}'
            head = f"PUB $JS.API.STREAM.CREATE.B {link.inbox}.1 {len(config)}\r\n".encode()
            link.send([head, config, b"\r\n"])
            link.receive(lambda message: created.append(message.reader.exactly(message.reader.left)))
        assert b'"error"' not in created[0]
        link.close()

    def test_nothing_said_before_tls_is_believed(self) -> None:
        def turn(peer: Peer) -> None:
            info = b'INFO {"headers":true,"max_payload":1000,"tls_required":true}\r\n'
            peer.say(info, b"+OK\r\nPONG\r\n")
            peer.until_closed()

        with LyingServer(turn) as lying, pytest.raises(BusError, match="before TLS"):
            get(StreamLink(lying.url, "x"), "b.a")

    def test_credentials_go_out_in_the_clear_only_where_tls_is_not_asked_for(self) -> None:
        heard: list[bytes] = []

        def turn(peer: Peer) -> None:
            peer.info()
            heard.append(peer.line())

        with LyingServer(turn) as lying:
            address = lying.url.removeprefix("nats://")
            for url, context in (
                (f"tls://u:sesame@{address}", None),
                (f"u:sesame@{address}", ssl.create_default_context()),
            ):
                with pytest.raises(BusError):
                    get(StreamLink(url, "x", login=Login(tls=context)), "b.a")
            assert heard == []
            with pytest.raises(BusError):
                get(StreamLink(f"u:sesame@{address}", "x"), "b.a")
        assert b"sesame" in heard[0]

    def test_a_server_that_repeats_our_credentials_is_not_quoted(self) -> None:
        def turn(peer: Peer) -> None:
            peer.info()
            peer.say(b"-ERR ", peer.line(), b"\r\n")

        with LyingServer(turn) as lying:
            url = lying.url.replace("nats://", "nats://u:sesame@")
            (answer,) = put(StreamLink(url, "x"), "b.a")
        assert isinstance(answer, BusError)
        assert "sesame" not in repr(answer)

    def test_another_server_of_several(self, server: EmbeddedNats) -> None:
        def silent(peer: Peer) -> None:
            peer.until_closed()

        with LyingServer(silent) as hanging:
            link = StreamLink(f"nats://127.0.0.1:{free_port()},{hanging.url},{server.url}", "x")
            started = time.monotonic()
            assert get(link, "b.several", within=2.0) == {}
            assert time.monotonic() - started < 1.9
            assert get(link, "b.several") == {}
            assert hanging.connections == 1
            link.close()


class TestARealServer:
    def test_more_than_max_pending_is_got_whole(self, link: StreamLink) -> None:
        subjects = [f"b.big.{i}" for i in range(40)]
        assert kinds(put(link, *subjects, data=bytes(900_000), within=30.0)) == [int] * 40
        assert len(subjects) * 900_000 > 2 * MAX_PENDING
        got = get(link, *reversed(subjects), "b.big.none", within=30.0)
        assert list(got) == subjects
        assert all(len(data) == 900_000 for data in got.values())

    def test_more_subjects_than_a_page_names(self, link: StreamLink) -> None:
        subjects = [f"b.small.{i}" for i in range(2300)]
        assert all(isinstance(answer, int) for answer in put(link, *subjects))
        assert list(get(link, *subjects)) == subjects

    def test_a_subject_that_no_line_holds_spoils_nothing(self, link: StreamLink) -> None:
        answers = put(link, "b.lines.a", "b. PUB x 0", "b." + "y" * 5000, "b.lines.b")
        assert [isinstance(answer, int) for answer in answers] == [True, False, False, True]

    def test_a_publisher_cannot_forge_what_the_server_says(self, server: EmbeddedNats, link: StreamLink) -> None:
        raw = BulkLink(parse_servers(server.url), "forger")
        with raw.operation(soon()):
            raw.connect()
            for subject, headers in (
                ("b.forged.end", b"NATS/1.0 404\r\nA: b\r\n\r\n"),
                ("b.forged.name", b"NATS/1.0\r\nNats-Subject: b.forged.other\r\nNats-Sequence: 0\r\n\r\n"),
            ):
                head = f"HPUB {subject} {raw.inbox}.1 {len(headers)} {len(headers)}\r\n".encode()
                raw.send([head, headers, b"\r\n"])
                raw.receive(lambda message: None)
        raw.close()
        assert kinds(put(link, "b.forged.true")) == [int]
        assert get(link, "b.forged.end", "b.forged.true", "b.forged.other") == {
            "b.forged.end": b"",
            "b.forged.true": b"x",
        }
        assert get(link, "b.forged.name") == {"b.forged.name": b""}

    def test_a_restart_between_two_calls_goes_unnoticed(self) -> None:
        with EmbeddedNats() as server:
            make_stream(server.url)
            link = StreamLink(server.url, "x")
            assert put(link, "b.a") == [1]
            server.kill()
            server.start()
            assert kinds(put(link, "b.a")) == [StreamMissing]
            make_stream(server.url)
            assert get(link, "b.a") == {}
            server.kill()
            assert kinds(put(link, "b.a", "b.b")) == [BusDisconnected] * 2
            link.close()

    def test_a_frozen_server_costs_no_more_than_the_deadline(self) -> None:
        with EmbeddedNats() as server:
            make_stream(server.url)
            link = StreamLink(server.url, "x")
            assert put(link, "b.a") == [1]
            pid = server.pid
            assert pid is not None
            os.kill(pid, signal.SIGSTOP)
            os.waitpid(pid, os.WUNTRACED)  # until it has stopped
            try:
                for call in (lambda: put(link, "b.b", within=0.4), lambda: put(link, "b.c", within=0.4)):
                    started = time.monotonic()
                    assert kinds(call()) == [BusDisconnected]
                    assert time.monotonic() - started < 2
            finally:
                os.kill(pid, signal.SIGCONT)
            time.sleep(0.2)  # longer than it is not asked after one failure
            assert get(link, "b.a") == {"b.a": b"x"}
            link.close()

    def test_close_ends_a_call_that_waits(self) -> None:
        waiting = threading.Event()

        def turn(peer: Peer) -> None:
            peer.greet()
            peer.published()
            waiting.set()
            peer.until_closed()

        with LyingServer(turn) as lying:
            link = StreamLink(lying.url, "x")
            answers: list[int | TrineError] = []
            thread = threading.Thread(target=lambda: answers.extend(put(link, "b.a", within=8)))
            thread.start()
            assert waiting.wait(5)
            with pytest.raises(RuntimeError, match="one thread"):
                put(link, "b.b")
            link.close()
            thread.join(1)
            assert not thread.is_alive()
            assert kinds(answers) == [BusDisconnected]
            assert lying.connections == 1


def after_greeting(*said: bytes) -> Turn:
    def turn(peer: Peer) -> None:
        peer.greet()
        peer.published()
        peer.say(*said)
        peer.until_closed()

    return turn


def before_greeting(*said: bytes) -> Turn:
    def turn(peer: Peer) -> None:
        peer.say(*said)
        peer.until_closed()

    return turn


def honest(peer: Peer) -> None:
    """Stores nothing and says so."""
    peer.greet()
    while True:
        subject, reply, _ = peer.published()
        if subject.startswith(b"$JS.API.DIRECT.GET."):
            peer.status(reply, 404)
        else:
            peer.ack(reply, 1)


HOSTILE: dict[str, Turn] = {
    "closes": lambda peer: None,
    "closes after the greeting": lambda peer: peer.info(),
    "another protocol": before_greeting(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
    "INFO that is no object": before_greeting(b"INFO [1]\r\n"),
    "INFO without end": before_greeting(b"INFO {", b" " * 100_000),
    "a line without end": after_greeting(b"x" * 100_000),
    "an unknown command": after_greeting(b"FOO bar\r\n"),
    "an empty line": after_greeting(b"\r\n"),
    "bytes": after_greeting(bytes(range(256)) * 10, b"\n"),
    "a size that is none": after_greeting(b"MSG _INBOX.x 1 -1\r\n"),
    "an absurd size": after_greeting(b"MSG _INBOX.x 1 99999999999999999\r\n"),
    "a size of a thousand digits": after_greeting(b"MSG _INBOX.x 1 ", b"9" * 1000, b"\r\n"),
    "a size above max_payload": after_greeting(b"MSG _INBOX.x 1 %d\r\n" % (MAX_PAYLOAD + 1)),
    "absurd headers": after_greeting(b"HMSG _INBOX.x 1 1000000 1000000\r\n"),
    "headers that are none": after_greeting(b"HMSG _INBOX.x 1 4 4\r\nABCD\r\n"),
    "a message that is longer than it says": after_greeting(b"MSG _INBOX.x 1 3\r\nABCDE+OK\r\n"),
    "an error": after_greeting(b"-ERR 'Permissions Violation for Publish to \"b.a\"'\r\n"),
    "a bare error": after_greeting(b"-ERR\r\n"),
}


@pytest.mark.parametrize("turn", HOSTILE.values(), ids=HOSTILE)
def test_a_server_that_does_not_speak_nats(turn: Turn) -> None:
    with LyingServer(turn, turn, honest) as lying:
        link = StreamLink(lying.url, "x")
        started = time.monotonic()
        (answer,) = put(link, "b.a", within=3)
        assert isinstance(answer, BusError)
        with pytest.raises(BusError):
            get(link, "b.a", within=3)
        while kinds(put(link, "b.a")) != [int]:
            assert time.monotonic() - started < 2.5
            time.sleep(0.02)
        assert time.monotonic() - started < 2.5
        link.close()


class TestPut:
    def test_the_time_to_connect_in_is_not_that_of_the_call(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def turn(peer: Peer) -> None:
            peer.greet()
            _, reply, _ = peer.published()
            time.sleep(0.5)
            peer.ack(reply, 3)

        monkeypatch.setattr(bulk_link, "CONNECT_S", 0.3)
        with LyingServer(turn) as lying:
            link = StreamLink(lying.url, "x")
            assert put(link, "b.a") == [3]
            link.close()

    def test_no_more_than_the_window_is_in_flight(self) -> None:
        seen: list[int] = []

        def turn(peer: Peer) -> None:
            peer.greet(max_payload=8 * MiB)
            for count, size in ((16, 10), (4, 8_000_000)):
                waiting = [peer.published()[1] for _ in range(count)]
                assert peer.says_nothing(0.2)
                for _ in range(2 * count):
                    peer.ack(waiting.pop(0), 7)
                    _, reply, data = peer.published()
                    assert len(data) == size
                    waiting.append(reply)
                    seen.append(len(waiting))
                for reply in waiting:
                    peer.ack(reply, 7)
            peer.until_closed()

        with LyingServer(turn) as lying:
            link = StreamLink(lying.url, "x")
            assert put(link, *(f"b.{i}" for i in range(48)), data=bytes(10)) == [7] * 48
            assert put(link, *(f"b.{i}" for i in range(12)), data=bytes(8_000_000)) == [7] * 12
            link.close()
        assert len(seen) == 40

    def test_a_server_that_stops_reading_costs_no_more_than_the_deadline(self) -> None:
        stopped = threading.Event()

        def turn(peer: Peer) -> None:
            peer.greet()
            stopped.wait(5)

        with LyingServer(turn) as lying:
            link = StreamLink(lying.url, "x")
            started = time.monotonic()
            answers = put(link, *(f"b.{i}" for i in range(64)), data=bytes(1_000_000), within=0.5)
            assert 0.4 < time.monotonic() - started < 2
            assert set(kinds(answers)) == {BusDisconnected}
            stopped.set()

    def test_a_full_ingest_queue_is_waited_for(self) -> None:
        busy = b'{"error":{"code":429,"err_code":10167,"description":"too many requests"}}'
        stamps: list[float] = []

        def turn(peer: Peer) -> None:
            peer.greet()
            refused = {b"b.1": 4, b"b.2": 1}
            for _ in range(8):
                subject, reply, _ = peer.published()
                stamps.append(time.monotonic())
                if refused.get(subject, 0):
                    refused[subject] -= 1
                    peer.answer(reply, busy)
                else:
                    peer.ack(reply, 5)
            while True:
                peer.answer(peer.published()[1], busy)

        with LyingServer(turn) as lying:
            link = StreamLink(lying.url, "x")
            assert put(link, "b.1", "b.2", "b.3") == [5, 5, 5]
            assert stamps[-1] - stamps[0] > 0.5 * (0.01 + 0.02 + 0.04 + 0.08)
            started = time.monotonic()
            assert kinds(put(link, "b.4", within=0.4)) == [StreamFull]
            assert time.monotonic() - started < 1
            link.close()

    def test_answers_that_are_none(self) -> None:
        answers = [
            b"", b"{", b"[]", b'{"seq":"5"}', b'{"seq":0}', b'{"seq":true}', b"[" * 16_000, bytes(50_000),
            b'{"error":{"code":"x","err_code":[]}}', b'{"error":{"code":400,"err_code":10071}}', b'{"seq":9}',
        ]  # fmt: skip

        def turn(peer: Peer) -> None:
            peer.greet()
            for answer in answers:
                peer.answer(peer.published()[1], answer)
            peer.until_closed()

        with LyingServer(turn) as lying:
            link = StreamLink(lying.url, "x")
            got = put(link, *(f"b.{i}" for i in range(len(answers))))
            assert got[-1] == 9
            assert isinstance(got[-2], SequenceConflict)
            assert all(isinstance(answer, BusError) for answer in got[:-1])
            assert lying.connections == 1
            link.close()

    def test_a_late_answer_is_not_the_next_calls(self) -> None:
        late: list[bytes] = []

        def first(peer: Peer) -> None:
            peer.greet()
            late.append(peer.published()[1])
            peer.until_closed()

        def second(peer: Peer) -> None:
            peer.greet()
            _, reply, _ = peer.published()
            peer.ack(late[0], 111)
            peer.ack(reply, 222)
            peer.ack(reply, 333)
            _, reply, _ = peer.published()
            peer.ack(reply, 444)
            peer.until_closed()

        with LyingServer(first, second) as lying:
            link = StreamLink(lying.url, "x")
            assert kinds(put(link, "b.a", within=0.2)) == [BusDisconnected]
            assert put(link, "b.b") == [222]
            assert put(link, "b.c") == [444]
            link.close()

    def test_what_was_answered_before_the_connection_went_is_known(self) -> None:
        def turn(peer: Peer) -> None:
            peer.greet()
            replies = [peer.published()[1] for _ in range(3)]
            peer.ack(replies[1], 5)

        with LyingServer(turn) as lying:
            answers = put(StreamLink(lying.url, "x"), "b.a", "b.b", "b.c")
            assert kinds(answers) == [BusDisconnected, int, BusDisconnected]
            assert lying.connections == 1


class TestGet:
    def test_a_ping_meanwhile_is_answered(self) -> None:
        def turn(peer: Peer) -> None:
            peer.greet()
            _, reply, _ = peer.published()
            peer.say(b"PING\r\n")
            assert peer.line() == b"PONG"
            peer.info(max_payload=100)  # of a cluster that changes
            peer.message(reply, "b.a", 1, b"data")
            peer.status(reply, 204)
            peer.until_closed()

        with LyingServer(turn) as lying:
            link = StreamLink(lying.url, "x")
            assert get(link, "b.a") == {"b.a": b"data"}
            link.close()

    def test_what_was_not_asked_for_or_came_already_is_dropped(self) -> None:
        asked: list[bytes] = []

        def turn(peer: Peer) -> None:
            peer.greet()
            _, reply, ask = peer.published()
            for subject in ("b.other", "b.a", "b.a"):
                peer.message(reply, subject, 1, subject.encode())
            peer.message(reply + b"0", "b.b", 1, b"of another call")
            peer.stored(
                reply, "NATS/1.0 404\r\nNats-Subject: b.c\r\nNats-Sequence: 3\r\n\r\n", b"its publisher's status"
            )
            peer.status(reply, 204)  # early
            _, reply, ask = peer.published()
            asked.append(ask)
            peer.message(reply, "b.b", 2, b"b.b")
            peer.status(reply, 204)
            peer.until_closed()

        with LyingServer(turn) as lying:
            link = StreamLink(lying.url, "x")
            got = get(link, "b.a", "b.b", "b.c")
            assert got == {"b.a": b"b.a", "b.b": b"b.b", "b.c": b"its publisher's status"}
            link.close()
        assert b'["b.b"]' in asked[0]

    def test_batches_that_bring_nothing_end(self) -> None:
        batches: list[bytes] = []

        def turn(peer: Peer) -> None:
            peer.greet()
            while True:
                batches.append(peer.published()[1])
                peer.status(batches[-1], 204)

        with LyingServer(turn) as lying, pytest.raises(BusError, match="without a message"):
            get(StreamLink(lying.url, "x"), "b.a")
        assert len(batches) < 10

    @pytest.mark.parametrize("sequence", ["", "-1", "x", "9" * 5000, "²"])
    def test_a_sequence_that_is_none(self, sequence: str) -> None:
        def turn(peer: Peer) -> None:
            peer.greet()
            _, reply, _ = peer.published()
            peer.stored(reply, f"NATS/1.0\r\nNats-Subject: b.a\r\nNats-Sequence: {sequence}\r\n\r\n", b"")

        with LyingServer(turn) as lying, pytest.raises(BusError, match="sequence"):
            get(StreamLink(lying.url, "x"), "b.a")

    def test_a_connection_that_goes_in_the_middle_of_a_payload(self) -> None:
        def turn(peer: Peer) -> None:
            peer.greet()
            _, reply, _ = peer.published()
            headers = b"NATS/1.0\r\nNats-Subject: b.a\r\nNats-Sequence: 1\r\n\r\n"
            peer.say(b"HMSG %s 1 %d %d\r\n" % (reply, len(headers), len(headers) + 1000), headers, bytes(500))

        def bad_frame(subject: str, seq: int, size: int, reader: Reader) -> None:
            try:
                reader.exactly(size)
            except BusDisconnected:
                raise FrameError("of a receiver that takes a lost connection for a bad frame") from None

        for receive in (lambda subject, seq, size, reader: reader.into(memoryview(bytearray(1000))), bad_frame):
            with LyingServer(turn) as lying, pytest.raises(BusDisconnected):
                StreamLink(lying.url, "x").get("B", ["b.a"], receive, soon())


class TestAConnectionFromBefore:
    """It may have died long ago, and only its next use shows it."""

    def answer_one(self, then: Callable[[Peer], None]) -> Turn:
        def turn(peer: Peer) -> None:
            peer.greet()
            peer.ack(peer.published()[1], 1)
            then(peer)

        return turn

    def silent(self, peer: Peer) -> None:
        peer.until_closed()

    def test_a_stale_one_is_made_anew(self) -> None:
        def then(peer: Peer) -> None:
            peer.say(b"PING\r\nPING\r\n-ERR 'Stale Connection'\r\n")

        with LyingServer(self.answer_one(then), honest) as lying:
            link = StreamLink(lying.url, "x")
            assert put(link, "b.a") == [1]
            time.sleep(0.1)
            assert put(link, "b.b") == [1]
            assert lying.connections == 2
            link.close()

    def test_a_call_that_comes_too_late_fails_as_others_do_and_ends_nothing(self) -> None:
        """Its thread may get its turn when the time is up. An error of another kind would end the worker."""
        with LyingServer(honest) as lying:
            link = StreamLink(lying.url, "x")
            assert put(link, "b.1") == [1]
            assert kinds(put(link, "b.2", within=-0.1)) == [BusDisconnected]
            with pytest.raises(BusDisconnected):
                get(link, "b.1", within=-0.1)
            assert put(link, "b.3") == [1] and lying.connections == 1
            link.close()

    def test_pings_in_the_meantime_are_answered(self) -> None:
        def then(peer: Peer) -> None:
            peer.say(b"PING\r\nPING\r\n")
            assert [peer.line(), peer.line()] == [b"PONG", b"PONG"]
            peer.status(peer.published()[1], 404)
            peer.until_closed()

        with LyingServer(self.answer_one(then)) as lying:
            link = StreamLink(lying.url, "x")
            assert put(link, "b.a") == [1]
            time.sleep(0.1)
            assert get(link, "b.b") == {}
            assert lying.connections == 1
            link.close()

    def test_one_that_was_long_unused_is_asked_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with LyingServer(self.answer_one(self.silent), honest) as lying:
            link = StreamLink(lying.url, "x")
            assert put(link, "b.a") == [1]
            monkeypatch.setattr(bulk_link, "IDLE_S", 0.0)
            monkeypatch.setattr(bulk_link, "PONG_S", 0.2)
            started = time.monotonic()
            assert put(link, "b.b") == [1]
            assert 0.15 < time.monotonic() - started < 3
            assert lying.connections == 2
            link.close()

    @pytest.mark.parametrize("call", [lambda link: put(link, "b.b"), lambda link: get(link, "b.b")], ids=["put", "get"])
    def test_a_call_of_which_nothing_came_is_tried_again(self, call: Callable[[StreamLink], object]) -> None:
        def then(peer: Peer) -> None:
            peer.published()

        with LyingServer(self.answer_one(then), honest) as lying:
            link = StreamLink(lying.url, "x")
            assert put(link, "b.a") == [1]
            assert call(link) in ([1], {})
            assert lying.connections == 2
            link.close()

    def test_a_call_of_which_something_came_is_not(self) -> None:
        def then(peer: Peer) -> None:
            peer.ack(peer.published()[1], 2)

        with LyingServer(self.answer_one(then), honest) as lying:
            link = StreamLink(lying.url, "x")
            assert put(link, "b.a") == [1]
            assert kinds(put(link, "b.b", "b.c")) == [int, BusDisconnected]
            assert lying.connections == 1
            link.close()

    def test_a_server_that_is_away_is_not_asked_all_the_time(self) -> None:
        with LyingServer(lambda peer: None) as lying:
            link = StreamLink(lying.url, "x")
            started = time.monotonic()
            while time.monotonic() - started < 0.5:
                assert kinds(put(link, "b.a")) == [BusDisconnected]
            assert 2 <= lying.connections <= 8
            link.close()
