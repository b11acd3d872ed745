"""Training-free Bayesianisation: one noise scale around weights that are trained already (Shi et al., 2024)."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from knowable.core.method import FitJob, Method
from knowable.core.model.structured_normal import KroneckerBlock
from knowable.core.network.params import Params
from knowable.core.posterior.normal import KroneckerNormal
from knowable.core.support.checks import check_count, check_number
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.errors import ConvergenceWarning
from knowable.inference.point.trained import TrainedWeights, check_start, given_point

_PRECISE = 1.05  # how near the bisection comes to the largest scale, as a ratio
_FIRST = 0.1  # where the search begins, in root mean squares of the weights
_MOST_DOUBLINGS = 20
_ROWS = 250  # that are predicted, at most
_LEAST_SHARE = 1e-3  # of the largest singular value of the other factor of an adapter


@dataclass(frozen=True, repr=False, kw_only=True)
class TrainingFreeBayes(Method):
    r"""The widest normal around trained weights with which predictions are still as good as theirs. Nothing is trained.

    .. math:: q(W) = \mathcal{N}(W \mid \hat W, \sigma^2 I), \qquad
        \sigma = \max \{ s : L(s) \le \min\nolimits_{s' \le s} L(s') + \text{tolerance} \}

    with L(s) the negative log likelihood per row of predictions at scale s, and L(0) that of the network itself. The
    rows are those of ``validation`` where it is given: then the scale is chosen by how well it predicts, and an
    overconfident network gets more noise than its training rows would allow. Otherwise they are training rows.

    Of a low-rank adapter, W is the product :math:`B A` (parameters named ``lora_A`` and ``lora_B``, as in peft). Noise
    in A alone gives it :math:`\mathcal{N}(\sigma^2)` in every direction that B can reach, whatever the scales of A and
    B: A has the covariance :math:`\sigma^2 (B^\top B)^{-1}` for each of its columns. The same holds for noise in B.
    Every other weight has the standard deviation σ.

    The search takes some eight predictions of 250 rows. The covariance knows nothing of the data but its scale:
    ``Laplace(start="network")`` costs gradients, and knows which weights the data determines.

    Args:
        tolerance: By how much the negative log likelihood of a row may rise, in nats.
        samples: Draws of the weights in each prediction of the search.
        start: The trained weights: ``"network"`` (the model's own network), a posterior (its means), a network or its
            ``state_dict()``. Parameters of the likelihood that are missing from it are set to their most probable
            values.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Linear(1, 1)  # trained, in earnest
        >>> model = kn.Model(net, kn.Gaussian(noise=0.5))
        >>> posterior = kn.TrainingFreeBayes().fit(model, (x, net(x).detach()))
        >>> posterior.diagnostics["scale"] > 0
        True
    """

    family = "variational"
    summary = "trained weights with the largest noise that does no harm: one scale, found without training"
    aliases = ("tfb",)
    references = ("shi2025",)
    supports_row_weights = True

    tolerance: float = 0.01
    samples: int = 10
    start: Any = field(default="network", repr=False)

    def __post_init__(self) -> None:
        check_number("tolerance", self.tolerance, above=0)
        check_count("samples", self.samples, at_least=2)
        check_start(self.start, none=False)

    def _fit(self, job: FitJob) -> KroneckerNormal:
        started = time.monotonic()
        point = given_point(job, self.start)
        with own_randomness(derive_seed(job.seed, "rows")):  # a loader may draw
            trained = TrainedWeights.of(job, point, most=_ROWS)
        model, mean = job.model, point.mean()
        blocks = unit_blocks(mean, model.random_names, {**model.frozen_params(), **mean})

        def at(scale: float) -> KroneckerNormal:
            scaled = [replace(each, precision=each.precision / scale**2) for each in blocks]
            loc = {name: mean[name] for name in model.random_names}
            points = {name: value for name, value in mean.items() if name not in loc}
            return KroneckerNormal(model, loc, scaled, points=points, buffers=point.buffers, seed=job.seed)

        found: dict[float, float] = {}  # losses by scale

        def loss(scale: float) -> float:
            if scale not in found:
                mine, network = trained.losses(at(scale), self.samples)
                found.update({scale: mine.mean().item(), 0.0: network.mean().item()})
            return found[scale]

        size = torch.cat([mean[name].double().flatten() for name in model.random_names]).square().mean().sqrt().item()
        first = _FIRST * (size or 1.0)
        loss(first)  # and that of the network
        scale = largest_scale(loss, found[0.0], self.tolerance, first)
        terms = {"scale": scale, "nll": found[scale], "nll_network": found[0.0], "predictions": len(found) - 1.0}
        posterior, known = at(scale), point.diagnostics
        posterior.diagnostics = replace(
            known, terms={**known.terms, **terms}, message=f"noise around the given weights, chosen on {trained.rows}",
            seconds=time.monotonic() - started,
        )  # fmt: skip
        return posterior


def largest_scale(loss: Callable[[float], float], network: float, tolerance: float, first: float) -> float:
    """The largest scale whose loss is within ``tolerance`` of the lowest that was met, to a twentieth.

    Args:
        loss: Of a scale.
        network: The loss at scale 0.
        tolerance: How far above the lowest loss it may be.
        first: A scale to begin at; it is doubled or halved until the largest lies between two scales.
    """
    lowest = network

    def good(scale: float) -> bool:
        nonlocal lowest
        value = loss(scale)  # NaN is not good
        lowest = min(lowest, value)
        return value <= lowest + tolerance

    def much_better(half: float, scale: float) -> bool:
        good(half)
        return not good(scale)

    low, high = first, 2 * first
    for _ in range(_MOST_DOUBLINGS):
        if good(low) and not much_better(low / 2, low):
            break
        low, high = low / 2, low
    else:
        return _warned(low, f"is above the network's by more than tolerance={tolerance:g} nats at any scale")
    for _ in range(_MOST_DOUBLINGS):
        if not good(high):
            break
        low, high = high, 2 * high
    else:
        return _warned(low, f"does not rise above the network's by tolerance={tolerance:g} nats at any scale")
    while high > _PRECISE * low:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if good(middle) else (low, middle)
    return low


def _warned(scale: float, what: str) -> float:
    text = f"The loss {what} that was tried. Check that the random weights are those that were trained."
    warnings.warn(f"{text} The scale is {scale:.3g}.", ConvergenceWarning, stacklevel=5)
    return scale


def unit_blocks(mean: Params, names: list[str], every: Params) -> list[KroneckerBlock]:
    """Precisions at scale 1 of the random weights ``names``; ``every`` has the frozen ones too, see the class."""
    return [_adapter_block(name, mean[name], every) or _plain_block(name, mean[name]) for name in names]


def _plain_block(name: str, value: Tensor) -> KroneckerBlock:
    matrix = value.reshape(1, -1) if value.dim() < 2 else value.flatten(1)
    return KroneckerBlock((name,), (value.shape,), torch.ones_like(matrix))


def _adapter_block(name: str, value: Tensor, every: Params) -> KroneckerBlock | None:
    """The precision BᵀB ⊗ I of A ``(rank, in)``, or I ⊗ AAᵀ of B ``(out, rank)``; None for other weights."""
    first = "lora_A" in name
    other = every.get(name.replace("lora_A", "lora_B") if first else name.replace("lora_B", "lora_A"))
    if other is None or other is value or value.dim() != 2 or other.dim() != 2:
        return None
    across = other if first else other.mT  # (..., rank)
    if across.shape[1] != value.shape[0 if first else 1] or not across.any():  # an adapter that was not trained
        return None
    variances, basis = torch.linalg.eigh(across.double().mT @ across.double())  # of BᵀB
    variances = variances.clamp_min(_LEAST_SHARE**2 * variances.max()).to(value)
    basis = basis.to(value)
    if first:
        precision = variances.unsqueeze(1).expand_as(value).contiguous()
        return KroneckerBlock((name,), (value.shape,), precision, out_basis=basis)
    precision = variances.expand_as(value).contiguous()
    return KroneckerBlock((name,), (value.shape,), precision, in_basis=basis)
