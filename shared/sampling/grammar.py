"""Forms of answers as xgrammar follows them: a bitmask of tokens for each place (Dong et al. 2024, "XGrammar: flexible
and efficient structured generation engine for large language models").

A mask costs some microseconds, but an ambiguous grammar's can cost seconds, more with each token. So the processor time
that a sequence's form takes is counted, and a form that takes too much of it ends its request.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import xgrammar

from shared.errors import InvalidField
from shared.messages import Guided
from shared.sampling.guide import Masks

MAX_WHITESPACE = 16
"""Characters between two parts of JSON: enough to indent it, and no model fills an answer with them."""
BURST_S = 0.25
TOKEN_S = 0.005
"""Processor time that following a form may take: so much for a token, and a burst beyond that."""
TRIED = 24
"""Tokens of an answer that are tried out."""

_CONTROL = re.compile(rb"[\x00-\x09\x0b\x0c\x0e-\x1f]")


class Vocabulary:
    """What xgrammar knows of a model's tokens."""

    def __init__(self, table: Sequence[bytes], vocab_size: int, eos_ids: Collection[int]) -> None:
        """`table`: the bytes of every id, empty for those without text; the model's logits may be padded beyond it, or
        know less."""
        self.eos_ids = sorted(eos_id for eos_id in eos_ids if eos_id < vocab_size)
        tokens = [*table[:vocab_size], *[b""] * (vocab_size - len(table))]
        for eos_id in self.eos_ids:
            tokens[eos_id] = b""
        self.info = xgrammar.TokenizerInfo(tokens, vocab_size=vocab_size, stop_token_ids=self.eos_ids)
        self.words = -(-vocab_size // 32)
        self.lengths = np.array([len(token) for token in tokens])
        self._controls = {
            tab: [i for i, token in enumerate(tokens) if _CONTROL.search(token.replace(b"\t", b"") if tab else token)]
            for tab in (False, True)
        }

    def bits(self, tokens: Collection[int]) -> Masks:
        """One word for 32 tokens, their bits set."""
        flags = np.zeros(self.words * 32, dtype=np.uint8)
        flags[list(tokens)] = 1
        return np.packbits(flags, bitorder="little").view("<i4").astype(np.int32)

    def improper(self, guided: Guided) -> Sequence[int]:
        """Tokens that may not come anywhere: xgrammar lets control characters into JSON strings of limited length,
        where JSON has none. Outside them nobody misses a tab, except in free text."""
        if guided.kind in ("json_schema", "json_object", "tags"):
            return self._controls[guided.kind == "tags"]
        return ()

    def compile(self, guided: Guided) -> xgrammar.CompiledGrammar:
        """May take for ever, all memory, or the process. Raises RuntimeError or ValueError saying what is wrong."""
        compiler = xgrammar.GrammarCompiler(self.info, max_threads=1, cache_enabled=False)
        if guided.regex is not None:
            return compiler.compile_regex(guided.regex)
        if guided.grammar is not None:
            return compiler.compile_grammar(guided.grammar)
        return compiler.compile_structural_tag({"type": "structural_tag", "format": _format(guided)})

    def load(self, text: str) -> xgrammar.CompiledGrammar:
        """What `serialize_json` of a compiled grammar gave, for the same vocabulary."""
        return xgrammar.CompiledGrammar.deserialize_json(text, self.info)


def _format(guided: Guided) -> dict[str, object]:
    """As xgrammar's structural tags spell it."""
    if guided.json_schema is not None or guided.json_object:
        return _json({"type": "object"} if guided.json_schema is None else guided.json_schema)
    if guided.choice is not None:
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in guided.choice]}
    assert guided.tags is not None
    return {
        "type": "triggered_tags",
        "triggers": guided.tags.triggers,
        "tags": [
            {"type": "tag", "begin": tag.begin, "content": _json(tag.json_schema), "end": tag.end}
            for tag in guided.tags.tags
        ],
        "at_least_one": guided.tags.required,
        "stop_after_first": guided.tags.single,
    }


def _json(schema: dict[str, object]) -> dict[str, object]:
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": MAX_WHITESPACE}


