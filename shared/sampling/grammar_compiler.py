"""`python -m shared.sampling.grammar_compiler`: compiles the forms of answers for a worker, apart from it.

What a client writes may take the compiler for ever, or all memory, or crash it. So it has a process of its own, which
the kernel ends when it takes too much. It reads a vocabulary and then forms from its standard input, and ends with it.
"""

from __future__ import annotations

import math
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

from shared.errors import InvalidField
from shared.sampling.grammar import Vocabulary, guided_of, try_out
from shared.sampling.grammar_frames import packed, receive, send

MEMORY = 1 << 30
"""Bytes beyond what the process has when it begins."""
MAX_TEXT = 32 << 20
"""Bytes of a compiled form."""


def main() -> None:
    out = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever the compiler prints is no answer
    table, vocab_size, eos_ids, cpu_s = receive(0, math.inf)
    vocabulary = Vocabulary(table, vocab_size, eos_ids)
    _bound()
    send(out, packed({}), math.inf)
    while True:
        try:
            canonical = receive(0, math.inf)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        answer = _compiled(vocabulary, canonical)
        signal.setitimer(signal.ITIMER_PROF, 0)
        send(out, packed(answer), math.inf)


def _compiled(vocabulary: Vocabulary, canonical: str) -> dict[str, Any]:
    guided = guided_of(canonical)
    try:
        grammar = vocabulary.compile(guided)
        try_out(grammar, vocabulary, guided)
        text = grammar.serialize_json()
    except InvalidField as error:
        return {"error": error.message.partition(": ")[2]}
    except MemoryError:
        raise
    except Exception as error:  # the library raises bare RuntimeErrors
        return {"error": _reason(str(error))}
    return {"grammar": text} if len(text) <= MAX_TEXT else {"error": "it becomes too large"}


def _reason(message: str) -> str:
    """Without the place in the library's source that it begins with."""
    return message.partition("] ")[2].partition(": ")[2][:300].strip() or message[:300].strip()


def _bound() -> None:
    if sys.platform == "linux":
        most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.nice(5)


if __name__ == "__main__":
    main()
