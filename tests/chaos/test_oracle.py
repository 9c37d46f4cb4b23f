"""The chaos suite's own judgement: plan, oracle and report."""

from __future__ import annotations

import dataclasses
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.messages import Failed, Finished, ServedBy, Timings, Tokens, Usage
from tests.chaos.fleet import ChaosFleet
from tests.chaos.oracle import DUPLICATED, LOST, WRONG, Expected, Heard, Piece, Problem, judge, judge_stored
from tests.chaos.plan import KINDS, LONGEST_S, QUIET_S, SHORTEST_S, Fault, plan
from tests.chaos.report import Report

EXPECTED = Expected(3, (10, 11, 12, 13), "abcd", "length", 7, ("", "a", "ab", "abc", "abcd"))
USAGE = Usage(prompt_tokens=3, completion_tokens=4, drafted_tokens=2, accepted_tokens=1)


def heard(*pieces: Piece, **changes: object) -> Heard:
    whole = Heard([Piece(0, (10, 11), "ab"), Piece(2, (12, 13), "cd")], "length", 7, USAGE)
    if pieces:
        whole.pieces = list(pieces)
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]


def kinds(problems: list[Problem]) -> set[str]:
    return {problem.kind for problem in problems}


def test_a_right_answer_is_right() -> None:
    assert judge(EXPECTED, heard()) == []


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (heard(Piece(0, (10, 11), "ab"), Piece(1, (11, 12, 13), "cd")), DUPLICATED),
        (heard(Piece(0, (10, 11), "ab"), Piece(3, (13,), "d")), LOST),
        (heard(Piece(0, (10, 11), "ab")), LOST),
        (heard(Piece(0, (10, 11, 99, 13), "abcd")), WRONG),
        (heard(Piece(0, (10, 11, 12, 13, 14), "abcde")), WRONG),
        (heard(Piece(0, (10, 11, 12, 13), "abxd")), WRONG),
        (heard(reason="stop"), WRONG),
        (heard(reason="cancelled"), WRONG),
        (heard(seed=8), WRONG),
        (heard(usage=Usage(prompt_tokens=3, completion_tokens=5)), WRONG),
        (heard(usage=Usage(prompt_tokens=2, completion_tokens=4)), WRONG),
        (heard(usage=Usage(prompt_tokens=3, completion_tokens=4, accepted_tokens=1)), WRONG),
        (heard(usage=Usage(prompt_tokens=3, completion_tokens=4, cached_tokens=4)), WRONG),
    ],
)
def test_what_is_not_right_is_found(answer: Heard, kind: str) -> None:
    assert kind in kinds(judge(EXPECTED, answer))


def test_who_cancels_gets_the_beginning_of_the_right_answer() -> None:
    usage = Usage(prompt_tokens=3, completion_tokens=2)
    cut = heard(Piece(0, (10, 11), "ab"), reason="cancelled", cancelled=True, usage=usage)
    assert judge(EXPECTED, cut) == []
    assert judge(EXPECTED, dataclasses.replace(heard(), cancelled=True)) == [], "it was too late"
    cut.pieces = [Piece(0, (10, 12), "ac")]
    assert kinds(judge(EXPECTED, cut)) == {WRONG}


def tokens(index: int, *ids: int) -> Tokens:
    return Tokens(id="a", index=index, token_ids=list(ids))


END = Finished(id="a", reason="length", seed=7, usage=USAGE, timings=Timings(), served_by=ServedBy())


def test_a_stored_answer_is_one_unbroken_sequence_with_one_end() -> None:
    assert judge_stored(EXPECTED, [tokens(0, 10, 11), tokens(2, 12, 13), tokens(4), END]) == []
    assert judge_stored(EXPECTED, []) == [], "a server that lost it says nothing"


@pytest.mark.parametrize(
    ("events", "kind"),
    [
        ([tokens(0, 10, 11), tokens(1, 11, 12, 13), END], DUPLICATED),
        ([tokens(0, 10, 11), tokens(0, 10, 11), tokens(2, 12, 13), END], DUPLICATED),
        ([tokens(0, 10, 11), tokens(3, 13), END], LOST),
        ([tokens(0, 10, 11, 12, 13)], LOST),
        ([tokens(0, 10, 11, 12, 13), END, END], DUPLICATED),
        ([tokens(0, 10, 11, 12, 13), END, Failed(id="a", code="internal", message="")], DUPLICATED),
        ([tokens(0, 10, 11, 12, 13), END, tokens(4, 14)], DUPLICATED),
        ([tokens(0, 10, 12), END], WRONG),
    ],
)
def test_what_is_not_right_in_the_event_stream_is_found(events: list[Tokens | Finished | Failed], kind: str) -> None:
    assert kinds(judge_stored(EXPECTED, events)) == {kind}


