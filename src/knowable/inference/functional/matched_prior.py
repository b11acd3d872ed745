r"""Priors on weights under which a network's functions look like those of a Gaussian process.

Tran et al. (2022) choose the scales of a network's prior so that its functions come close to a Gaussian process. Here
the first two moments at some inputs are compared. With f the function values there and m, K the process's mean and
covariance, the distance is

.. math:: d^2 = \frac{\| E[(f - m)(f - m)^\top] - K \|_F^2}{\| K \|_F^2}

0 where the moments are the same, about 1 where the network's functions hardly vary. With independent draws f, f'
centred at m,

.. math:: \| E[f f^\top] - K \|_F^2 = E\big[(f^\top f')^2\big] - 2\, E\big[f^\top K f\big] + \| K \|_F^2

so it is estimated without bias from pairs of draws. With weights :math:`s\, \epsilon` and the same draws of
:math:`\epsilon` throughout, it is a smooth function of the scales s, whose minimum L-BFGS finds. Where many scales are
as good, those nearest to the usual ones are taken: a small multiple of their squared logarithmic distance is added.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

from knowable.core.model.data import as_input
from knowable.core.model.model import Model
from knowable.core.model.prior import Normal
from knowable.core.network.params import Params, last_layer_names
from knowable.core.posterior.monte_carlo import bytes_per_row, free_memory
from knowable.core.prediction.components import root_of
from knowable.core.prediction.plots import NOISE_BAND
from knowable.core.support.checks import check_count, check_type
from knowable.core.support.figure import COLOURS, INK, new_figure
from knowable.core.support.randomness import generator_for
from knowable.errors import ConvergenceWarning, InvalidArgument, ModelWarning, Unsupported
from knowable.inference.variational.function_space.priors import FunctionPrior, NetworkPrior, as_function_prior

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POOR = 0.25  # distance above which a match is poor
_FARTHEST = 5.0  # that the logarithm of a scale moves
_NEARNESS = 3e-4  # squared distance that one unit of a logarithm is worth
_STARTS = (1.0, 3.0, 0.3)
_STEPS = 200  # of L-BFGS
_BLOCKS = 20  # of draws, of which each is left out once for the standard error
_TOO_FAR = 1e12  # the objective where function values overflow
_VECTORISE_BELOW = 20_000  # random parameters
_MOST_AT_ONCE = 100  # draws


def match_prior(
    model: Model, target: Any, x: Any, *, points: int = 100, draws: int = 1_000, seed: int = 0
) -> MatchedPrior:
    """Choose the scales of a model's prior so that its functions look like those of a Gaussian process.

    Every random weight and bias of the network gets a normal prior of its own, whose scale is chosen. The mean of the
    last bias becomes that of the process. The likelihood's own parameters keep their priors. No targets are used, so
    the prior stays a prior.

    Args:
        model: The model. Its present prior is what the result is compared with.
        target: The Gaussian process: a kernel such as ``kn.RBFKernel()``, a kernel of GPyTorch, or a ``NetworkPrior``
            of another model.
        x: Inputs at which functions are compared, such as those to train on.
        points: The most rows of ``x`` that are used, drawn at random.
        draws: Networks that are drawn from the prior. More are more exact and slower.
        seed: Makes rows and draws.

    Returns:
        The matched model as ``.model``, and how far the prior was from the target before and after.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 50), torch.nn.Tanh(), torch.nn.Linear(50, 1))
        >>> x = torch.linspace(-2, 2, 40).unsqueeze(1)
        >>> matched = kn.match_prior(kn.Model(net, kn.Gaussian()), kn.RBFKernel(), x, draws=200)
        >>> matched.after.value < matched.before.value
        True
        >>> posterior = kn.MAP(epochs=5).fit(matched.model, (x, torch.sin(x)))
    """
    check_type("model", model, Model, "a knowable Model (network, likelihood, prior)")
    check_count("points", points, at_least=2)
    check_count("draws", draws, at_least=2 * _BLOCKS)
    if target is None or (isinstance(target, NetworkPrior) and target.model is None):
        raise InvalidArgument("target must say which functions are wanted, such as kn.RBFKernel(lengthscale=1.0).")
    process, inputs = as_function_prior(target), as_input(x, model)
    chosen = torch.randperm(len(inputs), generator=generator_for(seed, "points"))[:points].sort().values
    at = inputs[chosen.to(inputs.device)]
    mean, covariance = process.at(at, model, generator=generator_for(seed, "target", device=model.device)).moments(
        torch.arange(len(at), device=model.device)
    )
    search = _Search(model, at, mean, covariance, draws, seed)
    before = search.distance(lambda n, g: model.network_params(model.prior_draws(n, generator=g)), "before")
    scales, settled = search.minimise()
    found = _with_scales(model, search, scales)
    after = search.distance(lambda n, g: search.weights(search.noise(n, g), scales), "after")
    matched = MatchedPrior(found, model, process, before, after, scales, inputs)
    if not settled:
        warnings.warn(
            "match_prior: the search was stopped before the distance had settled. Standardise x, or match a target "
            "whose scale and lengthscale are closer to those of the inputs.",
            ConvergenceWarning,
            stacklevel=2,
        )
    if after.value - 2 * after.error > _POOR:
        warnings.warn(
            f"match_prior: no scales make this network's functions like {process!r}: the distance of covariances is "
            f"still {after}. Use a wider network, another activation (kn.Erf and tanh suit smooth functions, ReLU "
            f"rough ones), or another target.",
            ModelWarning,
            stacklevel=2,
        )
    return matched


@dataclass(frozen=True)
class PriorDistance:
    """How far the functions of a prior are from a Gaussian process.

    Attributes:
        value: The distance of their covariances, relative to the size of the process's: 0 where they agree.
        error: Its Monte Carlo standard error.
        kurtosis: Excess kurtosis of function values, the mean over the inputs: 0 where they are normal.
    """

    value: float
    error: float
    kurtosis: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ± {self.error:.1g}"


@dataclass(frozen=True, repr=False)
class MatchedPrior:
    """A model whose prior was matched to a Gaussian process.

    Attributes:
        model: The model with the matched prior, to be fitted.
        original: The model with the prior it had.
        target: The Gaussian process.
        before: How far the original prior is from it.
        after: How far the matched prior is.
        scales: The scale of each parameter's normal prior, by name.
    """

    model: Model
    original: Model
    target: FunctionPrior
    before: PriorDistance
    after: PriorDistance
    scales: dict[str, float]
    _inputs: Tensor = field(compare=False)

    def summary(self) -> str:
        """Distances and scales as text."""
        width = max(map(len, self.scales))
        return "\n".join([
            f"Prior of {type(self.model.net).__name__} matched to {self.target!r}",
            f"  distance of covariances: {self.before} before, {self.after} after",
            f"  excess kurtosis: {self.before.kurtosis:.2g} before, {self.after.kurtosis:.2g} after",
            *(f"  {name:<{width}}  Normal({scale:.3g})" for name, scale in self.scales.items()),
        ])  # fmt: skip

    def plot(self, *, functions: int = 10, seed: int = 0) -> Figure:
        """Functions of the original prior, of the matched prior and of the process, side by side.

        They are drawn along the direction in which the inputs vary most. The band is the process's mean and two of its
        standard deviations.

        Args:
            functions: How many functions are drawn of each.
            seed: Makes the draws.

        Raises:
            Unsupported: If inputs are not one tensor of numbers.
            MissingExtra: If matplotlib is not installed.
        """
        check_count("functions", functions)
        path, along = _longest_line(self._inputs)
        mean, covariance = (each[0].cpu() for each in self.target.at(
            path, self.model, generator=generator_for(seed, "target", device=self.model.device)
        ).moments(torch.arange(len(path), device=self.model.device)))  # fmt: skip
        noise = torch.randn((functions, len(path)), generator=generator_for(seed, "process"), dtype=torch.float64)
        panels = {"prior as it was": self.original, "matched prior": self.model}
        drawn = {title: _functions(model, path, functions, seed) for title, model in panels.items()}
        drawn[f"{type(self.target).__name__}: the target"] = mean + noise @ root_of(covariance).T
        spread = 2 * covariance.diagonal().clamp_min(0.0).sqrt()

        def draw(figure: Figure) -> None:
            for number, (title, values) in enumerate(drawn.items()):
                axes = figure.add_subplot(1, 3, number + 1)
                axes.fill_between(along, mean - spread, mean + spread, color=NOISE_BAND, lw=0)
                for line in values:
                    axes.plot(along, line, color=COLOURS[1], lw=0.9, alpha=0.8)
                reach = 2.2 * float(spread.max())
                axes.set(xlabel="x" if self._inputs[0].numel() == 1 else "along the inputs' longest direction")
                axes.set_ylim(float(mean.min()) - reach, float(mean.max()) + reach)
                axes.set_title(title, loc="left", color=INK)

        return new_figure(9.0, 3.0, draw)

    def __repr__(self) -> str:
        return self.summary()


def _functions(model: Model, path: Tensor, count: int, seed: int) -> Tensor:
    """Values of the first output of some functions of a model's prior, ``(count, points)``."""
    with torch.no_grad():
        stack = model.prior_draws(count, generator=generator_for(seed, "functions", device=model.device))
        values = model.network.over_draws(
            model.network_params(stack), path, buffers=model.buffers(), vectorise=False
        )  # fmt: skip
    return values.reshape(count, len(path), -1)[..., 0].double().cpu()


