"""What workers count of themselves."""

from __future__ import annotations

import io
import sys
import time

import pytest
import structlog

from shared import telemetry
from shared.telemetry import Spent
from tests.fake_engine import FakeEngine
from tests.fleet_rig import FleetRig


def test_time_spent_adds_up_before_it_is_rounded() -> None:
    spent = Spent()
    for _ in range(40):
        spent.run(time.sleep, 0.0005)
    assert 20 <= spent.ms < 2000


def test_time_spent_in_a_call_that_fails_counts() -> None:
    def fail() -> None:
        time.sleep(0.01)
        raise ZeroDivisionError

    spent = Spent()
    with pytest.raises(ZeroDivisionError):
        spent.run(fail)
    assert 10 <= spent.ms < 1000


@pytest.mark.anyio
async def test_beats_say_how_long_steps_took() -> None:
    async with FleetRig() as rig:
        decode = await rig.decode(engine=FakeEngine(blocks=64, step_s=0.03), local_prefill_tokens=0)
        prefill = await rig.prefill(engine=FakeEngine(blocks=64, step_s=0.05))
        answer = await rig.client().generate(token_ids=list(range(100)), max_tokens=1)
        assert answer.served_by.prefill == ["prefill-1"]
        last, before = (worker.beat().counters["step_ms"] for worker in (decode, prefill))
        assert last >= 30
        assert before >= 50
        assert last + before < answer.timings.ttft_ms, "one after the other, and waiting does not count"


def test_a_log_line_that_cannot_be_written_disturbs_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    telemetry.configure("info")
    log = structlog.get_logger("test")
    first = io.StringIO()
    monkeypatch.setattr(sys, "stderr", first)
    log.info("heard")
    assert "heard" in first.getvalue()
    first.close()
    log.warning("nobody hears it")
    second = io.StringIO()
    monkeypatch.setattr(sys, "stderr", second)
    log.warning("heard again")
    assert "heard again" in second.getvalue()
