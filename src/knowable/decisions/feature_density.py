r"""Density of a network's features: how far an input is from the training rows, seen from inside the network.

With features :math:`z = h(x)` of a layer, class means :math:`\mu_c` and one covariance :math:`\Sigma` of all classes:

.. math:: \text{mahalanobis: } \min_c\, (z - \mu_c)^\top \Sigma^{-1} (z - \mu_c)

(Lee et al., 2018); ``relative_mahalanobis`` takes away the same distance from the mean of all rows, with their own
covariance (Ren et al., 2021); ``knn`` is the distance to the k-th nearest training row, of features of length 1 (Sun et
al., 2022).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model.checking import checked_pair
from knowable.core.model.data import as_input
from knowable.core.network.params import Buffers, Params, index_params
from knowable.core.posterior.mixture import Mixture
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_choice, check_count, check_type
from knowable.errors import InvalidArgument, InvalidData, InvalidType

KINDS = ("mahalanobis", "relative_mahalanobis", "knn")
_ROWS = 1024  # at a time


class FeatureDensity:
    """A score of inputs, high where their features are unlike those of the training rows.

    It goes wherever a score does: ``kn.detect(x_in, x_out, score=density)``, or as the detector of an attack.

    Args:
        posterior: Whose network gives the features.
        x: Training rows.
        y: Their labels, for a mean of each class; None: one mean for all.
        kind: ``"mahalanobis"``, ``"relative_mahalanobis"`` or ``"knn"``, see :mod:`knowable.decisions.feature_density`.
        layer: Name of the module whose output the features are, as in ``net.named_modules()``. None: what goes into the
            last linear layer. Positions (pixels, words) are averaged: features are dimension 1.
        samples: None: features at the posterior mean, or at each atom or member of an ensemble. A number: at so many
            draws. Scores are averaged over networks, each with a density of its own.
        neighbours: k of ``"knn"``.

    Attributes:
        layer: Name of the layer.

    Example:
        >>> density = kn.FeatureDensity(posterior, x, y, kind="knn")  # doctest: +SKIP
        >>> kn.detect(x_inside, x_outside, score=density).auroc  # doctest: +SKIP
    """

    def __init__(
        self,
        posterior: Posterior,
        x: Any,
        y: Any = None,
        *,
        kind: str = "mahalanobis",
        layer: str | None = None,
        samples: int | None = None,
        neighbours: int = 10,
    ):
        check_type("posterior", posterior, Posterior, "a Posterior")
        self.posterior, self.kind = posterior, check_choice("kind", kind, KINDS)
        self.neighbours = check_count("neighbours", neighbours)
        if y is None or kind == "knn":
            x, labels = as_input(x, posterior.model), None
        else:
            x, labels = checked_pair(x, y, posterior.model)
            _check_labels(labels)
        if kind == "knn" and len(x) < neighbours:
            raise InvalidArgument(f"neighbours must be at most the {len(x)} training rows, got {neighbours}.")
        self._tap = _Tap(posterior, layer, x)
        self.layer = self._tap.name
        self._draws = _networks(posterior, samples)
        with torch.no_grad():
            self._densities = [_density(kind, self._features(draw, x), labels, neighbours) for draw in self._draws]

    def __call__(self, x: Any) -> Tensor:
        """The score of each row, ``(rows,)``, in double precision; it follows gradients if ``x`` asks for them."""
        follow = isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()
        x = x if follow else as_input(x, self.posterior.model)
        with torch.set_grad_enabled(follow):
            pairs = list(zip(self._draws, self._densities, strict=True))
            parts = [
                torch.stack([of(self._features(draw, rows)) for draw, of in pairs]).mean(0) for rows in x.split(_ROWS)
            ]
            return torch.cat(parts)

    def _features(self, draw: tuple[Params, Buffers], x: Tensor) -> Tensor:
        parts = [self._tap.features(*draw, rows) for rows in x.split(_ROWS)]
        return torch.cat(parts).double()

    def __repr__(self) -> str:
        return f"FeatureDensity({self.kind}, layer={self.layer!r}, networks={len(self._draws)})"


def _check_labels(y: Tensor) -> None:
    if y.is_floating_point() or y.dim() != 1:
        raise InvalidData(
            f"y must hold one class label for each row, got {y.dtype} of shape {tuple(y.shape)}. Leave y out for a "
            f"single mean of all rows."
        )


def _networks(posterior: Posterior, samples: int | None) -> list[tuple[Params, Buffers]]:
    """Parameters and buffers of the networks whose features are taken."""
    if samples is None and isinstance(posterior, Mixture):
        return [pair for member in posterior.members for pair in _networks(member, None)]
    if samples is None and not isinstance(posterior, Particles):
        return [(posterior.model.network_params(posterior.mean()), posterior.buffers)]
    count = len(posterior) if isinstance(posterior, Particles) and samples is None else check_count("samples", samples)
    count, _ = posterior.draws_for_prediction(count, posterior.seed)
    stack = posterior.model.network_params(posterior.draw_block(0, count, count, posterior.seed))
    buffers = posterior.buffer_block(0, count, count, posterior.seed)
    return [(index_params(stack, k), {**posterior.buffers, **index_params(buffers, k)}) for k in range(count)]


class _Tap:
    """Runs a network and keeps what comes out of one layer, or goes into the last linear one."""

    def __init__(self, posterior: Posterior, layer: str | None, x: Tensor):
        self.network = posterior.model.network.copy()
        modules = self.network.modules(training=False)
        self.found: Any = None
        if layer is None:
            linear = [name for name, module in modules.items() if isinstance(module, nn.Linear)]
            if not linear:
                raise InvalidArgument("The network has no linear layer: name the layer whose output to take, layer=...")
            self.name = f"input of {linear[-1]}" if linear[-1] else "input"
            modules[linear[-1]].register_forward_pre_hook(lambda _, args: self._keep(args[0]))
        else:
            self.name = check_choice("layer", layer, [name for name in modules if name])
            modules[layer].register_forward_hook(lambda *call: self._keep(call[2]))
        params = posterior.model.network_params(posterior.mean())
        with torch.no_grad():
            tried = self.features(params, posterior.buffers, x[:2])
        if len(tried) != min(2, len(x)):
            raise InvalidArgument(f"layer {layer!r} gives {len(tried)} rows for 2: it must keep rows apart.")

    def _keep(self, value: Any) -> None:
        self.found = value

    def features(self, params: Params, buffers: Buffers, x: Tensor) -> Tensor:
        """Features ``(rows, features)``."""
        self.found = None
        self.network(params, x, buffers=buffers)
        found, self.found = self.found, None
        if not isinstance(found, Tensor):
            raise InvalidType(f"layer {self.name!r} must give one tensor, got {type(found).__name__}.")
        return found.flatten(2).mean(2) if found.dim() > 2 else found.view(len(found), -1)


# --- densities --------------------------------------------------------------------------------------------------------

Density = Callable[[Tensor], Tensor]
"""The score of features ``(rows, d)``, ``(rows,)``."""


def _density(kind: str, features: Tensor, labels: Tensor | None, neighbours: int) -> Density:
    if kind == "knn":
        return _nearest(features, neighbours)
    single = torch.zeros(len(features), dtype=torch.long, device=features.device)
    own = _mahalanobis(features, single if labels is None else labels)
    if kind == "mahalanobis":
        return own
    background = _mahalanobis(features, single)
    return lambda z: own(z) - background(z)


def _mahalanobis(features: Tensor, labels: Tensor) -> Density:
    """Squared distance from the nearest class mean, by the shared covariance."""
    classes, index = labels.unique(return_inverse=True)
    means = features.new_zeros((len(classes), features.shape[1])).index_add_(0, index, features)
    means = means / index.bincount().unsqueeze(1)
    factor = torch.linalg.cholesky(shrunk_covariance(features - means[index]))
    white = _whitened(means, factor)

    def score(z: Tensor) -> Tensor:
        difference = _whitened(z, factor).unsqueeze(1) - white  # (rows, classes, d)
        return difference.square().sum(2).amin(1)

    return score


def _whitened(values: Tensor, factor: Tensor) -> Tensor:
    return torch.linalg.solve_triangular(factor, values.T, upper=False).T


def shrunk_covariance(centred: Tensor) -> Tensor:
    """Covariance of centred rows, shrunk towards a multiple of the identity (OAS; Chen et al., 2010).

    Features that never vary get a spread as well, of what is shrunk towards and at least 1e-9.
    """
    count, size = centred.shape
    sample = centred.T @ centred / count
    scale, square = sample.trace() / size, sample.square().mean()
    bottom = (count + 1.0) * (square - scale.square() / size)
    share = 1.0 if bottom <= 0 else min(1.0, ((square + scale.square()) / bottom).item())
    identity = torch.eye(size, dtype=sample.dtype, device=sample.device)
    return (1.0 - share) * sample + (share * scale + 1e-9 * scale.clamp_min(1e-9)) * identity


def _nearest(features: Tensor, neighbours: int) -> Density:
    known = nn.functional.normalize(features)

    def score(z: Tensor) -> Tensor:
        parts = [
            torch.cdist(rows, known).topk(neighbours, largest=False).values[:, -1]
            for rows in nn.functional.normalize(z).split(_ROWS)
        ]
        return torch.cat(parts)

    return score
