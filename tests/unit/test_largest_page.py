"""How much one batched get asks for: two pages, each a message and its headers longer, are never more than is held."""

from __future__ import annotations

import pytest

from shared.bus.nats_stream import PAGE_SUBJECTS
from shared.bus.wire import DEFAULT_MAX_PENDING, largest_page

MiB = 1 << 20
HEADERS = 400
"""Bytes that the server adds to a message, more than were ever seen."""


@pytest.mark.parametrize(("pending", "payload"), [(8, 1), (64, 8), (256, 8), (64, 1)])
def test_two_pages_are_held(pending: int, payload: int) -> None:
    page = largest_page(pending * MiB) + payload * MiB + PAGE_SUBJECTS * HEADERS
    assert 2 * page < pending * MiB


def test_the_servers_own_default_has_large_pages() -> None:
    assert largest_page(DEFAULT_MAX_PENDING) == 16 * MiB
