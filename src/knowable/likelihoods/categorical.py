"""The categorical likelihood: one label out of several, also for every pixel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from knowable.core.model.likelihood import Likelihood, SoftmaxInformation
from knowable.core.network.params import Params
from knowable.core.prediction.components import NormalOutputs, root_of
from knowable.core.prediction.prediction import (
    ClassPrediction,
    Prediction,
    align_target,
    check_finite_target,
    joined_log_weights,
    log_mixed,
    refuse_where,
    sum_over_event,
)
from knowable.core.support.checks import as_batch, check_count, check_generator
from knowable.errors import InvalidData


@dataclass(frozen=True)
class Categorical(Likelihood):
    r"""Classification: the network's output holds one logit for each class, in dimension 1.

    .. math:: p(y = c \mid f) = \frac{\exp f_c}{\sum_{c'} \exp f_{c'}}

    Outputs are ``(batch, classes)`` with labels ``(batch,)``, or ``(batch, classes, height, width)`` (any number of
    extra dimensions) with labels ``(batch, height, width)``. Labels count from 0.

    Args:
        ignore_index: A label that says that there is none, as -100 for the padding of sequences: what has it adds
            nothing to the log likelihood, and scores leave it out. None: every label counts. N counts rows (sequences),
            ignored labels or not.
    """

    labels = True
    copies = 2  # outputs and log probabilities

    ignore_index: int | None = None

    def __post_init__(self) -> None:
        if self.ignore_index is not None:
            object.__setattr__(self, "ignore_index", check_count("ignore_index", self.ignore_index, at_least=-(2**62)))

    def __repr__(self) -> str:
        return "Categorical()" if self.ignore_index is None else f"Categorical(ignore_index={self.ignore_index})"

    def counted(self, y: Tensor) -> Tensor | None:
        return None if self.ignore_index is None else y != self.ignore_index

    def align(self, y: Tensor, output: Tensor) -> Tensor:
        return align_target(y.long(), output.shape[2:])

    def check_target(self, y: Tensor, output: Tensor, *, name: str = "y") -> Tensor:
        if output.dim() < 2 or output.shape[1] < 2:
            raise InvalidData(
                f"Categorical needs a network with one output for each of two or more classes in dimension 1, but its "
                f"output has shape {as_batch(output.shape)}. For yes/no targets with one output use Bernoulli()."
            )
        known = check_labels(y, output.shape[1], output.shape[2:], name=name, ignore_index=self.ignore_index)
        return known.to(output.device)

    def doubts(self, y: Tensor, output: Tensor, last_operation: str) -> list[str]:
        said, classes = [], output.shape[1]
        if last_operation in ("Softmax", "Sigmoid"):
            said.append(
                f"The network ends in a {last_operation.lower()}, but Categorical() takes logits and applies a softmax "
                f"itself: probabilities could not get near 0 or 1. Remove the last {last_operation.lower()}."
            )
        counted = self.counted(y)
        y = y if counted is None else y[counted]
        missing = (torch.bincount(y.flatten(), minlength=classes) == 0).nonzero().flatten().tolist()
        if missing == [0] and classes > 2:
            said.append(
                f"y has the labels 1 to {classes - 1} and never 0, while the network has {classes} outputs. Labels "
                f"count from 0: pass y - 1, and give the network's last layer {classes - 1} outputs."
            )
        elif missing:
            which = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
            said.append(
                f"y has no row of class {which} of the network's {classes}: what is predicted about "
                f"{'it' if len(missing) == 1 else 'them'} comes from the prior alone."
            )
        return said

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        ignored = -100 if self.ignore_index is None else self.ignore_index  # where all count, no label is -100
        return sum_over_event(-F.cross_entropy(output, y, reduction="none", ignore_index=ignored))

    def predict(self, outputs: Tensor, params: Params, log_weights: Tensor) -> CategoricalPrediction:
        log_probs = outputs.log_softmax(2)
        sums = outputs.amax(2) - log_probs.amax(2)  # log-sum-exp, without a copy of the outputs
        return CategoricalPrediction(log_probs, log_weights, ignore_index=self.ignore_index, log_sums=sums)

    def identified(self, outputs: Tensor) -> Tensor:
        return outputs.softmax(2)

    def predict_normal(self, outputs: NormalOutputs, params: Params) -> Prediction:
        """Probabilities averaged over normal logits, see :func:`average_log_softmax`."""
        covariance = outputs.covariance if outputs.at_places is None else outputs.at_places
        if covariance is None:
            return super().predict_normal(outputs, params)
        log_mean_probs = average_log_softmax(outputs.mean, covariance)
        log_probs = outputs.draws.log_softmax(2)
        sums = outputs.draws.amax(2) - log_probs.amax(2)
        return CategoricalPrediction(
            log_probs, outputs.log_weights, log_mean_probs, ignore_index=self.ignore_index, log_sums=sums
        )

    def information(self, output: Tensor, params: Params) -> SoftmaxInformation:
        return SoftmaxInformation(output.softmax(1))


class CategoricalPrediction(ClassPrediction):
    """A mixture of categorical distributions.

    Attributes:
        log_probs: The draws' log probabilities, ``(K, batch, classes, ...)``.
        log_weights: Normalised log weights of the draws, ``(K,)``.
        log_mean_probs: Logarithms of the averaged probabilities, ``(batch, classes, ...)``. Where they are given, in
            closed form, the labels of a row are taken to be independent, and the draws only split the uncertainty.
        ignore_index: The label that scores leave out, or None.
        log_sums: Log-sum-exp of each draw's logits, ``(K, batch, ...)``, which probabilities do not tell; or None.
    """

    def __init__(
        self, log_probs: Tensor, log_weights: Tensor, log_mean_probs: Tensor | None = None, *,
        ignore_index: int | None = None, log_sums: Tensor | None = None,
    ):  # fmt: skip
        self.log_probs, self.log_weights, self.ignore_index = log_probs, log_weights, ignore_index
        self.log_sums, self.closed_form = log_sums, log_mean_probs is not None
        self._given = log_mean_probs

    @cached_property
    def log_mean_probs(self) -> Tensor:  # type: ignore[override]
        """Logarithms of the averaged probabilities, ``(batch, classes, ...)``."""
        return self._log_mix(self.log_probs) if self._given is None else self._given

    @property
    def samples(self) -> Tensor:  # type: ignore[override]
        """The draws' probabilities, ``(K, batch, classes, ...)``; recomputed at each access, to save memory."""
        return self.log_probs.exp()

    def __len__(self) -> int:
        return self.log_probs.shape[1]

    @property
    def probs(self) -> Tensor:
        """Class probabilities, ``(batch, classes, ...)``."""
        return self.log_mean_probs.exp()

    @property
    def labels(self) -> Tensor:
        """The most probable class, ``(batch, ...)``."""
        return self.log_mean_probs.argmax(1)

    @property
    def draw_log_probs(self) -> Tensor:
        return self.log_probs

    def with_log_probs(self, log_probs: Tensor) -> CategoricalPrediction:
        return CategoricalPrediction(log_probs.log_softmax(2), self.log_weights, ignore_index=self.ignore_index)

    def _entropies(self) -> tuple[Tensor, Tensor]:
        return entropy(self.log_mean_probs, dim=1), self._mix(entropy(self.log_probs, dim=2))

    def log_prob(self, y: Tensor) -> Tensor:
        shape, ignored = self.log_probs.shape, self.ignore_index
        y = check_labels(self._check_rows(y), shape[2], shape[3:], name="y", ignore_index=ignored)
        counted = self.counted(y)
        y = y if counted is None else y.where(counted, 0)
        if self.closed_form:
            found = self.log_mean_probs.gather(1, y.unsqueeze(1)).squeeze(1)
            return sum_over_event(found if counted is None else found.where(counted, 0.0))
        index = y.unsqueeze(1).expand(shape[0], -1, 1, *y.shape[1:])  # (K, batch, 1, ...)
        found = self.log_probs.gather(2, index).squeeze(2)
        return self._log_mix(sum_over_event(found if counted is None else found.where(counted, 0.0), batch_dims=2))

    def counted(self, y: Tensor) -> Tensor | None:
        return None if self.ignore_index is None else y != self.ignore_index

    @classmethod
    def joined(cls, parts: Sequence[CategoricalPrediction], log_weights: Tensor) -> CategoricalPrediction:
        closed_form = all(part.closed_form for part in parts)
        means = log_mixed([part.log_mean_probs for part in parts], log_weights) if closed_form else None
        log_probs, ignored = torch.cat([part.log_probs for part in parts]), parts[0].ignore_index
        sums = [part.log_sums for part in parts if part.log_sums is not None]
        return cls(
            log_probs, joined_log_weights(parts, log_weights), means, ignore_index=ignored,
            log_sums=torch.cat(sums) if len(sums) == len(parts) else None,
        )  # fmt: skip

    def draw(self, n: int = 1, *, generator: torch.Generator | None = None) -> Tensor:
        """Draw labels, ``(n, batch, ...)``; all labels of one row come from the same posterior draw."""
        check_count("n", n)
        check_generator(generator)
        rows = len(self)
        index = torch.multinomial(self.log_weights.exp(), n * rows, replacement=True, generator=generator)
        row = torch.arange(rows, device=index.device).repeat(n)
        probs = self.log_probs[index, row].exp().movedim(1, -1)  # (n rows, ..., classes)
        labels = torch.multinomial(probs.reshape(-1, probs.shape[-1]), 1, generator=generator)
        return labels.view(n, rows, *probs.shape[1:-1])


