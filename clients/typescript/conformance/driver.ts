/**
 * Plays the scenarios of clients/conformance with the TypeScript client: node driver.js ADDRESS. A scenario comes as one
 * JSON line on stdin, what was seen goes as one JSON line to stdout.
 */
import { createHash } from "node:crypto";
import { readFile } from "node:fs/promises";
import { createInterface } from "node:readline";
import { setTimeout as sleep } from "node:timers/promises";
import { create } from "@bufbuild/protobuf";
import {
  afterTokens,
  Client,
  type Generation,
  greedy,
  KvforkError,
  image,
  promptEnd,
  raw,
  type Snapshot,
  text,
} from "../src/index.js";
import { type Delta, type Finished, FinishReason, PartSchema, Release, Rounding, type Usage } from "../src/v1.js";

interface Given {
  address: string;
  peer: string;
  words_before: string;
  png_base64: string;
  question: string;
  ca: string;
  socket: string;
  token: string;
  unknown_token: string;
  prompt: string;
  times: number;
  max_tokens: number;
  appends: string[];
  mark_at: number;
  cut_at: number;
  missing: string;
  model: string;
  too_many_words: number;
  ttl_seconds: number;
  wait_seconds: number;
  after_deltas: number;
  timeout_seconds: number;
  pause_seconds: number;
  snapshot_id: string;
  word: string;
  words: number;
}

type Seen = Record<string, unknown>;

/** Exactly this many tokens, whatever the model says. */
const length = (maxTokens: number) => ({ maxTokens, ignoreEos: true });

const ask = (given: Given, prompt = given.prompt) => ({
  input: text(prompt),
  sampling: greedy(),
  stopping: length(given.max_tokens),
});

const on = (given: Given) => ({ sampling: greedy(), stopping: length(given.max_tokens) });

const addsUp = (usage: Usage | undefined) =>
  usage !== undefined && usage.cachedTokens + usage.recomputedTokens + usage.newTokens === usage.promptTokens;

const same = (a: readonly unknown[], b: readonly unknown[]) => a.length === b.length && a.every((x, i) => x === b[i]);

const reason = (finished: Finished) => FinishReason[finished.reason];

function join(deltas: readonly Delta[], start: number): boolean {
  return deltas.every((delta) => {
    const joins = delta.firstPosition === start;
    start += delta.tokenCount;
    return joins;
  });
}

async function failure(call: Promise<unknown>): Promise<KvforkError> {
  try {
    await call;
  } catch (error) {
    if (error instanceof KvforkError) {
      return error;
    }
    throw error;
  }
  throw new Error("the call was to fail");
}

const told = (error: KvforkError) => ({ code: error.code, reason: error.reason });

async function all<T>(items: AsyncIterable<T>, into: T[] = []): Promise<T[]> {
  for await (const item of items) {
    into.push(item);
  }
  return into;
}

/** Reads so many, and leaves the generation running. */
async function firstDeltas(generation: Generation, count: number): Promise<Delta[]> {
  const deltas: Delta[] = [];
  while (deltas.length < count) {
    const event = (await generation.next())?.event;
    if (event === undefined) {
      throw new Error("it ended too early");
    }
    if (event.case === "delta") {
      deltas.push(event.value);
    }
  }
  return deltas;
}

