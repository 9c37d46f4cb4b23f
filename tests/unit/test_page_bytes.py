"""How much one batched get asks for: two pages, one message longer each, are never more than the server will hold."""

from __future__ import annotations

import pytest

from shared.bus.wire import DEFAULT_MAX_PENDING, page_bytes

MiB = 1 << 20


@pytest.mark.parametrize(("pending", "payload"), [(8, 1), (16, 8), (64, 8), (256, 8), (64, 1), (256, 64)])
def test_two_pages_are_held(pending: int, payload: int) -> None:
    page = page_bytes(pending * MiB, payload * MiB)
    assert page > 0
    assert 2 * (page + payload * MiB) <= pending * MiB + 2  # where the payload leaves no room, one message at a time


def test_the_servers_own_default_has_large_pages() -> None:
    assert page_bytes(DEFAULT_MAX_PENDING, 8 * MiB) == 24 * MiB
