r"""How far the ELBO could still rise after training, and variational Newton steps that raise it.

For any q with draws :math:`\theta = m + \delta` in units of its own scale, and with the gradient g of the log joint
density at a draw, the ELBO's gradient in the mean is :math:`E[g]`, and in the logarithm of each scale it is
:math:`k = E[g \delta] + 1`. A natural-gradient step on both raises the bound by about

.. math:: \tfrac12 \sum_d \frac{E[g_d]^2}{1 - k_d} - \tfrac12 \sum_d \big(k_d + \log(1 - k_d)\big),

exactly that for independent normals and a normal target whose weights are independent. Squares of means are estimated
by products of different draws, which leaves no bias. Where q may have any correlations, the directions d are those in
which other draws say that it is off most. Families that cannot stretch in each direction by itself are
stretched in all at once. Where there are few weights, the expected Hessian is affordable as a whole, and the step goes
to the member of the family that is nearest to the normal with that precision (variational Newton: Opper and Archambeau,
2009; Khan and Rue, 2023). It needs no learning rate, whatever the scale of the problem; each step is kept only where it
raises the ELBO over draws that are common to both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat

import torch
from torch import Tensor

from knowable.core.model.data import FEWEST_ROWS, Batch, Data
from knowable.core.network.params import Layout, Params
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.core.training.settings import LITTLE_WORK
from knowable.errors import Unsupported
from knowable.inference.variational.objective import VariationalObjective

_DENSE_UP_TO = 300  # weights and point estimates, for the expected Hessian as a matrix
_ROUNDS = 10  # Newton steps at most
_DAMPING = (1.0, 0.3, 0.1)  # shares of a step, tried in turn
_HESSIANS = 4  # draws at which it is computed
_COMPARED = (64, 1_024)  # draws over which the ELBO is compared: more where few leave it open whether a step helps
_UNIT_DRAWS = 2_048  # for the covariance of q
_FEWEST, _MOST = 8, 512  # draws of the check over all rows
_VALUES = 2**24  # gradients of single weights that the check keeps; of more weights, some stand for all
_NEWTON_ROWS = 5_000_000  # gradients of a row, for the expected Hessian of one step
_ALL = slice(None)
_NATS, _NATS_PER_WEIGHT = 0.5, 0.01  # what may be missing: a scale off by a tenth, a mean off by a seventh of its scale


@dataclass(frozen=True)
class Rise:
    """By how much one natural-gradient step on means and scales would raise the ELBO, in nats.

    Attributes:
        nats: The estimate, without bias: it may be negative where there is nothing to gain.
        standard_error: Of that estimate, if there is nothing to gain.
        weights: Number of random weights.
    """

    nats: float
    standard_error: float
    weights: int

    @classmethod
    def mean(cls, rises: Sequence[Rise]) -> Rise:
        """That of the mean of several ELBOs."""
        error = math.hypot(*(each.standard_error for each in rises)) / len(rises)
        return cls(sum(each.nats for each in rises) / len(rises), error, rises[0].weights)

    @property
    def is_small(self) -> bool:
        """Whether what is missing is below 0.5 nats, or below 0.01 nats a weight, or not told from noise."""
        return self.nats - 3.0 * self.standard_error <= max(_NATS, _NATS_PER_WEIGHT * self.weights)

    @property
    def terms(self) -> dict[str, float]:
        """For the diagnostics."""
        return {"possible_rise": max(0.0, self.nats), "possible_rise_standard_error": self.standard_error}


def is_steady(objective: VariationalObjective, data: Data) -> bool:
    """Whether the network computes in training what it does in evaluation."""
    model = objective.model
    params = {**objective.point_params(), **objective.model.params()}
    with own_randomness(0):
        return model.network.is_steady(model.network_params(params), data.first[0], objective.net_buffers)


def worth_checking(objective: VariationalObjective, data: Data, epochs: float) -> bool:
    """Whether :func:`possible_rise` costs little beside ``epochs`` of training, or little at all."""
    rows = (2 if objective.symmetric else 1) * FEWEST_ROWS
    return rows <= 0.2 * epochs * data.size or rows * objective.dimension <= LITTLE_WORK


def possible_rise(objective: VariationalObjective, data: Data, seed: int, epochs: float) -> Rise:
    """What the ELBO could still gain, by gradients at some draws, at a tenth of the cost of training.

    Each draw's gradient is over all rows. After few epochs, each is over another part of the rows instead: that has no
    bias either, but a larger standard error. Of a loader, the rows are those kept of it.
    """
    held = data.held
    exact = objective.exact_elbo(data if held is None else held)
    if exact is not None:
        return _exact_rise(objective, objective.get_parameter("q"), exact)
    sides = 2 if objective.symmetric else 1  # a draw and its mirror image are one observation
    passes = 0.1 * epochs / sides
    count = int(min(_MOST, passes))
    parts: Iterator[Sequence[tuple[float, Batch]] | None] = repeat(None, count)  # None: all rows
    with own_randomness(derive_seed(seed, "possible rise")):
        if passes < _FEWEST or held is None:
            count = sum(1 for _ in islice(data.parts(passes, seed=seed), _MOST))
            parts = ([each] for each in data.parts(passes, seed=seed))  # one by one: together they are large
        target = Target(objective, held or data)
        kept: Tensor | slice = _ALL
        with torch.no_grad():
            centre = target.moments()[0] if objective.symmetric else None
            mean, units = target.units()
        if target.size * count > _VALUES:
            kept = torch.randperm(target.size, device=mean.device)[: max(1, _VALUES // count)].clone()
            mean, units = mean[kept], units[kept]
        turning = objective.stretches and units.dim() == 2 and count >= 2 * _FEWEST
        observed, at_once = [], max(1, _VALUES // (sides * target.size))
        for first in range(0, count, at_once):
            some = min(at_once, count - first)
            draws = target.draws(sides * some, centre)
            for number, rows in enumerate(islice(parts, some)):
                found = []
                for each in draws[number::some]:
                    away = each[: target.size][kept].double() - mean
                    found.append(torch.stack(_in_units(target.gradient(each, rows, kept), away, units)))
                observed.append(torch.stack(found) if turning else _slopes(torch.stack(found)))
    whole = torch.stack(observed)
    parted = list(_turned(whole)) if turning else [whole]
    gains = [_gain(each, together=not objective.stretches) for each in parted]
    share = target.size / (len(mean) * len(gains))
    value, error = sum(each[0] for each in gains), math.hypot(*(each[1] for each in gains))
    return Rise(share * value, share * error, target.size)


def _slopes(observed: Tensor) -> Tensor:
    """Slopes in means and in log scales, ``(..., 2, D)``, of gradients and distances ``(..., sides, 2, D)``."""
    gradients, away = observed.unbind(-2)
    return torch.stack([gradients, gradients * away + 1.0], dim=-2).mean(-3)


def _turned(observed: Tensor) -> Iterator[Tensor]:
    r"""The slopes of each half of the draws, in the directions in which the other half says that q is off most.

    These are eigenvectors of :math:`E[g \delta^\top]`: correlations that q lacks do not show along its own axes.
    """
    for half in (0, 1):
        gradients, away = observed[1 - half :: 2].flatten(0, 1).unbind(1)
        products = gradients.T @ away
        yield _slopes(observed[half::2] @ torch.linalg.eigh(products + products.T).eigenvectors)


def _gain(observed: Tensor, *, together: bool) -> tuple[float, float]:
    """What a step gains, and its standard error, from slopes ``(n, 2, D)``; ``together``: one stretch for all."""
    gradients, slopes = observed.unbind(1)
    if together:
        slopes = slopes.mean(1, keepdim=True).expand_as(slopes)
    known, noise = slopes.mean(0), slopes.std(0) / math.sqrt(len(slopes))
    known = torch.minimum(known, (known - 2.0 * noise).clamp_min(0.0))  # near 1, noise alone would count for much
    by_mean, by_scale = _gains_over_squares(known)
    both = [gradients * by_mean.sqrt(), slopes * by_scale.sqrt()]
    value = _products_of_pairs(both).mean().item()
    noise = _products_of_pairs([each - each.mean(0) for each in both])  # what there would be without anything to gain
    return value, noise.square().mean().sqrt().item() * math.sqrt(2.0 / len(noise))


def _in_units(gradient: Tensor, away: Tensor, units: Tensor) -> tuple[Tensor, Tensor]:
    """A gradient and a distance from the mean in units of q's own scale."""
    if units.dim() == 1:
        return gradient * units, away / units
    return gradient @ units, torch.linalg.solve_triangular(units, away.unsqueeze(1), upper=False).squeeze(1)


