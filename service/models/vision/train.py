"""Trains tiny-vision on the CPU: `python -m service.models.vision.train --work DIR`.

Owns the schedule, the checkpoints and the progress lines. What step N trains on and with which rate depends on the
seed and N alone, so an interrupted training goes on where its last checkpoint is, as if nothing had happened.

First the tower learns to bring what lies under each of its tokens near the words for it, and stays as it is from then
on; then the text model learns to answer, from features of pictures that the tower sees once, which spares the tower in
every further step.
"""

import argparse
import ctypes
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from service.models.vision import batches, folder, net, tokens
from service.models.vision.batches import Batch
from service.models.vision.chats import Message
from service.models.vision.gallery import Gallery, pixels_of
from service.models.vision.looking import Looking
from service.models.vision.net import mx, nn
from service.models.vision.pointing import Pointing
from service.models.vision.questions import KINDS, ask
from service.models.vision.scenes import make_scene

import mlx.optimizers as optim  # isort: skip - after `net` has prepared the CPU
from mlx.utils import tree_flatten, tree_unflatten  # isort: skip

STEPS, LOOK_STEPS = 1500, 200
BUDGET = 1536  # tokens in a batch
PICTURES = 4000
SEED = 1
_LOOK_RATE = 0.02  # of Muon, for the tower
_MATRIX_RATE, _OTHER_RATE = 0.006, 0.002  # of Muon and of AdamW
_WORD_RATE = 0.0001  # of AdamW for the embeddings: slow, or the words leave the features that were made like them
_POINT_SHARE = 0.5  # of the losses of where the attentions look
_WARM_UP = 30
_LOOK_PICTURES = 64
_EVERY = 20  # steps between two lines
_CHECKPOINT_EVERY = 100
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # malloc.h


def arrays_of(batch: Batch) -> dict[str, mx.array]:
    """What the text model takes; `places` are those of the tokens before an answer's, among all tokens of the batch."""
    is_image = batch.ids == folder.CONFIG["image_token_id"]
    slots = np.full(batch.ids.shape, -1, np.int32)
    slots[is_image] = np.arange(is_image.sum())
    targets = np.flatnonzero(batch.answers)
    padding = -len(targets) % 32
    weights = np.concatenate([np.ones(len(targets)), np.zeros(padding)]).astype(np.float32)
    targets = np.concatenate([targets, np.ones(padding, np.int64)])
    arrays = {"ids": batch.ids, "positions": batch.positions, "slots": slots, "weights": weights}
    arrays |= {"points": batch.points, "recalls": batch.recalls}
    arrays |= {"places": (targets - 1).astype(np.int32), "targets": batch.ids.reshape(-1)[targets]}
    return {name: mx.array(value) for name, value in arrays.items()}


