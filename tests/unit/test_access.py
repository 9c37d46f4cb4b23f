"""The users that deploy/secure ships and docs/security.md shows are those of `trine.access`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from shared.bus.embedded import find_server
from shared.config import DEFAULT_MODEL
from shared.errors import InvalidField
from tests.secure_rig import SECURE, TENANTS, USERS, certificates
from trine.access import ROLES, Rights, configuration, role_rights, tenant_rights, users, variable

DOCS = SECURE.parents[1] / "docs" / "security.md"
MODEL, TENANT = "MODEL", "TENANT"
JETSTREAM = ("$JS.API.", "$JS.ACK.")


def test_the_shipped_file_is_what_is_printed_today() -> None:
    assert (SECURE / "users.conf").read_text() == configuration([DEFAULT_MODEL], TENANTS)


def test_the_command_prints_it() -> None:
    tenants = [option for tenant in TENANTS for option in ("--tenant", tenant)]
    order = [sys.executable, "-m", "trine.cli", "access", "--model", DEFAULT_MODEL, *tenants]
    printed = subprocess.run(order, check=True, capture_output=True, text=True, timeout=30, cwd=SECURE.parents[1])
    assert printed.stdout == (SECURE / "users.conf").read_text()


def test_nats_server_takes_the_shipped_files_as_they_are(tmp_path: Path) -> None:
    certificates(tmp_path, "localhost")
    env = {**os.environ, **{variable(user): "pw" for user in USERS}}
    env |= {"TRINE_NATS_SERVER_CERT": f"{tmp_path}/server.pem", "TRINE_NATS_SERVER_KEY": f"{tmp_path}/server.key"}
    order = [str(find_server()), "-t", "-c", str(SECURE / "nats.conf")]
    checked = subprocess.run(order, check=False, env=env, capture_output=True, text=True, timeout=10)
    assert (checked.returncode, "is valid" in checked.stderr + checked.stdout) == (0, True)
    del env[variable("decode")]
    assert (
        subprocess.run(order, check=False, env=env, capture_output=True, timeout=10).returncode != 0
    )  # not an empty password


def test_the_table_in_the_docs_is_true() -> None:
    said = re.findall(r"^\| (`[^`]+`) \| (.*) \| (.*) \| (.*) \|$", DOCS.read_text(), re.M)
    rows = [table_row(user) for user in (*ROLES, TENANT, "default")]
    assert said == rows, "as it should read:\n" + "\n".join(f"| {' | '.join(row)} |" for row in rows)


def table_row(user: str) -> tuple[str, str, str, str]:
    """User, what it publishes, what it hears, what it asks JetStream."""
    rights = role_rights(user, [MODEL]) if user in ROLES else tenant_rights(user)
    published = [code(s) for s in rights.publish if not s.startswith(JETSTREAM)]
    if rights.answers:
        published.append("one answer to each message")
    heard = [code(s) for s in rights.subscribe] + [f"not {code(s)}" for s in rights.deaf_to]
    return code(user), ", ".join(published), ", ".join(heard), asked(rights)


def code(subject: str) -> str:
    return f"`{subject}`".replace(MODEL, "<model>").replace(TENANT, "<tenant>").replace("trine.", "")


def asked(rights: Rights) -> str:
    """By verb, with the streams' names short: `STREAM.INFO` REQ, TOK."""
    by_verb: dict[str, list[str]] = defaultdict(list)
    for subject in rights.publish:
        if subject.startswith(JETSTREAM):
            verb, stream, rest = re.fullmatch(r"\$JS\.(?:API\.)?(.*?)(?:\.TRINE_MODEL_([A-Z]+)(.*))?", subject).groups()  # type: ignore[union-attr]
            by_verb[verb].append(f"{stream}{'.' if rest else ''}{rest.strip('.')}" if stream else "")
    return "; ".join(f"`{verb}` {', '.join(names)}".strip() for verb, names in by_verb.items()).replace(
        MODEL, "<model>"
    )


@pytest.mark.parametrize(
    ("models", "tenants", "field"),
    [
        ([], [], "model"),
        (["m"], ["a.b"], "tenant"),
        (["m"], ["*"], "tenant"),
        (["m"], [""], "tenant"),
        (["m"], ["decode"], "tenant"),
        (["m"], ["a-b", "a_b"], "tenant"),
        (["m"], ["Acme", "acme"], "tenant"),
    ],
)
def test_names_that_cannot_be_users(models: list[str], tenants: list[str], field: str) -> None:
    with pytest.raises(InvalidField) as caught:
        configuration(models, tenants)
    assert caught.value.field == field


def test_a_model_s_name_widens_nothing() -> None:
    """Whatever is in it: a subject has as many tokens, and no wildcards that another model's has not."""
    plain, odd = (users([model], ["acme"]) for model in ("plain", 'a.b*c>d e"f'))
    for user, rights in plain.items():
        for mine, its in ((rights.publish, odd[user].publish), (rights.subscribe, odd[user].subscribe)):
            assert [re.sub("plain", "M", s) for s in mine] == [re.sub(r"a=2Eb=2Ac=3Ed=20e=22f", "M", s) for s in its]


def test_several_models_have_each_their_rights_once() -> None:
    both = users(["a", "b"], [])
    for user, rights in both.items():
        assert len(set(rights.publish)) == len(rights.publish), user
        for model in ("a", "b"):
            assert set(rights.publish) >= set(users([model], [])[user].publish)
