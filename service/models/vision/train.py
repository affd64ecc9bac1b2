"""Trains tiny-vision on the CPU: `python -m service.models.vision.train --work DIR`.

Owns the schedule, the checkpoints and the progress lines. What step N trains on and with which rate depends on the
seed and N alone, so an interrupted training goes on where its last checkpoint is, as if nothing had happened.

First the tower alone learns to say what lies under each of its tokens, through a head that is thrown away; then the
whole model learns to answer, the head's loss staying as a small part. Without the first part the same answers take
several times as long to learn.
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

from service.models.vision import batches, folder, net, tokens
from service.models.vision.batches import Batch
from service.models.vision.net import mx, nn
from service.models.vision.scenes import COLOURS, SHAPES, Scene, make_scene

import mlx.optimizers as optim  # isort: skip - after `net` has prepared the CPU
from mlx.utils import tree_flatten, tree_unflatten  # isort: skip

STEPS, LOOK_STEPS = 1600, 110
BUDGET = 2048  # tokens in a batch
SEED = 1
_MATRIX_RATE, _OTHER_RATE = 0.02, 0.003  # of Muon and of AdamW
_WARM_UP = 30
_LOOK_SHARE = 0.3
_SAID_SHARE = 0.1
_LOOK_SIZES = (1 + len(SHAPES), 1 + len(COLOURS), 9)  # shape or none, colour or none, place
_LOOK_PICTURES = 64
_CHECKPOINT_EVERY = 100
_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # malloc.h


class Trainee(nn.Module):
    """The model and the head that names what lies under each of the tower's tokens."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.model = net.new_model(seed)
        self.head = nn.Linear(folder.CONFIG["vision_config"]["out_hidden_size"], sum(_LOOK_SIZES))


def look_labels(scenes: Sequence[Scene], grid: tuple[int, int]) -> np.ndarray:
    """int32, pictures × tokens × 3: shape and colour of what has its middle there, 0 for nothing; the place there."""
    rows, columns = grid[0] // folder.MERGE, grid[1] // folder.MERGE
    labels = np.zeros((len(scenes), rows * columns, 3), np.int32)
    row, column = np.divmod(np.arange(rows * columns), columns)
    labels[..., 2] = row * 3 // rows * 3 + column * 3 // columns
    for index, scene in enumerate(scenes):
        for thing in scene.things:
            token = int(thing.y * rows) * columns + int(thing.x * columns)
            labels[index, token, :2] = 1 + SHAPES.index(thing.shape), 1 + list(COLOURS).index(thing.colour)
    return labels


def look_loss(trainee: Trainee, features: mx.array, labels: mx.array) -> mx.array:
    """Mean cross entropy of the head's answers, summed over the three."""
    parts = mx.split(trainee.head(features), [_LOOK_SIZES[0], sum(_LOOK_SIZES[:2])], axis=-1)
    return sum(nn.losses.cross_entropy(part, labels[..., index], reduction="mean") for index, part in enumerate(parts))


def _tower_step(
    trainee: Trainee, pixels: mx.array, labels: mx.array, grid: tuple[int, int]
) -> tuple[mx.array, mx.array]:
    loss = look_loss(trainee, net.see(trainee.model, pixels, grid), labels)
    return loss, loss


def _whole_step(trainee: Trainee, batch: dict[str, mx.array], grid: tuple[int, int]) -> tuple[mx.array, mx.array]:
    features = net.see(trainee.model, batch["pixels"], grid) if "pixels" in batch else None
    hidden = net.read(trainee.model, batch["ids"], features, batch["slots"], batch["positions"])
    weights, answers = batch["weights"], batch["answers"]
    loss = net.text_loss(trainee.model, hidden, batch["targets"], weights)
    if features is not None:
        loss = loss + _LOOK_SHARE * look_loss(trainee, features, batch["labels"])
    return loss, net.text_loss(trainee.model, mx.stop_gradient(hidden), batch["targets"], answers)


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
        arrays |= {"pixels": batch.pixels, "labels": look_labels(batch.scenes, batch.grid)}
    return {name: mx.array(value) for name, value in arrays.items()}


class Training:
    """Model, optimizer and step number; saved and restored together."""

    def __init__(self, *, seed: int, steps: int, look_steps: int, budget: int, work: Path) -> None:
        self._seed, self._steps, self._look_steps, self._budget = seed, steps, look_steps, budget
        self._work = work
        self._tokenizer = tokens.build_tokenizer()
        self.trainee = Trainee(seed)
        self.step = 0
        self._matrices = optim.Muon(learning_rate=0.0, weight_decay=0.01)
        self._others = optim.AdamW(learning_rate=0.0, betas=[0.9, 0.99], weight_decay=0.0)
        self._optimizer = optim.MultiOptimizer([self._matrices, self._others], [_is_matrix])
        self._optimizer.init(self.trainee.trainable_parameters())
        self._compile()

    def _compile(self) -> None:
        state = [self.trainee.state, self._matrices.state, self._others.state]

        def compiled(loss_of: Callable[..., tuple[mx.array, mx.array]]) -> Callable[..., mx.array]:
            differentiated = nn.value_and_grad(self.trainee, loss_of)

            def step(*given: Any) -> mx.array:
                (_, loss), gradients = differentiated(self.trainee, *given)
                gradients, _ = optim.clip_grad_norm(gradients, 1.0)
                self._optimizer.update(self.trainee, gradients)
                return loss

            return mx.compile(step, inputs=state, outputs=state)

        self._state, self._look, self._answer = state, compiled(_tower_step), compiled(_whole_step)

    def advance(self) -> float:
        """One step; returns its loss: of the answers, or of the head as long as only the tower learns."""
        rng = random.Random(f"tiny-vision {self._seed} {self.step}")
        rate = self._rate()
        self._matrices.learning_rate, self._others.learning_rate = _MATRIX_RATE * rate, _OTHER_RATE * rate
        if self.step < self._look_steps:
            size = (folder.SIDE, folder.SIDE)
            scenes = [make_scene(rng, held_out=False) for _ in range(_LOOK_PICTURES)]
            pixels = mx.array(np.stack([batches.patches_of(scene, size) for scene in scenes]))
            grid = (folder.SIDE // folder.PATCH, folder.SIDE // folder.PATCH)
            loss = self._look(pixels, mx.array(look_labels(scenes, grid)), grid)
        else:
            batch = batches.make_batch(self._tokenizer, rng, self._budget, self._progress())
            loss = self._answer(arrays_of(batch), batch.grid)
        mx.eval(self._state, loss)
        self.step += 1
        return loss.item()

    def save(self) -> None:
        """Write a checkpoint in place of the last one."""
        self._work.mkdir(parents=True, exist_ok=True)
        values = {f"trainee.{name}": value for name, value in tree_flatten(self.trainee.parameters())}
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
        self.trainee.update(tree_unflatten(_within(values, "trainee.")))
        self._optimizer.state = tree_unflatten(_within(values, "optimizer."))
        self._compile()
        self.step = step
        return True

    def write(self, path: Path) -> None:
        """Store the model's weights, without the head."""
        values = {name: np.array(value) for name, value in tree_flatten(self.trainee.model.parameters())}
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
