//! What can go wrong with a call: one type, with the reason and details that the server tells.

use std::{collections::HashMap, fmt, time::Duration};

use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::Reason;

/// A call that failed.
#[derive(Clone, Debug)]
pub struct Error(Box<Told>);

#[derive(Clone, Debug)]
struct Told {
    code: Code,
    reason: Option<Reason>,
    text: String,
    metadata: HashMap<String, String>,
    fields: Vec<FieldViolation>,
    retry_after: Option<Duration>,
    resource: String,
    incident: String,
}

/// One wrong field of a request: its path and what is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FieldViolation {
    pub path: String,
    pub text: String,
}

impl Error {
    /// The gRPC status code.
    pub fn code(&self) -> Code {
        self.0.code
    }

    /// The stable name of what went wrong; `None` if gRPC itself ended the call.
    pub fn reason(&self) -> Option<&Reason> {
        self.0.reason.as_ref()
    }

    /// For people.
    pub fn text(&self) -> &str {
        &self.0.text
    }

    /// The facts of the text.
    pub fn metadata(&self) -> &HashMap<String, String> {
        &self.0.metadata
    }

    /// The wrong fields of the request.
    pub fn fields(&self) -> &[FieldViolation] {
        &self.0.fields
    }

    /// When a retry makes sense; `None`: not told.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// The name of what was looked for.
    pub fn resource(&self) -> &str {
        &self.0.resource
    }

    /// Leads to the server's log.
    pub fn incident(&self) -> &str {
        &self.0.incident
    }

    /// The snapshot that was named was never there, or is there no more, for whatever reason.
    pub fn snapshot_is_gone(&self) -> bool {
        self.reason().is_some_and(Reason::is_gone)
    }

    pub(crate) fn new(code: Code, reason: Option<Reason>, text: &str) -> Error {
        Error(Box::new(Told {
            code,
            reason,
            text: text.to_owned(),
            metadata: HashMap::new(),
            fields: Vec::new(),
            retry_after: None,
            resource: String::new(),
            incident: String::new(),
        }))
    }

    pub(crate) fn deadline() -> Error {
        Error::new(Code::DeadlineExceeded, None, "the deadline passed")
    }
}

impl From<Status> for Error {
    fn from(status: Status) -> Error {
        let details = status.get_error_details();
        let info = details.error_info();
        let violations = details.bad_request().map_or(&[][..], |bad| &bad.field_violations);
        Error(Box::new(Told {
            code: status.code(),
            reason: info.map(|info| Reason::of(&info.reason)),
            text: status.message().to_owned(),
            metadata: info.map_or_else(HashMap::new, |info| info.metadata.clone()),
            fields: violations
                .iter()
                .map(|one| FieldViolation { path: one.field.clone(), text: one.description.clone() })
                .collect(),
            retry_after: details.retry_info().and_then(|info| info.retry_delay),
            resource: details.resource_info().map_or_else(String::new, |info| info.resource_name.clone()),
            incident: details.request_info().map_or_else(String::new, |info| info.request_id.clone()),
        }))
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.reason() {
            Some(reason) => write!(f, "{}: {}", reason.as_str(), self.text()),
            None => write!(f, "{:?}: {}", self.code(), self.text()),
        }
    }
}

impl std::error::Error for Error {}
