"""Blocks that the processes of one machine share through memory, in front of the stream.

One file per block, in a folder on a file system in memory. A reader's bytes go straight to where they are wanted and
are checked there. Whoever can write into the folder could write into this process as well, so only accidents need be
found, by `checksum`. A file:

    checksum (32) | the producer's name, UTF-8 | zeros up to a multiple of 64 | the block

The checksum covers all that follows it, and the block's name, parent and tokens.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from shared.cache import frames, naming
from shared.cache.checksum import DIGEST_BYTES, Sums, checksum, sums
from shared.cache.frames import BlockMeta
from shared.cache.host_folder import HostFolder
from shared.cache.host_read import MAX_FILES, Wanted
from shared.errors import FrameError
from shared.messages import MAX_ID, Identity

COUNTERS = ("hit", "miss", "reject", "put", "exists", "put_failed", "evicted", "bytes_in", "bytes_out")
# Blocks in the pool's memory start on this too. Some processors copy at a third of their speed to an address whose
# offset in a page is a few bytes beyond the source's.
_ALIGN = 64
_MAX_HEAD = DIGEST_BYTES + 4 * MAX_ID + _ALIGN


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
        self._sizes = range(identity.block_bytes + _ALIGN, identity.block_bytes + _MAX_HEAD, _ALIGN)
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

    @property
    def held_bytes(self) -> int:
        """Of all processes; never less than it is. 0 without the folder."""
        try:
            return self._folder.held_bytes
        except OSError:
            return 0

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
        """True if the block is here now. Raises FrameError for a block that contradicts the identity or its name."""
        frames.check_block(meta, payload.nbytes, self._identity)
        if meta.name != naming.child(meta.parent, meta.token_ids):
            raise FrameError("the name does not follow from parent and tokens")
        name = _file(meta.name)
        payload = payload.cast("B")
        try:
            if self._folder.touch(name, self._sizes):
                self._count(exists=1)
                return True
            self._folder.write(name, (_head(meta, sums(payload)), payload))
        except OSError:
            self._count(put_failed=1)
            return False
        self._count(put=1, bytes_out=len(payload))
        return True

    def get(self, blocks: Sequence[tuple[BlockMeta, memoryview]]) -> list[str | None]:
        """Blocks, each into its place: who computed it, or None for a miss, the place being garbage.

        Faster the more blocks are asked for at once, up to MAX_FILES; two threads share much to copy.
        Raises FrameError for a place that is not as long as a block.
        """
        for _, place in blocks:
            if place.nbytes != self._identity.block_bytes:
                raise FrameError(f"{place.nbytes} bytes for a block of {self._identity.block_bytes}")
        found: list[str | None] = []
        for start in range(0, len(blocks), MAX_FILES):
            found += self._read(blocks[start : start + MAX_FILES])
        hits = len(found) - found.count(None)
        self._count(hit=hits, miss=len(found) - hits, bytes_in=hits * self._identity.block_bytes)
        return found

    def _read(self, blocks: Sequence[tuple[BlockMeta, memoryview]]) -> list[str | None]:
        files = [Wanted(_file(meta.name), place.cast("B")) for meta, place in blocks]
        with suppress(OSError):
            self._folder.read(files, self._sizes)
        found: list[str | None] = []
        for (meta, _), file in zip(blocks, files, strict=True):
            try:
                found.append(_producer(meta, file))
            except FrameError:
                self._count(reject=1)
                self.drop([meta.name])
                found.append(None)
        return found

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
    """Empty, as no file's name is, for a name that no block has: it can lead nowhere else."""
    return name.hex() if len(name) == naming.NAME_BYTES else ""


def _head(meta: BlockMeta, body: Sums) -> bytes:
    """What stands before the block in its file."""
    producer = meta.producer.encode()
    rest = producer + bytes(-(DIGEST_BYTES + len(producer)) % _ALIGN)
    return checksum(_label(meta, rest), body) + rest


def _producer(meta: BlockMeta, file: Wanted) -> str | None:
    """Who computed the block that was read; None if it is not there. Raises FrameError if it is not as it should be."""
    if file.bad:
        raise FrameError("no plain file, or one of another size")
    if file.sums is None:
        return None
    rest = bytes(file.head[DIGEST_BYTES:])
    if checksum(_label(meta, rest), file.sums) != file.head[:DIGEST_BYTES]:
        raise FrameError("the file is damaged, or another block's")
    try:
        return rest.rstrip(b"\0").decode()
    except UnicodeDecodeError:
        raise FrameError("the producer's name is no text") from None


def _label(meta: BlockMeta, rest: bytes) -> bytes:
    return meta.name + meta.parent + naming.pack_tokens(meta.token_ids) + rest
