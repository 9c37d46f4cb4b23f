"""Text through the whole stack (real weights, real nats-server, real processes) is the text of plain `transformers`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence

import pytest

from shared.messages import ChatMessage, Sampling
from shared.tokenizer import Tokenizer
from tests.e2e.gold import Gold, check
from tests.e2e.prompts import PROMPTS
from trine.client import Client
from trine.completion import Completion
from trine.supervisor import Fleet

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(420)]
AT_ONCE = 15
# Drafts that are often right and arrive in time, so that accepting, rejecting and rolling back all happen.
EAGER = {"TRINE_DRAFT_SOURCE": "model", "TRINE_DRAFTER_LAYERS": "24"}


@pytest.fixture(scope="module")
def eager_fleet() -> Iterator[Fleet]:
    with Fleet(
        {"decode": 1, "drafter": 1},
        env={"TRINE_DRAFT_WAIT_MS": "1000", "TRINE_DRAFT_ADAPTIVE": "false", "TRINE_LOG_FORMAT": "json"},
        role_env={"drafter": EAGER},
    ) as fleet:
        fleet.wait_ready(120)
        yield fleet


async def ask_all(fleet: Fleet, prompts: Sequence[str], max_tokens: int, **params: float) -> list[Completion]:
    limit = asyncio.Semaphore(AT_ONCE)

    async def one(client: Client, prompt: str) -> Completion:
        async with limit:
            return await client.generate(
                messages=[{"role": "user", "content": prompt}],
                max_tokens=max_tokens,
                **params,  # type: ignore[arg-type]
            )

    async with Client(fleet.url, fleet.model) as client:
        return await asyncio.gather(*(one(client, p) for p in prompts))


def token_ids(tokenizer: Tokenizer, prompt: str) -> list[int]:
    return tokenizer.chat([ChatMessage(role="user", content=prompt)])


def compare(
    gold: Gold, tokenizer: Tokenizer, prompts: Sequence[str], answers: Sequence[Completion], sampling: Sampling | None
) -> None:
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = token_ids(tokenizer, prompt)
        assert answer.usage.prompt_tokens == len(ids)
        assert answer.usage.completion_tokens == len(answer.token_ids)
        assert answer.text == tokenizer.decode(answer.token_ids)
        check(gold.divergences(ids, answer.token_ids, sampling, answer.seed), repr(prompt))


async def test_thirty_prompts_have_the_greedy_text_of_transformers(
    stack: Fleet, gold: Gold, tokenizer: Tokenizer
) -> None:
    answers = await ask_all(stack, PROMPTS, 64, temperature=0)
    compare(gold, tokenizer, PROMPTS, answers, None)
    assert sum(a.usage.completion_tokens for a in answers) > 30 * 30
    assert sum(a.usage.accepted_tokens for a in answers) > 0
    for answer in answers:
        assert answer.finish_reason == ("length" if answer.usage.completion_tokens == 64 else "stop")


async def test_drafter_on_off_and_killed_half_way_give_one_text(
    eager_fleet: Fleet, gold: Gold, tokenizer: Tokenizer
) -> None:
    """`on` is checked against the reference; `killed` and `off` must then be the same, but for near-ties."""
    prompts = PROMPTS[:5]
    sampling = Sampling(temperature=0.8, seed=11)
    params = {"temperature": 0.8, "seed": 11}
    on = await ask_all(eager_fleet, prompts, 48, **params)
    task = asyncio.create_task(ask_all(eager_fleet, prompts, 48, **params))
    await asyncio.sleep(2.5)
    eager_fleet.hold("drafter-1")
    eager_fleet.kill("drafter-1")
    killed = await task
    off = await ask_all(eager_fleet, prompts, 48, **params)
    eager_fleet.release("drafter-1")
    await asyncio.to_thread(eager_fleet.wait_ready, 120)
    for answers in (on, killed, off):
        compare(gold, tokenizer, prompts, answers, sampling)
    for first, second, third in zip(on, killed, off, strict=True):
        assert first.seed == second.seed == third.seed == 11
        same = first.token_ids == second.token_ids == third.token_ids
        assert same or gold_has_near_tie(gold, tokenizer, prompts[on.index(first)], (first, second, third), sampling)
    assert sum(a.usage.accepted_tokens for a in on) > 0
    assert 0 < sum(a.usage.drafted_tokens for a in killed) < sum(a.usage.drafted_tokens for a in on)
    assert all(a.usage.drafted_tokens == 0 for a in off)


def gold_has_near_tie(
    gold: Gold, tokenizer: Tokenizer, prompt: str, answers: Sequence[Completion], sampling: Sampling
) -> bool:
    """Whether one of two different texts took the second best of two nearly equal tokens."""
    ids = token_ids(tokenizer, prompt)
    return any(gold.divergences(ids, a.token_ids, sampling, a.seed) for a in answers)


async def test_an_unset_seed_is_drawn_returned_and_repeats_the_text(stack: Fleet) -> None:
    async with Client(stack.url, stack.model) as client:
        prompt = "Once upon a time"
        first, second = [await client.generate(prompt, max_tokens=16, temperature=1.0) for _ in range(2)]
        assert first.seed != second.seed
        again = await client.generate(prompt, max_tokens=16, temperature=1.0, seed=first.seed)
        assert again.token_ids == first.token_ids
        assert first.token_ids != second.token_ids
