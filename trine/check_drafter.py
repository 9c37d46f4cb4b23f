"""Does a drafter fit a target, and is it worth its steps? Vocabularies id by id, then a trial on built-in tasks.

The measuring runs in a child process (`python -m trine.check_drafter`, settings from TRINE_*).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from rich.console import Group
from rich.table import Table
from rich.text import Text

from services.drafter.config import DrafterSettings
from services.drafter.sources.head import HeadSource
from shared import drafters
from shared.engine.base import ModelInfo, StepEngine
from shared.engine.weights import resolve
from shared.errors import ConfigError, InvalidField, ModelError
from shared.tokenizer import Tokenizer
from shared.vocabulary import Comparison, Vocabulary
from shared.worker import load_draft_engine, load_draft_head, load_engine
from trine import child_task, draft_trial
from trine.child_task import Progress, silent
from trine.draft_trial import Trial
from trine.forecast import DEPTHS, Costs, Forecast, Propose, verdict
from trine.settings import checked


@dataclass(frozen=True, slots=True)
class Task:
    """Answers of one kind. `suffix`: what drafts from the text itself would bring, without a model."""

    task: str
    tokens: int
    model: Forecast
    suffix: Forecast


@dataclass(frozen=True, slots=True)
class Worth:
    """For one sequence, both engines in one process and taking turns: the way over the bus comes on top, and what a
    drafter drafts ahead while the target is busy comes off."""

    step_ms: float
    costs: Costs
    tasks: tuple[Task, ...]
    verdict: str
    suffix_verdict: str


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    drafter: str
    refusals: tuple[str, ...]
    notes: tuple[str, ...]
    vocabulary: Comparison
    target_context: int | None
    """In positions; None when the vocabularies alone tell that the pair does not fit."""
    drafter_context: int | None
    """None also for a draft head, which drafts at any position."""
    worth: Worth | None
    """None when the pair does not fit."""

    @property
    def fits(self) -> bool:
        return not self.refusals

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self), "fits": self.fits}


def check(drafter: str, layers: int | None, env: Mapping[str, str], progress: Progress = silent) -> Report:
    """Try `drafter`, or the target's own first `layers` layers, on the target that the settings name. Blocking.

    `env` are TRINE_* variables on top of this process's environment. Raises ConfigError, ModelError, InvalidField.
    """
    if bool(drafter) == (layers is not None):
        raise InvalidField(
            "a drafter is a draft head, a model or the target's own first layers: name one", field="drafter"
        )
    env = {**env, "TRINE_DRAFTER_MODEL": drafter}
    env |= {} if layers is None else {"TRINE_DRAFTER_LAYERS": str(layers)}
    checked(DrafterSettings, env)
    return TypeAdapter(Report).validate_python(child_task.run("trine.check_drafter", env=env, progress=progress))


def rendered(report: Report) -> Group:
    """For a terminal. Tokens are no markup, whatever brackets they have."""
    head = f"{report.drafter} as the drafter of {report.model}"
    lines = [f"{head}: does not fit" if report.refusals else head]
    lines += [f"refused: {refusal}" for refusal in report.refusals] + [f"note: {note}" for note in report.notes]
    lines += [f"  id {difference}" for difference in report.vocabulary.examples]
    if (worth := report.worth) is None:
        return Group(*map(Text, lines))
    verify = ", ".join(f"{width} positions {cost:.2f}" for width, cost in worth.costs.verify.items() if width > 1)
    lines.append(f"a step of the target: {worth.step_ms:.1f} ms; in such steps, of the drafter {worth.costs.draft:.2f}")
    lines.append(f"verifying: {verify}")
    verdicts = [f"model: {worth.verdict}", f"suffix alone: {worth.suffix_verdict}"]
    return Group(*map(Text, lines), _table(worth), *map(Text, verdicts))


def _table(worth: Worth) -> Table:
    title = "share of first drafts that are right; by k drafts in a step: accepted, speed-up"
    shown = Table(title=title, title_justify="left", box=None)
    for heading in ("task", "source"):
        shown.add_column(heading)
    for heading in ("first", *(f"k = {k}" for k in DEPTHS)):
        shown.add_column(heading, justify="right")
    for task in worth.tasks:
        for source, found in (("model", task.model), ("suffix", task.suffix)):
            shown.add_row(
                task.task,
                source,
                f"{found.by_place[0]:.0%}" if found.by_place else "–",
                *(f"{at.accepted:.2f} ×{at.speedup:.2f}" for at in found.depths),
            )
    return shown


def measure(settings: DrafterSettings, progress: Progress = silent) -> Report:
    """The child's side of `check`: loads torch, unless the vocabularies tell that the pair does not fit."""
    folder = resolve(settings.model, progress)
    name = settings.drafter_model
    if name and (head := drafters.find(name, folder)) is not None:
        return _with_head(settings, folder, head, progress)
    draft_folder = resolve(name, progress) if name else folder
    progress("comparing the vocabularies", 0.0)
    vocabulary = Comparison.of(Vocabulary.load(folder), Vocabulary.load(draft_folder))
    report = _begun(settings, name or f"its first {settings.drafter_layers} layers", vocabulary)
    return _with_model(report, settings, folder, draft_folder, progress) if report.fits else report


def _begun(settings: DrafterSettings, drafter: str, vocabulary: Comparison) -> Report:
    return Report(
        model=settings.served_name,
        drafter=drafter,
        refusals=(vocabulary.refusal,) if vocabulary.refusal else (),
        notes=_vocabulary_notes(vocabulary),
        vocabulary=vocabulary,
        target_context=None,
        drafter_context=None,
        worth=None,
    )


