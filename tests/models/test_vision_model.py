"""tiny-vision as a model: trained on what its folder gives at use, the same function as upstream's, and it sees."""

import random

import numpy as np
import pytest

pytest.importorskip("mlx_vlm")
pytest.importorskip("PIL")

from mlx.utils import tree_flatten
from mlx_vlm.models.qwen3_5 import Model, ModelConfig

from service.models import KNOWN, ensure, verify
from service.models.vision import batches, evaluate, folder, net, tokens, train
from service.models.vision.chats import FORMS, make_chat
from service.models.vision.drawing import draw
from service.models.vision.questions import KINDS
from service.models.vision.scenes import make_scene

pytestmark = pytest.mark.mlx
mx = net.mx


shipped = pytest.mark.skipif(not folder.WEIGHTS.is_file(), reason="no weights yet: make train-vision")


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    """A folder of initial weights, for what does not depend on their values."""
    where, weights = tmp_path_factory.mktemp("tiny-vision"), tmp_path_factory.mktemp("weights") / "initial.safetensors"
    folder.write_weights(
        weights, {name: np.array(value) for name, value in tree_flatten(net.new_model(1).parameters())}
    )
    folder.build(where, weights)
    return where


@pytest.fixture(scope="module")
def tokenizer():
    return tokens.build_tokenizer()


def chat_of(form, seed, *, held_out=True):
    rng = random.Random(seed)
    return make_chat(rng, form, lambda: make_scene(rng, held_out=held_out))


def pixels_of(scenes, size):
    """pictures × patches × values."""
    return np.stack([batches.patches_of(scene, size) for scene in scenes])


@shipped
def test_the_shipped_tokenizer_is_the_one_that_the_texts_give(tokenizer):
    shipped = folder.WEIGHTS.with_suffix(".tokenizer.json").read_text(encoding="utf-8")
    assert shipped == tokenizer.to_str(pretty=True)
    assert [tokenizer.token_to_id(token) for token in tokens.SPECIALS] == list(range(len(tokens.SPECIALS)))
    assert tokenizer.get_vocab_size() <= tokens.VOCAB_SIZE


@shipped
def test_a_known_model_of_the_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("KVFORK_CACHE_DIR", str(tmp_path))
    assert "tiny-vision" in KNOWN
    where = ensure("tiny-vision")
    assert where == tmp_path / "models" / "tiny-vision"
    verify(where)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("size", [(96, 96), (288, 32), (32, 288)], ids=str)
@pytest.mark.parametrize("text_first", [False, True], ids=["picture first", "text first"])
def test_training_sees_what_template_processor_and_upstream_give_at_use(untrained, tokenizer, form, size, text_first):
    chat = chat_of(form, f"{form} {size}")
    width, height = size
    grid = (height // folder.PATCH // folder.MERGE, width // folder.PATCH // folder.MERGE)
    batch = batches.stack([batches.encode_chat(tokenizer, chat, grid)], size)

    model = evaluate.Model(untrained, text_first=text_first)
    pictures = [draw(scene, width, height) for message in chat for scene in message.pictures]
    given = model.inputs(list(chat), pictures, add_generation_prompt=False)
    ids = np.array(given["input_ids"])
    length = ids.shape[1]
    assert (batch.ids[:, :length] == ids).all() and not batch.ids[:, length:].any()
    found = model.embed(given)
    positions = np.broadcast_to(np.array(found.position_ids), (3, 1, length))
    assert (batch.positions[:, :, :length] == positions).all()
    if pictures:
        ours = pixels_of(batch.scenes, size)
        assert np.abs(np.array(given["pixel_values"]).reshape(ours.shape) - ours).max() < 1e-5


@pytest.mark.parametrize("form", ["another", "long"])
def test_the_training_pass_computes_what_upstream_computes(tokenizer, form):
    chats = [chat_of(form, f"{form} {index}", held_out=False) for index in range(2)]
    batch = batches.stack([batches.encode_chat(tokenizer, chat, (3, 5)) for chat in chats], (160, 96))
    model = net.new_model(3)
    arrays = train.arrays_of(batch)
    patches, grid = pixels_of(batch.scenes, (160, 96)), (6, 10)
    features = net.see(model, mx.array(patches), grid)
    hidden, _ = net.read(model, arrays["ids"], features, arrays["slots"], arrays["positions"])
    ours = model.language_model.model.embed_tokens.as_linear(hidden)

    reference = Model(ModelConfig.from_dict(folder.CONFIG))
    reference.load_weights(tree_flatten(model.parameters()))
    reference.eval()
    seen = 0
    for index, chat in enumerate(chats):
        count = sum(len(message.pictures) for message in chat)
        length = len(batches.encode_chat(tokenizer, chat, (3, 5)).ids)
        ids = arrays["ids"][index : index + 1, :length]
        pixels = mx.array(patches[seen : seen + count].reshape(-1, patches.shape[-1]))
        found = reference.get_input_embeddings(ids, pixels, image_grid_thw=mx.array([[1, *grid]] * count))
        theirs = reference.language_model(
            ids,
            inputs_embeds=found.inputs_embeds,
            position_ids=found.position_ids,
            cache=reference.language_model.make_cache(),
        ).logits[0]
        assert mx.abs(ours[index, :length] - theirs).max().item() < 1e-4
        seen += count


def test_the_solver_inverts_and_its_gradient_is_that_of_the_inverse():
    strict = mx.tril(mx.random.normal((3, 8, 8), key=mx.random.key(1)), -1)
    weights = mx.random.normal((3, 8, 8), key=mx.random.key(2))
    whole = net.unit_lower_inverse(strict) @ (strict + mx.eye(8))
    assert mx.abs(whole - mx.eye(8)).max().item() < 1e-4

    def ours(x):
        return (weights * net.unit_lower_inverse(x)).sum()

    def series(x):
        total, power = mx.eye(8), mx.eye(8)
        for _ in range(7):
            power = -(power @ x)
            total = total + power
        return (weights * total).sum()

    # Only below the diagonal: elsewhere the series is not the inverse.
    mine, theirs = (mx.tril(mx.grad(of)(strict), -1) for of in (ours, series))
    assert mx.abs(mine - theirs).max().item() < 1e-3 * mx.abs(theirs).max().item()


@pytest.mark.slow
def test_a_training_that_was_stopped_goes_on_as_if_it_had_not_been(tmp_path):
    plan = {"seed": 5, "steps": 4, "look_steps": 1, "budget": 256, "pictures": 64}
    whole = train.Training(**plan, work=tmp_path / "whole")
    losses = [whole.advance() for _ in range(4)]
    first = train.Training(**plan, work=tmp_path / "parts")
    assert [first.advance() for _ in range(2)] == losses[:2]
    first.save()
    second = train.Training(**plan, work=tmp_path / "parts")
    assert second.restore()
    assert [second.advance() for _ in range(2)] == losses[2:]
    with pytest.raises(ValueError, match="another training"):
        train.Training(**{**plan, "seed": 6}, work=tmp_path / "parts").restore()


@pytest.mark.slow
@shipped
def test_the_shipped_model_answers_nine_in_ten_questions_about_held_out_pictures(tmp_path):
    folder.build(tmp_path)
    scores = evaluate.evaluate(evaluate.Model(tmp_path), each=20, seed="test")
    right, asked = (sum(getattr(scores[kind], name) for kind in KINDS) for name in ("right", "asked"))
    assert right >= 0.9 * asked, scores
