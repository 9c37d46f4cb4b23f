"""Logging in by a key instead of a password: the server draws a nonce, and who has the key signs it.

The key never leaves this process. A seed alone is for a server that lists its users' public keys; a credentials file
brings a JWT too, by which an account vouches for the user.
See https://docs.nats.io/running-a-nats-service/configuration/securing_nats/auth_intro/nkey_auth.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from shared.errors import ConfigError

log = structlog.get_logger(__name__)

MAX_FILE = 64 << 10
MAX_NONCE = 256
_USER_SEED = re.compile(r"SU[A-Z2-7]{56}")
_JWT = re.compile(r"BEGIN NATS USER JWT-+\s+([A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+)\s")


@dataclass(frozen=True, slots=True)
class Signer:
    """`public`: the user's public key. `jwt`: what vouches for it, "" for nothing."""

    public: str
    jwt: str = field(repr=False)
    _sign: Callable[[bytes], bytes] = field(repr=False)

    def signature(self, nonce: object) -> str:
        """Raises ValueError for what is no nonce."""
        if not isinstance(nonce, str) or not 0 < len(nonce) <= MAX_NONCE:
            raise ValueError("the server gave no nonce to sign")
        return base64.urlsafe_b64encode(self._sign(nonce.encode())).rstrip(b"=").decode()

    def answer(self, nonce: object) -> dict[str, str]:
        """The fields of CONNECT that answer a server's nonce. Raises ValueError."""
        who = {"jwt": self.jwt} if self.jwt else {"nkey": self.public}
        return {**who, "sig": self.signature(nonce)}


def signer(setting: str, path: str, *, with_jwt: bool) -> Signer:
    """From a file with a seed, or one of credentials. Raises ConfigError naming `setting`, and nothing of the file."""
    text = _read(setting, Path(path))
    seed, jwt = _USER_SEED.search(text), _JWT.search(text)
    if seed is None or (with_jwt and jwt is None):
        what = "a user's JWT and seed" if with_jwt else "a user's seed (SU…)"
        raise ConfigError(f"TRINE_{setting.upper()}: {path} does not have {what}", field=setting)
    try:
        import nkeys
    except ImportError:
        reason = "needs the package nkeys: install trine[nkeys]"
        raise ConfigError(f"TRINE_{setting.upper()} {reason}", field=setting) from None
    try:
        pair = nkeys.from_seed(written := seed[0].encode())
        kind, key = nkeys.decode_seed(written)
        if nkeys.encode_seed(bytes(key), kind) != written:  # the checksum, which nkeys does not look at
            raise ValueError
        public = pair.public_key.decode()
    except Exception:  # of several kinds; some repeat the seed
        raise ConfigError(f"TRINE_{setting.upper()}: the seed in {path} is none", field=setting) from None
    return Signer(public, jwt[1] if with_jwt and jwt else "", pair.sign)


def _read(setting: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            if path.stat().st_mode & 0o077:
                log.warning("others on this machine can read a secret key; chmod 600", setting=setting, path=str(path))
            return file.read(MAX_FILE).decode("ascii", "replace")
    except OSError as error:
        raise ConfigError(f"TRINE_{setting.upper()}: cannot read {path}: {error.strerror}", field=setting) from None
