/** A handle: a name for a state that never changes. */
import type { MessageInitShape } from "@bufbuild/protobuf";
import type { CallOptions, Client } from "./client.js";
import { KvforkError } from "./errors.js";
import {
  type ForkBranchSchema,
  ForkRequestSchema,
  type GenerateRequestSchema,
  type RollbackRequest,
  RollbackRequestSchema,
} from "./gen/kvfork/v1/inference_service_pb.js";
import { type Snapshot as Info, SnapshotSchema, type Usage } from "./gen/kvfork/v1/types_pb.js";
import { Generation } from "./generation.js";
import { continues, own } from "./input.js";

/** Where a rollback cuts: exactly one. */
export type RollbackTarget = { tokenCount: number } | { dropTokens: number } | { ancestor: string | Snapshot };

/** The children of a fork, and the one receipt for all of them. */
export type Forked = Snapshot[] & { usage: Usage | undefined };

export class Snapshot {
  readonly #client: Client;
  /** What the server last said of it. */
  info: Info;
  /** The receipt of the call that made it; undefined if it was looked up. */
  readonly usage: Usage | undefined;
  /** Of createSnapshot, by the index of their mark. */
  readonly marks: ReadonlyMap<number, Snapshot>;
  /** What its rollback let go of. */
  readonly released: readonly string[];
  /** The error by which the server told that it is no more. */
  gone: KvforkError | undefined;

  constructor(
    client: Client,
    info: Info,
    usage?: Usage,
    made: { marks?: ReadonlyMap<number, Snapshot>; released?: readonly string[] } = {},
  ) {
    this.#client = client;
    this.info = info;
    this.usage = usage;
    this.marks = made.marks ?? new Map();
    this.released = made.released ?? [];
  }

  get name(): string {
    return this.info.name;
  }

  get tokenCount(): number {
    return this.info.tokenCount;
  }

  /** Goes on from here. */
  generate(request: MessageInitShape<typeof GenerateRequestSchema> = {}, options: CallOptions = {}): Generation {
    return new Generation(this.#client, request, options, this);
  }

  /** So many copies, or one child per branch with what it appends. Nothing is copied; all or none. */
  async fork(
    branches: number | readonly MessageInitShape<typeof ForkBranchSchema>[],
    options: CallOptions = {},
  ): Promise<Forked> {
    const asked: readonly MessageInitShape<typeof ForkBranchSchema>[] =
      typeof branches === "number" ? Array.from({ length: branches }, () => ({})) : branches;
    const request = own(ForkRequestSchema, {
      parent: this.name,
      branches: [...asked],
      requestId: crypto.randomUUID(),
    });
    for (const branch of request.branches) {
      continues(branch.append, this.name);
    }
    const reply = await this.#noting(this.#client.call(options, (call) => this.#client.inference.fork(request, call)));
    const children = reply.snapshots.map((info) => new Snapshot(this.#client, info, reply.usage));
    return Object.assign(children, { usage: reply.usage });
  }

  /** A snapshot of a shorter prefix. This one stays, unless it is released. */
  async rollback(
    target: RollbackTarget,
    more: MessageInitShape<typeof RollbackRequestSchema> = {},
    options: CallOptions = {},
  ): Promise<Snapshot> {
    const request = own(RollbackRequestSchema, more);
    request.source = this.name;
    request.target = asOneof(target);
    request.requestId ||= crypto.randomUUID();
    const reply = await this.#noting(
      this.#client.call(options, (call) => this.#client.inference.rollback(request, call)),
    );
    return new Snapshot(this.#client, reply.snapshot!, reply.usage, { released: reply.released });
  }

  /** Reads `info` again. Does not count as use. */
  async refresh(options: CallOptions = {}): Promise<this> {
    const reply = await this.#noting(
      this.#client.call(options, (call) => this.#client.snapshots.getSnapshot({ name: this.name }, call)),
    );
    this.info = reply.snapshot!;
    return this;
  }

  /** The prefix as token ids. */
  async tokens(options: CallOptions = {}): Promise<number[]> {
    const request = { name: this.name, includeTokens: true };
    const reply = await this.#noting(
      this.#client.call(options, (call) => this.#client.snapshots.getSnapshot(request, call)),
    );
    return reply.tokenIds;
  }

  /** Changes labels, expiration or pinned: those that are set. */
  async update(change: MessageInitShape<typeof SnapshotSchema>, options: CallOptions = {}): Promise<this> {
    const snapshot = own(SnapshotSchema, change);
    snapshot.name = this.name;
    const request = { snapshot };
    const reply = await this.#noting(
      this.#client.call(options, (call) => this.#client.snapshots.updateSnapshot(request, call)),
    );
    this.info = reply.snapshot!;
    return this;
  }

  /** Drops the name; state shared with others stays. No error if it is gone already. */
  async delete(options: CallOptions = {}): Promise<void> {
    const request = { name: this.name, allowMissing: true, stopActive: true };
    await this.#client.call(options, (call) => this.#client.snapshots.deleteSnapshot(request, call));
  }

  /** Remembers that the snapshot is gone if this error says so. */
  noted(error: KvforkError): KvforkError {
    if (error.snapshotIsGone && (error.resource === "" || error.resource === this.name)) {
      this.gone = error;
    }
    return error;
  }

  async #noting<T>(call: Promise<T>): Promise<T> {
    try {
      return await call;
    } catch (thrown) {
      throw this.noted(KvforkError.from(thrown));
    }
  }
}

function asOneof(target: RollbackTarget): RollbackRequest["target"] {
  if ("tokenCount" in target) {
    return { case: "tokenCount", value: target.tokenCount };
  }
  if ("dropTokens" in target) {
    return { case: "dropTokens", value: target.dropTokens };
  }
  const { ancestor } = target;
  return { case: "ancestor", value: typeof ancestor === "string" ? ancestor : ancestor.name };
}
