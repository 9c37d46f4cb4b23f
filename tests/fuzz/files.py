"""Fuzz targets of files: headers of GGUF models, and blocks in shared memory."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

from gguf import GGUFReader

from shared.cache import host_files, naming
from shared.cache.checksum import checksum, sums
from shared.cache.host import HostBlocks
from shared.engine import gguf_header
from shared.errors import ModelError
from shared.messages import MAX_ID
from tests.fuzz.blocks import IDENTITY, block

LONGEST_ERROR = 8192
"""Characters. Whoever starts a worker reads it."""


def readable(error: ModelError) -> None:
    assert len(error.message) <= LONGEST_ERROR


@cache
def folder() -> Path:
    """A folder of this process, for all targets."""
    path = Path(tempfile.mkdtemp(prefix="trine-fuzz-files-"))
    atexit.register(shutil.rmtree, path, ignore_errors=True)
    return path


def seeds_of_gguf() -> list[bytes]:
    """Without the weights, for which the header leaves room: zeros do."""
    from tests import tiny_gguf

    whole = tiny_gguf.write(folder() / "seed.gguf").read_bytes()
    return [whole[: whole.rfind(b"output_norm") + 2000], whole]


def check_gguf(data: bytes) -> None:
    """What passes is read by the format's own reader, whose loops and sizes are the file's."""
    path = folder() / "x.gguf"
    path.write_bytes(data + bytes(70_000) if data[:4] == b"GGUF" else data)
    try:
        gguf_header.check(path)
    except ModelError as error:
        readable(error)
        return
    GGUFReader(path)


@cache
def _host() -> HostBlocks:
    host = HostBlocks(folder() / "host", IDENTITY, 1 << 20)
    assert host.open(), host.trouble
    atexit.register(host.close)
    return host


def seeds_of_host() -> list[bytes]:
    meta, payload = block()
    assert _host().put(meta, memoryview(payload))
    return [(folder() / "host" / meta.name.hex()).read_bytes(), b"worker" + bytes(26) + payload]


def check_host(data: bytes) -> None:
    """As a block's file; as one whose checksum is right, as a bug of ours could write it; and as a file's name."""
    meta, payload = block()
    host = _host()
    path = folder() / "host" / meta.name.hex()
    place = memoryview(bytearray(IDENTITY.block_bytes))
    path.unlink(missing_ok=True)
    path.write_bytes(data)
    (producer,) = host.get([(meta, place)])
    assert producer is None or bytes(place) == payload
    rest, body = data[: -IDENTITY.block_bytes], data[-IDENTITY.block_bytes :]
    label = meta.name + meta.parent + naming.pack_tokens(meta.token_ids) + rest
    path.write_bytes(checksum(label, sums(memoryview(body))) + rest + body)
    (producer,) = host.get([(meta, place)])
    assert producer is None or (len(producer) <= 4 * MAX_ID and bytes(place) == body)
    if (name := data[:64]) and b"\0" not in name and b"/" not in name and name not in (b".", b".."):
        _scanned(os.fsencode(folder() / "host") + b"/" + name)


def _scanned(path: bytes) -> None:
    with contextlib.suppress(OSError):
        with open(path, "wb"):
            pass
        handle = os.open(folder() / "host", os.O_RDONLY)
        try:
            host_files.scan(handle)
        finally:
            os.close(handle)
            os.unlink(path)
