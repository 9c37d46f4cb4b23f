"""The texts of single tokens, for logprobs: all that the gateway needs a tokenizer's file for. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import tokenizers
from pydantic_core import from_json

from shared.detokenizer import byte_table
from shared.errors import ConfigError, ModelError


class TokenTexts:
    """Of one model. A token that is not known has no bytes, and a text that tells its id, as vLLM spells it."""

    def __init__(self, table: Mapping[int, bytes] | None = None) -> None:
        self._table = table or {}

    @classmethod
    def load(cls, folder: Path) -> TokenTexts:
        """From `tokenizer.json` in a model's folder. Raises ConfigError."""
        path = folder / "tokenizer.json"
        try:
            data = path.read_bytes()
            backend = tokenizers.Tokenizer.from_buffer(data)
            added = backend.get_added_tokens_decoder()
            plain = byte_table(backend.get_vocab(with_added_tokens=True), added, from_json(data).get("decoder"))
        except (OSError, ModelError) as error:
            raise ConfigError(f"TRINE_TOKENIZER: {path} cannot be used: {error}", field="tokenizer") from None
        except Exception as error:  # the library raises bare exceptions
            raise ConfigError(f"TRINE_TOKENIZER: {path} cannot be used: {error}", field="tokenizer") from None
        control = {token_id: token.content.encode() for token_id, token in added.items()}
        return cls(dict(enumerate(plain)) | control)

    def bytes_of(self, token_id: int) -> bytes | None:
        return self._table.get(token_id)

    def text_of(self, token_id: int) -> str:
        """Bytes that are no whole characters become U+FFFD."""
        found = self._table.get(token_id)
        return f"token_id:{token_id}" if found is None else found.decode(errors="replace")
