"""What a step does for sequences whose answers must have a form. Pure but slow: it runs where the engine does.

A draft that the form refuses is cut before the step, and with it those after it; so is what comes after the token that
completes the answer. What a form cannot go on with ends its own request, not the step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from services.decode.scheduler import accepted_count
from services.decode.sequence import Work
from shared.engine.base import Sampled
from shared.errors import TrineError

Sample = Callable[[list[Work]], list[Sampled]]


@dataclass(frozen=True, slots=True)
class Stepped:
    """A step's works as they were run, what was chosen for each, and those whose request has to end, with the error."""

    works: list[Work]
    sampled: list[Sampled]
    refused: list[tuple[Work, TrineError]]


def sample_within(works: list[Work], sample: Sample) -> Stepped:
    """`sample` the works, those of guided sequences within their forms."""
    if all(work.sequence.guide is None or not work.span.rows for work in works):
        return Stepped(works, sample(works), [])
    out = Stepped([], [], [])
    ready: list[Work] = []
    for work in works:
        try:
            ready.append(_masked(work))
        except Exception as error:
            out.refused.append((work, _reason(error)))
    for work, sampled in zip(ready, sample(ready) if ready else [], strict=True):
        try:
            out.sampled.append(_taken(work, sampled))
            out.works.append(work)
        except Exception as error:
            out.refused.append((work, _reason(error)))
    return out


def _reason(error: Exception) -> TrineError:
    """Whatever it is, the others' forms have moved on: this step must not be repeated for them."""
    return error if isinstance(error, TrineError) else TrineError(f"the form could not be followed: {error!r:.200}")


def _masked(work: Work) -> Work:
    guide, span = work.sequence.guide, work.span
    if guide is None or not span.rows:
        return work
    length = len(span.token_ids)
    masks = guide.masks(span.token_ids[length - work.drafts :])
    drafts = len(masks) - 1
    cut = span.token_ids[: length - work.drafts + drafts]
    return Work(work.sequence, replace(span, token_ids=cut, rows=1 + drafts, guesses=drafts, masks=masks), drafts)


def _taken(work: Work, sampled: Sampled) -> Sampled:
    """Without what comes after the end of the answer."""
    guide, span = work.sequence.guide, work.span
    if guide is None or not span.rows:
        return sampled
    accepted = accepted_count(span.token_ids[len(span.token_ids) - work.drafts :], sampled.tokens)
    taken = guide.take(sampled.tokens[: accepted + 1])
    return sampled if taken > accepted else replace(sampled, tokens=sampled.tokens[:taken])
