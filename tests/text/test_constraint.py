"""Which tokens a form lets through, on every kind of tokenizer: followed to the end, the text always has the form."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Iterator

import jsonschema
import pytest

from service.errors import ConstraintFailed, InvalidField
from service.request import Constraint, Form, Stopping
from service.text.constraint import Grammars, RowConstraint
from service.text.form_frames import Reply
from service.text.formats import detect
from service.text.forms import MAX_KEPT
from service.text.tokens import TextCodec
from tests.text import tiny_codecs

EOS = "<|im_end|>"
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "bc", "é🙂"]}, "minItems": 1, "maxItems": 3},
        "at": {"type": ["object", "null"], "properties": {"x": {"type": "number"}}, "additionalProperties": False},
    },
    "required": ["name", "age", "tags", "at"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", params=["byte level", "sentencepiece", "dummy prefix"])
def codec(request, tmp_path_factory) -> TextCodec:
    tokenizer = {
        "byte level": tiny_codecs.byte_level,
        "sentencepiece": tiny_codecs.sentencepiece,
        "dummy prefix": lambda: tiny_codecs.sentencepiece(dummy_prefix=True),
    }[request.param]()
    return TextCodec.load(tiny_codecs.save(tmp_path_factory.mktemp("codec"), tokenizer, eos=EOS))


def form(kind: Form, text: str = "", **more: object) -> Constraint:
    return Constraint(form=kind, text=text, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module", autouse=True)
def processes(codec) -> Iterator[None]:
    KNOWN[codec] = Grammars(codec, detect(codec))
    yield
    while KNOWN:  # a test may have made one of its own
        KNOWN.popitem()[1].close()


KNOWN: dict[TextCodec, Grammars] = {}
PATIENCE = 30.0


def compiled(codec: TextCodec, constraint: Constraint, stopping: Stopping | None = None, context=()) -> RowConstraint:
    grammars = KNOWN.get(codec) or KNOWN.setdefault(codec, Grammars(codec, detect(codec)))
    row = asyncio.run(grammars.open("owner", constraint))
    return grammars.follow(row, constraint, stopping or Stopping(), list(context))


def mask_of(row: RowConstraint) -> bytes:
    mask = row.allowed(PATIENCE)
    assert mask is not None
    return mask


def took(row: RowConstraint, token: int) -> bool:
    """Whether nothing can follow."""
    row.took(token)
    ended = row.ended(PATIENCE)
    assert ended is not None
    return ended


def tokens(codec: TextCodec, mask: bytes) -> list[int]:
    return [token for token in range(codec.vocab_size) if mask[token >> 3] >> (token & 7) & 1]


def texts(codec: TextCodec, row: RowConstraint) -> set[str]:
    return {codec.text_of([token]) for token in tokens(codec, mask_of(row))}


def written(codec: TextCodec, constraint: Constraint, seed: int) -> str | None:
    """A text of tokens picked at random among those allowed; None if it has no end within bounds."""
    rng, row, picked = random.Random(seed), compiled(codec, constraint), []
    for _ in range(400):
        token = rng.choice(tokens(codec, mask_of(row)))
        last = took(row, token)
        if token in codec.eos_ids:
            assert last
            return codec.text_of(picked)
        picked.append(token)
        if last:
            return codec.text_of(picked)
    return None


def test_random_walks_through_a_schema_are_json_of_that_schema(codec):
    found = [written(codec, form(Form.JSON_SCHEMA, json.dumps(SCHEMA)), seed) for seed in range(40)]
    done = [text for text in found if text is not None]
    assert len(done) > 30
    for text in done:
        jsonschema.validate(json.loads(text), SCHEMA)


def test_random_walks_through_a_regex_match_all_of_it(codec):
    for seed in range(40):
        text = written(codec, form(Form.REGEX, r"[a-z]{2,5}-[0-9]+(é|漢字|🙂)x?"), seed)
        assert text is not None and re.fullmatch(r"[a-z]{2,5}-[0-9]+(é|漢字|🙂)x?", text)


def test_a_choice_is_one_of_its_texts_word_for_word(codec):
    options = ("yes", "yesterday", 'a "quoted" \\ one', "line\nend", "/slash/", "%json {}", "漢🙂", " leading", "\x7f")
    found = {written(codec, Constraint(form=Form.CHOICE, options=options), seed) for seed in range(150)}
    assert found == set(options)


def test_a_grammar_is_followed(codec):
    grammar = 'start: "(" inner ")"\ninner: start | "x"'
    for seed in range(20):
        text = written(codec, form(Form.LARK, grammar), seed)
        assert text is None or (re.fullmatch(r"(\(+)x(\)+)", text) and text.count("(") == text.count(")"))


def test_the_end_may_come_where_the_text_is_whole_and_nowhere_else(codec):
    row = compiled(codec, form(Form.REGEX, "ab?"))
    assert EOS not in texts(codec, row)
    (a,) = codec.encode_continuation("a")
    assert not took(row, a)
    assert texts(codec, row) == {EOS, "b"}
    assert took(row, codec.encode_continuation("b")[0])


def test_special_tokens_are_no_text(codec):
    row = compiled(codec, form(Form.REGEX, "(.|\n)*"))
    allowed = set(tokens(codec, mask_of(row)))
    assert allowed & codec.special_ids == codec.eos_ids
    assert len(allowed) > 100


def test_asking_twice_changes_nothing(codec):
    row = compiled(codec, form(Form.REGEX, "abc"))
    assert mask_of(row) == mask_of(row)
    took(row, codec.encode_continuation("a")[0])
    assert mask_of(row) == mask_of(row)


def test_eos_waits_for_the_least_number_of_tokens_and_for_ever_where_it_is_ignored(codec):
    (a,) = codec.encode_continuation("a")
    late = compiled(codec, form(Form.REGEX, "a*"), Stopping(min_tokens=3))
    never = compiled(codec, form(Form.REGEX, "a*"), Stopping(ignore_eos=True))
    seen = []
    for _ in range(4):
        seen.append((EOS in texts(codec, late), EOS in texts(codec, never)))
        took(late, a)
        took(never, a)
    # The third token is the first that may be the end.
    assert seen == [(False, False), (False, False), (True, False), (True, False)]


def test_a_stop_id_may_come_where_the_text_is_whole(codec):
    stop = codec.added_id("</s>")
    assert stop is not None and stop not in codec.eos_ids
    row = compiled(codec, form(Form.REGEX, "ab?"), Stopping(stop_token_ids=frozenset({stop})))
    assert stop not in tokens(codec, mask_of(row))
    took(row, codec.encode_continuation("a")[0])
    assert stop in tokens(codec, mask_of(row))
    assert not took(row, stop)  # it ends the row as a stop id does


def test_a_form_that_nothing_fits_any_more_fails_that_row(codec):
    row = compiled(codec, form(Form.LARK, 'start: "a" x\nx: x "b"'))
    took(row, codec.encode_continuation("a")[0])
    with pytest.raises(ConstraintFailed, match="no token fits"):
        mask_of(row)
    row = compiled(codec, form(Form.REGEX, "ab"))
    with pytest.raises(ConstraintFailed):
        took(row, codec.encode_continuation("b")[0])


@pytest.mark.parametrize(
    ("constraint", "says"),
    [
        (form(Form.JSON_SCHEMA, "{"), "EOF"),
        (form(Form.JSON_SCHEMA, "[]"), "must be a JSON object"),
        (form(Form.JSON_SCHEMA, '{"type": "nothing"}'), "nothing"),
        (form(Form.JSON_SCHEMA, '{"$ref": "http://127.0.0.1:1/a"}'), "not fetch"),
        (form(Form.JSON_SCHEMA, '{"unevaluatedProperties": false}'), "unevaluatedProperties"),
        (form(Form.REGEX, "("), "unclosed group"),
        (form(Form.REGEX, r"(a)\1"), "backreferences"),
        (form(Form.LARK, "start: nowhere"), "nowhere"),
        (form(Form.LARK, "start: start"), "no token fits"),
    ],
)
def test_a_bad_form_is_named_with_what_is_wrong_with_it(codec, constraint, says):
    with pytest.raises(InvalidField, match=says) as caught:
        compiled(codec, constraint)
    assert [violation.field for violation in caught.value.fields] == [f"constraint.{constraint.form.value}"]
    assert "\n" not in caught.value.text and len(caught.value.text) < 500


def test_a_compiled_form_is_kept_and_its_rows_do_not_share_where_they_are(codec):
    constraint = form(Form.REGEX, "ab*c")
    one, other = (compiled(codec, constraint) for _ in range(2))
    took(one, codec.encode_continuation("a")[0])
    assert texts(codec, other) != texts(codec, one)
    assert texts(codec, compiled(codec, constraint)) == texts(codec, other)


def test_more_forms_than_are_kept_at_the_same_time(codec):
    async def all_of_them():
        forms = [form(Form.REGEX, f"a{{{count}}}") for count in range(1, 2 * MAX_KEPT)]
        return await asyncio.gather(*(KNOWN[codec].open(f"owner {i % 3}", each) for i, each in enumerate(forms)))

    for row in asyncio.run(all_of_them()):
        answer = row.answer(PATIENCE)
        assert answer is not None and answer[0] is Reply.MASK


# -- behind the reasoning -------------------------------------------------------------------------------------------


def after_reasoning(codec: TextCodec, context: str = "") -> RowConstraint:
    constraint = form(Form.REGEX, "[0-9]+", after_reasoning=True)
    return compiled(codec, constraint, context=codec.encode(context))


def test_reasoning_may_come_first_and_is_free(codec):
    row = after_reasoning(codec)
    first = texts(codec, row)
    assert {"<think>", "1"} <= first and "a" not in first
    took(row, codec.added_id("<think>"))
    inside = set(tokens(codec, mask_of(row)))
    assert not inside & codec.eos_ids and len(inside) >= codec.vocab_size - len(codec.eos_ids)
    for token in codec.encode_continuation("any text"):
        assert not took(row, token)
    took(row, codec.added_id("</think>"))
    assert "1" in texts(codec, row) and not {"<think>", "a", "\n"} & texts(codec, row)


def test_reasoning_that_the_context_opened_is_free_at_once(codec):
    row = after_reasoning(codec, "<|im_start|>assistant\n<think>\n")
    assert "a" in texts(codec, row)
    took(row, codec.added_id("</think>"))
    assert "a" not in texts(codec, row)


def test_without_reasoning_the_form_holds_from_the_first_token_on(codec):
    row = after_reasoning(codec, "<|im_start|>user\n<think><|im_end|>")
    took(row, codec.encode_continuation("1")[0])
    assert not {"<think>", "a"} & texts(codec, row)


def test_a_model_without_marks_is_constrained_from_the_start(tmp_path):
    tokenizer = tiny_codecs.byte_level()
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = [token for token in state["added_tokens"] if "think" not in token["content"]]
    plain = TextCodec.load(tiny_codecs.save(tmp_path, type(tokenizer).from_str(json.dumps(state)), eos=EOS))
    assert not detect(plain)
    assert "a" not in texts(plain, after_reasoning(plain))


def test_an_object_has_the_keys_that_its_schema_names_each_once(codec):
    names = {"name": {"enum": ["a", "b"]}, "age": {"enum": [1, 2]}}
    schema = {"type": "object", "properties": names, "required": ["age"]}
    for seed in range(10):
        text = written(codec, form(Form.JSON_SCHEMA, json.dumps(schema)), seed)
        assert text is not None
        pairs = json.loads(text, object_pairs_hook=list)
        keys = [key for key, _ in pairs]
        assert set(keys) <= set(names) and "age" in keys and len(keys) == len(set(keys))