def test_a_plan_is_drawn_from_its_seed() -> None:
    assert plan(5, 900) == plan(5, 900)
    assert plan(5, 900) != plan(6, 900)


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_has_enough_of_every_kind(seed: int) -> None:
    faults = plan(seed, 900)
    counts = Counter(fault.kind for fault in faults)
    assert len(faults) >= 60
    assert set(counts) == set(KINDS)
    assert max(counts.values()) - min(counts.values()) <= 1
    for fault in faults:
        assert QUIET_S <= fault.at <= 900 - QUIET_S
        assert SHORTEST_S <= fault.lasts <= LONGEST_S
        assert fault.victim in KINDS[fault.kind]
    assert [fault.at for fault in faults] == sorted(fault.at for fault in faults)


def fault(kind: str, victim: str) -> Fault:
    return Fault(0.0, kind, victim, 1.0, 0)


def test_recovery_is_the_time_to_the_next_request_that_needs_the_role() -> None:
    report = Report(1)
    report.injected(fault("kill prefill", "prefill-1"), 10.0)
    report.injected(fault("kill nats", "nats"), 10.0)
    report.injected(fault("stop drafter", "drafter-1"), 10.0)
    report.finished({"decode", "prefill"}, 9.0, 11.0)  # was there before
    report.finished({"decode"}, 11.0, 12.0)
    report.finished({"decode", "prefill"}, 12.0, 14.0)
    facts = report.as_dict()
    assert facts["recovery_s"] == {
        "kill nats": {"median": 2.0, "max": 2.0},
        "kill prefill": {"median": 4.0, "max": 4.0},
    }
    assert facts["not_seen_to_recover"] == {"stop drafter": 1}
    assert "stop drafter" in report.text()


Spoil = Callable[[Report], object]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda report: report.ended("a", "completed", [Problem(LOST, "token 3")]),
        lambda report: report.problems.append("decode-1 ended by itself"),
    ],
)
def test_a_run_fails_for_a_bad_answer_and_for_a_worker_that_ends(spoil: Spoil) -> None:
    report = Report(1)
    report.ended("b", "retried", [])
    report.refusals["overloaded"] += 3
    assert not report.failed
    assert "all answers are right" in report.text()
    spoil(report)
    assert report.failed
    assert "FAILED" in report.text()


@pytest.mark.parametrize(
    ("line", "sent", "problem"),
    [
        ("decode-1 was ended by SIGKILL after 60.0 s; starting it again in 0.4 s", signal.SIGKILL, False),
        ("decode-1 ended with exit code 0 after 60.0 s; starting it again in 0.4 s", signal.SIGTERM, False),
        ("decode-1 was ended by SIGTERM after 3.3 s; starting it again in 0.6 s", signal.SIGTERM, False),
        ("decode-1 was ended by SIGTERM after 60.0 s; starting it again in 0.6 s", signal.SIGTERM, True),
        ("decode-1 was ended by SIGTERM after 3.3 s; starting it again in 0.6 s", None, True),
        ("decode-1 ended with exit code 1 after 60.0 s; starting it again in 0.4 s", signal.SIGTERM, True),
        ("decode-2 was ended by SIGKILL after 60.0 s; starting it again in 0.4 s", signal.SIGKILL, True),
    ],
)
def test_an_end_that_nobody_asked_for_is_a_problem(
    tmp_path: Path, line: str, sent: signal.Signals | None, problem: bool
) -> None:
    class Workers:
        def kill(self, worker: str, sign: signal.Signals) -> int:
            return 1

        def tail(self, worker: str) -> list[str]:
            return ["its last words"]

    fleet = ChaosFleet(tmp_path, tmp_path)
    fleet.workers = Workers()  # type: ignore[assignment]
    if sent is not None:
        fleet.signal("decode-1", sent)
    fleet._on_line("supervisor", line)
    assert bool(fleet.problems) == problem
