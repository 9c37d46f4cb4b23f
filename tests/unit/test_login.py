"""Settings that say who a process is on NATS: what is incomplete or unreadable is named, secrets are never shown."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest
from pydantic import ValidationError

from shared.bus.bulk_wire import parse_servers
from shared.bus.login import SETTINGS, Login
from shared.bus.wire import new_inbox, without_login
from shared.config import Settings
from shared.errors import ConfigError
from tests.lying_server import CERTIFICATE, KEY


def settings(**given: str) -> Settings:
    return Settings(**given)  # type: ignore[arg-type]


@pytest.fixture
def pem(tmp_path: Path) -> dict[str, str]:
    for name, text in (("cert", CERTIFICATE), ("key", KEY), ("junk", "no certificate")):
        (tmp_path / name).write_text(text)
    return {path.name: str(path) for path in tmp_path.iterdir()}


def test_nothing_given_is_nobody_without_tls() -> None:
    login = Login.of(settings())
    assert (login.user, login.password, login.tls, login.inbox) == (None, None, None, "")


def test_all_of_it(pem: dict[str, str]) -> None:
    given = {"nats_ca": pem["cert"], "nats_cert": pem["cert"], "nats_key": pem["key"], "nats_inbox": "_INBOX.mine"}
    login = Login.of(settings(nats_user="u", nats_password="sesame", **given))
    assert (login.user, login.password, login.inbox) == ("u", "sesame", "_INBOX.mine")
    assert login.tls is not None
    assert (login.tls.check_hostname, login.tls.verify_mode) == (True, ssl.CERT_REQUIRED)
    assert len(login.tls.get_ca_certs()) == 1  # those of the system are not trusted too


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"nats_user": "u"}, "nats_password"),
        ({"nats_password": "sesame"}, "nats_user"),
        ({"nats_ca": "/nowhere"}, "nats_ca"),
        ({"nats_ca": "junk"}, "nats_ca"),
        ({"nats_cert": "cert"}, "nats_key"),
        ({"nats_key": "key"}, "nats_cert"),
        ({"nats_cert": "cert", "nats_key": "/nowhere"}, "nats_key"),
        ({"nats_cert": "cert", "nats_key": "junk"}, "nats_cert"),
        ({"nats_cert": "key", "nats_key": "key"}, "nats_cert"),
    ],
)
def test_what_is_wrong_is_named(pem: dict[str, str], given: dict[str, str], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Login.of(settings(**{name: pem.get(value, value) for name, value in given.items()}))
    assert caught.value.field == field
    assert f"TRINE_{field.upper()}" in caught.value.message
    assert "sesame" not in caught.value.message


def test_an_encrypted_key_is_refused_and_nobody_is_asked_for_its_password(pem: dict[str, str], tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    order = ["openssl", "pkcs8", "-topk8", "-in", pem["key"], "-out", str(locked), "-passout", "pass:sesame"]
    subprocess.run(order, check=True, timeout=10)
    with pytest.raises(ConfigError, match="TRINE_NATS_KEY"):
        Login.of(settings(nats_cert=pem["cert"], nats_key=str(locked)))


@pytest.mark.parametrize("inbox", ["inbox", "_INBOX.", "_INBOX.>", "_INBOX.a b", "_INBOXES.a", "_INBOX.a."])
def test_an_inbox_is_one(inbox: str) -> None:
    with pytest.raises(ValidationError):
        settings(nats_inbox=inbox)


def test_secrets_are_not_shown() -> None:
    given = settings(nats_user="u", nats_password="sesame")
    login = Login.of(given)
    servers = parse_servers("nats://a:1", login.user, login.password)
    for shown in (given, login, servers, given.model_dump(), given.model_dump_json()):
        assert "sesame" not in f"{shown}{shown!r}"
    assert servers[0].password == "sesame"


@pytest.mark.parametrize("url", ["nats://a:b@h", "nats://token@h", "nats://h:1,nats://a:b@h:2"])
def test_an_address_with_a_user_comes_before_the_settings(url: str) -> None:
    """Who names another server with its own user does not want to tell it this one's password."""
    login = Login("u", "sesame", inbox="_INBOX.mine").at(url)
    assert (login.user, login.password, login.inbox) == (None, None, "_INBOX.mine")
    assert Login("u", "sesame").at("nats://h:1,h:2").user == "u"


def test_where_answers_come() -> None:
    assert new_inbox("acme").startswith("_INBOX.acme.")
    assert new_inbox("acme", "_INBOX.mine").startswith("_INBOX.mine.")
    assert len({new_inbox(None) for _ in range(10)}) == 10


def test_addresses_are_shown_without_credentials() -> None:
    assert without_login("tls://u:p@a:1,nats://t@b,c:3,nats://d") == "tls://a:1,nats://b,c:3,nats://d"


def test_every_setting_of_it_is_one() -> None:
    assert set(SETTINGS) <= set(Settings.model_fields)
    assert {name for name in Settings.model_fields if name.startswith("nats_")} == {
        "nats_url",
        "nats_replicas",
        *SETTINGS,
    }
