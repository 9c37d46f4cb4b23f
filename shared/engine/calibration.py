"""Does a KV codec suit these weights? Measured on built-in text once per model, codec and block size, then remembered.

Some models lose little to int4 and others everything (keys with large constant channels, attention sinks), and their
answers stay fluent while they go wrong. So a worker measures before it joins, and refuses what would be ruined.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from importlib.resources import files
from pathlib import Path

from filelock import FileLock, Timeout

from shared.config import cache_home
from shared.engine.digests import store
from shared.engine.engine import Engine
from shared.engine.quality import Quality, compare
from shared.errors import InvalidField, ModelError, RequestError
from shared.tokenizer import Tokenizer

STARTUP_TOKENS = 512
"""Measured before a worker joins; in one window, so that most positions have a context to read through the codec."""
WINDOW = 2048
"""Tokens of one window at most: its logits are held in memory."""
LOCK_DEADLINE_S = 300.0


class Verdict(StrEnum):
    OK = "ok"
    POOR = "poor"
    RUINED = "ruined"


@dataclass(frozen=True, slots=True)
class Bounds:
    """Beyond either number the verdict is worse: perplexity over the baseline's, share of equal most likely tokens."""

    ratio: float
    agreement: float

    def hold(self, quality: Quality) -> bool:
        """False also for NaN."""
        return quality.ratio <= self.ratio and quality.top1_agreement >= self.agreement


POOR = Bounds(1.05, 0.90)
RUINED = Bounds(1.25, 0.80)


def judge(quality: Quality) -> Verdict:
    """OK within `POOR`, ruined beyond `RUINED`."""
    if not RUINED.hold(quality):
        return Verdict.RUINED
    return Verdict.OK if POOR.hold(quality) else Verdict.POOR


def built_in_text() -> str:
    """English prose, dialogue, instructions, code and letters; about 1,200 tokens."""
    return files("shared.engine").joinpath("data/calibration.txt").read_text(encoding="utf-8")


def windows(token_ids: Sequence[int], longest: int) -> list[list[int]]:
    """Cut into as few windows of equal length as `longest` allows. Raises InvalidField below two tokens."""
    size = len(token_ids) // max(1, -(-len(token_ids) // longest))
    if size < 2:
        raise InvalidField("a text of at least two tokens is needed", field="text")
    return [list(token_ids[start : start + size]) for start in range(0, len(token_ids) - size + 1, size)]


def measure(reference: Engine, subject: Engine, codec: str, token_ids: Sequence[int]) -> Quality:
    """`subject`'s weights with KV in `codec`, against `reference`'s with KV as it is. Both have one block size."""
    cut = windows(token_ids, min(WINDOW, reference.info.context_length, subject.info.context_length))
    blocks = -(-len(cut[0]) // reference.info.block_size) + 1
    return compare(reference.sibling("none", blocks), subject.sibling(codec, blocks), cut)


def calibrated(engine: Engine, folder: Path) -> Quality:
    """How much `engine`'s codec costs on its weights, against codec `none`. Blocking, for seconds the first time.

    Remembered in the cache folder by fingerprint, codec, block size and text; workers that start together measure
    once. A record that cannot be read is measured again, one that cannot be written costs time, nothing else.
    Raises ModelError when the model's tokenizer makes nothing of the text.
    """
    identity = engine.identity.model_dump()
    key = {**identity, "text": hashlib.sha256(f"{STARTUP_TOKENS} {built_in_text()}".encode()).hexdigest()}
    record = cache_home() / "calibration" / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"
    if (known := _read(record, key)) is not None:
        return known
    with ExitStack() as held:
        with suppress(Timeout, OSError):
            record.parent.mkdir(parents=True, exist_ok=True)
            held.enter_context(FileLock(record.with_suffix(".lock"), timeout=LOCK_DEADLINE_S))
        if (known := _read(record, key)) is not None:
            return known
        try:
            ids = Tokenizer.load(folder).encode(built_in_text())[:STARTUP_TOKENS]
            quality = measure(engine, engine, engine.identity.codec, ids)
        except RequestError as error:
            raise ModelError(f"the KV codec cannot be measured on this model: {error}; TRINE_KV_CHECK=off") from None
        store(record, {"key": key, "quality": asdict(quality)})
        return quality


def _read(record: Path, key: dict[str, object]) -> Quality | None:
    try:
        entry = json.loads(record.read_bytes())
        if entry["key"] != key:
            return None
        quality = Quality(**entry["quality"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
    numbers = asdict(quality).values()
    return quality if all(isinstance(n, (int, float)) and not isinstance(n, bool) for n in numbers) else None
