"""Pictures through the gateway: shown once, and a conversation about them goes on without encoding them again."""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.e2e.live import LiveServer
from tests.gateway.live import LiveGateway
from tests.images.pictures import png

pytest.importorskip("mlx_vlm", reason="the vision extra is not installed")

from service.models.vision.drawing import draw
from service.models.vision.scenes import make_scene

pytestmark = [pytest.mark.mlx]

MODEL = "tiny-qwen3_5-vl"


def picture(seed: int) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(png(seed)).decode()
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.fixture(scope="module")
def client() -> Iterator[openai.OpenAI]:
    with LiveServer(MODEL) as server, LiveGateway(server) as gateway, gateway.client() as made:
        yield made


def test_a_picture_is_seen_and_gone_on_from(client: openai.OpenAI) -> None:
    def ask(*messages: Any) -> Any:
        return client.chat.completions.create(model=MODEL, messages=messages, max_tokens=6, temperature=0)

    def shown(seed: int) -> dict[str, Any]:
        return {"role": "user", "content": [picture(seed), {"type": "text", "text": "What is this?"}]}

    first, other = ask(shown(1)), ask(shown(2))
    receipt = first.model_extra["kvfork"]["receipt"]
    assert receipt["image_tokens"] > 0
    # Of equal size and with the same words, the ids of both prompts are the same.
    assert other.usage.prompt_tokens == first.usage.prompt_tokens
    assert other.model_extra["kvfork"]["receipt"]["cached_tokens"] < receipt["image_tokens"]
    history = [{"role": "assistant", "content": first.choices[0].message.content}, {"role": "user", "content": "Sure?"}]
    further = ask(shown(1), *history)
    cached = further.usage.prompt_tokens_details.cached_tokens
    assert cached >= first.usage.prompt_tokens - 6  # but for what opens an answer
    # The very same ids behind a picture that nobody has shown: nothing from that picture on is known.
    swapped = ask(shown(4), *history)
    assert swapped.usage.prompt_tokens == further.usage.prompt_tokens
    assert swapped.usage.prompt_tokens_details.cached_tokens < receipt["image_tokens"]
    # A second picture in a later turn is seen as well.
    two = ask(shown(1), history[0], {"role": "user", "content": [picture(3), {"type": "text", "text": "And this?"}]})
    assert two.model_extra["kvfork"]["receipt"]["image_tokens"] == 2 * receipt["image_tokens"]


def test_a_file_that_is_no_picture_is_named(client: openai.OpenAI) -> None:
    url = "data:image/png;base64," + base64.b64encode(b"no picture").decode()
    content = [{"type": "text", "text": "See"}, {"type": "image_url", "image_url": {"url": url}}]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": content}], max_tokens=1)
    assert caught.value.param == "messages[0].content[1]"


@pytest.mark.slow
def test_a_question_before_its_picture_is_answered_as_one_behind_it() -> None:
    scene = make_scene(random.Random(1), held_out=True)
    file = io.BytesIO()
    draw(scene, 96, 96).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts: list[Any] = [
        {"type": "text", "text": f"What colour is the {scene.things[0].shape}?"},
        {"type": "image_url", "image_url": {"url": url}},
    ]
    with LiveServer("tiny-vision") as server, LiveGateway(server) as gateway, gateway.client() as client:
        for content in (parts, parts[::-1]):
            messages: Any = [{"role": "user", "content": content}]
            answer = client.chat.completions.create(model="tiny-vision", messages=messages, max_tokens=8, temperature=0)
            assert answer.choices[0].message.content == scene.things[0].colour
