//! Plays the scenarios of clients/conformance with the Rust client: `conformance ADDRESS`. A scenario comes as one JSON
//! line on stdin, what was seen goes as one JSON line to stdout.

use std::{collections::HashSet, error::Error as StdError, io::BufRead, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD as BASE64};
use kvfork::{
    Client, Code, Error, Generation, Snapshot, Target, input,
    v1::{
        CountTokensRequest, CreateSnapshotRequest, Delta, FinishReason, Finished, GenerateRequest, Image,
        OutputOptions, Part, Release, RollbackRequest, Rounding, Sampling, SnapshotOptions, Stopping, Usage,
        generate_response::Event, image, part,
    },
};
use serde_json::{Map, Value, json};
use sha2::{Digest, Sha256};
use tokio::time::sleep;

type Seen = Result<Value, Box<dyn StdError>>;

/// What a scenario is given.
struct Given(Map<String, Value>);

impl Given {
    fn text(&self, key: &str) -> &str {
        self.0[key].as_str().expect("a text")
    }

    fn count(&self, key: &str) -> u32 {
        self.0[key].as_u64().expect("a number") as u32
    }

    fn seconds(&self, key: &str) -> Duration {
        Duration::from_secs_f64(self.0[key].as_f64().expect("seconds"))
    }

    fn long_prompt(&self) -> String {
        self.text("prompt").repeat(self.count("times") as usize)
    }

    fn ask(&self, prompt: &str) -> GenerateRequest {
        GenerateRequest { input: Some(input::text(prompt)), ..self.on() }
    }

    fn on(&self) -> GenerateRequest {
        GenerateRequest {
            sampling: Some(input::greedy()),
            stopping: Some(length(self.count("max_tokens"))),
            ..Default::default()
        }
    }
}

/// Exactly this many tokens, whatever the model says.
fn length(count: u32) -> Stopping {
    Stopping { ignore_eos: true, ..input::max_tokens(count) }
}

fn adds_up(usage: &Usage) -> bool {
    usage.cached_tokens + usage.recomputed_tokens + usage.new_tokens == usage.prompt_tokens
}

fn join(deltas: &[Delta], mut start: u32) -> bool {
    deltas.iter().all(|delta| {
        let joins = delta.first_position == start;
        start += delta.token_count;
        joins
    })
}

fn code(error: &Error) -> &'static str {
    match error.code() {
        Code::Cancelled => "CANCELLED",
        Code::InvalidArgument => "INVALID_ARGUMENT",
        Code::NotFound => "NOT_FOUND",
        Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        Code::OutOfRange => "OUT_OF_RANGE",
        Code::Unavailable => "UNAVAILABLE",
        Code::Unauthenticated => "UNAUTHENTICATED",
        Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        _ => "another",
    }
}

fn told(error: &Error) -> Value {
    json!({"code": code(error), "reason": error.reason().map_or("", |reason| reason.as_str())})
}

fn with(mut told: Value, more: Value) -> Value {
    let (told_map, Value::Object(more)) = (told.as_object_mut().expect("an object"), more) else { unreachable!() };
    told_map.extend(more);
    told
}

fn failed<T>(result: Result<T, Error>) -> Result<Error, &'static str> {
    result.err().ok_or("the call was to fail")
}

fn reason(finished: &Finished) -> &'static str {
    FinishReason::try_from(finished.reason).unwrap_or_default().as_str_name().trim_start_matches("FINISH_REASON_")
}

async fn whole(generation: Result<Generation, Error>) -> Result<kvfork::Outcome, Error> {
    generation?.result().await
}

async fn first_deltas(generation: &mut Generation, count: u32) -> Result<Vec<Delta>, Box<dyn StdError>> {
    let mut deltas = Vec::new();
    while deltas.len() < count as usize {
        deltas.push(generation.next_delta().await?.ok_or("it ended too early")?);
    }
    Ok(deltas)
}

async fn stream(client: &Client, given: &Given) -> Seen {
    let mut generation = client.generate(given.ask(given.text("prompt"))).await?;
    let (mut kinds, mut deltas) = (Vec::new(), Vec::new());
    while let Some(event) = generation.next().await? {
        kinds.push(match event {
            Event::Started(_) => "started",
            Event::Finished(_) => "finished",
            Event::Delta(delta) => {
                deltas.push(delta);
                "delta"
            }
            _ => "other",
        });
    }
    kinds.dedup();
    let start = generation.started.prompt_tokens;
    let result = generation.result().await?;
    Ok(json!({
        "events": kinds,
        "reason": reason(&result.finished),
        "completion_tokens": result.usage.completion_tokens,
        "text": result.text,
        "text_is_sum_of_deltas": deltas.iter().map(|delta| delta.text.as_str()).collect::<String>() == result.text,
        "positions_join": join(&deltas, start),
        "receipt_adds_up": adds_up(&result.usage),
    }))
}

