"""A drafter tried on its target: answers, guesses and what steps cost. Blocking, for a process that may load torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice
from statistics import median

from services.drafter.record import Guess
from services.drafter.sessions import Session
from services.drafter.sources.base import Wish
from services.drafter.sources.head import Head, HeadSource
from services.drafter.sources.suffix import SuffixSource
from shared.engine.base import StepEngine
from shared.engine.span import Span
from shared.errors import InvalidField
from shared.messages import ChatMessage, Sampling
from shared.sampling.params import Row
from shared.tokenizer import Tokenizer
from trine.draft_tasks import TASKS
from trine.forecast import DEPTHS, Costs, Forecast, Propose, Walk

GREEDY = Sampling(temperature=0.0)
TOKENS = 48
"""Of an answer, at most."""
WIDTHS = (1, *(k + 1 for k in DEPTHS))
ROUNDS = 15
ROOM = TOKENS + max(WIDTHS)
"""Positions that a conversation needs beyond its prompt."""


@dataclass(slots=True)
class Trial:
    """A prompt and what the target answers. `table`: its blocks, in either engine; `slot`: its own."""

    task: str
    prompt: tuple[int, ...]
    table: tuple[int, ...]
    slot: int
    answer: list[int] = field(default_factory=list)
    guesses: list[int] = field(default_factory=list)
    """What a draft model has most likely in each place of the answer, given what stands before; as far as its context
    goes."""
    states: list[bytes] = field(default_factory=list)
    """The hidden states that the tokens of the answer were chosen from, if the target tells them."""

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.answer)


def trials(tokenizer: Tokenizer, block_size: int) -> list[Trial]:
    """One for each prompt of `TASKS`."""
    blocks, out = count(), list[Trial]()
    for task, prompts in TASKS.items():
        for text in prompts:
            prompt = tuple(_ids(tokenizer, text))
            table = tuple(islice(blocks, -(-(len(prompt) + ROOM) // block_size)))
            out.append(Trial(task, prompt, table, len(out)))
    return out


def _ids(tokenizer: Tokenizer, text: str) -> list[int]:
    try:
        return tokenizer.chat([ChatMessage(role="user", content=text)])
    except InvalidField:  # a model without a chat template
        return tokenizer.encode(text)


def answer(target: StepEngine, to_do: Sequence[Trial], progress: Callable[[float], None]) -> None:
    """Let the target answer, all prompts side by side."""
    for trial in to_do:
        _take(target, [(trial, _greedy(target, trial, trial.prompt, 0))])
    for done in range(1, TOKENS):
        progress(done / TOKENS)
        going = [trial for trial in to_do if trial.answer[-1] not in target.info.eos_ids]
        if not going:
            return
        _take(target, [(trial, _next(target, trial)) for trial in going])


def _take(target: StepEngine, spans: Sequence[tuple[Trial, Span]]) -> None:
    for (trial, _), found in zip(spans, target.sample([span for _, span in spans]), strict=True):
        trial.answer += found.tokens
        trial.states += found.hidden or []


def _next(target: StepEngine, trial: Trial) -> Span:
    return _greedy(target, trial, (trial.answer[-1],), len(trial.tokens) - 1)


def _greedy(target: StepEngine, trial: Trial, tokens: tuple[int, ...], start: int) -> Span:
    hidden = bool(target.info.hidden_size)
    return Span(tokens, start, trial.table, 1, sampling=GREEDY, slot=trial.slot, hidden=hidden)


def guess(drafter: StepEngine, trial: Trial) -> None:
    """Let the drafter guess every token of the answer: it reads what stands before, as it does when it drafts."""
    read = trial.tokens[: min(len(trial.tokens) - 1, drafter.info.context_length)]
    rows = len(read) - len(trial.prompt) + 1
    if rows > 0:
        [trial.guesses] = drafter.step([Span(read, 0, trial.table, rows, sampling=GREEDY)])


def by_model(trial: Trial) -> Propose:
    """The drafter's own guesses. Those after a wrong one are not what it would say, but nobody looks at them."""
    return lambda at, depth: trial.guesses[at : at + depth]


