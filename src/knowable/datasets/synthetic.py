"""Problems whose truth is known, for tests, tutorials and demonstrations."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from knowable.core.support.checks import check_count, check_number
from knowable.datasets.dataset import Dataset, Truth


def sine_with_gap(n: int = 100, noise: float = 0.1, seed: int = 0) -> Dataset:
    r"""A sine seen on both sides of a gap, where only epistemic uncertainty should grow.

    .. math:: y = \sin(2 x) + \text{noise} \cdot \xi, \quad x \sim U([-3, -1] \cup [1, 3])

    Args:
        n: Rows.
        noise: Standard deviation of the noise.
        seed: The same seed gives the same data.
    """
    n, noise, generator = _checked(n, noise, seed)
    side = torch.randint(0, 2, (n,), generator=generator) * 2 - 1
    x = (side * (1 + 2 * torch.rand(n, generator=generator))).unsqueeze(1)
    return _regression(
        "sine with gap",
        x,
        mean=lambda x: torch.sin(2 * x[:, 0]),
        noise_std=lambda x: torch.full_like(x[:, 0], noise),
        generator=generator,
        description="A sine with noise, observed on [-3, -1] and [1, 3] and not between.",
    )


def heteroscedastic_sine(n: int = 200, noise: float = 0.3, seed: int = 0) -> Dataset:
    r"""A sine whose noise grows from left to right, where only aleatoric uncertainty should grow.

    .. math:: y = \sin(2 x) + \text{noise} \cdot \frac{1 + e^{x}}{1 + e^{3}} \, \xi, \quad x \sim U[-3, 3]

    Args:
        n: Rows.
        noise: Standard deviation of the noise at the right end, x = 3.
        seed: The same seed gives the same data.
    """
    n, noise, generator = _checked(n, noise, seed)
    x = 6 * torch.rand(n, 1, generator=generator) - 3
    return _regression(
        "heteroscedastic sine",
        x,
        mean=lambda x: torch.sin(2 * x[:, 0]),
        noise_std=lambda x: noise * (1 + x[:, 0].exp()) / (1 + math.exp(3.0)),
        generator=generator,
        description="A sine whose noise grows from left to right.",
    )


def linear(n: int = 100, d: int = 5, noise: float = 0.1, seed: int = 0) -> Dataset:
    r"""A linear function of standard normal features, whose posterior has a closed form.

    .. math:: y = x^\top w + \text{noise} \cdot \xi, \quad w \sim N(0, I_d), \; x \sim N(0, I_d)

    Args:
        n: Rows.
        d: Features.
        noise: Standard deviation of the noise.
        seed: The same seed gives the same data and weights.
    """
    n, noise, generator = _checked(n, noise, seed)
    d = check_count("d", d)
    weights = torch.randn(d, generator=generator)
    x = torch.randn(n, d, generator=generator)
    return _regression(
        "linear",
        x,
        mean=lambda x: x @ weights,
        noise_std=lambda x: torch.full_like(x[:, 0], noise),
        generator=generator,
        description="A linear function of independent standard normal features, with noise.",
        weights=weights,
    )


def two_moons(n: int = 200, noise: float = 0.1, seed: int = 0) -> Dataset:
    r"""Two interleaved half circles of radius 1, blurred by noise.

    Class 0 lies along :math:`(\cos t, \sin t)` and class 1 along :math:`(1 - \cos t, \tfrac12 - \sin t)` with
    :math:`t \sim U[0, \pi]`. The truth's class probabilities integrate the blur along both arcs by the midpoint rule.

    Args:
        n: Rows, half of each class (class 0 gets the odd one).
        noise: Standard deviation of the blur in each direction.
        seed: The same seed gives the same data.
    """
    n, noise, generator = _checked(n, noise, seed)
    labels = torch.arange(n) % 2
    angle = math.pi * torch.rand(n, generator=generator)
    centre = torch.where((labels == 0).unsqueeze(1), _moon(angle, 0), _moon(angle, 1))
    x = centre + noise * torch.randn(n, 2, generator=generator)
    return _classification(
        "two moons",
        x,
        labels,
        probs=lambda x: _moon_probs(x, noise),
        num_classes=2,
        description="Two interleaved half circles, blurred by noise.",
    )


def blobs(n: int = 300, classes: int = 3, noise: float = 0.5, seed: int = 0) -> Dataset:
    r"""Gaussian clouds centred evenly on the unit circle, one for each class.

    With equal class probabilities the truth is
    :math:`p(c \mid x) \propto \exp(-\lVert x - m_c \rVert^2 / (2 \, \text{noise}^2))`.

    Args:
        n: Rows, dealt to the classes in turn.
        classes: Number of classes, at least 2.
        noise: Standard deviation of each cloud in each direction.
        seed: The same seed gives the same data.
    """
    n, noise, generator = _checked(n, noise, seed)
    classes = check_count("classes", classes, at_least=2)
    angle = 2 * math.pi * torch.arange(classes) / classes
    centres = torch.stack([angle.cos(), angle.sin()], dim=1)  # (classes, 2)
    labels = torch.arange(n) % classes
    x = centres[labels] + noise * torch.randn(n, 2, generator=generator)
    return _classification(
        "blobs",
        x,
        labels,
        probs=lambda x: torch.softmax(_log_bell(x, centres.to(x), noise), dim=-1),
        num_classes=classes,
        description="Gaussian clouds around the unit circle, one for each class.",
    )


def _checked(n: int, noise: float, seed: int) -> tuple[int, float, torch.Generator]:
    check_count("seed", seed, at_least=0)
    return check_count("n", n), check_number("noise", noise, above=0.0), torch.Generator().manual_seed(seed)


def _regression(
    name: str,
    x: Tensor,
    *,
    mean: Callable[[Tensor], Tensor],
    noise_std: Callable[[Tensor], Tensor],
    generator: torch.Generator,
    description: str,
    weights: Tensor | None = None,
) -> Dataset:
    """Draw outcomes around ``mean`` and name everything."""
    y = mean(x) + noise_std(x) * torch.randn(len(x), generator=generator)
    names = tuple(f"x{i + 1}" for i in range(x.shape[1])) if x.shape[1] > 1 else ("x",)
    truth = Truth(mean=mean, noise_std=noise_std, weights=weights)
    return Dataset(name=name, x=x, y=y, x_names=names, y_name="y", description=description, truth=truth)


def _classification(
    name: str, x: Tensor, y: Tensor, *, probs: Callable[[Tensor], Tensor], num_classes: int, description: str
) -> Dataset:
    return Dataset(
        name=name,
        x=x,
        y=y,
        x_names=("x1", "x2"),
        y_name="class",
        classes=tuple(str(label) for label in range(num_classes)),
        description=description,
        truth=Truth(probs=probs),
    )


def _moon(angle: Tensor, label: int) -> Tensor:
    """Points on the arc of one class, ``(len(angle), 2)``."""
    if label == 0:
        return torch.stack([angle.cos(), angle.sin()], dim=1)
    return torch.stack([1 - angle.cos(), 0.5 - angle.sin()], dim=1)


def _moon_probs(x: Tensor, noise: float, points: int = 1024) -> Tensor:
    """p(class | x) with the arc integrated by the midpoint rule, in log space, ``(batch, 2)``."""
    angle = (torch.arange(points, dtype=x.dtype, device=x.device) + 0.5) * (math.pi / points)
    log_density = [torch.logsumexp(_log_bell(x, _moon(angle, label), noise), dim=1) for label in (0, 1)]
    return torch.softmax(torch.stack(log_density, dim=1), dim=1)


def _log_bell(x: Tensor, centres: Tensor, scale: float) -> Tensor:
    """Log of an isotropic normal density up to a constant, at every row from every centre, ``(batch, centres)``."""
    return -(x.unsqueeze(1) - centres).square().sum(-1) / (2 * scale**2)
