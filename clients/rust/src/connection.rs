//! Where a server is and how to talk to it, and when a call is made again.

use std::{fmt, net::IpAddr, time::Duration};

use tokio::time::{Instant, sleep, timeout_at};
use tonic::{
    Code, Request, Status,
    metadata::{Ascii, MetadataValue},
    transport::{Channel, Endpoint},
};

use crate::{Client, Error};

pub(crate) const MAX_MESSAGE_BYTES: usize = 64 << 20; // token lists of long contexts are large

const TRIES: u32 = 4;
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LONGEST_PAUSE: Duration = Duration::from_secs(3);

/// Settings of a [`Client`].
pub struct Builder {
    address: String,
    token: Option<String>,
    token_in_clear: bool,
    timeout: Option<Duration>,
    retry: bool,
    #[cfg(feature = "tls")]
    tls: Option<tonic::transport::ClientTlsConfig>,
}

/// An address or setting that cannot be used.
#[derive(Debug)]
pub struct AddressError(String);

impl fmt::Display for AddressError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for AddressError {}

impl Builder {
    pub(crate) fn new(address: &str) -> Builder {
        Builder {
            address: address.to_owned(),
            token: None,
            token_in_clear: false,
            timeout: None,
            retry: true,
            #[cfg(feature = "tls")]
            tls: None,
        }
    }

    /// Sends a bearer token with every call. Off this machine it needs [`tls`](Builder::tls).
    pub fn token(mut self, token: &str) -> Builder {
        self.token = Some(token.to_owned());
        self
    }

    /// Lets the token cross a network without TLS, for one that is trusted.
    pub fn token_in_clear(mut self) -> Builder {
        self.token_in_clear = true;
        self
    }

    /// For every call: what is not over by then ends with [`Code::DeadlineExceeded`].
    pub fn timeout(mut self, timeout: Duration) -> Builder {
        self.timeout = Some(timeout);
        self
    }

    /// Whether calls that found the server unavailable are made again, up to four tries, before any reply began. They
    /// are, by default.
    pub fn retry(mut self, retry: bool) -> Builder {
        self.retry = retry;
        self
    }

    /// Encrypts. `ClientTlsConfig::new().with_native_roots()` checks the server against the system's roots.
    #[cfg(feature = "tls")]
    pub fn tls(mut self, config: tonic::transport::ClientTlsConfig) -> Builder {
        self.tls = Some(config);
        self
    }

    /// The client; it connects when it is first used. To be called within a Tokio runtime.
    pub fn build(self) -> Result<Client, AddressError> {
        #[cfg(feature = "tls")]
        let secure = self.tls.is_some();
        #[cfg(not(feature = "tls"))]
        let secure = false;
        if self.address.is_empty() || self.address.starts_with("http://") || self.address.starts_with("https://") {
            return Err(AddressError(format!("an address is host:port or unix:/path, not \"{}\"", self.address)));
        }
        if self.token.is_some() && !secure && !self.token_in_clear && !is_local(&self.address) {
            return Err(AddressError(format!(
                "refusing to send a token to {} without TLS: add tls, or token_in_clear if the network is trusted",
                self.address
            )));
        }
        let authorization = match &self.token {
            Some(token) => {
                Some(format!("Bearer {token}").parse().map_err(|_| AddressError("a token is ASCII".into()))?)
            }
            None => None,
        };
        let endpoint = self.endpoint().map_err(|error| AddressError(format!("{}: {error}", self.address)))?;
        let connection =
            Connection { channel: endpoint.connect_lazy(), authorization, timeout: self.timeout, retry: self.retry };
        Ok(Client::over(connection))
    }

    fn endpoint(&self) -> Result<Endpoint, tonic::transport::Error> {
        let path =
            self.address.strip_prefix("unix:").or_else(|| self.address.starts_with('/').then_some(&self.address));
        let uri = match path {
            Some(path) => format!("unix://{path}"),
            None => format!("http://{}", self.address),
        };
        let endpoint = Endpoint::from_shared(uri)?
            // Notices a server that vanished without a word; the server allows a ping every 10 s.
            .http2_keep_alive_interval(Duration::from_secs(30))
            .keep_alive_timeout(Duration::from_secs(20));
        #[cfg(feature = "tls")]
        if let Some(tls) = &self.tls {
            let uri = format!("https://{}", self.address);
            return Endpoint::from_shared(uri)?
                .http2_keep_alive_interval(Duration::from_secs(30))
                .keep_alive_timeout(Duration::from_secs(20))
                .tls_config(tls.clone());
        }
        Ok(endpoint)
    }
}

