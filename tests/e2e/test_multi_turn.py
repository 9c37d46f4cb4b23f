"""Cold and warm text of the real model: chats that change from turn to turn, seams between tokens, natural prompts.

What is reused is exactly the common prefix in tokens, in full blocks, and the text is that of the reference either way.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence

import pytest

from shared.bus.nats import NatsBus
from shared.messages import ChatMessage
from shared.subjects import Subjects
from shared.tokenizer import Tokenizer
from tests.conversations import Conversation, common, reusable, turns
from tests.e2e.gold import Gold, check
from tests.e2e.prompts import PROMPTS
from trine.client import Client
from trine.completion import Completion
from trine.supervisor import Fleet

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(300)]
B = 16
TURNS = 8
SYSTEM = "You answer in one or two short sentences, in plain words, and never use lists."
STORY = (
    "The lighthouse keeper climbed the stairs every evening at dusk and counted the steps aloud. From the lamp room he "
    "could see the harbour, the two islands beyond it and, on clear nights, the lights of the fishing boats. He wrote "
    "the weather in a ledger and added a remark. A letter came in spring, and on its back somebody had noted:"
)
SEAMS = (
    (" The ledger is for new", "comers"),
    (" The letter was un", "signed"),
    (" The lamp was lit quick", "ly"),
    (" From the tower he saw the is", "land"),
)
"""A text, and what makes another word of its last one: the model's tokenizer begins that word with another token."""
NO_SEAM = (" My sister lives in New", "ark")
"""Here it goes on after the same token."""


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Without a drafter: whether it had run past an answer's last token, nobody could tell from outside."""
    with Fleet({"prefill": 1, "decode": 2}, env={"TRINE_LOG_FORMAT": "json"}) as fleet:
        fleet.wait_ready(120)
        yield fleet


@pytest.fixture
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with Client(fleet.url, fleet.model) as client:
        yield client


async def stored(fleet: Fleet) -> None:
    """Wait until the shared cache does not grow any more."""
    bus, last, since = await NatsBus.connect(fleet.url, name="test", wait=5), -1, 0
    async with asyncio.timeout(30):
        while since < 5:
            await asyncio.sleep(0.1)
            seq = (await bus.stream_state(Subjects(fleet.model).block_stream)).last_seq
            last, since = seq, since + 1 if seq == last else 0
    await bus.close()


def same(gold: Gold, prompt: Sequence[int], warm: Completion, cold: Completion, what: str) -> None:
    """Both are the reference's text; where they differ, the reference hesitates."""
    check(gold.divergences(prompt, warm.token_ids), f"warm {what}")
    if warm.token_ids != cold.token_ids:
        check(gold.divergences(prompt, cold.token_ids), f"cold {what}")


async def test_eight_turns_reuse_the_common_token_prefix(
    fleet: Fleet, client: Client, gold: Gold, tokenizer: Tokenizer
) -> None:
    rng = random.Random(7)
    said = iter(rng.sample(PROMPTS, len(PROMPTS)))
    chat = Conversation(lambda role: SYSTEM if role == "system" else next(said), rng)
    computed: list[list[int]] = []
    salt = uuid.uuid4().hex
    cached = []
    for turn, operation in enumerate(turns(TURNS, rng)):
        chat.change(operation)
        messages = [ChatMessage(role=role, content=content) for role, content in chat.messages]  # type: ignore[arg-type]
        prompt = tokenizer.chat(messages)
        warm, cold = [
            await client.generate(messages=messages, max_tokens=24, temperature=0, cache_salt=s)
            for s in (salt, f"{salt}-{turn}")
        ]
        what = f"turn {turn}: {operation}"
        assert warm.usage.prompt_tokens == len(prompt)
        assert warm.usage.cached_tokens == reusable(prompt, computed, B), what
        assert cold.usage.cached_tokens == 0
        same(gold, prompt, warm, cold, what)
        cached.append(warm.usage.cached_tokens)
        computed.append([*prompt, *warm.token_ids[:-1]])  # nothing was to follow the last one, so it has no KV
        chat.answered(warm.text)
        await stored(fleet)
    assert cached[0] == 0 and max(cached) > 10 * B


async def test_case_19_text_that_is_common_in_letters_only(
    fleet: Fleet, client: Client, gold: Gold, tokenizer: Tokenizer
) -> None:
    """One text is a prefix of the other and ends with a block; their last tokens differ all the same."""
    pairs = [pair for text, more in (*SEAMS, NO_SEAM) for pair in _both_ways(_filled(tokenizer, text), more)]
    salts = [uuid.uuid4().hex for _ in pairs]

    async def ask(text: str, salt: str) -> Completion:
        return await client.generate(text, max_tokens=6, temperature=0, cache_salt=salt)

    firsts = await asyncio.gather(*(ask(first, salt) for (first, _), salt in zip(pairs, salts, strict=True)))
    await stored(fleet)
    seams = 0
    for (first, second), salt, answer in zip(pairs, salts, firsts, strict=True):
        before, prompt = tokenizer.encode(first), tokenizer.encode(second)
        seams += common(before, prompt) < min(len(before), len(prompt))
        warm = await ask(second, salt)
        assert warm.usage.cached_tokens == reusable(prompt, [[*before, *answer.token_ids[:-1]]], B) > 0
        same(gold, prompt, warm, await ask(second, uuid.uuid4().hex), repr(second[-20:]))
    assert seams == 2 * len(SEAMS)


def _filled(tokenizer: Tokenizer, text: str) -> str:
    """So much of the story before it that it ends with a block."""
    words = STORY.split(" ")
    filled = (" ".join(words[:count]) + text for count in range(len(words), 0, -1))
    return next(candidate for candidate in filled if len(tokenizer.encode(candidate)) % B == 0)


def _both_ways(text: str, more: str) -> list[tuple[str, str]]:
    return [(text, text + more), (text + more, text)]


async def test_case_16_natural_prompts_cold_and_warm(
    fleet: Fleet, client: Client, gold: Gold, tokenizer: Tokenizer
) -> None:
    limit, salt, prompts = asyncio.Semaphore(8), uuid.uuid4().hex, PROMPTS[:20]

    def messages(prompt: str) -> list[ChatMessage]:
        return [ChatMessage(role="system", content=f"{SYSTEM} {prompt}"), ChatMessage(role="user", content=prompt)]

    async def ask(prompt: str) -> Completion:
        async with limit:
            return await client.generate(messages=messages(prompt), max_tokens=24, temperature=0, cache_salt=salt)

    colds = await asyncio.gather(*(ask(prompt) for prompt in prompts))
    await stored(fleet)
    warms = await asyncio.gather(*(ask(prompt) for prompt in prompts))
    for prompt, cold, warm in zip(prompts, colds, warms, strict=True):
        ids = tokenizer.chat(messages(prompt))
        assert cold.usage.cached_tokens <= common(ids, tokenizer.chat(messages("")))
        assert warm.usage.cached_tokens == (len(ids) - 1) // B * B > 0
        same(gold, ids, warm, cold, repr(prompt))
