// The conversation. What the model says is put in as text, never as markup.

import { Refusal, chunks } from "./api.js";
import { byId, element, say } from "./dom.js";
import { plural } from "./format.js";
import { bar, facts, total } from "./life.js";

const TOLD = "chatcmpl-".length + 8; // so much of an answer's id is in /fleet
const NEAR_END = 60; // pixels: who has scrolled up further is reading, and is left there

export class Chat {
  #messages = [];
  #running = null;
  #awaited = new Map(); // ids of answers whose life is not known yet, and where to show it
  #model = "";

  constructor() {
    this.log = byId("log");
    this.text = byId("text");
    byId("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
    this.text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        byId("ask").requestSubmit();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.stop();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("new").addEventListener("click", () => this.#begin());
    for (const example of document.querySelectorAll(".example")) {
      example.addEventListener("click", () => {
        this.text.value = example.textContent;
        this.text.focus();
      });
    }
    this.#show(false);
  }

  set model(name) {
    this.#model = name;
    byId("send").disabled = !name;
  }

  stop() {
    this.#running?.abort();
  }

  /** Shows the lives of answers that have become known. */
  lives(answers) {
    for (const answer of answers) {
      const place = this.#awaited.get(answer.id);
      if (!place) continue;
      this.#awaited.delete(answer.id);
      place.append(bar(answer, total(answer)), element("p", { className: "facts", text: facts(answer).join("  ·  ") }));
      this.#follow();
    }
  }

  #begin() {
    this.stop();
    this.#messages = [];
    this.#awaited.clear();
    this.log.replaceChildren(byId("hello") ?? this.hello);
    this.text.focus();
  }

  async #send() {
    const text = this.text.value.trim();
    if (!text || this.#running || !this.#model) return;
    this.hello ??= byId("hello");
    this.hello.remove();
    this.text.value = "";
    const question = { role: "user", content: text };
    this.#turn("you", text);
    const answer = this.#turn("model", "", this.#model);
    const running = (this.#running = new AbortController());
    this.#show(true);
    const said = await this.#answer(answer, [...this.#messages, question], running.signal);
    this.#running = null;
    this.#show(false);
    // A question that was not answered is not part of what is asked next: roles take turns.
    if (said && answer.isConnected) this.#messages.push(question, { role: "assistant", content: said });
    else if (answer.isConnected && !this.text.value) this.text.value = text;
  }

  async #answer(turn, messages, signal) {
    const place = turn.querySelector(".text");
    const written = document.createTextNode("");
    place.append(written);
    turn.setAttribute("aria-busy", "true");
    try {
      for await (const chunk of chunks(this.#body(messages), signal)) {
        const [choice] = chunk.choices;
        if (choice?.delta?.content) {
          written.appendData(choice.delta.content);
          this.#follow();
        }
        if (choice?.finish_reason) this.#awaited.set(chunk.id.slice(0, TOLD), turn);
        if (choice?.finish_reason === "length") this.#note(turn, "Cut off at the most tokens that were asked for.");
        if (chunk.usage) say(byId("said"), `Answer complete: ${plural(chunk.usage.completion_tokens, "token")}.`);
        if (chunk.usage) document.dispatchEvent(new CustomEvent("answered"));
      }
    } catch (error) {
      if (signal.aborted) this.#note(turn, "Stopped.");
      else this.#fail(turn, error);
    } finally {
      turn.removeAttribute("aria-busy");
    }
    return written.data;
  }

  #body(messages) {
    const temperature = byId("temperature").valueAsNumber;
    const most = byId("max-tokens").valueAsNumber;
    return {
      model: this.#model,
      messages,
      stream: true,
      stream_options: { include_usage: true },
      ...(Number.isFinite(temperature) ? { temperature } : {}),
      ...(Number.isFinite(most) ? { max_tokens: most } : {}),
    };
  }

  #turn(who, text, name = "You") {
    const made = element(
      "article", { className: `turn ${who}` },
      element("h3", { text: who === "you" ? "You" : name }), element("p", { className: "text", text }),
    );
    this.log.append(made);
    this.log.scrollTop = this.log.scrollHeight;
    return made;
  }

  #note(turn, text) {
    turn.append(element("p", { className: "note", text }));
    say(byId("said"), text);
    this.#follow();
  }

  #fail(turn, error) {
    const text = error instanceof Refusal ? error.message : "The gateway does not answer. Is it running?";
    turn.append(element("p", { className: "error", role: "alert", text }));
    this.#follow();
    if (error.status === 401) document.dispatchEvent(new CustomEvent("key-needed"));
  }

  #follow() {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    if (scrollHeight - scrollTop - clientHeight < NEAR_END + 40) this.log.scrollTop = scrollHeight;
  }

  #show(running) {
    byId("stop").hidden = !running;
    byId("send").hidden = running;
    // The button that was pressed is gone; whoever has gone elsewhere meanwhile is left there.
    if (this.#messages.length && !running && document.activeElement === document.body) this.text.focus();
  }
}
