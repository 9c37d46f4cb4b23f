"""What a deployment puts on NATS, and how much of that one server takes. Pure arithmetic.

Rates were measured with nats-server 2.15 on two cores; they are of one server, whose stream of blocks a model has once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trine.plan_cost import Costs
from trine.plan_load import Load

SERVER_RATE = 690e6
"""Bytes per second through one server, in and out together, before it is the limit."""
LINK_RATE = 500e6
"""Bytes per second that one worker gets."""
MEMORY_RATE = 4.4e9
"""Bytes per second between workers of one machine, through its memory: reads of 1 MiB blocks from the host tier, two
cores (benchmarks/results/transfer.json)."""
MESSAGE_RATE = 90_000.0
"""Small messages per second through one server."""
QUEUE_RATE = 1_400.0
"""Requests per second that one stream of them gives out, each asked for alone."""
PLANNED = 0.7
"""Of these, a plan uses so much: beyond that waiting grows."""
MESSAGES = 14
"""For a request beside its tokens: publish, pull, two acks, notes, beats of its workers, the events at both ends."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Per second, of the whole load."""

    put: float
    """Bytes of blocks written to the cache."""
    got: float
    """Bytes of blocks that decode workers read from it."""
    fetched: float
    """Bytes that prefill workers read from it: what their jobs begin with and others computed before."""
    messages: float
    requests: float

    @property
    def moved(self) -> float:
        return self.put + self.got + self.fetched

    @property
    def share(self) -> float:
        """Of what one server takes, of whichever it has least of."""
        return max(self.bytes_share, self.messages / MESSAGE_RATE, self.requests / QUEUE_RATE)

    @property
    def bytes_share(self) -> float:
        return self.moved / SERVER_RATE

    @property
    def fleets(self) -> int:
        """Of workers with a NATS server of their own, into which the load has to be split."""
        return max(1, math.ceil(self.share / PLANNED - 1e-9))


def traffic(costs: Costs, load: Load, *, remote: bool) -> Traffic:
    """`remote`: prefill workers compute prompts.

    Whoever computes a block publishes it, also while an answer is generated; what is known already is not published
    again. A worker reads what it did not compute, as if its own pool never had it: through the machine's memory if
    that is one, and else through NATS.
    """
    each = costs.kv_bytes * load.requests_per_s
    got = load.prompt if remote else load.cached
    fetched = load.cached if remote else 0.0
    far = 0.0 if load.one_machine else each
    # A step's tokens of one sequence are one event, which is published, acked and heard.
    messages = load.requests_per_s * (MESSAGES + 3 * load.output)
    return Traffic(each * (load.computed + load.output), far * got, far * fetched, messages, load.requests_per_s)


def fetch_s(costs: Costs, load: Load) -> float:
    """Seconds for one token's KV from another worker."""
    return costs.kv_bytes / (MEMORY_RATE if load.one_machine else LINK_RATE)
