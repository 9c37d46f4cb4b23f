"""Who may do what on NATS: a user for each role and each tenant, with the rights that its work needs and no others.

`deploy/secure/users.conf` and the table in docs/security.md are printed from here (`trine access`). Streams are named
one by one, because NATS has no wildcard inside a name: a server needs new users for a new model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

from shared.bus.wire import INBOX
from shared.errors import InvalidField
from shared.subjects import ALL_BEATS, ALL_REQUESTS, PRIORITIES, SERVICES, Subjects, service_subjects
from shared.tenants import DEFAULT_TENANT, is_tenant

ROLES = ("prefill", "decode", "drafter", "gateway", "operator")
ANSWER_S = 60
"""Seconds in which a message may be answered, by who may publish answers."""
API = "$JS.API."
COPIES = "$JS.SNAPSHOT.>"
"""Where a backup is acked and a restore's chunks go (NATS ADR-1, JetStream API)."""
X = "x"  # where a subject has an id; widened to a wildcard


@dataclass(frozen=True, slots=True)
class Rights:
    """Subjects that a user may publish and subscribe to, and what of these it never hears. `answers`: also one message
    to the reply subject of each message that it received.
    """

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    deaf_to: tuple[str, ...] = ()
    answers: bool = False


def role_rights(role: str, models: Sequence[str]) -> Rights:
    """Of a worker, the gateway or an operator, for these models."""
    each = {"prefill": _prefill, "decode": _decode, "drafter": _drafter, "gateway": _gateway, "operator": _operator}
    parts = [each[role](Subjects(model)) for model in models]
    return Rights(
        _unique(chain.from_iterable(part.publish for part in parts)),
        _unique([*chain.from_iterable(part.subscribe for part in parts), _inbox(role)]),
        answers=any(part.answers for part in parts),
    )


def tenant_rights(tenant: str) -> Rights:
    """Of a tenant's clients, for all models. Raises ValueError for what is no tenant."""
    s = Subjects(X)
    # Each priority by its name: the queue also takes others, which nobody would ever pull.
    requests = [_wide(s.request(priority, tenant), 1) for priority in PRIORITIES]
    others = [_wide(subject, 1, -1) for subject in (s.cancel(X, tenant), s.again(X, tenant))]
    return Rights(
        (*requests, *others, _wide(s.room, 1), f"{API}STREAM.NAMES"),
        (_wide(s.events(X, tenant), 1, -1), _wide(s.refused(tenant), 1), _inbox(tenant)),
        # To NATS a last `*` that is allowed also allows a `>` there, so that who may hear `tok.*`, the events of the
        # tenant that subjects do not spell, would hear those of all the others.
        deaf_to=(_wide(s.events(X, X), 1, -1, -2),) if tenant == DEFAULT_TENANT else (),
    )


def _decode(s: Subjects) -> Rights:
    streams = (
        s.request_stream,
        s.prefill_stream,
        s.event_stream,
        s.claim_stream,
        s.attempt_stream,
        s.dead_stream,
        s.block_stream,
    )
    consumers = [f"{s.request_stream}.{s.request_consumer(priority)}" for priority in PRIORITIES]
    return Rights(
        (
            _wide(s.beat("decode", X), -1),
            _wide(s.held(X), -1),
            _wide(s.handover(X), -1),
            _wide(s.draft(X), -1),
            s.prefills,
            s.blocks,
            s.claims,
            s.attempts,
            s.dead(None, None),
            _wide(s.dropped(X), -1),
            # Of all models: it answers requests for those that nobody serves.
            *(_wide(events, 1) for events in s.all_events),
            s.refused(),
            _wide(s.refused(X), -1),
            f"{API}STREAM.NAMES",
            *_of_api("STREAM.INFO", streams),
            *_of_api("STREAM.CREATE", streams),
            *_works_off(consumers),
            *_follows(s),
            *_of_api("DIRECT.GET", (s.event_stream, s.claim_stream, s.attempt_stream, s.block_stream)),
        ),
        (
            s.beats,
            ALL_REQUESTS,
            s.cancels,
            s.agains,
            s.room,
            s.all_held,
            _wide(s.handover(X), -1),
            s.drop,
            *service_subjects("decode"),
        ),
        answers=True,
    )


def _prefill(s: Subjects) -> Rights:
    """Does not create streams: who may, can have the server copy others into them. Decode workers create them.

    Nor does it answer wherever it is asked to: a tenant whose cancels it hears could have it write to another's tokens.
    """
    return Rights(
        (
            _wide(s.beat("prefill", X), -1),
            _inbox("operator"),
            s.blocks,
            s.claims,
            _wide(s.dropped(X), -1),
            *_of_api("STREAM.INFO", (s.prefill_stream, s.claim_stream, s.block_stream)),
            *_works_off([f"{s.prefill_stream}.{s.prefill_consumer}"]),
            *_follows(s),
            *_of_api("DIRECT.GET", (s.claim_stream, s.block_stream)),
        ),
        (s.beats, s.cancels, s.drop, *service_subjects("prefill")),
    )


