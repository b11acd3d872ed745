"""Posteriors as BoTorch models, so that its acquisition functions and optimisers run on them; ``kn.botorch``."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import torch
from torch import Tensor

from knowable.core.network.jacobian import BatchJacobian, unit_directions
from knowable.core.network.layers import NetworkLayers
from knowable.core.network.params import Layout, Params
from knowable.core.posterior.normal import NormalPosterior
from knowable.core.posterior.particles import systematic_indices
from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import RegressionPrediction
from knowable.core.support.checks import check_count, check_type
from knowable.core.support.cholesky import cholesky, with_jitter
from knowable.core.support.randomness import generator_for
from knowable.errors import InvalidData, MissingExtra, Unsupported
from knowable.inference.exact.linear import LinearNormal
from knowable.inference.functional.gaussian_process import GaussianProcessPosterior
from knowable.inference.functional.inducing_posterior import InducingPosterior
from knowable.inference.laplace.posteriors import LaplacePosterior
from knowable.likelihoods import Gaussian

try:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which a dependency still uses
        from botorch.acquisition.objective import ScalarizedPosteriorTransform
        from botorch.models.model import FantasizeMixin
        from botorch.models.model import Model as BoTorchModel
        from botorch.posteriors.ensemble import EnsemblePosterior
        from botorch.posteriors.gpytorch import GPyTorchPosterior
        from botorch.sampling.get_sampler import GetSampler
        from botorch.sampling.index_sampler import IndexSampler
        from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
except ImportError:
    raise MissingExtra("Bayesian optimisation needs BoTorch: pip install 'knowable[bo]'.") from None

__all__ = ["DrawsModel", "FunctionsModel", "LinearisedModel", "as_model"]

_MOST_WEIGHTS = 3_000  # for a joint covariance: its root is a matrix of them
_MOST_JITTER = 1e-2  # of the mean variance


def as_model(posterior: Posterior, *, samples: int = 128) -> Any:
    """A BoTorch model of the function that a posterior describes.

    ``Laplace`` (linearised) and ``ExactLinear`` posteriors of up to 3,000 weights with Gaussian noise become a
    :class:`LinearisedModel`, normal over any points together; Gaussian processes (all but the deep ones) a
    :class:`FunctionsModel`, which is that too. All others become a :class:`DrawsModel`, whose draws are functions with
    common weights.

    Args:
        posterior: A posterior whose predictions are numbers, of a network that takes rows ``(rows, d)``.
        samples: Number of draws, where it becomes an ensemble.

    Raises:
        MissingExtra: Without BoTorch; ``pip install 'knowable[bo]'``.
        Unsupported: If the predictions are not numbers.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(0, 1, 20, dtype=torch.float64).unsqueeze(1)
        >>> net = torch.nn.Linear(1, 1).double()
        >>> posterior = kn.ExactLinear().fit(kn.Model(net, kn.Gaussian(noise=0.1)), (x, 2 * x))
        >>> model = kn.botorch.as_model(posterior)
        >>> model.posterior(torch.rand(5, 3, 1, dtype=torch.float64)).mean.shape  # 5 sets of 3 points
        torch.Size([5, 3, 1])
    """
    check_type("posterior", posterior, Posterior, "a fitted posterior")
    check_count("samples", samples)
    linear = isinstance(posterior, LinearNormal) or (
        isinstance(posterior, LaplacePosterior) and posterior.prediction == "linearised"
    )
    if linear and isinstance(posterior.model.likelihood, Gaussian):
        assert isinstance(posterior, NormalPosterior)
        if posterior.normal.layout.size <= _MOST_WEIGHTS:
            return LinearisedModel(posterior)
    normal = isinstance(posterior, GaussianProcessPosterior) or (
        isinstance(posterior, InducingPosterior) and len(posterior.layers) == 1
    )
    if normal and isinstance(posterior.model.likelihood, Gaussian):
        return FunctionsModel(posterior)  # type: ignore[arg-type]
    return DrawsModel(posterior, samples)


class _PosteriorModel(BoTorchModel):
    """What both models share.

    Args:
        source: The posterior of the weights.
    """

    source: Any

    def __init__(self, source: Posterior):
        super().__init__()
        self.source = source
        shape = source.target_shape  # None where the data came from a loader
        self._outputs = math.prod(shape) if isinstance(shape, tuple | list) else 0

    @property
    def num_outputs(self) -> int:
        """Number of outputs of a point."""
        if self._outputs == 0:
            raise InvalidData("num_outputs is not known before the first call of posterior(X).")
        return self._outputs

    @property
    def batch_shape(self) -> torch.Size:
        """Empty: one model, not a batch of them."""
        return torch.Size()

    def _rows(self, X: Tensor) -> Tensor:
        """The points one below the other."""
        if X.dim() < 2 or not X.is_floating_point():
            raise InvalidData(f"X must have shape (..., q, d) and be floating-point, got {tuple(X.shape)}, {X.dtype}.")
        return X.reshape(-1, X.shape[-1])


def _selected(found: Any, transform: Any) -> Any:
    return found if transform is None else transform(found)


# --- draws ---------------------------------------------------------------------------------------------------------


class DrawsPosterior(EnsemblePosterior):
    """An ensemble whose samples are spread evenly over the draws, and are the same draws for all sets of points."""


class EvenSampler(IndexSampler):
    """Takes every draw in proportion to its weight (systematic resampling), which is less noisy than by chance."""

    def _construct_base_samples(self, posterior: Any) -> None:
        shape = self.sample_shape + posterior.batch_shape
        if self.base_samples is None or self.base_samples.shape != shape:
            offset = torch.rand((), generator=generator_for(int(self.seed))).item()  # type: ignore[arg-type]
            index = systematic_indices(posterior.weights, self.sample_shape.numel(), offset).to(posterior.device)
            own = index.view(*self.sample_shape, *[1] * len(posterior.batch_shape))
            self.register_buffer("base_samples", own.expand(shape).clone())


@GetSampler.register(DrawsPosterior)
def _sampler_of_draws(posterior: DrawsPosterior, sample_shape: torch.Size, *, seed: int | None = None) -> EvenSampler:
    return EvenSampler(sample_shape=sample_shape, seed=seed)


class DrawsModel(_PosteriorModel):
    """A BoTorch model of any posterior: draw k at every point is the function that has the weights of draw k.

    Args:
        source: The posterior of the weights.
        samples: Number of draws.
    """

    def __init__(self, source: Posterior, samples: int = 128):
        super().__init__(source)
        self.samples = samples

    def posterior(  # type: ignore[override]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """The draws at ``X``.

        Args:
            X: Points ``(..., q, d)``.
            output_indices: Which outputs; None is all.
            observation_noise: Whether the draws are of outcomes with noise rather than of the function; a tensor gives
                its variance. Each call has the same standardised noise.
            posterior_transform: A transform of BoTorch's.

        Returns:
            An ensemble of values ``(..., draws, q, outputs)``.
        """
        count = X.shape[:-1]
        prediction = self._prediction(X)
        values = prediction.samples
        draws = len(values)
        values = values.reshape(draws, *count, -1).movedim(0, -3).to(X)
        self._outputs = values.shape[-1]
        if observation_noise is not False:
            if isinstance(observation_noise, Tensor):
                variance = observation_noise.to(X).unsqueeze(-3)
            else:
                variance = prediction.components.variance.expand(prediction.samples.shape)
                variance = variance.reshape(draws, *count, -1).movedim(0, -3).to(X)
            each = (draws, X.shape[-2], self._outputs)
            generator = generator_for(self.source.seed, "observation noise", device=X.device)
            noise = torch.randn(each, generator=generator, dtype=X.dtype, device=X.device)
            values = values + variance.sqrt() * noise
        if output_indices is not None:
            values = values[..., output_indices]
        if isinstance(posterior_transform, ScalarizedPosteriorTransform):  # which knows normal posteriors alone
            values, posterior_transform = posterior_transform.evaluate(values).unsqueeze(-1), None
        return _selected(DrawsPosterior(values, prediction.log_weights.exp()), posterior_transform)

    def _prediction(self, X: Tensor) -> RegressionPrediction:
        """The prediction of joint draws, which can be differentiated in the points."""
        source, rows = self.source, self._rows(X).to(self.source.model.dtype)
        with torch.set_grad_enabled(rows.requires_grad):
            if isinstance(source, InducingPosterior):  # its functions are drawn again for each set of points
                values = source.draws_of(source.seen(rows).view(*X.shape[:-1], -1), self.samples, source.seed)
                outputs = values.reshape(self.samples, len(rows), -1).to(rows)
                params, _, log_weights = source._outputs_of_draws(None, self.samples, source.seed, None)
            else:
                params, outputs, log_weights = source._outputs_of_draws(rows, self.samples, source.seed, None)
            own = source.model.likelihood_params(params)
            found = source.model.likelihood.predict(outputs, own, log_weights)  # type: ignore[arg-type]
        if not isinstance(found, RegressionPrediction):
            raise Unsupported(f"A BoTorch model predicts numbers; this posterior gives a {type(found).__name__}.")
        return found

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> Any:
        """Not possible for draws."""
        raise Unsupported(
            f"A {type(self.source).__name__} cannot be conditioned on further points in closed form. Fit it again with "
            f"them, or use Laplace or ExactLinear with Gaussian noise."
        )

    fantasize = condition_on_observations


# --- normal functions ----------------------------------------------------------------------------------------------


class _NormalModel(_PosteriorModel):
    """What models share whose functions are normal over any points together."""

    _noise: Tensor  # variances of the outputs' noise

    def _moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Means ``(..., q, m)`` and covariance ``(..., q m, q m)`` of the function."""
        raise NotImplementedError

    def posterior(  # type: ignore[override]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: Any = None,
    ) -> Any:
        """The normal distribution of the function at ``X``.

        Args:
            X: Points ``(..., q, d)``.
            output_indices: Which outputs; None is all.
            observation_noise: Whether to add the noise; a tensor gives its variance.
            posterior_transform: A transform of BoTorch's.

        Returns:
            A ``GPyTorchPosterior``.
        """
        mean, covariance = self._moments(X)
        q, outputs = mean.shape[-2:]
        if observation_noise is not False:
            covariance = covariance + self._noise_at(mean, observation_noise).diag_embed()
        if output_indices is not None:
            kept = torch.arange(q * outputs, device=X.device).view(q, outputs)[:, output_indices].flatten()
            mean, covariance = mean[..., output_indices], covariance[..., kept, :][..., kept]
        covariance = with_jitter(covariance, most=_MOST_JITTER)[0].to(X)
        if mean.shape[-1] == 1:
            normal = MultivariateNormal(mean.squeeze(-1).to(X), covariance)
        else:
            normal = MultitaskMultivariateNormal(mean.to(X), covariance)
        return _selected(GPyTorchPosterior(normal), posterior_transform)

    def _noise_at(self, mean: Tensor, noise: bool | Tensor) -> Tensor:
        """Variances ``(..., q m)``."""
        variance = noise.double() if isinstance(noise, Tensor) else self._noise
        return variance.expand(torch.broadcast_shapes(variance.shape, mean.shape)).flatten(-2)


