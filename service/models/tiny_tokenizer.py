"""The tokenizer of the tiny models: byte-level BPE, trained in-process on a short text of our own, with ChatML turns.

Owns the vocabulary size, the special tokens, the chat template and the rule that cuts text into words. The result
depends on this file alone.
"""

import json
from collections.abc import Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

VOCAB_SIZE = 512

END_OF_TEXT, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
THINK_START, THINK_END = "<think>", "</think>"
_SPECIALS = (END_OF_TEXT, TURN_START, TURN_END)
# Text to a reader, like the reasoning tags of the families that have them: decoding keeps them.
_TAGS = (THINK_START, THINK_END)

# Upstream's loader gives every qwen3_5 folder this rule and NFC, whatever its tokenizer.json says; so the file says the
# same. Contractions; letters with at most one sign before them; single digits; runs of signs; line ends; other space.
_QWEN_WORDS = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)",
        r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+",
        r"\p{N}",
        r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

IMAGE_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}{{ 'IMAGE' }}{% elif part['type'] == 'text' %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Some of everything that a prompt in a test holds, so that its words become tokens of more than one byte.
SAMPLE_TEXT = """
You are a helpful assistant. Answer the question of the user in one short sentence, then stop.
The system reads the prompt once, keeps the state at its end, and lets several branches grow from it.
A branch can be dropped without a trace. Another branch goes on from the same place, and its first token
is the one that it would have been without the others. What was said before is never computed again.
user: What is the capital of France? assistant: The capital of France is Paris.
user: How many letters are in the word? assistant: There are four letters in the word.
Let me think about this step by step. First, count the apples. Second, take two of them away. Then the answer is seven.
When the river rose, the old bridge held, and the people on the other side waited for the morning.
They counted the boats: one, two, three, four, five, six, seven, eight, nine, ten. Not one was missing.
She wrote the letters in the evening and sent them in the morning; he read them in the garden behind the house.
It is not the length of the road but the number of turns that makes the journey long.
def fork(snapshot, count):
    branches = []
    for index in range(count):
        branch = snapshot.copy()
        branch.name = "branch-" + str(index)
        branches.append(branch)
    return branches
for (int i = 0; i < 256; i++) { if (block[i] != 0) { return false; } }
{"role": "user", "content": "hello there", "tokens": [1, 2, 3, 4, 5]}
SELECT name, position FROM snapshots WHERE owner = 'alice' ORDER BY position DESC;
2024-01-15 08:30:00 1234567890 3.14159 100% $20 #1 (a + b) * c = d / e - f
Der Fluss ist breit und das Wasser ist kalt. La rivière est large et l'eau est froide.
El río es ancho y el agua está fría. 川は広く、水は冷たい。河很宽，水很冷。 река широкая 🌊🙂
"""


def build_tiny_tokenizer(model_type: str, more: Sequence[str] = ()) -> Tokenizer:
    """Train and return the tokenizer; VOCAB_SIZE entries, specials first, then the 256 bytes, then merges.

    `more`: special tokens besides, from id VOCAB_SIZE on.
    """
    lines = SAMPLE_TEXT.splitlines(keepends=True)
    tokenizer = train_tokenizer(model_type, text=lines, specials=_SPECIALS, tags=_TAGS, vocab_size=VOCAB_SIZE)
    if more:
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in more])
    return tokenizer


def train_tokenizer(
    model_type: str, *, text: Sequence[str], specials: Sequence[str], tags: Sequence[str], vocab_size: int
) -> Tokenizer:
    """A tokenizer trained on `text`: ids start with `specials` and `tags` (which decoding keeps) in their order."""
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[*specials, *tags],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    trained = _with_words(Tokenizer(models.BPE()), model_type)
    trained.train_from_iterator(text, trainer)
    # The trainer marks all that it was given as special, so its vocabulary moves to a tokenizer that marks them right.
    learned = json.loads(trained.to_str())["model"]
    merges = [(left, right) for left, right in learned["merges"]]
    tokenizer = _with_words(Tokenizer(models.BPE(vocab=learned["vocab"], merges=merges)), model_type)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in tags])
    return tokenizer


def _with_words(tokenizer: Tokenizer, model_type: str) -> Tokenizer:
    """Set the rule that cuts text into words."""
    if model_type == "qwen3_5":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(_QWEN_WORDS), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    return tokenizer


def tiny_tokenizer_config(image: str = "") -> dict[str, Any]:
    """The `tokenizer_config.json` beside it; `image`: what the chat template writes where an image goes."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "unk_token": None,
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 32768,
        "chat_template": IMAGE_CHAT_TEMPLATE.replace("IMAGE", image) if image else CHAT_TEMPLATE,
    }