def _exact_rise(objective: VariationalObjective, q: Tensor, elbo: Tensor) -> Rise:
    """The same from gradients without noise, of independent normals in one buffer of means and log scales."""
    by_mean, slopes = torch.autograd.grad(elbo / (objective.beta * objective.temperature), q)[0].double()
    gains = _gains_over_squares(slopes)
    value = (by_mean * q[1].detach().double().exp()).square() @ gains[0] + slopes.square() @ gains[1]
    return Rise(value.item(), 0.0, len(slopes))


def _gains_over_squares(slopes: Tensor) -> tuple[Tensor, Tensor]:
    """What a step on means and scales gains, over the squares of the slopes in means and in log scales."""
    stretch = slopes.clamp_max(0.99)  # 1 - Λ v: negative where q is too wide
    near = stretch.abs() < 1e-3
    exact = -(stretch + torch.log1p(-stretch)) / torch.where(near, 1.0, stretch).square()
    return 0.5 / (1.0 - stretch), 0.5 * torch.where(near, 0.5 + stretch / 3.0, exact)


def _products_of_pairs(parts: Sequence[Tensor]) -> Tensor:
    """Inner products of different rows, each pair twice."""
    products = torch.stack([each @ each.T for each in parts]).sum(0)
    return products[~torch.eye(len(products), dtype=torch.bool, device=products.device)]


