// Made by clients/generate.py. Do not edit.

/// Why a call failed, as the server names it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// RESOURCE_EXHAUSTED. metadata: needBytes, limitBytes.
    ActiveMemory,
    /// PERMISSION_DENIED. Use an admin's credentials.
    AdminRequired,
    /// RESOURCE_EXHAUSTED. metadata: limit.
    CallQuota,
    /// UNAUTHENTICATED. Use a client certificate with one name.
    CertificateUnusable,
    /// DATA_LOSS. Make the snapshot again.
    CheckpointCorrupt,
    /// INVALID_ARGUMENT. In the middle of a generation: no token fits the form any more, or following it costs too much.
    ConstraintFailed,
    /// INVALID_ARGUMENT. The prompt leaves no room. metadata: promptTokens, contextTokens.
    ContextOverflow,
    /// INVALID_ARGUMENT. metadata: start, end.
    CutInsideImage,
    /// DEADLINE_EXCEEDED. The server did not begin what it could not end in time. metadata: neededSeconds, leftSeconds.
    DeadlineUnmet,
    /// UNAVAILABLE. The model's thread is dead or stuck: restart the server.
    EngineDown,
    /// FAILED_PRECONDITION. metadata: have, want (what tells the keys apart).
    ExchangeKeyDiffers,
    /// RESOURCE_EXHAUSTED. metadata: limit.
    ExchangeQuota,
    /// UNIMPLEMENTED. Start the servers with an exchange key.
    ExchangeUnsupported,
    /// DATA_LOSS. metadata: record.
    ExportDamaged,
    /// ABORTED. metadata: record.
    ExportIncomplete,
    /// INVALID_ARGUMENT. Send an export as it is, from its first byte on.
    ExportUnreadable,
    /// FAILED_PRECONDITION. A snapshot of another model or other software. metadata: have, want, model.
    FingerprintDiffers,
    /// RESOURCE_EXHAUSTED. Nothing was created. metadata: needBytes, freeBytes.
    ForkMemory,
    /// INVALID_ARGUMENT. Send an encoded PNG, JPEG or WebP file.
    ImageInvalid,
    /// RESOURCE_EXHAUSTED. metadata: needBytes, limitBytes.
    ImageMemory,
    /// FAILED_PRECONDITION. metadata: sha256.
    ImageNotHeld,
    /// INVALID_ARGUMENT. Scale the image down; the limits are in the server's info.
    ImageTooLarge,
    /// INVALID_ARGUMENT. Use a model with vision, or leave the image out.
    ImageUnsupported,
    /// INVALID_ARGUMENT. Only labels, expiry and pinned can change.
    ImmutableField,
    /// INTERNAL. The server's fault; the incident leads to its log.
    Internal,
    /// INVALID_ARGUMENT. Fields of the request are wrong; the error lists them.
    InvalidField,
    /// FAILED_PRECONDITION. metadata: have, want.
    ModelChanged,
    /// UNAVAILABLE. metadata: model.
    ModelLoading,
    /// INVALID_ARGUMENT. The model named is not the parent's. metadata: snapshotModel, model.
    ModelMismatch,
    /// NOT_FOUND. See which models there are: client.models().
    ModelNotFound,
    /// FAILED_PRECONDITION. Roll back to a token count, or to a snapshot that the source descends from.
    NotAnAncestor,
    /// INVALID_ARGUMENT. Start the listing over.
    PageTokenInvalid,
    /// RESOURCE_EXHAUSTED. Unpin or release pinned snapshots.
    PinQuota,
    /// RESOURCE_EXHAUSTED. metadata: queued, limit.
    QueueFull,
    /// FAILED_PRECONDITION. metadata: needed, allowed, nearestCheckpoint.
    RecomputeLimit,
    /// INVALID_ARGUMENT. Make a new request id for each different request.
    RequestIdReused,
    /// ABORTED. metadata: generation.
    RequestInProgress,
    /// OUT_OF_RANGE. Start the watch over.
    ResumeTokenExpired,
    /// OUT_OF_RANGE. metadata: tokenCount.
    RollbackBeyondEnd,
    /// INTERNAL. One generation failed by itself; the incident leads to the server's log.
    RowFailed,
    /// UNAVAILABLE. The server is shutting down: try another one, or again after its restart.
    ServerDraining,
    /// RESOURCE_EXHAUSTED. Read the stream faster, or gather more tokens into a message.
    SlowReader,
    /// RESOURCE_EXHAUSTED. The request took too long to arrive: send less at a time.
    SlowSender,
    /// NOT_FOUND. Make it again.
    SnapshotDeleted,
    /// NOT_FOUND. Make it again; pin what must stay.
    SnapshotEvicted,
    /// NOT_FOUND. metadata: expireTime.
    SnapshotExpired,
    /// ALREADY_EXISTS. Choose another snapshot id, or delete the snapshot that has it.
    SnapshotIdTaken,
    /// FAILED_PRECONDITION. metadata: activeUses.
    SnapshotInUse,
    /// NOT_FOUND. Was durable, and files of the server's store are missing or damaged.
    SnapshotLost,
    /// NOT_FOUND. Lost at a restart. metadata: bootId.
    SnapshotNotDurable,
    /// NOT_FOUND. The snapshot was never there, is somebody else's, or is gone: the handle is of no more use.
    SnapshotNotFound,
    /// RESOURCE_EXHAUSTED. Release snapshots that are no longer needed.
    SnapshotQuota,
    /// NOT_FOUND. Go on from the rollback's result.
    SnapshotRolledBack,
    /// RESOURCE_EXHAUSTED. Release snapshots, or give the store more room.
    StoreFull,
    /// FAILED_PRECONDITION. This model has no chat template: use raw input.
    TemplateMissing,
    /// FAILED_PRECONDITION. This model's template cannot append turns: use raw input, or send the whole chat without a parent.
    TemplateNotAppendable,
    /// UNAVAILABLE. No connection was made, because the two sides do not trust or do not understand each other. Never the server's own word: this client reads it off the failure.
    TlsFailed,
    /// UNAUTHENTICATED. Give the client a token.
    TokenMissing,
    /// UNAUTHENTICATED. Check the token: it may be mistyped, or have been replaced.
    TokenUnknown,
    /// INTERNAL. Told by the client: a stream ended without its last message.
    Truncated,
    /// FAILED_PRECONDITION. The last turn has no end: finish it with raw input, or roll back to before it.
    TurnOpen,
    /// UNIMPLEMENTED. Part of the contract that this server does not serve yet.
    Unsupported,
    /// RESOURCE_EXHAUSTED. Start the watch over.
    WatchOverflow,
    /// RESOURCE_EXHAUSTED. metadata: limit.
    WatchQuota,
    /// FAILED_PRECONDITION. The server that answers is not the one that was meant. metadata: instance, the one that answers. Of a handle's call: a server that began anew without a store took the place of the one that held it, and it is gone; or calls do not reach the instance that they name.
    WrongInstance,
    /// A reason that is newer than this client.
    Other(String),
}

