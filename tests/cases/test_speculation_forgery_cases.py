"""Drafts that are forged, damaged, late or about something else: the answer is the model's own, and beats count them.

Every kind meets a fleet of its own, all fleets at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from services.decode.drafting import ANSWER_S
from shared.bus.base import Incoming
from shared.codec import decode, encode
from shared.messages import Beat, DraftAsk, DraftItem
from shared.subjects import Subjects
from tests.draft_forgeries import FORGERIES, Forgery, answer, draft
from tests.fake_engine import FakeEngine, completion
from tests.fleet_rig import COMMON, MODEL, FleetRig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]

SUBJECTS = Subjects(MODEL)
K = 4
STEP_S = 0.005
LATE_S = 0.2
SLOW_S = 1.3 * ANSWER_S / 40
"""A step so slow that requests outlast what a decode worker listens for answers."""
PROMPT = [7 * n % 1000 for n in range(30)]
LENGTH = 40
RIGHT = completion(PROMPT, LENGTH)
COUNTED = ("bad_drafts", "drafts_ignored", "draft_misses", "drafts_lost")
"""What a drafter did wrong, as a decode worker's beats say it."""


def truth(item: DraftItem, beyond: int = 0) -> list[int]:
    """What the model says next: all that was asked for, and some more."""
    done = item.base + len(item.token_ids) - len(PROMPT)
    return RIGHT[done : done + item.k + beyond]


async def suffer(forgery: Forgery, late_s: float = 0.0, step_s: float = STEP_S) -> dict[str, int]:
    """One request whose drafter answers every ask so, `late_s` seconds after it. Returns the worker's counters."""
    wait_ms = 100 if late_s else 5000
    async with FleetRig() as rig:
        bus, beats = rig.bus("forger"), asyncio.Queue[Beat]()

        async def on_ask(message: Incoming) -> None:
            (item,) = decode(message.data, DraftAsk).items
            await asyncio.sleep(late_s)
            for data in forgery.answers(item):
                await bus.publish(message.reply, data)

        async def on_beat(message: Incoming) -> None:
            beats.put_nowait(decode(message.data, Beat))

        async def beat() -> None:
            alive = encode(Beat(role="drafter", worker="forger", vocabulary="fake-vocabulary"))
            while True:
                await bus.publish(SUBJECTS.beat("drafter", "forger"), alive)
                await asyncio.sleep(COMMON["beat_s"])

        await bus.subscribe(SUBJECTS.draft("forger"), on_ask)
        await rig.decode(engine=FakeEngine(step_s=step_s), draft_depth=K, draft_wait_ms=wait_ms, draft_adaptive=False)
        alive = asyncio.create_task(beat())
        await asyncio.sleep(0.1)
        said = await rig.client().generate(token_ids=PROMPT, max_tokens=LENGTH)
        alive.cancel()
        assert list(said.token_ids) == RIGHT
        assert said.text == "".join(f"{token} " for token in RIGHT)
        assert (said.usage.completion_tokens, said.finish_reason) == (LENGTH, "length")
        await bus.subscribe(SUBJECTS.beat("decode", "decode-1"), on_beat)
        async with asyncio.timeout(5):
            await beats.get()
            counters = (await beats.get()).counters
        assert counters["drafted_tokens"] == said.usage.drafted_tokens
        return counters


async def suffered(forgeries: Mapping[str, Forgery]) -> dict[str, dict[str, int]]:
    found = await asyncio.gather(*(suffer(forgery) for forgery in forgeries.values()))
    return dict(zip(forgeries, found, strict=True))


async def test_case_53_forged_drafts_are_ignored_and_counted() -> None:
    found = await suffered(FORGERIES)
    blamed = {name: {c for c in COUNTED if counters.get(c)} for name, counters in found.items()}
    assert blamed == {name: {forgery.counted} for name, forgery in FORGERIES.items()}
    verified = {name for name, counters in found.items() if counters["drafted_tokens"]}
    assert verified == {"the same twice"}, "of two answers about one sequence the first is as good as any"
    assert not any(counters["accepted_tokens"] for counters in found.values())


def saying(make: Callable[[DraftItem], list[bytes]]) -> Forgery:
    return Forgery(make)


HARMLESS: dict[str, Forgery] = {
    "nothing": saying(lambda _: [answer()]),
    "no tokens": saying(lambda i: [answer(draft(i, []))]),
    "unknown": saying(lambda i: [answer(unknown=[i.session])]),
    "unknown, and a stranger": saying(lambda i: [answer(unknown=[i.session, "default/stranger"])]),
    "plausible and wrong": saying(lambda i: [answer(draft(i, [(t + 1) % 1000 for t in truth(i)]))]),
    "wrong at the end": saying(lambda i: [answer(draft(i, [*truth(i)[:-1], 3]))]),
    "right": saying(lambda i: [answer(draft(i, truth(i)))]),
    "right, and more than was asked for": saying(lambda i: [answer(draft(i, truth(i, beyond=8)))]),
    "right, sent three times": saying(lambda i: [answer(draft(i, truth(i)))] * 3),
    "right, then garbage": saying(lambda i: [answer(draft(i, truth(i))), b"garbage"]),
}


async def test_case_53_what_is_well_formed_is_verified_whatever_it_says() -> None:
    """Only the first answer to an ask is read. Drafts beyond what was asked for are left out."""
    found = await suffered(HARMLESS)
    assert {name: sum(counters.get(c, 0) for c in COUNTED) for name, counters in found.items()} == dict.fromkeys(
        HARMLESS, 0
    )
    for name, counters in found.items():
        drafted, accepted = counters["drafted_tokens"], counters["accepted_tokens"]
        if name.startswith("right"):
            assert drafted == accepted >= (LENGTH - 2) * K // (K + 1), name
        elif name == "wrong at the end":
            assert 0 < accepted < drafted, name
        else:
            assert accepted == 0, name
            assert (drafted > 0) is (name == "plausible and wrong"), name


LATE: dict[str, tuple[Forgery, float, float]] = {
    "late and right": (HARMLESS["right"], LATE_S, STEP_S),
    "late and wrong": (HARMLESS["plausible and wrong"], LATE_S, STEP_S),
    "late and forged": (FORGERIES["ids beyond the vocabulary"], LATE_S, STEP_S),
    "late and damaged": (FORGERIES["garbage"], LATE_S, STEP_S),
    "when nobody listens any more": (HARMLESS["right"], ANSWER_S + 0.2, SLOW_S),
    "never": (saying(lambda _: []), LATE_S, SLOW_S),
}
"""What comes so many seconds after the ask, while steps take so long."""


async def test_late_drafts_are_counted_and_so_is_what_is_wrong_with_them() -> None:
    found = dict(zip(LATE, await asyncio.gather(*(suffer(*how) for how in LATE.values())), strict=True))
    blamed = {name: {c for c in COUNTED if counters.get(c)} - {"draft_misses"} for name, counters in found.items()}
    assert blamed == {
        "late and right": set(),
        "late and wrong": set(),
        "late and forged": {"drafts_ignored"},
        "late and damaged": {"bad_drafts"},
        "when nobody listens any more": {"drafts_lost"},
        "never": {"drafts_lost"},
    }
    for name, counters in found.items():
        assert counters["draft_misses"] > 0, name
        assert counters["accepted_tokens"] == 0 or name == "late and right", name
