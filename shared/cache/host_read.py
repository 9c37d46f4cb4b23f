"""Reading several files of a folder at once, in passes: open all, read and sum all, close all.

Taken one after the other, each block's copy would throw the code and the data of the small steps out of the
processor's caches again: for blocks of 256 KB that is a fifth of the time. If there is much to copy, two threads share
that, each taking the next file when it is done with one. With an idle core, 256 KB blocks come a quarter faster and
1 MB blocks half as fast again; without one it makes no difference.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Sequence
from concurrent.futures import Executor
from contextlib import suppress
from dataclasses import dataclass

from shared.cache import host_files
from shared.cache.checksum import Sums, sums
from shared.cache.host_files import BURST_BITS

MAX_FILES = 16  # open at once
SHARED_BYTES = 2 << 20  # as much is shared by two threads
LARGE_BYTES = 512 << 10  # of one file; summing smaller ones is so short that two threads would wait for the GIL


@dataclass(slots=True, eq=False)
class Wanted:
    """A file, and where its last bytes shall go. `read` fills in the rest; without `sums` it is not there, or bad."""

    name: str
    place: memoryview
    head: bytes | bytearray = b""
    """The bytes before those in `place`."""
    sums: Sums | None = None
    """Of the bytes in `place`."""
    bad: bool = False
    """No plain file, or one of another size."""
    file: int = -1
    used: int = 0


def read(folder: int, wanted: Sequence[Wanted], sizes: range, helper: Executor) -> None:
    """Read those that are there and have one of the `sizes`, which counts as use; at most MAX_FILES.

    Raises nothing for trouble with a file: it is not there then. Nobody writes into a place after this returns.
    """
    try:
        for one in wanted:
            _open(folder, one, sizes)
        _fill([one for one in wanted if one.head], helper)
        for one in wanted:
            # Marks need not be finer than `victims` looks at them.
            if one.sums is not None and time.time_ns() >> BURST_BITS != one.used >> BURST_BITS:
                with suppress(OSError):
                    host_files.mark_used(one.file)
    finally:
        for one in wanted:
            if one.file >= 0:
                os.close(one.file)


def _open(folder: int, one: Wanted, sizes: range) -> None:
    try:
        # NONBLOCK: a FIFO would keep us waiting.
        one.file = os.open(one.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
        status = os.fstat(one.file)
    except OSError as error:
        one.bad = error.errno in (errno.ELOOP, errno.ENXIO)  # a symlink, a socket
        return
    if not stat.S_ISREG(status.st_mode) or status.st_size not in sizes:
        one.bad = True
        return
    one.head = bytearray(status.st_size - len(one.place))
    one.used = status.st_mtime_ns


def _fill(files: Sequence[Wanted], helper: Executor) -> None:
    todo = iter(files)  # two threads may take from it
    total = sum(len(one.place) for one in files)
    large = total >= LARGE_BYTES * len(files)

    def work() -> None:
        for one in todo:
            _copy(one)
            if large:
                _sum(one)

    helping = helper.submit(work) if len(files) > 1 and total >= SHARED_BYTES else None
    try:
        work()
    finally:
        if helping and not helping.cancel():  # it has begun: what it has in hand must be finished
            helping.result()
    if not large:
        for one in files:
            _sum(one)


def _copy(one: Wanted) -> None:
    try:
        one.bad = os.readv(one.file, [one.head, one.place]) != len(one.head) + len(one.place)  # cut meanwhile
    except OSError:
        one.head = b""


def _sum(one: Wanted) -> None:
    if one.head and not one.bad:
        one.sums = sums(one.place)
