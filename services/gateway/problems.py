"""Errors in the shape that OpenAI's clients know: a status, and `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import math
from typing import Any

from shared.errors import (
    BusError,
    ContextLengthExceeded,
    DeadlineExceeded,
    InvalidField,
    NotKept,
    Overloaded,
    RequestError,
    TooLarge,
    TrineError,
    Unavailable,
    UnknownModel,
)

RETRY_S = 1
_CLOSE = {"connection": "close"}
"""The rest of the body would be read, and thrown away, for as long as it comes."""
_CODES: tuple[tuple[type[TrineError], int, str | None], ...] = (
    (TooLarge, 413, "request_too_large"),
    (UnknownModel, 404, "model_not_found"),
    (ContextLengthExceeded, 400, "context_length_exceeded"),
    (NotKept, 404, "not_kept"),
    (RequestError, 400, None),
    (DeadlineExceeded, 504, None),
    (Overloaded, 503, None),
    (Unavailable, 503, None),
    (BusError, 503, "unavailable"),
)
"""The first that fits: status and, where it differs from ours, the code."""
_FIELDS = {"token_ids": "prompt"}
"""Fields that clients of the gateway know by another name."""


class Problem(Exception):
    """What an HTTP client is told. `retry_after` is in seconds."""

    def __init__(
        self, status: int, message: str, code: str | None, *, param: str | None = None, retry_after: int | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def type(self) -> str:
        if self.status == 429:
            return "rate_limit_error"
        if self.status == 401:
            return "authentication_error"
        return "invalid_request_error" if self.status < 500 else "server_error"

    @property
    def headers(self) -> dict[str, str]:
        retry = {} if self.retry_after is None else {"retry-after": str(self.retry_after)}
        more = {401: {"www-authenticate": "Bearer"}, 408: _CLOSE, 413: _CLOSE}
        return {**retry, **more.get(self.status, {})}


def problem_of(error: TrineError, form: str = "guided") -> Problem:
    """What an error of ours is over HTTP. `form`: the field that asked for the answer's form."""
    if isinstance(error, InvalidField) and error.field == "tenant":
        # Not the asker's doing: keys of tenants are of no use on a NATS server that lets everybody in.
        return Problem(500, f"the gateway is not set up for tenants: {error.message}", "tenants_unavailable")
    for kind, status, code in _CODES:
        if isinstance(error, kind):
            wait = error.retry_after_s if isinstance(error, Overloaded) else None
            retry = math.ceil(wait or RETRY_S) if status == 503 else None
            param, told = _param(error), error.message
            if param is not None and param.split(".")[0] == "guided":
                param, told = form, f"{form}: {told.removeprefix(f'{param}: ')}"
            return Problem(status, told, code or error.code, param=param, retry_after=retry)
    return Problem(500, error.message, error.code)


def _param(error: TrineError) -> str | None:
    if error.field is None:
        return None
    first, dot, rest = error.field.partition(".")
    return _FIELDS.get(first, first) + dot + rest
