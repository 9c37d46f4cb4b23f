"""How often two models that share the noise of a position choose the same token there.

With D the total variation distance between their distributions, no way of choosing makes them agree more often than
1 - D, and the largest of logits plus shared Gumbel noise makes them agree at least (1 - D) / (1 + D) of the time
(Daliri et al. 2024, "Coupling without communication and drafter-invariant speculative decoding").

The texts are the target's own answers at the same temperature, as a drafter meets them. Both models read each text once
and choose at each of its positions, for several seeds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.prefix_fleet import require
from benchmarks.prefix_runs import say
from benchmarks.speculation_sets import chat_set, edit_set, quote_set
from services.drafter.config import DrafterSettings
from shared import drafters
from shared.config import DEFAULT_MODEL
from shared.engine.draft_head import DraftHead
from shared.engine.engine import Engine
from shared.engine.span import Span
from shared.messages import Sampling
from shared.sampling.noise import gumbel_rows
from shared.tokenizer import Tokenizer
from shared.worker import load_draft_engine, load_draft_head, model_folder

TEMPERATURES = (0.7, 1.0, 1.2)
TOKENS = 48
SEEDS = 8
LAYERS = (16, 24, 27)
"""Of the target: drafters that are too slow to be of use, but come ever nearer to it."""
BINS = 10
FEW = 10
"""Fewer positions make no point of the plot."""


@dataclass(frozen=True, slots=True)
class Text:
    tokens: tuple[int, ...]
    start: int
    """Position of the answer's first token."""
    hidden: tuple[bytes, ...] = ()
    """For each token of the answer the target's hidden state at the position before the last known one."""


Thinks = Callable[[Text], Tensor]
"""Logits [tokens of the answer, vocab]; -inf for what cannot be drafted."""


@dataclass(frozen=True, slots=True)
class Place:
    """One position of a text."""

    distance: float
    """Total variation distance of target and drafter."""
    agreed: float
    """Share of the seeds for which both chose the same token."""

    @property
    def bound(self) -> float:
        return (1 - self.distance) / (1 + self.distance)

    @property
    def optimum(self) -> float:
        return 1 - self.distance


def measure_coupling(
    tokenizer: Tokenizer, tokens: int = TOKENS, seeds: int = SEEDS, layers: Sequence[int] = LAYERS
) -> dict[str, Any]:
    settings = DrafterSettings(model=DEFAULT_MODEL, kv_memory_mb=256, threads=1)
    target = _engine(settings, None)
    chats = [*quote_set()[:2], *edit_set()[:2], *chat_set()[:4]]
    prompts = [tokenizer.chat(chat.messages) for chat in chats]
    texts = {t: [read(target, text) for text in answers(target, prompts, tokens, t)] for t in TEMPERATURES}
    thoughts = {t: [logits(target, text) for text in texts[t]] for t in TEMPERATURES}
    del target
    rows, curves = {}, {}
    for name, drafter in _drafters(settings, layers):
        for temperature in TEMPERATURES:
            places = [
                place
                for number, (text, theirs) in enumerate(zip(texts[temperature], thoughts[temperature], strict=True))
                for place in compare(theirs, drafter(text), text.start, temperature, range_of(number, seeds))
            ]
            key = f"{name}, temperature {temperature}"
            rows[key], curves[key] = row(places), curve(places)
            say(f"{key}: {rows[key]}")
    return {
        "rows": rows,
        "curves": curves,
        "least_above_bound": min(r["agreed"] - r["bound"] for r in rows.values()),
        "least_below_optimum": min(r["optimum"] - r["agreed"] for r in rows.values()),
    }


def range_of(number: int, seeds: int) -> range:
    """Seeds of one text, which no other has."""
    return range(number * seeds, (number + 1) * seeds)


def _drafters(settings: DrafterSettings, layers: Sequence[int]) -> Iterator[tuple[str, Thinks]]:
    """The one that the environment asks for, or that comes with Trine; then some of the target's first layers."""
    target = model_folder(DEFAULT_MODEL)
    if (head := drafters.find(settings.drafter_model, target)) is not None:
        yield "draft head", partial(head_logits, load_draft_head(settings, head, target))
    elif settings.drafter_model:
        yield Path(settings.drafter_model).name, partial(logits, _engine(settings, None, settings.drafter_model))
    for count in layers:
        yield f"first {count} layers", partial(logits, _engine(settings, count))


def _engine(settings: DrafterSettings, layers: int | None, model: str = DEFAULT_MODEL) -> Engine:
    engine = load_draft_engine(settings, model_folder(model), layers)
    if not isinstance(engine, Engine):
        raise SystemExit(f"{model} does not tell its logits")
    return engine


# Texts


