/** What can go wrong with a call: one class, with the reason and details that the server tells. */
import { Code, ConnectError } from "@connectrpc/connect";
import {
  BadRequestSchema,
  ErrorInfoSchema,
  RequestInfoSchema,
  ResourceInfoSchema,
  RetryInfoSchema,
} from "./gen/google/rpc/error_details_pb.js";
import { reasons, type Reason } from "./gen/reasons.js";

const codeNames = [
  "OK",
  "CANCELLED",
  "UNKNOWN",
  "INVALID_ARGUMENT",
  "DEADLINE_EXCEEDED",
  "NOT_FOUND",
  "ALREADY_EXISTS",
  "PERMISSION_DENIED",
  "RESOURCE_EXHAUSTED",
  "FAILED_PRECONDITION",
  "ABORTED",
  "OUT_OF_RANGE",
  "UNIMPLEMENTED",
  "INTERNAL",
  "UNAVAILABLE",
  "DATA_LOSS",
  "UNAUTHENTICATED",
] as const;

/** A gRPC status code. */
export type CodeName = (typeof codeNames)[number];

/** One wrong field of a request: its path and what is wrong. */
export interface FieldViolation {
  readonly path: string;
  readonly text: string;
}

/** A call that failed. Everything that this package throws from a call is one. */
export class KvforkError extends Error {
  override readonly name = "KvforkError";
  readonly code: CodeName;
  /** The stable name of what went wrong; "" if gRPC itself ended the call. A newer server may tell newer ones. */
  readonly reason: Reason | "" | (string & {});
  /** For people. */
  readonly text: string;
  /** The facts of the text. */
  readonly metadata: Readonly<Record<string, string>>;
  /** The wrong fields of the request. */
  readonly fields: readonly FieldViolation[];
  /** When a retry makes sense, in milliseconds; undefined: not told. */
  readonly retryAfterMs: number | undefined;
  /** The name of what was looked for. */
  readonly resource: string;
  /** Leads to the server's log. */
  readonly incident: string;

  constructor(told: {
    code: CodeName;
    reason?: string;
    text?: string;
    metadata?: Record<string, string>;
    fields?: readonly FieldViolation[];
    retryAfterMs?: number;
    resource?: string;
    incident?: string;
    cause?: unknown;
  }) {
    super(`${told.reason || told.code}: ${told.text ?? ""}`, { cause: told.cause });
    this.code = told.code;
    this.reason = told.reason ?? "";
    this.text = told.text ?? "";
    this.metadata = told.metadata ?? {};
    this.fields = told.fields ?? [];
    this.retryAfterMs = told.retryAfterMs;
    this.resource = told.resource ?? "";
    this.incident = told.incident ?? "";
  }

  /** The snapshot that was named was never there, or is there no more, for whatever reason. */
  get snapshotIsGone(): boolean {
    return this.reason in reasons && reasons[this.reason as Reason].gone;
  }

  /** The typed form of anything that a call threw. */
  static from(thrown: unknown): KvforkError {
    if (thrown instanceof KvforkError) {
      return thrown;
    }
    const error = ConnectError.from(thrown);
    const info = error.findDetails(ErrorInfoSchema)[0];
    const delay = error.findDetails(RetryInfoSchema)[0]?.retryDelay;
    const violations = error.findDetails(BadRequestSchema).flatMap((detail) => detail.fieldViolations);
    return new KvforkError({
      code: codeNames[codeOf(error)] ?? "UNKNOWN",
      reason: info?.reason,
      text: error.rawMessage,
      metadata: info?.metadata,
      fields: violations.map((one) => ({ path: one.field, text: one.description })),
      retryAfterMs: delay && Number(delay.seconds) * 1000 + delay.nanos / 1e6,
      resource: error.findDetails(ResourceInfoSchema)[0]?.resourceName,
      incident: error.findDetails(RequestInfoSchema)[0]?.requestId,
      cause: thrown,
    });
  }
}

/** The status code, with UNAVAILABLE for what Node says of the connection itself: TLS, a reset, no such socket. */
function codeOf(error: ConnectError): Code {
  const mayBeNodes = error.code === Code.Internal || error.code === Code.Aborted;
  const { cause } = error;
  return mayBeNodes && cause instanceof Error && "code" in cause && typeof cause.code === "string"
    ? Code.Unavailable
    : error.code;
}

/** Whether a call that failed so before any reply may be sent again as it is. */
export function mayRepeat(thrown: unknown): boolean {
  return (
    thrown instanceof ConnectError &&
    codeOf(thrown) === Code.Unavailable &&
    !Number.isNaN(pushback(thrown) ?? 0)
  );
}

/** Milliseconds that the server wants to be left alone for; NaN: for ever; undefined: it does not say. */
export function pushback(error: ConnectError): number | undefined {
  const told = error.metadata.get("grpc-retry-pushback-ms");
  return told === null ? undefined : /^\d+$/.test(told) ? Number(told) : NaN;
}
