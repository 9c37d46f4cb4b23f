"""A folder in shared memory that several processes use at once: who takes part, and reading and writing its files.

Whoever takes part holds a shared lock (flock) on the folder itself, which the kernel gives back when a process dies.
Who gets the exclusive lock is alone: at joining, what lies there was left by the dead and goes; at leaving, all goes,
the folder too. A lock may have been won on a folder that somebody else has just removed, so after each lock the path
must still lead to the locked folder.

A file is written aside and renamed into place: it is there whole or not at all. A file that is removed while somebody
reads it stays readable to them. Nothing here depends on process ids: containers that share memory do not share those.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from shared.cache import host_files, host_read, host_room
from shared.cache.host_files import Listing
from shared.cache.host_read import Wanted
from shared.cache.host_room import Room, flock

if sys.platform != "win32":
    import fcntl

SUPPORTED = sys.platform != "win32"  # elsewhere there is no flock, and a file in use cannot be removed
JOIN_WAIT_S = 10.0  # somebody else may be removing gigabytes that a dead fleet left
LEAVE_WAIT_S = 5.0  # for threads still inside a read or a write


class _Joined(NamedTuple):
    folder: int
    room: Room


class HostFolder:
    """Thread-safe. All methods but `leave` raise OSError for any trouble, and when the folder has not been joined.

    `max_bytes` bounds all files of all processes, and so does half of what the file system had free at joining.
    """

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._joined: _Joined | None = None
        self._active = 0
        self._idle = threading.Condition()
        self._evicted_before = 0
        self._helper = ThreadPoolExecutor(1, "host-read")  # its thread starts when it is needed, and ends with this

    @property
    def joined(self) -> bool:
        return self._joined is not None

    @property
    def evicted(self) -> int:
        """Blocks that this process removed to make room."""
        joined = self._joined
        return self._evicted_before + (joined.room.evicted if joined else 0)

    @property
    def held_bytes(self) -> int:
        """What all processes keep here; never less than the truth."""
        with self._use() as (_, room):
            return room.total

    # Taking part

    def join(self) -> None:
        """Take part; clean up first if nobody else does. Refuses a folder that others can write to."""
        if not SUPPORTED:
            raise OSError(errno.ENOTSUP, "no shared folder on this system")
        if self.joined:
            return
        deadline = time.monotonic() + JOIN_WAIT_S
        while (folder := self._lock()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(errno.ETIMEDOUT, "somebody keeps the folder locked", str(self._path))
            time.sleep(0.01)
        try:
            self._joined = _Joined(folder, Room(folder, self._max_bytes))
        except BaseException:
            os.close(folder)
            raise

    def _lock(self) -> int | None:
        """The folder, ours in part; None if that has to be tried again."""
        with suppress(FileExistsError):
            os.mkdir(self._path, 0o700)
        try:
            folder = os.open(self._path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        try:
            _check_private(os.fstat(folder), self._path)
            if flock(folder, fcntl.LOCK_EX) and self._is_current(folder):
                _clear(folder)
            # Going from exclusive to shared is not one step: somebody else may come between, or even come and go.
            if flock(folder, fcntl.LOCK_SH) and self._is_current(folder):
                return folder
        except BaseException:
            os.close(folder)
            raise
        os.close(folder)
        return None

    def _is_current(self, folder: int) -> bool:
        try:
            return os.path.samestat(os.fstat(folder), os.stat(self._path, follow_symlinks=False))
        except FileNotFoundError:
            return False

    def leave(self) -> None:
        """Take part no longer; the last one out removes everything. Raises nothing."""
        with self._idle:
            joined, self._joined = self._joined, None
            # Descriptors that a thread still uses may not be closed: their numbers would come to mean other files.
            if joined is None or not self._idle.wait_for(lambda: self._active == 0, LEAVE_WAIT_S):
                return
            self._evicted_before += joined.room.evicted
        with suppress(OSError):
            if flock(joined.folder, fcntl.LOCK_EX) and self._is_current(joined.folder):
                _clear(joined.folder)
                os.rmdir(self._path)
        joined.room.close()
        os.close(joined.folder)

    @contextmanager
    def _use(self) -> Iterator[_Joined]:
        with self._idle:
            if self._joined is None:
                raise OSError(errno.ENOTCONN, "not joined", str(self._path))
            joined = self._joined
            self._active += 1
        try:
            yield joined
        finally:
            with self._idle:
                self._active -= 1
                self._idle.notify_all()

    # Files

    def holds(self, name: str, sizes: range) -> bool:
        """There is a plain file of that name with so many bytes."""
        with self._use() as (folder, _):
            return host_files.holds(folder, name, sizes)

    def touch(self, name: str, sizes: range) -> bool:
        """The same, and it counts as used now."""
        with self._use() as (folder, _):
            with suppress(FileNotFoundError):  # somebody may remove it in between
                if host_files.holds(folder, name, sizes):
                    host_files.mark_used(name, folder)
                    return True
            return False

    def read(self, wanted: Sequence[Wanted], sizes: range) -> None:
        """See `host_read.read`."""
        with self._use() as (folder, _):
            host_read.read(folder, wanted, sizes, self._helper)

    def write(self, name: str, pieces: Sequence[bytes | memoryview]) -> None:
        """The pieces, one after the other, become the file of that name."""
        size = sum(len(piece) for piece in pieces)
        part = host_files.PART + secrets.token_hex(8)
        with self._use() as (folder, room):
            file = room.reserve(part, size)
            try:
                if os.writev(file, pieces) != size:
                    raise OSError(errno.ENOSPC, "no space left", str(self._path))
                host_files.mark_used(file)
                room.finish(part, name)
            except BaseException:
                host_files.remove(folder, part)
                raise
            finally:
                os.close(file)

    def remove(self, names: Iterable[str] | None = None) -> int:
        """Remove these, or all, and say how many were there."""
        with self._use() as (folder, _):
            if names is None:
                names = [entry.name for entry in host_files.scan(folder).blocks]
            return sum(host_files.remove(folder, name) for name in names)

    def listing(self) -> Listing:
        with self._use() as (folder, _):
            return host_files.scan(folder)


def _check_private(status: os.stat_result, path: Path) -> None:
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "the folder belongs to another user", str(path))
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise PermissionError(errno.EPERM, "the folder is open to other users", str(path))


def _clear(folder: int) -> None:
    found = host_files.scan(folder)
    for entry in (*found.blocks, *found.parts):
        host_files.remove(folder, entry.name)
    host_files.remove(folder, host_room.NAME)
