"""What the tower learns first: a token's feature is near the words for what lies under it.

Owns those words, the loss, and how the words begin. The text model finds its words again in the features, so that it
can compare and copy instead of translating.
"""

from collections.abc import Sequence

import numpy as np
from tokenizers import Tokenizer

from service.models.vision import folder, net
from service.models.vision.net import mx, nn
from service.models.vision.questions import PLURAL
from service.models.vision.scenes import COLOURS, SHAPES, Scene

_SHARED = 0.9  # of a word's first embedding, in common with its other spellings


class Looking:
    """The words for what can lie under a token, in families of which one word is right."""

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
        self._spelled = spelled
        self._families = [(index, mx.array(words)) for index, words in spelled]

    def begin(self, model: net.Model) -> None:
        """Bring the spellings of a word ("circle", " circle", " circles") near each other."""
        inner = model.language_model.model
        weight = np.array(inner.embed_tokens.weight)
        first: dict[tuple[int, int], np.ndarray] = {}
        for family, words in self._spelled:
            for place, word in enumerate(words):
                shared = first.setdefault((family, place), weight[word].copy())
                weight[word] = _SHARED * shared + (1 - _SHARED**2) ** 0.5 * np.roll(weight[word], 1)
        inner.embed_tokens.weight = mx.array(weight)

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