class LinearisedModel(_NormalModel, FantasizeMixin):
    r"""A BoTorch model of a network that is linear, or linearised, in normal weights.

    .. math:: f(X) \sim \mathcal{N}\big(f(X, m),\; J(X) \Sigma J(X)^\top\big)

    jointly over points and outputs, in double precision. New observations are conditioned on in closed form.

    Args:
        source: A ``Laplace`` (linearised) or ``ExactLinear`` posterior with Gaussian noise.
    """

    def __init__(self, source: NormalPosterior):
        super().__init__(source)
        model, normal = source.model, source.normal
        self.likelihood: Any = None  # BoTorch asks whether it is one of its own
        covariance = normal.covariance_matrix().double()
        self._root = cholesky(covariance, most=_MOST_JITTER)[0]  # (D, D): weights are m + root z with z standard normal
        self._layout: Layout = normal.layout
        self._params: Any = _double(model.network_params(source.mean()))
        self._buffers_of_net: Any = _double(source.buffers)
        self._layers: Any = None
        own = model.likelihood_params(source.points)
        like = torch.zeros((), dtype=torch.float64, device=model.device)
        self._noise = model.likelihood.noise_scale(_double(own), like=like).double().square()  # type: ignore[attr-defined]
        self._known: Tensor | None = None  # W, (..., n m, D): z has covariance I - WᵀW after observations
        self._shift: Tensor | None = None  # (..., D): mean of z after them

    @property
    def batch_shape(self) -> torch.Size:
        """Of the observations that it was conditioned on; else empty."""
        return torch.Size() if self._shift is None else self._shift.shape[:-1]

    def condition_on_observations(self, X: Tensor, Y: Tensor, *, noise: Tensor | None = None, **_: Any) -> Any:
        r"""The model after further observations, exact for the (linearised) network.

        Args:
            X: Points ``(..., n, d)``.
            Y: What was observed there, ``(..., n, outputs)``, with leading dimensions in front of those of X if there
                are several sets.
            noise: Variances of the noise, of a shape that broadcasts against ``Y``; None is the likelihood's.
        """
        mean, white = self._linear(X)
        if Y.shape[-2:] != mean.shape[-2:]:
            raise InvalidData(f"Y must have shape (..., {mean.shape[-2]}, {mean.shape[-1]}), got {tuple(Y.shape)}.")
        left = self._left(white)
        total = left @ white.mT + self._noise_at(mean, True if noise is None else noise).diag_embed()
        factor = cholesky(total, most=_MOST_JITTER)[0]
        residual = (Y.double() - mean).flatten(-2)  # (..., n m)
        solved = torch.cholesky_solve(residual.unsqueeze(-1), factor)
        gain = (left.mT @ solved).squeeze(-1)
        told = torch.linalg.solve_triangular(factor, left, upper=False)
        made = copy.copy(self)
        made._shift = gain if self._shift is None else self._shift + gain
        if self._known is not None:
            lead = torch.broadcast_shapes(self._known.shape[:-2], told.shape[:-2])
            told = torch.cat([self._known.expand(*lead, -1, -1), told.expand(*lead, -1, -1)], -2)
        made._known = told
        return made

    # --- what they are made of -----------------------------------------------------------------------------------

    def _moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Means ``(..., q, m)`` and covariance ``(..., q m, q m)`` of the function."""
        mean, white = self._linear(X)
        covariance = white @ white.mT
        if self._known is not None:
            told = white @ self._known.mT
            covariance = covariance - told @ told.mT
        covariance = covariance.expand(*mean.shape[:-2], *covariance.shape[-2:])
        return mean, covariance

    def _linear(self, X: Tensor) -> tuple[Tensor, Tensor]:
        """Means ``(..., q, m)`` and J times the root of the covariance, ``(..., q m, D)``."""
        rows = self._rows(X).to(torch.float64)
        network = self.source.model.network
        if self._layers is None:
            self._layers = NetworkLayers.of(
                network, self._layout.names, self._params, rows[:8].detach(), self._buffers_of_net
            )
        jacobian = BatchJacobian(
            network, self._layers, self._params, rows, self._buffers_of_net, differentiable=rows.requires_grad
        )
        output = jacobian.output
        flat = jacobian.flat(unit_directions(output), self._layout).movedim(0, 1)  # (rows, m, D)
        self._outputs = flat.shape[1]
        mean = output.reshape(*X.shape[:-1], self._outputs)
        white = (flat @ self._root).reshape(*X.shape[:-2], -1, flat.shape[-1])
        if self._shift is not None:
            mean = mean + (white @ self._shift.unsqueeze(-1)).squeeze(-1).unflatten(-1, mean.shape[-2:])
        return mean, white

    def _left(self, white: Tensor) -> Tensor:
        """J root times the covariance of z, ``(..., q m, D)``."""
        return white if self._known is None else white - white @ self._known.mT @ self._known


def _double(params: Params) -> Params:
    return {name: value.double() if value.is_floating_point() else value for name, value in params.items()}


class FunctionsModel(_NormalModel):
    """A BoTorch model of a Gaussian process: exact, sparse, or on the features of a network; in double precision.

    Args:
        source: Its posterior, with Gaussian noise.
    """

    def __init__(self, source: GaussianProcessPosterior | InducingPosterior):
        super().__init__(source)
        own = source.model.likelihood_params(source.points)
        like = torch.zeros((), dtype=torch.float64, device=source.model.device)
        self._noise = source.model.likelihood.noise_scale(_double(own), like=like).double().square()  # type: ignore[attr-defined]

    def _moments(self, X: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.source.seen(self._rows(X).to(self.source.model.dtype))
        mean, covariance = self.source.joint_of(seen.view(*X.shape[:-1], -1))  # (..., q, m) and (..., m, q, q)
        self._outputs = mean.shape[-1]
        whole = covariance.movedim(-3, -1).diag_embed().transpose(-2, -3)  # (..., q, m, q, m)
        size = X.shape[-2] * self._outputs
        return mean, whole.reshape(*X.shape[:-2], size, size)

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> Any:
        """Not offered."""
        raise Unsupported(
            f"A {type(self.source).__name__} cannot be conditioned on further points here. Fit it again with them, or "
            f"use Laplace or ExactLinear with Gaussian noise."
        )

    fantasize = condition_on_observations
