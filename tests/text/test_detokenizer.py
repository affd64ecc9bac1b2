"""Text is whole and valid after every token, and the same however the bytes are cut."""

import codecs
import random

import pytest

from service.text.detokenize import Detokenizer, dangling_bytes
from service.text.tokens import TextCodec
from tests.text import tiny_codecs

ALPHABET = ["a", " ", "\n", "é", "Σ", "漢", "字", "🙂", "👩‍👧", "\u200b", "߿", "ࠀ", "\U0010ffff", "�"]


class ByteTokens:
    """Tokens that are given byte strings: id i stands for the i-th."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces

    def token_bytes(self, token: int) -> bytes:
        return self.pieces[token]


def cut(data: bytes, chance: random.Random) -> list[bytes]:
    """`data` in random pieces, some of them empty."""
    pieces = []
    while data:
        size = chance.choice([0, 1, 1, 1, 2, 3, 5])
        pieces.append(data[:size])
        data = data[size:]
    return pieces


def stream(pieces: list[bytes], context: int = 0) -> list[str]:
    """Texts after each piece from `context` on, and what finishing gave."""
    detokenizer = Detokenizer(ByteTokens(pieces), range(context))
    return [*(detokenizer.push(token) for token in range(context, len(pieces))), detokenizer.finish()]


@pytest.mark.parametrize("seed", range(60))
def test_any_text_in_any_pieces_comes_back(seed):
    chance = random.Random(seed)
    text = "".join(chance.choices(ALPHABET, k=30))
    texts = stream(cut(text.encode(), chance))
    assert "".join(texts) == text
    assert texts[-1] == ""


@pytest.mark.parametrize("seed", range(60))
def test_any_bytes_decode_as_python_decodes_the_whole(seed):
    chance = random.Random(seed)
    data = b"".join(
        chance.choice([bytes([chance.randrange(256)]), chance.choice(ALPHABET).encode(), b"\xe6\xbc", b"\xf0\x9f"])
        for _ in range(40)
    )
    assert "".join(stream(cut(data, chance))) == data.decode(errors="replace")


@pytest.mark.parametrize("seed", range(60))
def test_a_context_cut_inside_a_character_gives_the_whole_character(seed):
    chance = random.Random(seed)
    text = "".join(chance.choices(ALPHABET, k=30))
    pieces = cut(text.encode(), chance)
    split = chance.randrange(len(pieces) + 1)
    before = b"".join(pieces[:split])
    seen = before.decode(errors="ignore")  # the characters that are whole at the split
    assert "".join(stream(pieces, split)) == text[len(seen) :]


def test_an_unfinished_character_is_held_back_and_flushed_as_a_replacement():
    assert stream([b"a\xe6", b"\xbc"]) == ["a", "", "�"]
    assert stream([b"\xf0\x9f", b"\x99", b"\x82"]) == ["", "", "🙂", ""]


def test_bytes_of_the_context_that_stay_broken_are_no_part_of_the_new_text():
    assert stream([b"\xe6\xbc"], 1) == [""]
    assert stream([b"\xe6\xbc", b"", b"\xe5", b"\xad\x97"], 1) == ["", "", "字", ""]
    assert stream([b"\xf0\x9f", b"\x99", b"a"], 1) == ["", "�a", ""]  # continued, then broken: the new text's own


def test_dangling_bytes_are_one_character_s_beginning():
    def dangling(*pieces: bytes) -> bytes:
        return dangling_bytes(ByteTokens(list(pieces)), range(len(pieces)))

    assert dangling() == b""
    assert dangling(b"abc") == b""
    assert dangling("漢".encode()) == b""
    assert dangling(b"x", b"\xe6", b"", b"\xbc") == b"\xe6\xbc"
    assert dangling(b"\xf0\x9f\x99") == b"\xf0\x9f\x99"
    assert dangling(b"\x80\x80") == b""  # continuation bytes of nothing
    assert dangling(b"\xe0\x80") == b""  # an overlong form can't be finished


def test_real_byte_level_tokens_give_the_text_back(tmp_path):
    codec = TextCodec.load(tiny_codecs.save(tmp_path, tiny_codecs.byte_level()))
    text = "".join(random.Random(1).choices(ALPHABET, k=200))
    ids = codec.encode(text)
    for split in range(0, len(ids), 7):
        detokenizer = Detokenizer(codec, ids[:split])
        whole = "".join(map(detokenizer.push, ids[split:])) + detokenizer.finish()
        decoder = codecs.getincrementaldecoder("utf-8")()
        assert decoder.decode(codec.bytes_of(ids[:split])) + whole == text
