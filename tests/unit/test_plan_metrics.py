"""`trine plan --metrics`: a load, read from two looks at a gateway's page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidField
from trine.plan_metrics import Observed, observed, parse

PAGE = """# HELP trine_requests_total HTTP requests for answers
trine_requests_total{{model="m",outcome="ok"}} {ok}
trine_requests_total{{model="m",outcome="overloaded"}} 5.0
trine_requests_total{{model="other \\"}}",outcome="ok"}} 1.0
trine_request_duration_seconds_count{{model="m"}} {ok}
trine_prompt_tokens_total{{model="m"}} {prompt}
trine_cached_prompt_tokens_total{{model="m"}} {cached}
trine_generation_tokens_total{{model="m"}} {output}
trine_worker_accepted_tokens_total{{model="m",worker="d1"}} {accepted}
trine_worker_cut_drafts_total{{model="m",worker="d1"}} {output}
trine_time_to_first_token_seconds_sum{{model="m"}} 4.0
trine_time_to_first_token_seconds_count{{model="m"}} 8.0
trine_worker_up{{model="m",role="decode",worker="d1"}} 1.0
trine_worker_up{{model="m",role="decode",worker="d2"}} 1.0
trine_worker_up{{model="m",role="prefill",worker="p1"}} 0.0
trine_worker_up{{model="n",role="decode",worker="d3"}} 1.0
trine_nan NaN
no metric at all
"""


def test_a_fleets_metrics() -> None:
    first = parse(PAGE.format(ok=8, prompt=8000, cached=0, output=800, accepted=80))
    second = parse(PAGE.format(ok=28, prompt=38000, cached=15000, output=4800, accepted=1080))
    seen = observed(first, second, 10.0)
    assert (seen.requests_per_s, seen.prompt, seen.output, seen.cached, seen.acceptance) == (2, 1500, 200, 0.5, 0.2)
    assert seen.workers == {"prefill": 0, "decode": 3, "drafter": 0}
    still = observed(second, second, 10.0, "m")  # nothing ended: means of the whole life, and no rate
    assert (still.requests_per_s, still.ttft_s, still.tpot_s) == (None, 0.5, None)
    assert still.prompt == pytest.approx(38000 / 28)


def seen(before: str, after: str, model: str | None = None) -> Observed:
    return observed(parse(before), parse(after), 10.0, model)


def test_workers_are_those_of_the_model() -> None:
    page = PAGE.format(ok=8, prompt=8000, cached=0, output=800, accepted=80)
    assert seen(page, page, "m").workers["decode"] == 2
    assert seen(page, page, "n").workers["decode"] == 1


def test_a_model_that_is_not_served_is_an_error() -> None:
    page = PAGE.format(ok=8, prompt=8000, cached=0, output=800, accepted=80)
    with pytest.raises(InvalidField, match="there are m, n, other"):
        seen(page, page, "mm")


def test_choices_of_a_request_are_answers_of_their_own() -> None:
    def page(requests: int, answers: int) -> str:
        return (
            f'trine_requests_total{{model="m",outcome="ok"}} {requests}\n'
            f'trine_request_duration_seconds_count{{model="m"}} {answers}\n'
            f'trine_prompt_tokens_total{{model="m"}} {100 * answers}\n'
        )

    four = seen(page(1, 4), page(11, 44))  # each request asks for four
    assert (four.requests_per_s, four.prompt) == (4.0, 100.0)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(1, 10**6))
def test_a_restarted_worker_counts_from_zero(more: int, anew: int, lost: int) -> None:
    def page(answers: int, steady: int, restarted: int) -> str:
        return (
            f'trine_request_duration_seconds_count{{model="m"}} {answers}\n'
            f'trine_worker_accepted_tokens_total{{model="m",worker="a"}} {steady}\n'
            f'trine_worker_accepted_tokens_total{{model="m",worker="b"}} {restarted}\n'
            f'trine_worker_cut_drafts_total{{model="m",worker="a"}} {steady + 1}\n'
        )

    got = seen(page(1, 5, anew + lost), page(2, 5 + more, anew))
    right = more + anew
    assert got.acceptance == (pytest.approx(right / (right + more)) if right else None)


def drafts(accepted: int, drafted: int, cut: int | None) -> str:
    lines = [
        'trine_request_duration_seconds_count{model="m"} 1',
        f'trine_worker_accepted_tokens_total{{model="m",worker="a"}} {accepted}',
        f'trine_worker_drafted_tokens_total{{model="m",worker="a"}} {drafted}',
    ]
    return "\n".join([*lines, *([] if cut is None else [f'trine_worker_cut_drafts_total{{model="m"}} {cut}'])])


@pytest.mark.parametrize(
    ("accepted", "drafted", "cut", "acceptance"),
    [
        (60, 200, 40, 0.6),  # of those that were looked at
        (60, 200, None, 0.3),  # workers that do not tell: of all
        (60, 200, 0, 0.3),
        (60, 60, 0, 1.0),
        (0, 10, 10, 0.0),
        (0, 0, 0, None),
        (0, 0, None, None),
    ],
)
def test_how_often_drafts_are_right(accepted: int, drafted: int, cut: int | None, acceptance: float | None) -> None:
    assert seen("", drafts(accepted, drafted, cut)).acceptance == acceptance


def test_what_is_read_of_metrics_is_what_the_gateway_tells() -> None:
    root = Path(__file__).resolve().parents[2]
    told = "".join(path.read_text("utf-8") for path in (root / "services" / "gateway").glob("*metrics.py"))
    read = set(re.findall(r'"(trine_[a-z_]+[a-z])"', (root / "trine" / "plan_metrics.py").read_text("utf-8")))
    assert len(read) > 8
    for name in read:
        assert f'"{re.sub("_(total|count|sum)$", "", name)}"' in told, name
