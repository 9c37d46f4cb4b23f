"""The stages, each skipped where its result is there already."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from shared.engine.engine import Engine
from shared.errors import ConfigError
from shared.tokenizer import Tokenizer
from training.drafter import card, checkpoint, corpus, export, features, prompts, shards
from training.drafter.corpus import Corpus
from training.drafter.cost import relative_cost
from training.drafter.dialogue import ChatDialogue
from training.drafter.evaluate import judged
from training.drafter.files import agree, put, put_json, read_object
from training.drafter.generate import Generator
from training.drafter.model import DraftHead
from training.drafter.prompts import Prompt, Split
from training.drafter.settings import STAGES, DataSettings, Folders, TrainSettings
from training.drafter.shards import Conversation
from training.drafter.target import Target, device
from training.drafter.train import Trainer
from training.drafter.vocabulary import Vocabulary

Say = Callable[[str], None]
_BLOCK = 16
_SAID_S = 20.0
_WATCHED = 4096
"""Held-out positions that training is watched by."""


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
        if until == "evaluate":
            self._agree_on_heldout()
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

    def features(self) -> None:
        todo = [(split, i) for split, n in self._splits for i in range(n) if not self.folders.hidden(split, i).exists()]
        if not todo:
            return
        with _alone(self.folders.data, ".features.lock"):
            reader = features.Reader(self.target)
            for split, i in todo:
                talks, began = shards.read(self.folders.shard(split, i)).conversations(), time.monotonic()
                features.write(self.folders.hidden(split, i), reader.hidden(talks))
                speed = sum(len(talk.tokens) for talk in talks) / (time.monotonic() - began)
                self.say(f"features: {self.folders.hidden(split, i).name} written, {speed:,.0f} tokens/s")

    def train(self) -> None:
        path = self.folders.checkpoint
        talks = self._conversations("train", self.training.shards)
        vocabulary = (
            checkpoint.vocabulary_of(path, self.target.vocab_size) if path.exists() else self._vocabulary(talks)
        )
        rows = self._corpus("train", self.training.shards, vocabulary, self.training.window)
        watched = self._corpus("heldout", 1, vocabulary, self.training.window)
        watched = replace(watched, starts=watched.starts[:_WATCHED])
        head = DraftHead.beginning(self.target, vocabulary, corpus.scale(rows.hidden[0]), self.training)
        trainer = Trainer(head, rows, watched, self.training, path, checkpoint_s=self.checkpoint_s)
        if trainer.progress.step < trainer.steps:
            with _alone(self.folders.out):
                trainer.run(lambda line: self.say(f"train: {line}"))

    def export(self) -> None:
        if (self.folders.release / "config.json").exists():
            return
        vocabulary = checkpoint.vocabulary_of(self.folders.checkpoint, self.target.vocab_size)
        head = DraftHead(self.target, vocabulary, self.training.window, self.training.width)
        checkpoint.load_model(self.folders.checkpoint, head)
        export.write(self.folders.release, head, self._train_size["answer_tokens"])
        self.say(f"export: {self.folders.release}, {export.size(self.folders.release) / 1e6:.1f} MB")

    def evaluate(self) -> None:
        release = self.folders.release
        if self.folders.report.exists() and (release / "MODEL_CARD.md").exists():
            return
        head = export.read(release, self.target).to(device())
        asked = prompts.read(self.folders.prompts("heldout"), self.heldout * self.data.shard)
        rows = self._corpus("heldout", self.heldout, head.vocabulary, head.window)
        acceptance, calibration = judged(head, asked, self._conversations("heldout", self.heldout), rows)
        report = {**self._report(head), "acceptance": acceptance, "calibration": calibration}
        put_json(self.folders.report, report)
        text = card.card(report)
        put(release / "MODEL_CARD.md", lambda part: part.write_text(text, encoding="utf-8"))
        found = acceptance.get("all")
        self.say(f"evaluate: {self.folders.report}" + (f", agreement {found['agreement'][1]:.1%}" if found else ""))

    @property
    def _splits(self) -> tuple[tuple[Split, int], tuple[Split, int]]:
        """How many files of each; the held-out ones first, so that they are there whenever generating is stopped."""
        return ("heldout", self.heldout), ("train", self.training.shards)

    def _agree_on_heldout(self) -> None:
        """A report that is there already must be about as many conversations. Raises ConfigError."""
        path, count = self.folders.report, self.heldout * self.data.shard
        if not path.exists():
            return
        found = read_object(path).get("heldout")
        made = found.get("conversations") if isinstance(found, dict) else None
        if made != count:
            reason = f"was made with {made} held-out conversations, not {count}"
            raise ConfigError(f"{path} {reason}: give the same number or remove it", field="heldout")

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

    def _corpus(self, split: Split, count: int, vocabulary: Vocabulary, window: int) -> Corpus:
        """Of the first `count` files."""
        talks, hidden = [], []
        for i in range(count):
            shard = shards.read(self.folders.shard(split, i))
            talks += shard.conversations()
            hidden.append(features.mapped(self.folders.hidden(split, i), len(shard.scored), self.target.hidden_size))
        return Corpus.of(talks, hidden, vocabulary, window, device())

    def _vocabulary(self, talks: Sequence[Conversation]) -> Vocabulary:
        size = min(self.training.vocabulary, self.target.vocab_size)
        vocabulary = Vocabulary.of(talks, size, self.target.vocab_size)
        self.say(f"train: {len(vocabulary):,} tokens can be proposed")
        return vocabulary

    @cached_property
    def _train_size(self) -> dict[str, int]:
        talks = self._conversations("train", self.training.shards)
        return {"conversations": len(talks), "answer_tokens": sum(len(talk.scored) for talk in talks)}

    def _report(self, head: DraftHead) -> dict[str, Any]:
        progress = checkpoint.progress_of(self.folders.checkpoint)
        return {
            "target": {"name": self.target.name, "fingerprint": self.target.fingerprint},
            "settings": asdict(self.training),
            "data": {**asdict(self.data), **self._train_size},
            "heldout": {"conversations": self.heldout * self.data.shard},
            "bytes": export.size(self.folders.release),
            "proposable": len(head.vocabulary),
            "vocab_size": self.target.vocab_size,
            "relative_cost": relative_cost(self.target, self.folders.release),
            "measured_on": f"{_machine()}, {torch.get_num_threads()} threads" if device().type == "cpu" else _machine(),
            "steps": progress.step,
            "history": progress.history,
        }


@contextmanager
def _alone(folder: Path, lock: str = ".lock") -> Iterator[None]:
    """A lock that ends with the process, however that ends. Raises ConfigError when another one has it.

    Those of another name do not get in its way.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(folder / lock, timeout=0):
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
