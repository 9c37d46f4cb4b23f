"""A short run against a real fleet: every kind of fault, many of them once."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import run

pytestmark = [pytest.mark.anyio, pytest.mark.slow, pytest.mark.timeout(420)]
SEED, SECONDS = 3, 60.0


async def test_nothing_is_lost_doubled_hung_or_wrong(tmp_path: Path) -> None:
    report = await run(SEED, SECONDS, tmp_path)
    assert not report.failed, report.text()
    facts = report.as_dict()
    assert facts["faults"] >= 10, report.text()
    assert facts["outcomes"]["completed"] > 20, report.text()
    assert facts["outcomes"]["resumed"], report.text()
    assert len(facts["recovery_s"]) > len(facts["not_seen_to_recover"]), report.text()
