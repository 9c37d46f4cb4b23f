"""Fills an admitted sequence's blocks: from the shared cache, then by a prefill worker; the rest is left to steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext

import anyio
import structlog

from services.decode.config import DecodeSettings
from services.decode.scheduler import DecodeScheduler
from services.decode.sequence import Sequence
from services.decode.traces import within
from shared.bus.base import Bus
from shared.cache.claims import Claims, Flight, Need
from shared.cache.prefix import PrefixCache
from shared.codec import encode
from shared.engine.base import StepEngine
from shared.errors import BusError, SequenceConflict, TooLarge
from shared.lifecycle import Phase
from shared.messages import PrefillJob
from shared.patience import Patience
from shared.peers import Peers
from shared.subjects import Subjects
from shared.telemetry import Counters
from shared.tracing import Kind

POLL_S = 0.5
CLAIM_MIN_BLOCKS = 4
"""With fewer blocks to compute here, nobody is told or asked about them: that would take longer than it could save."""
LOOK_S = 0.02
"""How often a flight is looked at: nobody waits for its end while its blocks come."""

log = structlog.get_logger()


class Loader:
    """Brings blocks for sequences that are LOADING. Every wait ends: by blocks, by a deadline, by the peer's death."""

    def __init__(
        self,
        settings: DecodeSettings,
        *,
        bus: Bus,
        subjects: Subjects,
        scheduler: DecodeScheduler,
        engine: StepEngine,
        cache: PrefixCache,
        claims: Claims,
        peers: Peers,
        counters: Counters,
        spawn: Callable[..., None],
    ) -> None:
        self._settings = settings
        self._bus = bus
        self._subjects = subjects
        self._scheduler = scheduler
        self._engine = engine
        self._cache = cache
        self._claims = claims
        self._peers = peers
        self._counters = counters
        self._spawn = spawn
        self._block_size = engine.info.block_size

    async def load(
        self,
        sequence: Sequence,
        budget_s: float,
        on_producers: Callable[[set[str]], None],
        *,
        remotely: bool = True,
    ) -> None:
        """Load what can be loaded; the sequence is READY afterwards unless it was ended meanwhile.

        `budget_s`: the time its request has left. `remotely`: prefill workers may compute what is missing.
        """
        if sequence.phase is not Phase.LOADING:
            return  # ended between its admission and this task's first step
        epoch = sequence.epoch
        wanted = (len(sequence.tokens) - 1) // self._block_size
        have = sequence.computed // self._block_size
        await self._fetch(sequence, epoch, have + self._cache.longest(sequence.names[have:wanted]))
        if sequence.epoch != epoch:
            return
        if sequence.cached_tokens is None:
            sequence.cached_tokens = min(sequence.computed, sequence.prompt_len)
        since = None
        if remotely and sequence.phase is Phase.LOADING and self._worth_a_job(sequence, wanted):
            with within(sequence, "await prefill", Kind.PRODUCER):
                since = await self._prefill_remotely(sequence, epoch, wanted, budget_s, on_producers)
        if self._loading(sequence, epoch) and wanted - sequence.computed // self._block_size >= CLAIM_MIN_BLOCKS:
            await self._lead(sequence, epoch, wanted, since)
        if self._loading(sequence, epoch):
            self._scheduler.loaded(sequence)

    def _loading(self, sequence: Sequence, epoch: int) -> bool:
        """Whether it is still the one that was to be loaded: not ended, not preempted, not ready to go on."""
        return sequence.epoch == epoch and sequence.phase is Phase.LOADING

    def _worth_a_job(self, sequence: Sequence, wanted: int) -> bool:
        missing = wanted * self._block_size - sequence.computed
        return missing > self._settings.local_prefill_tokens and self._prefill_alive()

    def _prefill_alive(self) -> bool:
        return bool(self._peers.alive("prefill", time.monotonic()))

    async def _fetch(self, sequence: Sequence, epoch: int, upto: int) -> set[str]:
        """Blocks up to number `upto` from the shared cache into the pool; stops at the first miss."""
        first, short = sequence.computed // self._block_size, False

        def wanted() -> bool:
            return self._loading(sequence, epoch)

        def claim(index: int) -> int | None:
            nonlocal short
            block = self._scheduler.place(sequence, first + index) if wanted() else None
            short = wanted() and block is None
            return block

        def take(index: int) -> bool:
            if wanted():  # else its blocks may belong to somebody else by now
                self._scheduler.filled(sequence, first + index)
                self._cache.share(sequence.meta(first + index, self._block_size))
            return wanted()

        metas = [sequence.meta(i, self._block_size) for i in range(first, upto)]
        began = time.monotonic()
        with within(sequence, "transfer") if metas else nullcontext():
            producers = await self._cache.fetch(metas, claim, take)
        sequence.fetched_s += time.monotonic() - began
        if short and wanted():  # those before it in rank took what there was: the rest is computed when there is more
            self._scheduler.loaded(sequence)
        return producers

    async def _prefill_remotely(
        self,
        sequence: Sequence,
        epoch: int,
        wanted: int,
        budget_s: float,
        on_producers: Callable[[set[str]], None],
    ) -> float:
        """Have the missing blocks computed elsewhere and pull each as it appears. Gives up without progress, of the
        job or of the worker that is known to be at it.

        Returns the time of the last block.
        """
        began, asked, again = time.monotonic(), False, False
        patience = Patience(self._settings.prefill_patience_s, began, began)
        patience.hear(*self._claims.at_work(sequence.names[wanted - 1], began), began)
        while (have := sequence.computed // self._block_size) < wanted:
            if not asked and not await self._publish_job(sequence, wanted, budget_s, again):
                return patience.progress
            if not self._loading(sequence, epoch):
                return patience.progress
            present = await self._cache.wait(sequence.names[have:wanted], POLL_S)
            if not self._loading(sequence, epoch):
                return patience.progress
            on_producers(await self._fetch(sequence, epoch, have + present))
            if not self._loading(sequence, epoch):
                return patience.progress
            # Asked again while nothing comes: the job may be gone, with its worker or with another's cancel.
            asked, again = sequence.computed // self._block_size > have, True
            now = time.monotonic()
            patience.hear(*self._claims.at_work(sequence.names[have], now), now)
            if asked:
                patience.progress = now
            elif patience.over(now) or not self._prefill_alive():
                self._counters["prefill_given_up"] += 1
                log.info("no prefill; computing here", request=sequence.id, missing=sequence.remaining)
                return patience.progress
        return patience.progress

    async def _lead(self, sequence: Sequence, epoch: int, wanted: int, since: float | None) -> None:
        """Claim the missing blocks and bring those that others compute: what is missing then, is computed here."""
        need = Need(
            sequence.names[:wanted],
            have=lambda: sequence.computed // self._block_size,
            wanted=lambda: self._loading(sequence, epoch),
            fetch=lambda upto: self._fetch(sequence, epoch, upto),
        )
        flight = await self._claims.lead(need, self._settings.prefill_patience_s, since)
        if flight is not None:
            self._spawn(self._follow, flight, sequence, epoch, need)

    async def _follow(self, flight: Flight, sequence: Sequence, epoch: int, need: Need) -> None:
        """End the flight when its blocks are stored, or when the sequence has lost them."""
        while sequence.epoch == epoch and need.have() < len(need.names):
            await anyio.sleep(LOOK_S)
        await self._cache.settled(need.names)
        self._claims.end(flight)

    async def _publish_job(self, sequence: Sequence, wanted: int, budget_s: float, again: bool) -> bool:
        # When it has waited so long for a prefill worker, this worker will have given up on it.
        useful_s = min(budget_s, 2 * self._settings.prefill_patience_s)
        job = PrefillJob(
            request=sequence.id,
            tenant=sequence.lineage.tenant,
            salt=sequence.lineage.salt,
            public_blocks=min(sequence.lineage.public, wanted),
            fingerprint=self._engine.info.fingerprint,
            token_ids=sequence.tokens[: wanted * self._block_size],
            budget_ms=max(int(useful_s * 1000), 1),
        )
        try:
            await self._bus.append(
                self._subjects.prefill(sequence.names[wanted - 1]),
                encode(job),
                headers=sequence.loading.headers,
                expect_last=0,
                timeout=2.0,
            )
            self._counters["prefill_jobs"] += 1
        except SequenceConflict:
            sequence.loading.set({"trine.joined": True})
            self._counters["prefill_joined"] += int(not again)  # the same prefix is being computed already
        except (BusError, TooLarge) as error:
            log.info("prefill job not published; computing here", request=sequence.id, error=str(error))
            return False
        return True
