"""`python -m services.drafter`: one drafter, configured by TRINE_* variables."""

from __future__ import annotations

from pathlib import Path

import anyio

from services.drafter.config import DrafterSettings
from services.drafter.service import DrafterWorker
from services.drafter.sources.model import ModelSource
from services.drafter.sources.suffix import SuffixSource
from shared.engine.fingerprint import vocabulary_digest
from shared.errors import ConfigError
from shared.tokenizer import Tokenizer
from shared.vocabulary import Comparison, Vocabulary
from shared.worker import Connect, load_draft_engine, main, model_folder


def build_model_source(settings: DrafterSettings, target: Path, vocabulary: str) -> ModelSource:
    """The draft model. Blocking. ConfigError if an id of the target's vocabulary is not the same token in its own."""
    folder = model_folder(settings.drafter_model) if settings.drafter_model else target
    if folder != target and vocabulary_digest(folder) != vocabulary:
        refusal = Comparison.of(Vocabulary.load(target), Vocabulary.load(folder)).refusal
        if refusal is not None:
            raise ConfigError(f"drafter_model {settings.drafter_model} cannot draft for {settings.model}: {refusal}")
    engine = load_draft_engine(settings, folder, None if settings.drafter_model else settings.drafter_layers)
    return ModelSource(engine)


async def make(settings: DrafterSettings, worker: str, connect: Connect) -> DrafterWorker:
    folder = await anyio.to_thread.run_sync(model_folder, settings.model)
    tokenizer = await anyio.to_thread.run_sync(Tokenizer.load, folder)
    vocabulary = await anyio.to_thread.run_sync(vocabulary_digest, folder)
    model = None
    if settings.wants_model:
        model = await anyio.to_thread.run_sync(build_model_source, settings, folder, vocabulary)
    return DrafterWorker(
        settings,
        await connect("control"),
        worker,
        suffix=SuffixSource(settings.history_tokens) if settings.draft_source != "model" else None,
        model=model,
        vocabulary=vocabulary,
        vocab_size=tokenizer.vocab_size,
    )


if __name__ == "__main__":
    main("drafter", DrafterSettings, make)
