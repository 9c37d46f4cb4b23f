"""Distils the target into a draft head. What a step does follows from settings, data and step number alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from training.drafter import checkpoint
from training.drafter.chains import drafted
from training.drafter.checkpoint import Progress
from training.drafter.corpus import Corpus
from training.drafter.loss import distillation, likelihood
from training.drafter.model import DraftHead
from training.drafter.settings import TrainSettings

Say = Callable[[str], None]

NOTED, JUDGED = 20, 200
"""Steps between two entries of the history, and between two that have the agreement on held-out conversations."""
_LOWEST = 0.05
"""The learning rate at the end, as a share of its peak."""
_BETAS = (0.9, 0.95)


class Trainer:
    def __init__(
        self,
        head: DraftHead,
        corpus: Corpus,
        heldout: Corpus,
        settings: TrainSettings,
        path: Path,
        *,
        checkpoint_s: float = 180.0,
    ) -> None:
        """`head` is what training begins with, unless there is a checkpoint at `path`: then that is taken up."""
        self._head, self._corpus, self._heldout, self._settings = head.to(corpus.device), corpus, heldout, settings
        self._path, self._checkpoint_s = path, checkpoint_s
        self._scale = head.out.detach().clone()
        learning = [p for p in head.parameters() if p.requires_grad]
        matrices = [p for p in learning if p.dim() > 1]
        vectors = [p for p in learning if p.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._optimiser = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=_BETAS, fused=True)
        self._order = np.zeros(0, np.int64)
        self._ordered = -1
        self.progress = checkpoint.load(path, head, self._optimiser) if path.exists() else Progress()

    @property
    def steps(self) -> int:
        return self._settings.epochs * self._per_epoch

    @property
    def _per_epoch(self) -> int:
        return -(-len(self._corpus.starts) // self._settings.batch)

    def run(self, say: Say) -> None:
        """To the end, saving the checkpoint now and then."""
        saved = began = time.monotonic()
        first, positions = self.progress.step, 0
        while self.progress.step < self.steps:
            positions += self._step()
            if self.progress.step % NOTED == 0 or self.progress.step == self.steps:
                seconds = time.monotonic() - began
                left = seconds / (self.progress.step - first) * (self.steps - self.progress.step)
                say(f"{self._note()}, {positions / seconds:,.0f} positions/s, {left / 60:.0f} min left")
            if time.monotonic() - saved >= self._checkpoint_s or self.progress.step == self.steps:
                checkpoint.save(self._path, self._head, self._head.vocabulary, self._optimiser, self.progress)
                saved = time.monotonic()

    def _step(self) -> int:
        """One step of the optimiser; the positions that it drafted from."""
        progress, settings = self.progress, self._settings
        rows = self._rows(progress.step)
        rate = settings.learning_rate * schedule(progress.step, self.steps, settings.warm_up)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        loss = self._loss(rows)
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._head.parameters(), settings.clip)
        self._optimiser.step()
        progress.step += 1
        progress.losses.append(float(loss.detach()))
        return len(rows)

    def _rows(self, step: int) -> np.ndarray:
        """Where the chains of a step begin: every epoch takes all rows in another order."""
        epoch, at = divmod(step, self._per_epoch)
        if epoch != self._ordered:
            self._order = np.random.default_rng([self._settings.seed, epoch]).permutation(self._corpus.starts)
            self._ordered = epoch
        return self._order[at * self._settings.batch : (at + 1) * self._settings.batch]

    def _loss(self, rows: np.ndarray) -> Tensor:
        """A scalar: the mean over chains of the weighted sum over their drafts.

        A chain reads the tokens that the target wrote and its own guesses of the hidden states. It goes on while it is
        likely that a drafter would have proposed these tokens: what comes after a wrong draft is of no use.
        """
        settings, corpus, head = self._settings, self._corpus, self._head
        count, total = len(rows), torch.zeros((), device=corpus.device)
        state, chance = corpus.states(rows - 1), torch.ones(count, device=corpus.device)
        guessed = state
        for depth, weight in enumerate(settings.unroll):
            if depth:
                chance = chance * likelihood(guessed.detach(), corpus.own(rows))
                on = (chance >= settings.least) & corpus.goes_on(rows)
                rows, state, chance = rows[on.cpu().numpy()] + 1, state[on], chance[on]
            with torch.autocast("cuda", torch.bfloat16, enabled=corpus.device.type == "cuda"):
                state = head(state, corpus.read(rows))
                guessed = functional.log_softmax(head.logits(state).float(), 1)
            total = total + weight * distillation(guessed, corpus.thoughts(rows), settings.hard).sum()
            if settings.regression:
                near, true = state.float() / self._scale, corpus.states(rows) / self._scale
                distance = functional.smooth_l1_loss(near, true, reduction="none").mean(1)
                total = total + weight * settings.regression * distance.sum()
        return total / count

    def _note(self) -> str:
        progress = self.progress
        entry = {"step": progress.step, "loss": float(np.mean(progress.losses))}
        said = f"step {progress.step} of {self.steps}: loss {entry['loss']:.3f}"
        if progress.step % JUDGED == 0 or progress.step == self.steps:
            chains = drafted(self._head, self._heldout, len(self._settings.unroll))
            agreed = chains.agreement()
            entry |= {f"agreement_{depth}": share for depth, share in agreed.items()}
            said += f", held-out agreement {' '.join(f'{share:.1%}' for share in agreed.values())}"
        progress.history.append(entry)
        progress.losses = []
        return said


def schedule(step: int, steps: int, warm_up: float) -> float:
    """Share of the peak learning rate: up in a line, then down along a cosine (Loshchilov and Hutter 2017)."""
    rising = max(1, math.ceil(steps * warm_up))
    if step < rising:
        return (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    return _LOWEST + (1 - _LOWEST) * 0.5 * (1 + math.cos(math.pi * done))
