"""Who computes on this machine, so that each worker takes as many cores as the others leave.

A worker that is alone at work is as fast as the machine; two at work at once have half of it each, as threads that
outnumber the cores wait for one another. Which workers are at work changes from step to step, so each of them tells it
in a file that they share, before and after each step and when no other follows, and looks there how many others there
are. Nothing rests on it but speed: whoever does not share the file, or writes nonsense into it, makes steps slower.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import structlog

from shared.config import Settings, shared_memory

if sys.platform != "win32":
    import fcntl

QUOTA = Path("/sys/fs/cgroup/cpu.max")
log = structlog.get_logger()

LONGEST_S = 30.0
"""A step that began longer ago is one that its process did not survive."""
GAP_S = 0.05
"""Between two steps of a worker that is at work: texts, events, drafts. Who ended one so recently takes another, unless
it rests."""
YIELD_S = 0.1
"""For so long at most a worker that yields waits for a step of others to end."""
POLL_S = 0.001
SLOTS = 128
_SLOT = struct.Struct("<dd")


class Slot(NamedTuple):
    """A worker's last step, by the machine's monotonic clock in seconds. Began after it ended: it is not over."""

    began: float
    ended: float


def share(cores: int, most: int, others: Iterable[Slot], now: float) -> int:
    """How many of `cores` a step takes that begins now, of a worker that may use `most` of them."""
    return max(1, min(most, cores // (1 + sum(_at_work(slot, now) for slot in others))))


def _at_work(slot: Slot, now: float) -> bool:
    if slot.began > slot.ended:
        return 0.0 <= now - slot.began < LONGEST_S
    return 0.0 <= now - slot.ended < GAP_S


def goes_on(others: Iterable[Slot], began: float, now: float) -> bool:
    """Whether somebody is in a step that began before `began`, with more cores than are left to it since."""
    return any(slot.ended < slot.began < began and now - slot.began < LONGEST_S for slot in others)


def file_for(settings: Settings) -> Path:
    """One for all workers of this user on this machine; in containers, beside the folder that they share."""
    if settings.host_cache_dir:
        folder = Path(settings.host_cache_dir)
        return folder.with_name(f"{folder.name}-cores")
    return shared_memory() / f"trine-cores-{os.getuid()}"


def there() -> int:
    """Cores that this process may run on; others may as well."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def allowed() -> int:
    """How many of them it may use at once, by its container's quota."""
    try:
        given = quota(QUOTA.read_text())
    except OSError:
        given = None
    return min(there(), given or there())


def quota(said: str) -> int | None:
    """Whole cores of a container, from its `cpu.max` (https://docs.kernel.org/admin-guide/cgroup-v2.html); None for no
    limit, and for what cannot be read."""
    parts = said.split()
    if len(parts) != 2 or not all(part.isdigit() and int(part) for part in parts):
        return None
    return max(1, int(parts[0]) // int(parts[1]))


class Cores:
    """This process's place among those that share `path`. Raises OSError where there can be none."""

    def __init__(self, path: Path, cores: int, most: int) -> None:
        self._cores = cores
        self.most = min(cores, most)
        """That a step has when nobody else is at work."""
        self.yields = False
        """Whether its first step after a rest lets others end theirs. Both would take as long, and more: a step whose
        threads outnumber the cores takes three times as long, and somebody's stream waits for it."""
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(path, flags, 0o600)
        try:
            _check_ours(os.fstat(self._file), path)
            _fill(self._file, SLOTS * _SLOT.size)
            self._own = self._place()
            self._slots = mmap.mmap(self._file, SLOTS * _SLOT.size)
            self._last = Slot(0.0, 0.0)
        except BaseException:
            os.close(self._file)
            raise

    @classmethod
    def of(cls, settings: Settings) -> Cores | None:
        """What the settings ask for: None with a fixed number of threads, and where processes share no memory."""
        if settings.threads or sys.platform == "win32":
            return None
        try:
            return cls(file_for(settings), there(), allowed())
        except (OSError, ValueError) as error:  # ValueError: a folder without a name of its own, or a path with a NUL
            log.warning("cores are not shared: steps of several workers may disturb each other", reason=str(error))
            return None

    def at_most(self, count: int) -> None:
        """No step has more: not all that is there helps, as with two hardware threads of one core."""
        self.most = max(1, min(self.most, count))

    def _place(self) -> int:
        """A slot that no living process has: the kernel gives locks back when a process ends."""
        for number in range(SLOTS):
            try:
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, _SLOT.size, number * _SLOT.size)
            except (BlockingIOError, PermissionError):
                continue
            return number
        raise OSError(f"{SLOTS} workers share this machine already")

    def others(self) -> Iterator[Slot]:
        everything = self._slots[:]  # a slot that is just being written may be read half: a wrong count, once
        for number, (began, ended) in enumerate(_SLOT.iter_unpack(everything)):
            if number != self._own:
                yield Slot(began, ended)

    @contextmanager
    def at_work(self) -> Iterator[int]:
        """For as long as a step takes: so many cores are ours."""
        began = time.monotonic()
        rested = not _at_work(self._last, began)
        self._write(began, 0.0)
        try:
            if self.yields and rested:
                self._let_others_end(began)
            yield share(self._cores, self.most, self.others(), time.monotonic())
        finally:
            self._write(began, time.monotonic())

    def rest(self) -> None:
        """No other step follows soon: others need not wait and see."""
        self._write(0.0, 0.0)

    def _let_others_end(self, began: float) -> None:
        """Those who begin from now on know of us already."""
        while (now := time.monotonic()) - began < YIELD_S and goes_on(self.others(), began, now):
            time.sleep(POLL_S)

    def _write(self, began: float, ended: float) -> None:
        self._last = Slot(began, ended)
        _SLOT.pack_into(self._slots, self._own * _SLOT.size, began, ended)


def _fill(file: int, size: int) -> None:
    """Make its pages be there: a write into a page that a full file system has not ends the process."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    elif (missing := size - os.fstat(file).st_size) > 0 and os.pwrite(file, bytes(missing), size - missing) < missing:
        raise OSError("no space left for the file of cores")


def _check_ours(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) & 0o022:
        raise PermissionError(f"{path} is no file of this user alone")
