"""Trains tiny-vision on the CPU: `python -m service.models.vision.train --work DIR`.

Owns the schedule, the checkpoints and the progress lines. What step N trains on and with which rate depends on the
seed and N alone, so an interrupted training goes on where its last checkpoint is, as if nothing had happened.

First the tower learns to bring what lies under each of its tokens near the words for it; then the whole model learns to
answer, that first loss staying a part of it. Without the first part the same answers take many times as long to learn.
"""

import argparse
import ctypes
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from service.models.vision import batches, folder, net, tokens
from service.models.vision.batches import Batch
from service.models.vision.net import mx, nn
from service.models.vision.questions import PLURAL
from service.models.vision.scenes import COLOURS, SHAPES, Scene, make_scene

import mlx.optimizers as optim  # isort: skip - after `net` has prepared the CPU
from mlx.utils import tree_flatten, tree_unflatten  # isort: skip

STEPS, LOOK_STEPS = 2000, 130
BUDGET = 2048  # tokens in a batch
SEED = 1
_MATRIX_RATE, _OTHER_RATE = 0.02, 0.003  # of Muon and of AdamW
_WARM_UP = 30
_LOOK_SHARE = 1.0
_SAID_SHARE = 0.1
_LOOK_PICTURES = 64
_CHECKPOINT_EVERY = 100
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # malloc.h


