// What the forms do. Owns requests and what is said of their outcome; the page's state is main.js's.

import { Refused, call, stream } from "./api.js";
import { count, element, seconds, short, span } from "./words.js";

const by = (id) => document.getElementById(id);
const CHANNELS = { CHANNEL_REASONING: "reasoning", CHANNEL_TOOL_CALL: "tool" };
const REASONS = {
  FINISH_REASON_EOS: "the model ended it",
  FINISH_REASON_STOP: "a stop matched",
  FINISH_REASON_MAX_TOKENS: "as many tokens as asked for",
  FINISH_REASON_CONTEXT_FULL: "the context is full",
  FINISH_REASON_TIME_LIMIT: "the time is over",
  FINISH_REASON_STOPPED: "stopped",
};

export function say(text, bad = false) {
  by("outcome").textContent = text;
  by("outcome").className = bad ? "bad" : "";
}

// Runs `work`, which returns what to say, with the form's buttons off meanwhile.
async function attempt(form, work) {
  const buttons = form.querySelectorAll("button:not([type=button])");
  for (const button of buttons) button.disabled = true;
  say("…");
  try {
    say(await work());
  } catch (error) {
    say(error instanceof Refused ? error.toString() : String(error), true);
  } finally {
    for (const button of buttons) button.disabled = false;
  }
}

function inputOf(text, form) {
  if (form === "raw") return { raw: { parts: [{ text }] } };
  return { chat: { messages: [{ role: "ROLE_USER", parts: [{ text }] }] } };
}

// `chosen()` is the name of the snapshot to go on from, "" for none; `choose(name)` shows another.
export function connect({ chosen, choose }) {
  let running = null; // {abort, generation}

  by("generate").addEventListener("submit", (event) => {
    event.preventDefault();
    if (running) return;
    attempt(event.target, async () => {
      const text = by("prompt").value;
      const request = { parent: chosen(), stopping: { maxTokens: by("max-tokens").valueAsNumber || undefined } };
      if (text) request.input = inputOf(text, by("form").value);
      if (by("temperature").value !== "") request.sampling = { temperature: by("temperature").valueAsNumber };
      if (by("save").checked) request.save = {};
      const abort = new AbortController();
      running = { abort, generation: "" };
      try {
        return await generate(request, abort.signal, (name) => (running.generation = name), choose);
      } finally {
        running = null;
        by("stop").hidden = true;
      }
    });
  });

  by("stop").addEventListener("click", () => {
    // Cleanly, so that what it has so far is kept; before it has begun there is nothing to keep.
    if (running?.generation) call("StopGeneration", { generation: running.generation }).catch(() => running?.abort.abort());
    else running?.abort.abort();
  });

  by("fork").addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(event.target, async () => {
      const lines = by("branches").value.split("\n");
      const branches = lines.map((text) => (text ? { append: { raw: { parts: [{ text }] } } } : {}));
      const reply = await call("Fork", { parent: chosen(), branches });
      return `made ${reply.snapshots.map(({ name }) => short(name)).join(", ")}`;
    });
  });

  by("rollback").addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(event.target, async () => {
      const request = { source: chosen(), tokenCount: by("cut").valueAsNumber, release: by("release").value };
      const reply = await call("Rollback", request);
      choose(reply.snapshot.name);
      return `made ${short(reply.snapshot.name)}${reply.released.length ? `, let go of ${count(reply.released.length)}` : ""}; ${costs(reply.usage)}`;
    });
  });

  by("delete").addEventListener("submit", (event) => {
    event.preventDefault();
    attempt(event.target, async () => {
      const request = { name: chosen(), descendants: by("descendants").checked, stopActive: by("stop-active").checked };
      const reply = await call("DeleteSnapshot", request);
      return `deleted ${reply.deleted.map(short).join(", ")}`;
    });
  });
}

async function generate(request, signal, began, choose) {
  const out = by("stream");
  out.replaceChildren();
  by("receipt").textContent = "";
  by("answer").hidden = false;
  by("stop").hidden = false;
  let last = null;
  let finished = null;
  for await (const event of stream("Generate", request, signal)) {
    if (event.started) began(event.started.generation);
    if (event.delta?.text) {
      const kind = CHANNELS[event.delta.channel] ?? "";
      if (last?.className !== kind) out.append((last = element("span", "", kind)));
      const below = out.scrollHeight - out.scrollTop - out.clientHeight < 40;
      last.append(event.delta.text);
      if (below) out.scrollTop = out.scrollHeight;
    }
    if (event.finished) finished = event.finished;
  }
  if (!finished) throw new Error("the stream ended without its last message");
  const { usage, timing } = finished;
  const parts = [REASONS[finished.reason] ?? finished.reason, `${count(usage.completionTokens)} new tokens`, costs(usage)];
  if (timing) parts.push(`queue ${span(timing.queue ?? 0)}, load ${span(timing.load ?? 0)}, prefill ${span(timing.prefill ?? 0)}, decode ${span(timing.decode ?? 0)}`);
  if (finished.saveErrorReason) parts.push(`not kept: ${finished.saveErrorReason}`);
  by("receipt").textContent = parts.join("; ");
  if (!finished.snapshot) return "done";
  choose(finished.snapshot.name);
  by("prompt").value = "";
  return `kept as ${short(finished.snapshot.name)}`;
}

export function costs(usage) {
  return `context ${count(usage.promptTokens)}: ${count(usage.cachedTokens)} restored, ${count(usage.recomputedTokens)} recomputed, ${count(usage.newTokens)} new`;
}

// What using a snapshot would cost now, from a plan.
export function planned(plan) {
  const parts = [`${count(Number(plan.memoryTokens) + Number(plan.diskTokens))} tokens restored, ${count(plan.recomputedTokens)} computed again`];
  if (plan.predictedTtft) parts.push(`first token in about ${span(seconds(plan.predictedTtft))}`);
  if (plan.reason) parts.push(plan.reason);
  return parts.join("; ");
}
