"""Settings common to all workers. One prefix (`TRINE_`); CLI flags, environment and compose use the same names."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, SettingsConfigDict

DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_NATS_URL = "nats://127.0.0.1:4222"
MiB = 1 << 20
SHARED_MEMORY = Path("/dev/shm")

KvCodec = Literal["none", "int8", "fp8_e4m3", "int4"]
Weights = Literal["native", "int8"]
MIN_INT4_BLOCK = 4
"""int4 keeps a scale and a zero point per key channel and block: with fewer tokens these cost more than they save."""


def cache_home() -> Path:
    """Where converted weights are kept: $TRINE_CACHE_DIR, else $XDG_CACHE_HOME/trine, else ~/.cache/trine."""
    if explicit := os.environ.get("TRINE_CACHE_DIR"):
        return Path(explicit)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trine"


class Settings(BaseSettings):
    """What every worker needs to find the bus, its peers and its model."""

    model_config = SettingsConfigDict(env_prefix="TRINE_", extra="ignore", frozen=True)

    nats_url: str = DEFAULT_NATS_URL
    """The NATS server, as nats://HOST:PORT or tls://HOST:PORT; several of a cluster, separated by commas."""
    nats_user: str = ""
    """Who this process is for the NATS server, with `nats_password`. See docs/security.md."""
    nats_password: SecretStr = SecretStr("")
    """`nats_user`'s. It is never logged."""
    nats_nkey_seed_file: str = ""
    """Instead of both: a file with a user's nkey seed, which signs what the server asks to be signed."""
    nats_creds: str = ""
    """Instead of all three: a user's credentials file (.creds), a JWT and its seed."""
    nats_ca: str = ""
    """A file of certificates by which the server proves who it is. Given, nothing is said without TLS."""
    nats_cert: str = ""
    """A file with this process's own certificate, for servers that ask for one; `nats_key` is a file with its key."""
    nats_key: str = ""
    """The key of `nats_cert`."""
    nats_inbox: Annotated[str, Field(pattern=r"^(_INBOX(\.[A-Za-z0-9_-]+)+)?$")] = ""
    """The subjects below which answers are heard; `_INBOX.<user>` when empty."""
    nats_replicas: Annotated[int, Field(ge=1, le=5)] = 1
    """Servers of a NATS cluster that keep each stream but that of blocks. All workers of a model must agree."""
    model: str = DEFAULT_MODEL
    """A local folder, a GGUF file, a hub id, or the name of the built-in default."""
    model_name: str = ""
    """The name clients ask for; taken from `model` when empty."""
    worker: Annotated[str, Field(max_length=128)] = ""
    """Unique among live workers; drawn when empty."""
    threads: Annotated[int, Field(ge=0)] = 0
    """CPU threads of a forward pass; 0: as many as there are cores that no other worker of this machine computes on,
    looked at before each (a drafter: as many as torch likes)."""
    block_size: Annotated[int, Field(ge=1, le=1024)] = 16
    """Tokens per KV block. All workers of a model must agree."""
    kv_blocks: Annotated[int, Field(ge=0)] = 0
    """KV blocks in this worker's pool; 0 derives it from `kv_memory_mb`."""
    kv_memory_mb: Annotated[int, Field(ge=1)] = 1024
    """Memory of this worker's KV pool, in MiB. On a CPU it is taken at the start where machine and container
    have eight times as much at hand, and otherwise as it is used."""
    kv_codec: KvCodec = "none"
    """How KV is stored, in pools and in the cache. All workers of a model must agree. See docs/kv-codecs.md."""
    kv_check: Literal["refuse", "warn", "off"] = "refuse"
    """What to do with a codec that ruins the model: measured once when a worker starts, before it joins."""
    weights: Weights = "native"
    """int8: linear layers multiply in 8 bits (CPU). All workers of a model must agree."""
    cache_bytes: Annotated[int, Field(ge=MiB)] = 1024 * MiB
    """Size of the shared prefix cache (the KV stream's max_bytes)."""
    host_cache_mb: Annotated[int, Field(ge=0)] = 1024
    """Memory through which the workers of one machine share blocks, in MiB for all of them; 0: through NATS alone."""
    host_cache_dir: str = ""
    """A folder in memory for that; when empty, one of its own for each NATS address."""
    max_queued: Annotated[int, Field(ge=1)] = 1000
    """Requests that wait or are being answered; who asks beyond that is told `overloaded`, and when to ask again."""
    ack_wait_s: Annotated[float, Field(gt=0)] = 5.0
    """A worker silent for so long has its work given to another."""
    beat_s: Annotated[float, Field(gt=0)] = 1.0
    """So often a worker says that it lives."""
    peer_timeout_s: Annotated[float, Field(gt=0)] = 3.5
    """A peer whose beats stopped for so long counts as dead."""
    drain_s: Annotated[float, Field(ge=0)] = 30.0
    """After SIGTERM, how long running work may take to finish before it is handed back."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is logged."""
    log_format: Literal["auto", "json", "console"] = "auto"
    """auto: for people on a terminal, else JSON."""
    otlp_endpoint: Annotated[str, Field(pattern=r"^(https?://\S+)?$")] = ""
    """Where traces go: an OpenTelemetry collector's address for OTLP over HTTP, such as http://127.0.0.1:4318. Empty:
    where OTEL_EXPORTER_OTLP_ENDPOINT says, else nowhere. See docs/observability.md."""

    @field_validator("kv_codec")
    @classmethod
    def _room_for_scales(cls, codec: str, info: ValidationInfo) -> str:
        if codec == "int4" and info.data.get("block_size", MIN_INT4_BLOCK) < MIN_INT4_BLOCK:
            reason = "int4 needs a block size of at least {least}, and 16 is best"
            raise PydanticCustomError("block_size", reason, {"least": MIN_INT4_BLOCK})
        return codec

    @property
    def served_name(self) -> str:
        return self.model_name or Path(self.model).name.removesuffix(".gguf").lower()


def shared_memory() -> Path:
    """Where processes of this machine share files that are in memory."""
    return SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())


def worker_name(settings: Settings, role: str) -> str:
    return settings.worker or f"{role}-{secrets.token_hex(3)}"
