// The page's state and its clock: what the server said last, what is chosen, and drawing both.

import { Refused, call, stream, token } from "./api.js";
import { connect, planned, say } from "./actions.js";
import { Tree } from "./tree.js";
import { count, element, short, size, span } from "./words.js";

const LOOK_EVERY = 1000; // milliseconds between looks at rows and numbers, while the page is seen
const AGAIN_AFTER = 2000; // before a watch that broke off is begun again
const by = (id) => document.getElementById(id);

const snapshots = new Map();
const texts = new Map(); // by name; a snapshot's text never changes
let chosen = "";
let resume = "";
let rows = [];
let inside = false; // let in at least once with what is in the tab
let drawing = false;
let watched = new AbortController();

const tree = new Tree(by("tree"), by("more"), (name) => choose(name === chosen ? "" : name), async (name) => {
  const { text } = await textOf(name, 48);
  return text.replace(/\s+/g, " ").slice(0, 160);
});

function textOf(name, most) {
  const key = `${most} ${name}`;
  if (!texts.has(key)) {
    texts.set(key, queue(() => call("text", { name, most })));
    texts.get(key).catch(() => texts.delete(key));
  }
  return texts.get(key);
}

// Two at a time: a long list must not take the server's calls from what the user does.
const waiting = [];
let under = 0;
function queue(work) {
  return new Promise((resolve, reject) => {
    waiting.push(() => work().then(resolve, reject).finally(() => ((under -= 1), next())));
    next();
  });
}
function next() {
  while (under < 2 && waiting.length) {
    under += 1;
    waiting.shift()();
  }
}

function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    const held = new Map();
    const hold = (name, what) => name && held.set(name, [...(held.get(name) ?? []), what]);
    for (const row of rows) hold(row.parent, row.generation ? `row ${short(row.generation).slice(0, 8)}` : "a row");
    const children = new Map();
    for (const { parent } of snapshots.values()) children.set(parent, (children.get(parent) ?? 0) + 1);
    for (const snapshot of snapshots.values()) {
      const told = (held.get(snapshot.name) ?? []).length;
      if (snapshot.activeUses > told) hold(snapshot.name, `${snapshot.activeUses - told} calls`);
      if (children.has(snapshot.name)) hold(snapshot.name, `${count(children.get(snapshot.name))} derived`);
    }
    tree.draw(snapshots, chosen, held);
    by("counts").textContent = count(snapshots.size);
    facts();
  });
}

function facts() {
  const snapshot = snapshots.get(chosen);
  const list = by("facts");
  if (!snapshot) {
    list.replaceChildren();
    return;
  }
  const lines = [
    ["made from", snapshot.parent ? short(snapshot.parent) : "nothing"],
    ["tokens", `${count(snapshot.tokenCount)}, ${count(snapshot.checkpointedTokens)} of them at checkpoints`],
    ["used last", `${span((Date.now() - Date.parse(snapshot.lastUseTime)) / 1000)} ago`],
    ["use costs", list.dataset.plan ?? "…"],
  ];
  if (snapshot.imageSpans.length) lines.push(["images", count(snapshot.imageSpans.length)]);
  const now = JSON.stringify(lines);
  if (list.dataset.now === now && list.childElementCount) return;
  list.dataset.now = now;
  list.replaceChildren(...lines.flatMap(([name, text]) => [element("dt", name), element("dd", text)]));
}

function choose(name) {
  chosen = name;
  by("chosen-title").textContent = name ? short(name) : "From scratch";
  for (const id of ["fork", "rollback", "delete"]) by(id).hidden = !name;
  by("text").textContent = "";
  delete by("facts").dataset.plan;
  say("");
  if (name) {
    const known = snapshots.get(name);
    by("cut").value = known ? Math.max(1, known.tokenCount - 1) : ""; // else as soon as the watch tells of it
    textOf(name, 2048).then(
      ({ text }) => name === chosen && (by("text").textContent = text),
      (error) => name === chosen && (by("text").textContent = String(error)),
    );
    call("CountTokens", { parent: name, plan: {} }).then(
      ({ plan }) => name === chosen && ((by("facts").dataset.plan = planned(plan)), draw()),
      (error) => name === chosen && ((by("facts").dataset.plan = String(error)), draw()),
    );
  }
  draw();
}

async function watch() {
  const request = resume ? { resumeToken: resume } : {};
  const listed = new Set();
  for await (const event of stream("WatchSnapshots", request, (watched = new AbortController()).signal)) {
    if (event.changed) {
      snapshots.set(event.changed.name, event.changed);
      listed.add(event.changed.name);
      if (event.changed.name === chosen && !by("cut").value) by("cut").value = Math.max(1, event.changed.tokenCount - 1);
    } else if (event.gone) {
      snapshots.delete(event.gone.name);
      if (event.gone.name === chosen) choose("");
    } else if (event.synced && !resume) {
      for (const name of [...snapshots.keys()]) if (!listed.has(name)) snapshots.delete(name);
      if (chosen && !snapshots.has(chosen)) choose("");
    }
    resume = event.resumeToken;
    draw();
  }
}

