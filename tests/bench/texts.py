"""Prompts: distinct prose of a wanted size, the same for the same seed. Owns text only; sizes are asked of a server."""

from __future__ import annotations

import random
from collections.abc import Callable

_WHO = (
    "sailor",
    "baker",
    "teacher",
    "nurse",
    "farmer",
    "painter",
    "driver",
    "judge",
    "miner",
    "singer",
    "clerk",
    "guard",
    "weaver",
    "doctor",
    "pilot",
    "cook",
)
_DID = (
    "found",
    "carried",
    "painted",
    "counted",
    "forgot",
    "repaired",
    "opened",
    "followed",
    "measured",
    "hid",
    "sold",
    "cleaned",
    "watched",
    "drew",
)
_WHAT = (
    "map",
    "lamp",
    "boat",
    "letter",
    "door",
    "clock",
    "basket",
    "window",
    "bridge",
    "ladder",
    "coin",
    "rope",
    "table",
    "wheel",
    "mirror",
    "book",
    "bell",
)
_HOW = (
    "old",
    "small",
    "broken",
    "heavy",
    "quiet",
    "yellow",
    "narrow",
    "strange",
    "wooden",
    "empty",
    "bright",
    "cold",
    "round",
    "long",
    "plain",
    "dark",
)
_WHERE = (
    "harbour",
    "market",
    "garden",
    "station",
    "valley",
    "kitchen",
    "tower",
    "forest",
    "river",
    "school",
    "church",
    "island",
    "village",
    "hall",
)
_WHEN = (
    "morning",
    "evening",
    "winter",
    "summer",
    "night",
    "autumn",
    "spring",
    "noon",
)


def prose(words: int, seed: int) -> str:
    """About `words` words of plain sentences; seeds that follow one another differ from the first word on."""
    pick = random.Random(seed)
    parts = [f"{_WHO[seed % len(_WHO)].title()} {seed}."]
    count = 2
    while count < words:
        sentence = (
            f"In the {pick.choice(_WHEN)} the {pick.choice(_WHO)} {pick.choice(_DID)} the {pick.choice(_HOW)}"
            f" {pick.choice(_WHAT)} near the {pick.choice(_HOW)} {pick.choice(_WHERE)}"
            f" and the {pick.choice(_WHO)} {pick.choice(_DID)} a {pick.choice(_WHAT)}."
        )
        parts.append(sentence)
        count += len(sentence.split())
    return " ".join(parts)


def fitted(tokens: int, seed: int, count: Callable[[str], int]) -> str:
    """Prose that `count` finds to be exactly `tokens` long."""
    words = prose(2 * tokens + 20, seed).split(" ")
    low, high = 1, len(words)
    while low < high:  # the most words that do not exceed the size
        middle = (low + high + 1) // 2
        if count(" ".join(words[:middle])) <= tokens:
            low = middle
        else:
            high = middle - 1
    for keep in range(low, max(0, low - 8), -1):
        text = " ".join(words[:keep])
        for filler in (" a", " the", ".", "!", "\n", "x"):
            grown = text
            while (size := count(grown)) < tokens:
                grown += filler
                if count(grown) <= size:
                    break
            if size == tokens:
                return grown
    raise ValueError(f"no prose of exactly {tokens} tokens was found")


def some_tokens(count: int, seed: int, vocab: int) -> list[int]:
    """Token ids away from the special ones, for models with random weights, to which all texts are alike."""
    pick = random.Random(seed)
    return [pick.randrange(20, min(vocab, 400)) for _ in range(count)]
