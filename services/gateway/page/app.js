// Wiring: looks at the fleet once a second while somebody looks at the page.

import { Refusal, call, hasKey, setKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, element, say } from "./dom.js";
import { plural } from "./format.js";
import { show } from "./fleet.js";

const EVERY_MS = 1000;
const chat = new Chat();
let told = { models: [], answers: [], trouble: null };
let looking = null;

// The fleet

async function look() {
  try {
    told = await (await call("/fleet")).json();
    if (hasKey()) byId("key-change").hidden = false;
    state();
  } catch (error) {
    if (error instanceof Refusal && error.status === 401) {
      askKey(hasKey() ? error.message : "");
      return;
    }
    lost(error instanceof Refusal ? error.message : "The gateway does not answer; trying again.");
  }
  clearTimeout(looking); // another look may have been under way
  if (!document.hidden) looking = setTimeout(look, EVERY_MS);
}

function state() {
  document.body.classList.remove("stale");
  models(told.models.filter((model) => model.served).map((model) => model.model));
  const chosen = byId("model").value;
  show(told.models.find((model) => model.model === chosen) ?? told.models[0], told.answers);
  chat.lives(told.answers);
  const alive = told.models.flatMap((model) => model.workers).filter((worker) => worker.state !== "silent");
  say(byId("state"), told.trouble ? "not ready" : `ready · ${plural(alive.length, "worker")}`);
  byId("state").dataset.is = told.trouble ? "bad" : "good";
  trouble(told.trouble ? `Requests are refused now: ${told.trouble}.` : "");
}

function lost(text) {
  document.body.classList.add("stale");
  say(byId("state"), "not reachable");
  byId("state").dataset.is = "bad";
  trouble(text);
}

function trouble(text) {
  byId("trouble").hidden = !text;
  say(byId("trouble"), text);
}

function models(names) {
  const select = byId("model");
  if ([...select.options].map((option) => option.value).join("\n") !== names.join("\n")) {
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => element("option", { value: name, text: name })));
    if (names.includes(chosen)) select.value = chosen;
  }
  select.disabled = names.length < 2;
  chat.model = select.value;
}

// Controls

function askKey(error) {
  byId("key-form").hidden = false;
  say(byId("key-error"), error);
  say(byId("state"), "a key is needed");
  byId("key").focus();
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  setKey(byId("key").value.trim());
  byId("key").value = "";
  byId("key-form").hidden = true;
  look();
});
byId("key-change").addEventListener("click", () => {
  setKey(null);
  byId("key-change").hidden = true;
  askKey("");
});
document.addEventListener("answered", look);
document.addEventListener("key-needed", () => askKey("This API key is not known here."));
document.addEventListener("visibilitychange", () => document.hidden || look());
byId("model").addEventListener("change", state);

for (const button of document.querySelectorAll("[data-show]")) {
  button.addEventListener("click", () => {
    document.body.dataset.pane = button.dataset.show;
    for (const each of document.querySelectorAll("[data-show]")) each.setAttribute("aria-pressed", each === button);
  });
}

// Theme: the system's, or a chosen one

const THEMES = ["auto", "light", "dark"];
const root = document.documentElement;

function theme(name) {
  if (name === "auto") delete root.dataset.theme;
  else root.dataset.theme = name;
  byId("theme").textContent = `Theme: ${name}`;
  try {
    localStorage.setItem("trine-theme", name);
  } catch {
    // Storage may be off; it holds for this page then.
  }
}

byId("theme").addEventListener("click", () => {
  theme(THEMES[(THEMES.indexOf(root.dataset.theme ?? "auto") + 1) % THEMES.length]);
});
byId("theme").textContent = `Theme: ${root.dataset.theme ?? "auto"}`;

look();
