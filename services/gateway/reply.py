"""One HTTP answer: whole, or as server-sent events. Ends, and cancels its requests, when the client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence

import structlog
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from services.gateway import sse
from services.gateway.answers import Answers
from services.gateway.metrics import Metrics
from services.gateway.problems import Problem, problem_of
from services.gateway.requests import Call
from services.gateway.shapes import Shape, end_reason, usage_of
from services.gateway.sse import Position
from services.gateway.tool_stream import ToolStream
from shared.errors import TrineError
from shared.tracing import Span
from trine.completion import Completion
from trine.merge import Delta
from trine.stream import Stream

EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect events
]
log = structlog.get_logger()


class Reply(Response):
    """An ASGI response. `positions`: what the client has of each choice. `ended` is called once, whatever happens.

    An error before the first piece of a streamed answer has a status of its own; later it is one last event, and
    neither `[DONE]` nor a `finish_reason` follows.
    """

    def __init__(
        self,
        call: Call,
        shape: Shape,
        streams: Sequence[Stream],
        positions: list[Position],
        *,
        metrics: Metrics,
        keepalive_s: float,
        check: Callable[[bool], None],
        ended: Callable[[], None],
        completed: Callable[[Completion], None],
        span: Span,
    ) -> None:
        super().__init__()
        self._call = call
        self._shape = shape
        self._answers = Answers(streams, check)
        self._positions = positions
        self._tools = shape.tool_streams(positions)
        self._metrics = metrics
        self._keepalive_s = keepalive_s
        self._ended = ended
        self._completed = completed
        self._span = span
        self._began = time.monotonic()
        self._last = [0.0] * len(positions)
        self._greeted = [position.tokens + position.characters > 0 for position in positions]
        self._completions: dict[int, Completion] = {}
        self._streaming = False
        self._outcome = "cancelled"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.create_task(self._work(scope, receive, send))
        gone = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not work.done():
                work.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait({work, gone})
            self._ended()
            self._metrics.requests.labels(self._shape.model, self._outcome).inc()
            self._span.end("" if self._outcome == "ok" else self._outcome)
        if not work.cancelled() and (error := work.exception()) is not None:
            raise error

    async def _work(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with self._answers:
                await (self._stream(send) if self._call.stream else self._whole(scope, receive, send))
            self._outcome = "ok"
        except (Problem, TrineError) as error:
            problem = error if isinstance(error, Problem) else problem_of(error, self._call.form)
            self._outcome = problem.code or "internal"
            log.info("request failed", request=self._shape.id, code=problem.code, error=problem.message)
            await self._fail(problem, scope, receive, send)

    async def _fail(self, problem: Problem, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._streaming:
            await JSONResponse(problem.body, problem.status, problem.headers)(scope, receive, send)
            return
        await send({"type": "http.response.body", "body": sse.event(problem.body), "more_body": False})

    async def _whole(self, scope: Scope, receive: Receive, send: Send) -> None:
        while len(self._completions) < len(self._positions):
            for found in await self._answers.next(self._keepalive_s):
                self._take(*found)
        body = self._shape.whole([self._completions[i] for i in range(len(self._positions))], self._usage())
        await JSONResponse(body, headers={"x-request-id": self._shape.id})(scope, receive, send)

    async def _stream(self, send: Send) -> None:
        while len(self._completions) < len(self._positions):
            found = await self._answers.next(self._keepalive_s)
            frames = [frame for each in found for frame in self._frames(*each)] if found else [sse.COMMENT]
            if frames:
                await self._send(send, b"".join(frames))
        last = [sse.event(self._shape.usage(self._usage()), self._event_id())] if self._call.include_usage else []
        await self._send(send, b"".join([*last, sse.DONE]), more=False)

    async def _send(self, send: Send, body: bytes, more: bool = True) -> None:
        if not self._streaming:
            self._streaming = True
            headers = [*EVENT_STREAM, (b"x-request-id", self._shape.id.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": more})

    def _frames(self, choice: int, item: Delta | Completion) -> list[bytes]:
        """Events for what came. A piece that shows nothing yet has none; the next one's id counts it."""
        frames: list[bytes] = []
        if not self._greeted[choice]:
            self._greeted[choice] = True
            if (begin := self._shape.begin(choice)) is not None:
                frames.append(sse.event(begin))
        position = self._positions[choice]
        self._take(choice, item)
        if self._tools:
            return frames + self._tool_frames(choice, self._tools[choice], item)
        if isinstance(item, Completion):
            frames.append(sse.event(self._shape.end(choice, item.finish_reason), self._event_id()))
            return frames
        offset = position.characters
        position.tokens = item.index + len(item.token_ids)
        position.characters += len(item.text)
        if item.text or item.logprobs:
            frames.append(sse.event(self._shape.delta(choice, item, offset), self._event_id()))
        return frames

    def _tool_frames(self, choice: int, tools: ToolStream, item: Delta | Completion) -> list[bytes]:
        """The event of a message that may call tools, if the piece shows anything."""
        if isinstance(item, Completion):
            left = tools.end()
            chunk = self._shape.end(choice, end_reason(item.finish_reason, tools.called), left)
            return [sse.event(chunk, self._event_id())]
        new, delta = tools.take(item)
        position = self._positions[choice]
        position.tokens = max(position.tokens, item.index + len(item.token_ids))
        position.characters += len(new.text)
        if not delta and not new.logprobs:
            return []
        return [sse.event(self._shape.part(choice, delta, new), self._event_id())]

    def _take(self, choice: int, item: Delta | Completion) -> None:
        """Raises a Problem for an answer that somebody cancelled."""
        now = time.monotonic()
        if isinstance(item, Completion):
            if item.finish_reason == "cancelled":
                raise Problem(499, "the request was cancelled", "cancelled")
            self._completions[choice] = item
            self._completed(item)
            self._metrics.complete(self._shape.model, item.usage, now - self._began)
            return
        if self._last[choice]:
            self._metrics.later_tokens(self._shape.model, now - self._last[choice], len(item.token_ids))
        else:
            self._metrics.first_token(self._shape.model, now - self._began)
        self._last[choice] = now

    def _event_id(self) -> str:
        return sse.event_id(self._shape.id, self._positions)

    def _usage(self) -> dict[str, object]:
        usages = [self._completions[i].usage for i in range(len(self._positions))]
        return usage_of(usages, [choice.prompt for choice in self._call.choices])


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
