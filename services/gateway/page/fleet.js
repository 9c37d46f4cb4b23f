// The fleet as `/fleet` tells it, for one model.

import { byId, element, say } from "./dom.js";
import { NONE, clock, count, ms, percent, plural, rate, span } from "./format.js";
import { bar, total } from "./life.js";

const SHOWN = 14;
const JOINED_S = 3;
const GLYPHS = { serving: "●", joining: "◔", draining: "◑", silent: "✕" };

export function show(model, answers) {
  path(model);
  workers(model?.workers ?? []);
  lives(answers.filter((answer) => !model || answer.model === model.model).slice(0, SHOWN));
}

// The way of a request

function path(model) {
  const role = (name) => (model?.workers ?? []).filter((worker) => worker.role === name && worker.state !== "silent");
  station("at-queue", count(model?.queued), model?.history.queued);
  station("at-prefill", count(model?.prefilling), model?.history.prefilling, [
    ...(model?.prefill_queued ? [`${count(model.prefill_queued)} waiting`] : []), plural(role("prefill").length, "worker"),
  ]);
  station("at-decode", model ? rate(model.tokens_s) : NONE, model?.history.tokens, [
    `${count(model?.running ?? 0)} running`, plural(role("decode").length, "worker"),
  ]);
  share("at-cache", model?.cache_hit);
  share("at-drafter", model?.acceptance);
}

function station(id, figure, values, notes) {
  const place = byId(id);
  say(place.querySelector(".figure"), figure);
  place.querySelector(".spark path").setAttribute("d", line(values ?? []));
  if (notes) say(place.querySelector(".note"), notes.join(" · "));
}

function share(id, value) {
  const place = byId(id);
  say(place.querySelector(".figure"), percent(value));
  place.querySelector(".share i").style.setProperty("--share", `${(value ?? 0) * 100}%`);
}

/** Second by second, from left to right; where nothing is known for longer there is no line. */
function line(values) {
  const most = Math.max(1, ...values.map((value) => value ?? 0));
  const step = 120 / Math.max(values.length - 1, 1);
  let drawn = "";
  let last = -Infinity;
  values.forEach((value, second) => {
    if (value === null) return;
    drawn += `${second - last <= JOINED_S ? "L" : "M"}${(second * step).toFixed(1)} ${(23 - (value / most) * 22).toFixed(1)}`;
    last = second;
  });
  return drawn;
}

// Workers

function workers(rows) {
  const body = byId("workers").tBodies[0];
  if (!rows.length) {
    nothing(body, 7, "Nobody is heard. `trine up` starts a fleet on this machine.");
    return;
  }
  let last = "";
  body.replaceChildren(...rows.map((row) => {
    const made = worker(row, row.role !== last);
    last = row.role;
    return made;
  }));
}

function worker(row, first) {
  const state = row.state === "silent" ? `silent for ${Math.round(row.silent_s)} s` : row.state;
  const alive = row.state !== "silent";
  const made = element("tr", { className: `${row.role} ${row.state}` });
  if (first) made.classList.add("first");
  made.append(
    element("td", { className: "role", text: row.role }),
    element("th", { scope: "row", text: row.worker }),
    element("td", { className: "is" }, element("span", { text: `${GLYPHS[row.state]} `, "aria-hidden": "true" }), state),
    element("td", { className: "n", text: alive ? count(row.running) : NONE }),
    element("td", { className: "n", text: alive ? count(row.waiting) : NONE }),
    element("td", { className: "wide" }, ...(row.blocks && alive ? pool(row) : [NONE])),
    element("td", { className: "n", text: row.role === "decode" && alive ? rate(row.tokens_s) : NONE }),
  );
  return made;
}

function pool(row) {
  const used = Math.max(row.blocks - row.free_blocks, 0);
  const made = element("div", { className: "share", "aria-hidden": "true" }, element("i"));
  made.firstChild.style.setProperty("--share", `${(used / row.blocks) * 100}%`);
  return [element("div", { className: "pool" }, made, element("span", { text: `${count(used)} / ${count(row.blocks)}` }))];
}

// Answers

function lives(answers) {
  const body = byId("answers").tBodies[0];
  if (!answers.length) {
    say(byId("scale"), "");
    nothing(body, 10, "None yet.");
    return;
  }
  const scale = Math.max(...answers.map(total));
  say(byId("scale"), `0 to ${span(scale)}`);
  const known = new Map([...body.rows].map((row) => [row.dataset.id, row]));
  body.replaceChildren(...answers.map((answer) => life(answer, scale, known.get(answer.id))));
}

/** A row that is there already keeps its place in the page, and with it what is selected in it. */
function life(answer, scale, known) {
  if (known?.dataset.scale === String(scale)) return known;
  const number = (text) => element("td", { className: "n", text });
  return element(
    "tr", { "data-id": answer.id, "data-scale": String(scale) },
    element("th", { scope: "row", text: clock(answer.ended) }),
    number(count(answer.prompt_tokens)), number(count(answer.cached_tokens)), number(count(answer.completion_tokens)),
    element("td", { className: "wide" }, bar(answer, scale)),
    ...["queue", "transfer", "prefill", "decode"].map((phase) => number(ms(answer[`${phase}_ms`]))),
    number(ms(total(answer))),
  );
}

function nothing(body, columns, text) {
  if (body.rows.length === 1 && body.textContent === text) return;
  body.replaceChildren(element("tr", { className: "nothing" }, element("td", { colspan: columns, text })));
}