def entropy(log_probs: Tensor, *, dim: int) -> Tensor:
    """Entropy in nats from log probabilities; a class of probability 0 adds exactly 0."""
    probs = log_probs.exp()
    return -(probs * log_probs.masked_fill(probs == 0, 0.0)).sum(dim)


def check_labels(
    y: Tensor, classes: int, trailing: torch.Size | tuple[int, ...], *, name: str, ignore_index: int | None = None
) -> Tensor:
    """Return ``y`` as integer labels ``(rows, *trailing)`` from 0 to ``classes - 1``, or raise saying which is not.

    ``ignore_index`` is allowed too.
    """
    try:
        y = align_target(y, trailing, name=name)
    except InvalidData as error:
        if y.dim() == 0:
            raise
        raise InvalidData(
            f"{name} has shape {tuple(y.shape)}, but one label for each place where the network gives {classes} logits "
            f"has shape {(y.shape[0], *trailing)}. If {name} is one-hot, pass {name}.argmax(1)."
        ) from error
    y = check_finite_target(y, name=name)
    expected = f"a whole number from 0 to {classes - 1} (the network has {classes} classes)"
    if y.is_floating_point():
        refuse_where(y != y.round(), y, name=name, expected=expected, advice="For numbers as targets use Gaussian().")
    advice = "Number the classes from 0, or give the network's last layer more outputs."
    bad = (y < 0) | (y >= classes)
    if ignore_index is not None:
        bad, expected = bad & (y != ignore_index), f"{expected} or {ignore_index}, which is ignored"
    elif no_labels := [value for value in (-100, 255) if (bad & (y == value)).any()]:
        advice = f"If {no_labels[0]} is no label, say so: Categorical(ignore_index={no_labels[0]})."
    refuse_where(bad, y, name=name, expected=expected, advice=advice)
    return y.long()


