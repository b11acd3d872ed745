r"""Priors over functions: Gaussian processes by their kernel, and the functions of a network with random weights.

Points are taken from a pool that is known when a fit begins, so what a prior has to compute it computes once.
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.model import Model
from knowable.core.support.checks import check_choice, check_count, check_number, check_type
from knowable.errors import InvalidArgument, InvalidType

_ROWS = 256  # rows that a network of the prior is run on at once
_MOST = 2**29  # function values of a prior that are held: 2 GB of float32


class PriorValues(ABC):
    """The prior of function values at the points of a pool."""

    @abstractmethod
    def moments(self, index: Tensor, only: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Means ``(outputs, n)`` and covariances ``(outputs, n, n)`` at n points of the pool, in double precision.

        One output stands for all where they are alike.
        """


class FunctionPrior(ABC):
    """A prior over functions. Concrete ones are frozen dataclasses."""

    @abstractmethod
    def at(self, pool: Tensor, model: Model, *, generator: torch.Generator) -> PriorValues:
        """The prior at the points of a pool, for the outputs of ``model``."""


class GPKernel(FunctionPrior):
    """A Gaussian process with a constant mean; inputs are flattened to vectors."""

    mean: float

    @abstractmethod
    def covariance(self, x: Tensor) -> Tensor:
        """The covariance of the function values at rows ``(n, inputs)`` with each other, ``(n, n)``."""

    def at(self, pool: Tensor, model: Model, *, generator: torch.Generator) -> PriorValues:
        """The kernel between all points of the pool."""
        return KernelValues(self.mean, self.covariance(pool.detach().flatten(1).double()))