const plays: Record<string, (client: Client, given: Given) => Promise<Seen>> = {
  async stream(client, given) {
    const generation = client.generate(ask(given));
    const events = await all(generation.events());
    const result = await generation.result();
    const kinds = events.map((one) => one.event.case);
    const deltas = events.flatMap((one) => (one.event.case === "delta" ? [one.event.value] : []));
    return {
      events: kinds.filter((kind, index) => kind !== kinds[index - 1]),
      reason: reason(result.finished),
      completion_tokens: result.usage?.completionTokens,
      text: result.text,
      text_is_sum_of_deltas: deltas.map((delta) => delta.text).join("") === result.text,
      positions_join: join(deltas, generation.started!.promptTokens),
      receipt_adds_up: addsUp(result.usage),
    };
  },

  async marks(client, given) {
    const marks = [promptEnd(), afterTokens(given.mark_at)];
    const generation = client.generate({ ...ask(given), marks, save: {} });
    const result = await generation.result();
    const again = await result.marks.get(0)!.generate(on(given)).result();
    const prompt = generation.started!.promptTokens;
    return {
      marks: result.marks.size,
      first_is_prompt_end: result.marks.get(0)!.tokenCount === prompt,
      second_tokens: result.marks.get(1)!.tokenCount,
      saved_is_prompt_and_answer: result.snapshot!.tokenCount === prompt + result.usage!.completionTokens,
      same_text_from_prompt_end: again.text === result.text,
      recomputed_tokens: again.usage!.recomputedTokens,
    };
  },

  async fork(client, given) {
    const source = await client.createSnapshot({ input: text(given.prompt) });
    const children = await source.fork(given.appends.map((append) => ({ append: text(append) })));
    const results = await Promise.all(children.map((child) => child.generate(on(given)).result()));
    const copies = await source.fork(2);
    const own = await source.tokens();
    const copied = await Promise.all(copies.map((copy) => copy.tokens()));
    return {
      children: children.length,
      distinct_names: new Set(children.map((child) => child.name)).size,
      parents_are_the_source: children.every((child) => child.info.parent === source.name),
      finished: results.length,
      completion_tokens: results.reduce((sum, result) => sum + result.usage!.completionTokens, 0),
      receipts_add_up: addsUp(children.usage) && results.every((result) => addsUp(result.usage)),
      plain_copies: copies.length,
      copies_have_its_tokens: copied.every((tokens) => same(tokens, own)),
    };
  },

  async "rollback-exact"(client, given) {
    const prompt = given.prompt.repeat(given.times);
    const result = await client.generate({ ...ask(given, prompt), marks: [promptEnd()], save: {} }).result();
    const end = result.snapshot!;
    const mark = result.marks.get(0)!;
    const cut = await end.rollback({ tokenCount: mark.tokenCount });
    const again = await cut.generate(on(given)).result();
    const dropped = await end.rollback({ dropTokens: 3 });
    const ancestor = await end.rollback({ ancestor: mark });
    const beyond = await failure(end.rollback({ tokenCount: end.tokenCount + 1 }));
    const last = await dropped.rollback({ dropTokens: 1 }, { release: Release.SOURCE });
    return {
      cut_at_prompt: cut.tokenCount === mark.tokenCount,
      same_text_again: again.text === result.text,
      dropped_three: dropped.tokenCount === end.tokenCount - 3,
      to_ancestor: ancestor.tokenCount === mark.tokenCount,
      released_source: same(last.released, [dropped.name]),
      beyond_end: { ...told(beyond), told_token_count: beyond.metadata["tokenCount"] === `${end.tokenCount}` },
    };
  },

  async "rollback-down"(client, given) {
    const source = await client.createSnapshot({ input: text(given.prompt.repeat(given.times)) });
    const back = await source.rollback({ tokenCount: given.cut_at }, { rounding: Rounding.DOWN });
    return {
      token_count: back.tokenCount,
      recomputed_tokens: back.usage!.recomputedTokens,
      new_tokens: back.usage!.newTokens,
    };
  },

  async errors(client, given) {
    const wrong = { input: text("Hi"), sampling: { temperature: -1, topP: 2 } };
    const fields = await failure(client.generate(wrong).result());
    const snapshot = await failure(client.getSnapshot(given.missing));
    const model = await failure(client.model(given.model));
    const long = await failure(client.generate({ input: text("word ".repeat(given.too_many_words)) }).result());
    const named = (error: KvforkError) => ({
      ...told(error),
      resource: error.resource,
      snapshot_is_gone: error.snapshotIsGone,
    });
    return {
      fields: { ...told(fields), fields: fields.fields.map((field) => field.path).sort() },
      snapshot: named(snapshot),
      model: named(model),
      too_long: { ...told(long), metadata: Object.keys(long.metadata).sort() },
    };
  },

  async expired(client, given) {
    const options = { ttl: { seconds: BigInt(given.ttl_seconds) } };
    const snapshot = await client.createSnapshot({ input: text(given.prompt), options });
    await sleep(given.wait_seconds * 1000);
    const seen: unknown[] = [];
    const error = await failure(all(snapshot.generate({ stopping: length(4) }).events(), seen as never[]));
    return {
      ...told(error),
      told_expire_time: "expireTime" in error.metadata,
      events_before: seen.length,
      handle_knows: snapshot.gone === error,
    };
  },

  async stop(client, given) {
    const generation = client.generate({ ...ask(given), save: {} });
    await firstDeltas(generation, given.after_deltas);
    const wasRunning = await generation.stop();
    const result = await generation.result();
    const { promptTokens, generation: name } = generation.started!;
    return {
      was_running: wasRunning,
      reason: reason(result.finished),
      snapshot_holds_all: result.snapshot!.tokenCount === promptTokens + result.usage!.completionTokens,
      receipt_adds_up: addsUp(result.usage),
      was_running_later: await client.stop(name),
    };
  },

  async "cancel-prefill"(client, given) {
    const request = { ...ask(given, given.prompt.repeat(given.times)), output: { progress: true } };
    const generation = client.generate(request);
    let deltas = 0;
    for await (const { event } of generation.events()) {
      if (event.case === "progress" && event.value.doneTokens < event.value.totalTokens) {
        break; // leaving the loop cancels
      }
      deltas += event.case === "delta" ? 1 : 0;
    }
    return { code: (await failure(generation.result())).code, deltas };
  },

  async "cancel-decode"(client, given) {
    const abort = new AbortController();
    const generation = client.generate(ask(given), { signal: abort.signal });
    const deltas = await firstDeltas(generation, given.after_deltas);
    abort.abort(); // as good as generation.cancel()
    return { code: (await failure(generation.result())).code, deltas: deltas.length };
  },

  async deadline(client, given) {
    const deltas: Delta[] = [];
    const generation = client.generate(ask(given), { timeoutMs: given.timeout_seconds * 1000 });
    const error = await failure(all(generation, deltas));
    return { code: error.code, some_deltas: deltas.length > 0 };
  },

  async "save-on-cancel"(client, given) {
    const save = { snapshotId: given.snapshot_id };
    const generation = client.generate({ ...ask(given), save, saveOnCancel: true });
    await firstDeltas(generation, given.after_deltas);
    generation.cancel();
    const ended = await failure(generation.result());
    let kept: Snapshot | undefined;
    while (kept === undefined) {
      // It is there a moment after the call has ended.
      kept = await client.getSnapshot(`snapshots/${given.snapshot_id}`).catch((error: unknown) => {
        if (error instanceof KvforkError && error.snapshotIsGone) {
          return undefined;
        }
        throw error;
      });
      await sleep(50);
    }
    const more = await kept.generate({ stopping: length(2) }).result();
    return {
      code: ended.code,
      longer_than_prompt: kept.tokenCount > generation.started!.promptTokens,
      goes_on: more.usage!.completionTokens === 2,
    };
  },

  async abandoned(client, given) {
    await (async () => void (await firstDeltas(client.generate(ask(given)), 1)))();
    for (let turn = 0; turn < 5; turn++) {
      await sleep(20); // finalizers run between turns of the event loop
      global.gc?.();
    }
    return { dropped: true };
  },

  async "slow-reader"(client, given) {
    const generation = client.generate(ask(given));
    const deltas = await firstDeltas(generation, 1);
    await sleep(given.pause_seconds * 1000);
    await all(generation, deltas);
    const result = await generation.result();
    return {
      text: result.text,
      tokens_in_deltas: deltas.reduce((sum, delta) => sum + delta.tokenCount, 0),
      completion_tokens: result.usage!.completionTokens,
      positions_join: join(deltas, generation.started!.promptTokens),
    };
  },

  async "big-message"(client, given) {
    const long = given.word.repeat(given.words);
    const counted = await client.countTokens({ input: text(long), includeRendered: true });
    const over = await failure(client.countTokens({ input: text(given.word.repeat(given.too_many_words)) }));
    return {
      text_came_back: counted.text.endsWith(long),
      reply_over_4_mib: counted.text.length > 4 * 2 ** 20,
      over_limit: told(over),
    };
  },

  async image(_, given) {
    await using client = new Client(given.peer);
    const file = new Uint8Array(Buffer.from(given.png_base64, "base64"));
    const kept = await client.createSnapshot({ input: raw(given.words_before, image(file)) });
    const sha256 = new Uint8Array(createHash("sha256").update(file).digest());
    const known = create(PartSchema, {
      kind: { case: "image", value: { source: { case: "sha256", value: sha256 } } },
    });
    const again = await client.countTokens({ input: raw(given.words_before, known) });
    const result = await kept.generate(ask(given, given.question)).result();
    const nothing = new TextEncoder().encode("no picture");
    const no = await failure(client.createSnapshot({ input: raw(image(nothing)) }));
    return {
      spans: kept.info.imageSpans.length,
      image_tokens_counted: kept.usage!.imageTokens > 0,
      known_by_digest: again.totalTokens === kept.tokenCount,
      recomputed_tokens: result.usage!.recomputedTokens,
      completion_tokens: result.usage!.completionTokens,
      no_picture: told(no),
    };
  },

  async retry(_, given) {
    await using client = new Client(given.peer);
    const request = { input: text(given.prompt) };
    const before = await client.generate(request).result();
    const seen: unknown[] = [];
    const after = await failure(all(client.generate(request).events(), seen as never[]));
    const no = await failure(client.generate(request).result());
    const made = await client.snapshot("snapshots/source").fork(2);
    return {
      before_started: before.text,
      after_started: { code: after.code, events: seen.length },
      told_not_to: told(no),
      fork: made.length,
    };
  },

  async socket(client, given) {
    await using other = new Client(given.socket, { token: given.token });
    return { same_instance: (await other.serverInfo()).instance === (await client.serverInfo()).instance };
  },

  async secured(_, given) {
    const tls = { ca: await readFile(given.ca) };
    await using known = new Client(given.peer, { tls, token: given.token });
    const { instance } = await known.serverInfo();
    await using stranger = new Client(given.peer, { tls });
    const without = await failure(stranger.serverInfo());
    await using nobody = new Client(given.peer, { tls, token: given.unknown_token });
    const unknown = await failure(nobody.serverInfo());
    await using wary = new Client(given.peer, { tls: true, retry: false });
    const other = await failure(wary.serverInfo());
    let refused = false;
    try {
      new Client("example.org:443", { token: given.token });
    } catch {
      refused = true;
    }
    return {
      with_token: instance !== "",
      without_token: told(without),
      unknown_token: told(unknown),
      other_roots: other.code,
      token_in_clear_refused: refused,
    };
  },

  async drain(client, given) {
    const generation = client.generate({ ...ask(given), save: {} });
    await firstDeltas(generation, 1);
    await using impatient = new Client(given.address, { retry: false });
    while (!(await impatient.serverInfo()).draining) {
      await sleep(20);
    }
    const refused = await failure(impatient.generate({ input: text(given.prompt) }).result());
    const result = await generation.result();
    return {
      new_call: told(refused),
      running_ended: reason(result.finished),
      snapshot_made: result.snapshot !== undefined,
    };
  },
};

const client = new Client(process.argv[2]!, { timeoutMs: 600_000 });
for await (const line of createInterface({ input: process.stdin })) {
  const { scenario, given } = JSON.parse(line) as { scenario: string; given: Given };
  const play = plays[scenario];
  let seen: Seen;
  if (play === undefined) {
    seen = { error: "this driver does not know the scenario" };
  } else {
    try {
      seen = { observed: await play(client, given) };
    } catch (error) {
      seen = { error: error instanceof Error ? error.stack : String(error) };
    }
  }
  console.log(JSON.stringify({ scenario, ...seen }));
}
client.close();
