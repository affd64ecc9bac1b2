//! A client for kvfork: it streams text from a language model whose state after a prefix can be named, forked and
//! rolled back.
//!
//! ```no_run
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! use kvfork::{Client, input, v1::GenerateRequest};
//!
//! let client = Client::new("127.0.0.1:50051")?;
//! let request = GenerateRequest { input: Some(input::text("All roads lead to")), ..Default::default() };
//! let mut generation = client.generate(request).await?;
//! while let Some(delta) = generation.next_delta().await? {
//!     print!("{}", delta.text);
//! }
//! # Ok(()) }
//! ```
//!
//! Requests and replies are the messages of the contract, [`v1`]; this crate adds what a call is about: a [`Client`]
//! that connects, a [`Generation`] that streams and can be stopped or dropped, a [`Snapshot`] that is a handle, and an
//! [`Error`] with a reason and details.

// A field that is new in the contract must not break the build: messages are filled up with defaults.
#![allow(clippy::needless_update)]

mod client;
mod connection;
mod error;
mod generation;
pub mod input;
mod snapshot;

/// The messages of the contract, and its generated clients.
#[allow(clippy::all, missing_docs)]
pub mod v1 {
    include!("gen/kvfork.v1.rs");
}

#[rustfmt::skip]
#[path = "gen/reasons.rs"]
mod reasons;

pub use client::{Client, Snapshots};
pub use connection::{AddressError, Builder};
pub use error::{Error, FieldViolation};
pub use generation::{Generation, Outcome};
pub use reasons::Reason;
pub use snapshot::{Snapshot, Target};
pub use tonic::Code;

/// TLS settings of [`Builder::tls`], with the types they are made of.
#[cfg(feature = "tls")]
pub mod tls {
    pub use tonic::transport::{Certificate, ClientTlsConfig, Identity};
}
