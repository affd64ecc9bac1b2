"""New turns behind a context: the same ids as a conversation rendered whole, and a refusal where that can't be."""

from dataclasses import dataclass, field

import pytest

from service.errors import InvalidField, TemplateNotAppendable, TurnOpen
from service.request import ChatInput, Message, Role, TextPart, TokenPart
from service.text import chat
from service.text.tokens import TextCodec
from tests.text import chat_templates as t
from tests.text import tiny_codecs


@dataclass(frozen=True)
class Family:
    """A template with what its model writes in an answer."""

    template: str
    eos: str = "<|im_end|>"
    ends: tuple[str, ...] = ("<|im_end|>", "<|im_end|>\n")  # how a context may end after an answer
    answer: str = "I am well."  # as generated behind the generation prompt
    system: bool = True
    variables: dict[str, object] = field(default_factory=dict)


FAMILIES = {
    "smollm2": Family(t.SMOLLM2),
    "smollm2-default-system": Family(t.SMOLLM2, system=False),
    "chatml": Family(t.CHATML),
    "llama3": Family(t.LLAMA3, eos="<|eot_id|>", ends=("<|eot_id|>",)),
    "gemma": Family(t.GEMMA, eos="<end_of_turn>", ends=("<end_of_turn>", "<end_of_turn>\n"), system=False),
    "gemma3": Family(t.GEMMA3, eos="<end_of_turn>", ends=("<end_of_turn>", "<end_of_turn>\n")),
    "qwen3": Family(t.QWEN3),
    "mistral": Family(t.MISTRAL, eos="</s>", ends=("</s>",), answer=" I am well.", system=False),
    "no-user-closer": Family(t.NO_USER_CLOSER, eos="</s>", ends=("</s>",)),
    "plain-text": Family(t.PLAIN_TEXT, eos="</s>", ends=("\n\n",)),
    "plain-lines": Family(t.PLAIN_LINES, eos="</s>", ends=("\n",)),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request):
    return FAMILIES[request.param]


@pytest.fixture(scope="module")
def codec(family, tmp_path_factory):
    return tiny_codecs.codec(tmp_path_factory.mktemp("family"), family.template, eos=family.eos)


def turns(*contents, add_generation_prompt=True, **variables):
    messages = tuple(Message(Role(role), (TextPart(text),)) for role, text in contents)
    return ChatInput(messages=messages, add_generation_prompt=add_generation_prompt, template_vars=variables)


def opening(family: Family) -> tuple[tuple[str, str], ...]:
    system = (("system", "Be brief."),) if family.system else ()
    return (*system, ("user", "How are you?"))


def whole(codec: TextCodec, *contents: tuple[str, str], add_generation_prompt: bool = True, **variables: object):
    rendered = chat.render(codec, turns(*contents, add_generation_prompt=add_generation_prompt, **variables))
    return list(rendered.tokens)


def grown(codec: TextCodec, context: list[int], chat_input: ChatInput) -> list[int]:
    return [*context, *chat.append(codec, context, chat_input).tokens]


def text(codec: TextCodec, tokens: list[int]) -> str:
    return codec.text_of(tokens)


def test_a_turn_behind_an_answer_gives_the_whole_conversation_s_ids(family, codec):
    begun = opening(family)
    cold = whole(codec, *begun, ("assistant", "I am well."), ("user", "Good."))
    for end in family.ends:
        context = whole(codec, *begun) + codec.encode(family.answer + end)
        assert grown(codec, context, turns(("user", "Good."))) == cold


def test_an_assistant_message_continues_the_open_turn_after_the_generation_prompt(family, codec):
    begun = opening(family)
    context = whole(codec, *begun)
    added = turns(("assistant", "I am well."), ("user", "Good."))
    cold = whole(codec, *begun, ("assistant", "I am well."), ("user", "Good."))
    assert grown(codec, context, added) == cold


