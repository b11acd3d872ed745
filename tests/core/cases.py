"""Small models, networks and data that the tests of core share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.network.params import Layout, Params

DTYPE = torch.float64


def linear_data(rows: int = 20, *, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Two inputs, one output, noise 0.1."""
    x = torch.randn((rows, 2), generator=generator, dtype=DTYPE)
    y = x @ torch.tensor([[1.0], [-2.0]], dtype=DTYPE) + 0.5
    return x, y + 0.1 * torch.randn(y.shape, generator=generator, dtype=DTYPE)


def linear_model(noise: float | None = 0.1, **settings: object) -> kn.Model:
    """A linear layer with two inputs and one output, in double precision."""
    return kn.Model(nn.Linear(2, 1).to(DTYPE), kn.Gaussian(noise), **settings)  # type: ignore[arg-type]


def mlp(inputs: int = 2, outputs: int = 1, *, width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


def batch_norm_net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


class Tied(nn.Module):
    """An encoder and a decoder that share one matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(2, 2)
        self.decoder = nn.Linear(2, 2, bias=False)
        self.decoder.weight = self.encoder.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


def diagonal_posterior(
    model: kn.Model, generator: torch.Generator | None = None, **common: object
) -> kn.DiagonalNormal:
    """A mean-field posterior with random means and scales, without a fit."""
    loc, scale = _random_like(model, generator), _random_like(model, generator)
    loc = {name: value for name, value in loc.items() if name in model.random_names}
    return kn.DiagonalNormal(model, loc, {k: scale[k].abs() + 0.1 for k in loc}, points=_points(model), **common)  # type: ignore[arg-type]


def full_posterior(model: kn.Model, generator: torch.Generator | None = None, **common: object) -> kn.FullNormal:
    """A normal posterior with correlations, without a fit."""
    start = model.params()
    layout = Layout.of({name: start[name] for name in model.random_names})
    factor = torch.randn((layout.size, layout.size), generator=generator, dtype=model.dtype)
    factor = torch.linalg.cholesky(factor @ factor.T / layout.size + 0.1 * torch.eye(layout.size, dtype=model.dtype))
    loc = torch.randn(layout.size, generator=generator, dtype=model.dtype)
    return kn.FullNormal(model, layout, loc, factor, points=_points(model), **common)  # type: ignore[arg-type]


def atoms(model: kn.Model, count: int, generator: torch.Generator | None = None, **common: object) -> kn.Particles:
    """Several sets of parameters with unequal weights."""
    draws = [_random_like(model, generator) for _ in range(count)]
    stack = {name: torch.stack([draw[name] for draw in draws]) for name in model.random_names}
    weights = torch.randn(count, generator=generator, dtype=model.dtype)
    return kn.Particles(model, stack, weights, points=_points(model), **common)  # type: ignore[arg-type]


def _random_like(model: kn.Model, generator: torch.Generator | None) -> Params:
    return {
        name: torch.randn(value.shape, generator=generator, dtype=value.dtype) for name, value in model.params().items()
    }


def _points(model: kn.Model) -> Params:
    start = model.params()
    return {name: start[name] for name in model.point_names}


def same_params(left: Params, right: Params) -> bool:
    """Whether two sets of parameters are equal bit for bit."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)
