"""What a worker and its grammar compiler say to each other through pipes: msgpack, each message after its length."""

from __future__ import annotations

import os
import select
import struct
import time
from typing import Any

import msgpack

MAX_FRAME = 64 << 20
_LENGTH = struct.Struct("<I")


def packed(message: Any) -> bytes:
    data: bytes = msgpack.packb(message, use_bin_type=True)
    return _LENGTH.pack(len(data)) + data


def send(descriptor: int, data: bytes, deadline: float) -> None:
    """What `packed` gave; the descriptor must not block. Raises OSError when the other side is gone, TimeoutError when
    nothing of it went out in time, EOFError when a part did: what is sent after that makes no sense."""
    rest = memoryview(data)
    while rest:
        left = deadline - time.monotonic()
        if left <= 0 and len(rest) == len(data):
            raise TimeoutError
        if left <= 0:
            raise EOFError("only a part of a message could be sent")
        if select.select([], [descriptor], [], min(left, 60.0))[1]:
            rest = rest[os.write(descriptor, rest) :]


def receive(descriptor: int, deadline: float) -> Any:
    """The next message. `deadline`: in monotonic seconds.

    Raises TimeoutError when none has begun in time, EOFError when the other side is gone or says what makes no sense: a
    message that is not whole in time, for example.
    """
    (length,) = _LENGTH.unpack(_exactly(descriptor, _LENGTH.size, deadline))
    if length > MAX_FRAME:
        raise EOFError(f"a message of {length} bytes")
    try:
        return msgpack.unpackb(_exactly(descriptor, length, deadline), raw=False)
    except TimeoutError:
        raise EOFError("only a part of a message has come") from None
    except (ValueError, msgpack.UnpackException) as error:
        raise EOFError(f"not a message: {error}") from None


def _exactly(descriptor: int, count: int, deadline: float) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise EOFError("only a part of a message has come") if parts else TimeoutError
        if select.select([descriptor], [], [], min(left, 60.0))[0]:
            part = os.read(descriptor, min(count - len(parts), 1 << 20))
            if not part:
                raise EOFError("the pipe has been closed")
            parts += part
    return bytes(parts)