def test_an_assistant_message_completes_a_turn_that_broke_off(family, codec):
    begun = opening(family)
    context = whole(codec, *begun) + codec.encode(family.answer.removesuffix(" well."))
    added = turns(("assistant", " well."), ("user", "Good."))
    cold = whole(codec, *begun, ("assistant", "I am well."), ("user", "Good."))
    assert text(codec, grown(codec, context, added)) == text(codec, cold)


def test_nothing_but_an_assistant_message_goes_into_an_open_turn(family, codec):
    prompt = whole(codec, *opening(family))
    for context in (prompt, prompt + codec.encode(family.answer)):
        with pytest.raises(TurnOpen) as error:
            chat.append(codec, context, turns(("user", "Good.")))
        assert "assistant message" in error.value.hint
        assert "raw parts" in error.value.hint


def test_an_answer_behind_a_closed_question_opens_its_own_turn(family, codec):
    begun = opening(family)
    context = whole(codec, *begun, add_generation_prompt=False)
    added = turns(("assistant", "I am well."), ("user", "Good."))
    cold = whole(codec, *begun, ("assistant", "I am well."), ("user", "Good."))
    assert grown(codec, context, added) == cold


def test_message_ends_are_counted_in_the_new_tokens(family, codec):
    begun = opening(family)
    context = whole(codec, *begun)
    added = turns(("assistant", "I am well."), ("user", "Good."), ("assistant", "Yes."), ("user", "Bye."))
    rendered = chat.append(codec, context, added)
    spoken = [*begun, *((m.role.value, m.parts[0].text) for m in added.messages)]
    for n, end in enumerate(rendered.message_ends, start=1):
        # Qwen 3 writes a last answer in another way than an earlier one: the third message has no end of its own.
        if end is not None:
            assert [*context, *rendered.tokens[:end]] == grown(
                codec, context, turns(*spoken[len(begun) : len(begun) + n], add_generation_prompt=False)
            )
    assert rendered.message_ends[0] is not None
    assert rendered.message_ends[1] is not None
    assert rendered.message_ends[3] is not None
    assert chat.append(codec, context, added, ends=[2]).message_ends == (None, rendered.message_ends[1], None, None)


@pytest.mark.parametrize("name", ["smollm2", "chatml", "llama3", "qwen3", "no-user-closer", "plain-text"])
def test_a_question_behind_a_lone_system_turn(tmp_path, name):
    family = FAMILIES[name]
    codec = tiny_codecs.codec(tmp_path, family.template, eos=family.eos)
    context = whole(codec, ("system", "Be brief."), add_generation_prompt=False)
    cold = whole(codec, ("system", "Be brief."), ("user", "Hi"))
    assert grown(codec, context, turns(("user", "Hi"))) == cold


def test_a_long_answer_hides_nothing(family, codec):
    begun = opening(family)
    prompt = whole(codec, *begun)
    context = prompt + codec.encode(" river" * 9000) + codec.encode(family.ends[-1])
    added = chat.append(codec, context, turns(("user", "Good.")))
    short = chat.append(codec, prompt + codec.encode(family.answer + family.ends[-1]), turns(("user", "Good.")))
    assert added == short
    with pytest.raises(TurnOpen):
        chat.append(codec, prompt + codec.encode(" river" * 9000), turns(("user", "Good.")))


