"""Which API key is whose. Only digests are kept: no key is in memory after the start, nor in any log. Pure."""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass

from services.gateway.problems import Problem
from shared.errors import ConfigError
from shared.tenants import DEFAULT_TENANT, is_tenant

MIN_KEY = 16
MAX_KEY = 512
_DIGEST = re.compile(r"sha256:([0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Caller:
    """`key` names the API key in logs and limits, and tells nothing of it: its number in the list."""

    tenant: str
    key: str


OPEN = Caller(DEFAULT_TENANT, "open")


class KeyTable:
    """Without entries, everybody is `OPEN`."""

    def __init__(self, entries: list[tuple[str, bytes]]) -> None:
        self._entries = [(digest, Caller(tenant, f"{tenant}#{i}")) for i, (tenant, digest) in enumerate(entries, 1)]

    @classmethod
    def parse(cls, text: str) -> KeyTable:
        """Entries `tenant:key` or `tenant:sha256:<hex>`, by commas or lines; `#` begins a comment line.

        Raises ConfigError that tells the number of a bad entry, never its text.
        """
        lines = (line.strip() for line in text.splitlines())
        parts = [part.strip() for line in lines if not line.startswith("#") for part in line.split(",")]
        entries = [_entry(part, number) for number, part in enumerate(filter(None, parts), 1)]
        if len({digest for _, digest in entries}) < len(entries):
            raise ConfigError("API keys: one of them stands there twice", field="api_keys")
        return cls(entries)

    def __len__(self) -> int:
        return len(self._entries)

    def caller(self, authorization: str | None) -> Caller:
        """Whose key an `Authorization: Bearer KEY` header has. Takes as long whatever it has. Raises a 401."""
        if not self._entries:
            return OPEN
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise Problem(401, "an API key is needed: Authorization: Bearer KEY", "missing_api_key")
        offered = digest_of(key.strip()[: MAX_KEY + 1])
        found = [caller for digest, caller in self._entries if hmac.compare_digest(digest, offered)]
        if not found:
            raise Problem(401, "this API key is not known here", "invalid_api_key")
        return found[0]


def digest_of(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogatepass")).digest()


def _entry(text: str, number: int) -> tuple[str, bytes]:
    tenant, _, key = text.partition(":")
    if not is_tenant(tenant):
        raise ConfigError(f"API keys: entry {number} does not begin with a tenant's name and a colon", field="api_keys")
    if match := _DIGEST.fullmatch(key):
        return tenant, bytes.fromhex(match[1])
    if not MIN_KEY <= len(key) <= MAX_KEY or re.search(r"\s", key):
        told = f"has {MIN_KEY} to {MAX_KEY} characters, none of them a space"
        raise ConfigError(f"API keys: entry {number}: a key {told}", field="api_keys")
    return tenant, digest_of(key)
