"""What a step brought goes where it belongs: tokens to their requests' events, full blocks to the cache."""

from __future__ import annotations

import time
from collections.abc import Callable

from services.decode.desk import Desk
from services.decode.request import Request
from services.decode.sequence import Outcome
from shared.cache.prefix import PrefixCache
from shared.telemetry import Counters


class Delivery:
    """`began` is called when a request has its first token here, `ended` when one has its last."""

    def __init__(
        self,
        desk: Desk,
        cache: PrefixCache,
        block_size: int,
        counters: Counters,
        *,
        began: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self._desk = desk
        self._cache = cache
        self._block_size = block_size
        self._counters = counters
        self._began = began
        self._ended = ended

    def __call__(self, outcome: Outcome) -> None:
        sequence = outcome.sequence
        request = self._desk.requests[sequence.id]
        for index in outcome.filled:
            self._cache.offer(sequence.meta(index, self._block_size))
            self._counters["computed_blocks"] += int(index < sequence.prompt_len // self._block_size)
        if outcome.tokens:
            self._tokens(request, outcome)

    def _tokens(self, request: Request, outcome: Outcome) -> None:
        if not request.first_token:
            self._first(request)
        request.drafted += outcome.drafted
        self._counters["drafted_tokens"] += outcome.drafted
        self._counters["generated_tokens"] += len(outcome.tokens)
        for position, token in enumerate(outcome.tokens):
            delta = request.completion.push(token)
            request.here += 1
            request.accepted += int(position < outcome.accepted)
            self._counters["accepted_tokens"] += int(position < outcome.accepted)
            # This token is the model's own, where another was drafted; or a form ends, which says nothing of the draft.
            cut = position == outcome.accepted < outcome.drafted and not outcome.sequence.complete
            self._counters["cut_drafts"] += int(cut)
            request.events.push(token, delta.text, outcome.logprobs[position] if outcome.logprobs else None)
            completes = outcome.sequence.complete and position == len(outcome.tokens) - 1
            if reason := "stop" if completes else delta.finished:
                self._desk.finish(request, reason)
                self._ended()
                return

    def _first(self, request: Request) -> None:
        request.first_token = time.monotonic()
        request.trace.first_token()
        request.fetched_s = request.sequence.fetched_s
        self._counters["prompt_tokens"] += request.sequence.prompt_len
        self._counters["cached_tokens"] += request.sequence.cached_tokens or 0
        self._desk.proven(request)
        self._began()
