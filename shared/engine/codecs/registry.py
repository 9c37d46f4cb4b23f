"""Codecs by name."""

from __future__ import annotations

from shared.engine.codecs.base import Codec
from shared.engine.codecs.int4 import Int4
from shared.engine.codecs.none import Raw
from shared.engine.codecs.scaled import Fp8E4M3, Int8
from shared.errors import ConfigError

CODECS: dict[str, Codec] = {codec.name: codec for codec in (Raw(), Int8(), Fp8E4M3(), Int4())}


def codec_of(name: str) -> Codec:
    """Raises ConfigError for a name that no codec has."""
    if name not in CODECS:
        raise ConfigError(f"no KV codec is called {name!r}; there are {', '.join(CODECS)}", field="kv_codec")
    return CODECS[name]
