"""A Bayesian head on a frozen backbone: 32 draws in units of a forward pass, and the fit beside plain PyTorch.

The backbone has 48 million weights (twelve linear layers of width 2,000), its head 5,000. A ResNet-18 has a random last
layer of 1,000 classes (513,000 weights) and 64 pixels a side. The limit of a prediction is one forward pass, whatever
the number of draws: only the head differs from draw to draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Case, Plan, Step

if TYPE_CHECKING:
    import knowable as kn

_SCALE = 0.01


@dataclass(frozen=True)
class Sizes:
    """Of backbone, head and data."""

    width: int = 2_000
    layers: int = 12
    outputs: int = 2
    rows: int = 512
    pixels: int = 64
    channels: int = 64
    classes: int = 1_000
    images: int = 64
    draws: int = 32
    epochs: int = 3
    blocks: int = 6
    embedding: int = 768
    tokens: int = 16
    sentences: int = 8

    @property
    def frozen(self) -> int:
        """Weights of the backbone."""
        return self.layers * self.width * (self.width + 1)


_QUICK = Sizes(
    width=20, layers=2, rows=20, pixels=16, channels=4, classes=5, images=4, draws=4, epochs=1, blocks=2, embedding=16
)


def cases(*, quick: bool) -> list[Case]:
    """Predictions with two backbones, and fits of the head."""
    sizes = _QUICK if quick else Sizes()
    plan = Plan(rounds=7, inner=1, warmup=1)
    return [
        Case(
            name="prediction",
            title=f"{sizes.frozen:,} frozen weights, {sizes.draws} draws of the head for {sizes.rows} rows",
            contenders={
                "one forward pass": partial(forward_pass, sizes),
                "mean field": partial(prediction, sizes, "mean_field"),
                "Laplace, linearised": partial(prediction, sizes, "laplace"),
                "ensemble of heads": partial(prediction, sizes, "ensemble"),
            },
            reference="one forward pass",
            plan=plan,
        ),
        Case(
            name="resnet18",
            title=f"ResNet-18, last layer for {sizes.classes} classes, {sizes.draws} draws for {sizes.images} images",
            contenders={
                "one forward pass": partial(image_pass, sizes),
                "mean field": partial(image_prediction, sizes),
            },
            reference="one forward pass",
            plan=plan,
        ),
        Case(
            name="adapters",
            title=f"Adapters (rank 8, queries and values) on {sizes.blocks} blocks of width {sizes.embedding}, "
            f"{sizes.draws} draws for {sizes.sentences} rows of {sizes.tokens} tokens",
            contenders={
                "one forward pass": partial(adapter_pass, sizes),
                "in the last block": partial(adapter_prediction, sizes, 1),
                "in the last two blocks": partial(adapter_prediction, sizes, 2),
                "in all blocks": partial(adapter_prediction, sizes, sizes.blocks),
            },
            reference="one forward pass",
            plan=plan,
        ),
        Case(
            name="fit",
            title=f"Training the head on {sizes.frozen:,} frozen weights, {sizes.epochs} epochs of {sizes.rows} rows",
            contenders={
                "plain PyTorch": partial(plain_fit, sizes),
                "MAP": partial(fit, sizes, "map", cache=False),
                "MeanFieldVI": partial(fit, sizes, "mean_field_vi", cache=False),
                "MAP, cached features": partial(fit, sizes, "map", cache=True),
                "MeanFieldVI, cached features": partial(fit, sizes, "mean_field_vi", cache=True),
            },
            reference="plain PyTorch",
            plan=plan,
            note="The frozen weights are part of built and peak: what a fit takes is the rest.",
        ),
    ]


# --- networks --------------------------------------------------------------------------------------------------------


class Backbone(nn.Module):
    """Linear layers that are frozen, and a head."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        pairs = [(nn.Linear(sizes.width, sizes.width), nn.ReLU()) for _ in range(sizes.layers)]
        self.backbone = nn.Sequential(*[each for pair in pairs for each in pair]).requires_grad_(False)
        self.head = nn.Linear(sizes.width, sizes.outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class Block(nn.Module):
    """A basic block of a ResNet: two convolutions around which the input is added."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        passed = x if self.downsample is None else self.downsample(x)
        out = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        out += passed
        return self.relu(out)


class ResNet18(nn.Module):
    """He et al. (2016)."""

    def __init__(self, sizes: Sizes):
        super().__init__()
        c = sizes.channels
        self.stem = nn.Sequential(
            nn.Conv2d(3, c, 7, 2, padding=3, bias=False), nn.BatchNorm2d(c), nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )  # fmt: skip
        widths = [(c, c, 1), (c, 2 * c, 2), (2 * c, 4 * c, 2), (4 * c, 8 * c, 2)]
        self.layers = nn.Sequential(*(nn.Sequential(Block(i, o, s), Block(o, o, 1)) for i, o, s in widths))
        self.fc = nn.Linear(8 * c, sizes.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(self.layers(self.stem(x)), 1), 1))


class Adapted(nn.Module):
    """A frozen linear layer and a product of two low-rank matrices beside it (Hu et al., 2022)."""

    def __init__(self, width: int, rank: int = 8):
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))


class Attending(nn.Module):
    """A block of a transformer, all frozen but its adapters."""

    def __init__(self, width: int, *, adapted: bool):
        super().__init__()
        project = Adapted if adapted else nn.Linear
        own = (width,) if adapted else (width, width)
        self.query, self.value, self.key = project(*own), project(*own), nn.Linear(width, width)
        self.out, self.first, self.second = nn.Linear(width, width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        for name, value in self.named_parameters():
            value.requires_grad_("lora_" in name)

    def forward(self, x: Tensor) -> Tensor:
        heads = [_heads(layer(x)) for layer in (self.query, self.key, self.value)]
        x = self.first(x + self.out(F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)))
        return self.second(x + self.mlp(x))


def _heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (4, -1)).transpose(1, 2)


def _transformer(sizes: Sizes, adapted: int) -> nn.Module:
    torch.manual_seed(0)
    blocks = [Attending(sizes.embedding, adapted=k >= sizes.blocks - adapted) for k in range(sizes.blocks)]
    head = nn.Linear(sizes.tokens * sizes.embedding, 2).requires_grad_(False)
    return nn.Sequential(*blocks, nn.Flatten(), head)


def _tokens(sizes: Sizes) -> Tensor:
    return torch.randn(sizes.sentences, sizes.tokens, sizes.embedding, generator=torch.Generator().manual_seed(0))


def adapter_pass(sizes: Sizes) -> Step:
    """The transformer with adapters in all blocks, once."""
    net, x = _transformer(sizes, sizes.blocks).eval(), _tokens(sizes)
    return lambda: _run(net, x)


def adapter_prediction(sizes: Sizes, adapted: int) -> Step:
    """Draws of the adapters in the last blocks."""
    import knowable as kn

    posterior = _posterior(kn.Model(_transformer(sizes, adapted), kn.Categorical(), random="*lora_*"), "mean_field")
    x = _tokens(sizes)
    return lambda: posterior.predict(x, samples=sizes.draws).samples


def backbone(sizes: Sizes) -> Backbone:
    torch.manual_seed(0)
    return Backbone(sizes)


def _data(sizes: Sizes) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sizes.rows, sizes.width, generator=generator)
    return x, torch.randn(sizes.rows, sizes.outputs, generator=generator)


# --- prediction ------------------------------------------------------------------------------------------------------


def forward_pass(sizes: Sizes) -> Step:
    """The network itself, once."""
    net, (x, _) = backbone(sizes).eval(), _data(sizes)
    return lambda: _run(net, x)


def prediction(sizes: Sizes, kind: str) -> Step:
    """``posterior.predict`` of a posterior at given means and scales: the fit is not what is timed."""
    import knowable as kn

    posterior = _posterior(kn.Model(backbone(sizes), kn.Gaussian(0.1)), kind)
    x, _ = _data(sizes)
    return lambda: posterior.predict(x, samples=sizes.draws).samples


def image_pass(sizes: Sizes) -> Step:
    """The ResNet itself, once."""
    net, x = ResNet18(sizes).eval(), torch.randn(sizes.images, 3, sizes.pixels, sizes.pixels)
    return lambda: _run(net, x)


def image_prediction(sizes: Sizes) -> Step:
    """Draws of the last layer; all other weights are point estimates, and not frozen."""
    import knowable as kn

    posterior = _posterior(kn.Model(ResNet18(sizes), kn.Categorical(), random="last_layer"), "mean_field")
    x = torch.randn(sizes.images, 3, sizes.pixels, sizes.pixels)
    return lambda: posterior.predict(x, samples=sizes.draws).samples


def _posterior(model: kn.Model, kind: str) -> kn.Posterior:
    import knowable as kn
    from knowable.core.model.joint_normal import IndependentNormal
    from knowable.inference.laplace.posteriors import LaplacePosterior

    params = model.params()
    points = {name: params[name] for name in model.point_names}
    means = {name: params[name] for name in model.random_names}
    scales = {name: torch.full_like(mean, _SCALE) for name, mean in means.items()}
    if kind == "laplace":
        return LaplacePosterior(model, IndependentNormal(means, scales), points=points)
    if kind == "ensemble":
        return kn.Particles(model, {name: _spread(mean) for name, mean in means.items()}, points=points)
    return kn.DiagonalNormal(model, means, scales, points=points)


def _spread(mean: Tensor, members: int = 32) -> Tensor:
    return mean + _SCALE * torch.randn(members, *mean.shape)


@torch.no_grad()
def _run(net: nn.Module, x: Tensor) -> Tensor:
    return net(x)


# --- fits ------------------------------------------------------------------------------------------------------------

_BATCH = 64


def plain_fit(sizes: Sizes) -> Step:
    """Adam on the head."""
    net, (x, y) = backbone(sizes), _data(sizes)

    def step() -> None:
        optimiser = torch.optim.Adam(net.head.parameters(), 1e-3)
        for _ in range(sizes.epochs):
            for rows in torch.randperm(len(x)).split(_BATCH):
                optimiser.zero_grad()
                F.mse_loss(net(x[rows]), y[rows]).backward()
                optimiser.step()

    return step


def fit(sizes: Sizes, method: str, *, cache: bool) -> Step:
    """The fit of a method to the same batches, with all that comes before and after the steps."""
    import knowable as kn

    model, data = kn.Model(backbone(sizes), kn.Gaussian(noise=0.3)), _data(sizes)
    made = {"map": kn.MAP, "mean_field_vi": kn.MeanFieldVI}[method](epochs=sizes.epochs, batch_size=_BATCH)
    return lambda: made.fit(model, data, engine=kn.Engine(cache_features=cache), progress=False)
