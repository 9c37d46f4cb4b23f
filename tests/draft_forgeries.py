"""Answers of a drafter that are damaged, forged or about something else, as bytes on the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgpack

from shared.messages import MAX_BATCH, MAX_DRAFT, DraftItem

FAR = 1000
"""The first id beyond the fake model's vocabulary."""


def draft(item: DraftItem, token_ids: Any, **fields: Any) -> dict[str, Any]:
    """One that would be right in all but what is given."""
    position = item.base + len(item.token_ids)
    return {"session": item.session, "position": position, "token_ids": token_ids, "source": "forged", **fields}


def answer(*drafts: Any, **fields: Any) -> bytes:
    packed: bytes = msgpack.packb({"v": 1, "type": "drafts", "worker": "forger", "drafts": list(drafts), **fields})
    return packed


@dataclass(frozen=True)
class Forgery:
    """`answers` makes the messages that answer one ask, of which `counted` is the decode worker's counter."""

    answers: Callable[[DraftItem], list[bytes]]
    counted: str = "bad_drafts"


def _bad(make: Callable[[DraftItem], bytes]) -> Forgery:
    return Forgery(lambda item: [make(item)])


def _ignored(make: Callable[[DraftItem], bytes]) -> Forgery:
    return Forgery(lambda item: [make(item)], "drafts_ignored")


FORGERIES: dict[str, Forgery] = {
    "negative ids": _bad(lambda i: answer(draft(i, [1, -1]))),
    "ids that no machine word holds": _bad(lambda i: answer(draft(i, [2**63]))),
    "ids beyond the vocabulary": _ignored(lambda i: answer(draft(i, [1, FAR]))),
    "too many tokens": _bad(lambda i: answer(draft(i, [1] * (MAX_DRAFT + 100)))),
    "floats": _bad(lambda i: answer(draft(i, [1.0, 2.0]))),
    "no number": _bad(lambda i: answer(draft(i, [float("nan")]))),
    "text for ids": _bad(lambda i: answer(draft(i, ["1"]))),
    "the same twice": _ignored(lambda i: answer(draft(i, [1]), draft(i, [2]))),
    "another request": _ignored(lambda i: answer(draft(i, [1], session="default/another"))),
    "a name that is none": _bad(lambda i: answer(draft(i, [1], session=""))),
    "an earlier position": _ignored(lambda i: answer(draft(i, [1], position=i.base + len(i.token_ids) - 1))),
    "a later position": _ignored(lambda i: answer(draft(i, [1], position=i.base + len(i.token_ids) + 1))),
    "a negative position": _bad(lambda i: answer(draft(i, [1], position=-1))),
    "more drafts than a step has sequences": _bad(lambda i: answer(*[draft(i, [1])] * (MAX_BATCH + 1))),
    "no bytes": _bad(lambda _: b""),
    "garbage": _bad(lambda _: b"garbage"),
    "cut off": _bad(lambda i: answer(draft(i, [1, 2]))[:-1]),
    "bytes after the end": _bad(lambda i: answer(draft(i, [1, 2])) + b"\0"),
    "JSON": _bad(lambda _: b'{"v":1,"type":"drafts","worker":"forger","drafts":[]}'),
    "nested without end": _bad(lambda _: b"\x91" * 5000),
    "another message": _bad(lambda _: msgpack.packb({"v": 1, "type": "beat", "role": "drafter", "worker": "forger"})),
    "another version": _bad(lambda i: answer(draft(i, [1]), v=2)),
    "a field too many": _bad(lambda i: answer(draft(i, [1]), more=1)),
    "a field too few": _bad(lambda i: answer({"session": i.session})),
    "null": _bad(lambda _: answer(None)),
    "more names than a step has sequences": _bad(lambda i: answer(draft(i, [1]), unknown=["x"] * (MAX_BATCH + 1))),
}
"""What decode workers have to ignore and to count."""
