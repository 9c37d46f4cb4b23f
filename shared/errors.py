"""The error tree. Every error that can reach a client has a stable `code` that travels on the wire."""

from __future__ import annotations


class TrineError(Exception):
    """Root of all errors raised on purpose.

    `code` is stable and machine-readable; `field` names the offending request field, if one is to blame.
    """

    code = "internal"

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class ConfigError(TrineError):
    """A setting, stream or peer that contradicts this process: refuse to start and say what differs."""

    code = "config"


class ModelError(TrineError):
    """Weights that cannot be loaded or cannot be run exactly."""

    code = "model_unsupported"


class RequestError(TrineError):
    """The request itself is at fault; sending it again unchanged cannot help."""

    code = "invalid_request"


class BadMessage(RequestError):
    """Bytes that are not a message: wrong encoding, too deep, not the expected type."""

    code = "bad_message"


class UnsupportedVersion(RequestError):
    code = "unsupported_version"


class TooLarge(RequestError):
    code = "too_large"


class InvalidField(RequestError):
    code = "invalid_field"


class EmptyPrompt(RequestError):
    code = "empty_prompt"


class ContextLengthExceeded(RequestError):
    code = "context_length_exceeded"


class UnknownModel(RequestError):
    code = "unknown_model"


class DuplicateRequest(RequestError):
    code = "duplicate_request"


class Unavailable(TrineError):
    """The service cannot answer now; the same request may succeed later."""

    code = "unavailable"


class Overloaded(Unavailable):
    """`retry_after_s`: when to try again, if anybody could tell."""

    code = "overloaded"
    retry_after_s: float | None = None


class DeadlineExceeded(Unavailable):
    code = "deadline_exceeded"


class NotKept(Unavailable):
    """Nothing is known of what was asked for: it never was, or was kept for a while and is gone."""

    code = "not_kept"


class Poison(TrineError):
    """Workers died while they were at work on the request, one after another: nobody tries it again."""

    code = "poison"


class BusError(TrineError):
    code = "bus"


class BusDisconnected(BusError):
    """No answer from NATS: not connected, no responders, or timed out. Retry after reconnecting."""

    code = "bus_disconnected"


class StreamMissing(BusError):
    """The stream or consumer does not exist (any more): re-create it, then retry."""

    code = "stream_missing"


class SequenceConflict(BusError):
    """An append expected another last sequence on its subject: somebody else wrote first."""

    code = "sequence_conflict"


class StreamFull(BusError):
    """The stream refuses new messages (discard new, or its ingest queue is full)."""

    code = "stream_full"


class PermissionDenied(BusError):
    """NATS does not let this user publish there, or subscribe. Trying again cannot help until its rights change."""

    code = "permission_denied"


class FrameError(TrineError):
    """A cache frame that is not what it claims to be. Readers treat it as a miss."""

    code = "bad_frame"


_BY_CODE: dict[str, type[TrineError]] = {}


def _register(cls: type[TrineError]) -> None:
    _BY_CODE[cls.code] = cls
    for sub in cls.__subclasses__():
        _register(sub)


_register(TrineError)


def from_code(code: str, message: str, field: str | None = None) -> TrineError:
    """The typed error for a code received on the wire (unknown codes become `TrineError`)."""
    error = _BY_CODE.get(code, TrineError)(message, field=field)
    error.code = code
    return error
