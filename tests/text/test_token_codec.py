"""Ids, text and bytes: nothing is lost, whatever the tokenizer's family."""

import json
import random
import subprocess
import sys
import threading

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from service.errors import InvalidField
from service.request import RawInput, TextPart, TokenPart
from service.text.tokens import TextCodec, TokenizerUnusable
from tests.text import tiny_codecs

TEXTS = [
    "",
    "plain text",
    " leading and trailing ",
    "two  spaces\tand a tab\r\n\n\n",
    "Straße 漢字 かな 🙂👩‍👩‍👧 \u200b",
    "<|im_start|>user\nhi<|im_end|>\n<think>no</think>",
    "a\x00b\x7f",
]


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    return TextCodec.load(tiny_codecs.save(tmp_path_factory.mktemp("bytes"), tiny_codecs.byte_level()))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory):
    return TextCodec.load(tiny_codecs.save(tmp_path_factory.mktemp("pieces"), tiny_codecs.sentencepiece()))


@pytest.fixture(scope="module")
def llama2(tmp_path_factory):
    tokenizer = tiny_codecs.with_bos(tiny_codecs.sentencepiece(dummy_prefix=True))
    return TextCodec.load(tiny_codecs.save(tmp_path_factory.mktemp("llama2"), tokenizer))


@pytest.mark.parametrize("text", TEXTS)
def test_bytes_of_encoded_text_are_the_text(byte_level, sentencepiece, text):
    for codec in (byte_level, sentencepiece):
        assert codec.bytes_of(codec.encode(text)) == text.encode()


@pytest.mark.parametrize("text", [text for text in TEXTS if "<" not in text])
def test_a_continuation_gets_no_space_of_the_tokenizer_s_own(llama2, text):
    assert llama2.bytes_of(llama2.encode_continuation(text)) == text.encode()
    assert llama2.bytes_of(llama2.encode("word")) == b" word"


def test_special_texts_become_special_tokens(byte_level):
    start = byte_level.encode("<|im_start|>")
    assert len(start) == 1
    assert start[0] in byte_level.special_ids
    assert byte_level.encode("x<|im_start|>") == [*byte_level.encode("x"), *start]
    assert byte_level.token_bytes(start[0]) == b"<|im_start|>"


def test_single_bytes_and_spaces_of_each_family(byte_level, sentencepiece):
    assert byte_level.bytes_of(byte_level.encode("字")[:1]) == "字".encode()[:1]
    [newline] = sentencepiece.encode("\x01")
    assert sentencepiece.token_bytes(newline) == b"\x01"
    assert sentencepiece.token_bytes(sentencepiece.encode(" the")[0])[:1] == b" "


def test_ordinary_added_pieces_of_spaces_are_spaces(tmp_path):
    tokenizer = tiny_codecs.sentencepiece()
    tokenizer.add_tokens(["▁▁▁"])
    codec = TextCodec.load(tiny_codecs.save(tmp_path, tokenizer))
    assert codec.token_bytes(tokenizer.token_to_id("▁▁▁")) == b"   "


def test_other_tokenizers_are_asked_for_the_text_in_the_middle(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "word": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    codec = TextCodec.load(tiny_codecs.save(tmp_path, tokenizer))
    assert codec.token_bytes(1) == b" word"


def test_an_id_without_a_token_adds_nothing(byte_level):
    assert byte_level.token_bytes(10**6) == b""
    assert byte_level.token_bytes(-1) == b""


def test_neighbouring_text_parts_are_one_text_and_token_runs_stay(byte_level):
    split = RawInput(parts=(TextPart("The mil"), TextPart("ler"), TokenPart((7, 7)), TextPart("'s")))
    assert byte_level.encode_raw(split, with_parent=False) == [
        *byte_level.encode("The miller"),
        7,
        7,
        *byte_level.encode("'s"),
    ]


def test_special_tokens_are_added_around_the_whole_input_and_never_behind_a_parent(llama2):
    bos = llama2.bos_id
    parts = (TextPart("one"), TokenPart((9,)), TextPart("two"))
    raw = RawInput(parts=parts, add_special_tokens=True)
    assert llama2.encode_raw(raw, with_parent=False) == [
        bos,
        *llama2.encode("one"),
        9,
        *llama2.encode_continuation("two"),
    ]
    assert llama2.encode("one", special=True) == [bos, *llama2.encode("one")]
    with pytest.raises(InvalidField) as error:
        llama2.encode_raw(raw, with_parent=True)
    assert error.value.fields[0].field == "input.raw.add_special_tokens"
    behind_ids = RawInput(parts=(TokenPart((9,)), TextPart("two")))
    assert llama2.encode_raw(behind_ids, with_parent=False) == [9, *llama2.encode_continuation("two")]
    plain = RawInput(parts=parts[:1])
    assert llama2.encode_raw(plain, with_parent=True) == llama2.encode_continuation("one")


def test_eos_ids_come_from_every_config(tmp_path):
    folder = tiny_codecs.save(
        tmp_path,
        tiny_codecs.byte_level(),
        eos="</s>",
        config={"text_config": {"eos_token_id": 11, "vocab_size": 640}, "eos_token_id": None},
        generation_config={"eos_token_id": [12, 13]},
    )
    codec = TextCodec.load(folder, extra_eos=[14])
    assert codec.eos_ids == {11, 12, 13, 14, codec.encode("</s>")[0]}
    assert codec.vocab_size == 640


def test_vocab_size_without_a_config_is_the_tokenizer_s(byte_level):
    assert byte_level.vocab_size == max(byte_level.added_ids) + 1


def test_truncation_left_in_the_file_cuts_nothing(tmp_path):
    tokenizer = tiny_codecs.byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=32)
    codec = TextCodec.load(tiny_codecs.save(tmp_path, tokenizer))
    text = "The river ran past the old mill " * 4
    assert codec.bytes_of(codec.encode(text)) == text.encode()


def test_a_folder_without_a_usable_tokenizer_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(TokenizerUnusable):
        TextCodec.load(tmp_path / "empty")
    folder = tiny_codecs.save(tmp_path / "torn", tiny_codecs.byte_level())
    (folder / "tokenizer.json").write_text('{"version": "1.0", "model": ')
    with pytest.raises(TokenizerUnusable, match="torn"):
        TextCodec.load(folder)


def test_a_torn_generation_config_is_named(tmp_path):
    folder = tiny_codecs.save(tmp_path, tiny_codecs.byte_level())
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(TokenizerUnusable, match=r"generation_config\.json"):
        TextCodec.load(folder)


def test_eight_threads_encode_and_decode_alike(byte_level):
    random.seed(5)
    texts = ["".join(random.choices("abc 漢🙂\n<|im_end|>", k=200)) for _ in range(40)]
    expected = [byte_level.encode(text) for text in texts]
    failures: list[object] = []

    def work() -> None:
        try:
            for _ in range(5):
                for text, ids in zip(texts, expected, strict=True):
                    if byte_level.encode(text) != ids or byte_level.bytes_of(ids) != text.encode():
                        failures.append(text)
        except Exception as error:  # a thread's error must reach the assertion
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_importing_the_text_layer_imports_no_tokenizer_library():
    code = (
        "import sys, json, service.text.chat, service.text.stream;"
        "heavy = {'transformers', 'tokenizers', 'mlx', 'grpc', 'torch', 'numpy'};"
        "print(json.dumps(sorted(heavy & sys.modules.keys())))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == []
