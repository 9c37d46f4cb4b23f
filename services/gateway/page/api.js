// The gateway's HTTP API: the key, errors in OpenAI's shape, server-sent events.

const STORED = "trine-key";
const RETRIES = 4;
let key = null;
try {
  key = sessionStorage.getItem(STORED);
} catch {
  // Storage may be off; the key is then kept as long as the page.
}

export function setKey(value) {
  key = value || null;
  try {
    if (key) sessionStorage.setItem(STORED, key);
    else sessionStorage.removeItem(STORED);
  } catch {
    // As above.
  }
}

export const hasKey = () => key !== null;

/** What the gateway answered instead of what it was asked for. */
export class Refusal extends Error {
  constructor(status, error) {
    super(typeof error?.message === "string" ? error.message : `The gateway answered ${status}.`);
    this.status = status;
    this.code = error?.code ?? null;
  }
}

export async function call(path, { headers = {}, ...options } = {}) {
  const response = await fetch(path, {
    ...options,
    headers: { ...headers, ...(key ? { authorization: `Bearer ${key}` } : {}) },
    cache: "no-store",
    credentials: "omit",
  });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new Refusal(response.status, body?.error);
}

/** {id, data} of each event. (WHATWG HTML, 9.2 Server-sent events; this server ends lines with LF alone.) */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = parsed(block);
      if (event.data !== null) yield event;
    }
  }
}

function parsed(block) {
  const event = { id: null, data: null };
  for (const line of block.split("\n")) {
    if (line.startsWith("id: ")) event.id = line.slice(4);
    else if (line.startsWith("data: ")) event.data = (event.data === null ? "" : `${event.data}\n`) + line.slice(6);
  }
  return event;
}

/** Chunks of a streamed answer. One whose connection broke goes on where it was, at whichever gateway answers. */
export async function* chunks(body, signal) {
  let last = null;
  let failures = 0;
  for (;;) {
    try {
      const headers = { "content-type": "application/json", ...(last ? { "last-event-id": last } : {}) };
      const response = await call("/v1/chat/completions", {
        method: "POST", body: JSON.stringify(body), headers, signal,
      });
      for await (const event of events(response.body)) {
        if (event.data === "[DONE]") return;
        const chunk = JSON.parse(event.data);
        if (chunk.error) throw new Refusal(200, chunk.error);
        last = event.id ?? last;
        failures = 0;
        yield chunk;
      }
      throw new Error("The connection ended before the answer did.");
    } catch (error) {
      failures += 1;
      if (error instanceof Refusal || signal.aborted || last === null || failures > RETRIES) throw error;
      await pause(250 * 2 ** failures, signal);
    }
  }
}

function pause(milliseconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, milliseconds);
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      reject(signal.reason);
    }, { once: true });
  });
}
