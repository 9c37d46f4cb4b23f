"""Every message that crosses the bus, typed and versioned.

Clients may send `Generate` as JSON or msgpack and are answered in the same encoding; everything between
workers is msgpack (`shared.codec`). Unknown fields are refused: a field that we do not know may be one that
was meant to change the answer.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from shared.tenants import MAX_KEY, TENANT_PATTERN

PROTOCOL_VERSION = 1
MAX_ID = 128
MAX_STOPS = 16
MAX_STOP_CHARS = 256
MAX_DRAFT = 64
MAX_BATCH = 1024
"""Sequences in one step of a decode worker, and so in one ask for drafts."""
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
TokenIds = list[Annotated[int, Field(ge=0, le=2**31 - 1)]]


class Message(BaseModel):
    """Base of all wire messages. `v` is the protocol version, `type` the message's own tag."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, ser_json_inf_nan="null")
    max_bytes: ClassVar[int] = 1 << 20

    v: int = PROTOCOL_VERSION


class ChatMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    role: Literal["system", "user", "assistant", "tool"]
    content: str


class Sampling(BaseModel):
    """How tokens are chosen. At temperature 0 the most likely token is taken and the rest has no effect."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    temperature: Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Keep the k most likely tokens; 0 keeps all."""
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 0.0
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    """Drawn once and returned with the answer when unset."""


class Generate(Message):
    """A client's request. Exactly one of `prompt` (raw text), `messages` (chat), `token_ids`."""

    max_bytes = 4 << 20

    type: Literal["generate"] = "generate"
    id: RequestId
    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    token_ids: list[int] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: str | list[str] | None = None
    cache_salt: Salt | None = None
    """Cached KV is shared only with requests of the same tenant that have the same salt."""
    deadline_ms: Annotated[int, Field(ge=1)] | None = None
    """Give up this long after the request was queued; the worker's default when unset."""

    @field_validator("stop")
    @classmethod
    def _stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings")
        if any(not 0 < len(s) <= MAX_STOP_CHARS for s in stops):
            raise ValueError(f"a stop string has 1 to {MAX_STOP_CHARS} characters")
        return value

    @model_validator(mode="after")
    def _one_prompt(self) -> Generate:
        given = [n for n in ("prompt", "messages", "token_ids") if getattr(self, n) is not None]
        if len(given) > 1:
            raise ValueError(f"give one of prompt, messages, token_ids, not {' and '.join(given)}")
        self.sampling  # noqa: B018 - validates the sampling fields with their own bounds
        return self

    @property
    def sampling(self) -> Sampling:
        names = ("temperature", "top_k", "top_p", "min_p", "seed")
        return Sampling(**{n: v for n in names if (v := getattr(self, n)) is not None})

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())


class Usage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose KV existed before this request, in the worker's pool or in the shared cache."""
    completion_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Timings(BaseModel):
    """Milliseconds, as the decode worker saw them."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    queue_ms: float = 0.0
    ttft_ms: float = 0.0
    """From taking the request to its first token."""
    tpot_ms: float = 0.0
    """Mean time per output token after the first."""
    total_ms: float = 0.0


class ServedBy(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    decode: str = ""
    prefill: Annotated[list[str], Field(max_length=MAX_SERVERS)] = []
    drafter: Annotated[list[str], Field(max_length=MAX_SERVERS)] = []


class Event(Message):
    """Base of what a request's event subject carries.

    `attempt` counts deliveries of the request; of two events with one index the higher attempt counts.
    """

    id: str
    attempt: int = 1


class Tokens(Event):
    """Generated tokens; `index` is the position of the first of them in the completion.

    `text` is what these tokens add to the visible text; it may lag behind while a character or a possible
    stop string is incomplete.
    """

    type: Literal["tokens"] = "tokens"
    index: Annotated[int, Field(ge=0)]
    token_ids: TokenIds
    text: str = ""


class Finished(Event):
    type: Literal["finished"] = "finished"
    reason: Literal["stop", "length", "cancelled"]
    seed: int
    usage: Usage
    timings: Timings
    served_by: ServedBy


class Failed(Event):
    type: Literal["failed"] = "failed"
    code: str
    message: str
    field: str | None = None


class PrefillJob(Message):
    """Compute the KV of these tokens (a whole number of blocks) and publish the blocks."""

    max_bytes = 8 << 20

    type: Literal["prefill"] = "prefill"
    request: RequestKey
    tenant: Tenant
    salt: Annotated[str, Field(max_length=MAX_SALT)] = ""
    public_blocks: Annotated[int, Field(ge=0)] = 0
    """So many blocks at the beginning are everybody's."""
    fingerprint: RequestId
    token_ids: TokenIds
    budget_ms: Annotated[int, Field(ge=1)]


class Again(Message):
    """A client that may not read the event stream asks for its events with sequence > `after`."""

    type: Literal["again"] = "again"
    after: Annotated[int, Field(ge=0)]


