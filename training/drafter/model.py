"""The draft head: it guesses the next token from the target's last hidden state and the last tokens.

`f` is what the target's LM head read when it chose the last token x; the head computes, without attention,

    z = N(f), N(e(x)), N(e(token before x)), ...
    o = skip z + down (silu(gate z) * (up z))
    f' = N_out(o)        a guess of the target's hidden state after x
    logits = head f'     of the token after x

and can go on with f' and the guessed token. e is the target's own embedding table, N an RMSNorm. Hidden states as what
drafters read: Li et al. 2024, "EAGLE"; recurrent heads: Cheng et al. 2024, "Recurrent drafter"; Ankner et al. 2024,
"Hydra". Reduced vocabularies: Zhao et al. 2025, "FR-Spec".
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from training.drafter.settings import TrainSettings
from training.drafter.target import Target
from training.drafter.vocabulary import Vocabulary

_SMALL, _SKIP = 0.002, 0.01
"""Standard deviations of `down` and `skip` to begin with."""


class DraftHead(nn.Module):
    """Its parameters are what is trained; the embeddings are the target's and never change.

    The weights of the norms before the matrices make all elements of what is read equally large, and are fixed then:
    the columns of the matrices can scale as well, and nothing has to be differentiated by what is read. For the same
    reason `state` and `words` are apart: the rows of gate, up and skip, one below the other, split into the columns
    that read f and those that read tokens.
    """

    def __init__(self, target: Target, vocabulary: Vocabulary, window: int, width: int) -> None:
        super().__init__()
        size = target.hidden_size
        self.target, self.vocabulary, self.window, self.width = target, vocabulary, window, width
        self.state = nn.Parameter(torch.zeros(2 * width + size, size))
        self.words = nn.Parameter(torch.zeros(2 * width + size, size * window))
        self.down = nn.Parameter(torch.zeros(size, width))
        self.out = nn.Parameter(torch.ones(size))
        self.head = nn.Parameter(torch.zeros(len(vocabulary), size))
        self.norms: Tensor
        self.register_buffer("norms", torch.ones(1 + window, size))
        self._embedding: Tensor
        self.register_buffer("_embedding", torch.zeros(0), persistent=False)
        self._embed()

    @classmethod
    def beginning(cls, target: Target, vocabulary: Vocabulary, scale: np.ndarray, settings: TrainSettings) -> DraftHead:
        """With rows of the target's LM head. `scale` [hidden_size]: the size of each element of its hidden states,
        root mean square; guesses begin with the same. A function of its arguments alone."""
        self = cls(target, vocabulary, settings.window, settings.width)
        rng = torch.Generator().manual_seed(settings.seed)
        size, width = target.hidden_size, settings.width
        bound = 1 / math.sqrt(size * (1 + settings.window))
        commonest = self._embedding[torch.from_numpy(vocabulary.target_ids).long()]
        with torch.no_grad():
            self.norms[0] = torch.from_numpy(np.sqrt(np.square(scale).mean()) / scale)
            self.norms[1:] = commonest.square().mean(0).rsqrt()
            for matrix in (self.state, self.words):
                matrix[: 2 * width].uniform_(-bound, bound, generator=rng)
                matrix[2 * width :].normal_(0, _SKIP, generator=rng)
            self.down.normal_(0, _SMALL, generator=rng)
            self.out.copy_(torch.from_numpy(scale))
            self.head.requires_grad_(not settings.frozen_head).copy_(
                target.head()[torch.from_numpy(vocabulary.target_ids).long()]
            )
        return self

    def _embed(self) -> None:
        """The norm of each embedding does not change either, so the table is of normed ones."""
        table = self.target.embedding()
        normed = functional.rms_norm(table, table.shape[1:], eps=self.target.rms_norm_eps)
        self._embedding = functional.pad(normed, (0, 0, 0, 1))  # the last row is for tokens that are not there

    def forward(self, features: Tensor, windows: Tensor) -> Tensor:
        """f' [n, h] of f `features` [n, h] and the last tokens `windows` [n, window], newest first, int64; the target's
        vocabulary size stands for a token that is not there."""
        eps, size = self.target.rms_norm_eps, self.out.shape
        state = functional.rms_norm(features, size, self.norms[0], eps)
        words = functional.embedding(windows, self._embedding) * self.norms[1:]
        read = functional.linear(state, self.state) + functional.linear(words.flatten(1), self.words)
        gate, up, skip = torch.split(read, [self.width, self.width, size[0]], 1)
        hidden = skip + functional.linear(functional.silu(gate) * up, self.down)
        return functional.rms_norm(hidden, size, self.out, eps)

    def logits(self, guessed: Tensor) -> Tensor:
        """[n, proposable] of f' [n, h]"""
        return functional.linear(guessed, self.head)

    def tensors(self) -> dict[str, Tensor]:
        """As they are released: float32, on the CPU."""
        width, size = self.width, len(self.out)
        whole = torch.cat([self.state, self.words], 1).detach().float().cpu()
        gate, up, skip = torch.split(whole, [width, width, size])
        return {
            **{f"norms.{i}.weight": norm.float().cpu() for i, norm in enumerate(self.norms)},
            "gate.weight": gate,
            "up.weight": up,
            "skip.weight": skip,
            "down.weight": self.down.detach().float().cpu(),
            "out.weight": self.out.detach().float().cpu(),
            "head.weight": self.head.detach().float().cpu(),
        }

    def load(self, tensors: dict[str, Tensor]) -> None:
        """What `tensors` gave. Raises KeyError, RuntimeError for other names or shapes."""
        whole = torch.cat([tensors["gate.weight"], tensors["up.weight"], tensors["skip.weight"]])
        state, words = torch.split(whole, [len(self.out), len(self.out) * self.window], 1)
        norms = torch.stack([tensors[f"norms.{i}.weight"] for i in range(1 + self.window)])
        down, out, head = (tensors[f"{name}.weight"] for name in ("down", "out", "head"))
        self.load_state_dict({"state": state, "words": words, "down": down, "out": out, "head": head, "norms": norms})
