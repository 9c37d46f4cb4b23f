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
MEMORY_RATE = 8e9
"""Bytes per second between workers of one machine, through its memory."""
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
    """Bytes of blocks read from it by others."""
    messages: float
    requests: float

    @property
    def share(self) -> float:
        """Of what one server takes, of whichever it has least of."""
        return max(self.bytes_share, self.messages / MESSAGE_RATE, self.requests / QUEUE_RATE)

    @property
    def bytes_share(self) -> float:
        return (self.put + self.got) / SERVER_RATE

    @property
    def fleets(self) -> int:
        """Of workers with a NATS server of their own, into which the load has to be split."""
        return max(1, math.ceil(self.share / PLANNED - 1e-9))


def traffic(costs: Costs, load: Load, computed: float, *, remote: bool) -> Traffic:
    """`computed`: tokens of a prompt that are; the others are read. `remote`: prefill workers compute them.

    Whoever computes a block publishes it, also while an answer is generated. A decode worker reads what it did not
    compute, as if its own pool never had it: through the machine's memory if that is one, and else through NATS.
    """
    each = costs.kv_bytes * load.requests_per_s
    read = 0.0 if load.one_machine else load.prompt if remote else load.prompt - computed
    # A step's tokens of one sequence are one event, which is published, acked and heard.
    messages = load.requests_per_s * (MESSAGES + 3 * load.output)
    return Traffic(each * (computed + load.output), each * read, messages, load.requests_per_s)