def refine(objective: VariationalObjective, data: Data, seed: int, *, hold_points: bool = False) -> int:
    """Newton steps while they raise the ELBO; how many were made. None for many weights or rows: they are expensive."""
    target = Target(objective, data, hold_points=hold_points)
    if target.layout.size > _DENSE_UP_TO or _HESSIANS * target.layout.size * data.size > _NEWTON_ROWS:
        return 0
    for step in range(_ROUNDS):
        with own_randomness(derive_seed(seed, "newton", step)):
            gain = _newton_step(target, derive_seed(seed, "comparison", step))
        if gain < 0.1 * _NATS:
            return step
    return _ROUNDS


def _newton_step(target: Target, seed: int) -> float:
    """Move the distribution by the longest share of a Newton step that raises the ELBO, and say by how much."""
    objective = target.objective
    with torch.no_grad():
        mean, variance = target.moments()
        draws = target.draws(_HESSIANS, mean if objective.symmetric else None)
    centre = torch.cat([mean, target.points().to(mean)]).double()
    derivatives = [target.gradient_and_hessian(each) for each in draws]
    hessian = torch.stack([each[1] for each in derivatives]).mean(0)
    gradient = torch.stack([each[0] for each in derivatives]).mean(0)
    gradient = gradient - hessian @ (draws.double().mean(0) - centre)  # few draws are not about the mean
    precision = _positive(-hessian)
    if not (torch.isfinite(gradient).all() and torch.isfinite(precision).all()):
        return 0.0
    newton = torch.linalg.solve(precision, gradient)
    size = target.size
    kept = {name: value.detach().clone() for name, value in objective.tensors().items()}
    for count in _COMPARED:
        if count > _COMPARED[0] and count * target.data.size > _NEWTON_ROWS:
            break
        before, is_open = target.elbo(seed, count), False
        for share in _DAMPING:
            at = centre + share * newton
            blend = share * _positive(precision[:size, :size]) + (1.0 - share) * variance.double().reciprocal().diag()
            try:
                target.move(at[:size], blend, at[size:])
                gains = target.elbo(seed, count) - before
            except (Unsupported, RuntimeError):  # a family without a rule, or a matrix without a root
                gains = torch.full((2,), -math.inf)
            gain, noise = gains.mean().item(), 2.0 * gains.std().item() / math.sqrt(len(gains))
            if math.isfinite(gain) and gain > noise:
                return gain
            is_open = is_open or (math.isfinite(gain) and gain + noise > _NATS)
            with torch.no_grad():
                for name, value in objective.tensors().items():
                    value.copy_(kept[name])
        if not is_open:
            break
    return 0.0