def by_head(source: HeadSource, trial: Trial) -> Propose:
    """Guesses from the states that the target told, as a drafter makes them: it also ends chains that are hardly worth
    checking, and learns from trial to trial which these are."""
    session = Session(("check", "check"), prompt_len=len(trial.prompt))
    made: dict[int, list[int]] = {}

    def propose(at: int, depth: int) -> Sequence[int]:
        if at not in made:
            length = len(trial.prompt) + at
            wish = Wish(session, list(trial.tokens), length, max(DEPTHS), GREEDY, trial.states[at - 1])
            made[at] = _drafted(source, wish)
        return made[at][:depth]

    return propose


def _drafted(source: HeadSource, wish: Wish) -> list[int]:
    source.want(wish, wish.k)
    while source.waits(wish) and (plan := source.plan()):
        source.commit(plan, *source.run(plan))
    tokens = source.ready(wish)
    guess = Guess(source.name, wish.length, tuple(tokens), source.kinds(wish, len(tokens)))
    source.record.learn(guess, wish.tokens, wish.session.fits[source.name])
    return tokens


def by_suffix(trial: Trial) -> Propose:
    """What followed the last tokens when they occurred before, as a drafter without a model says."""
    source, session = SuffixSource(0), Session(("check", "check"), prompt_len=len(trial.prompt))
    session.tokens += trial.prompt

    def propose(at: int, depth: int) -> Sequence[int]:
        session.tokens += trial.tokens[len(session.tokens) : len(trial.prompt) + at]
        wish = Wish(session, session.tokens, len(session.tokens), depth, GREEDY)
        source.draft(wish)  # from here on it is behind on long texts
        while source.behind:
            source.work()
        return source.draft(wish).token_ids

    return propose


def forecast(of_kind: Sequence[Trial], source: Callable[[Trial], Propose], costs: Costs) -> Forecast:
    """What drafts from `source` are worth on these answers."""
    walks = {k: [Walk.of(trial.answer, source(trial), k) for trial in of_kind] for k in DEPTHS}
    return Forecast.of(walks, costs)


def costs(target: StepEngine, draft: Callable[[Trial], object], to_do: Sequence[Trial]) -> tuple[Costs, float]:
    """What steps cost for one sequence, in steps of the target, and the seconds of such a step. `draft`: a step of the
    drafter.

    The longest conversation is stepped at its end; all kinds of steps take turns, and medians of their ratios count.
    """
    trial = max(to_do, key=lambda trial: len(trial.tokens))
    first = len(trial.tokens) - 1
    kinds: list[Callable[[], object]] = [
        *(partial(_step, target, trial, first, width) for width in WIDTHS),
        partial(draft, trial),
    ]
    rounds = [[_seconds(step) for step in kinds] for _ in range(ROUNDS + 1)][1:]  # the first one warms up
    ratios = [[seconds / took[0] for seconds in took] for took in rounds]
    *verify, drafting = (median(step) for step in zip(*ratios, strict=True))
    return Costs(drafting, dict(zip(WIDTHS, verify, strict=True))), median(took[0] for took in rounds)


def model_step(drafter: StepEngine, trial: Trial) -> None:
    """One of a draft model, as far on as its context goes."""
    _step(drafter, trial, min(len(trial.tokens), drafter.info.context_length) - 1, 1)


def head_step(head: Head, trial: Trial) -> None:
    """One of a draft head."""
    row = Row(GREEDY, 0, len(trial.tokens))
    head.step(head.start(trial.states[-1:]), [trial.tokens[: -head.info.window - 1 : -1]], [row])


def _step(engine: StepEngine, trial: Trial, at: int, width: int) -> None:
    """Which tokens they are does not matter."""
    engine.step([Span((trial.tokens[-1],) * width, at, trial.table, width, sampling=GREEDY, slot=trial.slot)])


def _seconds(step: Callable[[], object]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began
