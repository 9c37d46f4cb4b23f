"""What a run is determined by: the same settings on the same machine give the same bytes. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.errors import ConfigError

STAGES = ("prompts", "generate", "train", "export", "evaluate")


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
    layers: tuple[int, ...] = (0, 1, 28, 29)
    """Layers of the target that the drafter begins with, in this order."""
    vocabulary: int = 12288
    """Tokens that the drafter can propose."""
    epochs: int = 6
    batch_tokens: int = 4096
    """Of one step of the optimiser."""
    learning_rate: float = 6e-4
    """At its peak."""
    warm_up: float = 0.03
    """Share of the steps in which the learning rate rises; then it falls along a cosine to a tenth."""
    weight_decay: float = 0.01
    clip: float = 1.0
    """Norm that the gradient is cut to."""
    hard: float = 0.3
    """Weight of the cross-entropy on the target's most likely token; the rest is the KL divergence."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("shards", "vocabulary", "epochs", "batch_tokens"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1", field=name)
        if not self.layers:
            raise ConfigError("a drafter has at least one layer", field="layers")


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
