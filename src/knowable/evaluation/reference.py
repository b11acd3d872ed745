r"""How far a posterior is from a reference one, such as long chains: compared as functions, not as weights.

Weights can be permuted without changing the network's function, so two posteriors are compared by the outputs of their
draws at given inputs (Izmailov et al., 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.core.support.checks import check_count
from knowable.errors import InvalidArgument, InvalidType
from knowable.evaluation.inputs import in_double

_GROUPS = 10  # of draws, left out in turn for the standard errors

Figures = dict[str, Tensor]  # each (B,), one value for each input

_MEANING = {
    "mean_shift": "|difference of means| in sds of the reference",
    "sd_ratio": "sd of the functions over the reference's",
    "predictive_sd_ratio": "predictive sd (with the noise) over the reference's",
    "wasserstein": "W1 distance of the functions' values in sds of the reference",
    "ks": "Kolmogorov-Smirnov: largest difference of the CDFs",
    "agreement": "share of inputs with the same label",
    "total_variation": "distance of the predictive probabilities",
    "epistemic_difference": "mutual information less the reference's, nats",
    "entropy_difference": "entropy less the reference's, nats",
}


@dataclass(frozen=True, repr=False)
class ReferenceComparison(Mapping[str, float]):
    """Named distances of a posterior from a reference, averaged over inputs: a mapping that prints as a table.

    Attributes:
        figures: The distances, by name.
        standard_errors: Of each, from the number of draws (jackknife over tenths of them).
        same: What each figure would be for as many other draws of the reference itself, the best a posterior can reach.
        per_input: The figures at each input, ``(B,)``.
        draws: How many draws of the posterior and of the reference were compared.
    """

    figures: dict[str, float]
    standard_errors: dict[str, float]
    same: dict[str, float]
    per_input: dict[str, Tensor]
    draws: tuple[int, int]

    def __getitem__(self, name: str) -> float:
        return self.figures[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.figures)

    def __len__(self) -> int:
        return len(self.figures)

    def __repr__(self) -> str:
        width = max(map(len, self.figures))
        inputs = len(next(iter(self.per_input.values())))
        lines = [
            f"Comparison with a reference at {inputs} input{'s' if inputs != 1 else ''} "
            f"({self.draws[0]} draws against {self.draws[1]})",
            f"  {'':<{width}}  {'value':>9}  {'s.e.':>8}  {'if same':>8}",
        ]
        lines += [
            f"  {name:<{width}}  {value:>9.4f}  {self.standard_errors[name]:>8.2g}  {self.same[name]:>8.3f}  "
            f"{_MEANING[name]}"
            for name, value in self.figures.items()
        ]
        return "\n".join(lines)


@torch.no_grad()
def compare_to_reference(
    posterior: Posterior, reference: Posterior, x: Any, *, samples: int = 1000
) -> ReferenceComparison:
    r"""Compare a posterior with a reference in function space, at inputs ``x``.

    Regression: ``mean_shift`` :math:`|\mu - \mu_r| / s_r`, ``sd_ratio`` :math:`s / s_r` of the functions' values,
    ``predictive_sd_ratio`` with the noise, ``wasserstein`` :math:`W_1 / s_r` and ``ks`` of the functions' values.
    Classes: ``agreement`` of labels, ``total_variation``, ``epistemic_difference`` and ``entropy_difference`` in nats,
    and ``wasserstein`` of the draws' probabilities. Each is computed at every input and averaged.

    Args:
        posterior: Any fitted posterior.
        reference: The reference posterior, such as long chains of ``NUTS`` for the same model.
        x: Inputs. Approximations differ most at inputs outside the range of the data.
        samples: Draws of each (a posterior of fewer atoms uses all of them).

    Returns:
        The figures with their standard errors, and what they would be if the two were the same.

    Raises:
        InvalidType: If either is not a posterior.
        InvalidArgument: If they predict different kinds of outcome, or the reference has zero variance.

    Example:
        >>> import knowable as kn
        >>> net, x = torch.nn.Linear(1, 1), torch.linspace(-1, 1, 20).unsqueeze(1)
        >>> model = kn.Model(net, kn.Gaussian(noise=0.5))
        >>> exact = kn.ExactLinear().fit(model, (x, 2 * x))
        >>> compare_to_reference(kn.MAP(epochs=2).fit(model, (x, 2 * x)), exact, x, samples=100)["sd_ratio"]
        0.0
    """
    check_count("samples", samples, at_least=2)
    for name, value in (("posterior", posterior), ("reference", reference)):
        if not isinstance(value, Posterior):
            raise InvalidType(f"{name} must be a posterior, what fit returns; got {type(value).__name__}.")
    found, truth = posterior.predict(x, samples=samples), reference.predict(x, samples=samples)
    return compare_predictions(found, truth)


@torch.no_grad()
def compare_predictions(prediction: Prediction, reference: Prediction) -> ReferenceComparison:
    """Compare two predictions at the same inputs; see :func:`compare_to_reference`."""
    figures, one, two = _prepared(prediction, reference)
    per_input = figures(one, two)
    values = {name: value.mean().item() for name, value in per_input.items()}
    return ReferenceComparison(
        values, _standard_errors(figures, one, two), _if_same(figures, two), per_input, (len(one), len(two))
    )


# --- draws of functions ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Draws:
    """Weighted draws: ``values`` ``(K, B, E)`` or ``(K, B, E, C)``, ``noise`` variances ``(K, B, E)``."""

    values: Tensor
    weights: Tensor  # (K,), sum to one
    noise: Tensor | None = None

    def __len__(self) -> int:
        return len(self.weights)

    def some(self, keep: Tensor) -> _Draws:
        weights = self.weights[keep]
        return _Draws(self.values[keep], weights / weights.sum(), None if self.noise is None else self.noise[keep])

    def mix(self, values: Tensor) -> Tensor:
        """Weighted mean over draws."""
        return torch.tensordot(self.weights, values, dims=1)


def _prepared(found: Prediction, truth: Prediction) -> tuple[Callable[[_Draws, _Draws], Figures], _Draws, _Draws]:
    if isinstance(found, RegressionPrediction) and isinstance(truth, RegressionPrediction):
        one, two, figures = _numbers(found), _numbers(truth), _regression_figures
        if not (_spread(two) > 0).all():
            raise InvalidArgument("reference has no spread at some input: a point estimate cannot be a reference.")
    elif isinstance(found, ClassPrediction) and isinstance(truth, ClassPrediction):
        one, two, figures = _probabilities(found), _probabilities(truth), _class_figures
    else:
        raise InvalidArgument(
            f"posterior and reference must predict the same kind of outcome, got {type(found).__name__} and "
            f"{type(truth).__name__}. Fit both to the same model."
        )
    if one.values.shape[1:] != two.values.shape[1:]:
        raise InvalidArgument(
            f"posterior and reference must have the same outputs, got {tuple(one.values.shape[1:])} and "
            f"{tuple(two.values.shape[1:])}. Fit both to the same model."
        )
    return figures, one, two


def _numbers(prediction: RegressionPrediction) -> _Draws:
    noise = prediction.components.variance
    if prediction.within is not None:
        noise = noise - prediction.within
    values = in_double(prediction.samples).reshape(*prediction.samples.shape[:2], -1)
    noise = in_double(noise.expand_as(prediction.components.mean)).reshape(noise.shape[0], values.shape[1], -1)
    if len(noise) != len(values):  # one component with the weights integrated out
        noise = noise.mean(0, keepdim=True).expand_as(values)
        return _Draws(values, torch.full((len(values),), 1 / len(values), dtype=torch.float64), noise)
    return _Draws(values, in_double(prediction.log_weights).exp(), noise)


def _probabilities(prediction: ClassPrediction) -> _Draws:
    samples = in_double(prediction.samples)
    if samples.shape[1:] == prediction.labels.shape:  # P(y=1): write it as two classes
        table = torch.stack([1 - samples, samples], dim=-1)
    else:
        table = samples.movedim(2, -1)  # classes come after the rows
    table = table.reshape(*table.shape[:2], -1, table.shape[-1])
    return _Draws(table, in_double(prediction.log_weights).exp())


# --- figures at each input -------------------------------------------------------------------------------------------


def _spread(draws: _Draws) -> Tensor:
    """Standard deviation of the functions' values, ``(B, E)``."""
    return draws.mix((draws.values - draws.mix(draws.values)).square()).sqrt()