def _vocabulary_notes(found: Comparison) -> tuple[str, ...]:
    notes = [
        (found.extra, "ids that only the drafter has, none of which is ever accepted"),
        (found.special, "ids that are control tokens in one vocabulary alone"),
        (found.added, "ids that are added tokens in one vocabulary alone"),
    ]
    return tuple(f"{what}: {count:,}" for count, what in notes if count)


def _with_head(settings: DrafterSettings, folder: Path, head_folder: Path, progress: Progress) -> Report:
    """A draft head fits if it was made for these weights: that compares vocabularies too."""
    vocabulary = Vocabulary.load(folder)
    report = _begun(settings, settings.drafter_model, Comparison.of(vocabulary, vocabulary))
    progress("loading the drafter", 0.0)
    try:
        head = load_draft_head(settings, head_folder, folder)
    except ConfigError as error:
        return replace(report, refusals=(error.message,))
    trials, target = _target(settings, folder, progress)
    report = replace(report, target_context=target.info.context_length)
    if head.info.hidden_size != target.info.hidden_size:
        size = f"the head reads hidden states of {head.info.hidden_size} channels"
        return replace(report, refusals=(f"{size}, the target has {target.info.hidden_size}",))
    draft_trial.answer(target, trials, lambda done: progress("the target answers", 0.3 + done * 0.4))
    source = HeadSource(head)
    propose = {trial.slot: draft_trial.by_head(source, trial) for trial in trials}
    progress("the drafter guesses", 0.7)
    return replace(report, worth=_worth(target, partial(draft_trial.head_step, head), propose, trials, progress))


def _with_model(
    report: Report, settings: DrafterSettings, folder: Path, draft_folder: Path, progress: Progress
) -> Report:
    trials, target = _target(settings, folder, progress)
    progress("loading the drafter", 0.3)
    sized = settings.model_copy(update={"kv_blocks": target.info.kv_blocks})
    drafter = load_draft_engine(sized, draft_folder, None if settings.drafter_model else settings.drafter_layers)
    ours, theirs = target.info, drafter.info
    report = replace(report, target_context=ours.context_length, drafter_context=theirs.context_length)
    if theirs.vocab_size < report.vocabulary.target_size:
        sizes = (
            f"the drafter's weights are for {theirs.vocab_size:,} ids, the target has {report.vocabulary.target_size:,}"
        )
        return replace(report, refusals=(sizes,))
    draft_trial.answer(target, trials, lambda done: progress("the target answers", 0.4 + done * 0.3))
    for done, trial in enumerate(trials):
        progress("the drafter guesses", 0.7 + 0.2 * done / len(trials))
        draft_trial.guess(drafter, trial)
    propose = {trial.slot: draft_trial.by_model(trial) for trial in trials}
    worth = _worth(target, partial(draft_trial.model_step, drafter), propose, trials, progress)
    return replace(report, notes=report.notes + _weights_notes(ours, theirs), worth=worth)


def _target(settings: DrafterSettings, folder: Path, progress: Progress) -> tuple[list[Trial], StepEngine]:
    """The trials that the target's context has room for, and the target. Raises ModelError if it has for none."""
    trials = draft_trial.trials(Tokenizer.load(folder), settings.block_size)
    sized = settings.model_copy(update={"kv_blocks": 1 + trials[-1].table[-1]})
    progress("loading the target", 0.1)
    target = load_engine(sized, folder, slots=len(trials), lookahead=max(draft_trial.WIDTHS))
    context = target.info.context_length
    if not (fitting := [trial for trial in trials if len(trial.prompt) + draft_trial.ROOM <= context]):
        raise ModelError(f"the target's context of {context} positions is too short for any of the tasks")
    return fitting, target


def _weights_notes(target: ModelInfo, drafter: ModelInfo) -> tuple[str, ...]:
    notes = []
    if drafter.vocab_size > target.vocab_size:
        sizes = f"the drafter's weights are for {drafter.vocab_size:,} ids, the target's for {target.vocab_size:,}"
        notes.append(f"{sizes}: a draft with one beyond these is never accepted")
    if drafter.context_length < target.context_length:
        sizes = f"the drafter's context is {drafter.context_length:,} positions, the target's {target.context_length:,}"
        notes.append(f"{sizes}: nothing is drafted beyond that")
    return tuple(notes)


def _worth(
    target: StepEngine,
    draft: Callable[[Trial], object],
    propose: Mapping[int, Propose],
    trials: Sequence[Trial],
    progress: Progress,
) -> Worth:
    """`draft`: a step of the drafter; `propose`: its drafts, by the trial's slot."""
    progress("timing steps", 0.9)
    costs, step_s = draft_trial.costs(target, draft, trials)
    tasks = []
    for name in dict.fromkeys(trial.task for trial in trials):
        of_kind = [trial for trial in trials if trial.task == name]
        by_model = draft_trial.forecast(of_kind, lambda trial: propose[trial.slot], costs)
        by_suffix = draft_trial.forecast(of_kind, draft_trial.by_suffix, replace(costs, draft=0.0))
        tasks.append(Task(name, sum(len(trial.answer) for trial in of_kind), by_model, by_suffix))
    return Worth(
        step_ms=1e3 * step_s,
        costs=costs,
        tasks=tuple(tasks),
        verdict=verdict({task.task: task.model for task in tasks}),
        suffix_verdict=verdict({task.task: task.suffix for task in tasks}),
    )


if __name__ == "__main__":
    child_task.serve(lambda progress: measure(DrafterSettings(), progress).as_dict())
