"""The drafter's recipe on a random target of a few thousand weights, from prompts to a model card in seconds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from tests import tiny_models
from training.drafter import shards
from training.drafter.recipe import Recipe
from training.drafter.settings import DataSettings, Folders, TrainSettings
from training.drafter.shards import Conversation
from training.drafter.target import Target

CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_target(folder: Path) -> Target:
    """A Llama that reads bytes; its chats end turns with token 2, which also ends a text."""
    size = {"vocab_size": 260, "max_position_embeddings": 1024, "tie_word_embeddings": True}
    tiny_models.write(folder, {**tiny_models.ARCHITECTURES["llama"], **size})
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(["<pad>", "<|im_start|>", "<|im_end|>", *letters])}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|im_start|>", "<|im_end|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(CHAT)
    return Target.of(folder, "tiny")


def recipe(target: Target, out: Path, **changes: Any) -> Recipe:
    data = DataSettings(target.fingerprint, shard=8, top_k=8, shortest=6, longest=12, context=600, slots=3)
    training = TrainSettings(
        target.fingerprint, shards=2, width=24, vocabulary=100, epochs=3, batch=60, learning_rate=3e-3, least=0.01
    )
    folders = Folders(out, changes.pop("data", out / "data"))
    return Recipe(target, folders, data, replace(training, **changes), 2, lambda line: None, checkpoint_s=0.0)


def talks_of(done: Recipe, split: str = "train") -> list[Conversation]:
    return [talk for i in range(2) for talk in shards.read(done.folders.shard(split, i)).conversations()]
