"""Whole conversations: the template's text, its ids, and where each message ends."""

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from service.errors import InvalidField, TemplateMissing
from service.request import ChatInput, Message, Role, TextPart, TokenPart
from service.text import chat
from service.text.tokens import TextCodec
from tests.text import chat_templates as t
from tests.text import tiny_codecs


def turns(*contents, add_generation_prompt=True, **variables):
    """(role, text) pairs as a chat input."""
    messages = tuple(Message(Role(role), (TextPart(text),)) for role, text in contents)
    return ChatInput(messages=messages, add_generation_prompt=add_generation_prompt, template_vars=variables)


TALK = (("user", "How are you?"), ("assistant", "I am well."), ("user", "Good. And today?"))


def test_text_and_ids_of_a_conversation(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.CHATML)
    rendered = chat.render(codec, turns(("system", "Be brief."), ("user", "Hi")))
    text = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    ends = tuple(
        len(codec.encode(text[: text.index(after)])) for after in ("<|im_start|>user", "<|im_start|>assistant")
    )
    assert rendered == chat.Rendered(text=text, tokens=tuple(codec.encode(text)), message_ends=ends)


@pytest.mark.parametrize(
    ("template", "eos"),
    [
        (t.SMOLLM2, "<|im_end|>"),
        (t.CHATML, "<|im_end|>"),
        (t.LLAMA3, "<|eot_id|>"),
        (t.GEMMA, "<end_of_turn>"),
        (t.MISTRAL, "</s>"),
        (t.PLAIN_TEXT, "</s>"),
    ],
)
def test_a_message_ends_where_the_conversation_up_to_it_does(tmp_path, template, eos):
    codec = tiny_codecs.codec(tmp_path, template, eos=eos)
    rendered = chat.render(codec, turns(*TALK))
    shorter = [chat.render(codec, turns(*TALK[:n], add_generation_prompt=False)).tokens for n in (1, 2, 3)]
    assert rendered.message_ends == tuple(len(tokens) for tokens in shorter)
    for tokens in shorter:
        assert rendered.tokens[: len(tokens)] == tokens


def test_only_the_wanted_ends_are_looked_for(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.CHATML)
    every = chat.render(codec, turns(*TALK)).message_ends
    assert chat.render(codec, turns(*TALK), ends=[2]).message_ends == (None, every[1], None)
    assert chat.render(codec, turns(*TALK), ends=()).message_ends == (None, None, None)


def test_a_message_that_the_next_one_changes_has_no_end(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.QWEN3)
    ends = chat.render(codec, turns(*TALK)).message_ends
    assert [end is None for end in ends] == [False, True, False]


def test_a_token_over_the_border_leaves_no_end(tmp_path):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    codec = tiny_codecs.codec(tmp_path, template)
    joined = turns(("user", "the riv"), ("user", "er the"), ("user", " river"), add_generation_prompt=False)
    rendered = chat.render(codec, joined)
    assert rendered.message_ends == (None, len(codec.encode("the river the")), len(rendered.tokens))


def test_a_token_over_the_border_is_seen_beside_a_special_token_too(tmp_path):
    codec = tiny_codecs.codec(tmp_path, "{% for m in messages %}{{ m.content }}{% endfor %}")
    rendered = chat.render(codec, turns(("user", "the riv"), ("user", "er<|im_end|>"), add_generation_prompt=False))
    assert rendered.message_ends == (None, len(rendered.tokens))


def test_an_end_whose_ids_depend_on_what_follows_is_none(tmp_path):
    tokenizer = Tokenizer(models.BPE({"t": 0, "h": 1, "e": 2, "r": 3, "th": 4, "the": 5}, [("t", "h"), ("th", "e")]))
    # "the" is one word before an "r" only.
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("the(?=r)|."), "isolated")
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    codec = TextCodec.load(tiny_codecs.save(tmp_path, tokenizer, template=template))
    rendered = chat.render(codec, turns(("user", "the"), ("user", "r"), add_generation_prompt=False))
    assert (rendered.tokens, rendered.message_ends) == ((5, 3), (None, 2))


