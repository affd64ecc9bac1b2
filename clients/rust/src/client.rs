//! A connection to one server.

use std::{collections::VecDeque, time::Duration};

use tonic::transport::Channel;
use uuid::Uuid;

use crate::{
    AddressError, Builder, Error, Generation, Snapshot,
    connection::{Connection, MAX_MESSAGE_BYTES},
    input::continues,
    v1::{
        self, CountTokensRequest, CountTokensResponse, CreateSnapshotRequest, ExtendSnapshotsRequest,
        ExtendSnapshotsResponse, GenerateRequest, GetServerInfoResponse, ListSnapshotsRequest, Model,
        WatchSnapshotsRequest, WatchSnapshotsResponse, inference_service_client::InferenceServiceClient,
        server_service_client::ServerServiceClient, snapshot_service_client::SnapshotServiceClient,
    },
};

/// A connection to one server. A clone is cheap and shares it.
#[derive(Clone)]
pub struct Client {
    pub(crate) connection: Connection,
}

pub(crate) fn inference(channel: Channel) -> InferenceServiceClient<Channel> {
    InferenceServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES)
}

pub(crate) fn snapshots(channel: Channel) -> SnapshotServiceClient<Channel> {
    SnapshotServiceClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES)
}

fn server(channel: Channel) -> ServerServiceClient<Channel> {
    ServerServiceClient::new(channel)
}

impl Client {
    /// To "host:port" or "unix:/path", within a Tokio runtime. It connects when it is first used.
    pub fn new(address: &str) -> Result<Client, AddressError> {
        Client::builder(address).build()
    }

    /// With settings: token, TLS, timeout, retry.
    pub fn builder(address: &str) -> Builder {
        Builder::new(address)
    }

    pub(crate) fn over(connection: Connection) -> Client {
        Client { connection }
    }

    /// The same connection with another timeout for its calls. A deadline loses the end of a stream,
    /// `Stopping::time_limit` does not.
    pub fn with_timeout(&self, timeout: Duration) -> Client {
        let mut connection = self.connection.clone();
        connection.timeout = Some(timeout);
        Client { connection }
    }

    /// The channel, for the generated clients in [`v1`]. Their `Status` becomes an [`Error`] with `Error::from`.
    pub fn channel(&self) -> Channel {
        self.connection.channel.clone()
    }

    /// Starts a generation. It is admitted when this returns; dropping the future or what it gives cancels on the server.
    pub async fn generate(&self, request: GenerateRequest) -> Result<Generation, Error> {
        Generation::open(self, request, None).await
    }

    /// Prefills an input and names the result; `marks` has the snapshots of its marks.
    pub async fn create_snapshot(&self, mut request: CreateSnapshotRequest) -> Result<Snapshot, Error> {
        continues(&mut request.input, &request.parent);
        give_id(&mut request.request_id);
        let call = async |channel, request| inference(channel).create_snapshot(request).await;
        let reply = self.connection.call(request, call).await?.0.into_inner();
        let mut made = Snapshot::new(self, reply.snapshot.unwrap_or_default(), reply.usage);
        made.marks = (0..).zip(reply.marked).map(|(index, info)| (index, Snapshot::new(self, info, None))).collect();
        Ok(made)
    }

    /// A handle for a name known from elsewhere. Asks the server nothing: `info` has the name alone.
    pub fn snapshot(&self, name: impl Into<String>) -> Snapshot {
        Snapshot::new(self, v1::Snapshot { name: name.into(), ..Default::default() }, None)
    }

    /// Looks a snapshot up.
    pub async fn get_snapshot(&self, name: impl Into<String>) -> Result<Snapshot, Error> {
        let mut found = self.snapshot(name);
        found.refresh().await?;
        Ok(found)
    }

    /// The caller's snapshots, oldest first, page after page as they are needed.
    pub fn list_snapshots(&self, request: ListSnapshotsRequest) -> Snapshots {
        Snapshots { client: self.clone(), request: Some(request), page: VecDeque::new() }
    }

