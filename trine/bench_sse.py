"""Server-sent events out of the bytes of an HTTP answer. Pure: no I/O, no clock."""

from __future__ import annotations

MAX_HEAD = 64 * 1024
MAX_EVENT = 16 << 20


class HttpError(Exception):
    """What the server said is not what was asked for: its status, or why it is not HTTP."""


class StreamParser:
    """The bytes of one HTTP/1.1 answer, as they come, to the data of its server-sent events. Pure.

    `done` when the answer has ended. Raises HttpError for a status other than 200, or what is no such answer.
    (RFC 9112; WHATWG HTML, 9.2 Server-sent events. Events with several data lines are not what OpenAI's API sends.)
    """

    def __init__(self) -> None:
        self.begun = False
        """Something has come."""
        self.done = False
        self.reusable = False
        """Another request may follow on this connection."""
        self._raw = bytearray()
        self._body = bytearray()
        self._in_head = True
        self._chunked = False
        self._left: int | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Data of the events that are complete now."""
        self.begun = True
        self._raw += data
        if self._in_head:
            if (end := self._raw.find(b"\r\n\r\n")) < 0:
                if len(self._raw) > MAX_HEAD:
                    raise HttpError("endless headers")
                return []
            head = bytes(self._raw[:end])
            del self._raw[: end + 4]
            self._read_head(head)
        if self._chunked:
            self._unchunk()
        else:
            self._body += self._raw
            if self._left is not None:
                self._left -= len(self._raw)
                self.done = self._left <= 0
            self._raw.clear()
        return self._events()

    def end(self) -> None:
        """The connection was closed. Raises HttpError when that is not how this answer ends."""
        if not self.done and (self._in_head or self._chunked or self._left is not None):
            raise HttpError("cut off")
        self.done = True

    def _read_head(self, head: bytes) -> None:
        lines = head.decode("latin-1").split("\r\n")
        status = lines[0].split(" ", 2)
        if len(status) < 2 or not status[0].startswith("HTTP/1."):
            raise HttpError("not HTTP")
        if status[1] != "200":
            raise HttpError(status[1])
        fields = {k.strip().lower(): v.strip() for k, _, v in (line.partition(":") for line in lines[1:])}
        self._in_head = False
        self._chunked = "chunked" in fields.get("transfer-encoding", "").lower()
        length = fields.get("content-length", "")
        self._left = int(length) if length.isdecimal() and not self._chunked else None
        self.reusable = fields.get("connection", "").lower() != "close" and (self._chunked or self._left is not None)

    def _unchunk(self) -> None:
        raw, at = self._raw, 0
        while (line := raw.find(b"\r\n", at)) >= 0:
            try:
                size = int(raw[at:line].partition(b";")[0], 16)
            except ValueError:
                raise HttpError("not a chunk") from None
            end = line + 2 + size
            if len(raw) < end + 2:
                break
            self._body += raw[line + 2 : end]
            at = end + 2
            if size == 0:
                self.done = True
                break
        del raw[:at]

    def _events(self) -> list[bytes]:
        if len(self._body) > MAX_EVENT:
            raise HttpError("an endless event")
        if b"\r" in self._body:
            self._body = self._body.replace(b"\r\n", b"\n")
        *blocks, rest = self._body.split(b"\n\n")
        self._body = rest
        lines = (line for block in blocks for line in block.split(b"\n"))
        return [bytes(line[5:]).strip() for line in lines if line.startswith(b"data:")]
