"""Workers of one machine take as many cores as the others leave; nothing but speed rests on what they read there."""

from __future__ import annotations

import errno
import math
import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import cores
from shared.config import Settings
from shared.cores import GAP_S, LONGEST_S, SLOTS, Cores, Slot, allowed, file_for, goes_on, quota, share, there
from shared.engine.engine import Engine
from shared.worker import load_engine
from tests import tiny_models

NOW = 1000.0
IDLE, WORKING, BETWEEN = Slot(900.0, 901.0), Slot(999.0, 0.0), Slot(990.0, NOW - GAP_S / 2)
DEAD, NEVER, AHEAD = Slot(NOW - LONGEST_S - 1, 0.0), Slot(0.0, 0.0), Slot(NOW + 5, 0.0)


@pytest.mark.parametrize(
    ("cores", "most", "others", "expected"),
    [
        (2, 2, [], 2),
        (2, 2, [IDLE, NEVER, DEAD, AHEAD], 2),
        (2, 2, [WORKING], 1),
        (2, 2, [BETWEEN], 1),
        (2, 2, [WORKING, BETWEEN, IDLE], 1),
        (16, 16, [WORKING], 8),
        (16, 16, [WORKING, WORKING], 5),
        (1, 1, [WORKING], 1),
        (16, 4, [], 4),
        (16, 4, [WORKING], 4),
        (16, 4, [WORKING] * 7, 2),
    ],
)
def test_what_is_left_by_those_at_work(cores: int, most: int, others: list[Slot], expected: int) -> None:
    assert share(cores, most, others, NOW) == expected


@given(st.integers(1, 256), st.lists(st.builds(Slot, st.floats(), st.floats()), max_size=SLOTS))
def test_whatever_others_write_there_is_at_least_one_core_and_never_too_many(cores: int, others: list[Slot]) -> None:
    assert 1 <= share(cores, cores, others, NOW) <= cores


OTHER = """
import sys, time
from pathlib import Path
from shared.cores import Cores
cores = Cores(Path(sys.argv[1]), 4, 4)
for line in sys.stdin:
    with cores.at_work() as count:
        print(count, flush=True)
        sys.stdin.readline()
    if line == "rest\\n":
        cores.rest()
    print("over", flush=True)
"""


