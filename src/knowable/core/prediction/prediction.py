"""The predictive distribution at given inputs, with its uncertainty split.

A prediction is a mixture over K posterior draws. Everything is computed from that mixture: quantiles and densities are
the mixture's own, never those of a normal distribution with the same moments. Regression splits the variance by the law
of total variance; classification splits the entropy into expected entropy and mutual information (Depeweg et al.,
2018).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knowable.core.prediction.map_plots import is_image
from knowable.core.prediction.mixing import Components, JoinedComponents, ShapedComponents
from knowable.core.prediction.plots import plot_classes, plot_numbers
from knowable.core.prediction.prior_plots import plot_prior_classes, plot_prior_numbers
from knowable.core.support.checks import check_count, check_generator, check_number
from knowable.core.support.tensors import to_tensor
from knowable.errors import InvalidData, Unsupported

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


_MIXED_AT_ONCE = 4_000_000  # values


def outcome_shape(here: tuple[int, ...], target: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of outcomes like ``target``, of outputs of shape ``here``: of images of another size, theirs."""
    if math.prod(here) == math.prod(target):
        return tuple(target)
    sizes = [size for size in here if size != 1]
    if len(sizes) != sum(size != 1 for size in target):
        return tuple(here)
    left = iter(sizes)
    return tuple(1 if size == 1 else next(left) for size in target)


