"""What the processes of one deployment log in with: made once, and laid out so that each gets its own and no other's.

`make` fills a folder for each reader (a container's volume), and can run again: what exists stays, what is missing is
added, certificates that end soon are renewed. `show` prints what a tenant's client needs, for a shell to evaluate.
compose.yaml runs both; nothing here writes a secret to a log.

    all/        everything, for whoever made it: passwords, API keys, the authority and its key, users.conf
    nats/       the server's: its certificate, the users (`trine.access`) and their passwords
    nats-data/  if it is there: where the server keeps streams, handed over to it
    <role>/     `credentials`, variables for a shell, and `ca.pem`; the gateway's also digests of the API keys
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from shared.config import Settings
from shared.errors import ConfigError
from trine.access import ROLES, configuration, users, variable
from trine.console import reported

ALL, NATS, STORE = "all", "nats", "nats-data"
OWNERS = dict.fromkeys(ROLES, 10001) | {NATS: 10002}
"""The system user that reads each folder, in containers."""
HOSTS = ("nats", "localhost", "127.0.0.1")
RENEW_S = 30 * 86_400
"""A certificate that ends sooner is made anew."""
MOUNT = "/run/trine"
"""Where a reader finds its folder."""
FOLDER, SECURE = Path("/credentials"), Path("/opt/trine/secure")
CLIENT_NATS_URL, CLIENT_HTTP_URL = "tls://127.0.0.1:4222", "http://127.0.0.1:8000"
CA_FILE = ".trine/ca.pem"
"""Below the folder of the shell that evaluates what `show` prints."""
OPENSSL_S = 60.0
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@dataclass(frozen=True, slots=True)
class Vault:
    """All that there is: passwords of NATS users, and API keys of tenants."""

    passwords: dict[str, str]
    api_keys: dict[str, str]

    @classmethod
    def load(cls, folder: Path) -> Vault:
        """Empty where nothing was made yet. Raises ConfigError for a file that is not ours."""
        path = folder / "vault.json"
        try:
            found = json.loads(path.read_text())
            return cls(dict(found["passwords"]), dict(found["api_keys"]))
        except FileNotFoundError:
            return cls({}, {})
        except (ValueError, KeyError, TypeError):
            raise ConfigError(f"{path} is damaged: remove it, and new credentials are made", field="vault") from None

    def completed(self, names: Sequence[str], tenants: Sequence[str]) -> Vault:
        """With a password for each user and a key for each tenant. Those that are there already stay as they are."""
        # To nats-server a value of digits alone would be a number.
        passwords = {name: self.passwords.get(name) or f"p{secrets.token_hex(24)}" for name in names}
        return Vault(passwords, {name: self.api_keys.get(name) or f"sk-{secrets.token_hex(24)}" for name in tenants})


@app.command()
@reported
def make(
    folder: Annotated[Path, typer.Option(help="Where the readers' folders are, or will be.")] = FOLDER,
    secure: Annotated[Path, typer.Option(help="The folder with nats.conf, tls.conf and certificates.sh.")] = SECURE,
    tenants: Annotated[str, typer.Option(envvar="TRINE_TENANTS", help="Names, separated by commas.")] = "default",
    hosts: Annotated[str, typer.Option(help="Names and addresses of the server.")] = ",".join(HOSTS),
) -> None:
    """Make what is missing, for the model that TRINE_MODEL and TRINE_MODEL_NAME name."""
    os.umask(0o077)
    names = [name.strip() for name in tenants.split(",") if name.strip()]
    made = fill(folder, secure, Settings().served_name, names, hosts.split(","))
    typer.echo(f"credentials of {', '.join(made)} are there")


def fill(folder: Path, secure: Path, model: str, tenants: Sequence[str], hosts: Sequence[str]) -> list[str]:
    """Write all folders; the users whose credentials they hold. Raises ConfigError, and InvalidField for bad names."""
    names = list(users([model], tenants))
    conf = configuration([model], tenants)
    everything = folder / ALL
    everything.mkdir(parents=True, exist_ok=True)
    everything.chmod(0o700)
    vault = Vault.load(everything).completed(names, tenants)
    _write(everything / "vault.json", json.dumps({"passwords": vault.passwords, "api_keys": vault.api_keys}))
    server_env = "".join(f"{variable(user)}={password}\n" for user, password in vault.passwords.items())
    _write(everything / "passwords.env", server_env)
    _write(everything / "users.conf", conf)
    certificates = everything / "certificates"
    _certify(secure / "certificates.sh", certificates, hosts)
    ca = (certificates / "ca.pem").read_text()
    for role in ROLES:
        login = {"USER": role, "PASSWORD": vault.passwords[role], "CA": f"{MOUNT}/ca.pem"}
        files = {"ca.pem": ca, "credentials": "".join(f"TRINE_NATS_{name}={value}\n" for name, value in login.items())}
        if role == "gateway":
            files["api-keys"] = "".join(f"{tenant}:sha256:{_digest(key)}\n" for tenant, key in vault.api_keys.items())
        _lay_out(folder / role, files, OWNERS[role])
    _lay_out(folder / NATS, _server_files(secure, certificates, conf, vault.passwords), OWNERS[NATS])
    _hand_over([folder / STORE, *(folder / STORE).rglob("*")], OWNERS[NATS])
    return names


def _server_files(secure: Path, certificates: Path, conf: str, passwords: Mapping[str, str]) -> dict[str, str]:
    values = "".join(f"{variable(user)}: {json.dumps(password)}\n" for user, password in passwords.items())
    return {
        "passwords.conf": values,
        "users.conf": f"include passwords.conf\n{conf}",
        **{name: (secure / name).read_text() for name in ("nats.conf", "tls.conf")},
        **{name: (certificates / name).read_text() for name in ("server.pem", "server.key")},
    }


def _certify(script: Path, folder: Path, hosts: Sequence[str]) -> None:
    """Make the authority and the server's certificate, if it is missing, for other names, or ends soon."""
    made_for = folder / "hosts"
    wanted = " ".join(hosts)
    lasts = ["openssl", "x509", "-checkend", str(RENEW_S), "-noout", "-in", str(folder / "server.pem")]
    if made_for.is_file() and made_for.read_text() == wanted and _run(lasts) == 0:
        return
    if _run(["sh", str(script), str(folder), *hosts]):
        raise ConfigError("certificates could not be made; is openssl installed?", field="certificates")
    _write(made_for, wanted)