class Other:
    """Another process; at work from `begin` to `end`."""

    def __init__(self, path: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", OTHER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def say(self, what: str = "") -> str:
        assert self._process.stdin and self._process.stdout
        self._process.stdin.write(f"{what}\n")
        self._process.stdin.flush()
        return self._process.stdout.readline().strip()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


def test_processes_see_each_other_and_the_dead_are_forgotten(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    own, other = Cores(path, 4, 4), Other(path)
    try:
        with own.at_work() as count:
            assert count == 4
        time.sleep(2 * GAP_S)
        assert other.say() == "4"
        with own.at_work() as count:
            assert count == 2
        assert other.say() == "over"
        time.sleep(2 * GAP_S)
        with own.at_work() as count:
            assert count == 4
            assert other.say() == "2"
    finally:
        other.kill()
    third = Other(path)  # has the place of the one that was killed at work
    try:
        time.sleep(2 * GAP_S)
        assert third.say() == "4" and third.say() == "over"
        time.sleep(2 * GAP_S)
        with own.at_work() as count:
            assert count == 4
    finally:
        third.kill()


def test_a_step_that_fails_is_over(tmp_path: Path) -> None:
    own = Cores(tmp_path / "cores", 4, 4)
    with pytest.raises(ValueError, match="step"), own.at_work():
        raise ValueError("step")
    began, ended = struct.unpack_from("<dd", (tmp_path / "cores").read_bytes())
    assert 0 < began <= ended and math.isfinite(ended)


def test_a_file_of_others_is_not_shared(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"")
    (tmp_path / "link").symlink_to(target)
    open_to_all = tmp_path / "open"
    open_to_all.write_bytes(b"")
    open_to_all.chmod(0o666)
    for path in (tmp_path / "link", open_to_all, tmp_path):
        with pytest.raises(OSError, match=r"."):
            Cores(path, 2, 2)
    assert target.read_bytes() == open_to_all.read_bytes() == b""


def test_what_settings_ask_for(tmp_path: Path) -> None:
    folder = tmp_path / "blocks"
    assert file_for(Settings(host_cache_dir=str(folder))) == tmp_path / "blocks-cores"
    assert file_for(Settings()).name == f"trine-cores-{os.getuid()}"
    assert Cores.of(Settings(threads=3, host_cache_dir=str(folder))) is None
    assert Cores.of(Settings(host_cache_dir=str(tmp_path / "none" / "blocks"))) is None
    assert not (tmp_path / "blocks-cores").exists()
    assert Cores.of(Settings(host_cache_dir="/")) is None
    assert Cores.of(Settings(host_cache_dir=str(folder))) is not None


def test_where_there_is_no_room_for_the_file_nothing_is_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is mapped and not there would end the process at its first step."""

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(os, "posix_fallocate", full)
    assert Cores.of(Settings(host_cache_dir=str(tmp_path / "blocks"))) is None
    monkeypatch.delattr(os, "posix_fallocate")
    assert Cores.of(Settings(host_cache_dir=str(tmp_path / "blocks"))) is not None
    assert (tmp_path / "blocks-cores").stat().st_blocks > 0
    monkeypatch.setattr(os, "pwrite", lambda *_: 1)
    with pytest.raises(OSError, match="no space"):
        Cores(tmp_path / "other", 2, 2)


def test_no_step_has_more_than_helps(tmp_path: Path) -> None:
    own = Cores(tmp_path / "cores", 8, 6)
    assert own.most == 6
    own.at_most(4)
    own.at_most(5)
    with own.at_work() as count:
        assert count == own.most == 4


def test_cores_of_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr("shared.cores.QUOTA", tmp_path / "cpu.max")
    assert allowed() == there() == 8
    (tmp_path / "cpu.max").write_text("450000 100000\n")
    assert (there(), allowed()) == (8, 4)


@pytest.mark.parametrize(
    ("said", "cores"),
    [
        ("max 100000\n", None),
        ("200000 100000", 2),
        ("50000 100000", 1),
        ("", None),
        ("0 100000", None),
        ("1 0", None),
        ("a b", None),
    ],
)
def test_a_containers_quota(said: str, cores: int | None) -> None:
    assert quota(said) == cores


def test_who_rests_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    own, other = Cores(path, 4, 4), Other(path)
    own.rest()
    try:
        for last, left in (("", 2), ("rest", 4)):
            assert other.say(last) == "4" and other.say() == "over"
            with own.at_work() as count:
                assert count == left, "it may take another step at once" if not last else "it takes none"
            own.rest()
    finally:
        other.kill()


@pytest.mark.parametrize(
    ("slot", "expected"),
    [(WORKING, True), (IDLE, False), (BETWEEN, False), (NEVER, False), (DEAD, False), (AHEAD, False)],
)
def test_whose_step_goes_on(slot: Slot, expected: bool) -> None:
    assert goes_on([IDLE, slot], NOW - 0.01, NOW) is expected
    assert not goes_on([slot], slot.began, NOW), "it knows of us"


def waited(own: Cores) -> float:
    began = time.monotonic()
    with own.at_work() as count:
        assert count == 2
        return time.monotonic() - began


def test_who_yields_lets_a_step_of_others_end_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GAP_S", "YIELD_S"):
        monkeypatch.setattr(cores, name, 1.0)  # a busy machine takes a while for everything
    path = tmp_path / "cores"
    own, other = Cores(path, 4, 4), Other(path)
    own.yields = True
    try:
        assert other.say() == "4"
        ends = threading.Timer(0.4, other.say)
        ends.start()
        assert 0.3 < waited(own) < 1.0
        ends.join()
        assert other.say() == "2"
        assert waited(own) < 0.3, "no rest lies before this step: others have known of us"
        own.rest()
        assert waited(own) >= 1.0
        own.rest()
        own.yields = False
        assert waited(own) < 0.3
    finally:
        other.kill()


def test_prefill_yields(tmp_path: Path) -> None:
    folder = tiny_models.write(tmp_path / "model", tiny_models.ARCHITECTURES["llama"])
    settings = Settings(model=str(folder), host_cache_dir=str(tmp_path / "tier"), kv_memory_mb=1)
    for generates in (True, False):
        engine = load_engine(settings, folder, slots=1, generates=generates)
        assert isinstance(engine, Engine) and engine._cores is not None
        assert engine._cores.yields is not generates
