"""`python -m services.drafter`: one drafter, configured by TRINE_* variables."""

from __future__ import annotations

from pathlib import Path

import anyio

from services.drafter.config import DrafterSettings
from services.drafter.service import DrafterWorker
from services.drafter.sources.base import Stepping
from services.drafter.sources.head import HeadSource
from services.drafter.sources.model import ModelSource
from services.drafter.sources.suffix import SuffixSource
from shared import drafters
from shared.engine.fingerprint import vocabulary_digest
from shared.errors import ConfigError
from shared.tokenizer import Tokenizer
from shared.vocabulary import Comparison, Vocabulary
from shared.worker import Connect, in_passing_thread, load_draft_engine, load_draft_head, main, model_folder


def build_source(settings: DrafterSettings, target: Path, vocabulary: str) -> Stepping | None:
    """What guesses in steps, for the target in the folder `target`: a draft head, a draft model, or nothing. Blocking.

    Raises ConfigError, ModelError.
    """
    if settings.draft_source == "suffix":
        return None
    if (head := drafters.find(settings.drafter_model, target)) is not None:
        return HeadSource(load_draft_head(settings, head, target))
    if settings.draft_source == "auto" and not settings.drafter_model:
        return None
    return build_model_source(settings, target, vocabulary)


def build_model_source(settings: DrafterSettings, target: Path, vocabulary: str) -> ModelSource:
    """The draft model. Blocking. ConfigError if an id of the target's vocabulary is not the same token in its own, or
    if its weights are not for that id."""
    folder = model_folder(settings.drafter_model) if settings.drafter_model else target
    if folder != target and vocabulary_digest(folder) != vocabulary:
        refusal = Comparison.of(Vocabulary.load(target), Vocabulary.load(folder)).refusal
        if refusal is not None:
            raise unfit(settings, refusal)
    engine = load_draft_engine(settings, folder, None if settings.drafter_model else settings.drafter_layers)
    size = Vocabulary.load(target).size if folder != target else 0
    if engine.info.vocab_size < size:
        raise unfit(settings, f"its weights are for {engine.info.vocab_size:,} ids, the target has {size:,}")
    return ModelSource(engine)


def unfit(settings: DrafterSettings, reason: str) -> ConfigError:
    message = f"drafter_model {settings.drafter_model} cannot draft for {settings.model}: {reason}"
    return ConfigError(message, field="drafter_model")


async def make(settings: DrafterSettings, worker: str, connect: Connect) -> DrafterWorker:
    folder = await anyio.to_thread.run_sync(model_folder, settings.model)
    tokenizer = await anyio.to_thread.run_sync(Tokenizer.load, folder)
    vocabulary = await anyio.to_thread.run_sync(vocabulary_digest, folder)
    model = await in_passing_thread(build_source, settings, folder, vocabulary)
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
