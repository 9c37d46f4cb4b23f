"""Ages of messages by the server's clock."""

from __future__ import annotations

import pytest

from shared.bus.server_clock import ServerClock

T = 1_700_000_000.0
TS = "2023-11-14T22:13:20.000000000Z"
HOUR = 3600.0


@pytest.mark.parametrize("error", [-HOUR, 0.0, HOUR])
def test_the_wall_clock_of_this_machine_does_not_count(error: float) -> None:
    clock = ServerClock()
    clock.hear(TS, 99.9, 100.0)
    assert clock.age(T, 107.0, T + 7.0 + error) == pytest.approx(7.0)
    assert clock.age(T + 50.0, 107.0, T + 7.0 + error) == 0.0


def test_until_the_server_has_told_its_time_it_does() -> None:
    clock = ServerClock()
    for nonsense in (None, 5, "", "yesterday", "9999-99-99T00:00:00Z"):
        clock.hear(nonsense, 0.0, 0.0)
    assert clock.age(T, 107.0, T + 7.0) == pytest.approx(7.0)


def test_a_late_answer_counts_only_while_there_is_no_better_one() -> None:
    clock = ServerClock()
    clock.hear(TS, 90.0, 100.0)
    assert clock.age(T, 100.0, 0.0) == 0.0
    clock.hear(TS, 109.9, 110.0)
    clock.hear(TS, 110.0, 130.0)
    assert clock.age(T, 111.0, 0.0) == pytest.approx(1.0)
