"""Every message that crosses the bus, typed and versioned.

Clients may send `Generate` as JSON or msgpack and are answered in the same encoding; everything between
workers is msgpack (`shared.codec`). Unknown fields are refused: a field that we do not know may be one that
was meant to change the answer.
"""

from __future__ import annotations

from shared.messages.attempts import Attempt, DeadLetter
from shared.messages.base import (
    CLAIM_NAME,
    DEFAULT_MAX_TOKENS,
    MAX_BATCH,
    MAX_CLAIMED,
    MAX_COUNTERS,
    MAX_DRAFT,
    MAX_ENDED,
    MAX_HELD,
    MAX_HIDDEN,
    MAX_ID,
    MAX_SALT,
    MAX_SERVERS,
    MAX_SESSION_TOKENS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    PROTOCOL_VERSION,
    Message,
    RequestId,
    RequestKey,
    Salt,
    Sessions,
    Tenant,
    WorkerName,
)
from shared.messages.beats import Beat, Identity, Load
from shared.messages.blocks import Claim, Drop, Dropped, Handover, HandoverReply, HeldBlocks, PrefillJob
from shared.messages.drafts import Draft, DraftAsk, DraftItem, Drafts
from shared.messages.events import Again, Event, Failed, Finished, Missed, MissedEvent, ServedBy, Timings, Tokens, Usage
from shared.messages.guided import Guided, Tag, Tags
from shared.messages.requests import ChatMessage, Generate, Room
from shared.messages.tools import Function, FunctionCall, Tool, ToolCall
from shared.sampling.fields import Sampling

__all__ = [
    "CLAIM_NAME",
    "DEFAULT_MAX_TOKENS",
    "MAX_BATCH",
    "MAX_CLAIMED",
    "MAX_COUNTERS",
    "MAX_DRAFT",
    "MAX_ENDED",
    "MAX_HELD",
    "MAX_HIDDEN",
    "MAX_ID",
    "MAX_SALT",
    "MAX_SERVERS",
    "MAX_SESSION_TOKENS",
    "MAX_STOPS",
    "MAX_STOP_CHARS",
    "MESSAGE_TYPES",
    "PROTOCOL_VERSION",
    "Again",
    "Attempt",
    "Beat",
    "ChatMessage",
    "Claim",
    "DeadLetter",
    "Draft",
    "DraftAsk",
    "DraftItem",
    "Drafts",
    "Drop",
    "Dropped",
    "Event",
    "Failed",
    "Finished",
    "Function",
    "FunctionCall",
    "Generate",
    "Guided",
    "Handover",
    "HandoverReply",
    "HeldBlocks",
    "Identity",
    "Load",
    "Message",
    "Missed",
    "MissedEvent",
    "PrefillJob",
    "RequestId",
    "RequestKey",
    "Room",
    "Salt",
    "Sampling",
    "ServedBy",
    "Sessions",
    "Tag",
    "Tags",
    "Tenant",
    "Timings",
    "Tokens",
    "Tool",
    "ToolCall",
    "Usage",
    "WorkerName",
]

MESSAGE_TYPES: tuple[type[Message], ...] = (
    Generate, Tokens, Finished, Failed, Again, Missed, PrefillJob, Claim, HeldBlocks, Handover, HandoverReply,
    Drop, Dropped, DraftAsk, Drafts, Beat, Attempt, DeadLetter, Room,
)  # fmt: skip