def _drafter(s: Subjects) -> Rights:
    return Rights(
        (_wide(s.beat("drafter", X), -1),), (s.beats, _wide(s.draft(X), -1), *service_subjects("drafter")), answers=True
    )


def _gateway(s: Subjects) -> Rights:
    """Speaks for all tenants."""
    return Rights(
        (
            *_requests(s),
            _wide(s.cancels, 1),
            _wide(s.agains, 1),
            _wide(s.room, 1),
            _inbox("operator"),
            f"{API}STREAM.NAMES",
        ),
        (
            *(_wide(events, 1) for events in s.all_events),
            _wide(s.refused(), 1),
            _wide(s.refused(X), 1, -1),
            ALL_BEATS,
            *service_subjects("gateway"),
        ),
    )


def _operator(s: Subjects) -> Rights:
    """Whoever may manage streams may read them, and put a copy of one back."""
    return Rights(
        (_wide(s.drop, 1), *_requests(s), SERVICES, f"{API}>", COPIES), (ALL_BEATS, _wide(s.dropped(X), 1, -1))
    )


def _requests(s: Subjects) -> list[str]:
    """Of all models and tenants."""
    return [_wide(subject, 1) for priority in PRIORITIES for subject in s.requests_of(priority)]


def _of_api(verb: str, names: Iterable[str]) -> list[str]:
    return [f"{API}{verb}.{name}" for name in names]


def _works_off(consumers: Sequence[str]) -> list[str]:
    """Creates, pulls from and acks to these consumers of queues."""
    verbs = ("CONSUMER.INFO", "CONSUMER.CREATE", "CONSUMER.MSG.NEXT")
    return [*chain.from_iterable(_of_api(verb, consumers) for verb in verbs), *(f"$JS.ACK.{c}.>" for c in consumers)]


def _follows(s: Subjects) -> list[str]:
    """Has consumers of its own of the cache's stream."""
    return [
        f"{API}CONSUMER.CREATE.{s.block_stream}.*.{s.blocks}",
        f"{API}CONSUMER.MSG.NEXT.{s.block_stream}.*",
        f"{API}CONSUMER.DELETE.{s.block_stream}.*",
    ]


def _inbox(user: str) -> str:
    return f"{INBOX}{user}.>"


def _wide(subject: str, *at: int) -> str:
    """The subject with wildcards for these of its tokens."""
    tokens = subject.split(".")
    for index in at:
        tokens[index] = "*"
    return ".".join(tokens)


def _unique(subjects: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(subjects))


def users(models: Sequence[str], tenants: Sequence[str]) -> dict[str, Rights]:
    """By user. Raises InvalidField for no model, and for a name that is no tenant's or is a role's."""
    if not models:
        raise InvalidField("--model: at least one", field="model")
    for tenant in tenants:
        if not is_tenant(tenant) or tenant in ROLES:
            raise InvalidField("--tenant: 1 to 64 letters, digits, - and _, and no role's name", field="tenant")
    roles = {role: role_rights(role, models) for role in ROLES}
    return roles | {tenant: tenant_rights(tenant) for tenant in tenants}


def variable(user: str) -> str:
    """The environment variable of the server that holds this user's password."""
    return f"TRINE_{user.upper().replace('-', '_')}_PASSWORD"


def configuration(models: Sequence[str], tenants: Sequence[str]) -> str:
    """The file for nats-server. Raises InvalidField, also for two users whose variables would be the same."""
    found = users(models, tenants)
    if len({variable(user) for user in found}) < len(found):
        raise InvalidField("--tenant: two names that differ in case, or in - and _, alone", field="tenant")
    command = " ".join(["trine access", *(f"--model {m}" for m in models), *(f"--tenant {t}" for t in tenants)])
    lines = ["# See docs/security.md. Printed by:", f"#   {command}", "authorization {", "  users = ["]
    for user, rights in found.items():
        lines += _user(user, rights)
    return "\n".join([*lines, "  ]", "}"]) + "\n"


def _user(user: str, rights: Rights) -> list[str]:
    responses = [f'        allow_responses: {{ max: 1, expires: "{ANSWER_S}s" }}'] if rights.answers else []
    return [
        "    {",
        f"      user: {json.dumps(user)}, password: ${variable(user)}",
        "      permissions {",
        *_listed("publish", rights.publish),
        *_heard(rights),
        *responses,
        "      }",
        "    }",
    ]


def _heard(rights: Rights) -> list[str]:
    if not rights.deaf_to:
        return _listed("subscribe", rights.subscribe)
    lists = [*_listed("allow", rights.subscribe), *_listed("deny", rights.deaf_to)]
    return ["        subscribe {", *(f"  {line}" for line in lists), "        }"]


def _listed(verb: str, subjects: Sequence[str]) -> list[str]:
    return [f"        {verb}: [", *(f"          {json.dumps(subject)}" for subject in subjects), "        ]"]
