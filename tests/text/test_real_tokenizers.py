"""The known models' own tokenizers and templates."""

import os
import random

import pytest

from service.models import resolve
from service.request import ChatInput, Message, Role, TextPart
from service.text import chat
from service.text.detokenize import Detokenizer
from service.text.tokens import TextCodec

# One of the tiny models' tokenizers has a normaliser of its own; the others are alike.
NAMES = ("tiny-llama", "tiny-qwen3_5", "smollm2", "gemma3")

TEXT = "Hello  world\n\n\n  x\ty 3.14159 Straße 漢字 かな 🙂👩‍👩‍👧 \u200b\x01 <|im_start|> l'été"


@pytest.fixture(scope="module", params=NAMES)
def codec(request):
    if request.param == "gemma3" and os.environ.get("KVFORK_ACCEPT_GEMMA_TERMS") != "1":
        pytest.skip("gemma3 needs KVFORK_ACCEPT_GEMMA_TERMS=1 (make test sets it)")
    return TextCodec.load(resolve(request.param))


def test_text_comes_back_token_by_token_from_any_context(codec):
    ids = codec.encode(TEXT)
    assert codec.bytes_of(ids) == TEXT.encode()
    for split in range(len(ids)):
        seen = codec.bytes_of(ids[:split]).decode(errors="ignore")
        detokenizer = Detokenizer(codec, ids[:split])
        assert "".join(map(detokenizer.push, ids[split:])) + detokenizer.finish() == TEXT[len(seen) :]


def test_ordinary_tokens_have_the_bytes_that_the_tokenizer_decodes(codec):
    ordinary = sorted(set(range(codec.vocab_size)) - codec.added_ids)
    for token in random.Random(3).sample(ordinary, min(len(ordinary), 2000)):
        decoded = codec._backend.decode([token], skip_special_tokens=False)
        assert codec.token_bytes(token).decode(errors="replace") == decoded


def test_turns_behind_a_context_are_those_of_the_whole_conversation(codec):
    if not codec.has_template:
        pytest.skip("a base model has no template")

    def turns(*contents):
        return ChatInput(messages=tuple(Message(Role(role), (TextPart(text),)) for role, text in contents))

    for begun in ((("system", "Be brief."), ("user", "Hi there")), (("user", "Hi there"),)):
        prompt = list(chat.render(codec, turns(*begun)).tokens)
        cold = chat.render(codec, turns(*begun, ("assistant", "Hello!"), ("user", "And now?")))
        for end in ("<|im_end|>", "<|im_end|>\n"):
            context = prompt + codec.encode("Hello!" + end)
            assert (*context, *chat.append(codec, context, turns(("user", "And now?"))).tokens) == cold.tokens
        added = chat.append(codec, prompt, turns(("assistant", "Hello!"), ("user", "And now?")))
        assert (*prompt, *added.tokens) == cold.tokens
        assert added.message_ends[0] + len(prompt) == cold.message_ends[-2]


def test_chat_models_end_their_turns_with_an_eos_id(codec):
    if not codec.has_template:
        pytest.skip("a base model has no template")
    assert set(codec.encode("<|im_end|>")) <= codec.eos_ids