def _regression_figures(one: _Draws, two: _Draws) -> Figures:
    scale = _spread(two).clamp_min(1e-300)  # (B, E)
    assert one.noise is not None and two.noise is not None
    total = [(_spread(each).square() + each.mix(each.noise)).sqrt() for each in (one, two) if each.noise is not None]
    wasserstein, ks = distances(one.values, two.values, one.weights, two.weights)
    found = {
        "mean_shift": (one.mix(one.values) - two.mix(two.values)).abs() / scale,
        "sd_ratio": _spread(one) / scale,
        "predictive_sd_ratio": total[0] / total[1],
        "wasserstein": wasserstein / scale,
        "ks": ks,
    }
    return {name: value.mean(1) for name, value in found.items()}


def _class_figures(one: _Draws, two: _Draws) -> Figures:
    p, q = one.mix(one.values), two.mix(two.values)  # (B, E, C)
    (entropy, information), (entropy_r, information_r) = _entropies(one), _entropies(two)
    wasserstein, _ = distances(one.values.flatten(2), two.values.flatten(2), one.weights, two.weights)
    found = {
        "agreement": (p.argmax(-1) == q.argmax(-1)).double(),
        "total_variation": 0.5 * (p - q).abs().sum(-1),
        "epistemic_difference": information - information_r,
        "entropy_difference": entropy - entropy_r,
        "wasserstein": wasserstein,
    }
    return {name: value.mean(1) for name, value in found.items()}


