"""What one pass of a distilled network means: a distribution over the teacher's draws, so that the split is kept."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from knowable.core.model.likelihood import Likelihood
from knowable.core.network.params import Params
from knowable.core.prediction.components import NormalComponents
from knowable.core.prediction.prediction import ClassPrediction, RegressionPrediction, as_numbers, sum_over_event
from knowable.core.support.checks import as_batch, check_count, check_generator, check_number
from knowable.core.support.randomness import generator_for
from knowable.errors import InvalidData, Unsupported
from knowable.likelihoods.categorical import CategoricalPrediction, check_labels, entropy

_DRAWS = 64  # of a Dirichlet distribution, where draws are asked for


@dataclass(frozen=True)
class DirichletStudent(Likelihood):
    r"""The network's outputs z are the logarithms of the concentrations of a Dirichlet over class probabilities.

    .. math:: \alpha = \exp z, \qquad E[p] = \mathrm{softmax}(z), \qquad \log \alpha_0 = \mathrm{logsumexp}(z)

    So any network with one output for each class can be a student, and its labels are those of its softmax. It is
    fitted to targets ``(batch, classes + 1, ...)``: the teacher's mean probabilities :math:`\bar p`, and the logarithm
    of the concentration at which a Dirichlet with these means has the teacher's mutual information,

    .. math:: \sum_c \bar p_c \log \mathrm{softmax}(z)_c - \frac{1}{2 s^2} (\log \alpha_0^* - \log \alpha_0)^2.

    The first term is that of Bayesian dark knowledge (Korattikara et al., 2015), the second keeps the split of the
    uncertainty (Malinin et al., 2020).

    Args:
        scale: s: an error of the log concentration of this size costs half a nat. Concentrations range over many orders
            of magnitude, and their order is what counts; a small s would have them right at the cost of the means.
    """

    scale: float = 3.0

    def __post_init__(self) -> None:
        check_number("scale", self.scale, above=0)

    def align(self, y: Tensor, output: Tensor) -> Tensor:
        return y

    def check_target(self, y: Tensor, output: Tensor, *, name: str = "y") -> Tensor:
        return as_numbers(y, output, (output.shape[1] + 1, *output.shape[2:]), name=name)

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        fit = (y[:, :-1] * output.log_softmax(1)).sum(1)
        away = (y[:, -1] - output.logsumexp(1)) / self.scale
        return sum_over_event(fit - 0.5 * away.square())

    def predict(self, outputs: Tensor, params: Params, log_weights: Tensor) -> DirichletPrediction:
        if len(outputs) != 1:
            raise Unsupported("A distilled network predicts in one pass; it has no draws to average.")
        return DirichletPrediction(outputs[0])


class DirichletPrediction(ClassPrediction):
    r"""A Dirichlet distribution over the class probabilities of each row.

    Attributes:
        log_concentration: :math:`\log \alpha`, ``(batch, classes, ...)``.
    """

    def __init__(self, log_concentration: Tensor):
        self.log_concentration, self.closed_form = log_concentration, True
        self.log_weights = torch.full((_DRAWS,), -math.log(_DRAWS), device=log_concentration.device)

    def __len__(self) -> int:
        return len(self.log_concentration)

    @property
    def concentration(self) -> Tensor:
        """The sum of all concentrations of a row: how sure it is of its probabilities, ``(batch, ...)``."""
        return self.log_concentration.logsumexp(1).exp()

    @property
    def probs(self) -> Tensor:
        """Class probabilities, ``(batch, classes, ...)``."""
        return self.log_concentration.softmax(1)

    @property
    def labels(self) -> Tensor:
        """The most probable class, ``(batch, ...)``."""
        return self.log_concentration.argmax(1)

    @property
    def log_mean_probs(self) -> Tensor:  # type: ignore[override]
        """Log probabilities of the classes, ``(batch, classes, ...)``."""
        return self.log_concentration.log_softmax(1)

    @property
    def draw_log_probs(self) -> Tensor:
        return self.samples.log()

    def with_log_probs(self, log_probs: Tensor) -> CategoricalPrediction:
        return CategoricalPrediction(log_probs.log_softmax(2), self.log_weights)

    def _entropies(self) -> tuple[Tensor, Tensor]:
        """Both in closed form; the second less the mutual information of the label and its probabilities."""
        total = entropy(self.log_mean_probs, dim=1)
        return total, total - dirichlet_information(self.log_mean_probs, self.log_concentration.logsumexp(1))

    @cached_property
    def samples(self) -> Tensor:  # type: ignore[override]
        """Draws of the class probabilities, ``(K, batch, classes, ...)``; the same each time."""
        alpha = self.log_concentration.double().exp().expand(_DRAWS, *self.log_concentration.shape)
        generator = generator_for(0, "dirichlet", device=alpha.device)
        gamma = torch._standard_gamma(alpha.contiguous(), generator)  # pyright: ignore[reportPrivateImportUsage]
        gamma = gamma.clamp_min(torch.finfo(torch.float64).tiny)
        return (gamma / gamma.sum(2, keepdim=True)).to(self.log_concentration)

    def log_prob(self, y: Tensor) -> Tensor:
        shape = self.log_concentration.shape
        y = check_labels(self._check_rows(y), shape[1], shape[2:], name="y")
        found = self.log_concentration.log_softmax(1).gather(1, y.unsqueeze(1)).squeeze(1)
        return sum_over_event(found)

    def draw(self, n: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw labels, ``(n, batch, ...)``."""
        check_count("n", n)
        check_generator(generator)
        probs = self.probs.movedim(1, -1)
        labels = torch.multinomial(
            probs.reshape(-1, probs.shape[-1]), n, replacement=True, generator=generator
        )  # (batch ..., n)
        return labels.T.reshape(n, *probs.shape[:-1])

    def _check_rows(self, y: Tensor) -> Tensor:
        y = torch.as_tensor(y, device=self.log_concentration.device)
        if y.dim() == 0 or len(y) != len(self):
            raise InvalidData(f"y must have {len(self)} rows, one for each prediction; got shape {tuple(y.shape)}.")
        return y


