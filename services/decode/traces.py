"""The spans of a request in a decode worker. Where nothing is traced they do nothing.

queue            from when the request was stored until it was taken (below the client's span, as `serve` is)
hand over        offering it to a worker that holds its prefix: that one's `serve` is below it
serve            from taking it until it ends
  load           finding its blocks; `transfer` and `await prefill` are below it
  compute prompt what is left of the prompt, until the first token
  decode         the tokens after it; some of the asks for drafts are below it
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from services.decode.sequence import Sequence
from shared.bus.base import Job
from shared.messages import Failed, Finished, Generate
from shared.tracing import HEADER, OFF, UNTRACED, Attributes, Kind, Span, Tracer


class Trace:
    """Of one request. `draft_due` says when the next ask for drafts gets a span: the 1st, 2nd, 4th, 8th …"""

    __slots__ = ("_asks", "_decode", "_prompt", "draft_due", "serve")

    def __init__(self, serve: Span) -> None:
        self.serve = serve
        self._prompt = self._decode = UNTRACED
        self._asks = 0
        self.draft_due = 1

    @contextmanager
    def loading(self, sequence: Sequence) -> Iterator[None]:
        """Its blocks are looked for; then what is left of its prompt is computed."""
        sequence.loading = self.serve
        with within(sequence, "load"):
            yield
        if self.serve.recording and not self._prompt.recording and not self._decode.recording:
            self._prompt = self.serve.child("compute prompt")

    def first_token(self) -> None:
        if self.serve.recording:
            self._prompt.end()
            self._decode = self.serve.child("decode")

    def asks(self) -> bool:
        """Drafts are asked for, for this request among others: whether a span may tell of it."""
        if not self._decode.recording:
            return False
        self._asks += 1
        return self._asks >= self.draft_due

    def ask(self, drafter: str, sequences: int, others: list[Trace]) -> Span:
        """The span of such an ask. `others` are due too, and come next."""
        self.draft_due = 2 * self._asks
        told: Attributes = {"trine.drafter": drafter, "trine.sequences": sequences}
        return self._decode.child("ask for drafts", Kind.CLIENT, told, links=[other.serve for other in others])

    def ended(self, event: Finished | Failed) -> None:
        if not self.serve.recording:
            return
        if isinstance(event, Failed):
            self.close(event.code)
            return
        usage, timings = event.usage, event.timings
        self.serve.set(
            {
                "gen_ai.response.finish_reasons": [event.reason],
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "trine.ttft_ms": timings.ttft_ms,
                "trine.prefill_workers": list(event.served_by.prefill),
                "trine.drafters": list(event.served_by.drafter),
            }
        )
        self._decode.set({"trine.drafted_tokens": usage.drafted_tokens, "trine.accepted_tokens": usage.accepted_tokens})
        self.close()

    def close(self, error: str = "") -> None:
        """Whatever became of it: handed back, taken over by another attempt, or ended."""
        for span in (self._prompt, self._decode, self.serve):
            span.end(error)


class Traces:
    """Begins them: `worker` serves `model`."""

    def __init__(self, tracer: Tracer, worker: str, model: str) -> None:
        self._tracer = tracer
        self._worker = worker
        self._model = model

    def taken(self, job: Job, generate: Generate, priority: str, *, handed: bool) -> Trace:
        """A request is about to be served, of which another worker may have told the first part."""
        if self._tracer is OFF and HEADER not in job.headers:
            return NO_TRACE
        if job.delivered == 1 and not handed:
            queue = self._tracer.begin("queue", Kind.CONSUMER, job.headers, self._told(priority), ago=job.age)
            queue.end()
        attributes = self._told(priority) | {
            "gen_ai.operation.name": "chat" if generate.messages is not None else "text_completion",
            "gen_ai.provider.name": "trine",
            "gen_ai.request.model": self._model,
            "trine.request.id": generate.id,
            "trine.attempt": job.delivered,
            "trine.handed_over": handed,
        }
        return Trace(self._tracer.begin(f"serve {self._model}", Kind.CONSUMER, job.headers, attributes))

    def _told(self, priority: str) -> dict[str, str | int | float | bool | list[str]]:
        return {"messaging.system": "nats", "trine.worker": self._worker, "trine.priority": priority}


@contextmanager
def within(sequence: Sequence, name: str, kind: Kind = Kind.INTERNAL) -> Iterator[None]:
    """What is told of the sequence's loading meanwhile is told below a span of this name."""
    outer = sequence.loading
    sequence.loading = inner = outer.child(name, kind)
    try:
        yield
    finally:
        sequence.loading = outer
        if inner is not outer:
            inner.end()


NO_TRACE = Trace(UNTRACED)