/// Whether an address never leaves the machine.
fn is_local(address: &str) -> bool {
    if address.starts_with("unix:") || address.starts_with('/') {
        return true;
    }
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host).trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// A channel and how calls are made over it.
#[derive(Clone)]
pub(crate) struct Connection {
    pub(crate) channel: Channel,
    authorization: Option<MetadataValue<Ascii>>,
    pub(crate) timeout: Option<Duration>,
    retry: bool,
}

impl Connection {
    /// Makes a call, and makes it again while the server is unavailable. `attempt` must fail only before any reply has
    /// begun: what has begun is never sent twice. Gives the deadline too.
    pub(crate) async fn call<Q: Clone, R>(
        &self,
        message: Q,
        attempt: impl AsyncFn(Channel, Request<Q>) -> Result<R, Status>,
    ) -> Result<(R, Option<Instant>), Error> {
        let deadline = self.timeout.map(|timeout| Instant::now() + timeout);
        for tried in 1.. {
            let mut request = Request::new(message.clone());
            if let Some(value) = &self.authorization {
                request.metadata_mut().insert("authorization", value.clone());
            }
            if let Some(deadline) = deadline {
                request.set_timeout(deadline.saturating_duration_since(Instant::now()));
            }
            let status = match by(deadline, attempt(self.channel.clone(), request)).await? {
                Ok(reply) => return Ok((reply, deadline)),
                Err(status) => status,
            };
            let Some(pause) = pause_after(&status, tried).filter(|_| self.retry) else {
                return Err(ended_by(deadline, status));
            };
            by(deadline, sleep(pause)).await?;
        }
        unreachable!("the last try returns")
    }
}

/// Waits no longer than the deadline.
pub(crate) async fn by<T>(deadline: Option<Instant>, work: impl Future<Output = T>) -> Result<T, Error> {
    match deadline {
        Some(deadline) => timeout_at(deadline, work).await.map_err(|_| Error::deadline()),
        None => Ok(work.await),
    }
}

/// The typed error; a server that ends a call at its deadline may do so without a word.
pub(crate) fn ended_by(deadline: Option<Instant>, status: Status) -> Error {
    let passed = deadline.is_some_and(|deadline| deadline <= Instant::now() + Duration::from_millis(5));
    if passed && status.code() == Code::Cancelled { Error::deadline() } else { status.into() }
}

/// How long to leave the server alone before the same call may be made once more; `None`: it may not.
fn pause_after(status: &Status, tried: u32) -> Option<Duration> {
    if status.code() != Code::Unavailable || tried >= TRIES {
        return None;
    }
    match status.metadata().get("grpc-retry-pushback-ms") {
        Some(told) => told.to_str().ok()?.parse().ok().map(Duration::from_millis), // "-1" is no number of ours
        None => Some(LONGEST_PAUSE.min(FIRST_PAUSE.mul_f64(2.5_f64.powi(tried as i32 - 1)))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_and_sockets_are_local() {
        for address in ["127.0.0.1:1", "[::1]:1", "localhost:1", "unix:/tmp/s", "/tmp/s"] {
            assert!(is_local(address), "{address}");
        }
        for address in ["10.0.0.1:1", "example.org:1", "[fe80::1]:1", "localhost.example.org:1"] {
            assert!(!is_local(address), "{address}");
        }
    }

    #[tokio::test]
    async fn a_token_does_not_cross_a_network_in_the_clear() {
        assert!(Builder::new("example.org:1").token("secret").build().is_err());
        assert!(Builder::new("example.org:1").token("secret").token_in_clear().build().is_ok());
        assert!(Builder::new("127.0.0.1:1").token("secret").build().is_ok());
    }

    #[tokio::test]
    async fn a_url_is_no_address() {
        assert!(Builder::new("http://127.0.0.1:1").build().is_err());
        assert!(Builder::new("").build().is_err());
    }

    #[test]
    fn only_unavailable_is_made_again_and_not_for_ever() {
        assert!(pause_after(&Status::unavailable(""), 1).is_some());
        assert!(pause_after(&Status::unavailable(""), TRIES).is_none());
        assert!(pause_after(&Status::internal(""), 1).is_none());
    }

    #[test]
    fn the_server_says_when() {
        let mut status = Status::unavailable("");
        status.metadata_mut().insert("grpc-retry-pushback-ms", "400".parse().unwrap());
        assert_eq!(pause_after(&status, 1), Some(Duration::from_millis(400)));
        status.metadata_mut().insert("grpc-retry-pushback-ms", "-1".parse().unwrap());
        assert_eq!(pause_after(&status, 1), None);
    }
}
