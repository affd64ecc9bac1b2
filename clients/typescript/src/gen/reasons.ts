// Made by clients/generate.py. Do not edit.

/** Every reason that a server tells. A newer server may tell others. */
export const reasons = {
  /** metadata: needBytes, limitBytes. */
  ACTIVE_MEMORY: { code: "RESOURCE_EXHAUSTED", gone: false },
  /** Use an admin's credentials. */
  ADMIN_REQUIRED: { code: "PERMISSION_DENIED", gone: false },
  /** metadata: limit. */
  CALL_QUOTA: { code: "RESOURCE_EXHAUSTED", gone: false },
  /** Use a client certificate with one name. */
  CERTIFICATE_UNUSABLE: { code: "UNAUTHENTICATED", gone: false },
  /** Make the snapshot again. */
  CHECKPOINT_CORRUPT: { code: "DATA_LOSS", gone: false },
  /** In the middle of a generation: no token fits the form any more, or following it costs too much. */
  CONSTRAINT_FAILED: { code: "INVALID_ARGUMENT", gone: false },
  /** The prompt leaves no room. metadata: promptTokens, contextTokens. */
  CONTEXT_OVERFLOW: { code: "INVALID_ARGUMENT", gone: false },
  /** metadata: start, end. */
  CUT_INSIDE_IMAGE: { code: "INVALID_ARGUMENT", gone: false },
  /** The server did not begin what it could not end in time. metadata: neededSeconds, leftSeconds. */
  DEADLINE_UNMET: { code: "DEADLINE_EXCEEDED", gone: false },
  /** The model's thread is dead or stuck: restart the server. */
  ENGINE_DOWN: { code: "UNAVAILABLE", gone: false },
  /** metadata: have, want (what tells the keys apart). */
  EXCHANGE_KEY_DIFFERS: { code: "FAILED_PRECONDITION", gone: false },
  /** metadata: limit. */
  EXCHANGE_QUOTA: { code: "RESOURCE_EXHAUSTED", gone: false },
  /** Start the servers with an exchange key. */
  EXCHANGE_UNSUPPORTED: { code: "UNIMPLEMENTED", gone: false },
  /** metadata: record. */
  EXPORT_DAMAGED: { code: "DATA_LOSS", gone: false },
  /** metadata: record. */
  EXPORT_INCOMPLETE: { code: "ABORTED", gone: false },
  /** Send an export as it is, from its first byte on. */
  EXPORT_UNREADABLE: { code: "INVALID_ARGUMENT", gone: false },
  /** A snapshot of another model or other software. metadata: have, want, model. */
  FINGERPRINT_DIFFERS: { code: "FAILED_PRECONDITION", gone: false },
  /** Nothing was created. metadata: needBytes, freeBytes. */
  FORK_MEMORY: { code: "RESOURCE_EXHAUSTED", gone: false },
  /** Send an encoded PNG, JPEG or WebP file. */
  IMAGE_INVALID: { code: "INVALID_ARGUMENT", gone: false },
  /** metadata: needBytes, limitBytes. */
  IMAGE_MEMORY: { code: "RESOURCE_EXHAUSTED", gone: false },
  /** metadata: sha256. */
  IMAGE_NOT_HELD: { code: "FAILED_PRECONDITION", gone: false },
  /** Scale the image down; the limits are in the server's info. */
  IMAGE_TOO_LARGE: { code: "INVALID_ARGUMENT", gone: false },
  /** Use a model with vision, or leave the image out. */
  IMAGE_UNSUPPORTED: { code: "INVALID_ARGUMENT", gone: false },
  /** Only labels, expiry and pinned can change. */
  IMMUTABLE_FIELD: { code: "INVALID_ARGUMENT", gone: false },
  /** The server's fault; the incident leads to its log. */
  INTERNAL: { code: "INTERNAL", gone: false },
  /** Fields of the request are wrong; the error lists them. */
  INVALID_FIELD: { code: "INVALID_ARGUMENT", gone: false },
  /** metadata: have, want. */
  MODEL_CHANGED: { code: "FAILED_PRECONDITION", gone: false },
  /** metadata: model. */
  MODEL_LOADING: { code: "UNAVAILABLE", gone: false },
  /** The model named is not the parent's. metadata: snapshotModel, model. */
  MODEL_MISMATCH: { code: "INVALID_ARGUMENT", gone: false },
  /** See which models there are: client.models(). */
  MODEL_NOT_FOUND: { code: "NOT_FOUND", gone: false },
  /** Roll back to a token count, or to a snapshot that the source descends from. */
  NOT_AN_ANCESTOR: { code: "FAILED_PRECONDITION", gone: false },
  /** Start the listing over. */
  PAGE_TOKEN_INVALID: { code: "INVALID_ARGUMENT", gone: false },
  /** Unpin or release pinned snapshots. */
  PIN_QUOTA: { code: "RESOURCE_EXHAUSTED", gone: false },
  /** metadata: queued, limit. */
  QUEUE_FULL: { code: "RESOURCE_EXHAUSTED", gone: false },
  /** metadata: needed, allowed, nearestCheckpoint. */
  RECOMPUTE_LIMIT: { code: "FAILED_PRECONDITION", gone: false },
  /** Make a new request id for each different request. */
  REQUEST_ID_REUSED: { code: "INVALID_ARGUMENT", gone: false },
  /** metadata: generation. */
  REQUEST_IN_PROGRESS: { code: "ABORTED", gone: false },
  /** Start the watch over. */
  RESUME_TOKEN_EXPIRED: { code: "OUT_OF_RANGE", gone: false },
  /** metadata: tokenCount. */
  ROLLBACK_BEYOND_END: { code: "OUT_OF_RANGE", gone: false },
  /** One generation failed by itself; the incident leads to the server's log. */
  ROW_FAILED: { code: "INTERNAL", gone: false },
  /** The server is shutting down: try another one, or again after its restart. */
  SERVER_DRAINING: { code: "UNAVAILABLE", gone: false },
  /** Read the stream faster, or gather more tokens into a message. */
  SLOW_READER: { code: "RESOURCE_EXHAUSTED", gone: false },
  /** The request took too long to arrive: send less at a time. */
  SLOW_SENDER: { code: "RESOURCE_EXHAUSTED", gone: false },
  /** Make it again. */
  SNAPSHOT_DELETED: { code: "NOT_FOUND", gone: true },
  /** Make it again; pin what must stay. */
  SNAPSHOT_EVICTED: { code: "NOT_FOUND", gone: true },
  /** metadata: expireTime. */
  SNAPSHOT_EXPIRED: { code: "NOT_FOUND", gone: true },
  /** Choose another snapshot id, or delete the snapshot that has it. */
  SNAPSHOT_ID_TAKEN: { code: "ALREADY_EXISTS", gone: false },
  /** metadata: activeUses. */
  SNAPSHOT_IN_USE: { code: "FAILED_PRECONDITION", gone: false },
  /** Was durable, and files of the server's store are missing or damaged. */
  SNAPSHOT_LOST: { code: "NOT_FOUND", gone: true },
  /** Lost at a restart. metadata: bootId. */
  SNAPSHOT_NOT_DURABLE: { code: "NOT_FOUND", gone: true },
  /** The snapshot was never there, is somebody else's, or is gone: the handle is of no more use. */
  SNAPSHOT_NOT_FOUND: { code: "NOT_FOUND", gone: true },
  /** Release snapshots that are no longer needed. */
  SNAPSHOT_QUOTA: { code: "RESOURCE_EXHAUSTED", gone: false },
  /** Go on from the rollback's result. */
  SNAPSHOT_ROLLED_BACK: { code: "NOT_FOUND", gone: true },
  /** Release snapshots, or give the store more room. */
  STORE_FULL: { code: "RESOURCE_EXHAUSTED", gone: false },
  /** This model has no chat template: use raw input. */
  TEMPLATE_MISSING: { code: "FAILED_PRECONDITION", gone: false },
  /** This model's template cannot append turns: use raw input, or send the whole chat without a parent. */
  TEMPLATE_NOT_APPENDABLE: { code: "FAILED_PRECONDITION", gone: false },
  /** No connection was made, because the two sides do not trust or do not understand each other. Never the server's own word: this client reads it off the failure. */
  TLS_FAILED: { code: "UNAVAILABLE", gone: false },
  /** Give the client a token. */
  TOKEN_MISSING: { code: "UNAUTHENTICATED", gone: false },
  /** Check the token: it may be mistyped, or have been replaced. */
  TOKEN_UNKNOWN: { code: "UNAUTHENTICATED", gone: false },
  /** Told by the client: a stream ended without its last message. */
  TRUNCATED: { code: "INTERNAL", gone: false },
  /** The last turn has no end: finish it with raw input, or roll back to before it. */
  TURN_OPEN: { code: "FAILED_PRECONDITION", gone: false },
  /** Part of the contract that this server does not serve yet. */
  UNSUPPORTED: { code: "UNIMPLEMENTED", gone: false },
  /** Start the watch over. */
  WATCH_OVERFLOW: { code: "RESOURCE_EXHAUSTED", gone: false },
  /** metadata: limit. */
  WATCH_QUOTA: { code: "RESOURCE_EXHAUSTED", gone: false },
  /** The server that answers is not the one that was meant. metadata: instance, the one that answers. Of a handle's call: a server that began anew without a store took the place of the one that held it, and it is gone; or calls do not reach the instance that they name. */
  WRONG_INSTANCE: { code: "FAILED_PRECONDITION", gone: false },
} as const;

export type Reason = keyof typeof reasons;
