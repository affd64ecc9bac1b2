//! One beginning, three endings, and back to the beginning: `cargo run --example fork_and_rollback [ADDRESS]`

use kvfork::{
    Client, Error, Snapshot, Target, input,
    v1::{CreateSnapshotRequest, GenerateRequest, Release, RollbackRequest},
};

const BEGINNING: &str = "The lighthouse keeper climbed the stairs for the last time, opened the door and saw";
const ENDINGS: [&str; 3] = [" a ship", " the sunrise", " nothing"];

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).unwrap_or("127.0.0.1:50051".into());
    let client = Client::new(&address)?;
    let request = CreateSnapshotRequest { input: Some(input::text(BEGINNING)), ..Default::default() };
    let start = client.create_snapshot(request).await?;

    let branches = start.fork_into(ENDINGS.map(|ending| input::append(input::text(ending))).into()).await?;
    let tasks: Vec<_> = branches.iter().cloned().map(|branch| tokio::spawn(rest(branch))).collect();
    for (ending, task) in ENDINGS.iter().zip(tasks) {
        println!("…{ending}{}\n", task.await??); // the server decodes them together
    }

    // The first branch is not needed any more: back to where it left the others, and let its name go.
    let release = RollbackRequest { release: Release::Source.into(), ..Default::default() };
    let again = branches[0].rollback_with(Target::Tokens(start.token_count()), release).await?;
    let recomputed = again.usage.map_or(0, |usage| usage.recomputed_tokens);
    println!("rolled back to {} tokens, {recomputed} recomputed\n…{}", again.token_count(), rest(again.clone()).await?);
    for snapshot in branches[1..].iter().chain([&again, &start]) {
        snapshot.delete().await?;
    }
    Ok(())
}

/// How a story goes on, with the receipt of getting there.
async fn rest(branch: Snapshot) -> Result<String, Error> {
    let request = GenerateRequest {
        sampling: Some(input::greedy()),
        stopping: Some(input::max_tokens(24)),
        ..Default::default()
    };
    let told = branch.generate(request).await?.result().await?;
    let usage = told.usage;
    Ok(format!(
        "{}\n  [restored {}, recomputed {}, new {}]",
        told.text, usage.cached_tokens, usage.recomputed_tokens, usage.new_tokens
    ))
}
