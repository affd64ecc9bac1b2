/** A connection to one server. */
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import {
  createClient,
  type CallOptions as ConnectCallOptions,
  type Client as ServiceClient,
} from "@connectrpc/connect";
import { type ClientOptions, repeated, transportTo } from "./connection.js";
import { KvforkError } from "./errors.js";
import {
  CountTokensRequestSchema,
  type CountTokensResponse,
  CreateSnapshotRequestSchema,
  type GenerateRequestSchema,
  InferenceService,
} from "./gen/kvfork/v1/inference_service_pb.js";
import { type CacheStats, type GetServerInfoResponse, type Model, ServerService } from "./gen/kvfork/v1/server_service_pb.js";
import {
  type ExtendSnapshotsRequestSchema,
  type ExtendSnapshotsResponse,
  ListSnapshotsRequestSchema,
  SnapshotService,
  type WatchSnapshotsRequestSchema,
  type WatchSnapshotsResponse,
} from "./gen/kvfork/v1/snapshot_service_pb.js";
import { SnapshotSchema } from "./gen/kvfork/v1/types_pb.js";
import { Generation } from "./generation.js";
import { continues, own } from "./input.js";
import { Snapshot } from "./snapshot.js";

/** Of one call: a signal that cancels it, and a deadline. */
export interface CallOptions {
  readonly signal?: AbortSignal;
  readonly timeoutMs?: number;
}

/** A connection to one server, at "host:port" or "unix:/path". It is made when it is first needed. */
export class Client implements AsyncDisposable {
  /** The generated clients on the same connection, for what is not wrapped. Their errors: `KvforkError.from`. */
  readonly inference: ServiceClient<typeof InferenceService>;
  readonly snapshots: ServiceClient<typeof SnapshotService>;
  readonly server: ServiceClient<typeof ServerService>;
  readonly retry: boolean;
  readonly timeoutMs: number | undefined;
  readonly #closed = new AbortController();

  constructor(address: string, options: ClientOptions = {}) {
    const closed = this.#closed.signal;
    const transport = transportTo(address, {
      ...options,
      interceptors: [
        ...(options.interceptors ?? []),
        (next) => (request) =>
          next({ ...request, signal: AbortSignal.any([closed, request.signal]) } as typeof request),
      ],
    });
    this.inference = createClient(InferenceService, transport);
    this.snapshots = createClient(SnapshotService, transport);
    this.server = createClient(ServerService, transport);
    this.retry = options.retry ?? true;
    this.timeoutMs = options.timeoutMs;
  }

  /** Cancels what runs. Snapshots stay on the server. */
  close(): void {
    this.#closed.abort();
  }

  async [Symbol.asyncDispose](): Promise<void> {
    this.close();
  }

  /**
   * Starts a generation. Errors come out of the returned object, the first time it is read. A deadline loses the end
   * of the stream, `stopping.timeLimit` does not.
   */
  generate(request: MessageInitShape<typeof GenerateRequestSchema>, options: CallOptions = {}): Generation {
    return new Generation(this, request, options);
  }

  /** Prefills an input and names the result; `marks` has the snapshots of its marks. */
  async createSnapshot(
    request: MessageInitShape<typeof CreateSnapshotRequestSchema>,
    options: CallOptions = {},
  ): Promise<Snapshot> {
    const message = own(CreateSnapshotRequestSchema, request);
    message.requestId ||= crypto.randomUUID();
    continues(message.input, message.parent);
    const reply = await this.call(options, (call) => this.inference.createSnapshot(message, call));
    const marks = new Map(reply.marked.map((info, index) => [index, new Snapshot(this, info)]));
    return new Snapshot(this, reply.snapshot!, reply.usage, { marks });
  }

  /** A handle for a name known from elsewhere. Asks the server nothing: `info` has the name alone. */
  snapshot(name: string): Snapshot {
    return new Snapshot(this, create(SnapshotSchema, { name }));
  }

  /** Looks a snapshot up. */
  getSnapshot(name: string, options: CallOptions = {}): Promise<Snapshot> {
    return this.snapshot(name).refresh(options);
  }

  /** The caller's snapshots, oldest first, page after page as they are needed. */
  async *listSnapshots(
    request: MessageInitShape<typeof ListSnapshotsRequestSchema> = {},
    options: CallOptions = {},
  ): AsyncGenerator<Snapshot, void, undefined> {
    const message = own(ListSnapshotsRequestSchema, request);
    do {
      const page = await this.call(options, (call) => this.snapshots.listSnapshots(message, call));
      yield* page.snapshots.map((info) => new Snapshot(this, info));
      message.pageToken = page.nextPageToken;
    } while (message.pageToken);
  }

  /** Gives up to 1000 snapshots more time. Missing names are told in the reply, and no error. */
  extendSnapshots(
    request: MessageInitShape<typeof ExtendSnapshotsRequestSchema>,
    options: CallOptions = {},
  ): Promise<ExtendSnapshotsResponse> {
    return this.call(options, (call) => this.snapshots.extendSnapshots(request, call));
  }

  /** Follows changes: first what there is, then Synced, then what happens. Leaving the loop ends it. */
  async *watchSnapshots(
    request: MessageInitShape<typeof WatchSnapshotsRequestSchema> = {},
    options: CallOptions = {},
  ): AsyncGenerator<WatchSnapshotsResponse, void, undefined> {
    try {
      yield* this.snapshots.watchSnapshots(request, { signal: options.signal, timeoutMs: options.timeoutMs });
    } catch (thrown) {
      throw KvforkError.from(thrown);
    }
  }

  /** Ends a generation by its name, cleanly. False if it had ended already. */
  async stop(generation: string, options: CallOptions = {}): Promise<boolean> {
    return (await this.call(options, (call) => this.inference.stopGeneration({ generation }, call))).wasRunning;
  }

  /** Renders and tokenizes without running the model. */
  countTokens(
    request: MessageInitShape<typeof CountTokensRequestSchema>,
    options: CallOptions = {},
  ): Promise<CountTokensResponse> {
    const message = own(CountTokensRequestSchema, request);
    continues(message.input, message.parent);
    return this.call(options, (call) => this.inference.countTokens(message, call));
  }

  /** Versions, limits and features. */
  serverInfo(options: CallOptions = {}): Promise<GetServerInfoResponse> {
    return this.call(options, (call) => this.server.getServerInfo({}, call));
  }

  /** One model; an empty name means the only one. */
  async model(name = "", options: CallOptions = {}): Promise<Model> {
    return (await this.call(options, (call) => this.server.getModel({ name }, call))).model!;
  }

  /** Scheduler, memory and store in numbers. */
  async cacheStats(options: CallOptions = {}): Promise<CacheStats> {
    return (await this.call(options, (call) => this.server.getCacheStats({}, call))).stats!;
  }

  /** Makes a unary call with this client's deadline and retries. Throws KvforkError. */
  call<T>(options: CallOptions, make: (call: ConnectCallOptions) => Promise<T>): Promise<T> {
    const call = { signal: options.signal, timeoutMs: options.timeoutMs ?? this.timeoutMs };
    return repeated(this.retry, () => make(call), options.signal);
  }
}
