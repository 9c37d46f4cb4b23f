"""TLS on both kinds of connections, logins from settings, and that secrets stay where they belong."""

from __future__ import annotations

import asyncio
import os
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import anyio.to_thread
import pytest
from structlog.testing import capture_logs

from shared.bus.base import StreamSpec
from shared.bus.block_link import Item
from shared.bus.bulk_stream import StreamLink
from shared.bus.embedded import EmbeddedNats
from shared.bus.login import NOBODY, Login
from shared.bus.nats import NatsBus
from shared.config import Settings
from shared.errors import BusDisconnected, ConfigError
from tests.contract.conftest import eventually
from tests.lying_server import LyingServer, Peer
from tests.secure_rig import SECURE, SUBJECTS, USERS, Secure, certificates, secure_server
from trine.access import variable
from trine.beats import Seen, listen
from trine.process import environment
from trine.supervisor import Fleet

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secure]:
    with secure_server(tmp_path_factory.mktemp("certificates")) as running:
        yield running


def stored(bus: NatsBus) -> object:
    """What becomes of a block put on the bulk connection."""
    link = bus.link()
    (answer,) = link.put([Item(SUBJECTS.block(bytes(32)), (b"x" * 100_000,))], time.monotonic() + 5)
    link.close()
    return answer


async def test_logins_from_settings_work_on_both_connections(secure: Secure, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in secure.env("decode").items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    for url in (secure.url, secure.url.replace("nats:", "tls:"), secure.url.replace("127.0.0.1", "localhost")):
        bus = await NatsBus.connect(url, name="test", login=Login.of(settings), wait=5)
        await bus.ensure_stream(StreamSpec(SUBJECTS.block_stream, (SUBJECTS.blocks,), max_msgs_per_subject=1))
        assert await anyio.to_thread.run_sync(stored, bus)
        await eventually(lambda bus=bus: bus.authenticated is True)  # type: ignore[misc]
        await bus.close()


async def test_a_server_that_does_not_prove_itself_is_told_nothing(secure: Secure, tmp_path: Path) -> None:
    certificates(tmp_path, "localhost", "127.0.0.1")  # by another authority
    stranger = Login("decode", "pw-of-decode", ssl.create_default_context(cafile=tmp_path / "ca.pem"))
    with pytest.raises(BusDisconnected, match="certificate verify failed"):
        await NatsBus.connect(secure.url, name="test", login=stranger, wait=0.5)
    link = StreamLink(secure.url, "test", login=stranger)
    (answer,) = link.put([Item(SUBJECTS.block(bytes(32)), (b"x",))], time.monotonic() + 2)
    assert isinstance(answer, BusDisconnected)
    assert "certificate verify failed" in answer.message


async def test_a_certificate_is_for_one_server(tmp_path: Path) -> None:
    with (
        secure_server(tmp_path, hosts=("elsewhere.example",)) as elsewhere,
        pytest.raises(BusDisconnected, match=r"not valid for '127\.0\.0\.1'"),
    ):
        await NatsBus.connect(elsewhere.url, name="test", login=elsewhere.login("decode"), wait=0.5)


async def test_a_server_may_ask_for_certificates_too(tmp_path: Path) -> None:
    with secure_server(tmp_path, tls=f'ca_file: "{tmp_path}/ca.pem", verify: true') as strict:
        certificates(tmp_path, "--client", "decode")
        with pytest.raises(BusDisconnected):
            await NatsBus.connect(strict.url, name="test", login=strict.login("decode"), wait=0.5)
        given = {name.removeprefix("TRINE_").lower(): value for name, value in strict.env("decode").items()}
        given |= {"nats_cert": f"{tmp_path}/decode.pem", "nats_key": f"{tmp_path}/decode.key"}
        login = Login.of(Settings(**given))  # type: ignore[arg-type]
        bus = await NatsBus.connect(strict.url, name="test", login=login, wait=5)
        await bus.ensure_stream(StreamSpec(SUBJECTS.block_stream, (SUBJECTS.blocks,), max_msgs_per_subject=1))
        assert await anyio.to_thread.run_sync(stored, bus) == 1
        await eventually(lambda: bus.authenticated is True)
        await bus.close()


@pytest.mark.parametrize("scheme", ["nats", "tls"])
async def test_no_password_goes_out_where_tls_is_denied(scheme: str) -> None:
    """As by somebody on the way who strikes it out of the server's first words."""
    heard: list[bytes] = []

    def turn(peer: Peer) -> None:
        peer.info(auth_required=True)
        heard.append(peer.line())

    login = Login("u", "sesame", ssl.create_default_context() if scheme == "nats" else None)
    with LyingServer(turn) as lying, pytest.raises(BusDisconnected, match="does not offer TLS"):
        await NatsBus.connect(lying.url.replace("nats", scheme), name="test", login=login, wait=0.5)
    assert heard == []


async def test_a_wrong_password_is_not_repeated(secure: Secure) -> None:
    wrong = Login("decode", "sesame", secure.tls)
    with capture_logs() as logs, pytest.raises(ConfigError, match="refuses our credentials") as caught:
        await NatsBus.connect(secure.url, name="test", login=wrong, wait=5)
    assert "sesame" not in f"{caught.value!r}{logs}"


async def test_passwords_are_changed_without_a_restart(tmp_path: Path) -> None:
    """The server reads them from a file, and reads it again when told to; what it keeps in memory stays."""
    users = (SECURE / "users.conf").read_text()

    def passwords(decode: str) -> None:
        lines = [f'{variable(user)}: "{decode if user == "decode" else "pw"}"' for user in USERS]
        (tmp_path / "passwords.conf").write_text("\n".join(lines))

    def login(password: str) -> Login:
        return Login("decode", password)

    passwords("old")
    with EmbeddedNats(store_dir=tmp_path, config=f"include passwords.conf\n{users}") as server:
        before = await NatsBus.connect(server.url, name="before", login=login("old"), wait=5)
        await before.ensure_stream(StreamSpec(SUBJECTS.block_stream, (SUBJECTS.blocks,)))
        await before.append(SUBJECTS.block(bytes(32)), b"block")
        passwords("new")
        assert server.pid is not None
        os.kill(server.pid, signal.SIGHUP)
        await eventually(lambda: not before.connected)
        with pytest.raises(ConfigError, match="refuses"):
            await NatsBus.connect(server.url, name="after", login=login("old"), wait=5)
        after = await NatsBus.connect(server.url, name="after", login=login("new"), wait=5)
        assert (await after.stream_state(SUBJECTS.block_stream)).messages == 1
        await after.close()
        await before.close()


def test_secrets_show_nowhere(secure: Secure) -> None:
    """Neither in the logs of a worker process at their most talkative, nor in its command line or beats."""
    lines: list[str] = []
    env = {**secure.env("drafter"), "TRINE_DRAFT_SOURCE": "suffix", "TRINE_LOG_LEVEL": "debug"}
    fleet = Fleet({"drafter": 1}, nats=secure.url, env=env, log=lambda name, line: lines.append(line))
    with fleet:
        fleet.wait_ready(40)
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in fleet.pids().values()]
        beats = asyncio.run(heard_by_operator(secure))
        health = [sys.executable, str(SECURE.parent / "healthcheck.py")]
        there = {**environment(env), "TRINE_WORKER": "drafter-1"}
        assert subprocess.run(health, check=False, env=there, timeout=20).returncode == 0
    assert len(commands) == len(beats) == 1
    assert any("ready" in line for line in lines)
    for shown in (*lines, *map(str, commands), *map(str, beats)):
        assert "pw-of" not in shown


async def heard_by_operator(secure: Secure) -> Seen:
    bus = await secure.connect("operator")
    try:
        return await listen(bus, 5.0, enough=bool)
    finally:
        await bus.close()


def test_a_fleet_s_own_server_wants_no_login(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is set for another server is neither needed there nor said to it."""
    monkeypatch.setenv("TRINE_NATS_USER", "decode")
    monkeypatch.setenv("TRINE_NATS_CA", "/nowhere")
    assert Fleet({"drafter": 1}).login == NOBODY
    with pytest.raises(ConfigError, match="TRINE_NATS_PASSWORD"):
        Fleet({"drafter": 1}, nats="tls://127.0.0.1:1")
