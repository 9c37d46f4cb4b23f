"""Drafts of a head along what its target wrote: which come true, and how sure the head was of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch

from training.drafter.corpus import Corpus
from training.drafter.model import DraftHead

_BATCH = 1024


@dataclass(frozen=True, slots=True)
class Chains:
    """One from each row that a chain can begin at. Drafts are greedy; one comes true when it is the token that the
    target finds most likely, and the next is tried when it is also the one that the target wrote."""

    rows: np.ndarray
    """int64 [n]: where each begins."""
    tried: np.ndarray
    """int64 [n]: drafts up to the first that is wrong, the end of the answer or the depth."""
    true: np.ndarray
    """int64 [n]: of these, how many came true: all, or all but the last."""
    confidence: np.ndarray
    """float32 [n, depth]: probability that the head gave to each draft that was tried."""

    def of(self, chosen: np.ndarray) -> Chains:
        return Chains(self.rows[chosen], self.tried[chosen], self.true[chosen], self.confidence[chosen])

    def agreement(self) -> dict[int, float]:
        """By depth: share of the drafts tried that came true, where there were any."""
        depths = range(1, self.confidence.shape[1] + 1)
        tried = {depth: int((self.tried >= depth).sum()) for depth in depths}
        return {depth: int((self.true >= depth).sum()) / count for depth, count in tried.items() if count}

    def calibration(self, depths: Iterable[int], edges: Iterable[float]) -> list[dict[str, float]]:
        """For each range of confidence between two `edges`, of drafts at these depths: how many, and which share of
        them came true."""
        sure, right = [], []
        for depth in depths:
            tried = self.tried >= depth
            sure.append(self.confidence[tried, depth - 1])
            right.append(self.true[tried] >= depth)
        confidence, came = np.concatenate(sure), np.concatenate(right)
        bounds = list(edges)
        found = []
        for least, most in pairwise(bounds):
            inside = (confidence >= least) & ((confidence < most) | (most == bounds[-1]))
            if count := int(inside.sum()):
                mean = float(confidence[inside].mean())
                found.append({"from": least, "drafts": count, "confidence": mean, "true": float(came[inside].mean())})
        return found


@torch.no_grad()
def drafted(head: DraftHead, corpus: Corpus, depth: int) -> Chains:
    """Chains of at most `depth` drafts from everywhere in `corpus`."""
    parts = [corpus.starts[i : i + _BATCH] for i in range(0, len(corpus.starts), _BATCH)]
    chains = [_drafted(head, corpus, rows, depth) for rows in parts]
    empty = Chains(
        np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros((0, depth), np.float32)
    )
    together = [[getattr(c, name) for c in [empty, *chains]] for name in Chains.__slots__]
    return Chains(*map(np.concatenate, together))


def _drafted(head: DraftHead, corpus: Corpus, rows: np.ndarray, depth: int) -> Chains:
    tried, true = np.zeros(len(rows), np.int64), np.zeros(len(rows), np.int64)
    confidence = np.zeros((len(rows), depth), np.float32)
    live, at, state = np.arange(len(rows)), rows, corpus.states(rows - 1)
    for step in range(depth):
        with torch.autocast("cuda", torch.bfloat16, enabled=corpus.device.type == "cuda"):
            state = head(state, corpus.read(at))
            logits = head.logits(state).float()
        sure, proposed = torch.softmax(logits, 1).max(1)
        draft = proposed.cpu().numpy()
        right = draft == corpus.ids[at, 0]
        tried[live] = step + 1
        true[live[right]] = step + 1
        confidence[live, step] = sure.cpu().numpy()
        on = right & (draft == corpus.written[at]) & (corpus.left[at] > 0)
        if not on.any():
            break
        live, at, state = live[on], at[on] + 1, state[torch.from_numpy(on).to(state.device)]
    return Chains(rows, tried, true, confidence)