@pytest.mark.parametrize("dummy_prefix", [False, True])
@pytest.mark.parametrize("name", ["chatml", "llama3", "gemma", "mistral"])
def test_sentencepiece_tokenizers_with_and_without_a_space_of_their_own(tmp_path, name, dummy_prefix):
    family = FAMILIES[name]
    tokenizer = tiny_codecs.with_bos(tiny_codecs.sentencepiece(dummy_prefix=dummy_prefix))
    codec = TextCodec.load(tiny_codecs.save(tmp_path, tokenizer, template=family.template, eos=family.eos))
    begun = opening(family)
    prompt = whole(codec, *begun)
    cold = whole(codec, *begun, ("assistant", "I am well."), ("user", "Good."))
    # Such a tokenizer puts its space behind special tokens too, so also before Mistral's answers.
    encode = codec.encode if name == "mistral" else codec.encode_continuation
    for end in family.ends:
        context = prompt + encode(family.answer + end)
        assert grown(codec, context, turns(("user", "Good."))) == cold
    with pytest.raises(TurnOpen):
        chat.append(codec, prompt, turns(("user", "Good.")))
    added = chat.append(codec, prompt, turns(("assistant", family.answer.strip()), ("user", "Good."))).tokens
    assert codec.text_of([*prompt, *added]).replace(" ", "") == codec.text_of(cold).replace(" ", "")


# --- reasoning ---


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return tiny_codecs.codec(tmp_path_factory.mktemp("qwen3"), t.QWEN3)


@pytest.fixture(scope="module")
def thinking(tmp_path_factory):
    return tiny_codecs.codec(tmp_path_factory.mktemp("thinking"), t.QWEN3_THINKING)


def test_reasoning_in_the_context_stays_where_it_is(qwen3):
    context = whole(qwen3, ("user", "Hi")) + qwen3.encode("<think>\nA greeting.\n</think>\n\nHello.<|im_end|>")
    added = chat.append(qwen3, context, turns(("user", "Bye")))
    assert added.text == "\n<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\n"


def test_dropped_reasoning_and_the_visible_answer_give_what_the_template_gives_for_history(qwen3):
    context = whole(qwen3, ("user", "Hi"))  # rolled back to the prompt's end
    visible = TokenPart(tuple(qwen3.encode("Hello.")))
    added = ChatInput(messages=(Message(Role.ASSISTANT, (visible,)), Message(Role.USER, (TextPart("Bye"),))))
    cold = whole(qwen3, ("user", "Hi"), ("assistant", "<think>\nA greeting.\n</think>\n\nHello."), ("user", "Bye"))
    assert grown(qwen3, context, added) == cold


def test_reasoning_that_the_prompt_opened_is_closed_before_a_visible_answer(thinking):
    context = whole(thinking, ("user", "Hi"))
    assert text(thinking, context).endswith("<think>\n")
    added = chat.append(thinking, context, turns(("assistant", "Hello."), add_generation_prompt=False))
    assert added.text == "\n</think>\n\nHello.<|im_end|>\n"


def test_a_content_that_closes_the_reasoning_itself_goes_in_as_it_is(thinking):
    context = whole(thinking, ("user", "Hi"))
    content = "A greeting.\n</think>\n\nHello."
    added = chat.append(thinking, context, turns(("assistant", content), add_generation_prompt=False))
    assert added.text == content + "<|im_end|>\n"


