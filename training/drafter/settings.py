"""What a run is determined by: the same settings on the same machine give the same bytes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError

STAGES = ("prompts", "generate", "features", "train", "export", "evaluate")


@dataclass(frozen=True, slots=True)
class DataSettings:
    """Of prompts and of the target's answers. How many there are is not among them: shards can be added later."""

    model: str
    """Fingerprint of the target."""
    seed: int = 0
    shard: int = 192
    """Conversations per file: what a kill costs, and what is under way at once."""
    top_k: int = 32
    """Of the target's distribution at each position, so many probabilities are kept."""
    shortest: int = 64
    longest: int = 192
    """Tokens of an answer at most; drawn between the two."""
    context: int = 512
    """Tokens of a conversation at most."""
    slots: int = 64
    """Conversations in one forward pass."""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    model: str
    """Fingerprint of the target."""
    shards: int
    """Files of answers to learn from."""
    window: int = 2
    """Last tokens that the head reads."""
    width: int = 1536
    """Of its one hidden layer."""
    vocabulary: int = 8192
    """Tokens that the head can propose."""
    epochs: int = 5
    batch: int = 512
    """Positions from which one step of the optimiser drafts."""
    learning_rate: float = 1e-3
    """At its peak."""
    warm_up: float = 0.03
    """Share of the steps in which the learning rate rises; then it falls along a cosine to a twentieth."""
    weight_decay: float = 0.05
    clip: float = 1.0
    """Norm that the gradient is cut to."""
    hard: float = 0.3
    """Weight of the cross-entropy on the target's most likely token; the rest is the KL divergence."""
    unroll: tuple[float, ...] = (1.0, 1.0, 1.0)
    """Weight of the loss of each drafted token; there are as many steps of the head as weights."""
    least: float = 0.1
    """Drafting goes on while the head gave what the target wrote at least this probability, all steps together; 0:
    always to the end."""
    regression: float = 0.1
    """Weight of the distance between guessed and true hidden states."""
    frozen_head: bool = False
    """Leave the rows of the target's LM head as they are."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("shards", "window", "width", "vocabulary", "epochs", "batch"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", field=name)
        if not self.unroll:
            raise ConfigError("a head drafts at least one token", field="unroll")


@dataclass(frozen=True, slots=True)
class Folders:
    """Where things are. Several runs can share one `data`."""

    out: Path
    data: Path

    @property
    def checkpoint(self) -> Path:
        return self.out / "checkpoint.safetensors"

    @property
    def release(self) -> Path:
        return self.out / "release"

    @property
    def report(self) -> Path:
        return self.release / "report.json"

    def prompts(self, split: str) -> Path:
        return self.data / f"{split}.jsonl"

    def shard(self, split: str, number: int) -> Path:
        return self.data / f"{split}-{number:04d}.safetensors"

    def hidden(self, split: str, number: int) -> Path:
        return self.data / f"{split}-{number:04d}-hidden.safetensors"