def answers(target: Engine, prompts: Sequence[Sequence[int]], tokens: int, temperature: float) -> list[Text]:
    """The target's answers to all prompts at once, up to so many tokens each."""
    size = target.info.block_size
    texts, tables, used = [list(prompt) for prompt in prompts], [], 0
    for prompt in prompts:
        blocks = -(-(len(prompt) + tokens) // size)
        tables.append(tuple(range(used, used + blocks)))
        used += blocks
    require(used <= target.info.kv_blocks, f"{used} KV blocks are needed, there are {target.info.kv_blocks}")
    sampling, computed = Sampling(temperature=temperature), [0] * len(prompts)
    live = list(range(len(prompts)))
    for _ in range(tokens):
        spans = [Span(tuple(texts[i][computed[i] :]), computed[i], tables[i], 1, i, sampling) for i in live]
        for i, (token,) in zip(live, target.step(spans), strict=True):
            computed[i] = len(texts[i])
            texts[i].append(token)
        live = [i for i in live if texts[i][-1] not in target.info.eos_ids]
    return [Text(tuple(text), len(prompt)) for text, prompt in zip(texts, prompts, strict=True)]


def logits(engine: Engine, text: Text) -> Tensor:
    """[tokens of the answer, vocab]: what the model thinks of each before it comes."""
    return engine.forward([_span(engine, text, len(text.tokens) - text.start)])


def read(target: Engine, text: Text) -> Text:
    """With the target's hidden states, those that the tokens from the one before the answer on were chosen from."""
    span = _span(target, text, len(text.tokens) - text.start + 1)
    states = target.sample([replace(span, hidden=True)])[0].hidden or []
    return replace(text, hidden=tuple(states[:-1]))


def head_logits(head: DraftHead, text: Text) -> Tensor:
    """As `logits`: a head's first guess of each token, from the hidden state before the last one."""
    places = range(text.start, len(text.tokens))
    windows = [text.tokens[:place][: -head.info.window - 1 : -1] for place in places]
    found = torch.full((len(places), head.info.vocab_size), -torch.inf)
    found[:, head.ids] = head.forward(head.start(text.hidden), windows)[1]
    return found


def _span(engine: Engine, text: Text, rows: int) -> Span:
    blocks = -(-len(text.tokens) // engine.info.block_size)
    return Span(text.tokens[:-1], 0, tuple(range(blocks)), rows)


# Choices


def compare(target: Tensor, drafter: Tensor, start: int, temperature: float, seeds: Sequence[int]) -> list[Place]:
    """Of each row of both logits [positions, vocab], the first of which stands for position `start`.

    A drafter may know fewer tokens than the target: the first ones, or its logits of the others are -inf.
    """
    width = min(target.shape[1], drafter.shape[1])
    places = []
    for index, pair in enumerate(zip(target, drafter, strict=True)):
        theirs, its = (logits.double() / temperature for logits in pair)
        p, q = theirs.softmax(0), its.softmax(0)
        distance = 1 - float(torch.minimum(p[:width], q[:width]).sum())
        noise = gumbel_rows(seeds, [start + index] * len(seeds), max(len(p), len(q)))
        same = (theirs + noise[:, : len(p)]).argmax(1) == (its + noise[:, : len(q)]).argmax(1)
        places.append(Place(min(max(distance, 0.0), 1.0), float(same.double().mean())))
    return places


def row(places: Sequence[Place]) -> dict[str, float]:
    return {
        "positions": len(places),
        "distance": statistics.mean(p.distance for p in places),
        "bound": statistics.mean(p.bound for p in places),
        "agreed": statistics.mean(p.agreed for p in places),
        "optimum": statistics.mean(p.optimum for p in places),
    }


def curve(places: Sequence[Place]) -> list[dict[str, float]]:
    """The same for positions of about the same distance, nearest first."""
    bins: dict[int, list[Place]] = {}
    for place in places:
        bins.setdefault(min(int(place.distance * BINS), BINS - 1), []).append(place)
    return [row(bins[number]) for number in sorted(bins)]


def plot(result: dict[str, Any], path: Path) -> None:
    """The share that agreed by distance, between the bound and the optimum, as a PNG file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 5), layout="constrained")
    axes = figure.add_subplot()
    steps = [i / 100 for i in range(101)]
    axes.plot(steps, [1 - d for d in steps], color="black", label="1 − D, the optimum")
    axes.plot(
        steps, [(1 - d) / (1 + d) for d in steps], color="black", linestyle="--", label="(1 − D) / (1 + D), the bound"
    )
    for name, points in result["curves"].items():
        points = [point for point in points if point["positions"] >= FEW]
        axes.plot([p["distance"] for p in points], [p["agreed"] for p in points], "o", markersize=4, label=name)
    axes.set_xlabel("D, total variation distance of target and drafter")
    axes.set_ylabel("share of positions at which both chose the same token")
    axes.legend(fontsize="x-small")
    figure.savefig(path, format="png", dpi=120)
