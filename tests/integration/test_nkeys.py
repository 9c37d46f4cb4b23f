"""Logging in by a key, on both kinds of connections: a server that lists its users' keys, and one that trusts JWTs."""

from __future__ import annotations

import base64
import json
import os
import time
from pathlib import Path
from typing import Any

import anyio.to_thread
import nkeys
import pytest
from pydantic import SecretStr
from structlog.testing import capture_logs

from shared.bus.base import StreamSpec
from shared.bus.block_link import Item
from shared.bus.embedded import EmbeddedNats
from shared.bus.login import NOBODY, Login
from shared.bus.nats import NatsBus
from shared.config import Settings
from shared.errors import ConfigError, PermissionDenied
from tests.contract.conftest import eventually

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

EVERYTHING = {
    "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": True, "conn": -1, "leaf": -1,
    "mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1,
}  # fmt: skip


def pair(kind: int) -> Any:
    return nkeys.from_seed(nkeys.encode_seed(os.urandom(32), kind))


def public(key: Any) -> str:
    return key.public_key.decode()


def jwt(issuer: Any, subject: str, kind: str, **claims: Any) -> str:
    """See https://docs.nats.io/running-a-nats-service/configuration/securing_nats/auth_intro/jwt."""
    body = {"jti": "x", "iat": int(time.time()), "iss": public(issuer), "name": kind, "sub": subject}
    body["nats"] = {"type": kind, "version": 2, **claims}
    parts = [{"typ": "JWT", "alg": "ed25519-nkey"}, body]
    text = ".".join(base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts)
    return f"{text}.{base64.urlsafe_b64encode(issuer.sign(text.encode())).rstrip(b'=').decode()}"


def private_file(path: Path, text: str) -> str:
    path.write_text(text)
    path.chmod(0o600)
    return str(path)


async def works(url: str, login: Login) -> NatsBus:
    """A connected bus, whose bulk connection works too."""
    bus = await NatsBus.connect(url, name="test", login=login, wait=5)
    await bus.ensure_stream(StreamSpec("S", ("kv.>",), max_msgs_per_subject=1))
    link = bus.link()
    try:
        item = Item("kv.a", (b"x" * 100_000,))
        (stored,) = await anyio.to_thread.run_sync(link.put, [item], time.monotonic() + 5)
        assert stored == 1
    finally:
        link.close()
    return bus


async def test_a_seed(tmp_path: Path) -> None:
    user, other = pair(nkeys.PREFIX_BYTE_USER), pair(nkeys.PREFIX_BYTE_USER)
    config = (
        f'authorization {{ users = [ {{ nkey: {public(user)}, permissions {{ publish: {{ deny: "secret" }} }} }} ] }}'
    )
    file = private_file(tmp_path / "user.nk", f"# of the worker\n{user.seed.decode()}\n")
    login = Login.of(Settings(nats_nkey_seed_file=file))
    assert user.seed.decode() not in repr(login)
    with EmbeddedNats(config=config) as server:
        bus = await works(server.url, login)
        with pytest.raises(PermissionDenied):
            await bus.request("secret", b"", 5.0)
        await eventually(lambda: bus.authenticated is True)
        server.kill()
        await server.start_async()  # it draws another nonce
        await eventually(lambda: bus.connected, within=15)
        await bus.close()
        stranger = Login.of(Settings(nats_nkey_seed_file=private_file(tmp_path / "other.nk", other.seed.decode())))
        for refused in (stranger, NOBODY):
            with pytest.raises(ConfigError, match="refuses our credentials"):
                await NatsBus.connect(server.url, name="test", login=refused, wait=5)


async def test_credentials(tmp_path: Path) -> None:
    operator, system = pair(nkeys.PREFIX_BYTE_OPERATOR), pair(nkeys.PREFIX_BYTE_ACCOUNT)
    account, user = pair(nkeys.PREFIX_BYTE_ACCOUNT), pair(nkeys.PREFIX_BYTE_USER)
    accounts = {public(key): jwt(operator, public(key), "account", limits=limits) for key, limits in (
        (account, EVERYTHING), (system, {**EVERYTHING, "mem_storage": 0, "disk_storage": 0}),
    )}  # fmt: skip
    unlimited = {"subs": -1, "data": -1, "payload": -1}
    vouched = jwt(account, public(user), "user", pub={}, sub={}, **unlimited)
    preload = "\n".join(f"{key}: {value}" for key, value in accounts.items())
    config = f"""
        operator: {jwt(operator, public(operator), "operator")}
        system_account: {public(system)}
        resolver: MEMORY
        resolver_preload: {{ {preload} }}
    """
    text = (
        f"-----BEGIN NATS USER JWT-----\n{vouched}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed.decode()}\n------END USER NKEY SEED------\n"
    )
    file = private_file(tmp_path / "user.creds", text)
    with EmbeddedNats(config=config) as server:
        login = Login.of(Settings(nats_creds=file))
        assert vouched not in repr(login)
        await (await works(server.url, login)).close()
        with pytest.raises(ConfigError, match="refuses our credentials"):
            await NatsBus.connect(server.url, name="test", wait=5)


def test_what_is_wrong_with_a_file_is_named_and_not_shown(tmp_path: Path) -> None:
    seed = pair(nkeys.PREFIX_BYTE_USER).seed.decode()
    damaged = seed[:10] + ("A" if seed[10] != "A" else "B") + seed[11:]
    files = {"none": "nothing", "short": seed[:-3], "account": pair(nkeys.PREFIX_BYTE_ACCOUNT).seed.decode()}
    for name, text in files.items():
        with pytest.raises(ConfigError, match="does not have") as caught:
            Login.of(Settings(nats_nkey_seed_file=private_file(tmp_path / name, text)))
        assert caught.value.field == "nats_nkey_seed_file" and seed[:-3] not in str(caught.value)
    with pytest.raises(ConfigError, match="JWT and seed"):
        Login.of(Settings(nats_creds=private_file(tmp_path / "seed", seed)))
    with pytest.raises(ConfigError, match="cannot read"):
        Login.of(Settings(nats_creds="/nowhere"))
    with pytest.raises(ConfigError, match="give one"):
        Login.of(Settings(nats_user="u", nats_password=SecretStr("p"), nats_creds=str(tmp_path / "seed")))
    (tmp_path / "damaged").write_text(damaged)
    with capture_logs() as logs, pytest.raises(ConfigError, match="seed") as caught:
        Login.of(Settings(nats_nkey_seed_file=str(tmp_path / "damaged")))
    assert damaged not in str(caught.value)
    assert [line["setting"] for line in logs] == ["nats_nkey_seed_file"], "others can read it"
    assert damaged not in str(logs)
