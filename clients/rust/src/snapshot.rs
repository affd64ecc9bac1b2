//! A handle: a name for a state that never changes.

use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock},
};

use crate::{
    Client, Error, Generation,
    client::{give_id, inference, snapshots},
    input::continues,
    v1::{self, ForkBranch, ForkRequest, GenerateRequest, RollbackRequest, Usage, rollback_request},
};

/// A handle. A clone is the same handle.
#[derive(Clone)]
pub struct Snapshot {
    client: Client,
    /// What the server last said of it.
    pub info: v1::Snapshot,
    /// The receipt of the call that made it; `None` if it was looked up.
    pub usage: Option<Usage>,
    /// Of `create_snapshot`, by the index of their mark.
    pub marks: BTreeMap<u32, Snapshot>,
    /// What its rollback let go of.
    pub released: Vec<String>,
    gone: Arc<OnceLock<Error>>,
}

/// Where a rollback cuts.
pub enum Target {
    /// Keep this many tokens.
    Tokens(u32),
    /// Drop this many from the end.
    Drop(u32),
    /// Back to a snapshot on the way, by its name.
    Ancestor(String),
}

impl Snapshot {
    pub(crate) fn new(client: &Client, info: v1::Snapshot, usage: Option<Usage>) -> Snapshot {
        let (marks, released) = (BTreeMap::new(), Vec::new());
        Snapshot { client: client.clone(), info, usage, marks, released, gone: Arc::default() }
    }

    /// "snapshots/{id}".
    pub fn name(&self) -> &str {
        &self.info.name
    }

    /// The length of its prefix.
    pub fn token_count(&self) -> u32 {
        self.info.token_count
    }

    /// The error by which the server told that it is no more.
    pub fn gone(&self) -> Option<&Error> {
        self.gone.get()
    }

    /// Goes on from here.
    pub async fn generate(&self, mut request: GenerateRequest) -> Result<Generation, Error> {
        request.parent = self.name().to_owned();
        Generation::open(&self.client, request, Some(self)).await
    }

    /// So many names for this state: nothing is copied. All or none.
    pub async fn fork(&self, count: usize) -> Result<Vec<Snapshot>, Error> {
        self.fork_into(vec![ForkBranch::default(); count]).await
    }

    /// One child per branch, each with what it appends. All or none. Every child's `usage` is the receipt of the call.
    pub async fn fork_into(&self, mut branches: Vec<ForkBranch>) -> Result<Vec<Snapshot>, Error> {
        for branch in &mut branches {
            continues(&mut branch.append, self.name());
        }
        let mut request = ForkRequest { parent: self.name().to_owned(), branches, ..Default::default() };
        give_id(&mut request.request_id);
        let call = async |channel, request| inference(channel).fork(request).await;
        let reply = self.noting(self.client.connection.call(request, call).await)?.0.into_inner();
        Ok(reply.snapshots.into_iter().map(|info| Snapshot::new(&self.client, info, reply.usage)).collect())
    }

    /// A snapshot of a shorter prefix. This one stays.
    pub async fn rollback(&self, target: Target) -> Result<Snapshot, Error> {
        self.rollback_with(target, RollbackRequest::default()).await
    }

    /// The same with the request's other fields: `rounding`, `release`, `options`, `max_recompute_tokens`.
    pub async fn rollback_with(&self, target: Target, mut request: RollbackRequest) -> Result<Snapshot, Error> {
        request.source = self.name().to_owned();
        request.target = Some(match target {
            Target::Tokens(count) => rollback_request::Target::TokenCount(count),
            Target::Drop(count) => rollback_request::Target::DropTokens(count),
            Target::Ancestor(name) => rollback_request::Target::Ancestor(name),
        });
        give_id(&mut request.request_id);
        let call = async |channel, request| inference(channel).rollback(request).await;
        let reply = self.noting(self.client.connection.call(request, call).await)?.0.into_inner();
        let mut made = Snapshot::new(&self.client, reply.snapshot.unwrap_or_default(), reply.usage);
        made.released = reply.released;
        Ok(made)
    }

    /// Reads `info` again. Does not count as use.
    pub async fn refresh(&mut self) -> Result<(), Error> {
        self.info = self.get(false).await?.snapshot.unwrap_or_default();
        Ok(())
    }

    /// The prefix as token ids.
    pub async fn tokens(&self) -> Result<Vec<u32>, Error> {
        Ok(self.get(true).await?.token_ids)
    }

    /// Changes labels, expiration or pinned: those that are set.
    pub async fn update(&mut self, mut change: v1::Snapshot) -> Result<(), Error> {
        change.name = self.name().to_owned();
        let request = v1::UpdateSnapshotRequest { snapshot: Some(change), ..Default::default() };
        let call = async |channel, request| snapshots(channel).update_snapshot(request).await;
        let reply = self.noting(self.client.connection.call(request, call).await)?.0.into_inner();
        self.info = reply.snapshot.unwrap_or_default();
        Ok(())
    }

    /// Drops the name; state shared with others stays. No error if it is gone already.
    pub async fn delete(&self) -> Result<(), Error> {
        let request = v1::DeleteSnapshotRequest {
            name: self.name().to_owned(),
            allow_missing: true,
            stop_active: true,
            ..Default::default()
        };
        let call = async |channel, request| snapshots(channel).delete_snapshot(request).await;
        self.client.connection.call(request, call).await?;
        Ok(())
    }

    async fn get(&self, include_tokens: bool) -> Result<v1::GetSnapshotResponse, Error> {
        let request = v1::GetSnapshotRequest { name: self.name().to_owned(), include_tokens, ..Default::default() };
        let call = async |channel, request| snapshots(channel).get_snapshot(request).await;
        Ok(self.noting(self.client.connection.call(request, call).await)?.0.into_inner())
    }

    fn noting<T>(&self, result: Result<T, Error>) -> Result<T, Error> {
        result.map_err(|error| self.noted(error))
    }

    /// Remembers an error that tells the snapshot's end.
    pub(crate) fn noted(&self, error: Error) -> Error {
        if error.snapshot_is_gone() && (error.resource().is_empty() || error.resource() == self.name()) {
            let _ = self.gone.set(error.clone()); // the first one is as good as any later
        }
        error
    }
}