def test_a_message_that_the_template_leaves_out_has_no_end(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.DROPS_USER)
    ends = chat.render(codec, turns(("system", "Be brief."), ("user", "Hi"), ("assistant", "Hello."))).message_ends
    assert [end is None for end in ends] == [False, True, False]


def test_a_system_message_that_the_next_turn_carries_has_no_end_and_can_t_stand_alone(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.GEMMA3, eos="<end_of_turn>")
    rendered = chat.render(codec, turns(("system", "Be brief."), ("user", "Hi")))
    assert [end is None for end in rendered.message_ends] == [True, False]
    with pytest.raises(InvalidField) as error:
        chat.render(codec, turns(("system", "Be brief."), add_generation_prompt=False))
    assert error.value.fields[0].field == "input.chat.messages[0]"


def test_template_variables_reach_the_template(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.QWEN3)
    assert chat.render(codec, turns(("user", "Hi"), enable_thinking=False)).text.endswith(
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "continue_final_message"])
def test_a_variable_that_steers_the_renderer_is_refused(tmp_path, name):
    codec = tiny_codecs.codec(tmp_path, t.CHATML)
    with pytest.raises(InvalidField, match=name):
        chat.render(codec, turns(("user", "Hi"), **{name: "x"}))


def test_what_the_template_says_reaches_the_caller(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.GEMMA, eos="<end_of_turn>")
    with pytest.raises(InvalidField, match="roles must alternate") as error:
        chat.render(codec, turns(("user", "Hi"), ("user", "Hi?")), at="branches[1].append.chat")
    assert error.value.fields[0].field == "branches[1].append.chat"


def test_a_template_that_fails_by_itself_is_the_call_s_error(tmp_path):
    codec = tiny_codecs.codec(tmp_path, "{{ messages[0].content + 1 }}")
    with pytest.raises(InvalidField, match="the chat template refuses this"):
        chat.render(codec, turns(("user", "Hi")))


def test_a_model_without_a_template_takes_raw_parts_only(tmp_path):
    codec = tiny_codecs.codec(tmp_path)
    assert not codec.has_template
    for call in (lambda: chat.render(codec, turns(*TALK)), lambda: chat.append(codec, [1], turns(*TALK))):
        with pytest.raises(TemplateMissing) as error:
            call()
        assert "raw" in error.value.hint


def test_token_runs_pass_through_the_template_unchanged(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.LLAMA3, eos="<|eot_id|>")
    odd = tuple(codec.encode("riv") + codec.encode("er"))  # not what the text would be encoded to
    message = Message(Role.USER, (TextPart("the "), TokenPart(odd), TokenPart(()), TokenPart(odd), TextPart(" ran")))
    rendered = chat.render(codec, ChatInput(messages=(message,), add_generation_prompt=False))
    head = "<s><|start_header_id|>user<|end_header_id|>\n\nthe "
    assert rendered.text == head + "riverriver ran<|eot_id|>"
    assert rendered.tokens == (*codec.encode(head), *odd, *odd, *codec.encode(" ran<|eot_id|>"))
    assert rendered.message_ends == (len(rendered.tokens),)


def test_a_token_run_that_the_template_drops_is_refused(tmp_path):
    codec = tiny_codecs.codec(tmp_path, "{% for m in messages[:1] %}{{ m.content }}{% endfor %}")
    with pytest.raises(InvalidField, match="token run"):
        chat.render(codec, ChatInput(messages=(*turns(TALK[0]).messages, Message(Role.USER, (TokenPart((5,)),)))))


def test_a_placeholder_s_name_in_the_caller_s_text_is_only_text(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.CHATML)
    message = Message(Role.USER, (TextPart("kvforktokens0q "), TokenPart((300,))))
    rendered = chat.render(codec, ChatInput(messages=(message,)))
    assert "kvforktokens0q " in rendered.text
    assert rendered.tokens.count(300) == 1
