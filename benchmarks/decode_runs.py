"""The measurements of `benchmarks.decode`. Torch is imported here, after the environment has been set."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.generation.configuration_utils import ContinuousBatchingConfig, GenerationConfig

from shared.config import DEFAULT_MODEL
from shared.engine.attention import Paged
from shared.engine.codecs.registry import CODECS
from shared.engine.engine import Engine
from shared.engine.linear import WeightFirstLinear
from shared.engine.merged import PartLinear
from shared.engine.norms import FusedRMSNorm
from shared.engine.quality import compare
from shared.engine.span import Span
from shared.engine.weights import resolve
from shared.messages import Sampling
from shared.tokenizer import Tokenizer

BLOCK_SIZE = 16
BLOCKS = 400
GREEDY = Sampling(temperature=0.0)
PROMPT = 64
NEW = 32
RAGGED = (24, 48, 64, 96, 128, 160, 200, 240)
CONTEXT = 256
TURNS = {"batch 1": 5, "batch 8": 3, "steps": 13, "codecs": 5, "shares": 8}
WINDOW, WINDOWS = 512, 5

Times = dict[str, list[float]]


class Ours:
    """An engine with a pool for sixteen sequences of up to 400 positions."""

    def __init__(self, engine: Engine, text: Sequence[int]) -> None:
        self.engine, self._text = engine, tuple(text)

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """Whole prompts in one step, then one token for each sequence per step."""
        texts, done = [list(prompt) for prompt in prompts], [0] * len(prompts)
        for _ in range(new):
            spans = [self._span(i, tuple(text[done[i] :]), done[i], 1) for i, text in enumerate(texts)]
            done = [len(text) for text in texts]
            for text, tokens in zip(texts, self.engine.step(spans), strict=True):
                text += tokens
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]

    def fill(self, sequences: int) -> None:
        """Give each sequence a past of `CONTEXT` tokens."""
        for i in range(sequences):
            self.engine.step([self._span(i, self._text[i : i + CONTEXT], 0, 0)])

    def step(self, sequences: int, rows: int) -> None:
        """One token of each sequence after its past, or `rows` of them, as when drafts are verified."""
        given = self._text[CONTEXT : CONTEXT + rows]
        self.engine.step([self._span(i, given, CONTEXT, rows) for i in range(sequences)])

    @staticmethod
    def _span(sequence: int, token_ids: tuple[int, ...], start: int, rows: int) -> Span:
        each = BLOCKS // 16
        table = tuple(range(sequence * each, (sequence + 1) * each))
        return Span(token_ids, start, table, rows, 0, GREEDY, slot=sequence)


class Plain:
    """The unmodified model. Continuous batching changes its model, so that each way has one of its own; the weights
    of all are mapped from one file."""

    def __init__(self, folder: Path) -> None:
        self._padded, self._paged = (_load(folder) for _ in range(2))

    @torch.inference_mode()
    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
        """Padded on the left to the longest."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = self._padded.generate(
            ids, attention_mask=mask, max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        tokens: list[list[int]] = out[:, width:].tolist()
        return tokens

    def continuous(self, prompts: Sequence[Sequence[int]], new: int) -> None:
        """Its continuous batching; the manager with its cache is kept from call to call."""
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        sizes = ContinuousBatchingConfig(num_blocks=24, max_batch_tokens=1024, allow_block_sharing=False)
        self._paged.generate_batch(
            inputs=[list(prompt) for prompt in prompts],
            generation_config=config,
            continuous_batching_config=sizes,
            persistent_manager=True,
        )

    def close(self) -> None:
        self._paged.destroy_cached_continuous_batching_manager()


def _load(folder: Path) -> Any:
    module: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return module.eval()


def clock() -> float:
    """Seconds. With one thread those of the CPU, so that neighbours on a busy machine are not measured too."""
    return time.process_time() if torch.get_num_threads() == 1 else time.perf_counter()


