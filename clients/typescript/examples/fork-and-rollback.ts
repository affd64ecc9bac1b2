/** One beginning, three endings, and back to the beginning: node dist/examples/fork-and-rollback.js [ADDRESS] */
import { Client, greedy, type Snapshot, text } from "../src/index.js";
import { Release } from "../src/v1.js";

const beginning = "The lighthouse keeper climbed the stairs for the last time, opened the door and saw";
const endings = [" a ship", " the sunrise", " nothing"];

await using client = new Client(process.argv[2] ?? "127.0.0.1:50051");
const start = await client.createSnapshot({ input: text(beginning) });
const branches = await start.fork(endings.map((ending) => ({ append: text(ending) })));
const stories = await Promise.all(branches.map(rest)); // the server decodes them together
stories.forEach((story, index) => console.log(`…${endings[index]}${story}\n`));

// The first branch is not needed any more: back to where it left the others, and let its name go.
const again = await branches[0]!.rollback({ tokenCount: start.tokenCount }, { release: Release.SOURCE });
console.log(`rolled back to ${again.tokenCount} tokens, ${again.usage?.recomputedTokens} recomputed`);
console.log(`…${await rest(again)}`);
for (const snapshot of [again, ...branches.slice(1), start]) {
  await snapshot.delete();
}

/** How a story goes on, with the receipt of getting there. */
async function rest(branch: Snapshot): Promise<string> {
  const { text, usage } = await branch.generate({ sampling: greedy(), stopping: { maxTokens: 24 } }).result();
  return `${text}\n  [restored ${usage?.cachedTokens}, recomputed ${usage?.recomputedTokens}, new ${usage?.newTokens}]`;
}