impl Reason {
    /// The reason of a name.
    pub fn of(name: &str) -> Reason {
        match name {
            "ACTIVE_MEMORY" => Reason::ActiveMemory,
            "ADMIN_REQUIRED" => Reason::AdminRequired,
            "CALL_QUOTA" => Reason::CallQuota,
            "CERTIFICATE_UNUSABLE" => Reason::CertificateUnusable,
            "CHECKPOINT_CORRUPT" => Reason::CheckpointCorrupt,
            "CONSTRAINT_FAILED" => Reason::ConstraintFailed,
            "CONTEXT_OVERFLOW" => Reason::ContextOverflow,
            "CUT_INSIDE_IMAGE" => Reason::CutInsideImage,
            "DEADLINE_UNMET" => Reason::DeadlineUnmet,
            "ENGINE_DOWN" => Reason::EngineDown,
            "EXCHANGE_KEY_DIFFERS" => Reason::ExchangeKeyDiffers,
            "EXCHANGE_QUOTA" => Reason::ExchangeQuota,
            "EXCHANGE_UNSUPPORTED" => Reason::ExchangeUnsupported,
            "EXPORT_DAMAGED" => Reason::ExportDamaged,
            "EXPORT_INCOMPLETE" => Reason::ExportIncomplete,
            "EXPORT_UNREADABLE" => Reason::ExportUnreadable,
            "FINGERPRINT_DIFFERS" => Reason::FingerprintDiffers,
            "FORK_MEMORY" => Reason::ForkMemory,
            "IMAGE_INVALID" => Reason::ImageInvalid,
            "IMAGE_MEMORY" => Reason::ImageMemory,
            "IMAGE_NOT_HELD" => Reason::ImageNotHeld,
            "IMAGE_TOO_LARGE" => Reason::ImageTooLarge,
            "IMAGE_UNSUPPORTED" => Reason::ImageUnsupported,
            "IMMUTABLE_FIELD" => Reason::ImmutableField,
            "INTERNAL" => Reason::Internal,
            "INVALID_FIELD" => Reason::InvalidField,
            "MODEL_CHANGED" => Reason::ModelChanged,
            "MODEL_LOADING" => Reason::ModelLoading,
            "MODEL_MISMATCH" => Reason::ModelMismatch,
            "MODEL_NOT_FOUND" => Reason::ModelNotFound,
            "NOT_AN_ANCESTOR" => Reason::NotAnAncestor,
            "PAGE_TOKEN_INVALID" => Reason::PageTokenInvalid,
            "PIN_QUOTA" => Reason::PinQuota,
            "QUEUE_FULL" => Reason::QueueFull,
            "RECOMPUTE_LIMIT" => Reason::RecomputeLimit,
            "REQUEST_ID_REUSED" => Reason::RequestIdReused,
            "REQUEST_IN_PROGRESS" => Reason::RequestInProgress,
            "RESUME_TOKEN_EXPIRED" => Reason::ResumeTokenExpired,
            "ROLLBACK_BEYOND_END" => Reason::RollbackBeyondEnd,
            "ROW_FAILED" => Reason::RowFailed,
            "SERVER_DRAINING" => Reason::ServerDraining,
            "SLOW_READER" => Reason::SlowReader,
            "SLOW_SENDER" => Reason::SlowSender,
            "SNAPSHOT_DELETED" => Reason::SnapshotDeleted,
            "SNAPSHOT_EVICTED" => Reason::SnapshotEvicted,
            "SNAPSHOT_EXPIRED" => Reason::SnapshotExpired,
            "SNAPSHOT_ID_TAKEN" => Reason::SnapshotIdTaken,
            "SNAPSHOT_IN_USE" => Reason::SnapshotInUse,
            "SNAPSHOT_LOST" => Reason::SnapshotLost,
            "SNAPSHOT_NOT_DURABLE" => Reason::SnapshotNotDurable,
            "SNAPSHOT_NOT_FOUND" => Reason::SnapshotNotFound,
            "SNAPSHOT_QUOTA" => Reason::SnapshotQuota,
            "SNAPSHOT_ROLLED_BACK" => Reason::SnapshotRolledBack,
            "STORE_FULL" => Reason::StoreFull,
            "TEMPLATE_MISSING" => Reason::TemplateMissing,
            "TEMPLATE_NOT_APPENDABLE" => Reason::TemplateNotAppendable,
            "TLS_FAILED" => Reason::TlsFailed,
            "TOKEN_MISSING" => Reason::TokenMissing,
            "TOKEN_UNKNOWN" => Reason::TokenUnknown,
            "TRUNCATED" => Reason::Truncated,
            "TURN_OPEN" => Reason::TurnOpen,
            "UNSUPPORTED" => Reason::Unsupported,
            "WATCH_OVERFLOW" => Reason::WatchOverflow,
            "WATCH_QUOTA" => Reason::WatchQuota,
            "WRONG_INSTANCE" => Reason::WrongInstance,
            other => Reason::Other(other.to_owned()),
        }
    }

