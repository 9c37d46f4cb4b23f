"""Files in a folder that several processes change at once, and which of them go first. No state, no locks."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

PART = ".part-"  # what is being written
BURST_BITS = 28  # 2**28 ns = 0.27 s
_PAGE = 4096
_NAME = re.compile(r"[0-9a-f]{64}")


class Entry(NamedTuple):
    """A file: its bytes in whole pages, as memory has them, and when it was last used (ns)."""

    name: str
    size: int
    used: int


class Listing(NamedTuple):
    blocks: list[Entry]
    parts: list[Entry]

    @property
    def size(self) -> int:
        return sum(entry.size for entry in self.blocks) + sum(entry.size for entry in self.parts)


def pages(size: int) -> int:
    return -(-size // _PAGE) * _PAGE


def victims(entries: Iterable[Entry], excess: int) -> list[Entry]:
    """What to remove to be rid of `excess` bytes: the least recently used first.

    Chains are written and read head first, and a tail is useless without its head. So within one burst (a time as
    long as it takes to move a chain) the last used goes first.
    """
    chosen: list[Entry] = []
    for entry in sorted(entries, key=lambda entry: (entry.used >> BURST_BITS, -entry.used)):
        if excess <= 0:
            break
        chosen.append(entry)
        excess -= entry.size
    return chosen


def scan(folder: int) -> Listing:
    """Blocks and parts in the folder with this descriptor; whatever else lies there is not ours to count or remove."""
    found = Listing([], [])
    # A descriptor of its own: the position in a directory belongs to the descriptor.
    handle = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        with os.scandir(handle) as entries:
            for entry in entries:
                into = found.blocks if _NAME.fullmatch(entry.name) else found.parts
                if into is found.parts and not entry.name.startswith(PART):
                    continue
                with suppress(FileNotFoundError):
                    status = entry.stat(follow_symlinks=False)
                    into.append(Entry(entry.name, pages(status.st_size), status.st_mtime_ns))
    finally:
        os.close(handle)
    return found


def holds(folder: int, name: str, sizes: range) -> bool:
    """There is a plain file of that name with so many bytes."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return stat.S_ISREG(status.st_mode) and status.st_size in sizes


def mark_used(file: int | str, folder: int | None = None) -> None:
    now = time.time_ns()  # the kernel's own stamp is coarse: the order within a chain would be lost in it
    if folder is None:
        os.utime(file, ns=(now, now))
    else:
        os.utime(file, ns=(now, now), dir_fd=folder, follow_symlinks=False)


def remove(folder: int, name: str) -> bool:
    """True if it was there and is not any more. Never raises: what cannot be removed stays."""
    for call in (os.unlink, os.rmdir):
        with suppress(OSError):
            call(name, dir_fd=folder)
            return True
    return False