class Training:
    """Model, optimizer and step number; saved and restored together."""

    def __init__(self, *, seed: int, steps: int, look_steps: int, budget: int, pictures: int, work: Path) -> None:
        self._plan = {"seed": seed, "steps": steps, "look_steps": look_steps, "budget": budget, "pictures": pictures}
        self._seed, self._steps, self._look_steps, self._budget = seed, steps, look_steps, budget
        self._pictures, self._gallery, self._test = pictures, None, None
        self._work = work
        self._tokenizer = tokens.build_tokenizer()
        self._looking, self._pointing = Looking(self._tokenizer), Pointing(self._tokenizer)
        self.model = net.new_model(seed)
        self._looking.begin(self.model)
        self.step = 0
        self._prepare()

    def _prepare(self) -> None:
        """The optimizer and the compiled step of the part that the current step belongs to."""
        looking = self.step < self._look_steps
        self.model.unfreeze()
        (self.model.language_model if looking else self.model.vision_tower).freeze()
        self._matrices = optim.Muon(learning_rate=0.0, weight_decay=0.01)
        self._words, self._others = (
            optim.AdamW(learning_rate=0.0, betas=[0.9, 0.99], weight_decay=0.0) for _ in range(2)
        )
        self._optimizer = optim.MultiOptimizer(
            [self._matrices, self._words, self._others], [_is_matrix, lambda path, _: "embed_tokens" in path]
        )
        self._optimizer.init(self.model.trainable_parameters())
        self._compile()
        if not looking and self._gallery is None:
            self._gallery = Gallery(self.model, str(self._seed), self._pictures, held_out=False)
            self._test = Gallery(self.model, "test", 200, held_out=True)

    def _compile(self) -> None:
        """Anew whenever the optimizer's state is another object."""
        looking = self.step < self._look_steps
        self._state = [self.model.state, self._matrices.state, self._words.state, self._others.state]
        differentiated = nn.value_and_grad(self.model, self._look_loss if looking else self._answer_loss)

        def step(*given: Any) -> mx.array:
            (_, loss), gradients = differentiated(self.model, *given)
            gradients, _ = optim.clip_grad_norm(gradients, 1.0)
            self._optimizer.update(self.model, gradients)
            return loss

        self._advance: Callable[..., mx.array] = mx.compile(step, inputs=self._state, outputs=self._state)

    def _look_loss(self, model: net.Model, pixels: mx.array, labels: mx.array) -> tuple[mx.array, mx.array]:
        side = folder.SIDE // folder.PATCH
        loss = self._looking.loss(model, net.see(model, pixels, (side, side)), labels)
        return loss, loss

    def _answer_loss(
        self, model: net.Model, batch: dict[str, mx.array], features: mx.array
    ) -> tuple[mx.array, mx.array]:
        said, looks = self._said(model, batch, features)
        losses = net.text_losses(model, said, batch["targets"])
        answers = (losses * batch["weights"]).sum() / batch["weights"].sum()
        pointing = net.point_losses(looks[0], batch["points"]) + net.point_losses(looks[-1], batch["recalls"])
        return answers + _POINT_SHARE * pointing, answers

    def _said(
        self, model: net.Model, batch: dict[str, mx.array], features: mx.array
    ) -> tuple[mx.array, list[mx.array]]:
        """Hidden states before the answers' tokens, and where each attention looks."""
        hidden, looks = net.read(model, batch["ids"], features, batch["slots"], batch["positions"])
        return hidden.reshape(-1, hidden.shape[-1])[batch["places"]], looks

    def advance(self) -> float:
        """One step; returns its loss: of the words as long as the tower learns, then of the answers."""
        rng = random.Random(f"tiny-vision {self._seed} {self.step}")
        rate = self._rate()
        self._matrices.learning_rate = rate * (_LOOK_RATE if self.step < self._look_steps else _MATRIX_RATE)
        self._words.learning_rate, self._others.learning_rate = _WORD_RATE * rate, _OTHER_RATE * rate
        if self.step < self._look_steps:
            scenes = [make_scene(rng, held_out=False) for _ in range(_LOOK_PICTURES)]
            side = folder.SIDE // folder.PATCH
            loss = self._advance(pixels_of(scenes), mx.array(Looking.labels(scenes, (side, side))))
        else:
            scenes = self._gallery.scenes
            batch = batches.make_batch(
                self._tokenizer, self._pointing, rng, lambda: rng.choice(scenes), self._budget, self._progress()
            )
            loss = self._advance(arrays_of(batch), self._features(self._gallery, batch))
        mx.eval(self._state, loss)
        self.step += 1
        if self.step == self._look_steps:
            self._prepare()
        return loss.item()

    def test(self) -> dict[str, float]:
        """Shares of right answers by kind, on single questions about 200 held-out pictures, by the training's pass."""
        rng = random.Random("test")
        right: Counter[str] = Counter()
        asked: Counter[str] = Counter()
        for kind in KINDS:
            questions = [(scene, ask(rng, scene, kind)) for scene in self._test.scenes]
            rows = [
                batches.encode_chat(
                    self._tokenizer,
                    (
                        Message(role="user", text=question.text, pictures=(scene,)),
                        Message(role="assistant", text=question.answer, kind=kind),
                    ),
                    batches.GRID,
                )
                for scene, question in questions
                if question is not None
            ]
            batch = batches.stack(rows, (folder.SIDE, folder.SIDE))
            arrays = arrays_of(batch)
            hidden, _ = self._said(self.model, arrays, self._features(self._test, batch))
            best = self.model.language_model.model.embed_tokens.as_linear(hidden).argmax(axis=-1)
            hit = np.array(best == arrays["targets"])
            row = np.array(arrays["places"]) // batch.ids.shape[1]
            wrong = set(row[~hit & (np.array(arrays["weights"]) > 0)].tolist())
            asked[kind], right[kind] = len(rows), len(rows) - len(wrong)
        return {kind: right[kind] / asked[kind] for kind in KINDS}

    def _features(self, gallery: Gallery, batch: Batch) -> mx.array:
        width = folder.CONFIG["vision_config"]["out_hidden_size"]
        if not batch.scenes:
            return mx.zeros((1, 1, width))
        return mx.array(gallery.features(batch.scenes))

    def save(self) -> None:
        """Write a checkpoint in place of the last one."""
        self._work.mkdir(parents=True, exist_ok=True)
        values = {f"model.{name}": value for name, value in tree_flatten(self.model.parameters())}
        values |= {f"optimizer.{name}": value for name, value in tree_flatten(self._optimizer.state)}
        partial = self._work / "partial.safetensors"
        mx.save_safetensors(str(partial), values, {"about": json.dumps({"step": self.step, **self._plan})})
        partial.replace(self._work / "checkpoint.safetensors")

    def restore(self) -> bool:
        """Go on from the checkpoint, if there is one. ValueError for one of another plan."""
        path = self._work / "checkpoint.safetensors"
        if not path.is_file():
            return False
        values, metadata = mx.load(str(path), return_metadata=True)
        about = json.loads(metadata["about"])
        step = about.pop("step")
        if about != self._plan:
            raise ValueError(f"{path} belongs to another training: {about}, not {self._plan}")
        self.model.update(tree_unflatten(_within(values, "model.")))
        self.step = step
        self._prepare()
        self._optimizer.state = tree_unflatten(_within(values, "optimizer."))
        self._compile()
        return True

    def write(self, path: Path) -> None:
        """Store the model's weights, without the head."""
        values = {name: np.array(value) for name, value in tree_flatten(self.model.parameters())}
        folder.write_weights(path, values)

    def _progress(self) -> float:
        return (self.step - self._look_steps) / (self._steps - self._look_steps)

    def _rate(self) -> float:
        """Share of the full rate: up from nothing, then down to nothing, in each of the two parts."""
        if self.step < self._look_steps:
            return _slope(self.step, self._look_steps, flat=0.7)
        return _slope(self.step - self._look_steps, self._steps - self._look_steps, flat=0.4)


