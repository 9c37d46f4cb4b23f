"""A simulated drafter: answers one ask after another, and is right as often as was measured."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from random import Random

from benchmarks.simulate_clock import Clock, Machine
from benchmarks.simulate_costs import Costs
from benchmarks.simulate_world import VOCABULARY, Request
from services.decode.drafters import Ask
from shared.messages import Draft, DraftItem

SOURCE = "head"


class Drafter:
    def __init__(self, name: str, costs: Costs, clock: Clock, cores: Machine, requests: Mapping[str, Request]) -> None:
        self.name = name
        self._costs, self._clock, self._cores, self._requests = costs, clock, cores, requests
        self._asks: deque[tuple[Ask, Callable[[list[Draft]], None]]] = deque()
        self._draw = Random(name)
        self._working = False
        self.busy_s = 0.0

    def ask(self, ask: Ask, answer: Callable[[list[Draft]], None]) -> None:
        self._asks.append((ask, answer))
        self._work()

    def _work(self) -> None:
        if self._working or not self._asks:
            return
        self._working = True
        ask, answer = self._asks.popleft()
        tokens = sum(item.k for item in ask.items)
        started = self._clock.now

        def done() -> None:
            self._working = False
            self.busy_s += self._clock.now - started
            answer([self._draft(item) for item in ask.items if item.session in self._requests])
            self._work()

        self._cores.run(self._costs.draft_base_s + tokens * self._costs.draft_token_s, done)

    def _draft(self, item: DraftItem) -> Draft:
        request = self._requests[item.session]
        start, tokens = item.base + len(item.token_ids), []
        right = True
        for position in range(start, start + item.k):
            right = right and self._draw.random() < request.acceptance
            token = request.target(position)
            tokens.append(token if right else (token + 1) % VOCABULARY)
        chances = [request.acceptance] * item.k
        return Draft(session=item.session, position=start, token_ids=tokens, source=SOURCE, chances=chances)