def _longest_line(x: Tensor) -> tuple[Tensor, Tensor]:
    """Points along the first principal direction of the inputs, over their range, and their places on it."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        raise Unsupported("The plot is for inputs that are one tensor of numbers.")
    flat = x.flatten(1).double()
    middle = flat.mean(0)
    direction = torch.linalg.svd(flat - middle, full_matrices=False).Vh[0]
    direction = direction * direction[direction.abs().argmax()].sign()
    places = (flat - middle) @ direction
    along = torch.linspace(float(places.min()), float(places.max()), 121, dtype=torch.float64, device=x.device)
    points = middle + along.unsqueeze(1) * direction
    shown = points[:, 0] if flat.shape[1] == 1 else along
    return points.reshape(-1, *x.shape[1:]).to(x), shown.cpu()


def _with_scales(model: Model, search: _Search, scales: dict[str, float]) -> Model:
    """The model with normal priors of these scales on its network's random parameters."""
    priors = {name: Normal(scale, loc=search.locs.get(name, 0.0)) for name, scale in scales.items()}
    found = model.with_priors(priors, random=model.random_names)
    found.prior_given = True  # methods that choose scales where none were given leave these alone
    return found


class _Search:
    """The distance between function values of a network and a process, as a function of the scales of the prior.

    Args:
        model: The model.
        x: The inputs, ``(n, ...)``.
        mean: Means of the process there, ``(outputs or 1, n)``.
        covariance: Their covariances, ``(outputs or 1, n, n)``.
        draws: How many networks are drawn.
        seed: Makes them.
    """

    def __init__(self, model: Model, x: Tensor, mean: Tensor, covariance: Tensor, draws: int, seed: int):
        self.model, self.x, self.draws, self.seed = model, x, draws, seed
        self.mean, self.covariance = mean.to(model.device), covariance.to(model.device)
        self.size = self.covariance.square().sum((1, 2))  # ‖K‖², of each output
        start = model.network_params(model.params())
        self.shapes = {name: start[name].shape for name in model.random_names if name in start}
        if not self.shapes:
            raise InvalidArgument("model has no random parameter in its network, so there is no prior to match.")
        self._fixed = {name: value for name, value in start.items() if name not in self.shapes}
        self._buffers = model.buffers()
        self.locs = self._last_bias()
        total = sum(shape.numel() for shape in self.shapes.values())
        self._vectorise = total <= _VECTORISE_BELOW
        each = 8 * total + 3 * len(x) * bytes_per_row(model, x[:2], self._buffers)
        self._at_once = max(1, min(_MOST_AT_ONCE, free_memory(model.device) // (4 * each)))

    def _last_bias(self) -> dict[str, float]:
        """The mean of the last bias: the process's."""
        mean = float(self.mean.mean())
        if mean == 0.0:
            return {}
        last = last_layer_names(self.model.net, [name for name, _ in self.model.net.named_parameters()])
        biases = [name for name in self.shapes if name in last and len(self.shapes[name]) == 1]
        if not biases:
            raise Unsupported(
                f"target has the mean {mean:.3g}, which the bias of the last layer should have, and the network has no "
                f"random one. Give the target a mean of 0, and centre the outcomes."
            )
        return {biases[0]: mean}

    # --- functions of drawn networks ---------------------------------------------------------------------------------

    def noise(self, count: int, generator: torch.Generator) -> Params:
        """Standard normal numbers for ``count`` networks."""
        like: dict[str, Any] = {"dtype": self.model.dtype, "device": self.model.device, "generator": generator}
        return {name: torch.randn((count, *shape), **like) for name, shape in self.shapes.items()}

    def weights(self, noise: Params, scales: Any) -> Params:
        """Networks with weights of these scales."""
        return {name: self.locs.get(name, 0.0) + scales[name] * value for name, value in noise.items()}

    def values(self, weights: Params) -> Tensor:
        """Function values less the process's mean, ``(draws, outputs, n)``, in double precision."""
        count = len(next(iter(weights.values())))
        fixed = {name: value.unsqueeze(0).expand(count, *value.shape) for name, value in self._fixed.items()}
        stack = {**fixed, **{name: weights[name] for name in self.shapes}}
        f = self.model.network.over_draws(stack, self.x, buffers=self._buffers, vectorise=self._vectorise)
        return f.reshape(count, len(self.x), -1).mT.double() - self.mean

    def _blocks(self, kind: str, draws: int) -> Iterator[tuple[int, torch.Generator]]:
        """Numbers of draws that are made at once, with the generator of each: the same at every call."""
        for number, first in enumerate(range(0, draws, self._at_once)):
            generator = generator_for(self.seed, kind, number, device=self.model.device)
            yield min(self._at_once, draws - first), generator

    # --- the distance ------------------------------------------------------------------------------------------------

    def squared(self, f: Tensor) -> Tensor:
        """The squared distance from pairs of draws ``(draws, outputs, n)``, unbiased: the mean over outputs."""
        f = f.transpose(0, 1)  # (outputs, draws, n)
        moment, count = f.mT @ f, f.shape[1]
        pairs = moment.square().sum((1, 2)) - f.square().sum(2).square().sum(1)
        crossed = (moment * self.covariance).sum((1, 2)) / count
        return ((pairs / (count * (count - 1)) - 2 * crossed + self.size) / self.size).mean()

    def distance(self, weights: Callable[[int, torch.Generator], Params], kind: str) -> PriorDistance:
        """The distance under other draws than those of the search, with its error by the jackknife."""
        draws = 4 * self.draws
        with torch.no_grad():
            f = torch.cat([self.values(weights(count, g)) for count, g in self._blocks(kind, draws)])
        if not f.isfinite().all():
            return PriorDistance(math.inf, math.nan, math.nan)
        whole = float(self.squared(f))
        blocks = torch.arange(draws, device=f.device) % _BLOCKS
        left_out = torch.stack([self.squared(f[blocks != block]) for block in range(_BLOCKS)])
        error = float(((_BLOCKS - 1) * left_out.var(correction=0)).sqrt())
        value = math.sqrt(max(whole, 0.0))
        fourth = f.pow(4).mean(0) / f.square().mean(0).square().clamp_min(1e-300)
        return PriorDistance(value, math.sqrt(max(whole, 0.0) + error) - value, float(fourth.mean()) - 3.0)

    # --- the search --------------------------------------------------------------------------------------------------

    def minimise(self) -> tuple[dict[str, float], bool]:
        """The scales with the least distance, and whether the search has settled.

        It begins at the two best of some starts: 1/√n for weights that sum over n units and 1 for biases, larger ones
        in all but the last layer, and those of the present prior, each with the process's variance.
        """
        last = last_layer_names(self.model.net, [name for name, _ in self.model.net.named_parameters()])
        usual, starts = self.usual, []
        larger = [{name: v if name in last else factor * v for name, v in usual.items()} for factor in _STARTS]
        for scales in (*larger, self._present()):
            f = self._all_values(scales)
            level = float((self.covariance.diagonal(dim1=1, dim2=2).mean() / f.square().mean()).sqrt())
            if 0 < level < math.inf:
                logs = _logs({name: scale * level if name in last else scale for name, scale in scales.items()})
                starts.append((self._value(logs)[0], logs))
        if not starts:
            raise InvalidArgument("The network's functions have no finite values at x under any prior: standardise x.")
        starts.sort(key=lambda each: each[0])
        bounds = [(each - _FARTHEST, each + _FARTHEST) for each in _logs(usual)]
        options = {"maxiter": _STEPS, "ftol": 1e-6, "gtol": 1e-5}
        found: Any = min((
            minimize(self._value, logs, jac=True, method="L-BFGS-B", bounds=bounds, options=options)
            for _, logs in starts[:2]
        ), key=lambda each: each.fun)  # fmt: skip
        return dict(zip(self.shapes, map(float, np.exp(found.x)), strict=True)), found.status != 1

    @property
    def usual(self) -> dict[str, float]:
        """Scales of 1/√n for weights that sum over n units, and 1 for biases."""
        return {
            name: 1 / math.sqrt(max(1, shape[1:].numel())) if len(shape) > 1 else 1.0
            for name, shape in self.shapes.items()
        }

    def _present(self) -> dict[str, float]:
        """Scales of the present prior, the usual ones where it is not normal."""
        params, found = self.model.params(), self.usual
        for name in self.shapes:
            prior = self.model.prior.bound(name, params)
            moments = None if prior is None else prior.normal_moments()
            precision = 0.0 if moments is None else float(torch.as_tensor(moments[1]).max())
            found[name] = found[name] if precision <= 0 else precision**-0.5
        return found

    def _all_values(self, scales: dict[str, float]) -> Tensor:
        with torch.no_grad():
            parts = [
                self.values(self.weights(self.noise(*each), scales)) for each in self._blocks("search", self.draws)
            ]
        return torch.cat(parts)

    def _value(self, logs: np.ndarray) -> tuple[float, np.ndarray]:
        """The squared distance and its slope in the logarithms of the scales, over the draws of the search.

        First all function values; then each block of draws once more, derived in the scales.
        """
        leaf = torch.as_tensor(logs, dtype=torch.float64).to(self.model.device).requires_grad_()

        def block(count: int, generator: torch.Generator) -> Tensor:
            scales = dict(zip(self.shapes, leaf.exp().to(self.model.dtype), strict=True))
            return self.values(self.weights(self.noise(count, generator), scales))

        f = self._all_values(dict(zip(self.shapes, map(float, np.exp(logs)), strict=True))).requires_grad_()
        away = logs - _logs(self.usual)
        with torch.enable_grad():
            value = self.squared(f)
            if not value.isfinite():  # a step too far: the line search comes back
                return _TOO_FAR, np.zeros_like(logs)
            slopes = torch.autograd.grad(value, f)[0].split(self._at_once)
            for each, slope in zip(self._blocks("search", self.draws), slopes, strict=True):
                (block(*each) * slope).sum().backward()
        assert leaf.grad is not None
        near = _NEARNESS * float(away @ away)
        return float(value.detach()) + near, leaf.grad.cpu().numpy() + 2 * _NEARNESS * away


def _logs(scales: dict[str, float]) -> np.ndarray:
    return np.log(np.array(list(scales.values())))
