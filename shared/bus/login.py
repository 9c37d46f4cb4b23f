"""Who this process is on NATS, and whom it takes for NATS. Of the control connection and of the bulk ones alike."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path

from shared.bus.nkey import Signer, signer
from shared.bus.wire import names_user
from shared.config import Settings
from shared.errors import ConfigError

SETTINGS = (
    "nats_user", "nats_password", "nats_nkey_seed_file", "nats_creds", "nats_ca", "nats_cert", "nats_key", "nats_inbox",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Login:
    """`tls`: where it is given, nothing is said to a server that does not prove itself by it. `inbox`: the subjects
    below which answers are heard; when empty, `_INBOX.<user>`, and `_INBOX` for who logs in by a key.
    """

    user: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    inbox: str = ""
    signer: Signer | None = None
    """Instead of user and password."""

    @classmethod
    def of(cls, settings: Settings) -> Login:
        """What the settings say. Raises ConfigError naming the setting, and never what a secret one holds."""
        user, password = settings.nats_user, settings.nats_password.get_secret_value()
        if bool(user) != bool(password):
            missing = "nats_password" if user else "nats_user"
            raise ConfigError(f"TRINE_{missing.upper()} is missing: a NATS user needs both", field=missing)
        return cls(user or None, password or None, _context(settings), settings.nats_inbox, _signer(settings))

    def at(self, url: str) -> Login:
        """The login for this address: credentials that it brings itself come before those of the settings."""
        return replace(self, user=None, password=None, signer=None) if names_user(url) else self


NOBODY = Login()
"""No credentials but those in the address, and the system's trust where that asks for TLS."""


def _signer(settings: Settings) -> Signer | None:
    ways = {
        name: path for name in ("nats_user", "nats_nkey_seed_file", "nats_creds") if (path := getattr(settings, name))
    }
    if len(ways) > 1:
        names = " and ".join(f"TRINE_{name.upper()}" for name in ways)
        raise ConfigError(f"{names} are ways to log in: give one", field=list(ways)[1])
    for name in ways.keys() - {"nats_user"}:
        return signer(name, ways[name], with_jwt=name == "nats_creds")
    return None


def _context(settings: Settings) -> ssl.SSLContext | None:
    if not (settings.nats_ca or settings.nats_cert or settings.nats_key):
        return None
    if bool(settings.nats_cert) != bool(settings.nats_key):
        missing = "nats_key" if settings.nats_cert else "nats_cert"
        raise ConfigError(f"TRINE_{missing.upper()} is missing: a certificate needs its key", field=missing)
    for name in ("nats_ca", "nats_cert", "nats_key"):
        _check_readable(name, getattr(settings, name))
    try:
        context = ssl.create_default_context(cafile=settings.nats_ca or None)
    except (OSError, ValueError) as error:
        raise ConfigError(f"TRINE_NATS_CA: no certificates in {settings.nats_ca}: {error}", field="nats_ca") from None
    if settings.nats_cert:
        try:
            # Without a password of ours, OpenSSL would ask on the terminal for that of an encrypted key.
            context.load_cert_chain(settings.nats_cert, settings.nats_key, password="")
        except (OSError, ValueError) as error:
            raise ConfigError(f"TRINE_NATS_CERT, TRINE_NATS_KEY: {error}", field="nats_cert") from None
    return context


def _check_readable(name: str, path: str) -> None:
    try:
        if path:
            Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"TRINE_{name.upper()}: cannot read {path}: {error.strerror}", field=name) from None
