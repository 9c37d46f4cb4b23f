"""A worker's end of its `grammar_process`: started when it is needed, and again when all of it has died."""

from __future__ import annotations

import os
import re
import select
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Sequence
from typing import Any

from shared.sampling.grammar_frames import packed, receive, send

START_S = 60.0
WALL_S = 15.0
"""Longest time for one question, where the machine is busy; processor time is bounded by the other end itself."""

_NEEDED = re.compile("(PATH|HOME|TMPDIR|LANG|VIRTUAL_ENV)$|(LC|LD|DYLD)_|PYTHON")
"""Variables of the environment that a Python program may need to start."""


class Died(Exception):
    """The process that was asked did not survive the question, or does not answer."""


class Channel:
    """Questions and answers, one after the other; any thread may ask."""

    def __init__(self) -> None:
        source, self._sink = os.pipe()
        self._source, sink = os.pipe()
        self.theirs = (source, sink)
        self.life = 0
        """Changes when the other end has died: it has forgotten everything then."""
        self.broken = False
        """Nothing can be asked any more: the other end is gone for good, or nobody knows where in a message it is."""
        self._number = 0
        self._lock = threading.Lock()
        os.set_blocking(self._sink, False)

    def ask(self, *question: Any, within: float = WALL_S) -> dict[str, Any]:
        """Raises Died."""
        deadline = time.monotonic() + within
        with self._lock:
            try:
                while select.select([self._source], [], [], 0)[0]:
                    self._hear(deadline)  # it died while nobody asked for anything
                send(self._sink, packed([self._number, *question]), deadline)
                while True:
                    answer = self._hear(deadline)
                    if answer.get("number") == self._number:
                        return answer
                    if "died" in answer:
                        raise Died
            except (OSError, ValueError, EOFError) as error:  # a TimeoutError is an OSError
                self.life += 1
                self.broken |= not isinstance(error, TimeoutError)
                raise Died(repr(error)) from None
            finally:
                self._number += 1

    def _hear(self, deadline: float) -> dict[str, Any]:
        answer: dict[str, Any] = receive(self._source, deadline)
        self.life += "died" in answer
        return answer

    def close(self) -> None:
        """When nobody is waiting for an answer. Whoever asks afterwards is told that the other end has died."""
        with self._lock:
            for descriptor in (self._sink, self._source):
                os.close(descriptor)
            self._sink = self._source = -1


class Link:
    """Two channels to one `grammar_process`."""

    def __init__(self, table: Sequence[bytes], vocab_size: int, eos_ids: Collection[int], cpu_s: float) -> None:
        """Blocking: loads what the other end needs. Raises OSError, Died."""
        self.compiling, self.following = Channel(), Channel()
        theirs = (*self.compiling.theirs, *self.following.theirs)
        # It has to do with what anybody wrote, and needs no secrets.
        environment = {k: v for k, v in os.environ.items() if _NEEDED.match(k)} | {"OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shared.sampling.grammar_process", *map(str, theirs)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=environment,
            pass_fds=theirs,
        )
        for descriptor in theirs:
            os.close(descriptor)
        try:
            self.compiling.ask(list(table), vocab_size, sorted(eos_ids), cpu_s, within=START_S)
        except Died:
            self.close()
            raise

    @property
    def process_id(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it is of any more use."""
        return self._process.poll() is None and not (self.compiling.broken or self.following.broken)

    def close(self) -> None:
        """What is under way is given up."""
        self._process.kill()
        self._process.wait()
        self.compiling.close()
        self.following.close()
