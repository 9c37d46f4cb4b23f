"""Blocks that the processes of one machine share through memory, in front of the stream.

One file per block, in a folder on a file system in memory: a frame's head, then the block. A reader's bytes go straight
to where they are wanted and are checked there like bytes from the wire, except that the digest is `checksum`: whoever
can write into the folder could write into this process as well, so only accidents need be found. Head and body are one
part whatever the block's size; the limit of a part is the wire's.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from shared.cache import frames, naming
from shared.cache.checksum import checksum
from shared.cache.frames import BlockMeta, Frame
from shared.cache.host_folder import HostFolder
from shared.errors import FrameError
from shared.messages import Identity

COUNTERS = ("hit", "miss", "reject", "put", "exists", "put_failed", "evicted", "bytes_in", "bytes_out")


@dataclass(frozen=True, slots=True)
class Usage:
    """Of all processes: finished blocks, and bytes in whole pages, those being written included."""

    blocks: int = 0
    bytes: int = 0


class HostBlocks:
    """Blocks by name; several identities may share a folder. Blocking and thread-safe: call it from worker threads.

    Trouble with the file system is never raised: it is a miss, or a put that failed. Counters are a `BlockStore`'s:
    hit + miss = asked for, reject = damaged ones among the misses, put + exists + put_failed = offered.

    Raises ConfigError for an identity whose blocks cannot be framed.
    """

    def __init__(self, folder: Path, identity: Identity, max_bytes: int) -> None:
        frames.check_identity(identity)
        self._identity = identity
        self._folder = HostFolder(folder, max_bytes)
        self._sizes = range(identity.block_bytes + 1, identity.block_bytes + frames.MAX_HEAD + 1)
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._counting = threading.Lock()
        self.trouble = ""

    @property
    def available(self) -> bool:
        """This process takes part. If not after `open`, `trouble` says why."""
        return self._folder.joined

    @property
    def counters(self) -> Mapping[str, int]:
        with self._counting:
            return {**self._counters, "evicted": self._folder.evicted}

    def open(self) -> bool:
        """Take part; what a dead fleet left is removed first. False, and all is a miss, if that is not possible."""
        try:
            self._folder.join()
        except OSError as error:
            self.trouble = str(error)
        return self.available

    def close(self) -> None:
        """The last one out removes the folder."""
        self._folder.leave()

    def has(self, name: bytes) -> bool:
        try:
            return self._folder.holds(_file(name), self._sizes)
        except OSError:
            return False

    def longest(self, names: Sequence[bytes]) -> int:
        """How many of `names`, from the first on, are here; they count as used, also if only a tail is read next."""
        for length, name in enumerate(names):
            try:
                if not self._folder.touch(_file(name), self._sizes):
                    return length
            except OSError:
                return length
        return len(names)

    def put(self, meta: BlockMeta, payload: memoryview) -> bool:
        """True if the block is here now. Raises FrameError for a payload that contradicts the identity."""
        frames.check_block(meta, payload.nbytes, self._identity)
        name = _file(meta.name)
        try:
            if self._folder.touch(name, self._sizes):
                self._count(exists=1)
                return True
            (frame,) = frames.encode(meta, payload, self._identity, self._identity.block_bytes, checksum)
            self._folder.write(name, frame)
        except OSError:
            self._count(put_failed=1)
            return False
        self._count(put=1, bytes_out=payload.nbytes)
        return True

    def get(self, meta: BlockMeta, dest: memoryview) -> Frame | None:
        """The block's frame, its body being `dest`, which holds the block now; None for a miss, `dest` being garbage.

        Raises FrameError for a `dest` that is not as long as a block.
        """
        dest = dest.cast("B")
        if len(dest) != self._identity.block_bytes:
            raise FrameError(f"{len(dest)} bytes for a block of {self._identity.block_bytes}")
        frame = self._read(meta, dest)
        if frame is None:
            self._count(miss=1)
        else:
            self._count(hit=1, bytes_in=len(dest))
        return frame

    def _read(self, meta: BlockMeta, dest: memoryview) -> Frame | None:
        try:
            head = self._folder.read(_file(meta.name), self._sizes, dest)
            if head is None:
                return None
            frame = frames.decode_apart(head, dest)
            frames.verify(frame, meta, self._identity, 0, self._identity.block_bytes, checksum)
        except FrameError:
            self._count(reject=1)
            self.drop([meta.name])
            return None
        except OSError:
            return None
        return frame

    def drop(self, names: Iterable[bytes] | None = None) -> int:
        """Remove these blocks, or all, for every process; says how many there were."""
        try:
            if names is None:
                return self._folder.remove()
            return self._folder.remove(_file(name) for name in names if len(name) == naming.NAME_BYTES)
        except OSError:
            return 0

    def usage(self) -> Usage:
        """Looks at every file: not for the hot path."""
        try:
            found = self._folder.listing()
        except OSError:
            return Usage()
        return Usage(len(found.blocks), found.size)

    def _count(self, **changes: int) -> None:
        with self._counting:
            for name, change in changes.items():
                self._counters[name] += change


def _file(name: bytes) -> str:
    """Raises FileNotFoundError for a name that no block has: it can lead nowhere else."""
    if len(name) != naming.NAME_BYTES:
        raise FileNotFoundError(f"a name of {len(name)} bytes")
    return name.hex()
