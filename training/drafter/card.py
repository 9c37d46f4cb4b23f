"""The model card of a release. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEPTHS = (1, 2, 4, 8)


def card(report: Mapping[str, Any]) -> str:
    """Markdown, from what `evaluate` found."""
    target, settings, data = report["target"], report["settings"], report["data"]
    layers = ", ".join(map(str, settings["layers"]))
    return f"""---
license: apache-2.0
base_model: {target["name"]}
library_name: trine
---

# A drafter for {target["name"]}

Proposes tokens for speculative decoding with {target["name"]} (fingerprint `{target["fingerprint"][:16]}`) and with no
other model. It never changes what that model says, only how fast.

- **Form**: {len(settings["layers"])} Llama layers, started from layers {layers} of the target, the target's own token
  embeddings (not in this file), and an LM head over {report["proposable"]:,} of its {report["vocab_size"]:,} tokens.
  {report["bytes"] / 1e6:.1f} MB, int8 with a scale per row.
- **Data**: {data["conversations"]:,} conversations, {data["answer_tokens"]:,} tokens of answers, that the target itself
  wrote (temperatures 0, 0.3, 0.7 and 1) to prompts made of templates and topics. No other text was used.
- **Recipe**: `python -m training.drafter`; {settings["epochs"]} epochs of {settings["batch_tokens"]:,} tokens a step,
  AdamW, peak learning rate {settings["learning_rate"]:g}; {1 - settings["hard"]:.0%} KL divergence from the target's
  {data["top_k"]} most likely tokens and the tail, {settings["hard"]:.0%} cross-entropy on the first.
- **Cost**: a draft token takes {report["relative_cost"]:.1%} of a step of the target (one sequence,
  {report["measured_on"]}).

## Acceptance

On {report["heldout"]["conversations"]} conversations about topics that the training data does not touch. Greedy answers
are told by the share of drafts that equal the target's token and by the tokens that a step of the target gives when it
verifies 1, 2, 4 or 8 drafts; sampled ones (temperature 0.7) by how often both find the same token most likely.

{_table(report["acceptance"])}

## Limits

- Text unlike the prompts it was trained for (other languages, long documents, long code) is drafted worse.
- Tokens outside its vocabulary are never proposed; "proposable" is the share of the target's most likely tokens that
  are inside.
- It was trained on conversations of up to {data["context"]} tokens.

## Licence

Apache License 2.0, as its target: its weights derive from the target's, and so does all of its training data.
"""


def _table(acceptance: Mapping[str, Any]) -> str:
    head = ["kind", "agreement", *(f"tokens/step, k = {k}" for k in _DEPTHS), "proposable", "agreement, sampled"]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    for kind, found in acceptance.items():
        greedy, sampled = found["greedy"], found["agreement_when_sampled"]
        steps = [f"{greedy['tokens_per_step'][k]:.2f}" for k in _DEPTHS]
        rest = [f"{found['coverage']:.1%}", "" if sampled is None else f"{sampled:.1%}"]
        lines.append(" | ".join([kind, f"{greedy['agreement']:.1%}", *steps, *rest]))
    return "\n".join(f"| {line} |" for line in lines)
