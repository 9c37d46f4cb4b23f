"""The forms that a worker's requests ask for: compiled and followed apart, kept as long as there is room. No torch.

Nothing is started before the first request asks for a form.
"""

from __future__ import annotations

import itertools
import time
import weakref
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import numpy as np
import structlog

from shared.errors import InvalidField, Unavailable
from shared.messages import Guided
from shared.sampling.grammar_link import Died, Link
from shared.sampling.guide import Guide, Masks

CPU_S = 3.0
"""Processor time for one form."""
WAIT_S = 30.0
"""A request waits no longer for its form, those that are compiled before it included."""
CACHE_BYTES = 64 << 20
REFUSED_S = 60.0
"""A form that could not be had is not tried again for so long."""
TOLD = 4096
"""Tokens in one question."""

log = structlog.get_logger()


class Links:
    """The `Link` in use. Blocking."""

    def __init__(self, table: Sequence[bytes], vocab_size: int, eos_ids: Collection[int], cpu_s: float) -> None:
        self._of = (table, vocab_size, eos_ids, cpu_s)
        self._link: Link | None = None
        self.ended: deque[int] = deque()
        """Guides that nobody has any more."""
        self.names = itertools.count()
        self.words = -(-vocab_size // 32)

    @property
    def alive(self) -> bool:
        return self._link is not None and self._link.alive

    @property
    def process_id(self) -> int | None:
        return None if self._link is None else self._link.process_id

    def link(self) -> Link:
        """Raises Unavailable. One thread at a time."""
        if self._link is not None and not self._link.alive:
            self.close()
        try:
            self._link = self._link or Link(*self._of)
        except (OSError, Died) as error:
            raise Unavailable(f"the compiler of forms does not start: {error!r}") from error
        return self._link

    def following(self) -> Link:
        """Raises Unavailable: a step does not wait for another one to start."""
        if self._link is None:
            raise Unavailable("the follower of forms is gone")
        return self._link

    def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close()


class ApartGuide:
    """Implements `Guide`, by asking who follows the form. Its state there can be made again from its tokens."""

    def __init__(self, links: Links, guided: Guided, text: str, banned: Collection[int], min_tokens: int) -> None:
        self._links = links
        self._name = next(links.names)
        self._field = f"guided.{guided.kind}"
        self._open = (guided.canonical, text, sorted(banned), min_tokens)
        self._tokens: list[int] = []
        self._life: tuple[int, int] | None = None
        self.ended = False
        weakref.finalize(self, links.ended.append, self._name)

    def masks(self, drafts: Sequence[int]) -> Masks:
        """See `Guide`."""
        data = self._ask("masks", list(drafts))["masks"]
        return np.frombuffer(data, dtype=np.int32).reshape(-1, self._links.words)

    def take(self, tokens: Sequence[int]) -> int:
        """See `Guide`."""
        taken = 0
        for begin in range(0, len(tokens), TOLD):
            told = list(tokens[begin : begin + TOLD])
            answer = self._ask("take", told)
            taken += answer["taken"]
            self._tokens += told[: answer["taken"]]
            self.ended = answer["ended"]
            if self.ended:
                break
        return taken

    def _ask(self, what: str, tokens: list[int]) -> dict[str, Any]:
        link = self._links.following()
        try:
            if self._life != (link.process_id, link.following.life):
                self._begin(link)
            answer = link.following.ask(self._gone(), what, self._name, tokens)
            if "unknown" in answer:  # another one follows since
                self._begin(link)
                answer = link.following.ask([], what, self._name, tokens)
            return self._checked(answer)
        except Died as error:
            if not link.alive:
                raise Unavailable("the follower of forms is gone") from error
            reason = f"{self._field}: it takes too much time or memory to follow"
            raise InvalidField(reason, field=self._field) from error

    def _begin(self, link: Link) -> None:
        """It is not known there, or has been forgotten."""
        canonical, text, *more = self._open
        life = (link.process_id, link.following.life)
        answer = link.following.ask([], "open", self._name, canonical, "", *more)
        if "unknown" in answer:
            answer = link.following.ask([], "open", self._name, canonical, text, *more)
        self._checked(answer)
        for begin in range(0, len(self._tokens), TOLD):
            self._checked(link.following.ask([], "take", self._name, self._tokens[begin : begin + TOLD]))
        self._life = life

    def _gone(self) -> list[int]:
        """Raises nothing: other threads add to them."""
        return [self._links.ended.popleft() for _ in range(len(self._links.ended))]

    def _checked(self, answer: dict[str, Any]) -> dict[str, Any]:
        if "error" in answer:
            raise InvalidField(answer["error"], field=self._field)
        return answer


@dataclass(frozen=True, slots=True)
class Kept:
    """A form that was asked for: its serialised grammar, or why there is none."""

    grammar: str | InvalidField
    bytes: int
    since: float

    @property
    def stale(self) -> bool:
        return isinstance(self.grammar, InvalidField) and time.monotonic() - self.since > REFUSED_S


class Grammars:
    """Implements `shared.sampling.guide.Guides`, for one event loop."""

    def __init__(
        self, table: Sequence[bytes], vocab_size: int, eos_ids: Collection[int], *, cpu_s: float = CPU_S
    ) -> None:
        """`table`: the bytes of every token; `vocab_size`: that of the model; `cpu_s`: processor time for one form."""
        self._links = Links(table, vocab_size, eos_ids, cpu_s)
        self._turn = anyio.Lock()
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._bytes = 0

    async def guide(self, guided: Guided, *, banned: Collection[int], min_tokens: int) -> Guide:
        """See `Guides`."""
        text = await self._grammar(guided)
        if not self._links.alive:  # the form was compiled before that one died
            async with self._in_turn():
                await anyio.to_thread.run_sync(self._links.link)
        return ApartGuide(self._links, guided, text, banned, min_tokens)

    @property
    def process_id(self) -> int | None:
        """Of who compiles, if it runs."""
        return self._links.process_id

    async def close(self) -> None:
        """What is being compiled is given up."""
        await anyio.to_thread.run_sync(self._links.close)

    async def _grammar(self, guided: Guided) -> str:
        key = guided.canonical
        kept = self._known(key) or await self._new(key, guided)
        if isinstance(kept.grammar, InvalidField):
            raise InvalidField(kept.grammar.message, field=kept.grammar.field)
        return kept.grammar

    def _known(self, key: str) -> Kept | None:
        kept = self._kept.get(key)
        if kept is None or kept.stale:
            return None
        self._kept.move_to_end(key)
        return kept

    async def _new(self, key: str, guided: Guided) -> Kept:
        async with self._in_turn():
            if (kept := self._known(key)) is None:  # nobody else has asked for it meanwhile
                kept = await anyio.to_thread.run_sync(self._compiled, guided)
                self._keep(key, kept)
            return kept

    @asynccontextmanager
    async def _in_turn(self) -> AsyncIterator[None]:
        """Raises Unavailable."""
        try:
            with anyio.fail_after(WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            raise Unavailable("too many new forms are waiting to be compiled") from None
        try:
            yield
        finally:
            self._turn.release()

    def _keep(self, key: str, kept: Kept) -> None:
        if (old := self._kept.pop(key, None)) is not None:
            self._bytes -= old.bytes
        self._kept[key] = kept
        self._bytes += kept.bytes
        while self._bytes > CACHE_BYTES and len(self._kept) > 1:
            self._bytes -= self._kept.popitem(last=False)[1].bytes

    def _compiled(self, guided: Guided) -> Kept:
        """Raises Unavailable."""
        started = time.monotonic()
        link = self._links.link()
        try:
            answer = link.compiling.ask(guided.canonical)
        except Died as error:
            if not link.alive:
                raise Unavailable("the compiler of forms is gone") from error
            answer = {"error": "it takes too much time or memory to compile"}
        size = len(guided.canonical)
        if "error" in answer:
            log.info("form refused", kind=guided.kind, error=answer["error"])
            field = f"guided.{guided.kind}"
            return Kept(InvalidField(f"{field}: {answer['error']}", field=field), size, time.monotonic())
        log.debug("form compiled", kind=guided.kind, ms=round((time.monotonic() - started) * 1e3, 1))
        return Kept(answer["grammar"], size + len(answer["grammar"]), time.monotonic())
