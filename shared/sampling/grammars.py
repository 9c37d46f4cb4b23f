"""The forms that a worker's requests ask for: compiled apart, once, and kept as long as there is room.

Nothing is started or loaded before the first request asks for a form. torch is loaded with xgrammar, then.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio
import structlog

from shared.errors import InvalidField, Unavailable
from shared.messages import Guided
from shared.sampling.grammar_frames import packed, receive, send
from shared.sampling.guide import Guide

if TYPE_CHECKING:
    import xgrammar

    from shared.sampling.grammar import Vocabulary

START_S = 60.0
CPU_S = 3.0
"""Processor time for one form."""
COMPILE_S = 15.0
"""Longest time for one form, where the machine is busy."""
WAIT_S = 30.0
"""A request waits no longer for its form, those that are compiled before it included."""
CACHE_BYTES = 128 << 20
REFUSED_S = 60.0
"""A form that could not be had is not tried again for so long."""

log = structlog.get_logger()


class Compiler:
    """A `grammar_compiler` process, started when it is needed and after it has died. Blocking; one thread at a time."""

    def __init__(self, table: Sequence[bytes], vocab_size: int, eos_ids: Collection[int], cpu_s: float) -> None:
        self._begin = packed([list(table), vocab_size, sorted(eos_ids), cpu_s])
        self._process: subprocess.Popen[bytes] | None = None

    def compile(self, guided: Guided) -> str:
        """The serialised grammar. Raises InvalidField for a form that cannot be had, Unavailable without a compiler."""
        field = f"guided.{guided.kind}"
        if self._process is not None and self._process.poll() is not None:
            self.close()  # it died while nobody asked for anything
        try:
            process = self._process or self._started()
        except (OSError, EOFError, TimeoutError) as error:
            self.close()
            raise Unavailable(f"the compiler of forms does not start: {error!r}") from error
        try:
            answer = self._asked(process, packed(guided.canonical), COMPILE_S)
        except (OSError, EOFError, TimeoutError):
            self.close()
            raise InvalidField(f"{field}: it takes too much time or memory to compile", field=field) from None
        if "error" in answer:
            raise InvalidField(f"{field}: {answer['error']}", field=field)
        return str(answer["grammar"])

    def _started(self) -> subprocess.Popen[bytes]:
        # What it has to do with needs no secrets.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TRINE_")} | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shared.sampling.grammar_compiler"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
        )
        assert self._process.stdin is not None
        os.set_blocking(self._process.stdin.fileno(), False)
        self._asked(self._process, self._begin, START_S)
        return self._process

    def _asked(self, process: subprocess.Popen[bytes], question: bytes, within: float) -> dict[str, Any]:
        assert process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + within
        send(process.stdin.fileno(), question, deadline)
        answer = receive(process.stdout.fileno(), deadline)
        if not isinstance(answer, dict):
            raise EOFError("no answer")
        return answer

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


@dataclass(frozen=True, slots=True)
class Kept:
    """A form that was asked for: its grammar, or why there is none."""

    grammar: xgrammar.CompiledGrammar | InvalidField
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
        self._compiler = Compiler(table, vocab_size, eos_ids, cpu_s)
        self._of = (table, vocab_size, eos_ids)
        self._vocabulary: Vocabulary | None = None
        self._turn = anyio.Lock()
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._bytes = 0

    async def guide(self, guided: Guided, *, banned: Collection[int], min_tokens: int) -> Guide:
        """See `Guides`."""
        grammar = await self._grammar(guided)
        from shared.sampling.grammar import GrammarGuide

        assert self._vocabulary is not None
        return GrammarGuide(grammar, self._vocabulary, guided, banned=banned, min_tokens=min_tokens)

    @property
    def process_id(self) -> int | None:
        """Of the compiler, if it runs."""
        return self._compiler.process_id

    async def close(self) -> None:
        """What is being compiled is given up."""
        await anyio.to_thread.run_sync(self._compiler.close)

    async def _grammar(self, guided: Guided) -> xgrammar.CompiledGrammar:
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
        try:
            with anyio.fail_after(WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            raise Unavailable("too many new forms are waiting to be compiled") from None
        try:
            if (kept := self._known(key)) is None:  # nobody else has asked for it meanwhile
                kept = await anyio.to_thread.run_sync(self._compiled, guided)
                self._keep(key, kept)
            return kept
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
        from shared.sampling.grammar import Vocabulary

        started = time.monotonic()
        size = len(guided.canonical)
        try:
            text = self._compiler.compile(guided)
        except InvalidField as error:
            log.info("form refused", kind=guided.kind, error=error.message)
            return Kept(error, size, time.monotonic())
        self._vocabulary = self._vocabulary or Vocabulary(*self._of)
        grammar = self._vocabulary.load(text)
        log.debug("form compiled", kind=guided.kind, ms=round((time.monotonic() - started) * 1e3, 1))
        return Kept(grammar, size + grammar.memory_size_bytes, time.monotonic())
