/** A running generation: what comes, added up. */
import type { MessageInitShape } from "@bufbuild/protobuf";
import type { CallOptions, Client } from "./client.js";
import { repeated } from "./connection.js";
import { KvforkError } from "./errors.js";
import {
  Channel,
  type Delta,
  type Finished,
  type GenerateRequest,
  GenerateRequestSchema,
  type GenerateResponse,
  type Started,
} from "./gen/kvfork/v1/inference_service_pb.js";
import type { Usage } from "./gen/kvfork/v1/types_pb.js";
import { continues, own } from "./input.js";
import { Snapshot } from "./snapshot.js";

/** A whole generation. `text` is the answer; what a model reasons or calls is told apart where it can be. */
export interface Result {
  readonly text: string;
  readonly reasoning: string;
  readonly toolCalls: string;
  readonly finished: Finished;
  /** The receipt: promptTokens = cachedTokens + recomputedTokens + newTokens. */
  readonly usage: Usage | undefined;
  /** The final state, if it was asked for and could be kept. */
  readonly snapshot: Snapshot | undefined;
  readonly marks: ReadonlyMap<number, Snapshot>;
}

/** The server would generate for nobody if its reader were simply forgotten. */
const forgotten = new FinalizationRegistry<AbortController>((abort) => abort.abort());

/**
 * A running generation. Iterate it for deltas, `events()` for everything, or await `result()`.
 *
 * Leaving a loop cancels, as do `cancel()`, the caller's signal, and at the latest garbage collection. To end it early
 * but keep its receipt and snapshot, call `stop()` and read on.
 */
export class Generation implements AsyncIterable<Delta>, AsyncDisposable {
  /** What the server said first; undefined before it was read. */
  started: Started | undefined;
  finished: Finished | undefined;
  snapshot: Snapshot | undefined;
  /** Snapshots made so far, by the index of their mark. */
  readonly marks = new Map<number, Snapshot>();

  readonly #client: Client;
  readonly #source: Snapshot | undefined;
  readonly #abort = new AbortController();
  readonly #text = new Map<Channel, string>();
  readonly #stream: Promise<Opened>;
  #error: KvforkError | undefined;
  #cancelled = false;

  constructor(
    client: Client,
    request: MessageInitShape<typeof GenerateRequestSchema>,
    options: CallOptions,
    source?: Snapshot,
  ) {
    this.#client = client;
    this.#source = source;
    const message = own(GenerateRequestSchema, request);
    message.parent = source?.name ?? message.parent;
    continues(message.input, message.parent);
    this.#stream = open(client, message, this.#abort, options);
    this.#stream.catch(() => undefined); // told to whoever reads
    forgotten.register(this, this.#abort, this);
  }

  /** The next event; undefined after Finished. Throws the error that ended the stream, however often it is asked. */
  async next(): Promise<GenerateResponse | undefined> {
    if (this.#error) {
      throw this.#error;
    }
    if (this.finished) {
      return undefined;
    }
    let event: GenerateResponse | undefined;
    try {
      const opened = await this.#stream;
      event = opened.first ?? (await opened.rest.next()).value;
      opened.first = undefined;
    } catch (thrown) {
      throw this.#fail(KvforkError.from(thrown));
    }
    if (event === undefined) {
      const text = "the stream ended without Finished";
      throw this.#fail(new KvforkError({ code: "INTERNAL", reason: "TRUNCATED", text }));
    }
    await this.#add(event);
    return event;
  }

  /** Everything that the server says. Leaving the loop cancels. */
  async *events(): AsyncGenerator<GenerateResponse, void, undefined> {
    try {
      for (let event = await this.next(); event !== undefined; event = await this.next()) {
        yield event;
      }
    } finally {
      this.cancel();
    }
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<Delta, void, undefined> {
    for await (const { event } of this.events()) {
      if (event.case === "delta") {
        yield event.value;
      }
    }
  }

  /** Reads to the end. */
  async result(): Promise<Result> {
    while ((await this.next()) !== undefined);
    return {
      text: this.#said(Channel.UNSPECIFIED),
      reasoning: this.#said(Channel.REASONING),
      toolCalls: this.#said(Channel.TOOL_CALL),
      finished: this.finished!,
      usage: this.finished!.usage,
      snapshot: this.snapshot,
      marks: this.marks,
    };
  }

  /**
   * Asks the server to end cleanly: read on, and the last event still comes, with receipt and snapshot. False if it had
   * ended. It can be used once `started` was read.
   */
  async stop(): Promise<boolean> {
    if (!this.started) {
      throw new Error("the generation has no name before its first event was read");
    }
    return this.#client.stop(this.started.generation);
  }

  /** Gives up at once: nobody computes for nobody. Nothing more will come. After the end it does nothing. */
  cancel(): void {
    if (!this.finished && !this.#error) {
      this.#cancelled = true;
      this.#error = new KvforkError({ code: "CANCELLED", text: "cancelled by the caller" });
    }
    this.#end();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.cancel();
  }

  async #add({ event }: GenerateResponse): Promise<void> {
    switch (event.case) {
      case "started":
        this.started = event.value;
        break;
      case "marked":
        if (event.value.snapshot) {
          this.marks.set(event.value.mark, new Snapshot(this.#client, event.value.snapshot));
        }
        break;
      case "delta":
        this.#text.set(event.value.channel, this.#said(event.value.channel) + event.value.text);
        break;
      case "finished":
        this.finished = event.value;
        if (event.value.snapshot) {
          this.snapshot = new Snapshot(this.#client, event.value.snapshot, event.value.usage);
        }
        // Takes the status, so that the server does not see a cancellation; the last event was whole.
        await this.#stream.then((opened) => opened.rest.next()).catch(() => undefined);
        this.#end();
    }
  }

  #said(channel: Channel): string {
    return this.#text.get(channel) ?? "";
  }

  #fail(error: KvforkError): KvforkError {
    this.#error ??= error;
    if (!this.#cancelled) {
      this.#source?.noted(this.#error);
    }
    this.#end();
    return this.#error;
  }

  #end(): void {
    forgotten.unregister(this);
    this.#abort.abort();
  }
}

interface Opened {
  first: GenerateResponse | undefined;
  readonly rest: AsyncIterator<GenerateResponse>;
}

/** Reads the first event, so that a call which never began can be made again. Holds no reference to the generation. */
function open(
  client: Client,
  request: GenerateRequest,
  abort: AbortController,
  options: CallOptions,
): Promise<Opened> {
  const signal = options.signal ? AbortSignal.any([abort.signal, options.signal]) : abort.signal;
  const timeoutMs = options.timeoutMs ?? client.timeoutMs;
  return repeated(
    client.retry,
    async () => {
      const rest = client.inference.generate(request, { signal, timeoutMs })[Symbol.asyncIterator]();
      return { first: (await rest.next()).value as GenerateResponse | undefined, rest };
    },
    signal,
  );
}
