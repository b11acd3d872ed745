"""The networks that are made sparse: the two LeNets, a small VGG-like network, and one with a recurrent layer.

All take the first seed they are given and leave torch's generator as it was.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.compression.images import CLASSES


class GreyImages(nn.Module):
    """Images ``(B, H, W)`` as ``(B, 1, H, W)`` whose channels lie last in memory, the quicker layout on a CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1).permute(0, 3, 1, 2)


def seeded(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """Build with freshly drawn weights of that seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build()


def lenet_300_100() -> nn.Module:
    """784-300-100-10 with ReLU: 266,200 weights in three matrices."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 100), nn.ReLU(), nn.Linear(100, CLASSES)
    )


def lenet_5_caffe() -> nn.Module:
    """LeNet-5 in Caffe's variant, with ReLU also behind the convolutions: 430,500 weights."""
    return nn.Sequential(
        GreyImages(),
        nn.Conv2d(1, 20, 5),  # (B, 20, 24, 24)
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(20, 50, 5),  # (B, 50, 8, 8)
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),  # (B, 800)
        nn.Linear(800, 500),
        nn.ReLU(),
        nn.Linear(500, CLASSES),
    )


def vgg_like(width: float) -> nn.Module:
    """Three pairs of 3x3 convolutions of 16, 32 and 64 times ``width`` channels for 32x32 colour images.

    The pattern of VGG (Simonyan and Zisserman, 2015) at a size that trains in minutes: no batch normalisation, one
    hidden linear layer.
    """
    layers: list[nn.Module] = []
    inputs = 3
    for base in (16, 32, 64):
        outputs = max(1, round(base * width))
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1), nn.ReLU()]
        layers += [nn.Conv2d(outputs, outputs, 3, padding=1), nn.MaxPool2d(2), nn.ReLU()]
        inputs = outputs
    hidden = max(2, round(128 * width))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(inputs * 16, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


class Tagger(nn.Module):
    """Symbols embedded, read by an LSTM or GRU, and an answer for every place."""

    def __init__(self, symbols: int, answers: int, *, cell: str = "lstm", embedding: int = 16, hidden: int = 64):
        super().__init__()
        self.embed = nn.Embedding(symbols, embedding)
        self.recurrent = (nn.LSTM if cell == "lstm" else nn.GRU)(embedding, hidden, batch_first=True)
        self.head = nn.Linear(hidden, answers)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.recurrent(self.embed(x))
        return self.head(states).movedim(-1, 1)  # (B, answers, places): one label for every place
