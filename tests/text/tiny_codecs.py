"""Small tokenizers of both families, made in milliseconds and read back through `TextCodec.load`."""

import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from service.text.tokens import TextCodec

CORPUS = [
    "The river ran past the old mill, and the miller's daughter counted stones.",
    "How are you today? I am well, thank you. user assistant system model tool think",
    "Zahlen 1 2 3 44 555 und Straße, größer, Äpfel, naïve café 漢字 かな 🙂 👩‍👩‍👧",
    "def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n",
]

SPECIAL = [
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<|endoftext|>",
    "<|begin_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<bos>",
    "<start_of_turn>",
    "<end_of_turn>",
    "<|start|>",
    "<|channel|>",
    "<|message|>",
    "<|end|>",
    "<|return|>",
    "[INST]",
    "[/INST]",
]
ORDINARY = ["<think>", "</think>"]


def byte_level() -> Tokenizer:
    """Llama 3's kind: every byte is a character of the vocabulary, and line ends are words of their own."""
    tokenizer = Tokenizer(models.BPE())
    words = Regex(r" ?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(words, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return _with_added(tokenizer)


def sentencepiece(*, dummy_prefix: bool = False) -> Tokenizer:
    """Llama 2's and Gemma's kind: "▁" for a space, bytes as "<0x0A>"; Llama 2 puts a space before every text."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        initial_alphabet=[],
        limit_alphabet=60,  # characters beyond it fall back to bytes
        show_progress=False,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.pre_tokenizer = None
    # The trainer declares the byte pieces as special texts; a real vocabulary has them as plain pieces.
    state = json.loads(tokenizer.to_str())
    state["added_tokens"] = []
    tokenizer = Tokenizer.from_str(json.dumps(state))
    if dummy_prefix:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    stages = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if dummy_prefix:
        stages.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(stages)
    return _with_added(tokenizer)


def with_bos(tokenizer: Tokenizer, bos: str = "<s>") -> Tokenizer:
    """Puts `bos` before a whole text, as `add_special_tokens` asks."""
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]
    )
    return tokenizer


def save(
    folder: Path,
    tokenizer: Tokenizer,
    *,
    template: str | None = None,
    eos: str = "<|im_end|>",
    bos: str = "<s>",
    config: dict[str, object] | None = None,
    generation_config: dict[str, object] | None = None,
) -> Path:
    """A model folder without a model."""
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=bos, eos_token=eos)
    if template is not None:
        wrapped.chat_template = template
    wrapped.save_pretrained(folder)
    for name, value in (("config.json", config), ("generation_config.json", generation_config)):
        if value is not None:
            (folder / name).write_text(json.dumps(value))
    return folder


def codec(folder: Path, template: str | None = None, *, eos: str = "<|im_end|>", bos: str = "<s>") -> TextCodec:
    """A byte-level codec with `template`."""
    return TextCodec.load(save(folder, byte_level(), template=template, eos=eos, bos=bos))


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in ORDINARY])
    return tokenizer
