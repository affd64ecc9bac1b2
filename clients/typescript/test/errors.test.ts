import assert from "node:assert/strict";
import { test } from "node:test";
import { Code, ConnectError } from "@connectrpc/connect";
import { mayRepeat, pushback } from "../src/errors.js";
import {
  BadRequestSchema,
  ErrorInfoSchema,
  RequestInfoSchema,
  ResourceInfoSchema,
  RetryInfoSchema,
} from "../src/gen/google/rpc/error_details_pb.js";
import { KvforkError } from "../src/index.js";

test("every detail is told", () => {
  const error = KvforkError.from(
    new ConnectError("text", Code.NotFound, undefined, [
      { desc: ErrorInfoSchema, value: { reason: "SNAPSHOT_EXPIRED", metadata: { expireTime: "now" } } },
      { desc: BadRequestSchema, value: { fieldViolations: [{ field: "a.b", description: "c" }] } },
      { desc: RetryInfoSchema, value: { retryDelay: { seconds: 1n, nanos: 500_000_000 } } },
      { desc: ResourceInfoSchema, value: { resourceName: "snapshots/a" } },
      { desc: RequestInfoSchema, value: { requestId: "incident" } },
    ]),
  );
  assert.equal(error.code, "NOT_FOUND");
  assert.equal(error.reason, "SNAPSHOT_EXPIRED");
  assert.equal(error.text, "text");
  assert.deepEqual(error.metadata, { expireTime: "now" });
  assert.deepEqual(error.fields, [{ path: "a.b", text: "c" }]);
  assert.equal(error.retryAfterMs, 1500);
  assert.equal(error.resource, "snapshots/a");
  assert.equal(error.incident, "incident");
  assert.equal(error.snapshotIsGone, true);
  assert.equal(KvforkError.from(error), error);
});

test("a newer reason keeps its name, and gRPC's own errors have none", () => {
  const newer = new ConnectError("", Code.Internal, undefined, [
    { desc: ErrorInfoSchema, value: { reason: "YET_UNKNOWN" } },
  ]);
  assert.equal(KvforkError.from(newer).reason, "YET_UNKNOWN");
  assert.equal(KvforkError.from(newer).snapshotIsGone, false);
  assert.equal(KvforkError.from(new ConnectError("", Code.Unavailable)).reason, "");
});

test("what Node says of the connection is unavailable", () => {
  const reset = Object.assign(new Error("reset"), { code: "ECONNRESET" });
  const broken = new ConnectError("", Code.Aborted, undefined, undefined, reset);
  assert.equal(KvforkError.from(broken).code, "UNAVAILABLE");
  assert.equal(mayRepeat(broken), true);
  assert.equal(KvforkError.from(new ConnectError("", Code.Aborted)).code, "ABORTED");
});

test("only unavailable is repeated, and not if the server says so", () => {
  const told = (value?: string) =>
    new ConnectError("", Code.Unavailable, value === undefined ? undefined : { "grpc-retry-pushback-ms": value });
  assert.equal(mayRepeat(told()), true);
  assert.equal(mayRepeat(told("400")), true);
  assert.equal(mayRepeat(told("-1")), false);
  assert.equal(mayRepeat(new ConnectError("", Code.Internal)), false);
  assert.equal(pushback(told("400")), 400);
  assert.equal(pushback(told()), undefined);
});
