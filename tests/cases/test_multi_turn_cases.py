"""Chats of eight turns that resend the model's own replies, and edit, insert and drop history between them.

What is reused is exactly the common prefix, in tokens, with anything computed before, in full blocks.
"""

from __future__ import annotations

import random

import pytest

from tests.block_faults import FaultyFleet, ask
from tests.conversations import Conversation, reusable, turns
from tests.fake_engine import FakeEngine

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
B = 4
ROLES = {"system": 996, "user": 997, "assistant": 998}
END = 999


def render(messages: list[tuple[str, list[int]]]) -> list[int]:
    """As a chat template does: role, content, end; then the role of the answer."""
    tokens = [token for role, content in messages for token in (ROLES[role], *content, END)]
    return [*tokens, ROLES["assistant"]]


def blocks_of(computed: list[list[int]]) -> set[tuple[int, ...]]:
    """All that can be stored, each block with what went before it."""
    return {tuple(tokens[:end]) for tokens in computed for end in range(B, len(tokens) + 1, B)}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("fleet", ["one worker", "another worker each turn", "with prefill", "with a drafter"])
async def test_case_19_each_turn_reuses_the_common_token_prefix(fleet: str, seed: int) -> None:
    rng = random.Random(seed)
    chat = Conversation(lambda role: [rng.randrange(40) for _ in range(rng.randint(1, 14))], rng)
    computed: list[list[int]] = []
    settings = {"local_prefill_tokens": 0} if fleet == "with prefill" else {}
    async with FaultyFleet() as rig:
        await rig.decode("decode-0", FakeEngine(blocks=400), **settings)
        if fleet == "with prefill":
            await rig.prefill(engine=FakeEngine(blocks=400))
        if fleet == "with a drafter":
            await rig.drafter(engine=FakeEngine(blocks=400))
        for turn, operation in enumerate(turns(8, rng)):
            chat.change(operation)
            prompt, count = render(chat.messages), rng.randint(1, 12)
            answer = await ask(rig.client(), prompt, count)
            assert answer.usage.cached_tokens == reusable(prompt, computed, B), f"turn {turn}: {operation}"
            reply = list(answer.token_ids)
            computed.append([*prompt, *reply[:-1]])  # nothing was to follow the last one, so it has no KV
            chat.answered(reply)
            await rig.stored(len(blocks_of(computed)))
            if fleet == "another worker each turn":
                await rig.kill(f"decode-{turn}")
                await rig.decode(f"decode-{turn + 1}", FakeEngine(blocks=400))
        assert rig.cache.state().messages == len(blocks_of(computed)), "nothing else is stored"
