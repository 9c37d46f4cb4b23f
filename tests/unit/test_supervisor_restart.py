"""When a dead worker is started again."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.worker import EXIT_CONFIG
from trine.restart import RestartPolicy


def test_delays_double_up_to_the_cap_within_their_jitter() -> None:
    policy = RestartPolicy(base=0.5, cap=4.0, rng=random.Random(1))
    delays = [policy.died(0.1, 1) for _ in range(8)]
    for delay, full in zip(delays, (0.5, 1.0, 2.0, 4.0, 4.0, 4.0, 4.0, 4.0), strict=True):
        assert delay is not None
        assert full / 2 <= delay <= full


def test_workers_that_die_together_do_not_return_together() -> None:
    delays = {RestartPolicy().died(0.1, 1) for _ in range(20)}
    assert len(delays) > 15


def test_a_healthy_life_forgets_earlier_deaths() -> None:
    policy = RestartPolicy()
    for _ in range(6):
        policy.died(0.1, -9)
    delay = policy.died(policy.healthy_after, -9)
    assert delay is not None
    assert delay <= policy.base


@pytest.mark.parametrize("lived", [1.0, 60.0])
def test_a_refused_configuration_is_given_up_after_three_in_a_row(lived: float) -> None:
    """Also when loading the model takes longer than a life that counts as healthy."""
    policy = RestartPolicy()
    assert policy.died(lived, EXIT_CONFIG) is not None
    assert policy.died(lived, EXIT_CONFIG) is not None
    assert policy.died(lived, EXIT_CONFIG) is None


@pytest.mark.parametrize(("lived", "code"), [(0.1, 1), (0.1, -9), (60.0, -9)])
def test_another_death_in_between_starts_the_count_again(lived: float, code: int) -> None:
    policy = RestartPolicy()
    policy.died(0.1, EXIT_CONFIG)
    policy.died(0.1, EXIT_CONFIG)
    assert policy.died(lived, code) is not None
    assert policy.died(0.1, EXIT_CONFIG) is not None


@given(st.lists(st.tuples(st.floats(0, 100), st.sampled_from([0, 1, -9, -11])), min_size=1, max_size=200))
def test_crashes_are_never_given_up_and_never_wait_longer_than_the_cap(deaths: list[tuple[float, int]]) -> None:
    policy = RestartPolicy()
    for lived, code in deaths:
        delay = policy.died(lived, code)
        assert delay is not None
        assert 0 < delay <= policy.cap
