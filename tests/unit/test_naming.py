"""Names of blocks: whatever changes a block's bytes changes its name, and nothing else does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.cache import naming
from shared.messages import Identity

IDENTITY = Identity(fingerprint="f" * 64, codec="none", block_size=16, block_bytes=1024)
ROOT = naming.root(IDENTITY, "tenant")
IDS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


def test_names_are_256_bit_digests():
    assert len(ROOT) == len(naming.child(ROOT, [1] * 16)) == naming.NAME_BYTES == 32


@pytest.mark.parametrize(
    "changed",
    [{"fingerprint": "g" * 64}, {"codec": "int8"}, {"block_size": 32}, {"block_bytes": 2048}],
    ids=lambda change: next(iter(change)),
)
def test_each_field_of_the_identity_changes_every_name(changed):
    other = naming.root(IDENTITY.model_copy(update=changed), "tenant")
    assert other != ROOT
    assert not set(naming.chain(other, range(64), 16)) & set(naming.chain(ROOT, range(64), 16))


def test_tenants_share_nothing():
    other = naming.root(IDENTITY, "tenant2")
    assert not set(naming.chain(other, range(64), 16)) & set(naming.chain(ROOT, range(64), 16))


def test_fields_cannot_flow_into_each_other():
    """The same bytes, cut differently into fingerprint, codec and tenant, are different roots."""
    cuts = [("ab", "c", "d"), ("a", "bc", "d"), ("a", "b", "cd"), ("abc", "d", ""), ("", "abcd", "")]
    roots = {naming.root(Identity(fingerprint=f, codec=c, block_size=16, block_bytes=1), t) for f, c, t in cuts}
    assert len(roots) == len(cuts)


def test_root_and_child_do_not_collide():
    assert naming.child(ROOT, []) != ROOT


@given(IDS, st.integers(1, 20))
def test_a_chain_names_full_blocks_only(token_ids, block_size):
    names = naming.chain(ROOT, token_ids, block_size)
    assert len(names) == len(token_ids) // block_size
    assert len(set(names)) == len(names)


@given(IDS, IDS, st.integers(1, 20))
def test_names_agree_exactly_on_the_common_prefix(first, second, block_size):
    common = 0
    while common < min(len(first), len(second)) and first[common] == second[common]:
        common += 1
    ours, theirs = (naming.chain(ROOT, ids, block_size) for ids in (first, second))
    for index, (a, b) in enumerate(zip(ours, theirs, strict=False)):
        assert (a == b) == ((index + 1) * block_size <= common)


@given(IDS)
def test_packed_tokens_round_trip(token_ids):
    packed = naming.pack_tokens(token_ids)
    assert len(packed) == 4 * len(token_ids)
    assert naming.unpack_tokens(packed) == token_ids


def test_tokens_are_packed_little_endian_on_every_machine():
    assert naming.pack_tokens([1, 2**31]) == bytes([1, 0, 0, 0, 0, 0, 0, 128])


@pytest.mark.parametrize("token_id", [-1, 2**32, 1.5])
def test_ids_outside_u32_are_refused(token_id):
    with pytest.raises(OverflowError):
        naming.pack_tokens([token_id])


def test_cut_tokens_are_refused():
    with pytest.raises(ValueError, match="whole number"):
        naming.unpack_tokens(b"12345")


def test_names_do_not_depend_on_the_process():
    """A name is the same in every process, whatever PYTHONHASHSEED says, and in every release of this layout."""
    code = (
        "from shared.cache import naming; from shared.messages import Identity;"
        "i = Identity(fingerprint='f' * 64, codec='none', block_size=16, block_bytes=1024);"
        "print(naming.chain(naming.root(i, 'tenant'), range(32), 16)[-1].hex())"
    )
    root = Path(__file__).parents[2]
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed},
            cwd=root,
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert seen == {naming.chain(ROOT, range(32), 16)[-1].hex()}
    assert seen == {"cdf84b517e036114318d0985604d780c5149f356a10f37cbf1c0621d38b3db13"}
