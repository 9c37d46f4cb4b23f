"""Settings of the gateway."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, SecretStr

from shared.config import MiB, Settings


class GatewaySettings(Settings):
    host: str = "127.0.0.1"
    """The address to listen on; 0.0.0.0 for all of the machine's."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8000
    """0: any free one."""
    api_keys: SecretStr = SecretStr("")
    """Who may ask: entries `tenant:key` or `tenant:sha256:<hex>`, separated by commas or lines. See docs/gateway.md."""
    api_keys_file: str = ""
    """A file with such entries, one a line. Without any keys, everybody may ask, as the tenant `default`."""
    tokenizer: str = ""
    """A folder with `tokenizer.json` of `model`, for the texts in logprobs; `model` itself if that is such a folder."""
    request_s: Annotated[float, Field(gt=0)] = 600.0
    """A request that is not answered completely after so long ends with an error."""
    worker_wait_s: Annotated[float, Field(ge=0)] = 15.0
    """How long a running request waits while no decode worker of its model is heard."""
    max_body_bytes: Annotated[int, Field(ge=1024)] = 4 * MiB
    """Of a request. NATS may take less: its `max_payload`."""
    max_headers: Annotated[int, Field(ge=8)] = 100
    """Of a request."""
    max_header_bytes: Annotated[int, Field(ge=1024)] = 32 * 1024
    """Of all of a request's headers and its address together."""
    max_depth: Annotated[int, Field(ge=4, le=200)] = 32
    """Of nested lists and objects in a body."""
    max_messages: Annotated[int, Field(ge=1)] = 2048
    """Of a chat."""
    max_choices: Annotated[int, Field(ge=1, le=128)] = 16
    """Answers to one HTTP request: n for each prompt."""
    max_connections: Annotated[int, Field(ge=1)] = 2048
    """At once; more are closed."""
    read_s: Annotated[float, Field(gt=0)] = 20.0
    """In which a request's headers, and then its body, must have arrived."""
    write_s: Annotated[float, Field(gt=0)] = 20.0
    """A client that takes nothing of what is sent for so long is cut off."""
    keepalive_s: Annotated[float, Field(gt=0)] = 10.0
    """A streaming client that has heard nothing for so long hears a comment."""
    key_concurrency: Annotated[int, Field(ge=1)] = 256
    """Answers that one API key may wait for at once (everybody together, without keys)."""
    key_rate: Annotated[float, Field(ge=0)] = 0.0
    """Answers that one API key may ask for in a second, on average; 0: as many as it likes."""
    key_burst: Annotated[int, Field(ge=1)] = 32
    """So many of them at once."""