class MissedEvent(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    seq: Annotated[int, Field(ge=1)]
    request: Annotated[str, Field(max_length=32)]
    """Sequence of the request it answers, as in the event's header."""
    data: bytes


class Missed(Message):
    """The answer. `more`: ask again after the last of these."""

    max_bytes = 4 << 20

    type: Literal["missed"] = "missed"
    events: Annotated[list[MissedEvent], Field(max_length=1 << 20)]
    more: bool


class HeldBlocks(Message):
    """What a decode worker's pool holds; see `shared.cache.summary`. Not in the beat: tenants may hear beats."""

    type: Literal["held"] = "held"
    worker: WorkerName
    rate: Annotated[int, Field(ge=0, le=32)]
    """One name in 2**rate is listed."""
    names: Annotated[bytes, Field(max_length=8 * MAX_HELD)]


class Handover(Message):
    """A decode worker offers a request that it has pulled to one that holds the prompt's prefix."""

    max_bytes = 2 * Generate.max_bytes

    type: Literal["handover"] = "handover"
    worker: WorkerName
    handle: Annotated[str, Field(max_length=1024)]
    """What acks the request in the queue."""
    subject: Annotated[str, Field(max_length=1024)]
    """Where the request came in; tells priority and tenant."""
    request: bytes


class HandoverReply(Message):
    type: Literal["handover_reply"] = "handover_reply"
    taken: bool


class Drop(Message):
    """An operator's order to forget cached blocks: those of a scope (see `naming.Lineage`), or all."""

    type: Literal["drop"] = "drop"
    scope: Annotated[str, Field(min_length=1, max_length=MAX_ID)] | None = None


class Dropped(Message):
    """A worker has done so."""

    type: Literal["dropped"] = "dropped"
    worker: WorkerName
    pool_blocks: int
    """Blocks that its pool held under a name. Neither pool nor host tier know scopes apart: all are forgotten."""
    host_blocks: int
    """Blocks that it removed from the host tier."""


class DraftItem(BaseModel):
    """One sequence that wants drafts. The drafter is told the tokens after the `base` ones it has already."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    session: RequestKey
    base: Annotated[int, Field(ge=0)]
    token_ids: TokenIds
    k: Annotated[int, Field(ge=1, le=MAX_DRAFT)]
    sampling: Sampling


class DraftAsk(Message):
    max_bytes = 8 << 20

    type: Literal["draft_ask"] = "draft_ask"
    worker: WorkerName
    wait_ms: Annotated[float, Field(gt=0, le=60_000, allow_inf_nan=False)]
    """How long the asker will wait; drafts that would come later are not worth making."""
    items: Annotated[list[DraftItem], Field(max_length=MAX_BATCH)]
    ended: Sessions = []
    """Sessions that will not be asked about again."""


class Draft(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    session: RequestKey
    position: Annotated[int, Field(ge=0)]
    """Length of the sequence these tokens continue."""
    token_ids: Annotated[TokenIds, Field(max_length=MAX_DRAFT)]
    source: RequestId


class Drafts(Message):
    type: Literal["drafts"] = "drafts"
    worker: WorkerName
    drafts: Annotated[list[Draft], Field(max_length=MAX_BATCH)]
    unknown: Sessions = []
    """Sessions whose base the drafter does not have; send them from 0."""


class Identity(BaseModel):
    """What two workers must have in common before one may use the other's blocks."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    fingerprint: str
    codec: str
    block_size: int
    block_bytes: int
    layers: Annotated[int, Field(ge=1)] = 1
    """Layers in a block, one after another."""

    def differences(self, other: Identity) -> list[str]:
        mine, theirs = self.model_dump(), other.model_dump()
        return [f"{k}: {mine[k]} here, {theirs[k]} there" for k in mine if mine[k] != theirs[k]]


class Load(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    running: int = 0
    waiting: int = 0
    free_blocks: int = 0


class Beat(Message):
    type: Literal["beat"] = "beat"
    role: Literal["prefill", "decode", "drafter"]
    worker: WorkerName
    identity: Identity | None = None
    """None for a drafter: it shares tokens, never blocks."""
    vocabulary: str = ""
    """Digest of the tokenizer's vocabulary; drafts are only asked of a drafter with the same one."""
    draining: bool = False
    load: Load = Load()
    counters: Annotated[dict[RequestId, int], Field(max_length=MAX_COUNTERS)] = {}


class Claim(Message):
    """An entry of the claim log: whose claims have ended, and which blocks this worker is about to compute.

    The number that the log gives it names the claim. See `shared.flights`.
    """

    max_bytes = 512 << 10

    type: Literal["claim"] = "claim"
    worker: WorkerName
    ended: Annotated[list[Annotated[int, Field(ge=1, le=2**63 - 1)]], Field(max_length=MAX_ENDED)] = []
    """Claims that hold no longer: this worker's own, or those of one that is dead or does not get on."""
    names: Annotated[bytes, Field(max_length=MAX_CLAIMED * CLAIM_NAME)] = b""
    """The first `CLAIM_NAME` bytes of the name of each block, in order, one after the other."""

    @field_validator("names")
    @classmethod
    def _whole_names(cls, value: bytes) -> bytes:
        if len(value) % CLAIM_NAME:
            raise ValueError(f"not a whole number of names of {CLAIM_NAME} bytes")
        return value


MESSAGE_TYPES: tuple[type[Message], ...] = (
    Generate, Tokens, Finished, Failed, Again, Missed, PrefillJob, Claim, HeldBlocks, Handover, HandoverReply,
    Drop, Dropped, DraftAsk, Drafts, Beat,
)  # fmt: skip