async fn marks(client: &Client, given: &Given) -> Seen {
    let mut request = given.ask(given.text("prompt"));
    request.marks = vec![input::prompt_end(), input::after_tokens(given.count("mark_at"))];
    request.save = Some(SnapshotOptions::default());
    let generation = client.generate(request).await?;
    let prompt = generation.started.prompt_tokens;
    let result = generation.result().await?;
    let again = whole(result.marks[&0].generate(given.on()).await).await?;
    let saved = result.snapshot.ok_or("no snapshot")?;
    Ok(json!({
        "marks": result.marks.len(),
        "first_is_prompt_end": result.marks[&0].token_count() == prompt,
        "second_tokens": result.marks[&1].token_count(),
        "saved_is_prompt_and_answer": saved.token_count() == prompt + result.usage.completion_tokens,
        "same_text_from_prompt_end": again.text == result.text,
        "recomputed_tokens": again.usage.recomputed_tokens,
    }))
}

async fn fork(client: &Client, given: &Given) -> Seen {
    let source = create(client, given.text("prompt"), SnapshotOptions::default()).await?;
    let texts = given.0["appends"].as_array().ok_or("appends")?;
    let branches = texts.iter().map(|text| input::append(input::text(text.as_str().unwrap_or_default()))).collect();
    let children = source.fork_into(branches).await?;
    let mut tasks = Vec::new();
    for child in children.clone() {
        let request = given.on();
        tasks.push(tokio::spawn(async move { whole(child.generate(request).await).await }));
    }
    let mut results = Vec::new();
    for task in tasks {
        results.push(task.await??);
    }
    let copies = source.fork(2).await?;
    let own = source.tokens().await?;
    let mut same = true;
    for copy in &copies {
        same &= copy.tokens().await? == own;
    }
    Ok(json!({
        "children": children.len(),
        "distinct_names": children.iter().map(|child| child.name()).collect::<HashSet<_>>().len(),
        "parents_are_the_source": children.iter().all(|child| child.info.parent == source.name()),
        "finished": results.len(),
        "completion_tokens": results.iter().map(|result| result.usage.completion_tokens).sum::<u32>(),
        "receipts_add_up": children[0].usage.as_ref().is_some_and(adds_up)
            && results.iter().all(|result| adds_up(&result.usage)),
        "plain_copies": copies.len(),
        "copies_have_its_tokens": same,
    }))
}

async fn create(client: &Client, prompt: &str, options: SnapshotOptions) -> Result<Snapshot, Error> {
    let (input, options) = (Some(input::text(prompt)), Some(options));
    client.create_snapshot(CreateSnapshotRequest { input, options, ..Default::default() }).await
}

async fn rollback_exact(client: &Client, given: &Given) -> Seen {
    let mut request = given.ask(&given.long_prompt());
    request.marks = vec![input::prompt_end()];
    request.save = Some(SnapshotOptions::default());
    let result = whole(client.generate(request).await).await?;
    let (end, mark) = (result.snapshot.ok_or("no snapshot")?, &result.marks[&0]);
    let cut = end.rollback(Target::Tokens(mark.token_count())).await?;
    let again = whole(cut.generate(given.on()).await).await?;
    let dropped = end.rollback(Target::Drop(3)).await?;
    let ancestor = end.rollback(Target::Ancestor(mark.name().into())).await?;
    let beyond = failed(end.rollback(Target::Tokens(end.token_count() + 1)).await)?;
    let release = RollbackRequest { release: Release::Source.into(), ..Default::default() };
    let last = dropped.rollback_with(Target::Drop(1), release).await?;
    let told_count = beyond.metadata().get("tokenCount").is_some_and(|told| *told == end.token_count().to_string());
    Ok(json!({
        "cut_at_prompt": cut.token_count() == mark.token_count(),
        "same_text_again": again.text == result.text,
        "dropped_three": dropped.token_count() == end.token_count() - 3,
        "to_ancestor": ancestor.token_count() == mark.token_count(),
        "released_source": last.released == [dropped.name()],
        "beyond_end": with(told(&beyond), json!({"told_token_count": told_count})),
    }))
}

