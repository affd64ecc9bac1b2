"""Keep the answer, drop the thinking: `python strip_reasoning.py [ADDRESS]`.

The model may think aloud before it answers. What it thought has served its purpose once the answer is there, and would
only fill the context. So the state before the thinking is kept as a mark, and the next turn goes on from there: the
prompt is restored, the answer is appended, the thinking was never there.

Where the model's template marks its thinking, the server tells it apart and `text` is the answer alone.
"""

from __future__ import annotations

import sys

from kvfork_client import Client, Mark, Message, Sampling, Stopping

QUESTION = (
    "I have three apples and eat one. How many are left? Think step by step, then write 'Answer:' and the answer."
)
FOLLOW_UP = "And if I then buy five more?"


def answer_of(text: str) -> str:
    """What comes after thinking that is part of the answer, in the ways models mark it."""
    for border in ("</think>", "Answer:"):
        if border in text:
            return text.rpartition(border)[2].strip()
    return text.strip().splitlines()[-1] if text.strip() else ""


def main(address: str) -> None:
    greedy, short = Sampling(temperature=0), Stopping(max_tokens=64)
    with Client(address, timeout=300) as client:
        with client.generate(
            [Message.user(QUESTION)], marks=[Mark.reasoning_start()], sampling=greedy, stopping=short
        ) as first:
            for delta in first:
                print(delta.text, end="", flush=True)
        print()
        if first.finished is None or 0 not in first.marks:
            raise SystemExit("the state before the thinking could not be kept")

        answer = answer_of(first.text)
        with first.marks[0] as prompt:
            dropped = first.finished.usage.completion_tokens
            print(f"\nkept {prompt.token_count} tokens of prompt; dropped {dropped} generated")
            turn = [Message.assistant(answer), Message.user(FOLLOW_UP)]
            second = prompt.generate(turn, sampling=greedy, stopping=short).result()
            print(f"answer kept: {answer!r}\n\n{second.text}\n")
            usage = second.usage
            print(f"restored {usage.cached_tokens}, recomputed {usage.recomputed_tokens}, new {usage.new_tokens}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051")