class GrammarGuide:
    """Implements `shared.sampling.guide.Guide`."""

    def __init__(
        self,
        grammar: xgrammar.CompiledGrammar,
        vocabulary: Vocabulary,
        guided: Guided,
        *,
        banned: Collection[int] = (),
        min_tokens: int = 0,
    ) -> None:
        """`grammar`: that of `guided`."""
        self._matcher = xgrammar.GrammarMatcher(grammar)
        self._field = f"guided.{guided.kind}"
        self._eos = vocabulary.bits(vocabulary.eos_ids)
        self._kept = ~vocabulary.bits({*banned, *vocabulary.improper(guided)})
        self._min_tokens = min_tokens
        self._taken = 0
        self._spent = 0.0
        self._allowed = BURST_S
        self._next: Masks | None = None
        self.ended = False

    def masks(self, drafts: Sequence[int]) -> Masks:
        """See `Guide`."""
        rows = np.empty((1 + len(drafts), len(self._eos)), dtype=np.int32)
        with self._counted(1 + len(drafts)):
            rows[0] = self._here()
            known = self._walk(drafts, rows)
        if not rows[0].any():
            raise InvalidField(
                f"{self._field}: no token may follow what there is, by the form and by logit_bias", field=self._field
            )
        return rows[:known]

    def _walk(self, drafts: Sequence[int], rows: Masks) -> int:
        """Fill in the rows after drafts; returns how many rows there are, the first included."""
        walked, known = 0, 1
        try:
            for draft in drafts:
                if not _has(rows[known - 1], draft) or not self._matcher.accept_token(draft):
                    break
                walked += 1
                known += 1
                if self._fill(rows[known - 1], self._taken + walked):
                    rows[known - 1] = -1
                    break
                if not rows[known - 1].any():
                    known -= 1  # a draft that leads nowhere is none
                    break
        finally:
            self._matcher.rollback(walked)
        return known

    def take(self, tokens: Sequence[int]) -> int:
        """See `Guide`."""
        with self._counted(len(tokens)):
            for count, token in enumerate(tokens, start=1):
                if not self._matcher.accept_token(token):
                    raise InvalidField(f"{self._field}: token {token} is not of that form", field=self._field)
                self._next = None
                self._taken += 1
                if self._matcher.is_completed():
                    self._here()
                    if self.ended:
                        return count
        return len(tokens)

    def _here(self) -> Masks:
        if self._next is None:
            row = np.empty(len(self._eos), dtype=np.int32)
            self.ended = self._fill(row, self._taken)
            self._next = row
        return self._next

    def _fill(self, row: Masks, taken: int) -> bool:
        """What may come after `taken` tokens, where the matcher is. True if the answer is complete there."""
        if self._matcher.is_terminated():
            return True
        self._matcher.fill_next_token_bitmask(row[None])
        if self._matcher.is_completed() and not (row & ~self._eos).any():
            return True
        row &= self._kept
        if taken < self._min_tokens:
            row &= ~self._eos
        return False

    @contextmanager
    def _counted(self, tokens: int) -> Iterator[None]:
        """Raises InvalidField when all that was done so far, for so many tokens more, took too much."""
        started = time.thread_time()
        yield
        self._spent += time.thread_time() - started
        self._allowed += TOKEN_S * tokens
        if self._spent > self._allowed:
            raise InvalidField(f"{self._field}: this form is too ambiguous to be followed", field=self._field)


def try_out(grammar: xgrammar.CompiledGrammar, vocabulary: Vocabulary, guided: Guided) -> None:
    """Follow the beginnings of a few answers. Raises InvalidField for a form that costs too much."""
    for longest in (False, True):
        guide = GrammarGuide(grammar, vocabulary, guided)
        for _ in range(TRIED):
            allowed = np.flatnonzero(np.unpackbits(guide.masks([])[0].view(np.uint8), bitorder="little"))
            guide.take([int(allowed[vocabulary.lengths[allowed].argmax() if longest else len(allowed) // 2])])
            if guide.ended:
                break


def _has(row: Masks, token: int) -> bool:
    return 0 <= token < 32 * len(row) and bool(row[token // 32] >> (token % 32) & 1)


def guided_of(canonical: str) -> Guided:
    """The form that `Guided.canonical` is of."""
    kind, value = json.loads(canonical)
    return Guided.model_validate({kind: value})
