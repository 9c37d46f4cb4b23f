"""The stages, each skipped where its result is there already."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from shared.engine.engine import Engine
from shared.errors import ConfigError
from shared.tokenizer import Tokenizer
from training.drafter import card, checkpoint, export, prompts, shards
from training.drafter.cost import relative_cost
from training.drafter.dialogue import ChatDialogue
from training.drafter.evaluate import judged
from training.drafter.files import agree, put, put_json
from training.drafter.generate import Generator
from training.drafter.model import Drafter
from training.drafter.prompts import Prompt, Split
from training.drafter.settings import STAGES, DataSettings, Folders, TrainSettings
from training.drafter.shards import Conversation
from training.drafter.target import Target, device
from training.drafter.train import Trainer
from training.drafter.vocabulary import Vocabulary

Say = Callable[[str], None]
_BLOCK = 16
_SAID_S = 20.0
_WATCHED = 48
"""Held-out conversations that training is watched by."""


@dataclass
class Recipe:
    """`heldout`: files of held-out answers."""

    target: Target
    folders: Folders
    data: DataSettings
    training: TrainSettings
    heldout: int
    say: Say
    checkpoint_s: float = 180.0

    def run(self, until: str = STAGES[-1]) -> None:
        """All stages up to `until`. Raises ConfigError for other settings than before, or when another process works
        in the same folder. Runs may train while another one adds answers to the data that they share."""
        agree(self.folders.data / "settings.json", self.data)
        for stage in STAGES[: STAGES.index(until) + 1]:
            if stage == "train":
                agree(self.folders.out / "settings.json", self.training)
            getattr(self, stage)()

    def prompts(self) -> None:
        for split, number in self._splits:
            path, count = self.folders.prompts(split), number * self.data.shard
            if path.exists() and path.read_bytes().count(b"\n") >= count:
                continue
            with _alone(self.folders.data):
                prompts.write(path, prompts.draw(split, count, self.data.seed, self.data.shortest, self.data.longest))
            self.say(f"prompts: {count:,} of split {split!r}")

    def generate(self) -> None:
        todo = [(split, i) for split, n in self._splits for i in range(n) if not self.folders.shard(split, i).exists()]
        if not todo:
            return
        with _alone(self.folders.data):
            asked = {item: self._asked(*item) for item in todo}
            generator = self._generator()
            pace = _Pace(sum(sum(p.max_tokens) for group in asked.values() for p in group), self.say)
            for split, i in todo:
                shards.write(self.folders.shard(split, i), generator.shard(asked[split, i], pace.told))
                self.say(f"generate: {self.folders.shard(split, i).name} written")

    def train(self) -> None:
        path = self.folders.checkpoint
        talks = self._conversations("train", self.training.shards)
        vocabulary = checkpoint.vocabulary_of(path, self.target.shape.vocab_size) if path.exists() else self._vocabulary
        drafter = Drafter.beginning(self.target, self.training.layers, vocabulary)
        watched = [talk for talk in self._conversations("heldout", self.heldout) if len(talk.scored)][:_WATCHED]
        trainer = Trainer(
            drafter,
            [talk for talk in talks if len(talk.scored)],
            watched,
            self.training,
            path,
            checkpoint_s=self.checkpoint_s,
        )
        if trainer.progress.step < trainer.steps:
            with _alone(self.folders.out):
                trainer.run(lambda line: self.say(f"train: {line}"))

    def export(self) -> None:
        if (self.folders.release / "config.json").exists():
            return
        vocabulary = checkpoint.vocabulary_of(self.folders.checkpoint, self.target.shape.vocab_size)
        drafter = Drafter(self.target.shape, len(self.training.layers), vocabulary, self.target.embedding())
        checkpoint.load_model(self.folders.checkpoint, drafter)
        export.write(self.folders.release, drafter, self.target, self.training.layers)
        self.say(f"export: {self.folders.release}, {export.size(self.folders.release) / 1e6:.1f} MB")

    def evaluate(self) -> None:
        release = self.folders.release
        if self.folders.report.exists() and (release / "MODEL_CARD.md").exists():
            return
        drafter = export.read(release, self.target)
        asked = prompts.read(self.folders.prompts("heldout"), self.heldout * self.data.shard)
        report = self._report(drafter, judged(drafter, asked, self._conversations("heldout", self.heldout)))
        put_json(self.folders.report, report)
        text = card.card(report)
        put(release / "MODEL_CARD.md", lambda part: part.write_text(text, encoding="utf-8"))
        found = report["acceptance"].get("all")
        self.say(
            f"evaluate: {self.folders.report}" + (f", agreement {found['greedy']['agreement']:.1%}" if found else "")
        )

    @property
    def _splits(self) -> tuple[tuple[Split, int], tuple[Split, int]]:
        """How many files of each; the held-out ones first, so that they are there whenever generating is stopped."""
        return ("heldout", self.heldout), ("train", self.training.shards)

    def _asked(self, split: Split, number: int) -> list[Prompt]:
        """Prompts of one file."""
        size = self.data.shard
        return prompts.read(self.folders.prompts(split), (number + 1) * size)[-size:]

    def _generator(self) -> Generator:
        data = self.data
        engine = Engine.load(
            self.target.folder,
            block_size=_BLOCK,
            kv_blocks=Generator.blocks_for(data.slots, data.context, _BLOCK),
            lookahead=0,
        )
        dialogue = ChatDialogue(Tokenizer.load(self.target.folder))
        return Generator(engine, dialogue, slots=data.slots, top_k=data.top_k, context=data.context)

    def _conversations(self, split: Split, count: int) -> list[Conversation]:
        files = [shards.read(self.folders.shard(split, i)) for i in range(count)]
        return [talk for file in files for talk in file.conversations()]

    @property
    def _vocabulary(self) -> Vocabulary:
        talks = self._conversations("train", self.training.shards)
        size = min(self.training.vocabulary, self.target.shape.vocab_size)
        vocabulary = Vocabulary.of(talks, size, self.target.shape.vocab_size)
        self.say(f"train: {len(vocabulary):,} tokens can be proposed")
        return vocabulary

    @cached_property
    def _train_size(self) -> dict[str, int]:
        talks = self._conversations("train", self.training.shards)
        return {"conversations": len(talks), "answer_tokens": sum(len(talk.scored) for talk in talks)}

    def _report(self, drafter: Drafter, acceptance: dict[str, Any]) -> dict[str, Any]:
        layers, proposable = len(self.training.layers), len(drafter.vocabulary)
        progress = checkpoint.progress_of(self.folders.checkpoint)
        return {
            "target": {"name": self.target.name, "fingerprint": self.target.fingerprint},
            "settings": asdict(self.training),
            "data": {**asdict(self.data), **self._train_size},
            "heldout": {"conversations": self.heldout * self.data.shard},
            "bytes": export.size(self.folders.release),
            "proposable": proposable,
            "vocab_size": self.target.shape.vocab_size,
            "relative_cost": relative_cost(self.target, layers, proposable),
            "measured_on": f"{_machine()}, {torch.get_num_threads()} threads" if device().type == "cpu" else _machine(),
            "steps": progress.step,
            "history": progress.history,
            "acceptance": acceptance,
        }


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """A lock that ends with the process, however that ends. Raises ConfigError when another one has it."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout:
        raise ConfigError(f"another process is working in {folder}") from None


class _Pace:
    """Says now and then how fast answers are made and how long it will take."""

    def __init__(self, most: int, say: Say) -> None:
        """`most`: tokens that there would be if no answer ended before its limit."""
        self._most, self._say = most, say
        self._began = self._said = time.monotonic()
        self._tokens = self._done = 0

    def told(self, tokens: int, done: int) -> None:
        self._tokens, self._done = self._tokens + tokens, self._done + done
        if (now := time.monotonic()) - self._said < _SAID_S:
            return
        self._said, seconds = now, now - self._began
        self._say(
            f"generate: {self._done:,} conversations, {self._tokens:,} tokens, {self._tokens / seconds:.0f} tokens/s, "
            f"{(self._most / self._tokens - 1) * seconds / 60:.0f} min left at most"
        )


def _machine() -> str:
    return torch.cuda.get_device_name() if device().type == "cuda" else f"{platform.machine()} CPU"
