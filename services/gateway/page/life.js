// A request's life as a bar: queue, transfer, prefill, decode, one after another.

import { element } from "./dom.js";
import { plural, span } from "./format.js";

const PHASES = ["queue", "transfer", "prefill", "decode"];

export const total = (answer) => PHASES.reduce((sum, phase) => sum + answer[`${phase}_ms`], 0);

/** `scale`: milliseconds that are as long as the place for the bar. */
export function bar(answer, scale) {
  const told = PHASES.map((phase) => `${phase} ${span(answer[`${phase}_ms`])}`).join(", ");
  const made = element("div", { className: "life", role: "img", "aria-label": told, title: told });
  for (const phase of PHASES) {
    const share = answer[`${phase}_ms`] / scale;
    if (share <= 0) continue;
    const part = element("i", { className: phase });
    part.style.setProperty("--share", `${(share * 100).toFixed(3)}%`);
    made.append(part);
  }
  return made;
}

/** Who did it, and what it took. */
export function facts(answer) {
  const first = answer.queue_ms + answer.transfer_ms + answer.prefill_ms;
  const later = answer.completion_tokens - 1;
  return [
    `first token ${span(first)}`,
    ...(later > 0 && answer.decode_ms > 0 ? [`${((later / answer.decode_ms) * 1e3).toFixed(1)} tokens/s`] : []),
    plural(answer.completion_tokens, "token"),
    `${answer.cached_tokens} of ${answer.prompt_tokens} prompt tokens cached`,
    ...(answer.drafted_tokens ? [`${answer.accepted_tokens} of ${plural(answer.drafted_tokens, "draft")} accepted`] : []),
    [...answer.prefill, answer.decode, ...answer.drafter].filter(Boolean).join(" · "),
    ...(answer.attempts > 1 ? [`${answer.attempts} attempts`] : []),
  ];
}
