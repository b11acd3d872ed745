"""Small networks that every method must handle, each with data and a likelihood: one a kind.

They are as small as they can be while keeping what makes their kind difficult: running statistics, recurrence,
attention with dropout, weights used twice, parts that are frozen, several inputs and outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from knowable import Categorical, Gaussian
from knowable.core.model.likelihood import Likelihood
from knowable.core.model.model import Model
from knowable.core.model.prior import Prior
from knowable.core.support.checks import check_choice, check_count
from knowable.core.support.randomness import own_randomness


@dataclass(frozen=True)
class NetworkCase:
    """A network with data it can be fitted to.

    Attributes:
        name: The kind of network.
        net: The network.
        likelihood: What its output means.
        x: Inputs: a tensor, a tuple or a dict.
        y: Targets.
        random: Which parameters are random.
        frozen: Which stay as they are.
        output: Which tensor of what it returns is meant.
        autocast: The lower precision in which it is computed.
    """

    name: str
    net: nn.Module
    likelihood: Likelihood
    x: Any
    y: Tensor
    random: str = "*"
    frozen: tuple[str, ...] = ()
    output: str | None = None
    autocast: torch.dtype | None = None

    @property
    def data(self) -> tuple[Any, Tensor]:
        """Inputs and targets, as a fit takes them."""
        return self.x, self.y

    def model(self, prior: Prior | None = None) -> Model:
        """The case as a model."""
        settings = {"output": self.output, "autocast": self.autocast}
        return Model(self.net, self.likelihood, prior, random=self.random, frozen=self.frozen, **settings)


def network_case(name: str, *, rows: int = 16, seed: int = 0, dtype: torch.dtype = torch.float32) -> NetworkCase:
    """The network of the given name, with ``rows`` rows of data; the global generator is left untouched.

    >>> network_case("mlp").x.shape
    torch.Size([16, 3])
    """
    check_choice("name", name, NETWORKS)
    check_count("rows", rows, at_least=2)
    with own_randomness(seed):
        case = NETWORKS[name](rows)
    case.net.to(dtype)
    x, y = tree_map(lambda value: value.to(dtype) if value.is_floating_point() else value, case.data)
    return replace(case, x=x, y=y)


def _linear(rows: int) -> NetworkCase:
    return NetworkCase("linear", nn.Linear(3, 1), Gaussian(0.3), *_regression(rows, 3))


def _mlp(rows: int) -> NetworkCase:
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    return NetworkCase("mlp", net, Gaussian(), *_regression(rows, 3))


def _batchnorm_mlp(rows: int) -> NetworkCase:
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    return NetworkCase("batchnorm_mlp", net, Gaussian(0.3), *_regression(rows, 3))


def _batchnorm_cnn(rows: int) -> NetworkCase:
    net = nn.Sequential(
        nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(),
        nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip
    return NetworkCase("batchnorm_cnn", net, Categorical(), torch.randn(rows, 1, 8, 8), _labels(rows, 3))


class ResidualBlock(nn.Module):
    """Two convolutions with batch normalisation, and the input added back."""

    def __init__(self, channels: int):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        """Features of the same shape."""
        return torch.relu(x + self.body(x))


def _residual(rows: int) -> NetworkCase:
    net = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), ResidualBlock(4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
    )
    return NetworkCase("residual", net, Categorical(), torch.randn(rows, 2, 6, 6), _labels(rows, 3))


class LastOfLSTM(nn.Module):
    """An LSTM read out at its last step."""

    def __init__(self, inputs: int, hidden: int):
        super().__init__()
        self.lstm = nn.LSTM(inputs, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x: Tensor) -> Tensor:
        """One number for each sequence ``(batch, steps, inputs)``."""
        return self.head(self.lstm(x)[0][:, -1])


def _lstm(rows: int) -> NetworkCase:
    x = torch.randn(rows, 5, 2)
    return NetworkCase("lstm", LastOfLSTM(2, 4), Gaussian(0.3), x, x.sum((1, 2)).tanh().unsqueeze(1))


class TokenClassifier(nn.Module):
    """A transformer encoder over short sequences, averaged over tokens."""

    def __init__(self, inputs: int, width: int, classes: int):
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, nhead=2, dim_feedforward=2 * width, dropout=0.1, batch_first=True)
        self.embed = nn.Linear(inputs, width)
        self.encoder = nn.TransformerEncoder(layer, num_layers=1, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits for each sequence ``(batch, tokens, inputs)``."""
        return self.head(self.encoder(self.embed(x)).mean(1))


def _transformer(rows: int) -> NetworkCase:
    return NetworkCase(
        "transformer", TokenClassifier(2, 8, 3), Categorical(), torch.randn(rows, 4, 2), _labels(rows, 3)
    )


