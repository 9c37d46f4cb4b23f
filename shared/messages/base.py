"""Names, bounds and the base of all messages."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from shared.tenants import MAX_KEY, TENANT_PATTERN

PROTOCOL_VERSION = 1
MAX_ID = 128
MAX_NUMBER = 2**53
"""Of tokens or milliseconds: what every JSON reader can tell from its neighbours."""
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_DRAFT = 64
MAX_BATCH = 1024
"""Sequences in one step of a decode worker, and so in one ask for drafts."""
MAX_SESSION_TOKENS = 1 << 17
"""Nobody drafts for a longer sequence: bounds what an asker can make a drafter hold, and what it is told at once."""
MAX_HIDDEN = 32_768
"""Channels of a hidden state that a message carries."""
MAX_COUNTERS = 256
MAX_HELD = 2048
"""Blocks that a beat lists, about."""
MAX_SERVERS = 64
"""Workers of one role that an answer names."""
CLAIM_NAME = 16
"""Bytes of a block's name in a claim: enough to tell blocks apart, and only who computes them hangs on it."""
MAX_CLAIMED = 16_384
MAX_ENDED = 1024
DEFAULT_MAX_TOKENS = 256

RequestId = Annotated[str, Field(min_length=1, max_length=MAX_ID)]
RequestKey = Annotated[str, Field(min_length=1, max_length=MAX_KEY)]
"""`tenants.request_key`: names a request among those of all tenants."""
Tenant = Annotated[str, Field(pattern=TENANT_PATTERN)]
MAX_SALT = 256
Salt = Annotated[str, Field(min_length=1, max_length=MAX_SALT)]
WorkerName = RequestId
Sessions = Annotated[list[RequestKey], Field(max_length=MAX_BATCH)]


class Message(BaseModel):
    """Base of all wire messages. `v` is the protocol version, `type` the message's own tag."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, ser_json_inf_nan="null")
    max_bytes: ClassVar[int] = 1 << 20

    v: int = PROTOCOL_VERSION
