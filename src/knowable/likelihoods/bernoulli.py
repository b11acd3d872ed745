"""The Bernoulli likelihood: yes or no, one or many at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from knowable.core.model.likelihood import DiagonalInformation, Likelihood
from knowable.core.network.params import Params
from knowable.core.prediction.components import NormalOutputs
from knowable.core.prediction.prediction import (
    ClassPrediction,
    as_numbers,
    joined_log_weights,
    log_mixed,
    outcome_shape,
    refuse_where,
    sum_over_event,
)
from knowable.core.support.checks import check_count, check_generator


@dataclass(frozen=True)
class Bernoulli(Likelihood):
    r"""Independent yes/no targets: each element of the network's output is the logit of a 1.

    .. math:: p(y = 1 \mid f) = \frac{1}{1 + e^{-f}}
    """

    labels = True
    copies = 1

    def check_target(self, y: Tensor, output: Tensor, *, name: str = "y") -> Tensor:
        return check_binary(y, output, output.shape[1:], name=name)

    def doubts(self, y: Tensor, output: Tensor, last_operation: str) -> list[str]:
        if last_operation not in ("Softmax", "Sigmoid"):
            return []
        return [
            f"The network ends in a {last_operation.lower()}, but Bernoulli() takes logits and applies a sigmoid "
            f"itself: probabilities would lie between 0.5 and 0.73. Remove the last {last_operation.lower()}."
        ]

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        return sum_over_event(bernoulli_log_prob(y, output))

    def predict(self, outputs: Tensor, params: Params, log_weights: Tensor) -> BernoulliPrediction:
        return BernoulliPrediction(outputs, log_weights)

    def identified(self, outputs: Tensor) -> Tensor:
        return outputs.sigmoid()

    def predict_normal(self, outputs: NormalOutputs, params: Params) -> BernoulliPrediction:
        """The probit approximation of the averaged probabilities."""
        return BernoulliPrediction(outputs.draws, outputs.log_weights, moderated(outputs.mean, outputs.variance))

    def information(self, output: Tensor, params: Params) -> DiagonalInformation:
        return DiagonalInformation(output.sigmoid() * (-output).sigmoid())


class BernoulliPrediction(ClassPrediction):
    """A mixture of Bernoulli distributions; every tensor has the shape of the network's output.

    Attributes:
        logits: The draws' logits, ``(K, batch, ...)``.
        log_weights: Normalised log weights of the draws, ``(K,)``.
        mean_logits: Logits of the averaged probabilities, ``(batch, ...)``, where they are known in closed form. The
            outcomes of a row are then taken to be independent, and the draws only split the uncertainty.
    """

    def __init__(self, logits: Tensor, log_weights: Tensor, mean_logits: Tensor | None = None):
        self.logits, self.log_weights, self.mean_logits = logits, log_weights, mean_logits
        self.closed_form = mean_logits is not None
        if mean_logits is None:
            self._log_mean_one, self._log_mean_zero = (
                self._log_mix(logits, lambda some, sign=sign: F.logsigmoid(sign * some)) for sign in (1.0, -1.0)
            )
        else:
            self._log_mean_one, self._log_mean_zero = F.logsigmoid(mean_logits), F.logsigmoid(-mean_logits)

    @property
    def samples(self) -> Tensor:  # type: ignore[override]
        """The draws' probabilities of a 1, ``(K, batch, ...)``; recomputed at each access, to save memory."""
        return self.logits.sigmoid()

    def __len__(self) -> int:
        return self.logits.shape[1]

    @property
    def probs(self) -> Tensor:
        """Probability of a 1, ``(batch, ...)``."""
        return self._log_mean_one.exp()

    @property
    def labels(self) -> Tensor:
        """The more probable of 0 and 1, ``(batch, ...)``."""
        return (self._log_mean_one > self._log_mean_zero).long()

    @property
    def log_mean_probs(self) -> Tensor:  # type: ignore[override]
        """Log probabilities of 0 and of 1, ``(batch, 2, ...)``."""
        return torch.stack([self._log_mean_zero, self._log_mean_one], 1)

    @property
    def draw_log_probs(self) -> Tensor:
        return torch.stack([F.logsigmoid(-self.logits), F.logsigmoid(self.logits)], 2)

    def with_log_probs(self, log_probs: Tensor) -> BernoulliPrediction:
        return BernoulliPrediction(log_probs[:, :, 1] - log_probs[:, :, 0], self.log_weights)

    def _entropies(self) -> tuple[Tensor, Tensor]:
        each = binary_entropy(F.logsigmoid(self.logits), F.logsigmoid(-self.logits))
        return binary_entropy(self._log_mean_one, self._log_mean_zero), self._mix(each)

    def log_prob(self, y: Tensor) -> Tensor:
        y = check_binary(self._check_rows(y), self.logits, self.logits.shape[2:], name="y")
        if self.mean_logits is not None:
            return sum_over_event(bernoulli_log_prob(y, self.mean_logits))
        return self._log_mix(sum_over_event(bernoulli_log_prob(y, self.logits), batch_dims=2))

    def shaped(self, target_shape: tuple[int, ...] | None) -> BernoulliPrediction:
        here = self.logits.shape[2:]
        target_shape = here if target_shape is None else outcome_shape(here, target_shape)
        if target_shape == here:
            return self
        mean = None if self.mean_logits is None else self.mean_logits.reshape(len(self), *target_shape)
        return BernoulliPrediction(self.logits.reshape(-1, len(self), *target_shape), self.log_weights, mean)

    @classmethod
    def joined(cls, parts: Sequence[BernoulliPrediction], log_weights: Tensor) -> BernoulliPrediction:
        mean_logits = None
        if all(part.mean_logits is not None for part in parts):
            ones, zeros = ([part._log_mean_one for part in parts], [part._log_mean_zero for part in parts])
            mean_logits = log_mixed(ones, log_weights) - log_mixed(zeros, log_weights)
        return cls(torch.cat([part.logits for part in parts]), joined_log_weights(parts, log_weights), mean_logits)

    def draw(self, n: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw outcomes 0 or 1, ``(n, batch, ...)``; all outcomes of one row come from the same posterior draw."""
        check_count("n", n)
        check_generator(generator)
        rows = len(self)
        index = torch.multinomial(self.log_weights.exp(), n * rows, replacement=True, generator=generator)
        probs = self.logits[index, torch.arange(rows, device=index.device).repeat(n)].sigmoid()  # (n rows, ...)
        return torch.bernoulli(probs, generator=generator).long().view(n, rows, *probs.shape[1:])


def bernoulli_log_prob(y: Tensor, logits: Tensor) -> Tensor:
    """Log probability of zeros and ones, elementwise; it keeps its digits when the logit is large."""
    return F.logsigmoid((2.0 * y - 1.0) * logits)


def binary_entropy(log_one: Tensor, log_zero: Tensor) -> Tensor:
    """Entropy in nats from the log probabilities of 1 and 0; exactly 0 where one of them has probability 0."""
    return _entropy_term(log_one) + _entropy_term(log_zero)


def _entropy_term(log_prob: Tensor) -> Tensor:
    prob = log_prob.exp()
    return -prob * log_prob.masked_fill(prob == 0, 0.0)


def check_binary(y: Tensor, output: Tensor, trailing: torch.Size | tuple[int, ...], *, name: str) -> Tensor:
    """Return ``y`` as zeros and ones ``(rows, *trailing)`` of the output's dtype, or raise saying which is neither."""
    y = as_numbers(y, output, trailing, name=name)
    advice = "For labels of more classes use Categorical(), for counts Poisson()."
    if (y == 255).any():
        advice = f"For a mask of 0 and 255 pass {name} > 0."
    refuse_where((y != 0) & (y != 1), y, name=name, expected="0 or 1", advice=advice)
    return y


# --- Probabilities averaged over normal logits, nearly in closed form ------------------------------------------------
#
# The logistic function is close to a normal distribution function of scale :math:`\sqrt{8 / \pi}`, of which the average
# over a normal is known (Spiegelhalter and Lauritzen, 1990; MacKay, 1992):
#
# .. math:: E[\sigma(f)] \approx \sigma\Big(\frac{m}{\sqrt{1 + \pi s^2 / 8}}\Big), \qquad f \sim \mathcal{N}(m, s^2)


def moderated(mean: Tensor, variance: Tensor) -> Tensor:
    """Logits that are less sure where their variance is large."""
    return mean / (1.0 + (math.pi / 8.0) * variance).sqrt()