def dirichlet_information(log_probs: Tensor, log_concentration: Tensor) -> Tensor:
    r"""Mutual information of label and probabilities under a Dirichlet with means p and concentration s.

    .. math:: \sum_c p_c \big(\psi(s p_c + 1) - \log p_c\big) - \psi(s + 1)

    Computed in double precision, from logarithms ``(batch, classes, ...)`` and ``(batch, ...)``.
    """
    log_probs, log_s = log_probs.double(), log_concentration.double()
    kept = log_probs.exp() * (_digamma_ratio(log_s.unsqueeze(1) + log_probs) - _digamma_ratio(log_s).unsqueeze(1))
    return kept.sum(1).clamp_min(0.0).to(log_concentration.dtype)


def _digamma_ratio(log_x: Tensor) -> Tensor:
    r""":math:`\psi(x + 1) - \log x` without loss of digits where x is large, where it is about 1 / (2x)."""
    x = log_x.exp()
    series = 0.5 / x - 1 / (12 * x**2) + 1 / (120 * x**4)
    return torch.where(x > 50.0, series, torch.digamma(x + 1.0) - log_x)


@dataclass(frozen=True)
class GaussianStudent(Likelihood):
    r"""Outputs are a mean m, and the logarithms of an aleatoric variance a and of an epistemic variance e.

    .. math:: p(\mu) = \mathcal{N}(\mu \mid m, e), \qquad p(t \mid \mu) = \mathcal{N}(t \mid \mu, a)

    The last dimension of the network's output is 3d. It is fitted to the teacher's means, aleatoric and epistemic
    variances, side by side in the same way: the expected log density of the draws' means μ and of outcomes t around
    them, :math:`E_q E_{p(t \mid x, w)}` of :math:`\log p(\mu_w) + \log p(t \mid \mu_w)`.
    """

    def align(self, y: Tensor, output: Tensor) -> Tensor:
        return y

    def check_target(self, y: Tensor, output: Tensor, *, name: str = "y") -> Tensor:
        if output.dim() < 2 or output.shape[-1] % 3:
            raise InvalidData(
                f"The student must have three outputs for each target (mean, log aleatoric and log epistemic "
                f"variance), but its output has shape {as_batch(output.shape)}."
            )
        return as_numbers(y, output, tuple(output.shape[1:]), name=name)

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        (mean, log_a, log_e), (mu, a, e) = output.chunk(3, -1), y.chunk(3, -1)
        means = -0.5 * (log_e + ((mu - mean).square() + e) * torch.exp(-log_e))
        return sum_over_event(means - 0.5 * (log_a + a * torch.exp(-log_a)))

    def predict(self, outputs: Tensor, params: Params, log_weights: Tensor) -> RegressionPrediction:
        mean, log_a, log_e = outputs.chunk(3, -1)
        a, e = log_a.exp(), log_e.exp()
        return RegressionPrediction(NormalComponents(mean, (a + e).sqrt()), log_weights, within=e)
