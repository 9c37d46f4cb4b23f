"""`python -m shared.sampling.grammar_process`: compiles and follows the forms of answers, apart from the worker.

What a client writes may take the compiler for ever, or all memory, or crash it, and so may following it. So one process
compiles, another one follows, and the kernel ends either when a question takes it too much. Whoever watches over it
then says so in its place and forks another one, which costs some milliseconds: all is loaded already. What they are
asked, they read from pipes whose numbers are the arguments, and they end when these do.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import xgrammar

from shared.errors import InvalidField
from shared.sampling.grammar import GrammarGuide, Vocabulary, guided_of, try_out
from shared.sampling.grammar_frames import packed, receive, send

MEMORY = 1 << 30
"""Bytes beyond what the process has when it begins."""
MAX_TEXT = 32 << 20
"""Bytes of a compiled form."""
FOLLOW_S = 1.0
"""Processor time for one question about a form that is compiled: as long as that, a step may have to wait."""
LOADED = 64
"""Forms that are followed, or were of late."""

Answer: TypeAlias = dict[str, Any]
Serve: TypeAlias = Callable[[list[Any]], Answer]


class Compiling:
    """Is asked with the `canonical` of a form, and answers with its serialised grammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def __call__(self, question: list[Any]) -> Answer:
        guided = guided_of(question[0])
        try:
            grammar = self._vocabulary.compile(guided)
            try_out(grammar, self._vocabulary, guided)
            text = grammar.serialize_json()
        except InvalidField as error:
            return {"error": error.message.partition(": ")[2]}
        except Exception as error:  # the library raises bare RuntimeErrors
            return {"error": _reason(str(error))}
        return {"grammar": text} if len(text) <= MAX_TEXT else {"error": "it becomes too large"}


class Following:
    """Is asked with [guides that have ended, what to do, the guide, ...]."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._grammars: dict[str, xgrammar.CompiledGrammar] = {}
        self._guides: dict[int, GrammarGuide] = {}

    def __call__(self, question: list[Any]) -> Answer:
        ended, what, name, *more = question
        for one in ended:
            self._guides.pop(one, None)
        try:
            if what == "open":
                return self._open(name, *more)
            if (guide := self._guides.get(name)) is None:
                return {"unknown": True}
            if what == "masks":
                return {"masks": guide.masks(more[0]).tobytes()}
            taken = guide.take(more[0])
            return {"taken": taken, "ended": guide.ended}
        except InvalidField as error:
            return {"error": error.message}

    def _open(self, name: int, canonical: str, text: str, banned: list[int], min_tokens: int) -> Answer:
        """`text` may be empty for a form that is loaded."""
        if canonical not in self._grammars:
            if not text:
                return {"unknown": True}
            self._grammars[canonical] = self._vocabulary.load(text)
            if len(self._grammars) > LOADED:
                del self._grammars[next(iter(self._grammars))]
        grammar, guided = self._grammars[canonical], guided_of(canonical)
        self._guides[name] = GrammarGuide(grammar, self._vocabulary, guided, banned=banned, min_tokens=min_tokens)
        return {}


def main() -> None:
    # A Ctrl-C, or a manager of services, tells all processes to end: the worker finishes its answers first.
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    compiling, following = (int(sys.argv[1]), int(sys.argv[2])), (int(sys.argv[3]), int(sys.argv[4]))
    _, table, vocab_size, eos_ids, cpu_s = receive(compiling[0], math.inf)
    vocabulary = Vocabulary(table, vocab_size, eos_ids)
    _bound()
    if os.fork() == 0:
        _close(compiling)
        _watch(Following(vocabulary), *following, min(cpu_s, FOLLOW_S))
    else:
        _close(following)
        send(compiling[1], packed({"number": 0}), math.inf)
        _watch(Compiling(vocabulary), *compiling, cpu_s)


def _watch(serve: Serve, source: int, sink: int, cpu_s: float) -> None:
    """`serve` questions, in a process that may die of one."""
    while True:
        child = os.fork()
        if child == 0:
            _serve(serve, source, sink, cpu_s)
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return
        send(sink, packed({"died": True}), math.inf)


def _serve(serve: Serve, source: int, sink: int, cpu_s: float) -> None:
    while True:
        try:
            number, *question = receive(source, math.inf)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = serve(question)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(sink, packed({**answer, "number": number}), math.inf)


def _reason(message: str) -> str:
    """Without the place in the library's source that it begins with."""
    return message.partition("] ")[2].partition(": ")[2][:300].strip() or message[:300].strip()


def _bound() -> None:
    if sys.platform == "linux":
        most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _close(descriptors: tuple[int, ...]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)


if __name__ == "__main__":
    main()
