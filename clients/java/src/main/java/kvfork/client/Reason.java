// Made by clients/generate.py. Do not edit.
package kvfork.client;

import io.grpc.Status;

/** Why a call failed, as the server names it. */
public enum Reason {
  /** metadata: needBytes, limitBytes. */
  ACTIVE_MEMORY(Status.Code.RESOURCE_EXHAUSTED, false),
  /** Use an admin's credentials. */
  ADMIN_REQUIRED(Status.Code.PERMISSION_DENIED, false),
  /** metadata: limit. */
  CALL_QUOTA(Status.Code.RESOURCE_EXHAUSTED, false),
  /** Use a client certificate with one name. */
  CERTIFICATE_UNUSABLE(Status.Code.UNAUTHENTICATED, false),
  /** Make the snapshot again. */
  CHECKPOINT_CORRUPT(Status.Code.DATA_LOSS, false),
  /** In the middle of a generation: no token fits the form any more, or following it costs too much. */
  CONSTRAINT_FAILED(Status.Code.INVALID_ARGUMENT, false),
  /** The prompt leaves no room. metadata: promptTokens, contextTokens. */
  CONTEXT_OVERFLOW(Status.Code.INVALID_ARGUMENT, false),
  /** metadata: start, end. */
  CUT_INSIDE_IMAGE(Status.Code.INVALID_ARGUMENT, false),
  /** The server did not begin what it could not end in time. metadata: neededSeconds, leftSeconds. */
  DEADLINE_UNMET(Status.Code.DEADLINE_EXCEEDED, false),
  /** The model's thread is dead or stuck: restart the server. */
  ENGINE_DOWN(Status.Code.UNAVAILABLE, false),
  /** metadata: have, want (what tells the keys apart). */
  EXCHANGE_KEY_DIFFERS(Status.Code.FAILED_PRECONDITION, false),
  /** metadata: limit. */
  EXCHANGE_QUOTA(Status.Code.RESOURCE_EXHAUSTED, false),
  /** Start the servers with an exchange key. */
  EXCHANGE_UNSUPPORTED(Status.Code.UNIMPLEMENTED, false),
  /** metadata: record. */
  EXPORT_DAMAGED(Status.Code.DATA_LOSS, false),
  /** metadata: record. */
  EXPORT_INCOMPLETE(Status.Code.ABORTED, false),
  /** Send an export as it is, from its first byte on. */
  EXPORT_UNREADABLE(Status.Code.INVALID_ARGUMENT, false),
  /** A snapshot of another model or other software. metadata: have, want, model. */
  FINGERPRINT_DIFFERS(Status.Code.FAILED_PRECONDITION, false),
  /** Nothing was created. metadata: needBytes, freeBytes. */
  FORK_MEMORY(Status.Code.RESOURCE_EXHAUSTED, false),
  /** Send an encoded PNG, JPEG or WebP file. */
  IMAGE_INVALID(Status.Code.INVALID_ARGUMENT, false),
  /** metadata: needBytes, limitBytes. */
  IMAGE_MEMORY(Status.Code.RESOURCE_EXHAUSTED, false),
  /** metadata: sha256. */
  IMAGE_NOT_HELD(Status.Code.FAILED_PRECONDITION, false),
  /** Scale the image down; the limits are in the server's info. */
  IMAGE_TOO_LARGE(Status.Code.INVALID_ARGUMENT, false),
  /** Use a model with vision, or leave the image out. */
  IMAGE_UNSUPPORTED(Status.Code.INVALID_ARGUMENT, false),
  /** Only labels, expiry and pinned can change. */
  IMMUTABLE_FIELD(Status.Code.INVALID_ARGUMENT, false),
  /** The server's fault; the incident leads to its log. */
  INTERNAL(Status.Code.INTERNAL, false),
  /** Fields of the request are wrong; the error lists them. */
  INVALID_FIELD(Status.Code.INVALID_ARGUMENT, false),
  /** metadata: have, want. */
  MODEL_CHANGED(Status.Code.FAILED_PRECONDITION, false),
  /** metadata: model. */
  MODEL_LOADING(Status.Code.UNAVAILABLE, false),
  /** The model named is not the parent's. metadata: snapshotModel, model. */
  MODEL_MISMATCH(Status.Code.INVALID_ARGUMENT, false),
  /** See which models there are: client.models(). */
  MODEL_NOT_FOUND(Status.Code.NOT_FOUND, false),
  /** Roll back to a token count, or to a snapshot that the source descends from. */
  NOT_AN_ANCESTOR(Status.Code.FAILED_PRECONDITION, false),
  /** Start the listing over. */
  PAGE_TOKEN_INVALID(Status.Code.INVALID_ARGUMENT, false),
  /** Unpin or release pinned snapshots. */
  PIN_QUOTA(Status.Code.RESOURCE_EXHAUSTED, false),
  /** metadata: queued, limit. */
  QUEUE_FULL(Status.Code.RESOURCE_EXHAUSTED, false),
  /** metadata: needed, allowed, nearestCheckpoint. */
  RECOMPUTE_LIMIT(Status.Code.FAILED_PRECONDITION, false),
  /** Make a new request id for each different request. */
  REQUEST_ID_REUSED(Status.Code.INVALID_ARGUMENT, false),
  /** metadata: generation. */
  REQUEST_IN_PROGRESS(Status.Code.ABORTED, false),
  /** Start the watch over. */
  RESUME_TOKEN_EXPIRED(Status.Code.OUT_OF_RANGE, false),
  /** metadata: tokenCount. */
  ROLLBACK_BEYOND_END(Status.Code.OUT_OF_RANGE, false),
  /** One generation failed by itself; the incident leads to the server's log. */
  ROW_FAILED(Status.Code.INTERNAL, false),
  /** The server is shutting down: try another one, or again after its restart. */
  SERVER_DRAINING(Status.Code.UNAVAILABLE, false),
  /** Read the stream faster, or gather more tokens into a message. */
  SLOW_READER(Status.Code.RESOURCE_EXHAUSTED, false),
  /** The request took too long to arrive: send less at a time. */
  SLOW_SENDER(Status.Code.RESOURCE_EXHAUSTED, false),
  /** Make it again. */
  SNAPSHOT_DELETED(Status.Code.NOT_FOUND, true),
  /** Make it again; pin what must stay. */
  SNAPSHOT_EVICTED(Status.Code.NOT_FOUND, true),
  /** metadata: expireTime. */
  SNAPSHOT_EXPIRED(Status.Code.NOT_FOUND, true),
  /** Choose another snapshot id, or delete the snapshot that has it. */
  SNAPSHOT_ID_TAKEN(Status.Code.ALREADY_EXISTS, false),
  /** metadata: activeUses. */
  SNAPSHOT_IN_USE(Status.Code.FAILED_PRECONDITION, false),
  /** Was durable, and files of the server's store are missing or damaged. */
  SNAPSHOT_LOST(Status.Code.NOT_FOUND, true),
  /** Lost at a restart. metadata: bootId. */
  SNAPSHOT_NOT_DURABLE(Status.Code.NOT_FOUND, true),
  /** The snapshot was never there, is somebody else's, or is gone: the handle is of no more use. */
  SNAPSHOT_NOT_FOUND(Status.Code.NOT_FOUND, true),
  /** Release snapshots that are no longer needed. */
  SNAPSHOT_QUOTA(Status.Code.RESOURCE_EXHAUSTED, false),
  /** Go on from the rollback's result. */
  SNAPSHOT_ROLLED_BACK(Status.Code.NOT_FOUND, true),
  /** Release snapshots, or give the store more room. */
  STORE_FULL(Status.Code.RESOURCE_EXHAUSTED, false),
  /** This model has no chat template: use raw input. */
  TEMPLATE_MISSING(Status.Code.FAILED_PRECONDITION, false),
  /** This model's template cannot append turns: use raw input, or send the whole chat without a parent. */
  TEMPLATE_NOT_APPENDABLE(Status.Code.FAILED_PRECONDITION, false),
  /** No connection was made, because the two sides do not trust or do not understand each other. Never the server's own word: this client reads it off the failure. */
  TLS_FAILED(Status.Code.UNAVAILABLE, false),
  /** Give the client a token. */
  TOKEN_MISSING(Status.Code.UNAUTHENTICATED, false),
  /** Check the token: it may be mistyped, or have been replaced. */
  TOKEN_UNKNOWN(Status.Code.UNAUTHENTICATED, false),
  /** Told by the client: a stream ended without its last message. */
  TRUNCATED(Status.Code.INTERNAL, false),
  /** The last turn has no end: finish it with raw input, or roll back to before it. */
  TURN_OPEN(Status.Code.FAILED_PRECONDITION, false),
  /** Part of the contract that this server does not serve yet. */
  UNSUPPORTED(Status.Code.UNIMPLEMENTED, false),
  /** Start the watch over. */
  WATCH_OVERFLOW(Status.Code.RESOURCE_EXHAUSTED, false),
  /** metadata: limit. */
  WATCH_QUOTA(Status.Code.RESOURCE_EXHAUSTED, false),
  /** The server that answers is not the one that was meant. metadata: instance, the one that answers. Of a handle's call: a server that began anew without a store took the place of the one that held it, and it is gone; or calls do not reach the instance that they name. */
  WRONG_INSTANCE(Status.Code.FAILED_PRECONDITION, false),
  /** gRPC itself ended the call, or the reason is newer than this client: see its name. */
  OTHER(Status.Code.UNKNOWN, false);

  private final Status.Code code;
  private final boolean gone;

  Reason(Status.Code code, boolean gone) {
    this.code = code;
    this.gone = gone;
  }

  /** The status code that comes with it. */
  public Status.Code code() {
    return code;
  }

  /** Whether it tells that a snapshot is of no more use. */
  public boolean isGone() {
    return gone;
  }

  static Reason of(String name) {
    for (Reason reason : values()) {
      if (reason != OTHER && reason.name().equals(name)) {
        return reason;
      }
    }
    return OTHER;
  }
}
