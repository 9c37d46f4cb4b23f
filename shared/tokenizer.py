"""Text to token ids and back, as the model's own tokenizer does it. No torch.

Control tokens (`<|im_end|>` and the like) are what a chat is made of, so a user's text must not be able to write
them: in raw prompts and in the contents of messages they are encoded as the plain characters they are spelled with.
Only the chat template writes control tokens. A client that needs them elsewhere sends `token_ids`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

import tokenizers

from shared.chat_template import ChatTemplate
from shared.conversation import conversation, texts_in, with_texts
from shared.detokenizer import Detokenizer, byte_table
from shared.errors import ContextLengthExceeded, EmptyPrompt, InvalidField, ModelError
from shared.messages import ChatMessage, Tool

SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """A model's vocabulary and chat format. Immutable after loading, so threads may share it."""

    def __init__(
        self,
        spec: dict[str, Any],
        template: str | None,
        special_tokens: dict[str, Any],
        tools_template: str | None = None,
    ) -> None:
        """`spec` is the content of tokenizer.json; `tools_template` is for chats with tools, where the model has one of
        its own for them. Raises ModelError when something cannot be used.
        """
        self._full = _backend(spec)
        added = self._full.get_added_tokens_decoder()
        vocab = self._full.get_vocab(with_added_tokens=True)
        self._table = byte_table(vocab, added, spec.get("decoder"))
        self._template = None if template is None else ChatTemplate(template, special_tokens)
        self._tools_template = self._template
        if tools_template is not None:
            self._tools_template = ChatTemplate(tools_template, special_tokens)
        literals = "\0".join(each.literals for each in (self._template, self._tools_template) if each)
        control = [
            token_id
            for token_id, token in added.items()
            if token.special or (token.content in literals and not token.content.isspace())
        ]
        self._control_ids = frozenset(control)
        self._forbidden = self._control_ids - {_unknown_id(spec, vocab)}
        longest_first = sorted((added[i].content for i in control), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._plain = _backend(_with_special(spec, self._control_ids))
        # A property of the backend, set once: changing it while another thread encodes raises "Already borrowed".
        self._plain.encode_special_tokens = True
        self._longest = _longest_token(spec, self._table, added)
        self.vocab_size = len(self._table)
        """One more than the largest id; a model's logits may be padded beyond it."""

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """From a model's folder: tokenizer.json, and if there tokenizer_config.json and chat_template.jinja."""
        config = _read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").exists() else {}
        plain, with_tools = _templates_of(folder, config)
        return cls(_read_json(folder / "tokenizer.json"), plain, _special_tokens(config), with_tools)

    def encode(self, text: str, *, limit: int | None = None) -> list[int]:
        """A raw prompt's ids, beginning with BOS if the model's tokenizer puts one before every text.

        Raises InvalidField for text that is not Unicode (lone surrogates), and ContextLengthExceeded for more than
        `limit` tokens; text far beyond it is refused without being tokenised.
        """
        _check_unicode([text], "prompt")
        self._check_length(len(text), limit)
        ids = _ids(self._plain, [text], add_special_tokens=True)[0]
        self._refuse_control(ids, allowed=self._plain.num_special_tokens_to_add(False), field="prompt")
        return _within(ids, limit)

    def chat(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[Tool] | None = None, limit: int | None = None
    ) -> list[int]:
        """A conversation's ids, up to where the assistant's answer begins; BOS only if the template writes it.

        The same as `transformers`' `apply_chat_template(..., add_generation_prompt=True)` as long as no text in it
        spells a control token. Raises InvalidField for `messages` when the model has no template or it refuses them,
        and for `tools` when it has no place for them; EmptyPrompt without messages, ContextLengthExceeded as `encode`
        does.
        """
        if not messages:
            raise EmptyPrompt("no messages", field="messages")
        template = self._fitting_template(messages, tools)
        given = conversation(messages, tools)
        contents = list(texts_in(given))
        _check_unicode(contents, "messages")
        marks = None
        if any(self._control.search(content) for content in contents):
            marks = _unused_characters(contents)
            marked = rf"{marks[0]}\g<0>{marks[1]}"
            given = with_texts(given, lambda text: self._control.sub(marked, text))
        text = template.render(**given)
        if marks is not None and any(_escaped(mark) in text for mark in marks):
            raise InvalidField("the chat template spells a text that has a control token otherwise", field="messages")
        self._check_length(len(text) - sum(map(text.count, marks or ())), limit)
        return _within(self._encode_rendered(text, marks), limit)

    def _fitting_template(self, messages: Sequence[ChatMessage], tools: Sequence[Tool] | None) -> ChatTemplate:
        """Raises InvalidField where there is none, or where it would leave something out."""
        chosen = self._tools_template if tools else self._template
        if chosen is None:
            raise InvalidField("this model has no chat template; send a prompt instead", field="messages")
        if tools and not chosen.tells_tools:
            raise InvalidField("tools: this model's chat template has no place for them", field="tools")
        for index, message in enumerate(messages):
            if message.tool_calls and not chosen.tells_calls:
                field = f"messages.{index}.tool_calls"
                raise InvalidField(f"{field}: this model's chat template has no place for them", field=field)
        return chosen

    def decode(self, token_ids: Iterable[int]) -> str:
        """The text of a whole sequence: what a fresh `detokenizer()` gives for it."""
        detokenizer = self.detokenizer()
        return "".join([detokenizer.push(token_id) for token_id in token_ids]) + detokenizer.flush()

    def detokenizer(self) -> Detokenizer:
        """A decoder for one new sequence."""
        return Detokenizer(self._table)

    @property
    def table(self) -> Sequence[bytes]:
        """The bytes of every id; empty for those without text of their own."""
        return self._table

    @cached_property
    def digest(self) -> str:
        """Hex digest of what every id stands for; equal digests mean that token ids may be exchanged."""
        vocab = sorted(self._full.get_vocab(with_added_tokens=True).items())
        return hashlib.sha256(json.dumps([vocab, sorted(self._control_ids)]).encode()).hexdigest()

    def _encode_rendered(self, text: str, marks: tuple[str, str] | None) -> list[int]:
        """Ids of a rendered chat. Between `marks` stand control tokens that a content spelled: plain text."""
        if marks is None:
            return _ids(self._full, [text])[0]
        opening, closing = marks
        # A template that cuts contents up may leave a lone mark: it is dropped, and its sides stay apart.
        pieces = re.split(f"{opening}({self._control.pattern}){closing}|[{opening}{closing}]", text)
        spelled = sorted({piece for piece in pieces[1::2] if piece})
        plain = dict(zip(spelled, _inner_ids(self._plain, spelled), strict=True))
        for ids in plain.values():
            self._refuse_control(ids, allowed=0, field="messages")
        first, *others = pieces[::2]
        result = _ids(self._full, [first])[0]
        for piece, ids in zip(pieces[1::2], _inner_ids(self._full, others), strict=True):
            result += plain.get(piece, [])
            result += ids
        return result

    def _refuse_control(self, ids: list[int], allowed: int, field: str) -> None:
        """A vocabulary may reach a control token by plain merges; such text cannot be sent."""
        if not self._forbidden.isdisjoint(ids) and sum(i in self._forbidden for i in ids) > allowed:
            raise InvalidField(
                "the text spells a control token that this tokenizer cannot write otherwise", field=field
            )

    def _check_length(self, characters: int, limit: int | None) -> None:
        if limit is None or not self._longest:
            return
        if (fewest := characters // self._longest) > limit:
            raise ContextLengthExceeded(f"at least {fewest} tokens, but {limit} fit")


def _within(ids: list[int], limit: int | None) -> list[int]:
    if limit is not None and len(ids) > limit:
        raise ContextLengthExceeded(f"{len(ids)} tokens, but {limit} fit")
    return ids


def _backend(spec: dict[str, Any]) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(json.dumps(spec))
    except Exception as error:  # the library raises bare exceptions
        raise ModelError(f"tokenizer.json cannot be loaded: {error}") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _ids(backend: tokenizers.Tokenizer, texts: Sequence[str], *, add_special_tokens: bool = False) -> list[list[int]]:
    """`encode_batch_fast` leaves character offsets out, which makes long texts four times as fast."""
    return [e.ids for e in backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)]


def _inner_ids(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Ids of texts that stand inside a longer one.

    SentencePiece-like tokenizers put a space before every text. So a newline goes before and is cut off again; where
    it has merged with the text there is no such space.
    """
    newline = _ids(backend, ["\n"])[0]
    led = [
        ids[len(newline) :] if ids[: len(newline)] == newline else None
        for ids in _ids(backend, ["\n" + t for t in texts])
    ]
    alone = iter(_ids(backend, [text for text, ids in zip(texts, led, strict=True) if ids is None]))
    return [next(alone) if ids is None else ids for ids in led]


def _with_special(spec: dict[str, Any], token_ids: frozenset[int]) -> dict[str, Any]:
    """The same tokenizer with these added tokens counted as special."""
    added = [{**token, "special": True} if token["id"] in token_ids else token for token in spec["added_tokens"]]
    return {**spec, "added_tokens": added}


def _unknown_id(spec: dict[str, Any], vocab: dict[str, int]) -> int | None:
    """The id that characters outside the vocabulary get, if there is one."""
    model = spec["model"]
    unknown = model.get("unk_id") if model.get("type") == "Unigram" else vocab.get(model.get("unk_token") or "")
    return unknown if isinstance(unknown, int) else None


def _longest_token(spec: dict[str, Any], table: list[bytes], added: dict[int, Any]) -> int:
    """Most bytes that one token can take from a text; 0 when there is no telling."""
    swallows = any(token.lstrip or token.rstrip for token in added.values())
    if spec.get("normalizer") or swallows or (spec.get("decoder") or {}).get("type") != "ByteLevel":
        return 0
    return max(map(len, [*table, *(token.content.encode() for token in added.values())]))


def _unused_characters(texts: Sequence[str]) -> tuple[str, str]:
    """Two characters that occur in none of the texts: noncharacters, or private ones if somebody used those."""
    used = set().union(*texts)
    free = (c for c in map(chr, chain(range(0xFDD0, 0xFDF0), range(0xF0000, 0x110000))) if c not in used)
    try:
        return next(free), next(free)
    except StopIteration:
        raise InvalidField("the contents use every private-use character", field="messages") from None


def _escaped(mark: str) -> str:
    """As JSON in ASCII and `repr` write it: what was between two such marks cannot be told from the template's own."""
    return json.dumps(mark)[1:-1] if ord(mark) < 0x10000 else repr(mark)[1:-1]


def _check_unicode(texts: Sequence[str], field: str) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidField(f"{field}: a lone surrogate at character {error.start}", field=field) from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path} does not hold a JSON object")
    return value


def _templates_of(folder: Path, config: dict[str, Any]) -> tuple[str | None, str | None]:
    """chat_template.jinja, else the one in tokenizer_config.json; of several there, `default` and `tool_use`,
    as `transformers` takes them.
    """
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8"), None
    template = config.get("chat_template")
    if not isinstance(template, list):
        return template, None
    try:
        named = {entry["name"]: entry["template"] for entry in template}
    except (TypeError, KeyError):
        raise ModelError("tokenizer_config.json: each chat_template has a name and a template") from None
    return named.get("default"), named.get("tool_use")


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """The template's variables `bos_token`, `eos_token`, ..."""
    named = {name: config.get(name) for name in SPECIAL_NAMES}
    extra = config.get("extra_special_tokens")
    named |= extra if isinstance(extra, dict) else {}
    texts = {name: token["content"] if isinstance(token, dict) else token for name, token in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