def _frozen_backbone(rows: int) -> NetworkCase:
    net = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
    x, y = _regression(rows, 3)
    with torch.no_grad():
        net.train()(2 * x + 1)  # running statistics of its own, as after a training elsewhere
    return NetworkCase("frozen_backbone", net, Gaussian(0.3), x, y, frozen=("0.*", "1.*"))


def _last_layer(rows: int) -> NetworkCase:
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    return NetworkCase("last_layer", net, Gaussian(0.3), *_regression(rows, 3), random="last_layer")


class TiedDecoder(nn.Module):
    """An embedding whose weight is also the output layer's."""

    def __init__(self, words: int, width: int):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.mix = nn.Linear(width, width)
        self.out = nn.Linear(width, words, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, words, steps)`` for word indices ``(batch, steps)``."""
        return self.out(torch.tanh(self.mix(self.embed(x)))).transpose(1, 2)


def _tied(rows: int) -> NetworkCase:
    x = torch.randint(0, 6, (rows, 5))
    return NetworkCase("tied", TiedDecoder(6, 4), Categorical(), x, (x + 1) % 6)


def _shared(rows: int) -> NetworkCase:
    layer, activation = nn.Linear(4, 4), nn.Tanh()
    net = nn.Sequential(nn.Linear(3, 4), activation, layer, activation, layer, activation, nn.Linear(4, 1))
    return NetworkCase("shared", net, Gaussian(0.3), *_regression(rows, 3))


@dataclass
class TokenOutput:
    """What :class:`Tagger` returns."""

    loss: Tensor | None  # none without labels
    logits: Tensor  # (batch, classes, tokens)


class Tagger(nn.Module):
    """A transformer block over words of which some are padding, with a label for every word."""

    def __init__(self, words: int, width: int, classes: int):
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> TokenOutput:
        """Logits of each word of ``input_ids`` ``(batch, tokens)``; ``attention_mask`` is 0 at padding."""
        words = self.embed(input_ids)
        query, key, value = self.mix(words).unsqueeze(1).chunk(3, -1)  # one head
        heard = F.scaled_dot_product_attention(query, key, value, attention_mask[:, None, None, :].bool())
        return TokenOutput(None, self.head(self.norm(words + self.out(heard.squeeze(1)))).transpose(1, 2))


def _tagger(rows: int) -> NetworkCase:
    words, length = torch.randint(1, 6, (rows, 5)), torch.arange(rows) % 4 + 2
    mask = (torch.arange(5) < length.unsqueeze(1)).long()
    labels = (words % 3).where(mask.bool(), -100)
    inputs = {"input_ids": words * mask, "attention_mask": mask}
    return NetworkCase("tagger", Tagger(6, 4, 3), Categorical(ignore_index=-100), inputs, labels, output="logits")


class TwoTowers(nn.Module):
    """Numbers and an image, which meet in the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers, self.image = nn.Linear(3, 4), nn.Conv2d(1, 4, 3)
        self.head = nn.Linear(8, 1)

    def forward(self, numbers: Tensor, image: Tensor) -> Tensor:
        """One number for each row."""
        seen = torch.relu(self.image(image)).mean((2, 3))
        return self.head(torch.cat([torch.tanh(self.numbers(numbers)), seen], 1))


def _two_inputs(rows: int) -> NetworkCase:
    x, y = _regression(rows, 3)
    return NetworkCase("two_inputs", TwoTowers(), Gaussian(0.3), (x, torch.randn(rows, 1, 5, 5)), y)


class NestedTowers(TwoTowers):
    """The same with inputs inside others."""

    def forward(self, parts: dict[str, Any]) -> Tensor:  # type: ignore[override]
        """One number for each row."""
        return super().forward(parts["numbers"], *parts["images"])


def _nested_inputs(rows: int) -> NetworkCase:
    x, y = _regression(rows, 3)
    inputs = {"parts": {"numbers": x, "images": (torch.randn(rows, 1, 5, 5),)}}
    return NetworkCase("nested_inputs", NestedTowers(), Gaussian(0.3), inputs, y)


def _regression(rows: int, features: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(rows, features)
    return x, torch.sin(x.sum(1, keepdim=True)) + 0.1 * torch.randn(rows, 1)


def _labels(rows: int, classes: int) -> Tensor:
    return torch.arange(rows) % classes


_CASES = (
    *(_linear, _mlp, _batchnorm_mlp, _batchnorm_cnn, _residual, _lstm, _transformer),
    *(_frozen_backbone, _last_layer, _tied, _shared),
    *(_tagger, _two_inputs, _nested_inputs),
)
NETWORKS: dict[str, Callable[[int], NetworkCase]] = {case.__name__.removeprefix("_"): case for case in _CASES}
ONE_INPUT = [name for name in NETWORKS if name not in ("tagger", "two_inputs", "nested_inputs")]
"""Names of the networks that take one tensor and return one."""
"""Every case by name."""