class KernelValues(PriorValues):
    """A kernel between all points of a pool, the same for every output."""

    def __init__(self, mean: float, covariance: Tensor):
        if not torch.isfinite(covariance).all() or not (covariance.diagonal() >= 0).all():
            raise InvalidArgument("prior must give finite covariances at the context points: scale the inputs.")
        if not (covariance.diagonal() > 0).any():
            raise InvalidArgument("prior gives every function value at the context points a variance of 0.")
        self.mean, self.covariance = mean, covariance

    def moments(self, index: Tensor, only: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`PriorValues.moments`; all outputs are alike."""
        covariance = self.covariance[index][:, index].unsqueeze(0)
        return torch.full_like(covariance[:, 0], self.mean), covariance


@dataclass(frozen=True)
class RBFKernel(GPKernel):
    r"""Smooth functions: :math:`k(x, x') = s^2 \exp(-\|x - x'\|^2 / 2 \ell^2)`.

    Args:
        lengthscale: ℓ, the distance over which functions change.
        scale: s, the standard deviation of function values.
        mean: Their mean.
    """

    lengthscale: float = 1.0
    scale: float = 1.0
    mean: float = 0.0

    def __post_init__(self) -> None:
        check_number("lengthscale", self.lengthscale, above=0)
        check_number("scale", self.scale, above=0)
        check_number("mean", self.mean)

    def covariance(self, x: Tensor) -> Tensor:
        """The kernel between all rows of ``x``."""
        return self.scale**2 * torch.exp(-0.5 * (distances(x) / self.lengthscale).square())


@dataclass(frozen=True)
class MaternKernel(GPKernel):
    r"""Rougher functions: the Matérn kernel, of the distance :math:`r = \|x - x'\| / \ell`.

    .. math:: k_{1/2} = s^2 e^{-r}, \quad k_{3/2} = s^2 (1 + \sqrt3 r)\, e^{-\sqrt3 r}, \quad
        k_{5/2} = s^2 (1 + \sqrt5 r + \tfrac53 r^2)\, e^{-\sqrt5 r}

    Args:
        lengthscale: ℓ, the distance over which functions change.
        scale: s, the standard deviation of function values.
        smoothness: ½, 3/2 or 5/2: functions have derivatives up to the order just below it.
        mean: Mean of function values.
    """

    lengthscale: float = 1.0
    scale: float = 1.0
    smoothness: float = 1.5
    mean: float = 0.0

    def __post_init__(self) -> None:
        check_number("lengthscale", self.lengthscale, above=0)
        check_number("scale", self.scale, above=0)
        check_choice("smoothness", str(self.smoothness), ("0.5", "1.5", "2.5"))
        check_number("mean", self.mean)

    def covariance(self, x: Tensor) -> Tensor:
        """The kernel between all rows of ``x``."""
        r = math.sqrt(2 * self.smoothness) * distances(x) / self.lengthscale
        polynomial = {0.5: torch.ones_like(r), 1.5: 1 + r, 2.5: 1 + r + r.square() / 3}[self.smoothness]
        return self.scale**2 * polynomial * torch.exp(-r)


@dataclass(frozen=True)
class LinearKernel(GPKernel):
    r"""Linear functions: :math:`k(x, x') = s^2 x^\top x' + b^2`.

    The prior of a linear layer whose weights are N(0, s²) and whose bias is N(0, b²).

    Args:
        scale: s, the standard deviation of each slope.
        bias: b, that of the value at 0.
        mean: Mean of function values.
    """

    scale: float = 1.0
    bias: float = 1.0
    mean: float = 0.0

    def __post_init__(self) -> None:
        check_number("scale", self.scale, above=0)
        check_number("bias", self.bias, at_least=0)
        check_number("mean", self.mean)

    def covariance(self, x: Tensor) -> Tensor:
        """The kernel between all rows of ``x``."""
        return self.scale**2 * (x @ x.T) + self.bias**2


@dataclass(frozen=True)
class GPyTorchKernel(GPKernel):
    """Any kernel of GPyTorch, at the values its own parameters have: they are not learned.

    Args:
        kernel: The kernel; one that has a batch of parameters is refused.
        mean: Mean of function values.
    """

    kernel: Any
    mean: float = 0.0

    def __post_init__(self) -> None:
        if not _is_gpytorch_kernel(self.kernel):
            raise InvalidType(f"kernel must be a kernel of gpytorch, got {type(self.kernel).__name__}.")
        check_number("mean", self.mean)

    def covariance(self, x: Tensor) -> Tensor:
        """The kernel between all rows of ``x``, computed in the dtype of the kernel's own parameters."""
        like = next(self.kernel.parameters(), x)
        with torch.no_grad():
            value = self.kernel(x.to(like)).to_dense()
        if value.shape != (len(x), len(x)):
            raise InvalidArgument(f"kernel must give one number for each pair of rows, got shape {tuple(value.shape)}.")
        return value.to(x)


def distances(x: Tensor) -> Tensor:
    """Euclidean distances between all rows, ``(n, n)``, without the cancellation of a matrix product."""
    return torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist")


@dataclass(frozen=True)
class NetworkPrior(FunctionPrior):
    r"""The functions of a network whose weights are drawn from a model's prior, as a Gaussian process.

    .. math:: \mu(x) = E_{p(\theta)}[f(x; \theta)], \qquad
        k(x, x') = \mathrm{Cov}_{p(\theta)}[f(x; \theta), f(x'; \theta)]

    estimated from draws, the network in evaluation mode. It is a process with the network's first two moments, which a
    wide network's functions come close to (Neal, 1996).

    Args:
        draws: How many networks are drawn. The estimated covariance of n points is singular below n + 1 and good from
            some ten times n on.
        model: A model whose network maps the same inputs to as many outputs. None: the model that is being fitted, so
            that its prior over weights is the prior over functions.
    """

    draws: int = 512
    model: Model | None = None

    def __post_init__(self) -> None:
        check_count("draws", self.draws, at_least=3)
        if self.model is not None:
            check_type("model", self.model, Model, "a knowable Model (network, likelihood, prior)")

    def at(self, pool: Tensor, model: Model, *, generator: torch.Generator) -> PriorValues:
        """Functions of ``draws`` networks at the points of the pool."""
        own = self.model or model
        start, buffers = own.params(), own.buffers()
        drawn = {name: start[name] for name in (*own.random_names, *own.hyper_names)}
        values = []
        with torch.no_grad():
            for _ in range(self.draws):
                params = {**start, **own.prior.sample(drawn, generator=generator)}
                parts = [own.forward(params, rows, buffers=buffers) for rows in pool.split(_ROWS)]
                values.append(torch.cat(parts).reshape(len(pool), -1))
                if len(values) == 1:
                    self._check(values[0], model, pool)
        return DrawnValues(torch.stack(values))

    def _check(self, values: Tensor, model: Model, pool: Tensor) -> None:
        """Refuse what does not fit, by the first draw ``(P, outputs)``."""
        points, outputs = values.shape
        wanted = model.forward(model.params(), pool[:2], buffers=model.buffers())[0].numel()
        if outputs != wanted:
            raise InvalidArgument(f"prior is of a model with {outputs} outputs, but the model to fit has {wanted}.")
        if self.draws * values.numel() > _MOST:
            raise InvalidArgument(
                f"prior would hold {self.draws:,} draws of {outputs:,} outputs at {points:,} context points, more than "
                f"{_MOST:,} numbers. Give NetworkPrior fewer draws, or context a tensor of fewer points."
            )


class DrawnValues(PriorValues):
    """Function values ``(draws, P, outputs)`` of many draws from a prior."""

    def __init__(self, draws: Tensor):
        if not torch.isfinite(draws).all():
            raise InvalidArgument("prior draws functions with infinite values at the context points: scale the inputs.")
        self._centred = draws.permute(1, 2, 0).contiguous()  # (P, outputs, draws): points are picked in every step
        self._mean = self._centred.mean(-1)
        self._centred -= self._mean.unsqueeze(-1)

    def moments(self, index: Tensor, only: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See :meth:`PriorValues.moments`."""
        at = index if only is None else (index.unsqueeze(1), only)
        centred = self._centred[at].movedim(1, 0).double()  # (outputs, n, draws)
        return self._mean[at].T.double(), centred @ centred.mT / (centred.shape[-1] - 1)


def as_function_prior(prior: Any) -> FunctionPrior:
    """The user's choice as a prior over functions: None is the model's own, a kernel of GPyTorch is wrapped."""
    if prior is None:
        return NetworkPrior()
    if isinstance(prior, FunctionPrior):
        return prior
    if _is_gpytorch_kernel(prior):
        return GPyTorchKernel(prior)
    raise InvalidType(
        f"prior must be None (the functions of the model's own prior), a kernel such as RBFKernel(), a NetworkPrior or "
        f"a kernel of gpytorch; got {prior!r:.80}."
    )


def _is_gpytorch_kernel(value: Any) -> bool:
    gpytorch: Any = sys.modules.get("gpytorch")  # where it was never imported, nothing is one of its kernels
    return gpytorch is not None and isinstance(value, gpytorch.kernels.Kernel)
