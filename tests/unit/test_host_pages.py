"""Many blocks of the host tier asked for at once: read by one thread or two, each is what it should be, or a miss."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from shared.cache import host_read
from shared.cache.frames import BlockMeta
from shared.cache.host import HostBlocks
from shared.cache.host_files import BURST_BITS
from tests.host_rig import IDENTITY, METAS, payload

BLOCK = IDENTITY.block_bytes
MANY = METAS[: 2 * host_read.MAX_FILES + 3]


@pytest.fixture(params=["one thread", "two threads", "two threads, large"])
def host(tmp_path, monkeypatch, request):
    monkeypatch.setattr(host_read, "SHARED_BYTES", 1 << 40 if request.param == "one thread" else 0)
    monkeypatch.setattr(host_read, "LARGE_BYTES", 0 if "large" in request.param else 1 << 40)
    host = HostBlocks(tmp_path / "blocks", IDENTITY, 1 << 30)
    assert host.open() and all(host.put(meta, payload(meta)) for meta in MANY)
    yield host
    host.close()


def read(host: HostBlocks, metas: list[BlockMeta], known: bool = False) -> list[int]:
    """Which were there; those are right, and nothing was written beside the places. `known`: they were right before."""
    pool = bytearray(len(metas) * (BLOCK + 8))
    if known:
        pool[:] = b"".join(bytes(payload(meta)) + bytes(8) for meta in metas)
    places = [memoryview(pool)[i * (BLOCK + 8) :][:BLOCK] for i in range(len(metas))]
    producers = host.get(list(zip(metas, places, strict=True)))
    found = [index for index, producer in enumerate(producers) if producer is not None]
    assert all(places[index] == payload(metas[index]) and producers[index] == "worker-1" for index in found)
    assert all(not any(pool[i * (BLOCK + 8) + BLOCK :][:8]) for i in range(len(metas)))
    return found


def open_files() -> int:
    return len(os.listdir("/dev/fd"))


def test_a_page_with_holes_and_damage(host, tmp_path):
    def path(index: int) -> Path:
        return tmp_path / "blocks" / MANY[index].name.hex()

    assert read(host, MANY) == list(range(len(MANY)))
    before = open_files()
    path(0).unlink()
    os.truncate(path(1), BLOCK)
    path(4).write_bytes(path(5).read_bytes())
    path(6).unlink()
    os.mkfifo(path(6))
    path(len(MANY) - 1).unlink()
    path(len(MANY) - 1).symlink_to(path(7))
    there = [index for index in range(len(MANY)) if index not in (0, 1, 4, 6, len(MANY) - 1)]
    assert read(host, MANY) == there
    counters = host.counters
    assert counters["reject"] == 4 and counters["miss"] == 5 and counters["hit"] == len(MANY) + len(there)
    assert counters["bytes_in"] == counters["hit"] * BLOCK
    assert open_files() == before
    assert read(host, MANY) == there and host.counters["reject"] == 4, "what was bad is gone"
    assert read(host, []) == []


@pytest.mark.parametrize("step", ["cut", "gone", "bit"])
def test_a_file_that_changes_while_it_is_read(host, tmp_path, monkeypatch, step):
    real = os.readv
    names = {(tmp_path / "blocks" / meta.name.hex()).stat().st_ino: meta.name.hex() for meta in MANY}
    late = MANY[3].name.hex()

    def readv(file: int, pieces: list[memoryview]) -> int:
        if names[os.fstat(file).st_ino] == late:
            path = tmp_path / "blocks" / late
            if step == "cut":
                os.truncate(path, 5000)
            elif step == "gone":
                path.unlink()
            else:
                with path.open("r+b") as damaged:
                    damaged.seek(9000)
                    damaged.write(b"?")
        return real(file, pieces)

    monkeypatch.setattr(os, "readv", readv)
    found = read(host, MANY[:8], known=True)
    assert found == ([0, 1, 2, 3, 4, 5, 6, 7] if step == "gone" else [0, 1, 2, 4, 5, 6, 7])
    assert host.counters["reject"] == (step != "gone")


def test_no_thread_writes_into_a_place_afterwards(host, monkeypatch):
    """Whichever thread is slow, both are done when the answer is there; and neither waits for one that never begins."""
    real, threads, asking, slow = os.readv, set(), threading.current_thread(), False

    def readv(file: int, pieces: list[memoryview]) -> int:
        threads.add(threading.current_thread())
        if (threading.current_thread() is asking) == slow:
            time.sleep(0.02)
        return real(file, pieces)

    monkeypatch.setattr(os, "readv", readv)
    assert read(host, MANY[:16]) == list(range(16))
    slow = True
    assert read(host, MANY[:16]) == list(range(16))
    assert len(threads) == (2 if host_read.SHARED_BYTES == 0 else 1)

    busy = threading.Event()
    waiting = host._folder._helper.submit(busy.wait, 10.0)
    started = time.monotonic()
    assert read(host, MANY[:4]) == [0, 1, 2, 3]
    assert time.monotonic() - started < 5.0
    busy.set()
    waiting.result()


def test_an_error_of_the_system_is_a_miss(host, monkeypatch):
    for call in ("readv", "fstat", "utime", "open"):

        def broken(*_: object, **__: object) -> None:
            raise PermissionError("no")

        before = open_files()
        with monkeypatch.context() as system:
            system.setattr(os, call, broken)
            assert read(host, MANY[:4]) == ([0, 1, 2, 3] if call == "utime" else [])
        assert open_files() == before
    assert host.counters["reject"] == 0 and read(host, MANY) == list(range(len(MANY)))


def test_use_is_marked_once_in_a_burst_and_heads_first(host, tmp_path, monkeypatch):
    paths = [tmp_path / "blocks" / meta.name.hex() for meta in MANY[:6]]
    for path in paths:
        os.utime(path, (1, 1))
    clock = [10**18]
    monkeypatch.setattr(time, "time_ns", lambda: clock.__setitem__(0, clock[0] + 1) or clock[0])
    read(host, MANY[:6])
    marks = [path.stat().st_mtime_ns for path in paths]
    assert marks == sorted(set(marks)) and marks[0] > 10**18
    read(host, MANY[:6])
    assert [path.stat().st_mtime_ns for path in paths] == marks
    clock[0] += 1 << BURST_BITS
    read(host, MANY[:6])
    assert all(path.stat().st_mtime_ns > clock[0] - 100 for path in paths)
