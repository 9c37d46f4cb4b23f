"""Who else is alive, from their beats. Time is passed in, so that tests need no clock."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

from shared.messages import Beat, Identity


@dataclass(slots=True)
class _Peer:
    beat: Beat
    seen: float


class Peers:
    """Live workers of one model. `timeout` is in seconds of the caller's monotonic clock."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._peers: dict[str, _Peer] = {}
        self._mismatched: set[str] = set()

    def observe(self, beat: Beat, now: float) -> bool:
        """Take in a beat; True for a worker that was not known, or had fallen silent."""
        self._forget_silent(now)
        new = beat.worker not in self._peers
        self._peers[beat.worker] = _Peer(beat, now)
        return new

    def alive(self, role: str, now: float) -> list[Beat]:
        """Beats of the role's live, not draining workers, by name."""
        self._forget_silent(now)
        return [
            p.beat
            for name, p in sorted(self._peers.items())
            if p.beat.role == role and not p.beat.draining and name not in self._mismatched
        ]

    def present(self, worker: str, now: float) -> bool:
        """Whether this worker's beats come, whatever its role and also while it drains."""
        self._forget_silent(now)
        return worker in self._peers

    def counted(self, counter: str, now: float) -> dict[str, int]:
        """This counter in the last beat of each worker that is there."""
        self._forget_silent(now)
        return {name: peer.beat.counters.get(counter, 0) for name, peer in self._peers.items()}

    def lives(self, worker: str, life: str, since: float) -> bool:
        """Whether the process that had this worker's name then has been heard since."""
        peer = self._peers.get(worker)
        return peer is not None and peer.beat.life == life and peer.seen >= since

    def fleet(self, now: float) -> list[tuple[str, Identity]]:
        """Live workers that hold blocks, by name, and what they must have in common with others that do."""
        self._forget_silent(now)
        beats = [p.beat for _, p in sorted(self._peers.items()) if not p.beat.draining]
        return [(beat.worker, beat.identity) for beat in beats if beat.identity is not None]

    def joining(self, now: float) -> list[tuple[str, Identity]]:
        """As `fleet`: those that hold blocks and do not serve yet."""
        self._forget_silent(now)
        beats = [p.beat for _, p in sorted(self._peers.items()) if p.beat.joining]
        return [(beat.worker, beat.identity) for beat in beats if beat.identity is not None]

    def _forget_silent(self, now: float) -> None:
        for name in [n for n, p in self._peers.items() if now - p.seen > self._timeout]:
            del self._peers[name]
            self._mismatched.discard(name)

    def mismatch(self, beat: Beat, identity: Identity, vocabulary: str) -> list[str]:
        """What keeps us from pairing with a peer, reported once; the peer is not `alive` to us while it differs."""
        if beat.identity is not None:
            differences = identity.differences(beat.identity)
        else:
            differences = [] if beat.vocabulary == vocabulary else ["vocabulary"]
        if not differences:
            self._mismatched.discard(beat.worker)
            return []
        if beat.worker in self._mismatched:
            return []
        self._mismatched.add(beat.worker)
        return differences


def stays(starting: list[tuple[str, Identity]]) -> tuple[str, Identity]:
    """Of workers that start together and differ: the first, by name, of those that serve; the others give way.

    Most of one kind serve; of as many, the kind with the first name. Everybody who heard the same decides the same.
    """
    kinds = Counter(identity for _, identity in starting)
    return min(starting, key=lambda one: (-kinds[one[1]], one[0]))


def rendezvous(key: str, candidates: list[str]) -> str | None:
    """The candidate that `key` belongs to: stable while it lives, and only its keys move when one leaves."""
    return max(candidates, key=lambda c: hashlib.blake2b(f"{key}\0{c}".encode(), digest_size=8).digest(), default=None)
