"""The tokenizer and the chat template of tiny-vision: byte-level BPE in which each word of its world is one token.

Any other text works too, down to single bytes. The result depends on this package's texts alone.
"""

import random
from typing import Any

from tokenizers import Tokenizer

from service.models.tiny_tokenizer import (
    END_OF_TEXT,
    SAMPLE_TEXT,
    TURN_END,
    TURN_START,
    tiny_tokenizer_config,
    train_tokenizer,
)
from service.models.vision import chats, questions, scenes

VOCAB_SIZE = 768
VISION_START, VISION_END = "<|vision_start|>", "<|vision_end|>"
IMAGE, VIDEO = "<|image_pad|>", "<|video_pad|>"

# Whatever the order in a message, its pictures come first: a word sees what stands before it, and so the model reads a
# question about a picture that it has seen, as it was trained to. The text's own order stays.
_CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ 'IMAGE' }}{% endif %}{% endfor %}"
    "{% for part in message['content'] %}{% if part['type'] == 'text' %}{{ part['text'] }}{% endif %}{% endfor %}"
    "{% endif %}"
    "{{ '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
).replace("IMAGE", VISION_START + IMAGE + VISION_END)

# Their ids are their places in this list.
SPECIALS = (END_OF_TEXT, TURN_START, TURN_END, VISION_START, VISION_END, IMAGE, VIDEO)


def build_tokenizer() -> Tokenizer:
    """Train and return the tokenizer of VOCAB_SIZE entries."""
    rng = random.Random("tiny-vision tokenizer")
    lines = [*chats.all_texts(), *SAMPLE_TEXT.splitlines(keepends=True)]
    for _ in range(2000):
        scene = scenes.make_scene(rng, held_out=False)
        question = questions.ask_any(rng, scene)
        lines += [question.text, f"{question.answer}\n", f"assistant\n{question.answer}", f"user\n{question.text}"]
    lines += [", ", "system\n", "nothing", "middle"] * 50
    return train_tokenizer("qwen3_5", text=lines, specials=SPECIALS, tags=(), vocab_size=VOCAB_SIZE)


def tokenizer_config() -> dict[str, Any]:
    """The `tokenizer_config.json` beside it."""
    return {**tiny_tokenizer_config(), "chat_template": _CHAT_TEMPLATE}
