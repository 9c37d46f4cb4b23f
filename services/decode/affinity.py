"""Whether another decode worker should have a request, because its pool holds the prompt's prefix. Pure.

A preference, no ownership: a worker is asked at most once for a request, only when it has little to do, and whoever
does not answer at once is not waited for. Decided by what the workers' beats say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shared.cache.summary import Summary
from shared.messages import Beat, HeldBlocks

MIN_GAIN = 64
"""Tokens. Less is fetched or computed faster than it takes to hand a request over."""
LOAD_TOKENS = 1024
"""Each sequence that the other runs more than this worker must be outweighed by so many tokens of prefix: the other
tiers have most prefixes too, and one worker's steps are shared by all its sequences."""


@dataclass(slots=True)
class _Peer:
    beat: Beat
    handed: int = 0
    """Requests that it took and that its beat does not show yet."""
    silent: bool = False


class Affinity:
    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._peers: dict[str, _Peer] = {}
        self._held: dict[str, Summary] = {}

    def observe(self, held: HeldBlocks) -> None:
        """A worker told what its pool holds."""
        self._held[held.worker] = Summary(held)

    def choose(self, names: Sequence[bytes], mine: int, running: int, beats: Sequence[Beat]) -> str | None:
        """Whom to offer a prompt whose blocks have these `names`; None to keep it.

        `mine` of them are in this worker's pool, which runs `running` sequences; `beats`: of the live decode workers,
        which were told of by `observe`.
        """
        best, most = None, MIN_GAIN - 1
        for peer in self._current(beats):
            held = self._held.get(peer.beat.worker)
            if held is None or peer.silent or peer.beat.load.waiting:
                continue
            gain = (held.longest(names) - mine) * self._block_size
            gain -= LOAD_TOKENS * max(peer.beat.load.running + peer.handed - running, 0)
            if gain > most:
                best, most = peer.beat.worker, gain
        return best

    def took(self, worker: str) -> None:
        if (peer := self._peers.get(worker)) is not None:  # else it has fallen silent meanwhile
            peer.handed += 1

    def refused(self, worker: str) -> None:
        """It did not want the request, or said nothing: it is left alone until its next beat."""
        if (peer := self._peers.get(worker)) is not None:
            peer.silent = True

    def _current(self, beats: Sequence[Beat]) -> list[_Peer]:
        live = {}
        for beat in beats:
            known = self._peers.get(beat.worker)
            live[beat.worker] = known if known and known.beat is beat else _Peer(beat)
        self._peers = live
        self._held = {worker: held for worker, held in self._held.items() if worker in live}
        return list(live.values())
