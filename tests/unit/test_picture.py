"""Heard beats to rows, and rows to a terminal: no bus, no clock, no terminal."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console

from shared.bus.base import Incoming
from shared.codec import encode
from shared.messages import Beat, Load
from shared.subjects import Subjects
from trine.picture import ModelRow, picture
from trine.plain import name, plain
from trine.rendered import shown_models, shown_status, shown_top, spark
from trine.roster import GAUGES, HISTORY_S, MAX_WORKERS, SHOWN_S, Roster, State
from trine.series import Series
from trine.status import Status, StreamRow

TIMEOUT = 3.0


def beat(
    role: Any = "decode", worker: str = "d-1", model: str = "m", *, load: dict[str, Any] | None = None, **fields: Any
) -> Incoming:
    told = Beat(role=role, worker=worker, load=Load(**(load or {})), **fields)
    return Incoming(Subjects(model).beat(role, worker), encode(told))


def heard(*beats: tuple[float, Incoming]) -> Roster:
    roster = Roster(TIMEOUT)
    for at, message in beats:
        roster.hear(message, at)
    return roster


def counted(at: float, life: str = "a", **counters: int) -> tuple[float, Incoming]:
    return at, beat(life=life, counters=counters)


def only(roster: Roster, now: float) -> ModelRow:
    (row,) = picture(roster, now)
    return row


class TestSeries:
    def test_sums_rates_and_gaps(self) -> None:
        series = Series(4)
        assert series.rate("x", 4, 9.0) == 0.0
        series.add("x", 2, 10.1)
        series.add("x", 3, 10.9)
        series.put("g", 7, 10.9)
        series.add("x", 5, 12.0)
        assert series.total("x", 1, 12.5) == 5
        assert series.total("x", 3, 12.5) == 10
        assert series.rate("x", 4, 12.5) == 5.0, "it began two seconds ago"
        assert series.values("x", 13.0) == [None, 5, None, 5]
        assert series.values("g", 13.0) == [None, 7, None, None]
        series.add("x", 1, 20.0)
        assert series.total("x", 100, 20.0) == 1, "what is older is gone"


class TestRoster:
    def test_states(self) -> None:
        roster = heard(
            (0.0, beat(worker="d-1")),
            (0.0, beat(worker="d-2", draining=True)),
            (0.0, beat(worker="d-3", joining=True, draining=True)),
        )
        assert [row.state for row in only(roster, 1.0).workers] == [State.SERVING, State.DRAINING, State.JOINING]
        (dead,) = only(roster, TIMEOUT + 0.5).workers  # the others had said that they go
        assert (dead.worker, dead.state, dead.silent_s) == ("d-1", State.SILENT, 3.5), (
            "the others had said that they go"
        )
        assert picture(roster, SHOWN_S + 1) == []

    def test_a_dead_worker_that_comes_back_serves(self) -> None:
        roster = heard((0.0, beat(life="a")), (10.0, beat(life="b")))
        assert [row.state for row in only(roster, 10.5).workers] == [State.SERVING]

    def test_rates_and_shares_are_of_what_changed(self) -> None:
        asked: dict[str, Any] = {"prompt_tokens": 109, "cached_tokens": 75, "drafted_tokens": 15, "accepted_tokens": 4}
        roster = heard(
            counted(0.0, generated_tokens=1000, prompt_tokens=9, drafted_tokens=5),
            counted(1.0, generated_tokens=1030, **asked),
            counted(2.0, generated_tokens=1040, **asked),
        )
        row = only(roster, 2.5)
        assert (row.tokens_s, row.cache_hit, row.acceptance) == (20.0, 0.75, 0.4)
        assert row.workers[0].tokens_s == 20.0
        assert row.history["tokens"][-2:] == [0, 30]
        assert len(row.history["tokens"]) == HISTORY_S
        later = only(heard(counted(0.0)), 0.5)
        assert (later.tokens_s, later.cache_hit, later.acceptance) == (0.0, None, None)

    def test_a_new_process_under_the_same_name_has_counted_from_0(self) -> None:
        roster = heard(counted(0.0, generated_tokens=1000), counted(1.0, "b", generated_tokens=8))
        assert only(roster, 1.5).tokens_s == 8.0

    def test_queues_are_what_was_told_last_and_not_too_long_ago(self) -> None:
        told = {"decode-high": 1, "decode-normal": 5, "decode-low": 0}
        roster = heard(
            (0.0, beat(load={"queued": {**told, "made-up": 9}})),
            (0.5, beat("prefill", "p-1", load={"queued": {"prefill": 2}, "running": 3})),
            (1.0, beat(load={"running": 4})),
        )
        row = only(roster, 1.2)
        assert (row.queued, row.running, row.prefill_queued, row.prefilling) == (6, 4, 2, 3)
        assert row.history["queued"][-1] == 6
        assert set(row.history) == {"tokens", "queued", *GAUGES}
        assert only(roster, 50.0).queued is None

    def test_whoever_beats_can_neither_fill_memory_nor_break_a_reader(self) -> None:
        roster = heard(counted(0.0, generated_tokens=0), counted(1.0, generated_tokens=10**18))
        roster.hear(beat(worker="d-2", load={"waiting": 2**53, "free_blocks": 9, "blocks": 3}), 1.0)
        first, second = only(roster, 1.5).workers
        assert first.tokens_s == 2**53
        assert (second.running, second.waiting) == (0, 2**53)
        for number in range(MAX_WORKERS + 10):
            roster.hear(beat(worker=f"x-{number}"), 2.0)
        assert len(list(roster.live(2.0))) == MAX_WORKERS
        roster.hear(beat(worker="d-2", load={"running": 7}), 2.0)
        assert [b.load.running for _, b in roster.live(2.0) if b.worker == "d-2"] == [7], "the known go on being heard"
        roster.hear(beat(worker="late"), 2.0 + TIMEOUT + 1)
        assert [row.worker for row in only(roster, 2.0 + TIMEOUT + 1).workers] == ["late"], "the silent make room"


def frame(shown: Any, width: int = 120) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, color_system=None)
    console.print(shown)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def busy() -> list[ModelRow]:
    roster = heard(
        counted(0.0, generated_tokens=0, prompt_tokens=0),
        counted(1.0, generated_tokens=40, prompt_tokens=100, cached_tokens=83, drafted_tokens=10, accepted_tokens=6),
        (1.0, beat(worker="d-2", load={"running": 3, "waiting": 1, "free_blocks": 64, "blocks": 256})),
        (1.0, beat("drafter", "[red]x\x1b[31m")),
        (-9.0, beat("prefill", "p-1")),
    )
    return picture(roster, 2.0)


class TestRendered:
    def test_a_frame_of_top(self) -> None:
        shown = frame(shown_top(busy(), "nats://u:secret@h:4222", "12:00:00"))
        assert "secret" not in shown
        assert "20.0 tokens/s" in shown
        lines = [line.split() for line in shown.splitlines()]
        assert ["prefill", "p-1", "✕", "silent", "for", "11", "s", "–", "–", "–", "–"] in lines
        assert ["decode", "d-2", "●", "serving", "3", "1", "█████████░░░", "192/256", "0.0"] in lines
        assert "cache 83% · drafts 60%" in shown
        assert "[red]x\ufffd[31m" in shown, "a name is text, not markup, and moves no cursor"
        assert "\x1b" not in shown

    def test_an_empty_fleet_says_how_to_get_one(self) -> None:
        assert "trine up" in frame(shown_top([], "nats://h", "12:00:00"))

    def test_status_and_models(self) -> None:
        found = Status("nats://h:4222", False, busy(), [StreamRow("m", "cache", 3, 2_000_000)])
        assert ["m", "cache", "3", "2.0", "MB"] in [line.split() for line in frame(shown_status(found)).splitlines()]
        assert "lets everybody in" in frame(shown_status(found))
        assert "may not ask" in frame(shown_status(Status("nats://h", True, [], None)))
        told = found.as_dict()
        assert told["models"][0]["workers"][0]["state"] == "silent"
        assert "history" not in told["models"][0]
        assert frame(shown_models(found.models)).splitlines()[1].split() == ["m", "yes", "3", "3", "–", "20.0"]

    def test_bars_and_plain_text(self) -> None:
        assert spark([0, 1, 2, 4]) == " ▂▄█"
        assert spark([0, 0]) == "  "
        assert plain("a\tb\n\x1b[2Jé👩\u200d👩\x9b") == "a\tb\n\ufffd[2Jé👩\u200d👩\ufffd"
        assert name("x" * 60) == "x" * 47 + "…"
        assert name("a\nb") == "a\ufffdb"
