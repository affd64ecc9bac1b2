/**
 * A client for kvfork: it streams text from a language model whose state after a prefix can be named, forked and rolled
 * back. Requests and replies are the messages of the contract ("kvfork-client/v1"), written as plain objects.
 */
export { Client, type CallOptions } from "./client.js";
export { type ClientOptions, type Tls } from "./connection.js";
export { KvforkError, type CodeName, type FieldViolation } from "./errors.js";
export { Generation, type Result } from "./generation.js";
export { Snapshot, type Forked, type RollbackTarget } from "./snapshot.js";
export { type Reason } from "./gen/reasons.js";
export * from "./input.js";
