"""Prefixes that an operator has made public: their blocks are shared by all tenants."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from services.decode.request import tokenise
from shared.cache import naming
from shared.cache.naming import Lineage
from shared.engine.base import ModelInfo
from shared.errors import ConfigError, RequestError
from shared.messages import ChatMessage, Generate, Identity
from shared.tokenizer import Tokenizer

MAX_FILE = 64 << 20


class PublicPrefix(BaseModel):
    """Exactly one of them, as in a request: raw text, the first messages of a chat, or token ids."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    token_ids: list[int] | None = None


class PublicPrefixes:
    """Names of the full blocks of all public prefixes. A prompt that begins with such blocks shares those."""

    def __init__(self, identity: Identity, prefixes: Sequence[Sequence[int]] = ()) -> None:
        self._identity = identity
        self._root = naming.root(identity, naming.PUBLIC)
        size = identity.block_size
        self._names = frozenset(name for tokens in prefixes for name in naming.chain(self._root, tokens, size))

    @classmethod
    def load(cls, path: str, identity: Identity, tokenizer: Tokenizer, info: ModelInfo) -> PublicPrefixes:
        """From a JSON file with a list of `PublicPrefix`; none for an empty `path`. Blocking.

        Raises ConfigError naming the entry that is wrong.
        """
        if not path:
            return cls(identity)
        prefixes = []
        for number, entry in enumerate(_read(Path(path))):
            try:
                request = Generate(id="public", **{name: getattr(entry, name) for name in entry.model_fields_set})
                prefixes.append(tokenise(request, tokenizer, info))
            except (RequestError, ValidationError) as error:
                raise ConfigError(f"{path}: entry {number}: {error}", field="public_prefixes") from None
        return cls(identity, prefixes)

    def __len__(self) -> int:
        return len(self._names)

    def lineage(self, token_ids: Sequence[int], tenant: str, salt: str) -> Lineage:
        """For the blocks of this prompt, sent by this tenant."""
        size, name, public = self._identity.block_size, self._root, 0
        while self._names and (public + 1) * size <= len(token_ids):
            name = naming.child(name, token_ids[public * size : (public + 1) * size])
            if name not in self._names:
                break
            public += 1
        return Lineage.of(self._identity, tenant, salt, public)


def _read(path: Path) -> list[PublicPrefix]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE + 1)
        if len(data) > MAX_FILE:
            raise ConfigError(f"{path} has more than {MAX_FILE} bytes", field="public_prefixes")
        return TypeAdapter(list[PublicPrefix]).validate_python(json.loads(data))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ConfigError(f"{path}: {where}: {first['msg']}", field="public_prefixes") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="public_prefixes") from None
