// The tree of snapshots. Owns which lines there are and in what order; a line is changed in place, so that focus and
// selection stay while numbers move.

import { count, element, short, size, span } from "./words.js";

const MOST_LINES = 500;
const TIERS = { RESIDENCY_MEMORY: ["memory", "memory"], RESIDENCY_DISK: ["disk", "disk"], RESIDENCY_TOKENS: ["tokens only", "tokens"] };

// Depth first, oldest first; what has lost its parent is a root. [{snapshot, depth}].
export function ordered(snapshots) {
  const below = new Map();
  for (const snapshot of snapshots.values()) {
    const parent = snapshots.has(snapshot.parent) ? snapshot.parent : "";
    if (!below.has(parent)) below.set(parent, []);
    below.get(parent).push(snapshot);
  }
  for (const list of below.values()) list.sort((a, b) => (a.createTime < b.createTime ? -1 : a.createTime > b.createTime ? 1 : 0));
  const found = [];
  const stack = (below.get("") ?? []).map((snapshot) => ({ snapshot, depth: 0 })).reverse();
  while (stack.length) {
    const here = stack.pop();
    found.push(here);
    for (const snapshot of (below.get(here.snapshot.name) ?? []).toReversed()) stack.push({ snapshot, depth: here.depth + 1 });
  }
  return found;
}

export class Tree {
  constructor(table, more, choose, textOf) {
    this.body = table.tBodies[0];
    this.more = more;
    this.choose = choose; // (name)
    this.textOf = textOf; // async (name) -> text of a line
    this.lines = new Map();
    this.seen = new IntersectionObserver((entries) => {
      for (const { target, isIntersecting } of entries) {
        if (!isIntersecting) continue;
        this.seen.unobserve(target);
        this.textOf(target.dataset.name).then((text) => (target.querySelector(".own").textContent = text), () => {});
      }
    });
  }

  draw(snapshots, chosen, held) {
    const all = ordered(snapshots);
    const shown = all.slice(0, MOST_LINES);
    const wanted = new Set(shown.map(({ snapshot }) => snapshot.name));
    for (const [name, line] of this.lines) {
      if (wanted.has(name)) continue;
      line.remove();
      this.lines.delete(name);
    }
    let before = null;
    for (const { snapshot, depth } of shown) {
      const line = this.lines.get(snapshot.name) ?? this.line(snapshot);
      this.fill(line, snapshot, depth, held.get(snapshot.name) ?? []);
      line.setAttribute("aria-selected", String(snapshot.name === chosen));
      const place = before ? before.nextSibling : this.body.firstChild;
      if (place !== line) this.body.insertBefore(line, place);
      before = line;
    }
    this.more.hidden = all.length <= shown.length;
    this.more.textContent = `and ${count(all.length - shown.length)} more`;
  }

  line(snapshot) {
    const line = element("tr");
    line.dataset.name = snapshot.name;
    const name = element("td");
    const button = element("button", short(snapshot.name));
    button.addEventListener("click", () => this.choose(snapshot.name));
    name.append(button, element("span", "", "chips"), element("span", "", "own"));
    line.append(name, ...["n", "", "n", "n", "n", ""].map((kind) => element("td", "", kind)));
    this.lines.set(snapshot.name, line);
    this.seen.observe(line);
    return line;
  }

  fill(line, snapshot, depth, held) {
    const [name, tokens, state, bytes, age, expires, holders] = line.cells;
    name.style.setProperty("--depth", depth);
    const chips = [
      ...(snapshot.pinned ? ["pinned"] : []),
      ...(snapshot.durable ? ["durable"] : []),
      ...Object.entries(snapshot.labels).sort().map(([key, value]) => `${key}=${value}`),
    ];
    const place = name.querySelector(".chips");
    if (place.dataset.now !== chips.join("\n")) {
      place.replaceChildren(...chips.map((text) => element("span", text, "chip")));
      place.dataset.now = chips.join("\n");
    }
    const [word, kind] = TIERS[snapshot.residency] ?? ["", ""];
    write(tokens, count(snapshot.tokenCount));
    write(state, word);
    state.className = kind;
    write(bytes, size(snapshot.exclusiveBytes));
    const now = Date.now();
    write(age, span((now - Date.parse(snapshot.createTime)) / 1000));
    write(expires, snapshot.pinned ? "never" : snapshot.expireTime ? span(Math.max(0, Date.parse(snapshot.expireTime) - now) / 1000) : "");
    write(holders, held.join(", "));
  }
}

function write(cell, text) {
  if (cell.textContent !== text) cell.textContent = text;
}