def take_turns(turns: int, calls: Mapping[str, Callable[[], Any]]) -> Times:
    """Seconds of each call, turn by turn; one unmeasured turn first."""
    times: Times = {name: [] for name in calls}
    for turn in range(turns + 1):
        for name, call in calls.items():
            begin = clock()
            call()
            if turn:
                times[name].append(clock() - begin)
    return times


def ratios(of: Sequence[float], over: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Median of the turns' ratios; smallest and largest."""
    each = [a / b for a, b in zip(of, over, strict=True)]
    return statistics.median(each), (min(each), max(each))


class Report:
    """Collects what is measured. A ratio goes with its spread."""

    def __init__(self) -> None:
        self.result: dict[str, Any] = {"spread": {}, "tokens_per_second": {}, "engine_steps": {}, "codec_steps": {}}

    def ratio(self, name: str, of: Sequence[float], over: Sequence[float]) -> None:
        self.result[name], self.result["spread"][name] = ratios(of, over)

    def rates(self, times: Times, tokens: int, column: str) -> None:
        for name, seconds in times.items():
            self.result["tokens_per_second"].setdefault(name, {})[column] = tokens / statistics.median(seconds)


def contest(report: Report, plain: Plain, native: Ours, int8: Ours, text: Sequence[int]) -> None:
    one, eight = [text[:PROMPT]], [text[50 * i : 50 * i + length] for i, length in enumerate(RAGGED)]
    report.result["same_text"] = plain.generate(one, NEW) == native.generate(one, NEW)
    times = take_turns(
        TURNS["batch 1"],
        {
            "transformers": lambda: plain.generate(one, NEW),
            "engine": lambda: native.generate(one, NEW),
            "engine, int8 weights": lambda: int8.generate(one, NEW),
        },
    )
    report.ratio("ratio_vs_transformers", times["transformers"], times["engine"])
    report.rates(times, NEW, "1")
    times = take_turns(
        TURNS["batch 8"],
        {
            "transformers": lambda: plain.generate(eight, NEW),
            "transformers, continuous": lambda: plain.continuous(eight, NEW),
            "engine": lambda: native.generate(eight, NEW),
            "engine, int8 weights": lambda: int8.generate(eight, NEW),
        },
    )
    plain.close()
    rival = min(("transformers", "transformers, continuous"), key=lambda name: statistics.median(times[name]))
    report.ratio("ratio_vs_transformers_batch8", times[rival], times["engine"])
    report.rates(times, 8 * NEW, "8 ragged")


def steps(report: Report, native: Ours, int8: Ours) -> None:
    """Steps of 1 to 16 sequences, and of one sequence with drafts."""
    shapes = {f"{n} x {r}": (n, r) for n, r in ((1, 1), (1, 5), (1, 9), (4, 1), (8, 1), (16, 1))}
    calls: dict[str, Callable[[], None]] = {}
    for kind, ours in (("native", native), ("int8", int8)):
        ours.fill(16)
        calls |= {f"{kind} {shape}": partial(ours.step, *given) for shape, given in shapes.items()}
    times = take_turns(TURNS["steps"], calls)
    for kind in ("native", "int8"):
        milliseconds = {shape: 1000 * statistics.median(times[f"{kind} {shape}"]) for shape in shapes}
        report.result["engine_steps"][kind] = milliseconds
        rates = {str(n): 1000 * n / milliseconds[f"{n} x 1"] for n in (1, 4, 8, 16)}
        report.result["tokens_per_second"][f"engine, {kind}, steps alone"] = rates
    for rows in (5, 9):
        report.ratio(f"verify_{rows}_over_1", times[f"native 1 x {rows}"], times["native 1 x 1"])
    report.ratio("int8_weights_over_fp32", times["native 1 x 1"], times["int8 1 x 1"])
    report.ratio("int8_weights_over_fp32_batch8", times["native 8 x 1"], times["int8 8 x 1"])


def codecs(report: Report, native: Ours, text: Sequence[int]) -> None:
    """One step of 1 and of 8 sequences with each KV codec, over the same weights."""
    engines = {name: Ours(_with_codec(native.engine, name), text) for name in CODECS}
    for ours in engines.values():
        ours.fill(8)
    for batch in (1, 8):
        times = take_turns(TURNS["codecs"], {name: partial(ours.step, batch, 1) for name, ours in engines.items()})
        for name in engines:
            row = report.result["codec_steps"].setdefault(name, {})
            row[f"{batch} x 1"] = 1000 * statistics.median(times[name])
            row[f"{batch} x 1 over none"] = ratios(times[name], times["none"])[0]


def _with_codec(engine: Engine, codec: str) -> Engine:
    return Engine.of(
        engine._model, fingerprint="", vocabulary="", block_size=BLOCK_SIZE, kv_blocks=BLOCKS, kv_codec=codec, slots=16
    )


@contextmanager
def timed(parts: Mapping[str, Sequence[type]], seconds: dict[str, float]) -> Iterator[None]:
    """Adds up the time in methods of classes: `forward` of modules, `attend` of the attention."""

    def timing(part: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            begin = clock()
            result = original(*given)
            seconds[part] += clock() - begin
            return result

        return call

    patches = []
    for part, kinds in parts.items():
        for kind in kinds:
            method = "forward" if issubclass(kind, nn.Module) else "attend"
            patches.append(mock.patch.object(kind, method, timing(part, getattr(kind, method))))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def shares(native: Ours) -> dict[str, dict[str, float]]:
    """Of a step's time: linear layers, attention over paged KV, norms, and the rest, which is mostly Python."""
    parts = {"linear": (PartLinear, WeightFirstLinear, nn.Linear), "attention": (Paged,), "norms": (FusedRMSNorm,)}
    found = {}
    for sequences, rows in ((1, 1), (1, 5), (8, 1)):
        seconds = dict.fromkeys(parts, 0.0)
        with timed(parts, seconds):
            begin = clock()
            for _ in range(TURNS["shares"]):
                native.step(sequences, rows)
            whole = clock() - begin
        row = {part: spent / whole for part, spent in seconds.items()}
        found[f"{sequences} x {rows}"] = {**row, "rest": 1 - sum(row.values())}
    return found


def run(threads: int) -> dict[str, Any]:
    torch.set_num_threads(threads)
    folder = resolve(DEFAULT_MODEL)
    files = sorted((Path(__file__).parents[1] / "trine/data/texts").glob("*.txt"))
    text = Tokenizer.load(folder).encode("\n\n".join(file.read_text(encoding="utf-8") for file in files))
    report = Report()
    engines, load_seconds = {}, {}
    for kind in ("native", "int8"):
        begin = time.perf_counter()
        engine = Engine.load(folder, block_size=BLOCK_SIZE, kv_blocks=BLOCKS, weights=kind, threads=threads)
        load_seconds[kind], engines[kind] = time.perf_counter() - begin, Ours(engine, text)
    native, int8 = engines["native"], engines["int8"]
    report.result["linear_layers"] = native.engine._model.form
    report.result["load_seconds"] = load_seconds
    measures: dict[str, Callable[[], Any]] = {
        "against transformers": lambda: contest(report, Plain(folder), native, int8, text),
        "steps": lambda: steps(report, native, int8),
        "codecs": lambda: codecs(report, native, text),
        "shares": lambda: report.result.update(shares=shares(native)),
        "perplexity": lambda: report.result.update(quality(native.engine, int8.engine, text)),
    }
    for name, measure in measures.items():
        begin = time.perf_counter()
        measure()
        print(f"{name}: {time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)
    return report.result


def quality(native: Engine, int8: Engine, text: Sequence[int]) -> dict[str, float]:
    found = compare(native, int8, [text[i * WINDOW : (i + 1) * WINDOW] for i in range(WINDOWS)])
    return {"int8_weights_perplexity_ratio": found.ratio, "int8_weights_top1_agreement": found.top1_agreement}
