"""Token ids to text, one token at a time.

Tokens are bytes, not characters: an emoji or a Devanagari letter is often split over several tokens, and one token
may end a character and begin the next. So each id is mapped to bytes once, and one incremental UTF-8 decoder per
sequence turns the bytes into text. Bytes that are not UTF-8 become U+FFFD, as `bytes.decode(errors="replace")` does.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shared.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_PIECE_DECODERS = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}


class Detokenizer:
    """One sequence's text. Ids without text of their own (control tokens, ids beyond the table) add none."""

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that is complete with this token; empty while a character is unfinished."""
        return self._decoder.decode(self._table[token_id]) if 0 <= token_id < len(self._table) else ""

    def flush(self) -> str:
        """What is left at the end: U+FFFD for an unfinished character."""
        return self._decoder.decode(b"", final=True)


def byte_table(vocab: Mapping[str, int], added: Mapping[int, Any], decoder: dict[str, Any] | None) -> list[bytes]:
    """The bytes of every id. `vocab` is token to id, `added` id to added token, `decoder` that of tokenizer.json.

    A leading space is kept: the text continues a prompt. Raises ModelError for decoders that do not map each token to
    bytes of its own (WordPiece, CTC and the like).
    """
    parts = _flatten(decoder or {})
    kinds = {part.get("type") for part in parts}
    if kinds == {"ByteLevel"}:
        to_bytes: Callable[[str], bytes] = _byte_level
    elif kinds and kinds <= _PIECE_DECODERS:
        to_bytes = _pieces(parts)
    else:
        raise ModelError(f"tokens cannot be turned into text one by one: decoder {sorted(map(str, kinds))}")
    table = [b""] * (max(vocab.values(), default=-1) + 1)
    for token, token_id in vocab.items():
        if (own := added.get(token_id)) is None:
            table[token_id] = to_bytes(token)
        elif not own.special:
            table[token_id] = own.content.encode()
    return table


def _flatten(decoder: dict[str, Any]) -> list[dict[str, Any]]:
    if decoder.get("type") == "Sequence":
        return [leaf for part in decoder["decoders"] for leaf in _flatten(part)]
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 stands for itself, the rest for U+0100 onwards."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:
        return token.encode()


def _pieces(parts: list[dict[str, Any]]) -> Callable[[str], bytes]:
    """SentencePiece-like tokens: a stand-in for the space, and `<0x0A>` for bytes that have no token."""
    replaced = [
        (part["replacement"], " ")
        if part["type"] == "Metaspace"
        else (part["pattern"].get("String", ""), part["content"])
        for part in parts
        if part["type"] in ("Metaspace", "Replace")
    ]
    fallback = any(part["type"] == "ByteFallback" for part in parts)

    def to_bytes(token: str) -> bytes:
        if fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        for old, new in replaced:
            token = token.replace(old, new) if old else token
        return token.encode()

    return to_bytes
