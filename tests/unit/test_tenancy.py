"""What keeps tenants apart: names, subjects, keys. And what an operator lets them share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest

from services.decode.publics import PublicPrefixes
from shared.cache import naming
from shared.cache.naming import PUBLIC, Lineage
from shared.engine.base import ModelInfo
from shared.errors import ConfigError
from shared.messages import Identity
from shared.subjects import Subjects, cancelled_of, tenant_of_request
from shared.tenants import DEFAULT_TENANT, MAX_KEY, is_tenant, request_key
from shared.tokenizer import Tokenizer
from tests.fake_engine import FakeEngine, FakeTokenizer

IDENTITY = Identity(fingerprint="f", codec="none", block_size=4, block_bytes=64)
SUBJECTS = Subjects("m")
TOKENIZER = cast(Tokenizer, FakeTokenizer())
PUBLIC_TOKENS = list(range(10))  # two blocks and a half


def names(lineage: Lineage, token_ids: list[int]) -> list[bytes]:
    found: list[bytes] = []
    lineage.extend(found, len(token_ids) // 4, token_ids, 4)
    return found


@pytest.fixture
def publics() -> PublicPrefixes:
    return PublicPrefixes(IDENTITY, [PUBLIC_TOKENS])


class TestNames:
    def test_tenants_and_salts_share_no_name(self) -> None:
        tokens = list(range(32))
        callers = [("a", ""), ("b", ""), ("a", "s"), ("b", "s"), ("a", "t"), ("as", ""), (PUBLIC, "")]
        all_names = [set(names(Lineage.of(IDENTITY, *caller), tokens)) for caller in callers]
        assert len(set.union(*all_names)) == 8 * len(callers)

    def test_without_public_blocks_it_is_the_plain_chain(self) -> None:
        lineage = Lineage.of(IDENTITY, "a", "s")
        assert names(lineage, PUBLIC_TOKENS) == naming.chain(naming.root(IDENTITY, "a", "s"), PUBLIC_TOKENS, 4)
        assert lineage.parent(0, []) == lineage.root

    def test_every_name_follows_from_its_parent(self, publics: PublicPrefixes) -> None:
        tokens = PUBLIC_TOKENS + [99] * 10
        for lineage in (publics.lineage(tokens, "a", ""), Lineage.of(IDENTITY, "a")):
            found = names(lineage, tokens)
            for index, name in enumerate(found):
                assert name == naming.child(lineage.parent(index, found), tokens[index * 4 : index * 4 + 4])


class TestPublicPrefixes:
    def test_only_what_is_public_is_shared(self, publics: PublicPrefixes) -> None:
        tokens = PUBLIC_TOKENS + [99] * 10
        a, b = (publics.lineage(tokens, tenant, "") for tenant in "ab")
        assert a.public == b.public == 2
        of_a, of_b = names(a, tokens), names(b, tokens)
        assert of_a[:2] == of_b[:2]
        assert set(of_a[2:]).isdisjoint(of_b[2:])
        assert [a.scope(index) for index in range(4)] == [PUBLIC, PUBLIC, "a", "a"]

    def test_what_follows_is_named_by_what_went_before(self, publics: PublicPrefixes) -> None:
        """The same private tokens behind one public block and behind two are not the same blocks."""
        one, two = [*range(4), 7, 7, 7, 7], [*range(8), 7, 7, 7, 7]
        assert names(publics.lineage(one, "a", ""), one)[1] != names(publics.lineage(two, "a", ""), two)[2]

    @pytest.mark.parametrize("tokens", [[], [0, 1, 2], [9, 1, 2, 3, 4], [0, 1, 2, 9, 4, 5, 6, 7]])
    def test_a_prompt_that_begins_otherwise_shares_nothing(self, publics: PublicPrefixes, tokens: list[int]) -> None:
        assert publics.lineage(tokens, "a", "").public == 0

    def test_the_middle_of_a_public_prefix_is_not_public(self, publics: PublicPrefixes) -> None:
        assert publics.lineage([4, 5, 6, 7], "a", "").public == 0

    def test_a_salt_does_not_hide_what_is_public(self, publics: PublicPrefixes) -> None:
        assert publics.lineage(PUBLIC_TOKENS, "a", "s").public == 2

    def test_from_a_file(self, tmp_path: Path) -> None:
        file = tmp_path / "public.json"
        file.write_text(json.dumps([{"token_ids": PUBLIC_TOKENS}, {"prompt": "11 12 13 14"}]))
        info = FakeEngine().info
        found = PublicPrefixes.load(str(file), IDENTITY, TOKENIZER, info)
        assert found.lineage(PUBLIC_TOKENS, "a", "").public == 2
        assert found.lineage(TOKENIZER.encode("11 12 13 14 15"), "a", "").public == 1
        assert len(PublicPrefixes.load("", IDENTITY, TOKENIZER, info)) == 0

    @pytest.mark.parametrize(
        ("text", "told"),
        [
            ("{", "cannot be read"),
            ('{"prompt": "x"}', "list"),
            ('[{"prompt": 3}]', "0.prompt"),
            ('[{"prompt": "x", "more": 1}]', "more"),
            ('[{"prompt": "5"}, {}]', "entry 1"),
            ('[{"prompt": "x", "token_ids": [1]}]', "entry 0"),
            ('[{"token_ids": [-1]}]', "entry 0"),
        ],
    )
    def test_a_bad_file_is_refused_at_start(self, tmp_path: Path, text: str, told: str) -> None:
        file = tmp_path / "public.json"
        file.write_text(text)
        info: ModelInfo = FakeEngine().info
        with pytest.raises(ConfigError, match=told):
            PublicPrefixes.load(str(file), IDENTITY, TOKENIZER, info)
        with pytest.raises(ConfigError, match="cannot be read"):
            PublicPrefixes.load(str(tmp_path / "none.json"), IDENTITY, TOKENIZER, info)


class TestSubjects:
    def test_the_tenant_is_read_back(self) -> None:
        for tenant in (DEFAULT_TENANT, "acme", "a-1_B"):
            assert tenant_of_request(SUBJECTS.request("low", tenant)) == tenant
            assert cancelled_of(SUBJECTS.cancel("r.1 *", tenant)) == (tenant, "r.1 *")

    def test_one_id_of_two_tenants_is_two_subjects(self) -> None:
        for subject in (SUBJECTS.events, SUBJECTS.cancel):
            assert len({subject("r", tenant) for tenant in (DEFAULT_TENANT, "a", "b")}) == 3
            assert subject("a.r") != subject("r", "a")

    @pytest.mark.parametrize("tenant", ["", "a.b", "*", ">", "a b", "ä", "a" * 65, "a\n", "=public"])
    def test_what_is_no_tenant_is_not_spelled(self, tenant: str) -> None:
        assert not is_tenant(tenant)
        for spell in (SUBJECTS.request, SUBJECTS.events, SUBJECTS.cancel):
            with pytest.raises(ValueError, match="tenant"):
                spell("low", tenant)

    @pytest.mark.parametrize("tail", ["req.low.a=2E", "req.low.a.b", "req", "req.low.=public"])
    def test_what_is_no_tenant_is_not_read(self, tail: str) -> None:
        with pytest.raises(ValueError, match="tenant"):
            tenant_of_request(f"trine.m.{tail}")

    @pytest.mark.parametrize("tail", ["cancel", "cancel.a.b.c", "cancel.=20.x", "tok.a"])
    def test_what_is_no_cancel_is_not_read(self, tail: str) -> None:
        with pytest.raises(ValueError, match=r"tenant|cancel"):
            cancelled_of(f"trine.m.{tail}")


def test_keys_of_different_requests_differ() -> None:
    pairs = [("a", "b/c"), ("a", "b"), ("default", "a/b"), ("a-b", "c"), ("a", "-b/c")]
    assert len({request_key(*pair) for pair in pairs}) == len(pairs)
    assert len(request_key("t" * 64, "i" * 128)) == MAX_KEY