def test_switched_off_thinking_reaches_the_new_generation_prompt(qwen3):
    context = whole(qwen3, ("user", "Hi"), enable_thinking=False) + qwen3.encode("Hello.<|im_end|>")
    added = chat.append(qwen3, context, turns(("user", "Bye"), enable_thinking=False))
    assert added.text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_tool_results_behind_a_call(qwen3):
    context = whole(qwen3, ("user", "Time?")) + qwen3.encode("<tool_call>now</tool_call><|im_end|>")
    added = chat.append(qwen3, context, turns(("tool", "12"), ("tool", "13")))
    assert added.text == (
        "\n<|im_start|>user\n<tool_response>\n12\n</tool_response>\n<tool_response>\n13\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert added.message_ends[0] is None  # the second result goes into the same turn


def test_channels_and_a_closing_token_of_the_last_turn(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.HARMONY, eos="<|return|>")
    prompt = whole(codec, ("user", "Hi"))
    spoken = codec.encode("<|channel|>final<|message|>Hello.<|return|>")
    assert chat.append(codec, prompt + spoken, turns(("user", "Bye"))).text == (
        "<|start|>user<|message|>Bye<|end|><|start|>assistant"
    )
    # Nothing said yet: the channel's header comes first.
    assert chat.append(codec, prompt, turns(("assistant", "Hello."), ("user", "Bye"))).text == (
        "<|channel|>final<|message|>Hello.<|end|><|start|>user<|message|>Bye<|end|><|start|>assistant"
    )


def test_a_last_turn_s_own_closing_token_closes_even_if_it_is_no_eos(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.HARMONY, eos="</s>")
    context = whole(codec, ("user", "Hi"), ("assistant", "Hello."), add_generation_prompt=False)
    assert codec.text_of(context).endswith("<|return|>")
    assert chat.append(codec, context, turns(("user", "Bye"), add_generation_prompt=False)).text == (
        "<|start|>user<|message|>Bye<|end|>"
    )


def test_what_goes_into_the_first_user_turn_goes_behind_a_lone_system_turn(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.TOOLS_IN_FIRST_USER)
    facts = {"facts": "The sky is blue."}
    context = whole(codec, ("system", "Be brief."), add_generation_prompt=False, **facts)
    cold = whole(codec, ("system", "Be brief."), ("user", "Hi"), **facts)
    assert grown(codec, context, turns(("user", "Hi"), **facts)) == cold
    context = cold + codec.encode("Hello.<|im_end|>")
    assert "sky" not in chat.append(codec, context, turns(("user", "Bye"), **facts)).text


# --- ends that are not the template's own ---


def test_another_eos_id_stands_for_the_closing_token(tmp_path):
    tokenizer = tiny_codecs.byte_level()
    folder = tiny_codecs.save(
        tmp_path,
        tokenizer,
        template=t.CHATML,
        generation_config={"eos_token_id": tokenizer.token_to_id("<|endoftext|>")},
    )
    codec = TextCodec.load(folder)
    context = whole(codec, ("user", "Hi")) + codec.encode("Hello.<|endoftext|>")
    assert chat.append(codec, context, turns(("user", "Bye"))).text.startswith("\n<|im_start|>user\nBye")


def test_an_end_token_that_only_a_next_turn_brings(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.LATE_END_TOKEN, eos="</s>")
    prompt = whole(codec, ("user", "Hi"))
    answered = prompt + codec.encode(" Hello.</s>")
    assert chat.append(codec, answered, turns(("user", "Bye"))).text == "USER: Bye ASSISTANT:"
    continued = chat.append(codec, prompt, turns(("assistant", "Hello."), ("user", "Bye")))
    assert continued.text == " Hello.</s>USER: Bye ASSISTANT:"


def test_a_token_over_the_border_of_plain_text_is_not_used(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.LATE_END_TOKEN, eos="</s>")
    context = whole(codec, ("user", "Hi"), add_generation_prompt=False)
    assert text(codec, context).endswith(" ")
    added = turns(("assistant", "Hello."), add_generation_prompt=False)
    cold = whole(codec, ("user", "Hi"), ("assistant", "Hello."), add_generation_prompt=False)
    assert text(codec, grown(codec, context, added)) == text(codec, cold)


def test_a_header_without_its_line_end_is_completed(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.CHATML)
    context = codec.encode("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant")
    assert chat.append(codec, context, turns(("assistant", "Hello."), add_generation_prompt=False)).text == (
        "\nHello.<|im_end|>\n"
    )


def test_a_closing_token_spelled_out_in_ordinary_tokens_closes_nothing(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.CHATML)
    spelled = [token for part in ("<", "|im_end|", ">") for token in codec.encode(part)]
    assert codec.text_of(spelled) == "<|im_end|>"
    with pytest.raises(TurnOpen):
        chat.append(codec, whole(codec, ("user", "Hi")) + spelled, turns(("user", "Bye")))


@pytest.mark.parametrize(
    "context",
    [
        "Once upon a time",
        "<|im_start|>user\nHow are",
        "<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>system\nAnd",
        "<s>",
    ],
)
@pytest.mark.parametrize("role", ["assistant", "user"])
def test_a_context_that_ends_in_no_turn_of_the_assistant_takes_raw_parts_only(tmp_path, context, role):
    codec = tiny_codecs.codec(tmp_path, t.CHATML)
    with pytest.raises(TurnOpen) as error:
        chat.append(codec, codec.encode(context), turns((role, "Bye")))
    assert "raw parts" in error.value.hint


# --- refusals ---


UNFIT = {
    "moves-system": t.MOVES_SYSTEM,
    "moves-user-marker": t.MOVES_USER_MARKER,
    "moves-answer-marker": t.MOVES_ANSWER_MARKER,
    "marks-earlier-answers": t.MARKS_EARLIER_ANSWERS,
    "moves-closer": t.MOVES_CLOSER,
    "prompt-changes-user": t.PROMPT_CHANGES_USER,
    "drops-user": t.DROPS_USER,
    "drops-later-turns": t.DROPS_LATER_TURNS,
    "no-roles": t.NO_ROLES,
    "one-header-for-all": t.ONE_HEADER_FOR_ALL,
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_template_that_is_not_append_only_is_refused(tmp_path, name):
    codec = tiny_codecs.codec(tmp_path, UNFIT[name], eos="</s>")
    prompt = list(chat.render(codec, turns(("user", "Hi"))).tokens)
    for context, added in (
        (prompt + codec.encode(" Hello.</s>"), turns(("user", "Bye"))),
        (prompt, turns(("assistant", " Hello."), add_generation_prompt=False)),
    ):
        with pytest.raises(TemplateNotAppendable) as error:
            chat.append(codec, context, added)
        assert "raw parts" in error.value.hint


@pytest.mark.parametrize("template", [t.HEADER_LOOKS_AHEAD, t.CLOSER_LOOKS_AHEAD], ids=["header", "closer"])
def test_only_the_turns_that_change_an_earlier_one_are_refused(tmp_path, template):
    codec = tiny_codecs.codec(tmp_path, template)
    context = whole(codec, ("user", "Time?")) + codec.encode("now()<|im_end|>\n")
    assert chat.append(codec, context, turns(("user", "Well?"))).text.startswith("<|im_start|>user\nWell?")
    with pytest.raises(TemplateNotAppendable):
        chat.append(codec, context, turns(("tool", "12")))


def test_a_template_that_repeats_an_earlier_turn_is_refused(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.REPEATS_SYSTEM)
    context = whole(codec, ("system", "Be brief."), ("user", "Hi")) + codec.encode("Hello.<|im_end|>\n")
    with pytest.raises(TemplateNotAppendable, match="moves an earlier turn"):
        chat.append(codec, context, turns(("user", "Bye")))


def test_no_turns_at_all_are_the_call_s_error(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.CHATML)
    for call in (lambda: chat.render(codec, ChatInput(messages=())), lambda: chat.append(codec, [1], turns())):
        with pytest.raises(InvalidField):
            call()


def test_what_the_template_says_of_new_turns_reaches_the_caller(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.GEMMA, eos="<end_of_turn>")
    context = whole(codec, ("user", "Hi")) + codec.encode("Hello.<end_of_turn>")
    with pytest.raises(InvalidField, match="roles must alternate"):
        chat.append(codec, context, turns(("user", "Bye"), ("user", "Bye?")))


def test_a_sentinel_s_name_in_the_caller_s_text_is_only_text(tmp_path):
    codec = tiny_codecs.codec(tmp_path, t.CHATML)
    context = whole(codec, ("user", "Hi")) + codec.encode("Hello.<|im_end|>\n")
    content = "kvforkprobethree kvforkprobextwo"
    assert content in chat.append(codec, context, turns(("user", content))).text
