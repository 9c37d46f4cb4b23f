"""`python -m benchmarks.gateway_worker URL MODEL STEP_S`: a decode worker whose model costs nothing.

It takes requests from the queue and writes events as a decode worker does, with the same headers and bytes: one token
for each of its requests, at once and then every STEP_S seconds. It does not wait until events are stored, and computes
nothing, so that the machine has time for what is measured.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import msgpack

from shared.bus.base import Bus, Job
from shared.bus.nats import NatsBus
from shared.codec import decode, encode
from shared.config import Settings
from shared.messages import Beat, Finished, Generate, Identity, ServedBy, Timings, Usage
from shared.streams import REQUEST_HEADER, decode_streams, request_consumers
from shared.subjects import Subjects, tenant_of_request

WORKER = "decode-1"
BEAT_S = 0.5
PULL_S = 5.0
BATCH = 256
PROMPT_TOKENS = 16
IDENTITY = Identity(fingerprint="none", codec="none", block_size=16, block_bytes=1)


@dataclass(slots=True)
class Running:
    id: str
    subject: str
    left: int
    headers: dict[str, str]
    event: dict[str, Any]
    sent: int = 0


@dataclass(slots=True)
class Worker:
    bus: Bus
    subjects: Subjects
    step_s: float
    running: list[Running] = field(default_factory=list)

    async def serve(self, settings: Settings) -> None:
        for stream in decode_streams(self.subjects, settings):
            await self.bus.ensure_stream(stream)
        consumers = request_consumers(self.subjects, settings)
        for consumer in consumers:
            await self.bus.ensure_consumer(consumer)
        normal = self.subjects.request_consumer("normal")
        async with asyncio.TaskGroup() as group:
            group.create_task(self._beat())
            group.create_task(self._step())
            while True:
                for job in await self.bus.pull(self.subjects.request_stream, normal, BATCH, PULL_S):
                    await self._take(job)

    async def _take(self, job: Job) -> None:
        request = decode(job.data, Generate)
        event = {
            "v": 1,
            "id": request.id,
            "attempt": 1,
            "type": "tokens",
            "index": 0,
            "token_ids": [0],
            "text": " word",
        }
        running = Running(
            request.id,
            self.subjects.events(request.id, tenant_of_request(job.subject)),
            request.max_tokens or 1,
            {REQUEST_HEADER: str(job.seq), "Trine-Cached": "0"},
            event,
        )
        await self._token(running)
        self.running.append(running)
        await job.ack()

    async def _step(self) -> None:
        due = time.monotonic()
        while True:
            due = max(due + self.step_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            for running in self.running:
                await (self._token(running) if running.left else self._end(running))
            self.running = [running for running in self.running if running.left >= 0]

    async def _token(self, running: Running) -> None:
        running.event["index"] = running.sent
        running.event["token_ids"][0] = 1000 + running.sent
        running.sent += 1
        running.left -= 1
        await self.bus.publish(running.subject, msgpack.packb(running.event), running.headers)

    async def _end(self, running: Running) -> None:
        running.left = -1
        usage = Usage(prompt_tokens=PROMPT_TOKENS, completion_tokens=running.sent)
        end = Finished(
            id=running.id, reason="length", seed=0, usage=usage, timings=Timings(), served_by=ServedBy(decode=WORKER)
        )
        await self.bus.publish(running.subject, encode(end), running.headers)

    async def _beat(self) -> None:
        beat = encode(Beat(role="decode", worker=WORKER, life="1", identity=IDENTITY))
        while True:
            await self.bus.publish(self.subjects.beat("decode", WORKER), beat)
            await asyncio.sleep(BEAT_S)


async def main(url: str, model: str, step_s: str) -> None:
    bus = await NatsBus.connect(url, name=WORKER, wait=10)
    await Worker(bus, Subjects(model), float(step_s)).serve(Settings())


if __name__ == "__main__":
    import uvloop

    uvloop.run(main(*sys.argv[1:]))