def _run(command: list[str]) -> int:
    try:
        return subprocess.run(command, check=False, capture_output=True, timeout=OPENSSL_S).returncode
    except FileNotFoundError:
        return 127


def _lay_out(folder: Path, files: Mapping[str, str], owner: int) -> None:
    folder.mkdir(exist_ok=True)
    folder.chmod(0o700)
    for name, text in files.items():
        _write(folder / name, text)
    folder.chmod(0o500)
    _hand_over([folder, *(folder / name for name in files)], owner)


def _hand_over(paths: Sequence[Path], owner: int) -> None:
    """Only root can, and alone need not."""
    for path in paths if os.geteuid() == 0 else ():
        if path.exists():
            os.chown(path, owner, owner, follow_symlinks=False)


def _write(path: Path, text: str) -> None:
    """Whole or not at all: whoever reads it meanwhile finds the old text."""
    aside = path.with_name(f".{path.name}")
    aside.unlink(missing_ok=True)
    with os.fdopen(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o400), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    aside.rename(path)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def _exports(values: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values.items())


@app.command()
@reported
def show(
    tenant: Annotated[str, typer.Argument(help="Whose.")] = "default",
    folder: Annotated[Path, typer.Option(help="The folder that `make` has filled.")] = FOLDER,
    nats: Annotated[str, typer.Option(help="Where clients find NATS.", envvar="CLIENT_NATS_URL")] = CLIENT_NATS_URL,
    http: Annotated[str, typer.Option(help="And the gateway.", envvar="CLIENT_HTTP_URL")] = CLIENT_HTTP_URL,
) -> None:
    """Print what a tenant's client needs: variables for Trine's client, the `nats` command and OpenAI's clients.

    The shell that evaluates it also writes the authority's certificate to .trine/ca.pem.
    """
    vault = Vault.load(folder / ALL)
    if tenant not in vault.api_keys:
        known = ", ".join(vault.api_keys) or "none yet"
        raise ConfigError(f"no credentials of a tenant {tenant!r:.80}; there are: {known}", field="tenant")
    password = vault.passwords[tenant]
    values = {
        "TRINE_NATS_URL": nats,
        "TRINE_TENANT": tenant,
        "TRINE_NATS_USER": tenant,
        "TRINE_NATS_PASSWORD": password,
    }
    values |= {"NATS_URL": nats, "NATS_USER": tenant, "NATS_PASSWORD": password}
    values |= {"OPENAI_BASE_URL": f"{http}/v1", "OPENAI_API_KEY": vault.api_keys[tenant]}
    pem = (folder / ALL / "certificates" / "ca.pem").read_text().rstrip()
    typer.echo(f"mkdir -p {Path(CA_FILE).parent}\ncat >{CA_FILE} <<'END'\n{pem}\nEND")
    typer.echo(f'{_exports(values)}export TRINE_NATS_CA="$PWD/{CA_FILE}" NATS_CA="$PWD/{CA_FILE}"')


if __name__ == "__main__":
    app()
