"""The streams and consumers of one model. Every role that uses one ensures it, so none must start first.

`replicas`: how many servers of a cluster keep it. All of these streams have as many (`TRINE_NATS_REPLICAS`), also those
whose loss would cost only time: a stream that is away for as long as its one server is would stop who writes to it.
Blocks alone always have one: they are bulk, and one that is not there is computed.
"""

from __future__ import annotations

from shared.bus.base import ConsumerSpec, StreamSpec
from shared.config import MiB, Settings
from shared.messages import Claim, DeadLetter, Generate, PrefillJob
from shared.subjects import PRIORITIES, Subjects

HEADER_SLACK = 4096
EVENT_AGE_S = 1800.0
PREFILL_BYTES = 128 * MiB
EVENT_BYTES = 256 * MiB
CLAIM_BYTES = 4 * MiB
ATTEMPT_BYTES = 16 * MiB
DEAD_BYTES = 64 * MiB
DEAD_AGE_S = 7 * 86_400.0
CLAIM_AGE_S = 120.0
"""Longer than anybody computes without pause; shorter, and a claim whose end was never told delays too many."""
MEMORY_STREAMS = (
    PREFILL_BYTES + EVENT_BYTES + CLAIM_BYTES + ATTEMPT_BYTES + 640 * MiB
)  # what the server must have beside the cache, with room
REQUEST_HEADER = "Trine-Request"
"""On events: the stream sequence of the request they answer; tells two requests with one id apart."""


def request_stream(subjects: Subjects, settings: Settings) -> StreamSpec:
    """Requests waiting for a decode worker. On disk: they survive a restart of the server. Full means refused."""
    return StreamSpec(
        name=subjects.request_stream,
        subjects=subjects.requests,
        retention="workqueue",
        storage="file",
        discard="new",
        max_msgs=settings.max_queued,
        # Longer ones are stored too, so that they get an answer that says why they are refused.
        max_msg_size=2 * Generate.max_bytes - HEADER_SLACK,
        replicas=settings.nats_replicas,
    )


def request_consumers(subjects: Subjects, settings: Settings) -> list[ConsumerSpec]:
    return [
        ConsumerSpec(
            stream=subjects.request_stream,
            name=subjects.request_consumer(priority),
            filter_subjects=subjects.requests_of(priority),
            ack_wait=settings.ack_wait_s,
        )
        for priority in PRIORITIES
    ]


def prefill_stream(subjects: Subjects, replicas: int = 1) -> StreamSpec:
    """Prefill jobs. In memory: a lost job is computed by the decode worker that wanted it."""
    return StreamSpec(
        name=subjects.prefill_stream,
        subjects=(subjects.prefills,),
        retention="workqueue",
        storage="memory",
        discard="new",
        max_msgs=10_000,
        max_bytes=PREFILL_BYTES,
        max_msg_size=PrefillJob.max_bytes - HEADER_SLACK,
        max_age=600.0,
        replicas=replicas,
    )


def prefill_consumer(subjects: Subjects, settings: Settings) -> ConsumerSpec:
    return ConsumerSpec(
        stream=subjects.prefill_stream,
        name=subjects.prefill_consumer,
        filter_subjects=(subjects.prefills,),
        ack_wait=settings.ack_wait_s,
    )


def event_stream(subjects: Subjects, replicas: int = 1) -> StreamSpec:
    """Token events, kept for whoever continues a request or reads its stream again."""
    return StreamSpec(
        name=subjects.event_stream,
        subjects=subjects.all_events,
        storage="memory",
        discard="old",
        max_bytes=EVENT_BYTES,
        max_age=EVENT_AGE_S,
        replicas=replicas,
    )


def claim_stream(subjects: Subjects, replicas: int = 1) -> StreamSpec:
    """The claim log. A claim that is lost with it costs a block computed twice, no more."""
    return StreamSpec(
        name=subjects.claim_stream,
        subjects=(subjects.claims,),
        storage="memory",
        discard="old",
        max_bytes=CLAIM_BYTES,
        max_msg_size=Claim.max_bytes,
        max_age=CLAIM_AGE_S,
        replicas=replicas,
    )


def attempt_stream(subjects: Subjects, replicas: int = 1) -> StreamSpec:
    """Who was at work on which request. What is lost of it lets a request that kills workers be tried once more."""
    return StreamSpec(
        name=subjects.attempt_stream,
        subjects=(subjects.attempts,),
        storage="memory",
        discard="old",
        max_bytes=ATTEMPT_BYTES,
        max_age=EVENT_AGE_S,
        replicas=replicas,
    )


def dead_stream(subjects: Subjects, replicas: int = 1) -> StreamSpec:
    """Requests that were given up, for operators: on disk, one for each id, the oldest go first."""
    return StreamSpec(
        name=subjects.dead_stream,
        subjects=(subjects.dead(None, None),),
        storage="file",
        discard="old",
        max_bytes=DEAD_BYTES,
        max_msgs_per_subject=1,
        max_msg_size=DeadLetter.max_bytes - HEADER_SLACK,
        max_age=DEAD_AGE_S,
        replicas=replicas,
    )


def decode_streams(subjects: Subjects, settings: Settings) -> list[StreamSpec]:
    """What a decode worker needs, beside the cache."""
    replicas = settings.nats_replicas
    return [
        request_stream(subjects, settings),
        prefill_stream(subjects, replicas),
        event_stream(subjects, replicas),
        claim_stream(subjects, replicas),
        attempt_stream(subjects, replicas),
        dead_stream(subjects, replicas),
    ]
