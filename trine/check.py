"""What a KV codec costs a model: perplexity and most likely tokens against KV stored as it is.

The measuring runs in a child process (`python -m trine.check CODEC,... [FILE]`, settings from TRINE_*).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from rich.table import Table

from shared.config import MIN_INT4_BLOCK, KvCodec, Settings
from shared.errors import InvalidField
from trine import child_task
from trine.child_task import Progress, silent
from trine.settings import checked


@dataclass(frozen=True, slots=True)
class Cost:
    """One codec's figures. `verdict`: ok, poor or ruined (`shared/engine/calibration.py` has the bounds)."""

    codec: str
    bytes_per_token: int
    perplexity: float
    ratio: float
    """Perplexity over the baseline's."""
    top1_agreement: float
    """Share of positions whose most likely token is the baseline's."""
    mean_kl: float
    """Kullback-Leibler divergence from the baseline, in nats per position."""
    verdict: str


@dataclass(frozen=True, slots=True)
class Report:
    """The baseline is codec `none` with native weights, whatever weights the codecs were measured with."""

    model: str
    weights: str
    block_size: int
    tokens: int
    perplexity: float
    bytes_per_token: int
    codecs: tuple[Cost, ...]

    @property
    def ruined(self) -> bool:
        """Whether any codec that was asked for ruins the model."""
        return any(cost.verdict == "ruined" for cost in self.codecs)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: a figure that is not finite is None."""
        return {**_finite(asdict(self)), "codecs": [_finite(asdict(cost)) for cost in self.codecs]}


def check(env: Mapping[str, str], text: Path | None = None, progress: Progress = silent) -> Report:
    """Measure the codec that the settings name, or all of them when it is `none`. Blocking, for minutes.

    `env` are TRINE_* variables on top of this process's environment; `text` is what to measure on instead of the
    built-in English. Raises ConfigError, ModelError, InvalidField.
    """
    settings = checked(Settings, env)
    codecs = [settings.kv_codec] if settings.kv_codec != "none" else _all(settings)
    arguments = [",".join(codecs)] + ([] if text is None else [str(text.absolute())])
    found = child_task.run("trine.check", *arguments, env=env, progress=progress)
    return Report(**{**found, "codecs": tuple(Cost(**cost) for cost in found["codecs"])})


def _finite(figures: dict[str, Any]) -> dict[str, Any]:
    return {n: None if isinstance(v, float) and not math.isfinite(v) else v for n, v in figures.items()}


def _all(settings: Settings) -> list[str]:
    skipped = {"none"} if settings.weights == "native" else set()
    if settings.block_size < MIN_INT4_BLOCK:
        skipped.add("int4")
    return [codec for codec in get_args(KvCodec) if codec not in skipped]


def table(report: Report) -> Table:
    """For a terminal."""
    title = (
        f"{report.model}: {report.tokens} tokens, weights {report.weights}, blocks of {report.block_size}; "
        f"baseline {report.bytes_per_token} bytes per token, perplexity {report.perplexity:.3f}"
    )
    shown = Table(title=title, title_justify="left")
    shown.add_column("KV codec")
    for heading in ("bytes/token", "of baseline", "perplexity", "ratio", "same top-1", "KL (nats)"):
        shown.add_column(heading, justify="right")
    shown.add_column("verdict")
    for cost in report.codecs:
        shown.add_row(
            cost.codec,
            f"{cost.bytes_per_token}",
            f"{cost.bytes_per_token / report.bytes_per_token:.1%}",
            f"{cost.perplexity:.3f}",
            f"{cost.ratio:.4f}",
            f"{cost.top1_agreement:.1%}",
            f"{cost.mean_kl:.5f}",
            cost.verdict,
        )
    return shown


def _measure(progress: Progress) -> dict[str, object]:
    """The child's side."""
    codecs, settings = sys.argv[1].split(","), Settings()
    text = _read(Path(sys.argv[2])) if len(sys.argv) > 2 else None
    from shared.engine.weights import resolve

    folder = resolve(settings.model, progress)
    # Only now what loads torch, which takes seconds.
    from shared.engine.calibration import built_in_text, judge, measure
    from shared.engine.engine import Engine
    from shared.tokenizer import Tokenizer

    token_ids = Tokenizer.load(folder).encode(built_in_text() if text is None else text)

    def load(weights: str) -> Engine:
        return Engine.load(
            folder,
            block_size=settings.block_size,
            kv_blocks=1,
            weights=weights,
            threads=settings.threads,
            generates=False,
        )

    def bytes_per_token(codec: str) -> int:
        return native.sibling(codec, 1).info.block_bytes // settings.block_size

    progress("loading the weights", 0.0)
    native = load("native")
    subject = native if settings.weights == "native" else load(settings.weights)
    costs = []
    for index, codec in enumerate(codecs):
        progress(f"measuring {codec}", index / len(codecs))
        quality = measure(native, subject, codec, token_ids)
        costs.append(
            Cost(
                codec=codec,
                bytes_per_token=bytes_per_token(codec),
                perplexity=quality.perplexity,
                ratio=quality.ratio,
                top1_agreement=quality.top1_agreement,
                mean_kl=quality.mean_kl,
                verdict=judge(quality).value,
            )
        )
    return asdict(
        Report(
            model=settings.served_name,
            weights=settings.weights,
            block_size=settings.block_size,
            tokens=quality.tokens,
            perplexity=quality.baseline_perplexity,
            bytes_per_token=bytes_per_token("none"),
            codecs=tuple(costs),
        )
    )


def _read(text: Path) -> str:
    try:
        return text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidField(f"{text} cannot be read: {error}", field="text") from None


if __name__ == "__main__":
    child_task.serve(_measure)