def _entropies(draws: _Draws) -> tuple[Tensor, Tensor]:
    """Entropy of the mean and mutual information, in nats, ``(B, E)``."""
    total = torch.special.entr(draws.mix(draws.values)).sum(-1)
    return total, total - draws.mix(torch.special.entr(draws.values).sum(-1))


def distances(a: Tensor, b: Tensor, weights_a: Tensor, weights_b: Tensor) -> tuple[Tensor, Tensor]:
    r"""Wasserstein-1 and Kolmogorov-Smirnov distances of weighted draws, for every quantity by itself.

    .. math:: W_1 = \int |F_a(x) - F_b(x)|\, dx, \qquad \mathrm{KS} = \max_x |F_a(x) - F_b(x)|

    Args:
        a: Draws ``(K, ...)``.
        b: Other draws ``(L, ...)`` of the same quantities.
        weights_a: Weights of ``a``, ``(K,)``, that sum to one.
        weights_b: Weights of ``b``, ``(L,)``.

    Returns:
        Both distances, shape ``(...)``.
    """
    flat = torch.cat([a.flatten(1), b.flatten(1)]).T.contiguous()  # (M, K + L)
    ordered, order = flat.sort(dim=-1)
    signed = torch.cat([weights_a, -weights_b])
    gap = signed[order].cumsum(-1).abs()[:, :-1]  # |F_a - F_b| between neighbours
    width = ordered.diff(dim=-1)
    wasserstein = (gap * width).sum(-1)
    ks = torch.where(width > 0, gap, 0.0).amax(-1) if gap.shape[1] else torch.zeros_like(wasserstein)
    return wasserstein.reshape(a.shape[1:]), ks.reshape(a.shape[1:])


# --- errors ----------------------------------------------------------------------------------------------------------


def _standard_errors(figures: Callable[[_Draws, _Draws], Figures], one: _Draws, two: _Draws) -> dict[str, float]:
    """Jackknife: leave out a tenth of both sets of draws at a time, consecutive ones, which may be autocorrelated."""
    left = []
    for group in range(_GROUPS):
        some = [each.some(_without(len(each), group)) for each in (one, two)]
        left.append({name: value.mean() for name, value in figures(*some).items()})
    stacked = {name: torch.stack([each[name] for each in left]) for name in left[0]}
    return {name: ((_GROUPS - 1) * value.var(correction=0)).sqrt().item() for name, value in stacked.items()}


def _without(count: int, group: int) -> Tensor:
    """Which draws are kept when a group is left out; all of them where there are too few to spare any."""
    if count < 2 * _GROUPS:
        return torch.ones(count, dtype=torch.bool)
    return torch.arange(count) * _GROUPS // count != group


def _if_same(figures: Callable[[_Draws, _Draws], Figures], reference: _Draws) -> dict[str, float]:
    """The figures of one half of the reference's draws against the other, scaled by 1/√2 to twice as many draws."""
    half = torch.arange(len(reference)) < len(reference) // 2
    if len(reference) < 4:
        return dict.fromkeys(figures(reference, reference), float("nan"))
    found = {n: v.mean().item() for n, v in figures(reference.some(half), reference.some(~half)).items()}
    at_best = {n: v.mean().item() for n, v in figures(reference, reference).items()}
    return {name: at_best[name] + (found[name] - at_best[name]) / 2**0.5 for name in found}
