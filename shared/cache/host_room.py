"""The bound on what all processes together keep in a folder.

A file holds the sum of all bytes, under a lock for each change. The sum is never less than the truth: bytes are added
before they are written, and never subtracted. When it says full, a scan finds the truth and the least recently used
blocks go. Files get their names under the same lock, so that no scan misses one that is just being renamed. Who dies
leaves the sum too high at worst, until the next scan.
"""

from __future__ import annotations

import errno
import os
import struct
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from shared.cache import host_files
from shared.cache.host_files import PART, pages

if sys.platform != "win32":
    import fcntl

WAIT_S = 1.0  # a scan of 20,000 files takes a tenth of that; a frozen holder costs a failed put each
STALE_S = 60.0  # a part takes milliseconds; one that old belongs to the dead
EVICT_SHARE = 8  # a scan makes an eighth of the bound free, so that its cost spreads over many puts
NAME = "room"
_SUM = struct.Struct("<Q")


def flock(file: int, kind: int) -> bool:
    """True if the lock is ours now; never waits."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Room:
    """`folder` is a descriptor that outlives this. Thread-safe; raises OSError for any trouble."""

    def __init__(self, folder: int, max_bytes: int) -> None:
        self._folder = folder
        self._mutex = threading.Lock()  # flock tells processes apart, not the threads of one
        self.evicted = 0
        free = os.fstatvfs(folder)
        self.bound = min(max_bytes, (free.f_bavail * free.f_frsize + host_files.scan(folder).size) // 2)
        self._file = os.open(NAME, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder)

    def close(self) -> None:
        os.close(self._file)

    @property
    def total(self) -> int:
        """The sum as it stands: a number that is being written is read whole or not at all."""
        known = os.pread(self._file, _SUM.size, 0)
        return int(_SUM.unpack(known)[0]) if len(known) == _SUM.size else 0

    def reserve(self, part: str, size: int) -> int:
        """A new file for a part, counted, and as long as it is going to be, so that every scan counts it too."""
        needed = pages(size)
        if needed > self.bound:
            raise OSError(errno.EFBIG, "larger than all that the folder may hold")
        with self._locked():
            known = os.pread(self._file, _SUM.size, 0)
            total = _SUM.unpack(known)[0] if len(known) == _SUM.size else self.bound
            if total + needed > self.bound:
                total = self._make_room(self.bound - needed)
            os.pwrite(self._file, _SUM.pack(total + needed), 0)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            file = os.open(part, flags, 0o600, dir_fd=self._folder)
            try:
                os.ftruncate(file, size)
            except BaseException:
                os.close(file)
                host_files.remove(self._folder, part)
                raise
            return file

    def finish(self, part: str, name: str) -> None:
        """The part is whole: it gets its name, in place of what had it before."""
        with self._locked():
            os.rename(part, name, src_dir_fd=self._folder, dst_dir_fd=self._folder)

    def _make_room(self, limit: int) -> int:
        """Bytes in the folder, after removing what it takes to stay within `limit`."""
        found = host_files.scan(self._folder)
        total = found.size
        old = time.time_ns() - int(STALE_S * 1e9)
        gone = [part for part in found.parts if part.used < old]
        excess = total - sum(part.size for part in gone)
        if excess > limit:
            gone += host_files.victims(found.blocks, excess - max(0, limit - self.bound // EVICT_SHARE))
        for entry in gone:
            self.evicted += host_files.remove(self._folder, entry.name) and not entry.name.startswith(PART)
            total -= entry.size
        if total > limit:
            raise OSError(errno.ENOSPC, "as much as the folder may hold is being written")
        return total

    @contextmanager
    def _locked(self) -> Iterator[None]:
        deadline = time.monotonic() + WAIT_S
        if not self._mutex.acquire(timeout=WAIT_S):
            raise TimeoutError(errno.ETIMEDOUT, "another thread keeps the sum locked")
        try:
            while not flock(self._file, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "another process keeps the sum locked")
                time.sleep(0.0005)
            try:
                if os.fstat(self._file).st_nlink == 0:  # removed by hand: others may be counting in another file
                    raise FileNotFoundError(errno.ENOENT, "the folder was removed")
                yield
            finally:
                fcntl.flock(self._file, fcntl.LOCK_UN)
        finally:
            self._mutex.release()
