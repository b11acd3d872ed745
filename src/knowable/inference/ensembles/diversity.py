"""How far the members of an ensemble differ, and how much each of them counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from knowable.core.method import FitJob
from knowable.core.model.data import Batch, Data, as_input
from knowable.core.posterior.mixture import Mixture
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import ClassPrediction
from knowable.core.support.checks import check_count
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.errors import InvalidType

_ROWS = 256  # rows at which a fit reports how its members differ
_SAME = 1e-6  # share of the scale, below which members are one function to all intents
_NOTE = (
    "all members ended as the same function: the ensemble shows no doubt about the weights. A wider prior lets members "
    "differ; Laplace, MeanFieldVI and chains know doubt around one solution too."
)


@dataclass(frozen=True)
class Diversity:
    """What the members of an ensemble say apart from each other.

    Attributes:
        weights: The members' weights, ``(K,)``.
        pairwise: How far any two members differ, ``(K, K)``: the share of rows on whose label they disagree, or the
            root mean square distance of their expected outcomes.
        between: Uncertainty that comes from the members' disagreement, mean over the rows: the variance of their
            expected outcomes, or the mutual information of label and member in nats.
        scale: What ``between`` is measured against: the variance of expected outcomes over the rows, or 1 nat.
    """

    weights: Tensor
    pairwise: Tensor
    between: float
    scale: float = 1.0

    @property
    def same(self) -> bool:
        """Whether several members have ended as one function."""
        return len(self.weights) > 1 and self.between <= _SAME * self.scale

    @property
    def effective_members(self) -> float:
        """Effective number of members, 1 / Σ w²."""
        return 1.0 / self.weights.double().square().sum().item()

    @property
    def disagreement(self) -> float:
        """Mean of ``pairwise`` over all pairs of members; 0 for a single member."""
        count = len(self.weights)
        return self.pairwise.double().sum().item() / max(1, count * (count - 1))

    def terms(self) -> dict[str, float]:
        """The numbers for a fit's report."""
        return {
            "effective_members": self.effective_members,
            "disagreement": self.disagreement,
            "diversity": self.between,
        }


def diversity(posterior: Posterior, x: Any, *, samples: int = 64) -> Diversity:
    r"""How far the members of an ensemble differ at the inputs ``x``.

    For regression, with members' expected outcomes :math:`m_k(x)`, the pairwise figure is
    :math:`\sqrt{\mathrm{mean}_x (m_k - m_j)^2}` and the figure between members is
    :math:`\mathrm{mean}_x \mathrm{Var}_k\, m_k`. For labels the pairwise figure is the share of rows where the most
    probable labels differ (Fort et al., 2019), and the figure between members
    :math:`H(\sum_k w_k p_k) - \sum_k w_k H(p_k)`.

    Args:
        posterior: The ensemble: atoms, each of them a member, or a mixture of posteriors.
        x: Inputs, one row each.
        samples: Draws for the members of a mixture, taken together.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.DeepEnsemble(3, epochs=300).fit(model, (x, 2 * x))
        >>> kn.diversity(posterior, x).pairwise.shape
        torch.Size([3, 3])
    """
    check_count("samples", samples)
    if not isinstance(posterior, Particles | Mixture):
        raise InvalidType(
            f"posterior must be an ensemble (Particles or a Mixture), got {type(posterior).__name__}, which has no "
            f"members to compare."
        )
    return _found(posterior, [as_input(x, posterior.model)], samples)


def _found(posterior: Particles | Mixture, parts: Sequence[Tensor], samples: int) -> Diversity:
    with torch.no_grad():
        each = [_expectations(posterior, x, samples) for x in parts]
        expected, classes = torch.cat([own for own, _ in each], 1), each[0][1]
        weights = posterior.weights.to(expected.dtype)
        if classes:
            return Diversity(weights, _label_disagreement(expected), _mutual_information(expected, weights))
        spread = expected.mean(0).double().var(0, correction=0).mean().item()
        return Diversity(weights, _distances(expected), _variance(expected, weights), spread)


def first_batch(rows: Data, seed: int) -> Batch:
    """The first rows of the data."""
    with own_randomness(derive_seed(seed, "first rows")):  # a loader may shuffle
        return rows.first


def with_diversity(posterior: Particles | Mixture, job: FitJob) -> Any:
    """The same posterior, with these figures among the terms of its diagnostics, and a note if members are all one."""
    rows = job.validation or job.rows
    x = rows.source[0] if rows.in_memory else first_batch(rows, job.seed)[0]
    found, before = _found(posterior, x[:_ROWS].split(rows.most_rows), 64), posterior.diagnostics
    notes = (*before.notes, _NOTE) if found.same else before.notes
    posterior.diagnostics = replace(before, terms={**before.terms, **found.terms()}, notes=notes)
    return posterior


def _expectations(posterior: Particles | Mixture, x: Tensor, samples: int) -> tuple[Tensor, bool]:
    """What each member expects, ``(K, rows, ...)``: outcomes, or probabilities ``(K, rows, classes, ...)``."""
    if isinstance(posterior, Particles):
        prediction = posterior.predict(x, samples=len(posterior))
        expected, classes = prediction.samples, isinstance(prediction, ClassPrediction)
    else:
        share = max(1, samples // len(posterior))
        predictions = [member.predict(x, samples=share) for member in posterior.members]
        prediction, classes = predictions[0], isinstance(predictions[0], ClassPrediction)
        expected = torch.stack([each.probs if isinstance(each, ClassPrediction) else each.mean for each in predictions])  # type: ignore[attr-defined]
    if isinstance(prediction, ClassPrediction) and prediction.labels.shape == prediction.probs.shape:  # yes or no
        expected = torch.stack([1 - expected, expected], dim=2)
    return expected, classes


def _distances(expected: Tensor) -> Tensor:
    flat = expected.flatten(1)
    return torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist") / flat.shape[1] ** 0.5


def _variance(expected: Tensor, weights: Tensor) -> float:
    mean = torch.tensordot(weights, expected, dims=1)
    return torch.tensordot(weights, (expected - mean) ** 2, dims=1).mean().item()


def _label_disagreement(probs: Tensor) -> Tensor:
    labels = probs.argmax(2).flatten(1)  # (K, rows)
    return torch.stack([(labels != each).to(probs.dtype).mean(1) for each in labels])


def _mutual_information(probs: Tensor, weights: Tensor) -> float:
    whole = torch.special.entr(torch.tensordot(weights, probs, dims=1)).sum(1)  # (rows, ...)
    each = torch.special.entr(probs).sum(2)
    return (whole - torch.tensordot(weights, each, dims=1)).clamp_min(0.0).mean().item()
