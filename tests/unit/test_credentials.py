"""Credentials of a deployment: each reader gets its own, a second start changes none, nothing is said aloud."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from services.gateway.keys import KeyTable
from shared.bus.embedded import find_server
from shared.config import DEFAULT_MODEL
from shared.errors import ConfigError, InvalidField
from tests.secure_rig import SECURE
from trine import credentials
from trine.access import ROLES, variable
from trine.credentials import Vault, fill

ROOT = SECURE.parents[1]
FILES = (("CERT", "pem"), ("KEY", "key"))
HOSTS = ["nats", "localhost", "127.0.0.1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("credentials")
    fill(folder, SECURE, DEFAULT_MODEL, ["default", "acme"], HOSTS)
    return folder


def vault(folder: Path) -> Vault:
    return Vault.load(folder / "all")


def everything(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*") if path.is_file()}


def test_each_role_gets_its_own_and_no_other(folder: Path) -> None:
    made = vault(folder)
    for role in ROLES:
        text = "".join(path.read_text() for path in (folder / role).iterdir())
        assert [user for user, password in made.passwords.items() if password in text] == [role]
        assert f"TRINE_NATS_USER={role}\n" in text and "PRIVATE KEY" not in text
        assert not [key for key in made.api_keys.values() if key in text]
    server = "".join(path.read_text() for path in (folder / "nats").iterdir())
    assert not [key for key in made.api_keys.values() if key in server]
    assert (folder / "all/certificates/ca.key").read_text() not in server


def test_only_its_owner_reads_a_file(folder: Path) -> None:
    for path in folder.rglob("*"):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
        if os.geteuid() == 0:
            owner = credentials.OWNERS.get(path.relative_to(folder).parts[0], 0)
            assert path.stat().st_uid == owner, path


def test_the_gateway_takes_its_keys(folder: Path) -> None:
    table = KeyTable.parse((folder / "gateway/api-keys").read_text())
    for tenant, key in vault(folder).api_keys.items():
        assert table.caller(f"Bearer {key}").tenant == tenant


def test_the_server_takes_its_configuration(folder: Path) -> None:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TRINE_")}
    clean |= {f"TRINE_NATS_SERVER_{kind}": f"{folder}/nats/server.{end}" for kind, end in FILES}
    command = [str(find_server()), "-t", "-c", str(folder / "nats/nats.conf")]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10, env=clean)
    assert not done.returncode, done.stderr
    values = (folder / "nats/passwords.conf").read_text()
    assert all(f'{variable(user)}: "{password}"' in values for user, password in vault(folder).passwords.items())


def test_again_nothing_changes_and_what_is_new_is_added(tmp_path: Path) -> None:
    fill(tmp_path, SECURE, DEFAULT_MODEL, ["default"], HOSTS)
    first = everything(tmp_path)
    fill(tmp_path, SECURE, DEFAULT_MODEL, ["default"], HOSTS)
    assert everything(tmp_path) == first

    old = vault(tmp_path)
    fill(tmp_path, SECURE, DEFAULT_MODEL, ["default", "acme"], [*HOSTS, "nats.example.org"])
    new = vault(tmp_path)
    assert old.passwords.items() < new.passwords.items() and set(new.passwords) - set(old.passwords) == {"acme"}
    assert old.api_keys.items() < new.api_keys.items()
    now = everything(tmp_path)
    assert now["all/certificates/ca.pem"] == first["all/certificates/ca.pem"]
    assert now["nats/server.pem"] != first["nats/server.pem"]
    assert '"acme"' in now["nats/users.conf"]


def test_a_certificate_that_ends_soon_is_renewed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAYS", "20")
    fill(tmp_path, SECURE, DEFAULT_MODEL, ["default"], HOSTS)
    first = (tmp_path / "nats/server.pem").read_text()
    monkeypatch.delenv("DAYS")
    fill(tmp_path, SECURE, DEFAULT_MODEL, ["default"], HOSTS)
    second = (tmp_path / "nats/server.pem").read_text()
    fill(tmp_path, SECURE, DEFAULT_MODEL, ["default"], HOSTS)
    assert first != second == (tmp_path / "nats/server.pem").read_text()


@pytest.mark.parametrize("tenant", ["decode", "a.b", "a;b", ""])
def test_bad_tenants_are_refused(tmp_path: Path, tenant: str) -> None:
    with pytest.raises(InvalidField, match="--tenant"):
        fill(tmp_path, SECURE, DEFAULT_MODEL, ["default", tenant], HOSTS)


def test_a_damaged_vault_is_named(tmp_path: Path) -> None:
    (tmp_path / "vault.json").write_text("{")
    with pytest.raises(ConfigError, match=r"vault\.json is damaged"):
        Vault.load(tmp_path)


def test_commands_tell_a_client_what_it_needs_and_a_log_nothing(tmp_path: Path) -> None:
    order = [sys.executable, "-m", "trine.credentials"]
    made = subprocess.run(
        [*order, "make", "--folder", tmp_path, "--secure", SECURE],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
    )
    kept = json.loads((tmp_path / "all/vault.json").read_text())
    said = made.stdout + made.stderr
    assert "default" in said and not [s for part in kept.values() for s in part.values() if s in said]

    shell = 'eval "$("$@")" && printf "%s\\n" "$NATS_PASSWORD" "$OPENAI_API_KEY" "$TRINE_NATS_CA"'
    order = ["sh", "-c", shell, "sh", *order, "show", "--folder", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(order, check=True, capture_output=True, text=True, cwd=tmp_path, timeout=60, env=env)
    password, key, ca = done.stdout.split()
    assert (password, key) == (kept["passwords"]["default"], kept["api_keys"]["default"])
    assert Path(ca).read_text() == (tmp_path / "all/certificates/ca.pem").read_text()


def test_an_unknown_tenant_is_told_who_is_known(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit):
        credentials.show("nobody", folder, "", "")
    assert "no credentials of a tenant 'nobody'; there are: default, acme" in capsys.readouterr().err
