"""What is fuzzed: for each family of decoders, valid bytes to start from and a check that holds for any bytes.

A check returns when the bytes gave a value that says the same when it is encoded again, or the decoder's typed error.
Whatever else happens is a bug and is raised.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

import msgpack

TARGETS = {
    "messages": "messages", "bodies": "schemas", "frames": "blocks", "pages": "blocks", "host": "files",
    "gguf": "files", "weights": "weights", "wire": "protocol", "subjects": "protocol",
}  # fmt: skip
"""Each with the module here that has `seeds_of_…` and `check_…`: imported when it is needed, as some take long."""


@dataclass(frozen=True)
class Target:
    seeds: Callable[[], Sequence[bytes]]
    check: Callable[[bytes], None]


def target(name: str) -> Target:
    module = import_module(f"tests.fuzz.{TARGETS[name]}")
    return Target(getattr(module, f"seeds_of_{name}"), getattr(module, f"check_{name}"))


BOMBS = (
    b"\x91" * 5000, b"\x81\xa1v" * 3000,
    b"[" * 20_000, b'{"id":' * 5000, b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01", b"\xd6\xff\0\0\0\0",
    b"\xcf" + b"\xff" * 8, b"\xcb\x7f\xf8" + bytes(6), b"9" * 5000, b"TRKV\xff\xff\xff\xff",
    msgpack.packb({"shape": [2**31, 2**31]}), struct.pack("<Q", 2**63),
)  # fmt: skip
"""Nesting without end, lengths beyond all memory, numbers beyond all words: spliced into what is valid."""
