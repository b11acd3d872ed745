"""The networks and synthetic data that the benchmarks share.

A network is written once and built from a choice of layers, so that a library with its own Bayesian layers gets exactly
the architecture that everybody else gets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NUM_CLASSES = 10
TRAIN_SIZE = 60_000
"""The size N of the imagined training set: every objective weighs its KL by 1/N."""


class Convolution(Protocol):
    """Makes a square convolution."""

    def __call__(
        self, inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0, bias: bool = True
    ) -> nn.Module: ...


def plain_convolution(
    inputs: int, outputs: int, kernel: int, *, stride: int = 1, padding: int = 0, bias: bool = True
) -> nn.Module:
    return nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=padding, bias=bias)


@dataclass(frozen=True)
class Layers:
    """The layers to build a network from; the defaults are torch's own."""

    linear: Callable[[int, int], nn.Module] = nn.Linear
    convolution: Convolution = plain_convolution


PLAIN = Layers()


def mlp(layers: Layers = PLAIN) -> nn.Module:
    """784-400-400-10 with ReLU: 478,410 weights in three matrices."""
    return nn.Sequential(
        layers.linear(784, 400), nn.ReLU(), layers.linear(400, 400), nn.ReLU(), layers.linear(400, NUM_CLASSES)
    )


def small_mlp(layers: Layers = PLAIN) -> nn.Module:
    """16-50-50-10 with ReLU, as small as networks for tables are: 3,910 weights."""
    return nn.Sequential(
        layers.linear(16, 50), nn.ReLU(), layers.linear(50, 50), nn.ReLU(), layers.linear(50, NUM_CLASSES)
    )


def lenet(layers: Layers = PLAIN) -> nn.Module:
    """LeNet-5 in Caffe's variant: two convolutions with pooling, 800-500-10 behind them."""
    return nn.Sequential(
        layers.convolution(1, 20, 5),  # (B, 20, 24, 24)
        nn.MaxPool2d(2),
        layers.convolution(20, 50, 5),  # (B, 50, 8, 8)
        nn.MaxPool2d(2),
        nn.Flatten(),  # (B, 800)
        layers.linear(800, 500),
        nn.ReLU(),
        layers.linear(500, NUM_CLASSES),
    )


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions with batch normalisation, and a 1x1 shortcut where the shape changes."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, layers: Layers):
        super().__init__()
        self.convolution1 = layers.convolution(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.convolution2 = layers.convolution(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        same_shape = inputs == outputs and stride == 1
        self.shortcut = (
            nn.Identity() if same_shape else layers.convolution(inputs, outputs, 1, stride=stride, bias=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm1(self.convolution1(x)))
        return F.relu(self.norm2(self.convolution2(hidden)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """A stem, three residual blocks (16, 32, 64 channels) and a linear layer on the pooled features."""

    def __init__(self, layers: Layers):
        super().__init__()
        self.stem = layers.convolution(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.blocks = nn.Sequential(
            ResidualBlock(16, 16, stride=1, layers=layers),  # (B, 16, 32, 32)
            ResidualBlock(16, 32, stride=2, layers=layers),  # (B, 32, 16, 16)
            ResidualBlock(32, 64, stride=2, layers=layers),  # (B, 64, 8, 8)
        )
        self.head = layers.linear(64, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(features.mean((2, 3)))


def resnet(layers: Layers = PLAIN) -> nn.Module:
    """A small ResNet with batch normalisation for 32x32 colour images."""
    return SmallResNet(layers)


class ResNet18(nn.Module):
    """ResNet-18 (He et al., 2016) with the small stem for 32x32 images: 11 million weights."""

    def __init__(self, layers: Layers = PLAIN):
        super().__init__()
        self.stem = layers.convolution(3, 64, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(64)
        widths = ((64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1))
        blocks = (*widths, (256, 512, 2), (512, 512, 1))
        self.blocks = nn.Sequential(*(ResidualBlock(a, b, stride=stride, layers=layers) for a, b, stride in blocks))
        self.head = layers.linear(512, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        features = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(features.mean((2, 3)))


class ViTTiny(nn.Module):
    """ViT-tiny (Touvron et al., 2021) on 32x32 images in patches of 4x4: 12 blocks of width 192, 5.4M weights."""

    def __init__(self, layers: Layers = PLAIN, *, width: int = 192, depth: int = 12):
        super().__init__()
        self.patches = layers.linear(48, width)
        self.first = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.places = nn.Parameter(0.02 * torch.randn(1, 65, width))
        self.blocks = nn.Sequential(*(TransformerBlock(width, width // 64, layers) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), layers.linear(width, NUM_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patches(F.unfold(x, 4, stride=4).mT)  # (batch, 64, width)
        tokens = torch.cat([self.first.expand(len(x), -1, -1), patches], 1) + self.places
        return self.head(self.norm(self.blocks(tokens)[:, 0]))


class TransformerBlock(nn.Module):
    """Attention and a hidden layer, each behind a layer norm and beside a residual connection."""

    def __init__(self, width: int, heads: int, layers: Layers):
        super().__init__()
        self.heads, self.first, self.second = heads, nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = layers.linear(width, 3 * width), layers.linear(width, width)
        self.hidden, self.back = layers.linear(width, 4 * width), layers.linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(self.first(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        x = x + self.out(mixed)
        return x + self.back(F.gelu(self.hidden(self.second(x))))


@dataclass(frozen=True)
class Network:
    """An architecture with the shape of its inputs and the batch it is timed on."""

    title: str
    build: Callable[[Layers], nn.Module]
    input_shape: tuple[int, ...]
    batch_size: int

    def make(self, layers: Layers = PLAIN, *, seed: int = 0) -> nn.Module:
        """The network with freshly initialised weights; the global generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.build(layers)

    def data(self, rows: int | None = None, *, seed: int = 1) -> tuple[Tensor, Tensor]:
        """Standard normal inputs and uniform labels: ``rows`` of them, by default one batch."""
        return classification_data(rows or self.batch_size, self.input_shape, seed=seed)


def classification_data(rows: int, input_shape: tuple[int, ...], *, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Inputs ``(rows, *input_shape)`` drawn from a standard normal, labels ``(rows,)`` uniform over the classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, *input_shape, generator=generator)
    y = torch.randint(NUM_CLASSES, (rows,), generator=generator)
    return x, y


NETWORKS = {
    "mlp": Network("MLP 784-400-400-10", mlp, (784,), 128),
    "lenet": Network("LeNet-5-Caffe on 1x28x28", lenet, (1, 28, 28), 128),
    "resnet": Network("Small ResNet with batch normalisation on 3x32x32", resnet, (3, 32, 32), 64),
}
SMALL_MLP = Network("MLP 16-50-50-10", small_mlp, (16,), 128)