class Looking:
    """What the tower learns first: a token's feature is near the words for what lies under it.

    The text model finds its words again in the features, so that it can compare and copy instead of translating.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        def ids(*forms: str) -> list[int]:
            found = [tokenizer.encode(form).ids for form in forms]
            assert all(len(one) == 1 for one in found), forms  # the tokenizer is made for these words
            return [one[0] for one in found]

        def family(words: Sequence[str], pattern: str) -> list[int]:
            return ids(*(pattern.format(word) for word in words))

        shapes, plurals = ("nothing", *SHAPES), ("nothing", *PLURAL.values())
        colours = ("nothing", *COLOURS)
        rows, columns = ("top", "middle", "bottom"), ("left", "centre", "right")
        both = (" {}", "{}")  # in a sentence and at the start of an answer
        spelled = [(0, family(shapes, pattern)) for pattern in both] + [(0, family(plurals, " {}"))]
        spelled += [(1, family(colours, pattern)) for pattern in both]
        spelled += [(2, family(rows, pattern)) for pattern in both] + [(3, family(columns, " {}"))]
        self._families = [(index, mx.array(words)) for index, words in spelled]

    @staticmethod
    def labels(scenes: Sequence[Scene], grid: tuple[int, int]) -> np.ndarray:
        """int32, pictures × tokens × 4: shape and colour of what has its middle there, 0 for nothing; row; column."""
        rows, columns = grid[0] // folder.MERGE, grid[1] // folder.MERGE
        labels = np.zeros((len(scenes), rows * columns, 4), np.int32)
        row, column = np.divmod(np.arange(rows * columns), columns)
        labels[..., 2], labels[..., 3] = row * 3 // rows, column * 3 // columns
        for index, scene in enumerate(scenes):
            for thing in scene.things:
                token = int(thing.y * rows) * columns + int(thing.x * columns)
                labels[index, token, :2] = 1 + SHAPES.index(thing.shape), 1 + list(COLOURS).index(thing.colour)
        return labels

    def loss(self, model: net.Model, features: mx.array, labels: mx.array) -> mx.array:
        """Cross entropy of the right word among those of its family, averaged over families and tokens."""
        # The features go to the words, not the words to them: else the words lose what sets them apart in a text.
        words = mx.stop_gradient(model.language_model.model.embed_tokens.weight)
        losses = [
            nn.losses.cross_entropy(features @ words[ids].T, labels[..., index], reduction="mean")
            for index, ids in self._families
        ]
        return sum(losses) / len(losses)


def arrays_of(batch: Batch) -> dict[str, mx.array]:
    """What a training step takes."""
    is_image = batch.ids == folder.CONFIG["image_token_id"]
    slots = np.full(batch.ids.shape, -1, np.int32)
    slots[is_image] = np.arange(is_image.sum())
    targets = np.roll(batch.ids, -1, axis=1)
    answers = np.roll(batch.answers, -1, axis=1)
    answers[:, -1] = 0
    # What a user says is learned a little too: it is mostly about what is on the picture.
    said = (targets > folder.CONFIG["video_token_id"]) * _SAID_SHARE
    weights = np.maximum(answers, said.astype(np.float32))
    weights[:, -1] = 0
    arrays = {"ids": batch.ids, "positions": batch.positions, "slots": slots, "targets": targets}
    arrays |= {"answers": answers, "weights": weights}
    if batch.scenes:
        arrays |= {"pixels": batch.pixels, "labels": Looking.labels(batch.scenes, batch.grid)}
    return {name: mx.array(value) for name, value in arrays.items()}


class Training:
    """Model, optimizer and step number; saved and restored together."""

    def __init__(self, *, seed: int, steps: int, look_steps: int, budget: int, work: Path) -> None:
        self._seed, self._steps, self._look_steps, self._budget = seed, steps, look_steps, budget
        self._work = work
        self._tokenizer = tokens.build_tokenizer()
        self._looking = Looking(self._tokenizer)
        self.model = net.new_model(seed)
        self.step = 0
        self._matrices = optim.Muon(learning_rate=0.0, weight_decay=0.01)
        self._others = optim.AdamW(learning_rate=0.0, betas=[0.9, 0.99], weight_decay=0.0)
        self._optimizer = optim.MultiOptimizer([self._matrices, self._others], [_is_matrix])
        self._optimizer.init(self.model.trainable_parameters())
        self._compile()

    def _compile(self) -> None:
        state = [self.model.state, self._matrices.state, self._others.state]

        def compiled(loss_of: Callable[..., tuple[mx.array, mx.array]]) -> Callable[..., mx.array]:
            differentiated = nn.value_and_grad(self.model, loss_of)

            def step(*given: Any) -> mx.array:
                (_, loss), gradients = differentiated(self.model, *given)
                gradients, _ = optim.clip_grad_norm(gradients, 1.0)
                self._optimizer.update(self.model, gradients)
                return loss

            return mx.compile(step, inputs=state, outputs=state)

        self._state, self._look, self._answer = state, compiled(self._look_loss), compiled(self._answer_loss)

    def _look_loss(
        self, model: net.Model, pixels: mx.array, labels: mx.array, grid: tuple[int, int]
    ) -> tuple[mx.array, mx.array]:
        loss = self._looking.loss(model, net.see(model, pixels, grid), labels)
        return loss, loss

    def _answer_loss(
        self, model: net.Model, batch: dict[str, mx.array], grid: tuple[int, int]
    ) -> tuple[mx.array, mx.array]:
        features = net.see(model, batch["pixels"], grid) if "pixels" in batch else None
        hidden = net.read(model, batch["ids"], features, batch["slots"], batch["positions"])
        losses = net.text_losses(model, hidden, batch["targets"])
        answers = (losses * batch["answers"]).sum() / batch["answers"].sum()
        loss = (losses * batch["weights"]).sum() / batch["weights"].sum()
        if features is not None:
            loss = loss + _LOOK_SHARE * self._looking.loss(model, features, batch["labels"])
        return loss, answers

    def advance(self) -> float:
        """One step; returns its loss: of the answers, or of the words as long as only the tower learns."""
        rng = random.Random(f"tiny-vision {self._seed} {self.step}")
        rate = self._rate()
        self._matrices.learning_rate, self._others.learning_rate = _MATRIX_RATE * rate, _OTHER_RATE * rate
        if self.step < self._look_steps:
            size = (folder.SIDE, folder.SIDE)
            scenes = [make_scene(rng, held_out=False) for _ in range(_LOOK_PICTURES)]
            pixels = mx.array(np.stack([batches.patches_of(scene, size) for scene in scenes]))
            grid = (folder.SIDE // folder.PATCH, folder.SIDE // folder.PATCH)
            loss = self._look(pixels, mx.array(Looking.labels(scenes, grid)), grid)
        else:
            batch = batches.make_batch(self._tokenizer, rng, self._budget, self._progress())
            loss = self._answer(arrays_of(batch), batch.grid)
        mx.eval(self._state, loss)
        self.step += 1
        return loss.item()

    def save(self) -> None:
        """Write a checkpoint in place of the last one."""
        self._work.mkdir(parents=True, exist_ok=True)
        values = {f"model.{name}": value for name, value in tree_flatten(self.model.parameters())}
        values |= {f"optimizer.{name}": value for name, value in tree_flatten(self._optimizer.state)}
        partial = self._work / "partial.safetensors"
        mx.save_safetensors(str(partial), values, {"about": json.dumps({"step": self.step, **self._plan()})})
        partial.replace(self._work / "checkpoint.safetensors")

    def restore(self) -> bool:
        """Go on from the checkpoint, if there is one. ValueError for one of another plan."""
        path = self._work / "checkpoint.safetensors"
        if not path.is_file():
            return False
        values, metadata = mx.load(str(path), return_metadata=True)
        about = json.loads(metadata["about"])
        step = about.pop("step")
        if about != self._plan():
            raise ValueError(f"{path} belongs to another training: {about}, not {self._plan()}")
        self.model.update(tree_unflatten(_within(values, "model.")))
        self._optimizer.state = tree_unflatten(_within(values, "optimizer."))
        self._compile()
        self.step = step
        return True

    def write(self, path: Path) -> None:
        """Store the model's weights, without the head."""
        values = {name: np.array(value) for name, value in tree_flatten(self.model.parameters())}
        folder.write_weights(path, values)

    def _plan(self) -> dict[str, Any]:
        names = ("seed", "steps", "look_steps", "budget")
        return dict(zip(names, (self._seed, self._steps, self._look_steps, self._budget), strict=True))

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
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop early, leaving a checkpoint")
    chosen = parser.parse_args(arguments)
    _keep_memory()
    training = Training(
        seed=chosen.seed, steps=chosen.steps, look_steps=chosen.look_steps, budget=chosen.budget, work=chosen.work
    )
    if training.restore():
        _say(f"goes on at step {training.step}")
    started, first = time.monotonic(), training.step
    losses: list[float] = []
    while training.step < chosen.steps and time.monotonic() - started < 60 * chosen.minutes:
        losses.append(training.advance())
        if training.step % 20 == 0:
            pace = (time.monotonic() - started) / (training.step - first)
            left = pace * (chosen.steps - training.step) / 60
            _say(
                f"step {training.step:5} of {chosen.steps}  loss {np.mean(losses):.4f}"
                f"  {pace:.2f} s a step, {left:.0f} minutes left"
            )
            losses.clear()
        if training.step % _CHECKPOINT_EVERY == 0:
            training.save()
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
