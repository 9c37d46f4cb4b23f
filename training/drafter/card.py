"""The model card of a release. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_DEPTHS, _STEPS = (1, 2, 3), (1, 2, 4, 8)


def card(report: Mapping[str, Any]) -> str:
    """Markdown, from what `evaluate` found."""
    target, settings, data = report["target"], report["settings"], report["data"]
    return f"""---
license: apache-2.0
base_model: {target["name"]}
library_name: trine
---

# A draft head for {target["name"]}

Proposes tokens for speculative decoding with {target["name"]} (fingerprint `{target["fingerprint"][:16]}`) and with no
other model. It never changes what that model says, only how fast.

- **Form**: a recurrent head that reads the target's hidden state after its final norm and the last
  {settings["window"]} tokens (embeddings of the target, not in this file) through one hidden layer of
  {settings["width"]:,}, and proposes {report["proposable"]:,} of {report["vocab_size"]:,} tokens.
  {report["bytes"] / 1e6:.1f} MB, int8 with a scale per row.
- **Data**: {data["conversations"]:,} conversations, {data["answer_tokens"]:,} tokens of answers, that the target itself
  wrote (temperatures 0, 0.3, 0.7 and 1) to prompts made of templates and topics. No other text was used.
- **Recipe**: `python -m training.drafter`; {settings["epochs"]} epochs of {settings["batch"]:,} positions a step, up to
  {len(settings["unroll"])} tokens drafted from each, AdamW, peak learning rate {settings["learning_rate"]:g};
  {1 - settings["hard"]:.0%} KL divergence from the target's {data["top_k"]} most likely tokens and the tail,
  {settings["hard"]:.0%} cross-entropy on the first, {settings["regression"]:g} times the distance of hidden states.
- **Cost**: a draft token takes {report["relative_cost"]:.1%} of a step of the target (one sequence,
  {report["measured_on"]}).

## Acceptance

On {report["heldout"]["conversations"]} conversations about topics that the training data does not touch. "Draft n" is
the share of n-th drafts that equal the target's token, given that those before did, in greedy answers; k is how many
drafts a step of the target verifies. In sampled answers (temperature 0.7): how often both find the same token most
likely. "Proposable" is the share of the target's most likely tokens that the head knows.

{_acceptance(report["acceptance"])}

How often drafts came true that the head was so sure of, in greedy answers:

{_calibration(report["calibration"])}

## Limits

- Text unlike the prompts it was trained for (other languages, long documents, long code) is drafted worse.
- Tokens outside its vocabulary are never proposed.
- It was trained on conversations of up to {data["context"]} tokens.

## Licence

Apache License 2.0, as its target: its weights derive from the target's, and so does all of its training data.
"""


def _acceptance(acceptance: Mapping[str, Any]) -> str:
    drafts, steps = [f"draft {n}" for n in _DEPTHS], [f"tokens/step, k = {k}" for k in _STEPS]
    rows = []
    for kind, found in acceptance.items():
        agreed = [_percent(found["agreement"].get(depth)) for depth in _DEPTHS]
        given = [f"{found['tokens_per_step'][k]:.2f}" for k in _STEPS]
        rows.append([kind, *agreed, *given, _percent(found["coverage"]), _percent(found["agreement_when_sampled"])])
    return _table(["kind", *drafts, *steps, "proposable", "agreement, sampled"], rows)


def _calibration(calibration: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    by_range = {which: {entry["from"]: entry for entry in entries} for which, entries in calibration.items()}
    rows = []
    for least in sorted({least for entries in by_range.values() for least in entries}):
        row = [f"from {least:.0%}"]
        for entries in by_range.values():
            entry = entries.get(least)
            row += [f"{entry['drafts']:,}", _percent(entry["true"])] if entry else ["0", ""]
        rows.append(row)
    return _table(["confidence", *(head for which in by_range for head in (f"{which} drafts", "came true"))], rows)


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in [head, ["---"] * len(head), *rows])