    /// Gives up to 1000 snapshots more time. Missing names are told in the reply, and no error.
    pub async fn extend_snapshots(&self, request: ExtendSnapshotsRequest) -> Result<ExtendSnapshotsResponse, Error> {
        let call = async |channel, request| snapshots(channel).extend_snapshots(request).await;
        Ok(self.connection.call(request, call).await?.0.into_inner())
    }

    /// Follows changes: first what there is, then Synced, then what happens. Dropping the stream ends it; its `Status`
    /// becomes an [`Error`] with `Error::from`.
    pub async fn watch_snapshots(
        &self,
        request: WatchSnapshotsRequest,
    ) -> Result<tonic::Streaming<WatchSnapshotsResponse>, Error> {
        let call = async |channel, request| snapshots(channel).watch_snapshots(request).await;
        Ok(self.connection.call(request, call).await?.0.into_inner())
    }

    /// Ends a generation by its name, cleanly. False if it had ended already.
    pub async fn stop(&self, generation: impl Into<String>) -> Result<bool, Error> {
        let request = v1::StopGenerationRequest { generation: generation.into(), ..Default::default() };
        let call = async |channel, request| inference(channel).stop_generation(request).await;
        Ok(self.connection.call(request, call).await?.0.into_inner().was_running)
    }

    /// Renders and tokenizes without running the model.
    pub async fn count_tokens(&self, mut request: CountTokensRequest) -> Result<CountTokensResponse, Error> {
        continues(&mut request.input, &request.parent);
        let call = async |channel, request| inference(channel).count_tokens(request).await;
        Ok(self.connection.call(request, call).await?.0.into_inner())
    }

    /// Versions, limits and features.
    pub async fn server_info(&self) -> Result<GetServerInfoResponse, Error> {
        let call = async |channel, request| server(channel).get_server_info(request).await;
        Ok(self.connection.call(v1::GetServerInfoRequest::default(), call).await?.0.into_inner())
    }

    /// One model; an empty name means the only one.
    pub async fn model(&self, name: impl Into<String>) -> Result<Model, Error> {
        let call = async |channel, request| server(channel).get_model(request).await;
        let reply =
            self.connection.call(v1::GetModelRequest { name: name.into(), ..Default::default() }, call).await?.0;
        Ok(reply.into_inner().model.unwrap_or_default())
    }

    /// Scheduler, memory and store in numbers.
    pub async fn cache_stats(&self) -> Result<v1::CacheStats, Error> {
        let call = async |channel, request| server(channel).get_cache_stats(request).await;
        let reply = self.connection.call(v1::GetCacheStatsRequest::default(), call).await?.0;
        Ok(reply.into_inner().stats.unwrap_or_default())
    }
}

/// A listing that is read as it is needed.
pub struct Snapshots {
    client: Client,
    request: Option<ListSnapshotsRequest>, // None: there are no more pages
    page: VecDeque<v1::Snapshot>,
}

impl Snapshots {
    /// The next snapshot; `None`: the end.
    pub async fn next(&mut self) -> Result<Option<Snapshot>, Error> {
        loop {
            if let Some(info) = self.page.pop_front() {
                return Ok(Some(Snapshot::new(&self.client, info, None)));
            }
            let Some(mut request) = self.request.take() else { return Ok(None) };
            let call = async |channel, request| snapshots(channel).list_snapshots(request).await;
            let reply = self.client.connection.call(request.clone(), call).await?.0.into_inner();
            self.page = reply.snapshots.into();
            request.page_token = reply.next_page_token;
            self.request = (!request.page_token.is_empty()).then_some(request);
        }
    }
}

/// A call with an id returns what it made, however often it is repeated.
pub(crate) fn give_id(id: &mut String) {
    if id.is_empty() {
        *id = Uuid::new_v4().to_string();
    }
}