async function look() {
  const [server, models, { stats, rows: now, owner }] = await Promise.all([call("GetServerInfo"), call("ListModels"), call("GetCacheStats")]);
  rows = now;
  const model = models.models.map((m) => `${short(m.name)} ${m.state.replace("STATE_", "").toLowerCase()}`).join(", ");
  by("about").textContent = [`${server.version}`, model, server.instance, `up ${span(server.uptime)}`, owner && `as ${owner}`, server.draining && "DRAINING"].filter(Boolean).join("  ·  ");
  numbers(stats, server.limits, owner);
  drawRows();
  draw();
}

function numbers(stats, limits, owner) {
  const cards = [["rows", `${stats.activeSequences} of ${limits.maxBatch}`, stats.activeSequences, limits.maxBatch], ["waiting", `${stats.queuedCalls} of ${limits.maxQueue}`, stats.queuedCalls, limits.maxQueue]];
  if (!owner) {
    cards.push(
      ["working memory", `${size(stats.activeBytes)} of ${size(stats.activeLimitBytes)}`, stats.activeBytes, stats.activeLimitBytes],
      ["kept in memory", `${size(stats.memoryBytes)} of ${size(stats.memoryLimitBytes)}`, stats.memoryBytes, stats.memoryLimitBytes],
      ["kept on disk", `${size(stats.diskBytes)} of ${size(stats.diskLimitBytes)}`, stats.diskBytes, stats.diskLimitBytes],
      ["restored", `${count(stats.cachedTokens)} of ${count(stats.promptTokens)} tokens`, stats.cachedTokens, stats.promptTokens],
    );
  }
  by("numbers").replaceChildren(
    ...cards.map(([name, text, value, most]) => {
      const card = element("div", name, "faint");
      const meter = element("meter");
      meter.max = Math.max(1, Number(most));
      meter.value = Number(value);
      meter.setAttribute("aria-label", name);
      card.append(element("b", text), meter);
      return card;
    }),
  );
}

function drawRows() {
  by("no-rows").hidden = rows.length > 0;
  by("rows").hidden = rows.length === 0;
  by("rows").tBodies[0].replaceChildren(
    ...rows.map((row) => {
      const line = element("tr");
      const stop = element("td");
      if (row.generation) {
        const button = element("button", "stop");
        button.addEventListener("click", () => call("StopGeneration", { generation: row.generation }).catch((error) => say(String(error), true)));
        stop.append(button);
      }
      line.append(
        element("td", row.generation ? short(row.generation).slice(0, 12) : "snapshot"),
        element("td", row.phase.replace("PHASE_", "").toLowerCase()),
        element("td", row.parent ? short(row.parent) : "–"),
        element("td", `${count(row.doneTokens)}/${count(row.promptTokens)}`, "n"),
        element("td", count(row.completionTokens), "n"),
        element("td", span(row.age), "n"),
        stop,
      );
      return line;
    }),
  );
}

function enter() {
  inside = true;
  by("door").hidden = true;
  by("inside").hidden = false;
  by("forget").hidden = !token.get();
  by("trouble").textContent = "";
}

function ask(error) {
  inside = false;
  watched.abort(); // it may run on for a token that was good when it began
  by("inside").hidden = true;
  by("forget").hidden = true;
  by("about").textContent = "";
  by("trouble").textContent = token.get() ? error.text : "";
  token.forget();
  resume = "";
  snapshots.clear();
  texts.clear();
  rows = [];
  choose("");
  by("door").hidden = false;
  by("token").focus();
}

const pause = (time) => new Promise((resolve) => setTimeout(resolve, time));
const letIn = () => by("door").hidden;

// A token that is not good leads to the door, whatever call found out; other trouble passes or is told.
function trouble(error) {
  if (error.code === "UNAUTHENTICATED") ask(error);
  else if (error.name === "AbortError") return;
  else by("trouble").textContent = error instanceof Refused ? error.toString() : "the server does not answer";
}

async function looking() {
  for (;;) {
    if (letIn() && !document.hidden) {
      await look().then(enter, trouble);
    }
    await pause(LOOK_EVERY);
  }
}

async function watching() {
  for (;;) {
    if (letIn() && inside) {
      await watch().catch((error) => {
        if (error.reason === "RESUME_TOKEN_EXPIRED" || error.reason === "WATCH_OVERFLOW" || error.reason === "INVALID_FIELD") resume = "";
        trouble(error);
      });
    }
    await pause(inside ? AGAIN_AFTER : 100);
  }
}

by("door").addEventListener("submit", (event) => {
  event.preventDefault();
  token.set(by("token").value.trim());
  by("token").value = "";
  by("door").hidden = true;
});
by("forget").addEventListener("click", () => {
  token.forget();
  location.reload();
});
connect({ chosen: () => chosen, choose });
looking();
watching();