# --- Probabilities averaged over normal logits -----------------------------------------------------------------------

_POINTS = 256  # of the Sobol sequence
_VALUES_AT_ONCE = 500_000  # that fit into a processor's cache


def average_log_softmax(mean: Tensor, covariance: Tensor) -> Tensor:
    r"""The logarithm of :math:`E[\mathrm{softmax}(f)]` over normal logits f.

    The softmax depends on differences of logits only, and so does this: the differences from the last class are drawn,
    by a scrambled Sobol sequence that is the same for every row. A common shift of the logits, which is most of their
    variance in many networks, has no influence. (The probit formula for each logit counts it in full. The Laplace
    bridge does not approach the network's probabilities as the covariance goes to 0.)

    Args:
        mean: Means, ``(batch, classes, ...)``.
        covariance: Covariances of each row's flattened logits, ``(batch, outputs, outputs)``, or of the logits at each
            position, ``(batch, positions, classes, classes)``.
    """
    classes = mean.shape[1]
    if covariance.dim() == 3:
        covariance = covariance.view(len(mean), classes, -1, classes, covariance.shape[-1] // classes)
        covariance = covariance.diagonal(dim1=2, dim2=4).movedim(3, 1)
    blocks = covariance.flatten(0, 1)  # (batch positions, classes, classes)
    differences = torch.eye(classes, dtype=mean.dtype, device=mean.device)[:-1]
    differences[:, -1] = -1.0
    root = root_of(differences @ blocks.to(mean.dtype) @ differences.T)
    logits = mean.flatten(2).mT.flatten(0, -2) if mean.dim() > 2 else mean  # (batch positions, classes)
    noise = _normal_points(classes - 1).to(mean)
    rows = max(1, _VALUES_AT_ONCE // (_POINTS * classes))
    found = [_averaged(each, noise, own) for each, own in zip(logits.split(rows), root.split(rows), strict=True)]
    return torch.cat(found).view(len(mean), -1, classes).mT.reshape(mean.shape)


@lru_cache(maxsize=4)
def _normal_points(dimensions: int) -> Tensor:
    """Standard normal numbers from a Sobol sequence, ``(points, dimensions)``."""
    sobol = torch.quasirandom.SobolEngine(dimensions, scramble=True, seed=0).draw(_POINTS, dtype=torch.float64)
    return torch.special.ndtri(sobol.clamp(1e-9, 1 - 1e-9))


def _averaged(mean: Tensor, noise: Tensor, root: Tensor) -> Tensor:
    moves = F.pad((root @ noise.T).movedim(1, 0), (0, 0, 0, 0, 0, 1))  # (classes, rows, points); the last class stays
    log_probs = (mean.T.unsqueeze(2) + moves).log_softmax(0)
    return (log_probs.logsumexp(2) - math.log(len(noise))).T