async fn rollback_down(client: &Client, given: &Given) -> Seen {
    let source = create(client, &given.long_prompt(), SnapshotOptions::default()).await?;
    let down = RollbackRequest { rounding: Rounding::Down.into(), ..Default::default() };
    let back = source.rollback_with(Target::Tokens(given.count("cut_at")), down).await?;
    let usage = back.usage.ok_or("no receipt")?;
    Ok(json!({
        "token_count": back.token_count(),
        "recomputed_tokens": usage.recomputed_tokens,
        "new_tokens": usage.new_tokens,
    }))
}

async fn errors(client: &Client, given: &Given) -> Seen {
    let sampling = Some(Sampling { temperature: Some(-1.0), top_p: Some(2.0), ..Default::default() });
    let wrong = GenerateRequest { input: Some(input::text("Hi")), sampling, ..Default::default() };
    let fields = failed(client.generate(wrong).await)?;
    let snapshot = failed(client.get_snapshot(given.text("missing")).await)?;
    let model = failed(client.model(given.text("model")).await)?;
    let words = "word ".repeat(given.count("too_many_words") as usize);
    let request = GenerateRequest { input: Some(input::text(words)), ..Default::default() };
    let long = failed(client.generate(request).await)?;
    let mut paths: Vec<_> = fields.fields().iter().map(|field| &field.path).collect();
    paths.sort();
    let mut keys: Vec<_> = long.metadata().keys().collect();
    keys.sort();
    let named = |error: &Error| {
        with(told(error), json!({"resource": error.resource(), "snapshot_is_gone": error.snapshot_is_gone()}))
    };
    Ok(json!({
        "fields": with(told(&fields), json!({"fields": paths})),
        "snapshot": named(&snapshot),
        "model": named(&model),
        "too_long": with(told(&long), json!({"metadata": keys})),
    }))
}

async fn expired(client: &Client, given: &Given) -> Seen {
    let ttl = Some(prost_types::Duration { seconds: given.count("ttl_seconds").into(), nanos: 0 });
    let options = SnapshotOptions { ttl, ..Default::default() };
    let snapshot = create(client, given.text("prompt"), options).await?;
    sleep(given.seconds("wait_seconds")).await;
    let request = GenerateRequest { stopping: Some(length(4)), ..Default::default() };
    let error = failed(snapshot.generate(request).await)?;
    Ok(with(
        told(&error),
        json!({
            "told_expire_time": error.metadata().contains_key("expireTime"),
            "events_before": 0, // there is no generation to read from
            "handle_knows": snapshot.gone().is_some_and(|gone| gone.reason() == error.reason()),
        }),
    ))
}

async fn stop(client: &Client, given: &Given) -> Seen {
    let request = GenerateRequest { save: Some(SnapshotOptions::default()), ..given.ask(given.text("prompt")) };
    let mut generation = client.generate(request).await?;
    first_deltas(&mut generation, given.count("after_deltas")).await?;
    let was_running = generation.stop().await?;
    let started = generation.started.clone();
    let result = generation.result().await?;
    let total = started.prompt_tokens + result.usage.completion_tokens;
    Ok(json!({
        "was_running": was_running,
        "reason": reason(&result.finished),
        "snapshot_holds_all": result.snapshot.ok_or("no snapshot")?.token_count() == total,
        "receipt_adds_up": adds_up(&result.usage),
        "was_running_later": client.stop(started.generation).await?,
    }))
}

async fn cancel_prefill(client: &Client, given: &Given) -> Seen {
    let output = Some(OutputOptions { progress: true, ..Default::default() });
    let request = GenerateRequest { output, ..given.ask(&given.long_prompt()) };
    let mut generation = client.generate(request).await?;
    let mut deltas = 0;
    while let Some(event) = generation.next().await? {
        match event {
            Event::Progress(progress) if progress.done_tokens < progress.total_tokens => break,
            Event::Delta(_) => deltas += 1,
            _ => {}
        }
    }
    generation.cancel();
    Ok(json!({"code": code(&failed(generation.next().await)?), "deltas": deltas}))
}

async fn cancel_decode(client: &Client, given: &Given) -> Seen {
    let mut generation = client.generate(given.ask(given.text("prompt"))).await?;
    let deltas = first_deltas(&mut generation, given.count("after_deltas")).await?;
    generation.cancel();
    Ok(json!({"code": code(&failed(generation.result().await)?), "deltas": deltas.len()}))
}

async fn deadline(client: &Client, given: &Given) -> Seen {
    let hurried = client.with_timeout(given.seconds("timeout_seconds"));
    let mut generation = hurried.generate(given.ask(given.text("prompt"))).await?;
    let mut deltas = 0;
    let error = loop {
        match generation.next_delta().await {
            Ok(Some(_)) => deltas += 1,
            Ok(None) => return Err("it ended well".into()),
            Err(error) => break error,
        }
    };
    Ok(json!({"code": code(&error), "some_deltas": deltas > 0}))
}

