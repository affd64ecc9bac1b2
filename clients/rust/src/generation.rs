//! A running generation: what comes, added up.

use std::collections::{BTreeMap, HashMap};

use tokio::time::Instant;
use tonic::{Code, Streaming};

use crate::{
    Client, Error, Reason, Snapshot,
    client::inference,
    connection::{by, ended_by},
    input::continues,
    v1::{Channel, Delta, Finished, GenerateRequest, GenerateResponse, Started, Usage, generate_response::Event},
};

/// A running generation. Dropping it cancels on the server: nobody computes for nobody. To end it early but keep its
/// receipt and snapshot, call [`stop`](Generation::stop) and read on.
pub struct Generation {
    client: Client,
    source: Option<Snapshot>,
    stream: Option<Streaming<GenerateResponse>>, // None: it is over
    deadline: Option<Instant>,
    first: Option<Event>,
    text: HashMap<i32, String>,
    error: Option<Error>,
    /// What the server said first.
    pub started: Started,
    /// Snapshots made so far, by the index of their mark.
    pub marks: BTreeMap<u32, Snapshot>,
    /// What the server said last; `None` before it was read.
    pub finished: Option<Finished>,
    /// The final state, if it was asked for and could be kept.
    pub snapshot: Option<Snapshot>,
}

/// A whole generation. `text` is the answer; what a model reasons or calls is told apart where it can be.
pub struct Outcome {
    pub text: String,
    pub reasoning: String,
    pub tool_calls: String,
    pub finished: Finished,
    /// The receipt: prompt_tokens = cached_tokens + recomputed_tokens + new_tokens.
    pub usage: Usage,
    /// The final state, if it was asked for and could be kept.
    pub snapshot: Option<Snapshot>,
    /// Snapshots of the marks, by their index.
    pub marks: BTreeMap<u32, Snapshot>,
}

impl Generation {
    /// Waits for the first message, since a call that never began may be made again.
    pub(crate) async fn open(
        client: &Client,
        mut request: GenerateRequest,
        source: Option<&Snapshot>,
    ) -> Result<Generation, Error> {
        continues(&mut request.input, &request.parent);
        let call = async |channel, request| {
            let mut stream = inference(channel).generate(request).await?.into_inner();
            let first = stream.message().await?;
            Ok((stream, first))
        };
        let ((stream, first), deadline) =
            client.connection.call(request, call).await.map_err(|error| match source {
                Some(source) => source.noted(error),
                None => error,
            })?;
        let first = first.and_then(|message| message.event);
        let Some(Event::Started(started)) = &first else { return Err(truncated()) };
        Ok(Generation {
            client: client.clone(),
            source: source.cloned(),
            stream: Some(stream),
            deadline,
            started: started.clone(),
            first,
            text: HashMap::new(),
            error: None,
            marks: BTreeMap::new(),
            finished: None,
            snapshot: None,
        })
    }

    /// The next event; `None` after Finished. An error is told again however often it is asked.
    pub async fn next(&mut self) -> Result<Option<Event>, Error> {
        if let Some(first) = self.first.take() {
            return Ok(Some(first));
        }
        loop {
            if let Some(error) = &self.error {
                return Err(error.clone());
            }
            let Some(stream) = &mut self.stream else { return Ok(None) };
            let message = match by(self.deadline, stream.message()).await {
                Ok(Ok(Some(message))) => message,
                Ok(Ok(None)) => return Err(self.fail(truncated())),
                Ok(Err(status)) => return Err(self.fail(ended_by(self.deadline, status))),
                Err(passed) => return Err(self.fail(passed)),
            };
            if let Some(event) = message.event {
                self.add(&event).await;
                return Ok(Some(event));
            } // else a kind that is newer than this client
        }
    }

    /// The next piece of text; `None` after the last one.
    pub async fn next_delta(&mut self) -> Result<Option<Delta>, Error> {
        while let Some(event) = self.next().await? {
            if let Event::Delta(delta) = event {
                return Ok(Some(delta));
            }
        }
        Ok(None)
    }

    /// Reads to the end.
    pub async fn result(mut self) -> Result<Outcome, Error> {
        while self.next().await?.is_some() {}
        let finished = self.finished.take().ok_or_else(truncated)?;
        Ok(Outcome {
            text: self.said(Channel::Unspecified),
            reasoning: self.said(Channel::Reasoning),
            tool_calls: self.said(Channel::ToolCall),
            usage: finished.usage.unwrap_or_default(),
            finished,
            snapshot: self.snapshot.take(),
            marks: std::mem::take(&mut self.marks),
        })
    }

    /// Asks the server to end cleanly: read on, and Finished still comes, with receipt and snapshot. False if it had
    /// ended.
    pub async fn stop(&self) -> Result<bool, Error> {
        self.client.stop(&self.started.generation).await
    }

    /// Gives up at once, as dropping it does; what is read then is an error. After the end it does nothing.
    pub fn cancel(&mut self) {
        if self.stream.is_some() {
            self.first = None;
            self.fail(Error::new(Code::Cancelled, None, "cancelled by the caller"));
        }
    }

    async fn add(&mut self, event: &Event) {
        match event {
            Event::Marked(marked) => {
                if let Some(info) = &marked.snapshot {
                    self.marks.insert(marked.mark, Snapshot::new(&self.client, info.clone(), None));
                }
            }
            Event::Delta(delta) => self.text.entry(delta.channel).or_default().push_str(&delta.text),
            Event::Finished(finished) => {
                if let Some(info) = &finished.snapshot {
                    self.snapshot = Some(Snapshot::new(&self.client, info.clone(), finished.usage));
                }
                self.finished = Some(finished.clone());
                if let Some(mut stream) = self.stream.take() {
                    // Takes the status, so that the server does not see a cancellation; Finished was whole.
                    let _ = by(self.deadline, stream.message()).await;
                }
            }
            _ => {} // nothing to add up, or newer than this code
        }
    }

    fn said(&mut self, channel: Channel) -> String {
        self.text.remove(&channel.into()).unwrap_or_default()
    }

    fn fail(&mut self, error: Error) -> Error {
        self.stream = None;
        let error = match &self.source {
            Some(source) => source.noted(error),
            None => error,
        };
        self.error = Some(error.clone());
        error
    }
}

fn truncated() -> Error {
    Error::new(Code::Internal, Some(Reason::Truncated), "the stream ended without its last message")
}
