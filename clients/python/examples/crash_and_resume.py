"""Crash in the middle of a task, and go on from where it was: `python crash_and_resume.py`.

A server with `--store-dir` keeps a snapshot that was asked for with `Durability.DISK` through anything: here it is
killed with SIGKILL, which no process hears coming, and another one opens the same folder. The name is all that the
agent has to remember. It goes on from there: nothing is computed again, and the continuation is the one it would have
been, down to the last bit of every log-probability.
"""

from __future__ import annotations

import sys
import tempfile

from kvfork_client import Client, Durability, GenerationResult, Sampling, SaveOptions, Snapshot, Stopping
from stage import Stage, play, serving

JOURNAL = """\
Journal of the survey ship Meridian, written by the mate. We left Lund on the first of May with eleven hands, two \
boats and instruments for three months. On the fourth the fog came down and we sounded every half hour: forty \
fathoms, sand and shell. On the sixth we found the reef that no chart has, a mile long and dry at low water, and \
named it after the cook, who had seen it first. On the ninth we measured the strait and wrote the depths into the \
book, every cable's length from shore to shore. On the tenth the barometer fell and the captain had both boats \
lashed down. On the eleventh"""
GREEDY = Sampling(temperature=0)


def go_on(snapshot: Snapshot) -> tuple[GenerationResult[Snapshot], list[float]]:
    """The next 16 tokens and the log-probability of each."""
    likelihoods: list[float] = []
    stopping = Stopping(max_tokens=16, ignore_eos=True)
    with snapshot.generate(sampling=GREEDY, stopping=stopping, token_ids=True, top_logprobs=0) as generation:
        for delta in generation:
            likelihoods += [token.logprob for token in delta.logprobs]
        return generation.result(), likelihoods


def main(stage: Stage) -> None:
    keep = SaveOptions(snapshot_id="survey-day-11", durability=Durability.DISK)
    with tempfile.TemporaryDirectory() as folder:
        with serving(stage.model, "--store-dir", folder) as server, Client(server.address, timeout=300) as client:
            first = client.generate(
                JOURNAL, sampling=GREEDY, stopping=Stopping(max_tokens=12, ignore_eos=True), save=keep
            ).result()
            assert first.snapshot is not None
            name, length = first.snapshot.name, first.snapshot.token_count
            stage.say(f"The mate writes:{first.text}")
            stage.say(f"  kept as {name}, {length} tokens, on disk")
            expected, expected_likelihoods = go_on(first.snapshot)
            boot = client.server_info().boot_id
            server.kill()
        stage.say("\nKilled. Another server opens the same folder.\n")

        with serving(stage.model, "--store-dir", folder) as server, Client(server.address, timeout=300) as client:
            assert client.server_info().boot_id != boot
            result, likelihoods = go_on(client.get_snapshot(name))
            usage = result.usage
            stage.say(f"The mate goes on:{result.text}")
            stage.say(f"  {usage.disk_tokens} tokens read back from {usage.disk_bytes_read / 2**20:.1f} MiB\n")
            stage.expect("restored_tokens", usage.cached_tokens, exactly=length)
            stage.expect("recomputed_tokens", usage.recomputed_tokens, exactly=0)
            same = sum(a == b for a, b in zip(result.token_ids, expected.token_ids, strict=True))
            stage.expect("same_tokens", same, exactly=len(expected.token_ids))
            equal = sum(a == b for a, b in zip(likelihoods, expected_likelihoods, strict=True))
            stage.expect("bit_equal_log_probabilities", equal, exactly=len(expected_likelihoods))


if __name__ == "__main__":
    sys.exit(play(main, __doc__, alone=True))