async fn save_on_cancel(client: &Client, given: &Given) -> Seen {
    let id = given.text("snapshot_id");
    let save = Some(SnapshotOptions { snapshot_id: id.into(), ..Default::default() });
    let request = GenerateRequest { save, save_on_cancel: true, ..given.ask(given.text("prompt")) };
    let mut generation = client.generate(request).await?;
    first_deltas(&mut generation, given.count("after_deltas")).await?;
    generation.cancel();
    let ended = failed(generation.next().await)?;
    let kept = loop {
        // It is there a moment after the call has ended.
        match client.get_snapshot(format!("snapshots/{id}")).await {
            Ok(found) => break found,
            Err(error) if error.snapshot_is_gone() => sleep(Duration::from_millis(50)).await,
            Err(error) => return Err(error.into()),
        }
    };
    let request = GenerateRequest { stopping: Some(length(2)), ..Default::default() };
    let more = whole(kept.generate(request).await).await?;
    Ok(json!({
        "code": code(&ended),
        "longer_than_prompt": kept.token_count() > generation.started.prompt_tokens,
        "goes_on": more.usage.completion_tokens == 2,
    }))
}

async fn abandoned(client: &Client, given: &Given) -> Seen {
    let mut generation = client.generate(given.ask(given.text("prompt"))).await?;
    first_deltas(&mut generation, 1).await?;
    drop(generation);
    Ok(json!({"dropped": true}))
}

async fn slow_reader(client: &Client, given: &Given) -> Seen {
    let mut generation = client.generate(given.ask(given.text("prompt"))).await?;
    let mut deltas = first_deltas(&mut generation, 1).await?;
    sleep(given.seconds("pause_seconds")).await;
    while let Some(delta) = generation.next_delta().await? {
        deltas.push(delta);
    }
    let start = generation.started.prompt_tokens;
    let result = generation.result().await?;
    Ok(json!({
        "text": result.text,
        "tokens_in_deltas": deltas.iter().map(|delta| delta.token_count).sum::<u32>(),
        "completion_tokens": result.usage.completion_tokens,
        "positions_join": join(&deltas, start),
    }))
}

async fn big_message(client: &Client, given: &Given) -> Seen {
    let long = given.text("word").repeat(given.count("words") as usize);
    let request =
        CountTokensRequest { input: Some(input::text(long.as_str())), include_rendered: true, ..Default::default() };
    let counted = client.count_tokens(request).await?;
    let too_long = given.text("word").repeat(given.count("too_many_words") as usize);
    let request = CountTokensRequest { input: Some(input::text(too_long)), ..Default::default() };
    let over = failed(client.count_tokens(request).await)?;
    Ok(json!({
        "text_came_back": counted.text.ends_with(&long),
        "reply_over_4_mib": counted.text.len() > 4 << 20,
        "over_limit": told(&over),
    }))
}

async fn image(_: &Client, given: &Given) -> Seen {
    let client = Client::new(given.text("peer"))?;
    let file = BASE64.decode(given.text("png_base64"))?;
    let showing = |picture| Some(input::raw([input::text_part(given.text("words_before")), picture]));
    let request = CreateSnapshotRequest { input: showing(input::image(file.as_slice())), ..Default::default() };
    let kept = client.create_snapshot(request).await?;
    let source = Some(image::Source::Sha256(Sha256::digest(&file).to_vec()));
    let known = Part { kind: Some(part::Kind::Image(Image { source, ..Default::default() })), ..Default::default() };
    let again = client.count_tokens(CountTokensRequest { input: showing(known), ..Default::default() }).await?;
    let result = whole(kept.generate(given.ask(given.text("question"))).await).await?;
    let request = CreateSnapshotRequest { input: Some(input::raw([input::image("no picture")])), ..Default::default() };
    let no = failed(client.create_snapshot(request).await)?;
    Ok(json!({
        "spans": kept.info.image_spans.len(),
        "image_tokens_counted": kept.usage.is_some_and(|usage| usage.image_tokens > 0),
        "known_by_digest": again.total_tokens == kept.token_count(),
        "recomputed_tokens": result.usage.recomputed_tokens,
        "completion_tokens": result.usage.completion_tokens,
        "no_picture": told(&no),
    }))
}

