"""Failure cases of prefix caches met in the field: one tenant's KV reused, or timed, by another. Over a whole fleet.

Each test has both halves: who may share does hit, who may not misses; else a cache that is off would pass.
"""

from __future__ import annotations

import pytest

from services.decode.publics import PublicPrefixes
from shared.cache.naming import PUBLIC
from shared.errors import InvalidField
from tests.block_faults import SUBJECTS, FaultyFleet, ask, prompt, refusal
from tests.fake_engine import FakeEngine
from tests.fleet_rig import FleetRig

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(60)]
B = 4
TOKENS = prompt(8 * B + 1)


async def fleet(rig: FleetRig, prefill: bool, decode: str = "decode-1") -> None:
    """One decode worker, and if asked for a prefill worker that does all it can do."""
    if prefill and "prefill-1" not in rig.workers:
        await rig.prefill()
    await rig.decode(decode, local_prefill_tokens=0)


async def cached(
    rig: FleetRig, tenant: str | None, token_ids: list[int] = TOKENS, *, salt: str | None = None
) -> tuple[int, int]:
    """(cached tokens, tokens that all workers computed for the answer, which is what it took to get it)."""
    before = _computed(rig)
    answer = await ask(rig.client(tenant), token_ids, 3, cache_salt=salt)
    return answer.usage.cached_tokens, _computed(rig) - before


def _computed(rig: FleetRig) -> int:
    return sum(engine.tokens_computed for engine in rig.engines.values())


COLD = (0, len(TOKENS) + 2)
WARM = (8 * B, 1 + 2)


@pytest.mark.parametrize("prefill", [False, True], ids=["alone", "with prefill"])
async def test_case_3_tenants_neither_share_nor_time_each_others_blocks(prefill: bool) -> None:
    async with FaultyFleet(authenticated=True) as rig:
        await fleet(rig, prefill)
        assert [await cached(rig, "a") for _ in range(2)] == [COLD, WARM]
        assert [await cached(rig, "b") for _ in range(2)] == [COLD, WARM]
        assert await cached(rig, None) == COLD
        await rig.stored(3 * 8)
        await rig.kill("decode-1")
        await fleet(rig, prefill, "decode-2")
        assert [await cached(rig, tenant) for tenant in ("a", "b", None, "c")] == [WARM, WARM, WARM, COLD]


async def test_case_3_a_tenant_on_a_server_that_asks_for_no_credentials_is_refused() -> None:
    async with FaultyFleet() as rig:
        await rig.decode()
        with pytest.raises(InvalidField) as caught:
            await rig.client("a").generate(token_ids=TOKENS, max_tokens=3)
        assert caught.value.field == "tenant"
        assert await cached(rig, None) == COLD


@pytest.mark.parametrize("prefill", [False, True], ids=["alone", "with prefill"])
async def test_case_4_a_salt_narrows_inside_a_tenant_and_opens_nothing(prefill: bool) -> None:
    callers = [("a", "s"), ("a", None), ("a", "t"), ("b", "s"), ("b", None), (None, "s"), ("as", None), ("a", "as")]
    async with FaultyFleet(authenticated=True) as rig:
        await fleet(rig, prefill)
        for tenant, salt in callers:
            assert await cached(rig, tenant, salt=salt) == COLD, "another's salt or tenant"
            assert await cached(rig, tenant, salt=salt) == WARM
        await rig.stored(8 * len(callers))
        await rig.kill("decode-1")
        await fleet(rig, prefill, "decode-2")
        for tenant, salt in callers:
            assert await cached(rig, tenant, salt=salt) == WARM
        assert await cached(rig, "c", salt="s") == COLD


@pytest.mark.parametrize(
    "salt", ['""', "123", "1.5", "true", '["s"]', '"' + "s" * (1 << 20) + '"'], ids=lambda s: s[:6]
)
async def test_case_4_a_salt_that_is_none_is_refused_by_name(salt: str) -> None:
    async with FaultyFleet(authenticated=True) as rig:
        await rig.decode()
        for tenant in ("default", "a"):
            refused = await refusal(rig, f'"prompt":"1 2 3","max_tokens":1,"cache_salt":{salt}', tenant)
            assert (refused.code, refused.field) == ("invalid_field", "cache_salt")
            assert len(refused.message) < 500
        assert await cached(rig, "a") == COLD


async def test_case_4_the_client_refuses_it_too() -> None:
    async with FaultyFleet() as rig:
        await rig.decode()
        for salt in ("", "s" * (1 << 20), 123):
            with pytest.raises(InvalidField) as caught:
                await rig.client().generate(token_ids=TOKENS, cache_salt=salt)  # type: ignore[arg-type]
            assert caught.value.field == "cache_salt"


@pytest.mark.parametrize("prefill", [False, True], ids=["alone", "with prefill"])
async def test_public_prefixes_are_shared_and_what_follows_is_not(prefill: bool) -> None:
    public = prompt(5 * B + 2, seed=7)
    tokens = [*public, *prompt(3 * B, seed=8)]  # the sixth block is half public, so it is private
    other = [*public[: 3 * B + 1], *prompt(5 * B, seed=9)]
    size, whole = len(tokens) + 2, (8 * B, len(tokens) - 8 * B + 2)
    async with FaultyFleet(authenticated=True) as rig:
        rig.publics = PublicPrefixes(FakeEngine().identity, [public])
        await fleet(rig, prefill)
        assert [await cached(rig, "a", tokens) for _ in range(2)] == [(0, size), whole]
        assert [await cached(rig, "b", tokens) for _ in range(2)] == [(5 * B, size - 5 * B), whole]
        assert await cached(rig, "b", tokens, salt="s") == (5 * B, size - 5 * B)
        assert await cached(rig, "c", other) == (3 * B, len(other) + 2 - 3 * B)
        await rig.stored(5 + 3 * 3 + 5)
        assert sum(rig.cache.counts(SUBJECTS.blocks_of(PUBLIC)).values()) == 5
        await rig.kill("decode-1")
        await fleet(rig, prefill, "decode-2")
        assert await cached(rig, "a", tokens) == whole
        assert await cached(rig, "d", tokens) == (5 * B, size - 5 * B)
        assert await cached(rig, "c", other) == (8 * B, len(other) + 2 - 8 * B)