class Prediction(ABC):
    """The predictive distribution of the outcome at each input.

    Attributes:
        samples: What each posterior draw predicts, ``(K, batch, ...)``: the expected outcome (regression) or the class
            probabilities (classification). For draws of the outcome itself see :meth:`draw`.
        log_weights: Normalised log weights of the draws, ``(K,)``.
        prior_inputs: Of a prediction from the prior the inputs it was made at, else None.
    """

    samples: Tensor
    log_weights: Tensor
    prior_inputs: Any = None

    @property
    @abstractmethod
    def total(self) -> Tensor:
        """Total uncertainty: variance (regression) or entropy in nats (classification)."""

    @property
    @abstractmethod
    def aleatoric(self) -> Tensor:
        """The part that more data would not remove: mean noise variance, or expected entropy."""

    @property
    @abstractmethod
    def epistemic(self) -> Tensor:
        """The part that more data would remove: variance of the draws' means, or mutual information."""

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """Log predictive density (or probability) of each outcome, ``(batch,)``: log-mean-exp over the draws."""

    @abstractmethod
    def draw(self, n: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw outcomes, ``(n, batch, ...)``."""

    def counted(self, y: Tensor) -> Tensor | None:
        """Which of the outcomes ``y`` count, in their shape; None where all do. Scores leave the others out."""
        return None

    @classmethod
    def joined(cls, parts: Sequence[Any], log_weights: Tensor) -> Prediction:
        """One prediction that mixes several of the same kind.

        Args:
            parts: Predictions for the same rows, of this class.
            log_weights: Normalised log weights of the parts, ``(len(parts),)``.
        """
        raise Unsupported(f"{cls.__name__} cannot be mixed with others.")

    def shaped(self, target_shape: tuple[int, ...] | None) -> Prediction:
        """The same prediction with outcomes of shape ``(batch, *target_shape)``; unchanged where they have no shape."""
        return self

    def __len__(self) -> int:
        return self.samples.shape[1]

    def _check_rows(self, y: Tensor) -> Tensor:
        y = to_tensor(y, "y").to(self.samples.device)
        if y.dim() == 0 or y.shape[0] != len(self):
            raise InvalidData(f"y must have {len(self)} rows, one for each prediction; got shape {tuple(y.shape)}.")
        return y

    def _mix(self, values: Tensor) -> Tensor:
        """Weighted mean over the draws."""
        weights = self.log_weights.exp().to(values.dtype)
        return torch.tensordot(weights, values, dims=1)

    def _log_mix(self, log_values: Tensor, of: Callable[[Tensor], Tensor] | None = None) -> Tensor:
        """Logarithm of Σ_k w_k exp(log_values_k), over the first dimension; of a function ``of`` the values, if given.

        Some rows at a time, so that it takes little memory beside the values.
        """
        weights = self.log_weights.view((-1,) + (1,) * (log_values.dim() - 1)).to(log_values.dtype)
        rows = max(1, _MIXED_AT_ONCE // max(1, log_values[:, :1].numel()))
        at_once = torch.compiler.is_exporting()  # a program for any number of rows cannot go through them in parts
        each = (log_values,) if at_once else log_values.split(rows, 1)
        return torch.cat([torch.logsumexp((part if of is None else of(part)) + weights, 0) for part in each])


class RegressionPrediction(Prediction):
    """A mixture of distributions over numbers or counts."""

    def __init__(
        self,
        components: Components,
        log_weights: Tensor,
        *,
        within: Tensor | None = None,
        samples: Tensor | None = None,
        missing: bool = False,
    ):
        """Mix ``components``.

        Args:
            components: The K distributions.
            log_weights: Normalised log weights, ``(K,)``.
            within: Epistemic variance already contained in the components' variance, ``(K, batch, ...)``; for
                predictions where the weights were integrated out in closed form.
            samples: What each posterior draw predicts, if that is not the components' mean.
            missing: Whether NaN in outcomes is a value that was not observed, which scores leave out.
        """
        self.components, self.missing = components, missing
        self.log_weights = log_weights
        self.within = within
        self.samples = components.mean if samples is None else samples

    @property
    def mean(self) -> Tensor:
        """Expected outcome."""
        return self._mix(self.components.mean)

    @property
    def variance(self) -> Tensor:
        """Variance of the mixture, the sum of its aleatoric and epistemic parts."""
        return self.aleatoric + self.epistemic

    @property
    def std(self) -> Tensor:
        """Standard deviation of the mixture."""
        return self.variance.sqrt()

    @property
    def total(self) -> Tensor:
        return self.variance

    @property
    def aleatoric(self) -> Tensor:
        """E[Var(y | θ)]: the expected noise variance."""
        noise = self.components.variance
        return self._mix(noise if self.within is None else noise - self.within)

    @property
    def epistemic(self) -> Tensor:
        """Var(E[y | θ]): how much the draws disagree about the mean."""
        between = self._mix((self.components.mean - self.mean) ** 2)
        return between if self.within is None else between + self._mix(self.within)

    def cdf(self, y: Tensor) -> Tensor:
        """Distribution function of the mixture, elementwise."""
        return self._mix(self.components.cdf(self._aligned(y)))

    def quantile(self, q: float) -> Tensor:
        """The q-quantile of the mixture, by bisection of its distribution function."""
        q = check_number("q", q, above=0.0, below=1.0)
        return _mixture_quantile(
            lambda y: self._mix(self.components.cdf(y)), self.mean, self.std, q, self.components.discrete
        )

    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """The central interval that holds the outcome with probability ``level``."""
        level = check_number("level", level, above=0.0, below=1.0)
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    def log_prob(self, y: Tensor) -> Tensor:
        y = self._aligned(y)
        if not self.missing:
            return self._log_mix(sum_over_event(self.components.log_prob(y), batch_dims=2))
        found = self.components.log_prob(y.where(~y.isnan(), self.mean)).where(~y.isnan(), 0.0)
        return self._log_mix(sum_over_event(found, batch_dims=2))

    def counted(self, y: Tensor) -> Tensor | None:
        return ~y.isnan() if self.missing else None

    def draw(self, n: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw outcomes, ``(n, batch, ...)``; all outputs of one row come from the same component."""
        check_count("n", n)
        check_generator(generator)
        mean = self.components.mean
        index = torch.multinomial(
            self.log_weights.exp(), n * mean.shape[1], replacement=True, generator=generator
        ).view(n, mean.shape[1], *(1,) * (mean.dim() - 2))
        return self.components.sample(index.expand(n, *mean.shape[1:]), generator=generator)

    @classmethod
    def joined(cls, parts: Sequence[RegressionPrediction], log_weights: Tensor) -> RegressionPrediction:
        components = JoinedComponents([part.components for part in parts])
        within = None
        if any(part.within is not None for part in parts):
            within = torch.cat(
                [torch.zeros_like(part.components.mean) if part.within is None else part.within for part in parts]
            )
        samples = torch.cat([part.samples for part in parts])
        weights, missing = joined_log_weights(parts, log_weights), parts[0].missing
        return RegressionPrediction(components, weights, within=within, samples=samples, missing=missing)

    def shaped(self, target_shape: tuple[int, ...] | None) -> RegressionPrediction:
        here = self.components.mean.shape[2:]
        target_shape = here if target_shape is None else outcome_shape(here, target_shape)
        if target_shape == here:
            return self
        rows = self.components.mean.shape[1]
        within = None if self.within is None else self.within.reshape(-1, rows, *target_shape)
        samples = self.samples.reshape(-1, rows, *target_shape)
        components = ShapedComponents(self.components, target_shape)
        return RegressionPrediction(components, self.log_weights, within=within, samples=samples, missing=self.missing)

    def plot(self, x: Any = None, y: Any = None, *, ax: Axes | None = None, level: float = 0.9) -> Figure:
        r"""Draw the prediction with its uncertainty.

        Along ``x``, where that has one number in each row: the mean, the central interval, and inside it the epistemic
        part, the mean :math:`\pm z` epistemic standard deviations with the normal quantile z of the level. Otherwise
        predicted against observed, where ``y`` is given; or the rows sorted by their means. Several outputs have a plot
        each. Of images there are maps of the first rows: means, and the square roots of the two parts of the variance.

        A prediction from the prior knows its inputs. Along one input it shows functions drawn from the prior, with the
        interval of outcomes. Of several inputs it shows how the outcomes of each draw are distributed over the rows:
        with ``y``, a prior predictive check.

        Args:
            x: Inputs that were predicted at, in any order; None, or inputs of several columns, for the other plots.
            y: What was observed there.
            ax: Axes of matplotlib to draw in; None makes a new figure.
            level: Probability that the intervals hold.

        Returns:
            The figure; ``figure.savefig("prediction.png")`` writes it.

        Raises:
            MissingExtra: If matplotlib is not installed.
        """
        if self.prior_inputs is not None and not is_image(self.mean):
            return plot_prior_numbers(self, self.prior_inputs if x is None else x, y, ax, level)
        return plot_numbers(self, x, y, ax, level)

    def _aligned(self, y: Tensor) -> Tensor:
        y = align_target(self._check_rows(y), self.components.mean.shape[2:])
        return check_finite_target(y.to(self.components.mean.dtype), missing=self.missing)

    def __repr__(self) -> str:
        return (
            f"RegressionPrediction(rows={len(self)}, outputs={tuple(self.components.mean.shape[2:])}, "
            f"draws={self.samples.shape[0]}, mean std={self.std.mean():.3g}, "
            f"epistemic share={(self.epistemic.sum() / self.variance.sum()):.0%})"
        )


class ClassPrediction(Prediction):
    """A mixture of distributions over labels. ``samples`` are the draws' probabilities.

    Attributes:
        log_mean_probs: Logarithms of the averaged probabilities, ``(batch, classes, ...)``; of yes/no outcomes, of 0
            and of 1.
        closed_form: Whether these averages were found in closed form, and not from the draws.
        log_sums: Log-sum-exp of each draw's logits, ``(K, batch, ...)``, which the probabilities do not tell. None
            where there is no logit for each class.
    """

    log_mean_probs: Tensor
    closed_form: bool
    log_sums: Tensor | None = None

    @property
    @abstractmethod
    def probs(self) -> Tensor:
        """Predictive probabilities, averaged over the draws."""

    @property
    @abstractmethod
    def labels(self) -> Tensor:
        """The most probable label."""

    @property
    @abstractmethod
    def draw_log_probs(self) -> Tensor:
        """Logarithms of the draws' probabilities, ``(K, batch, classes, ...)``; of yes/no outcomes, of 0 and of 1."""

    @abstractmethod
    def with_log_probs(self, log_probs: Tensor) -> ClassPrediction:
        """The mixture of draws that have other probabilities, given like :attr:`draw_log_probs`, up to a factor."""

    @abstractmethod
    def _entropies(self) -> tuple[Tensor, Tensor]:
        """Entropy of the averaged probabilities, and the average entropy of the draws."""

    @cached_property
    def _split(self) -> tuple[Tensor, Tensor]:
        """Aleatoric and epistemic part. The first is at most the entropy, from which rounding could part it."""
        entropy, expected = self._entropies()
        aleatoric = torch.minimum(expected, entropy)
        return aleatoric, entropy - aleatoric

    @property
    def total(self) -> Tensor:
        """Entropy of the averaged probabilities, the sum of its aleatoric and epistemic parts."""
        return self.aleatoric + self.epistemic

    @property
    def aleatoric(self) -> Tensor:
        """Expected entropy of the draws."""
        return self._split[0]

    @property
    def epistemic(self) -> Tensor:
        """Mutual information between label and weights: total entropy less expected entropy, never below zero."""
        return self._split[1]

    @property
    def confidence(self) -> Tensor:
        """Probability of the most probable label."""
        return self.log_mean_probs.amax(1).exp()

    @property
    def probs_variance(self) -> Tensor:
        r"""Variance of the class probabilities over the draws, of the shape of ``probs``.

        It is the epistemic part of the variance of "the label is c", a number that is 0 or 1:

        .. math:: \mathrm{Var}(1\{y = c\}) = E_\theta[p_c (1 - p_c)] + \mathrm{Var}_\theta(p_c)

        :attr:`probs_noise` is the aleatoric part.
        """
        probs = self.samples
        return self._mix((probs - self._mix(probs)).square())

    @property
    def probs_noise(self) -> Tensor:
        r"""Expected variance of "the label is c" given the weights, :math:`E_\theta[p_c (1 - p_c)]`."""
        probs = self.samples
        return self._mix(probs * (1 - probs))

    def plot(self, x: Any = None, y: Any = None, *, ax: Axes | None = None) -> Figure:
        """Draw the probabilities of the first rows, or a reliability diagram where the labels are known.

        Beside each row are its entropy and, in parentheses, the epistemic part of it, in nats. The reliability diagram
        has accuracy against confidence in ten bins; grey bars are where a calibrated prediction would be, by two
        standard errors. Of images whose pixels have labels there are maps of the first rows: labels, and the two parts
        of the entropy.

        A prediction from the prior has, along one input, the probabilities of functions drawn from the prior, in a plot
        for each class. Of several inputs it shows beside the probabilities how sure each drawn function is.

        Args:
            x: Inputs of a prediction from the prior, which knows them; not used otherwise.
            y: Labels that were observed.
            ax: Axes of matplotlib to draw in; None makes a new figure.

        Returns:
            The figure; ``figure.savefig("prediction.png")`` writes it.

        Raises:
            MissingExtra: If matplotlib is not installed.
        """
        if self.prior_inputs is not None and y is None and self.labels[0].numel() == 1:
            return plot_prior_classes(self, self.prior_inputs if x is None else x, ax)
        return plot_classes(self, y, ax)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(rows={len(self)}, outputs={tuple(self.probs.shape[1:])}, "
            f"draws={self.samples.shape[0]}, mean entropy={self.total.mean():.3g} nats, "
            f"epistemic share={(self.epistemic.sum() / self.total.sum().clamp_min(1e-12)):.0%})"
        )


def joined_log_weights(parts: Sequence[Prediction], log_weights: Tensor) -> Tensor:
    """Log weights of all draws of several predictions that are themselves weighed."""
    return torch.cat([part.log_weights + own for part, own in zip(parts, log_weights, strict=True)])


def log_mixed(log_values: Sequence[Tensor], log_weights: Tensor) -> Tensor:
    """Logarithm of the weighted mean of values given by their logarithms."""
    return torch.stack([value + own for value, own in zip(log_values, log_weights, strict=True)]).logsumexp(0)


def _mixture_quantile(cdf, mean: Tensor, std: Tensor, q: float, discrete: bool) -> Tensor:
    """Bisection for the smallest y with cdf(y) >= q, everywhere at once."""
    mean = torch.where(torch.isfinite(mean), mean, torch.zeros_like(mean))  # a Cauchy distribution has none
    width = torch.where(torch.isfinite(std), std, torch.ones_like(std)).clamp_min(1e-12) + 1.0 * discrete
    low, high = mean - width, mean + width
    for _ in range(200):  # widen until the quantile is inside, doubling each time
        below, above = cdf(low) >= q, cdf(high) < q
        if not (below.any() or above.any()):
            break
        width = width * 2
        low, high = torch.where(below, mean - width, low), torch.where(above, mean + width, high)
    if discrete:
        low, high = low.floor().clamp_min(-1.0), high.ceil()
    for _ in range(200):
        middle = (low + high) / 2
        if discrete:
            middle = middle.floor()
        done = (high - low <= 1) if discrete else (middle == low) | (middle == high)
        if done.all():
            break
        inside = cdf(middle) >= q
        high, low = torch.where(inside & ~done, middle, high), torch.where(~inside & ~done, middle, low)
    return high


# --- targets: cast, shaped and checked once; an error names the argument, the row and the value ----------------------


def align_target(y: Tensor, trailing: torch.Size | tuple[int, ...], *, name: str = "y") -> Tensor:
    """Give ``y`` the shape ``(rows, *trailing)``: a column vector and a plain vector are the same thing.

    This is where the classic mistake is caught: ``(B,)`` against ``(B, 1)`` would broadcast to ``(B, B)``.
    """
    if y.dim() == 0:
        raise InvalidData(f"{name} must have one row for each example, got the single number {y.item()}.")
    wanted = (y.shape[0], *trailing)
    if tuple(y.shape) == wanted:
        return y
    squeezed = tuple(size for size in trailing if size != 1)
    if tuple(size for size in y.shape[1:] if size != 1) == squeezed:
        return y.reshape(wanted)
    raise InvalidData(
        f"{name} has shape {tuple(y.shape)}, but the network's output for that many rows has shape {wanted}. "
        f"Reshape {name}, or change the network's last layer."
    )


def sum_over_event(values: Tensor, *, batch_dims: int = 1) -> Tensor:
    """Sum everything behind the batch dimensions."""
    return values.flatten(batch_dims).sum(-1) if values.dim() > batch_dims else values


def check_finite_target(y: Tensor, *, name: str = "y", missing: bool = False) -> Tensor:
    """Raise if ``y`` has missing (unless they may be ``missing``) or infinite values, saying in which rows."""
    bad = torch.isinf(y) if missing else ~torch.isfinite(y)
    if bad.any():
        rows = bad.flatten(1).any(1) if y.dim() > 1 else bad
        where = torch.nonzero(rows).flatten().tolist()
        more = f" and {len(where) - 5} more" if len(where) > 5 else ""
        raise InvalidData(
            f"{name} has missing or infinite values in row {', '.join(map(str, where[:5]))}{more} "
            f"(counting from 0). Drop or fill these rows."
        )
    return y


def as_numbers(
    y: Tensor, output: Tensor, trailing: torch.Size | tuple[int, ...], *, name: str, missing: bool = False
) -> Tensor:
    """Give ``y`` the shape ``(rows, *trailing)`` and the dtype and device of ``output``; refuse what is not finite."""
    like = {"dtype": output.dtype, "device": output.device}
    return check_finite_target(align_target(y, trailing, name=name).to(**like), name=name, missing=missing)


def refuse_where(bad: Tensor, y: Tensor, *, name: str, expected: str, advice: str) -> None:
    """Raise if any element is ``bad``, naming the first one, its row and what was ``expected``."""
    if not bad.any():
        return
    row, *inside = torch.nonzero(bad)[0].tolist()
    value = f"{y[(row, *inside)].item():.10g}"
    where = f"row {row}, position {tuple(inside)}" if inside else f"row {row}"
    raise InvalidData(f"{name} must be {expected}, got {value} in {where} (counting from 0). {advice}")
