"""Every subject that Trine's processes use, with its messages, its stream and who may use it.

Addresses come from `shared.subjects`, streams from `shared.streams`, rights from `trine.access`: what is said here
beside them is which message goes where, and why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from shared.bus.base import StreamSpec
from shared.cache.store import block_stream
from shared.config import Settings
from shared.messages import (
    Again,
    Attempt,
    Beat,
    Claim,
    DeadLetter,
    DraftAsk,
    Drafts,
    Drop,
    Dropped,
    Failed,
    Finished,
    Generate,
    Handover,
    HandoverReply,
    HeldBlocks,
    Message,
    Missed,
    PrefillJob,
    Room,
    Tokens,
)
from shared.streams import decode_streams
from shared.subjects import ROLES, Subjects, service_subjects
from shared.tenants import DEFAULT_TENANT
from trine.access import API, Rights, role_rights, tenant_rights

MADE_BY = "Made from the code by `python -m trine.reference`; do not edit."
MODEL, TENANT, NAME = "MODEL", "TENANT", b"\xab" * 32
"""Stand for what differs; `_shown` puts parameters in their place."""
_PARAMETERS = {MODEL: "{model}", TENANT: "{tenant}", "REQUEST": "{id}", "WORKER": "{worker}", "ORDER": "{order}",
               "ROLE": "{role}", "trine-ROLE": "trine-{role}", NAME.hex(): "{name}"}  # fmt: skip
PARAMETERS = {
    "model": "The served model's name, as one token.",
    "tenant": "A tenant's name: 1 to 64 of A-Z a-z 0-9 - _. The tenant `default` is not spelled.",
    "id": "A request's id, as one token.",
    "priority": "`high`, `normal` or `low`.",
    "name": "A block's name: 64 hexadecimal digits.",
    "scope": "A tenant, or `=public`.",
    "part": "The number of a block's part, from 0.",
    "worker": "A worker's name, as one token.",
    "role": "`prefill`, `decode` or `drafter`.",
    "verb": "`PING`, `INFO` or `STATS`.",
    "instance": "The id of one process, from its answer to a ping.",
    "order": "The id of an operator's order, as one token.",
    "sequence": "The request's sequence in its queue.",
    "stamp": "When the queue took the request, in nanoseconds since 1970.",
}
BLOCK_FRAME = "BlockFrame"
"""In place of a message: what goes over the bus as a frame (`shared/cache/frames.py`)."""


@dataclass(frozen=True, slots=True)
class Channel:
    """`addresses` with {parameters}. No `messages`: they are empty. `stream`: the kind of the one that keeps them."""

    name: str
    addresses: tuple[str, ...]
    meaning: str
    messages: tuple[type[Message] | str, ...] = ()
    reply: type[Message] | None = None
    stream: str = ""

    @property
    def json(self) -> bool:
        """Whether JSON is understood beside msgpack."""
        return any(not isinstance(m, str) and issubclass(m, Generate | Tokens) for m in self.messages)


def channels() -> tuple[Channel, ...]:
    s = Subjects(MODEL)
    return (
        Channel(
            "requests",
            _shown([s.request("normal"), s.request("normal", TENANT)], normal="{priority}"),
            "A client asks. Publish with a JetStream ack: an error means that it was not taken.",
            (Generate,),
            stream="REQ",
        ),
        Channel(
            "events",
            _shown([s.events("REQUEST"), s.events("REQUEST", TENANT)]),
            "What becomes of a request: any number of `Tokens`, then one `Finished` or `Failed`. Headers: "
            "`Trine-Request`, the request's sequence in its queue, and `Trine-Cached`, prompt tokens found in a cache.",
            (Tokens, Finished, Failed),
            stream="TOK",
        ),
        Channel(
            "refused",
            _shown([s.refused(), s.refused(TENANT)]),
            "The answer to a request whose id cannot be used.",
            (Failed,),
        ),
        Channel(
            "cancel",
            _shown([s.cancel("REQUEST"), s.cancel("REQUEST", TENANT)]),
            "Nobody wants the answer any more. A message with a payload is ignored.",
        ),
        Channel(
            "again",
            _shown([s.again("REQUEST"), s.again("REQUEST", TENANT)]),
            "A client that may not read streams asks for the events that it missed.",
            (Again,),
            Missed,
        ),
        Channel("room", _shown([s.room]), "A client that found the queue full asks when to try again.", (), Room),
        Channel(
            "prefill",
            _shown([s.prefill(NAME)]),
            "Blocks to be computed; the name is that of the last one, so that equal jobs are joined.",
            (PrefillJob,),
            stream="PREFILL",
        ),
        Channel(
            "blocks",
            _shown([s.block(NAME, 0, "SCOPE")], **{"SCOPE": "{scope}", "0": "{part}"}),
            "The shared prefix cache: one message for each part of a block.",
            (BLOCK_FRAME,),
            stream="KV",
        ),
        Channel(
            "claims",
            _shown([s.claims]),
            "The log of who is computing which blocks; its order decides.",
            (Claim,),
            stream="CLAIM",
        ),
        Channel("held", _shown([s.held("WORKER")]), "What a decode worker's pool holds.", (HeldBlocks,)),
        Channel(
            "handover",
            _shown([s.handover("WORKER")]),
            "A request is offered to the decode worker whose pool holds its prefix.",
            (Handover,),
            HandoverReply,
        ),
        Channel(
            "drafts", _shown([s.draft("WORKER")]), "A drafter is asked for the next tokens.", (DraftAsk,), Drafts
        ),
        Channel("drop", _shown([s.drop]), "An operator orders cached blocks to be forgotten.", (Drop,)),
        Channel("dropped", _shown([s.dropped("ORDER")]), "A worker has carried out such an order.", (Dropped,)),
        Channel(
            "beats",
            _shown([s.beat("ROLE", "WORKER")]),
            "Every second, and at once when something changes: a worker lives, and how it is.",
            (Beat,),
        ),
        Channel(
            "attempts",
            _shown([f"{s.prefix}.attempt.SEQUENCE-STAMP"], **{"SEQUENCE-STAMP": "{sequence}-{stamp}"}),
            "What workers note of their attempts at a request.",
            (Attempt,),
            stream="ATTEMPT",
        ),
        Channel(
            "dead letters",
            _shown([s.dead("REQUEST", TENANT)]),
            "Requests that were given up. Here the tenant is always spelled.",
            (DeadLetter,),
            stream="DEAD",
        ),
        Channel(
            "services",
            _shown(service_subjects("ROLE", "INSTANCE"), **{"*": "{verb}", "INSTANCE": "{instance}"}),
            "NATS's own protocol of services (`nats micro ls`): who is there and how it does, as JSON.",
        ),
    )  # fmt: skip


def _shown(subjects: Iterable[str], **more: str) -> tuple[str, ...]:
    """With parameters for what differs. Tokens are replaced whole."""
    known = {**_PARAMETERS, **more}
    return tuple(".".join(known.get(token, token) for token in subject.split(".")) for subject in subjects)


def streams() -> dict[str, StreamSpec]:
    """By kind (`REQ` …), as a fleet with the default settings makes them."""
    settings, subjects = Settings.model_construct(), Subjects(MODEL)  # whatever this process's environment says
    specs = [*decode_streams(subjects, settings), block_stream(subjects, settings.cache_bytes)]
    return {spec.name.rsplit("_", 1)[1]: spec for spec in specs}


USERS = ("prefill", "decode", "drafter", "gateway", "operator", "tenant")


def rights(user: str) -> tuple[Rights, ...]:
    """Of a user; the tenant `default` and any other tenant together are `tenant`."""
    if user != "tenant":
        return (role_rights(user, [MODEL]),)
    return tenant_rights(DEFAULT_TENANT), tenant_rights(TENANT)


def publishers(channel: Channel) -> list[str]:
    return [u for u in USERS if _may(channel, (p for r in rights(u) for p in r.publish))]


def hearers(channel: Channel) -> list[str]:
    return [u for u in USERS if _may(channel, (p for r in rights(u) for p in r.subscribe))]


def readers(channel: Channel) -> list[str]:
    """Who takes messages out of the channel's stream, or reads them there."""
    if not channel.stream:
        return []
    stream = streams()[channel.stream].name
    verbs = (f"{API}CONSUMER.MSG.NEXT.{stream}.", f"{API}DIRECT.GET.{stream}")
    return [u for u in USERS if any(p == f"{API}>" or p.startswith(verbs) for r in rights(u) for p in r.publish)]


def _may(channel: Channel, patterns: Iterable[str]) -> bool:
    allowed = list(patterns)
    return any(matches(pattern, sample) for sample in samples(channel) for pattern in allowed)


def samples(channel: Channel) -> list[str]:
    """Subjects of the channel, as rights are written for them."""
    values = {"model": MODEL, "tenant": TENANT, "priority": "normal", "name": NAME.hex()}
    out = []
    for address in channel.addresses:
        roles = ROLES if "{role}" in address else ("",)
        for role in roles:
            subject = address
            for name in PARAMETERS:
                subject = subject.replace(f"{{{name}}}", role if name == "role" else values.get(name, "X"))
            out.append(subject)
    return out


def matches(pattern: str, subject: str) -> bool:
    """Whether a NATS pattern covers a subject without wildcards."""
    wanted, given = pattern.split("."), subject.split(".")
    if wanted[-1] == ">":
        wanted, given = wanted[:-1], given[: len(wanted) - 1] if len(given) >= len(wanted) else []
    return len(wanted) == len(given) and all(w in ("*", g) for w, g in zip(wanted, given, strict=True))
