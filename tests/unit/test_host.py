"""Blocks shared through a folder: what is read is what was written, within the bound, and trouble is a miss."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from shared.cache import frames, host_files, host_room, naming
from shared.cache.checksum import ROW, checksum, sums
from shared.cache.frames import BlockMeta
from shared.cache.host import HostBlocks, Usage
from shared.cache.host_files import BURST_BITS, Entry, victims
from shared.errors import ConfigError, FrameError
from shared.messages import Identity

BLOCK = 10_000
PAGES = 12 << 10  # what a file of one block takes
IDENTITY = Identity(fingerprint="f" * 64, codec="none", block_size=4, block_bytes=BLOCK)
METAS = frames.metas(naming.root(IDENTITY, "t"), range(4 * 64), 4, "worker-1")


def payload(meta: BlockMeta) -> memoryview:
    return memoryview((meta.name * (BLOCK // 32 + 1))[:BLOCK])


@contextmanager
def opened(folder: Path, max_bytes: int = 1 << 30, identity: Identity = IDENTITY) -> Iterator[HostBlocks]:
    host = HostBlocks(folder, identity, max_bytes)
    assert host.open(), host.trouble
    try:
        yield host
    finally:
        host.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "blocks"


@pytest.fixture
def host(folder: Path) -> Iterator[HostBlocks]:
    with opened(folder) as host:
        yield host


def put(host: HostBlocks, *metas: BlockMeta) -> None:
    for meta in metas:
        assert host.put(meta, payload(meta))


def read(host: HostBlocks, meta: BlockMeta) -> bool:
    """Whether the block was there; if so, it was right."""
    dest = bytearray(BLOCK)
    (found,) = host.get([(meta, memoryview(dest))])
    assert found is None or dest == payload(meta), "wrong bytes were passed off as a block"
    return found is not None


def kept(host: HostBlocks) -> list[int]:
    return [index for index, meta in enumerate(METAS) if host.has(meta.name)]


def test_one_reads_what_another_wrote(folder):
    with opened(folder) as writer, opened(folder) as reader:
        put(writer, *METAS[:3])
        put(reader, METAS[0])
        pool = bytearray(3 * BLOCK + 7)
        assert reader.get([(METAS[1], memoryview(pool)[7 + BLOCK : 7 + 2 * BLOCK])]) == ["worker-1"]
        assert pool == bytes(7 + BLOCK) + payload(METAS[1]) + bytes(BLOCK), "the block's place and nothing else"
        assert not read(reader, METAS[3])
        assert reader.has(METAS[2].name) and not reader.has(METAS[3].name)
        assert reader.longest([meta.name for meta in METAS]) == 3
        assert writer.usage() == reader.usage() == Usage(3, 3 * PAGES)
        assert writer.counters["put"] == 3 and writer.counters["bytes_out"] == 3 * BLOCK
        assert {name: n for name, n in reader.counters.items() if n} == {
            "hit": 1, "miss": 1, "exists": 1, "bytes_in": BLOCK,
        }  # fmt: skip
        assert reader.drop([METAS[0].name, METAS[9].name, b"odd"]) == 1
        assert writer.drop() == 2 and writer.usage() == Usage()


def test_blocks_larger_than_a_part_on_the_wire_stay_whole(folder):
    identity = IDENTITY.model_copy(update={"block_bytes": frames.PART_BYTES + 9})
    data = os.urandom(frames.PART_BYTES + 9)
    with opened(folder, identity=identity) as host:
        assert host.put(METAS[0], memoryview(data))
        dest = bytearray(len(data))
        assert host.get([(METAS[0], memoryview(dest))]) == ["worker-1"] and dest == data


def test_several_models_share_a_folder(folder):
    other = IDENTITY.model_copy(update={"block_bytes": 20})
    meta = frames.metas(naming.root(other, "t"), range(4), 4)[0]
    with opened(folder) as one, opened(folder, identity=other) as two:
        put(one, METAS[0])
        assert two.put(meta, memoryview(bytes(20)))
        assert two.get([(meta, memoryview(bytearray(20)))]) == [""] and read(one, METAS[0])
        assert one.usage() == Usage(2, PAGES + 4096)


def test_only_its_owner_may_look(folder, host):
    put(host, METAS[0])
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}


def test_contradictions_are_bugs_and_raised(folder, host):
    with pytest.raises(FrameError):
        host.put(METAS[0], memoryview(bytes(BLOCK - 1)))
    with pytest.raises(FrameError):
        host.get([(METAS[0], memoryview(bytearray(BLOCK + 1)))])
    with pytest.raises(FrameError):
        host.put(replace(METAS[0], parent=METAS[1].name), payload(METAS[0]))
    with pytest.raises(ConfigError):
        HostBlocks(folder, IDENTITY.model_copy(update={"block_bytes": 0}), 1 << 20)


@pytest.mark.parametrize("name", [b"", b"x" * 31, b"x" * 33, b"../../etc/passwd", b"/" * 64])
def test_odd_names_are_nowhere(host, name):
    assert not host.has(name) and host.longest([name]) == 0 and host.drop([name]) == 0
    assert not read(host, replace(METAS[0], name=name))


# Damage


def flip(position: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[position] ^= 0x40
        path.write_bytes(data)

    return damage


def becomes(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGE: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "head cut off": lambda path: path.write_bytes(path.read_bytes()[-BLOCK:]),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "extended": lambda path: os.truncate(path, path.stat().st_size + 64),
    "much extended": lambda path: os.truncate(path, 1 << 34),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "first byte": flip(0),
    "header length": flip(5),
    "header": flip(30),
    "token": flip(100),
    "padding length": lambda path: path.write_bytes(
        path.read_bytes()[:-BLOCK] + bytes(64) + path.read_bytes()[-BLOCK:]
    ),
    "first byte of the body": flip(-BLOCK),
    "byte in the body": flip(-BLOCK // 2),
    "last byte": flip(-1),
    "another block": lambda path: path.write_bytes((path.parent / METAS[1].name.hex()).read_bytes()),
    "directory": becomes(Path.mkdir),
    "fifo": becomes(os.mkfifo),
    "symlink": becomes(lambda path: path.symlink_to(path.parent / METAS[1].name.hex())),
    "dangling symlink": becomes(lambda path: path.symlink_to("nowhere")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_whatever_is_damaged_is_a_miss_and_goes(folder, host, damage):
    put(host, *METAS[:2])
    path = folder / METAS[0].name.hex()
    damage(path)
    assert not read(host, METAS[0])
    assert host.counters["reject"] == host.counters["miss"] == 1
    assert not os.path.lexists(path)
    put(host, METAS[0])
    assert read(host, METAS[0]) and read(host, METAS[1])


def test_a_block_is_what_its_parent_and_tokens_say(host):
    put(host, METAS[0])
    assert not read(host, replace(METAS[0], parent=METAS[1].name))
    put(host, METAS[0])
    assert not read(host, replace(METAS[0], token_ids=(9, 9, 9, 9)))


def checked(data: bytes | bytearray) -> bytes:
    return checksum(b"", sums(memoryview(data)))


def changed(change: Callable[[bytearray], None]) -> bytes:
    data = bytearray(PATTERN)
    change(data)
    return checked(data)


PATTERN = os.urandom(3 * 8 * ROW + 5)


def test_the_checksum_sees_every_single_flip_and_moved_bytes():
    right = checked(PATTERN)
    assert checked(bytearray(PATTERN)) == right

    def flips(*bits: int) -> Callable[[bytearray], None]:
        def change(data: bytearray) -> None:
            for bit in bits:
                data[bit // 8] ^= 1 << bit % 8

        return change

    def swaps(first: int, second: int, size: int) -> Callable[[bytearray], None]:
        def change(data: bytearray) -> None:
            one, two = data[first : first + size], data[second : second + size]
            data[first : first + size], data[second : second + size] = two, one

        return change

    assert all(changed(flips(bit)) != right for bit in range(0, 8 * len(PATTERN), 7))
    assert changed(flips(63, 127)) != right, "two top bits of one row"
    assert changed(flips(63, 64 * ROW + 63)) != right, "two of one column"
    assert changed(swaps(0, 8, 8)) != right, "words of a row"
    assert changed(swaps(0, 8 * ROW, 8)) != right, "words of a column"
    assert changed(swaps(0, 8 * ROW + 8, 8)) != right, "words of neither"
    assert changed(swaps(0, 8 * ROW, 8 * ROW)) != right, "rows"
    for length in (0, 1, 8 * ROW - 1, 8 * ROW):
        zeros = {checked(bytes(n)) for n in (length, length + 1, length + 8 * ROW)}
        assert len(zeros) == 3, "zeros of different lengths"
    assert checksum(b"another", sums(memoryview(PATTERN))) != right, "another label"


def test_the_checksum_sees_every_change_of_two_and_three_words():
    """Chosen to cancel: in sums what one word gains another loses, in XORs the same bits change."""
    rng = random.Random(1)
    right = checked(PATTERN)
    for _ in range(2000):
        data = bytearray(PATTERN)
        words = memoryview(data)[: 3 * 8 * ROW].cast("Q")
        row, column, delta = rng.randrange(3), rng.randrange(ROW), 1 << rng.randrange(64)
        places = [(row, column), (row, rng.randrange(ROW)), ((row + 1) % 3, column), ((row + 2) % 3, column)]
        for sign, (r, c) in zip((1, -1, rng.choice((1, -1))), rng.sample(places, rng.choice((2, 3))), strict=False):
            word = words[r * ROW + c]
            words[r * ROW + c] = word ^ delta if rng.random() < 0.5 else (word + sign * delta) % (1 << 64)
        words.release()
        assert data == PATTERN or checked(data) != right


# The bound


def test_the_bound_is_kept_and_the_least_recently_used_go(folder, monkeypatch):
    clock = iter(range(10**9, 10**15, 1 << BURST_BITS))  # each use in a burst of its own
    monkeypatch.setattr(time, "time_ns", lambda: next(clock))
    with opened(folder, 16 * PAGES) as host:
        for index, meta in enumerate(METAS[:40]):
            put(host, meta)
            host.longest([METAS[0].name])
            if index > 1:
                assert read(host, METAS[1])
            assert host.usage().bytes <= 16 * PAGES
        assert kept(host)[:2] == [0, 1], "what is used stays"
        assert kept(host)[2:] == list(range(40 - len(kept(host)) + 2, 40)), "the newest stay"
        assert len(kept(host)) >= 13
        assert host.counters["evicted"] == 40 - len(kept(host))


def test_within_a_burst_tails_go_before_heads():
    def at(*times: int) -> list[Entry]:
        return [Entry(str(index), 10, time) for index, time in enumerate(times)]

    burst = 1 << BURST_BITS
    assert [e.name for e in victims(at(burst, burst + 1, burst + 2, 5, 6), 31)] == ["4", "3", "2", "1"]
    assert victims(at(1, 2), 0) == [] and len(victims(at(1, 2), 99)) == 2


def test_half_of_what_is_free_is_the_most(folder, monkeypatch):
    real = os.fstatvfs

    def small(file: int) -> os.statvfs_result:
        fields = list(real(file))
        fields[1], fields[4] = 4096, 30 * PAGES // 4096
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "fstatvfs", small)
    with opened(folder) as host:
        put(host, *METAS[:30])
        assert 12 * PAGES <= host.usage().bytes <= 15 * PAGES


def test_the_sum_does_not_drift(folder):
    with opened(folder, 16 * PAGES) as host:
        for _ in range(5):
            put(host, *METAS[:12])
            host.drop()
        put(host, *METAS[:12])
        assert host.counters["evicted"] == 0
        (folder / host_room.NAME).write_bytes(b"\xff" * 8)
        put(host, METAS[12])
        assert host.counters["evicted"] == 0 and len(kept(host)) == 13
        (folder / host_room.NAME).write_bytes(b"abc")
        put(host, *METAS[13:30])
        assert host.usage().bytes <= 16 * PAGES


def test_a_block_larger_than_the_bound_is_not_stored(folder):
    with opened(folder, PAGES - 1) as host:
        assert not host.put(METAS[0], payload(METAS[0]))
        assert host.counters["put_failed"] == 1 and host.usage() == Usage()


def test_parts_count_and_those_of_the_dead_go(folder):
    with opened(folder, 4 * PAGES) as host:
        parts = [folder / f"{host_files.PART}{n}" for n in range(3)]
        for part in parts:
            part.touch()
            os.truncate(part, BLOCK)
        put(host, *METAS[:2])
        assert host.usage() == Usage(1, 4 * PAGES), "parts are being written and stay"
        os.truncate(parts[0], 4 * PAGES)
        assert not host.put(METAS[5], payload(METAS[5])), "nothing can be removed to make room"
        for part in parts:
            os.utime(part, (1, 1))
        put(host, METAS[5])
        assert not any(part.exists() for part in parts)


# Trouble


def test_a_full_file_system_is_a_failed_put(folder, host, monkeypatch):
    put(host, METAS[0])
    real = os.writev

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    for broken in (full, lambda file, pieces: real(file, [pieces[0]])):
        monkeypatch.setattr(os, "writev", broken)
        assert not host.put(METAS[1], payload(METAS[1]))
    monkeypatch.undo()
    assert host.counters["put_failed"] == 2
    assert {path.name for path in folder.iterdir()} == {METAS[0].name.hex(), host_room.NAME}, "nothing is left behind"
    put(host, METAS[1])


@pytest.mark.parametrize(
    "call", ["open", "stat", "readv", "pread", "pwrite", "ftruncate", "rename", "scandir", "utime"]
)
def test_no_error_of_the_system_gets_out(folder, monkeypatch, call):
    with opened(folder, 2 * PAGES) as host:
        put(host, *METAS[:2])

        def broken(*_: object, **__: object) -> None:
            raise PermissionError(errno.EACCES, "no")

        monkeypatch.setattr(os, call, broken)
        for meta in METAS[:4]:
            host.put(meta, payload(meta))
            read(host, meta)
            host.has(meta.name)
        host.longest([meta.name for meta in METAS[:4]])
        host.usage()
        host.drop()
        monkeypatch.undo()
        put(host, METAS[5])
        assert read(host, METAS[5])


def test_a_folder_removed_underneath_is_a_cache_without_blocks(folder, host):
    put(host, METAS[0])
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    assert not read(host, METAS[0]) and not host.has(METAS[0].name)
    assert not host.put(METAS[1], payload(METAS[1]))
    assert host.usage() == Usage()
    with opened(folder) as other:
        put(other, METAS[1])
        assert not read(host, METAS[1])
        host.close()
        assert read(other, METAS[1]), "who is in a folder that is gone does not remove its successor"


def test_a_frozen_holder_of_the_sum_costs_a_put(folder, host, monkeypatch):
    monkeypatch.setattr(host_room, "WAIT_S", 0.05)
    put(host, METAS[0])
    with open(folder / host_room.NAME) as frozen:
        assert host_room.flock(frozen.fileno(), fcntl.LOCK_EX)
        assert not host.put(METAS[1], payload(METAS[1]))
        assert read(host, METAS[0])
    put(host, METAS[1])


def test_a_sum_removed_by_hand_ends_the_puts(folder, host):
    put(host, METAS[0])
    (folder / host_room.NAME).unlink()
    assert not host.put(METAS[1], payload(METAS[1])), "who comes now would count in another file"
    assert read(host, METAS[0])


def test_a_block_gets_its_name_only_when_nobody_is_counting(folder, host, monkeypatch):
    """A scan could miss a file that is renamed meanwhile."""
    monkeypatch.setattr(host_room, "WAIT_S", 0.05)
    real = os.writev
    with open(folder / host_room.NAME) as counting:

        def write(*args) -> int:
            assert host_room.flock(counting.fileno(), fcntl.LOCK_EX), "the bytes are written without the lock"
            return real(*args)

        monkeypatch.setattr(os, "writev", write)
        assert not host.put(METAS[0], payload(METAS[0]))
    assert [path.name for path in folder.iterdir()] == [host_room.NAME]


def test_not_open_is_a_miss(folder):
    host = HostBlocks(folder, IDENTITY, 1 << 20)
    for _ in range(2):
        assert not host.available and not read(host, METAS[0]) and not host.put(METAS[0], payload(METAS[0]))
        assert host.open() and host.open() and host.available
        put(host, METAS[0])
        host.close()
        host.close()
    assert not folder.exists()


def test_threads_may_close_while_others_work(folder):
    with opened(folder, 8 * PAGES) as other:
        host = HostBlocks(folder, IDENTITY, 8 * PAGES)
        assert host.open()
        wrong: list[BaseException] = []

        def work(offset: int) -> None:
            try:
                for turn in range(10_000):
                    meta = METAS[(turn * 7 + offset) % 12]
                    host.put(meta, payload(meta))
                    read(host, meta)
                    if not host.available:
                        return
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        host.close()
        for thread in threads:
            thread.join(5.0)
            assert not thread.is_alive()
        assert not wrong
        assert host.counters["hit"] > 0 and host.counters["evicted"] > 0 and host.counters["reject"] == 0
        assert other.usage().bytes <= 8 * PAGES
        assert not any(path.name.startswith(host_files.PART) for path in folder.iterdir())


# Taking part


def test_the_last_one_out_removes_the_folder(folder):
    with opened(folder) as first:
        with opened(folder) as second:
            put(second, METAS[0])
        assert read(first, METAS[0])
    assert not folder.exists()


def test_what_a_dead_fleet_left_is_removed(folder):
    folder.mkdir(0o700)
    for name in (METAS[0].name.hex(), host_files.PART + "x", host_room.NAME):
        (folder / name).write_bytes(b"\0" * 100)
    (folder / METAS[1].name.hex()).mkdir()
    with opened(folder) as host:
        assert host.usage() == Usage() and kept(host) == []
        put(host, METAS[0])
    assert not folder.exists()


@pytest.mark.parametrize("again", [False, True], ids=["gone", "replaced"])
def test_a_lock_on_a_folder_that_is_gone_is_no_lock(folder, monkeypatch, again):
    """Between opening and locking it, the last one out may have removed it, and the next one made it anew."""

    def late(file: int, kind: int) -> bool:
        if kind == fcntl.LOCK_SH:
            monkeypatch.undo()
            folder.rename(folder.with_name("old"))
            if again:
                folder.mkdir(0o700)
        return host_room.flock(file, kind)

    monkeypatch.setattr("shared.cache.host_folder.flock", late)
    with opened(folder) as host:
        put(host, METAS[0])
        assert (folder / METAS[0].name.hex()).exists()
    assert not folder.exists()


def test_what_is_not_ours_stays(folder):
    folder.mkdir(0o700)
    (folder / "notes.txt").write_text("mine")
    with opened(folder) as host:
        put(host, METAS[0])
        assert host.drop() == 1
    assert [path.name for path in folder.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    "case", ["symlink", "file", "open to others", "another user", "no parent", "unsupported", "locked"]
)
def test_a_folder_that_cannot_be_trusted_is_not_used(folder, monkeypatch, case):
    other = folder.with_name("other")
    other.mkdir(0o700)
    (other / METAS[0].name.hex()).write_bytes(b"keep")
    monkeypatch.setattr("shared.cache.host_folder.JOIN_WAIT_S", 0.05)
    if case == "symlink":
        folder.symlink_to(other)
    elif case == "file":
        folder.write_text("")
    elif case == "open to others":
        folder.mkdir()
        folder.chmod(0o770)
    elif case == "another user":
        user = os.geteuid()
        monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    elif case == "unsupported":
        monkeypatch.setattr("shared.cache.host_folder.SUPPORTED", False)
    elif case == "no parent":
        folder = folder / "below"
    else:
        folder.mkdir(0o700)
        holder = os.open(folder, os.O_RDONLY)
        assert host_room.flock(holder, fcntl.LOCK_EX)
    host = HostBlocks(folder, IDENTITY, 1 << 20)
    assert not host.open() and not host.available and host.trouble
    assert not host.put(METAS[0], payload(METAS[0])) and not read(host, METAS[0])
    host.close()
    assert (other / METAS[0].name.hex()).exists()
    if case == "locked":
        os.close(holder)