def _slope(step: int, steps: int, *, flat: float) -> float:
    down = (steps - step) / (steps * (1 - flat))
    return min(1.0, (step + 1) / _WARM_UP, down)


def _is_matrix(path: str, value: mx.array) -> bool:
    return value.ndim == 2 and min(value.shape) > 16 and "embed" not in path and "head" not in path


def _within(values: dict[str, mx.array], prefix: str) -> list[tuple[str, mx.array]]:
    return [(name.removeprefix(prefix), value) for name, value in values.items() if name.startswith(prefix)]


def main(arguments: list[str] | None = None) -> int:
    """Train, with a line of progress every few steps."""
    parser = argparse.ArgumentParser(prog="python -m service.models.vision.train", description="Train tiny-vision.")
    parser.add_argument("--work", type=Path, required=True, help="folder of the checkpoint; goes on from one there")
    parser.add_argument("--out", type=Path, default=folder.WEIGHTS, help="file of the weights (default: the package's)")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--look-steps", type=int, default=LOOK_STEPS, help="of them for the tower alone")
    parser.add_argument("--budget", type=int, default=BUDGET, help="tokens in a batch")
    parser.add_argument("--pictures", type=int, default=PICTURES, help="pictures to chat about")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop early, leaving a checkpoint")
    chosen = parser.parse_args(arguments)
    _keep_memory()
    training = Training(
        seed=chosen.seed,
        steps=chosen.steps,
        look_steps=chosen.look_steps,
        budget=chosen.budget,
        pictures=chosen.pictures,
        work=chosen.work,
    )
    if training.restore():
        _say(f"goes on at step {training.step}")
    started, first = time.monotonic(), training.step
    losses: list[float] = []
    while training.step < chosen.steps and time.monotonic() - started < 60 * chosen.minutes:
        losses.append(training.advance())
        if training.step % _EVERY == 0:
            pace = (time.monotonic() - started) / (training.step - first)
            left = pace * (chosen.steps - training.step) / 60
            _say(
                f"step {training.step:5} of {chosen.steps}  loss {np.mean(losses):.4f}"
                f"  {pace:.2f} s a step, {left:.0f} minutes left"
            )
            losses.clear()
        if training.step % _CHECKPOINT_EVERY == 0 or training.step == chosen.steps:
            training.save()
            if training.step > chosen.look_steps:
                _say("    " + "  ".join(f"{kind} {share:.0%}" for kind, share in training.test().items()))
    training.save()
    training.write(chosen.out)
    _say(f"wrote {chosen.out} ({chosen.out.stat().st_size / 1e6:.1f} MB) at step {training.step}")
    return 0


def _keep_memory() -> None:
    """Let glibc keep what is freed: a step takes and frees gigabytes, and asking the system for them costs a fifth."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for setting, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, 2**31 - 1), (_M_ARENA_MAX, 1)):
            mallopt(setting, value)


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
