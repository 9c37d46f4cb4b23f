"""Distils the target into a drafter. What a step does follows from settings, data and step number alone."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from training.drafter import checkpoint
from training.drafter.checkpoint import Progress
from training.drafter.corpus import agreement, batch
from training.drafter.loss import distillation
from training.drafter.model import Drafter
from training.drafter.packing import plan
from training.drafter.settings import TrainSettings
from training.drafter.shards import Conversation
from training.drafter.target import device

Say = Callable[[str], None]

NOTED, JUDGED = 20, 100
"""Steps between two entries of the history, and between two that have the agreement on held-out conversations."""
_LOWEST = 0.1
"""The learning rate at the end, as a share of its peak."""
_BETAS = (0.9, 0.95)


class Trainer:
    def __init__(
        self,
        drafter: Drafter,
        talks: Sequence[Conversation],
        heldout: Sequence[Conversation],
        settings: TrainSettings,
        path: Path,
        *,
        checkpoint_s: float = 180.0,
    ) -> None:
        """`drafter` is what training begins with, unless there is a checkpoint at `path`: then that is taken up.

        `talks` and `heldout` have at least one scored position each.
        """
        self._device = device()
        self._drafter = drafter.to(self._device)
        self._talks, self._heldout, self._settings = talks, heldout, settings
        self._path, self._checkpoint_s = path, checkpoint_s
        self._plan = plan([len(t.tokens) for t in talks], settings.batch_tokens, settings.epochs, settings.seed)
        matrices = [p for p in drafter.parameters() if p.dim() > 1]
        vectors = [p for p in drafter.parameters() if p.dim() == 1]
        groups = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self._optimiser = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=_BETAS)
        self.progress = checkpoint.load(path, drafter, self._optimiser) if path.exists() else Progress()

    @property
    def steps(self) -> int:
        return len(self._plan)

    def run(self, say: Say) -> None:
        """To the end, saving the checkpoint now and then."""
        saved = began = time.monotonic()
        first, tokens = self.progress.step, 0
        while self.progress.step < self.steps:
            tokens += self._step()
            if self.progress.step % NOTED == 0 or self.progress.step == self.steps:
                seconds = time.monotonic() - began
                left = seconds / (self.progress.step - first) * (self.steps - self.progress.step)
                say(f"{self._note()}, {tokens / seconds:,.0f} tokens/s, {left / 60:.0f} min left")
            if time.monotonic() - saved >= self._checkpoint_s or self.progress.step == self.steps:
                self._save()
                saved = time.monotonic()

    def _step(self) -> int:
        """One step of the optimiser; its tokens."""
        progress, settings = self.progress, self._settings
        talks = [self._talks[i] for i in self._plan[progress.step]]
        rate = settings.learning_rate * schedule(progress.step, self.steps, settings.warm_up)
        for group in self._optimiser.param_groups:
            group["lr"] = rate
        self._drafter.train()
        packed, rows, thoughts = batch(talks, self._drafter.vocabulary, self._device)
        with torch.autocast("cuda", torch.bfloat16, enabled=self._device.type == "cuda"):
            logits = self._drafter(packed, rows)
        loss = distillation(logits, thoughts, settings.hard)
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._drafter.parameters(), settings.clip)
        self._optimiser.step()
        progress.step += 1
        progress.losses.append(float(loss.detach()))
        return len(packed.tokens)

    def _note(self) -> str:
        progress = self.progress
        entry = {"step": progress.step, "loss": float(np.mean(progress.losses))}
        said = f"step {progress.step} of {self.steps}: loss {entry['loss']:.3f}"
        if progress.step % JUDGED == 0 or progress.step == self.steps:
            agreed = agreement(self._drafter.eval(), self._heldout, self._settings.batch_tokens, self._device)
            entry["agreement"] = float(np.concatenate(agreed).mean())
            said += f", held-out top-1 agreement {entry['agreement']:.1%}"
        progress.history.append(entry)
        progress.losses = []
        return said

    def _save(self) -> None:
        checkpoint.save(self._path, self._drafter, self._drafter.vocabulary, self._optimiser, self.progress)


def schedule(step: int, steps: int, warm_up: float) -> float:
    """Share of the peak learning rate: up in a line, then down along a cosine (Loshchilov and Hutter 2017)."""
    rising = max(1, math.ceil(steps * warm_up))
    if step < rising:
        return (step + 1) / rising
    done = (step - rising) / max(1, steps - rising)
    return _LOWEST + (1 - _LOWEST) * 0.5 * (1 + math.cos(math.pi * done))