    /// Its name, as in the contract.
    pub fn as_str(&self) -> &str {
        match self {
            Reason::ActiveMemory => "ACTIVE_MEMORY",
            Reason::AdminRequired => "ADMIN_REQUIRED",
            Reason::CallQuota => "CALL_QUOTA",
            Reason::CertificateUnusable => "CERTIFICATE_UNUSABLE",
            Reason::CheckpointCorrupt => "CHECKPOINT_CORRUPT",
            Reason::ConstraintFailed => "CONSTRAINT_FAILED",
            Reason::ContextOverflow => "CONTEXT_OVERFLOW",
            Reason::CutInsideImage => "CUT_INSIDE_IMAGE",
            Reason::DeadlineUnmet => "DEADLINE_UNMET",
            Reason::EngineDown => "ENGINE_DOWN",
            Reason::ExchangeKeyDiffers => "EXCHANGE_KEY_DIFFERS",
            Reason::ExchangeQuota => "EXCHANGE_QUOTA",
            Reason::ExchangeUnsupported => "EXCHANGE_UNSUPPORTED",
            Reason::ExportDamaged => "EXPORT_DAMAGED",
            Reason::ExportIncomplete => "EXPORT_INCOMPLETE",
            Reason::ExportUnreadable => "EXPORT_UNREADABLE",
            Reason::FingerprintDiffers => "FINGERPRINT_DIFFERS",
            Reason::ForkMemory => "FORK_MEMORY",
            Reason::ImageInvalid => "IMAGE_INVALID",
            Reason::ImageMemory => "IMAGE_MEMORY",
            Reason::ImageNotHeld => "IMAGE_NOT_HELD",
            Reason::ImageTooLarge => "IMAGE_TOO_LARGE",
            Reason::ImageUnsupported => "IMAGE_UNSUPPORTED",
            Reason::ImmutableField => "IMMUTABLE_FIELD",
            Reason::Internal => "INTERNAL",
            Reason::InvalidField => "INVALID_FIELD",
            Reason::ModelChanged => "MODEL_CHANGED",
            Reason::ModelLoading => "MODEL_LOADING",
            Reason::ModelMismatch => "MODEL_MISMATCH",
            Reason::ModelNotFound => "MODEL_NOT_FOUND",
            Reason::NotAnAncestor => "NOT_AN_ANCESTOR",
            Reason::PageTokenInvalid => "PAGE_TOKEN_INVALID",
            Reason::PinQuota => "PIN_QUOTA",
            Reason::QueueFull => "QUEUE_FULL",
            Reason::RecomputeLimit => "RECOMPUTE_LIMIT",
            Reason::RequestIdReused => "REQUEST_ID_REUSED",
            Reason::RequestInProgress => "REQUEST_IN_PROGRESS",
            Reason::ResumeTokenExpired => "RESUME_TOKEN_EXPIRED",
            Reason::RollbackBeyondEnd => "ROLLBACK_BEYOND_END",
            Reason::RowFailed => "ROW_FAILED",
            Reason::ServerDraining => "SERVER_DRAINING",
            Reason::SlowReader => "SLOW_READER",
            Reason::SlowSender => "SLOW_SENDER",
            Reason::SnapshotDeleted => "SNAPSHOT_DELETED",
            Reason::SnapshotEvicted => "SNAPSHOT_EVICTED",
            Reason::SnapshotExpired => "SNAPSHOT_EXPIRED",
            Reason::SnapshotIdTaken => "SNAPSHOT_ID_TAKEN",
            Reason::SnapshotInUse => "SNAPSHOT_IN_USE",
            Reason::SnapshotLost => "SNAPSHOT_LOST",
            Reason::SnapshotNotDurable => "SNAPSHOT_NOT_DURABLE",
            Reason::SnapshotNotFound => "SNAPSHOT_NOT_FOUND",
            Reason::SnapshotQuota => "SNAPSHOT_QUOTA",
            Reason::SnapshotRolledBack => "SNAPSHOT_ROLLED_BACK",
            Reason::StoreFull => "STORE_FULL",
            Reason::TemplateMissing => "TEMPLATE_MISSING",
            Reason::TemplateNotAppendable => "TEMPLATE_NOT_APPENDABLE",
            Reason::TlsFailed => "TLS_FAILED",
            Reason::TokenMissing => "TOKEN_MISSING",
            Reason::TokenUnknown => "TOKEN_UNKNOWN",
            Reason::Truncated => "TRUNCATED",
            Reason::TurnOpen => "TURN_OPEN",
            Reason::Unsupported => "UNSUPPORTED",
            Reason::WatchOverflow => "WATCH_OVERFLOW",
            Reason::WatchQuota => "WATCH_QUOTA",
            Reason::WrongInstance => "WRONG_INSTANCE",
            Reason::Other(name) => name,
        }
    }

    /// Whether it tells that a snapshot is of no more use.
    pub fn is_gone(&self) -> bool {
        matches!(
            self,
            Reason::SnapshotDeleted
                | Reason::SnapshotEvicted
                | Reason::SnapshotExpired
                | Reason::SnapshotLost
                | Reason::SnapshotNotDurable
                | Reason::SnapshotNotFound
                | Reason::SnapshotRolledBack
        )
    }
}
