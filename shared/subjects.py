"""The only place that spells a NATS subject or a stream name.

Model, worker and request ids are user text. `token` maps any text to one subject token, reversibly, so that
no id can widen a subject (`.`), match others (`*`, `>`) or collide with another id.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.tenants import DEFAULT_TENANT, is_tenant

PRIORITIES = ("high", "normal", "low")
ROLES = ("prefill", "decode", "drafter")

_SAFE = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_ESCAPED = re.compile(r"=([0-9A-F]{2})")


def token(text: str) -> str:
    """One NATS subject token for `text`: bytes outside [A-Za-z0-9_-] become `=XX` (hex of UTF-8).

    Raises ValueError for the empty string, which cannot be a token.
    """
    if not text:
        raise ValueError("an empty id cannot be part of a subject")
    return "".join(chr(b) if b in _SAFE else f"={b:02X}" for b in text.encode())


def text(token_: str) -> str:
    """The inverse of `token`."""
    raw = _ESCAPED.sub(lambda m: chr(int(m.group(1), 16)), token_)
    return raw.encode("latin-1").decode()


@dataclass(frozen=True)
class Subjects:
    """Subjects and streams of one served model."""

    model: str

    @property
    def prefix(self) -> str:
        return f"trine.{token(self.model)}"

    # Work queue of requests, one subject per priority and tenant.
    def request(self, priority: str, tenant: str = DEFAULT_TENANT) -> str:
        if priority not in PRIORITIES:
            raise ValueError(f"priority must be one of {PRIORITIES}")
        return f"{self.prefix}.req.{priority}{_of(tenant)}"

    def requests_of(self, priority: str) -> tuple[str, str]:
        return self.request(priority), f"{self.request(priority)}.*"

    @property
    def requests(self) -> tuple[str, str]:
        return f"{self.prefix}.req.*", f"{self.prefix}.req.*.*"

    # Refusals of messages whose request id cannot be read.
    def refused(self, tenant: str = DEFAULT_TENANT) -> str:
        return f"{self.prefix}.refused{_of(tenant)}"

    # Work queue of prefill jobs; the last token is the name of the job's last block.
    def prefill(self, name: bytes) -> str:
        return f"{self.prefix}.prefill.{name.hex()}"

    @property
    def prefills(self) -> str:
        return f"{self.prefix}.prefill.*"

    # Prefix cache.
    def block(self, name: bytes, part: int = 0, scope: str = DEFAULT_TENANT) -> str:
        """`scope` is a tenant, or `naming.PUBLIC`."""
        return f"{self.prefix}.kv.{scope}.{name.hex()}.{part}"

    @property
    def blocks(self) -> str:
        return f"{self.prefix}.kv.*.*.*"

    def blocks_of(self, scope: str) -> str:
        return f"{self.prefix}.kv.{scope}.*.*"

    # Log of who is computing which blocks.
    @property
    def claims(self) -> str:
        return f"{self.prefix}.claim"

    # Operators' orders to all workers to forget cached blocks.
    @property
    def drop(self) -> str:
        return f"{self.prefix}.drop"

    def dropped(self, order: str) -> str:
        """Where workers say that they have carried out one such order."""
        return f"{self.prefix}.dropped.{token(order)}"

    # Token events.
    def events(self, request_id: str, tenant: str = DEFAULT_TENANT) -> str:
        return f"{self.prefix}.tok{_of(tenant)}.{token(request_id)}"

    @property
    def all_events(self) -> tuple[str, str]:
        return f"{self.prefix}.tok.*", f"{self.prefix}.tok.*.*"

    # What workers note of their attempts at a request, which its place in the queue names.
    def attempt(self, seq: int, stamp: int) -> str:
        return f"{self.prefix}.attempt.{seq}-{stamp}"

    @property
    def attempts(self) -> str:
        return f"{self.prefix}.attempt.*"

    # Requests that were given up. The tenant is always spelled; None stands for all of them.
    def dead(self, request_id: str | None, tenant: str | None = DEFAULT_TENANT) -> str:
        if tenant is not None and not is_tenant(tenant):
            raise ValueError("a tenant's name is 1 to 64 letters, digits, - and _")
        return f"{self.prefix}.dead.{tenant or '*'}.{'*' if request_id is None else token(request_id)}"

    # A client that may not read the event stream asks for what it missed.
    def again(self, request_id: str, tenant: str = DEFAULT_TENANT) -> str:
        return f"{self.prefix}.again{_of(tenant)}.{token(request_id)}"

    @property
    def agains(self) -> str:
        return f"{self.prefix}.again.>"

    # A client that found the queue full asks when to try again.
    @property
    def room(self) -> str:
        return f"{self.prefix}.room"

    # What a decode worker's pool holds.
    def held(self, worker: str) -> str:
        return f"{self.prefix}.held.{token(worker)}"

    @property
    def all_held(self) -> str:
        return f"{self.prefix}.held.*"

    # Requests that one decode worker offers another.
    def handover(self, worker: str) -> str:
        return f"{self.prefix}.hand.{token(worker)}"

    def draft(self, drafter: str) -> str:
        return f"{self.prefix}.draft.{token(drafter)}"

    def cancel(self, request_id: str, tenant: str = DEFAULT_TENANT) -> str:
        return f"{self.prefix}.cancel{_of(tenant)}.{token(request_id)}"

    @property
    def cancels(self) -> str:
        return f"{self.prefix}.cancel.>"

    def beat(self, role: str, worker: str) -> str:
        return f"{self.prefix}.beat.{role}.{token(worker)}"

    @property
    def beats(self) -> str:
        return f"{self.prefix}.beat.*.*"

    # Streams and consumers.
    def _stream(self, kind: str) -> str:
        return f"TRINE_{token(self.model)}_{kind}"

    @property
    def request_stream(self) -> str:
        return self._stream("REQ")

    @property
    def prefill_stream(self) -> str:
        return self._stream("PREFILL")

    @property
    def block_stream(self) -> str:
        return self._stream("KV")

    @property
    def event_stream(self) -> str:
        return self._stream("TOK")

    @property
    def claim_stream(self) -> str:
        return self._stream("CLAIM")

    @property
    def attempt_stream(self) -> str:
        return self._stream("ATTEMPT")

    @property
    def dead_stream(self) -> str:
        return self._stream("DEAD")

    @staticmethod
    def request_consumer(priority: str) -> str:
        return f"decode-{priority}"

    @property
    def prefill_consumer(self) -> str:
        return "prefill"


ALL_REQUESTS = "trine.*.req.>"  # every model's; the fleet watches it to answer for models nobody serves
ALL_BEATS = "trine.*.beat.*.*"

# NATS's own protocol by which services are found and say how they are.
SERVICES = "$SRV.>"


def service_name(role: str) -> str:
    return f"trine-{role}"


def service_subjects(role: str, instance: str = "*") -> tuple[str, str, str]:
    """On which everybody, all of a role, and this instance (a subject's token) are asked."""
    return "$SRV.*", f"$SRV.*.{service_name(role)}", f"$SRV.*.{service_name(role)}.{instance}"


def model_of(subject: str) -> str:
    """The model id in any subject spelled here. Raises ValueError for a token that spells no text."""
    return text(subject.split(".")[1])


def last(subject: str) -> str:
    """The id in the last token of a subject. Raises ValueError for a token that spells no text."""
    return text(subject.rsplit(".", 1)[1])


def _of(tenant: str) -> str:
    """The tenant as a part of a subject; the default one is not spelled. Raises ValueError for what is no tenant."""
    if not is_tenant(tenant):
        raise ValueError("a tenant's name is 1 to 64 letters, digits, - and _")
    return "" if tenant == DEFAULT_TENANT else f".{tenant}"


def priority_of(subject: str) -> str:
    """The priority of a request that came on this subject. Raises ValueError for what is no request's subject."""
    tokens = subject.split(".")
    if len(tokens) < 4 or tokens[2] != "req" or tokens[3] not in PRIORITIES:
        raise ValueError("not a request's subject")
    return tokens[3]


def tenant_of_request(subject: str) -> str:
    """The tenant whose request came on this subject. Raises ValueError for what is no tenant's name."""
    tokens = subject.split(".")
    tenant = tokens[4] if len(tokens) == 5 else DEFAULT_TENANT
    if not 4 <= len(tokens) <= 5 or not is_tenant(tenant):
        raise ValueError("no tenant's name in the subject")
    return tenant


def cancelled_of(subject: str) -> tuple[str, str]:
    """(tenant, request id) of a cancel's subject. Raises ValueError for any other subject."""
    return _request_of(subject, "cancel")


def asked_again(subject: str) -> tuple[str, str]:
    """(tenant, request id) of whose events are asked for. Raises ValueError for any other subject."""
    return _request_of(subject, "again")


def dead_of(subject: str) -> tuple[str, str]:
    """(tenant, request id) of a dead letter. Raises ValueError for any other subject."""
    return _request_of(subject, "dead")


def _request_of(subject: str, kind: str) -> tuple[str, str]:
    tokens = subject.split(".")
    if not 4 <= len(tokens) <= 5 or tokens[2] != kind:
        raise ValueError(f"not a subject of kind {kind}")
    tenant = tokens[3] if len(tokens) == 5 else DEFAULT_TENANT
    if not is_tenant(tenant):
        raise ValueError("no tenant's name in the subject")
    return tenant, text(tokens[-1])


def block_of(subject: str) -> tuple[str, bytes, int]:
    """(scope, name, part) of a block subject. Raises ValueError for any other subject."""
    _, _, kind, scope, name, part = subject.split(".")
    if kind != "kv":
        raise ValueError(f"not a block subject: {subject}")
    return scope, bytes.fromhex(name), int(part)