def _positive(matrix: Tensor) -> Tensor:
    """The symmetric matrix with its eigenvalues' absolute values: a Newton step then never goes down."""
    values, vectors = torch.linalg.eigh(0.5 * (matrix + matrix.T))
    values = values.abs()
    return (vectors * values.clamp_min(1e-14 * values.max().item())) @ vectors.T


class Target:
    """The log density that q approximates, as a function of one flat vector: random weights, then point estimates."""

    def __init__(self, objective: VariationalObjective, data: Data, *, hold_points: bool = False):
        self.objective, self.data = objective, data
        first = objective.model.params()
        self.weights = Layout.of({name: first[name] for name in objective.model.random_names})
        self.free = Layout.of({} if hold_points else {name: first[name] for name in objective.point_names})
        self.layout = Layout((*self.weights.names, *self.free.names), (*self.weights.shapes, *self.free.shapes))
        self.size = self.weights.size

    def points(self) -> Tensor:
        """The point estimates that are not held, flat."""
        return self.free.flatten(self.objective.point_params()).detach()

    @torch.no_grad()
    def move(self, mean: Tensor, precision: Tensor, points: Tensor) -> None:
        """Let q be nearest to a normal, and give the point estimates new values."""
        self.objective.fit_normal(mean, precision)
        now = self.objective.point_params()
        for name, new in self.free.views(points).items():
            now[name].copy_(new)

    def params(self, flat: Tensor) -> Params:
        """All parameters, by name."""
        held = {name: value.detach().to(flat) for name, value in self.objective.point_params().items()}
        return {**held, **self.layout.views(flat)}

    def moments(self) -> tuple[Tensor, Tensor]:
        """Means and variances of the random weights."""
        posterior = self.objective.posterior()
        flat = self.weights.flatten
        return flat(posterior.mean()).detach(), flat(posterior.std()).detach().square()

    def units(self) -> tuple[Tensor, Tensor]:
        """The mean, and the scales ``(D,)`` or the factor L of the covariance ``(D, D)`` in which steps are measured.

        The covariance is that of many draws: q may have any form. With more weights, scales have to do.
        """
        if self.objective.diagonal or self.size > _DENSE_UP_TO:
            mean, variance = self.moments()
            return mean.double(), variance.double().sqrt()
        drawn = self.objective.draw_weights(max(_UNIT_DRAWS, 16 * self.size))
        values = torch.stack([self.weights.flatten(each) for each in drawn]).double()
        factor = torch.linalg.cholesky_ex(values.T.cov().reshape(self.size, self.size))
        return values.mean(0), factor.L if factor.info == 0 else values.std(0)

    def draws(self, count: int, centre: Tensor | None = None) -> Tensor:
        """Draws, half of them mirror images of the others about a ``centre``; points beside them."""
        points = self.points()
        drawn = [self.weights.flatten(each).detach() for each in self.objective.draw_weights(count)]
        if centre is not None:
            half = drawn[: count // 2]
            drawn = [*half, *(2.0 * centre - each for each in half)]
        return torch.stack([torch.cat([each, points.to(each)]) if len(points) else each for each in drawn])

    def log_density(self, flat: Tensor, x: Tensor, y: Tensor, weights: Tensor | None = None) -> Tensor:
        """Of one batch on its own scale, without the prior."""
        model, params = self.objective.model, self.params(flat)
        buffers = self.objective.net_buffers
        if flat.dtype != model.dtype:
            x, y = (each.to(flat.dtype) if each.is_floating_point() else each for each in (x, y))
            buffers = {k: v.to(flat.dtype) if v.is_floating_point() else v for k, v in buffers.items()}
        return model.score(model.forward(params, x, buffers=buffers), y, params, weights).sum()

    def log_prior(self, flat: Tensor) -> Tensor:
        """Of weights and points, tempered as the objective asks; β and T count as in the ELBO over β T."""
        objective, params = self.objective, self.params(flat)
        of_points = objective.log_prior_of_points({name: params[name] for name in objective.point_names})
        whole = objective.model.log_prior(params)
        return (whole - of_points) / objective.temperature + of_points / self._tempering

    @property
    def _tempering(self) -> float:
        return self.objective.beta * self.objective.temperature

    def gradient(
        self, flat: Tensor, parts: Sequence[tuple[float, Batch]] | None = None, kept: Tensor | slice = _ALL
    ) -> Tensor:
        """Of the whole log density in the weights that are ``kept``, computed in double precision for few weights.

        ``parts`` of the rows, each with its factor, may stand for all of them.
        """
        if self.layout.size > _DENSE_UP_TO:
            return self._first(flat, parts)[: self.size][kept].double()
        return self._precisely(lambda at: self._first(at, parts), flat)[: self.size][kept]

    def _first(self, flat: Tensor, parts: Sequence[tuple[float, Batch]] | None) -> Tensor:
        at = flat.detach().requires_grad_()
        total = _gradient(self.log_prior(at), at)
        for scale, batch in parts or ((1.0, batch) for batch in self.data):
            value = scale * self.log_density(at, *batch) / self._tempering
            if not value.requires_grad:
                raise Unsupported("The likelihood has no gradient in the weights.")
            total = total + _gradient(value, at)
        return total

    def gradient_and_hessian(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """The same with its Hessian."""
        both = self._precisely(self._second, flat)
        return both[0], both[1:]

    def _precisely(self, function: Callable[[Tensor], Tensor], flat: Tensor) -> Tensor:
        """In double precision, where the network takes it."""
        try:
            return function(flat.double())
        except RuntimeError:  # an operation or a constant of one precision only
            return function(flat).double()

    def _second(self, flat: Tensor) -> Tensor:
        """The gradient, and below it the Hessian, ``(1 + D, D)``."""
        at = flat.detach().requires_grad_()
        total = _derivatives(self.log_prior(at), at)
        for batch in self.data:
            total = total + _derivatives(self.log_density(at, *batch) / self._tempering, at)
        return total

    def elbo(self, seed: int, count: int) -> Tensor:
        """The ELBO at each of ``count`` draws, the same noise for the same seed; its constants count too."""
        objective = self.objective
        with torch.no_grad():
            exact = objective.exact_elbo(self.data)
        if exact is not None:
            return (exact / self._tempering).expand(2)
        with torch.no_grad(), own_randomness(seed):
            kl = objective.kl_divergence()
            if objective.temperature != 1.0:
                kl = kl - (objective.temperature - 1.0) * objective.entropy()
            points = objective.point_params()
            fixed = (objective.log_prior_of_points(points) / self._tempering) - kl / objective.temperature
            flat = torch.stack([self.layout.flatten({**points, **each}) for each in objective.draw_weights(count)])
            fits = [sum(self.log_density(each, *batch) for batch in self.data) for each in flat]
        return torch.stack([torch.as_tensor(each) for each in fits]) / self._tempering + fixed


def _derivatives(value: Tensor, at: Tensor) -> Tensor:
    """Gradient and Hessian of a scalar, one below the other."""
    gradient = _gradient(value, at, create_graph=True)
    if not gradient.requires_grad:  # linear, or constant
        return torch.cat([gradient.unsqueeze(0), at.new_zeros(len(at), len(at))])
    rows = [torch.autograd.grad(each, at, retain_graph=True, materialize_grads=True)[0] for each in gradient.unbind()]
    return torch.stack([gradient.detach(), *rows])


def _gradient(value: Tensor, at: Tensor, *, create_graph: bool = False) -> Tensor:
    """Of a scalar, which may be a constant."""
    if not value.requires_grad:
        return torch.zeros_like(at)
    return torch.autograd.grad(value, at, create_graph=create_graph, materialize_grads=True)[0]