async fn retry(_: &Client, given: &Given) -> Seen {
    let client = Client::new(given.text("peer"))?;
    let request = GenerateRequest { input: Some(input::text(given.text("prompt"))), ..Default::default() };
    let before = whole(client.generate(request.clone()).await).await?;
    let mut generation = client.generate(request.clone()).await?;
    let mut events = 0;
    let after = loop {
        match generation.next().await {
            Ok(Some(_)) => events += 1,
            Ok(None) => return Err("it ended well".into()),
            Err(error) => break error,
        }
    };
    let no = failed(client.generate(request).await)?;
    let made = client.snapshot("snapshots/source").fork(2).await?;
    Ok(json!({
        "before_started": before.text,
        "after_started": {"code": code(&after), "events": events},
        "told_not_to": told(&no),
        "fork": made.len(),
    }))
}

async fn socket(client: &Client, given: &Given) -> Seen {
    let other = Client::builder(given.text("socket")).token(given.text("token")).build()?;
    let (here, there) = (client.server_info().await?, other.server_info().await?);
    Ok(json!({"same_instance": here.instance == there.instance}))
}

#[cfg(feature = "tls")]
async fn secured(_: &Client, given: &Given) -> Seen {
    use kvfork::tls::{Certificate, ClientTlsConfig};

    let peer = given.text("peer");
    let trusting = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(std::fs::read(given.text("ca"))?));
    let known = Client::builder(peer).tls(trusting.clone()).token(given.text("token")).build()?;
    let nobody = Client::builder(peer).tls(trusting.clone()).token(given.text("unknown_token")).build()?;
    let unknown = failed(nobody.server_info().await)?;
    let stranger = Client::builder(peer).tls(trusting).build()?;
    let without = failed(stranger.server_info().await)?;
    let wary = Client::builder(peer).tls(ClientTlsConfig::new().with_native_roots()).retry(false).build()?;
    let other = failed(wary.server_info().await)?;
    Ok(json!({
        "with_token": !known.server_info().await?.instance.is_empty(),
        "without_token": told(&without),
        "unknown_token": told(&unknown),
        "other_roots": code(&other),
        "token_in_clear_refused": Client::builder("example.org:443").token(given.text("token")).build().is_err(),
    }))
}

async fn drain(client: &Client, given: &Given) -> Seen {
    let request = GenerateRequest { save: Some(SnapshotOptions::default()), ..given.ask(given.text("prompt")) };
    let mut generation = client.generate(request).await?;
    first_deltas(&mut generation, 1).await?;
    let impatient = Client::builder(given.text("address")).retry(false).build()?;
    while !impatient.server_info().await?.draining {
        sleep(Duration::from_millis(20)).await;
    }
    let refused = failed(impatient.generate(given.ask(given.text("prompt"))).await)?;
    let result = generation.result().await?;
    Ok(json!({
        "new_call": told(&refused),
        "running_ended": reason(&result.finished),
        "snapshot_made": result.snapshot.is_some(),
    }))
}

async fn play(scenario: &str, client: &Client, given: &Given) -> Seen {
    match scenario {
        "stream" => stream(client, given).await,
        "marks" => marks(client, given).await,
        "fork" => fork(client, given).await,
        "rollback-exact" => rollback_exact(client, given).await,
        "rollback-down" => rollback_down(client, given).await,
        "errors" => errors(client, given).await,
        "expired" => expired(client, given).await,
        "stop" => stop(client, given).await,
        "cancel-prefill" => cancel_prefill(client, given).await,
        "cancel-decode" => cancel_decode(client, given).await,
        "deadline" => deadline(client, given).await,
        "save-on-cancel" => save_on_cancel(client, given).await,
        "abandoned" => abandoned(client, given).await,
        "slow-reader" => slow_reader(client, given).await,
        "big-message" => big_message(client, given).await,
        "image" => image(client, given).await,
        "retry" => retry(client, given).await,
        "socket" => socket(client, given).await,
        #[cfg(feature = "tls")]
        "secured" => secured(client, given).await,
        "drain" => drain(client, given).await,
        _ => Err("this driver does not know the scenario".into()),
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn StdError>> {
    let address = std::env::args().nth(1).ok_or("usage: conformance ADDRESS")?;
    let client = Client::builder(&address).timeout(Duration::from_secs(600)).build()?;
    for line in std::io::stdin().lock().lines() {
        let asked: Value = serde_json::from_str(&line?)?;
        let scenario = asked["scenario"].as_str().ok_or("no scenario")?;
        let given = Given(asked["given"].as_object().cloned().ok_or("nothing given")?);
        let line = match play(scenario, &client, &given).await {
            Ok(observed) => json!({"scenario": scenario, "observed": observed}),
            Err(error) => json!({"scenario": scenario, "error": error.to_string()}),
        };
        println!("{line}");
    }
    Ok(())
}
