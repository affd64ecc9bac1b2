"""GGUF vocabulary to `tokenizer.json` and `tokenizer_config.json`. Owns both tokenizer families; knows no weights.

* `gpt2` with the `smollm` rule: byte-level BPE, every digit its own word, merges as listed in the file.
* `llama` (SentencePiece BPE): merges are every way to split a piece into two pieces, best score first; characters
  outside the vocabulary fall back to byte pieces; user-defined pieces are cut out of the raw text before any merge.
"""

from typing import Any

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from service.models.errors import ConversionFailed
from service.models.gguf_weights import field

# GGUF token types.
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6


def build_tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    """The tokenizer of a GGUF file, special tokens and BOS rule included; ConversionFailed for an unknown family."""
    family = field(reader, "tokenizer.ggml.model")
    tokens: list[str] = field(reader, "tokenizer.ggml.tokens")
    types: list[int] = field(reader, "tokenizer.ggml.token_type")
    if family == "gpt2" and field(reader, "tokenizer.ggml.pre") == "smollm":
        tokenizer = _byte_level(tokens, field(reader, "tokenizer.ggml.merges"))
    elif family == "llama":
        tokenizer = _sentencepiece(tokens, types, field(reader, "tokenizer.ggml.scores"), _unknown(reader))
    else:
        raise ConversionFailed(f"the GGUF file has a tokenizer that can't be rebuilt: {family!r}")
    # Added tokens are found in the raw text, the longest first, before the normaliser sees it.
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind == _CONTROL, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_CONTROL, _USER_DEFINED)
        ]
    )
    if _flag(reader, "add_bos_token"):
        bos_id = int(field(reader, "tokenizer.ggml.bos_token_id"))
        bos = tokens[bos_id]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
        )
    return tokenizer


def tokenizer_config(reader: gguf.GGUFReader) -> dict[str, Any]:
    """The folder's `tokenizer_config.json`; `chat_template` only where the file carries one."""
    tokens: list[str] = field(reader, "tokenizer.ggml.tokens")

    def token(key: str) -> str:
        return tokens[int(field(reader, f"tokenizer.ggml.{key}_token_id"))]

    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": token("bos"),
        "eos_token": token("eos"),
        "unk_token": token("unknown"),
        "pad_token": token("padding"),
        "add_bos_token": _flag(reader, "add_bos_token"),
        "add_eos_token": _flag(reader, "add_eos_token"),
        "add_prefix_space": _flag(reader, "add_space_prefix"),
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(field(reader, f"{field(reader, 'general.architecture')}.context_length")),
    }
    template = field(reader, "tokenizer.chat_template", "")
    if template:
        config["chat_template"] = template
    return config


def _flag(reader: gguf.GGUFReader, name: str) -> bool:
    return bool(field(reader, f"tokenizer.ggml.{name}", 0))


def _unknown(reader: gguf.GGUFReader) -> int:
    return int(field(reader, "tokenizer.ggml.unknown_token_id"))


def _byte_level(tokens: list[str], merges: list[str]) -> Tokenizer:
    pairs = []
    for line in merges:
        left, _, right = line.partition(" ")
        pairs.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(tokens: list[str], types: list[int], scores: list[float], unknown: int) -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=_merges_by_score(tokens, types, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _merges_by_score(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Pairs of pieces that join to a piece, in the order in which SentencePiece would join them."""
    pieces = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _NORMAL}
    ranked: list[tuple[float, int, int, str, str]] = []
    for piece, index in pieces.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                ranked.append((-scores[index], pieces[left], pieces[right], left, right))
    ranked.sort()
    return [(left, right) for *_, left, right in ranked]
