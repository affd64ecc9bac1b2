"""Text behind text, and token runs among it."""

from service.text.splice import Placeholders, splice
from tests.text import tiny_codecs


def test_text_is_encoded_as_it_reads_behind_what_precedes_it(tmp_path):
    codec = tiny_codecs.codec(tmp_path)
    whole = codec.encode("the river the mill")
    behind = splice(codec, " the mill", Placeholders({}), before="the river", continuing=True)
    assert [*codec.encode("the river"), *behind.tokens] == whole
    assert behind.spans[0][0] == 0
    assert behind.spans[-1][1] == len(" the mill")


def test_no_token_reaches_back_over_the_border(tmp_path):
    codec = tiny_codecs.codec(tmp_path)
    assert len(codec.encode("mill the")) == len(codec.encode("mill")) + 1
    behind = splice(codec, "he mill", Placeholders({}), before="mill t", continuing=True)
    assert list(behind.tokens) == codec.encode("he mill")


def test_runs_stay_and_spans_cover_their_placeholders(tmp_path):
    codec = tiny_codecs.codec(tmp_path)
    spliced = splice(codec, "aXbYY", Placeholders({"X": (7, 8), "YY": ()}))
    [a], [b] = codec.encode("a"), codec.encode("b")
    assert spliced.tokens == (a, 7, 8, b)
    assert spliced.spans == ((0, 1), (1, 2), (1, 2), (2, 3))
    assert spliced.plain_text() == "a" + codec.text_of((7, 8)) + "b"
    assert [spliced.token_count_at(length) for length in range(1, 6)] == [1, 3, 4, 4, 4]
