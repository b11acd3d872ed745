"""What a regression prediction mixes: the interface of components, those of several predictions, other shapes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor


class Components(ABC):
    """The K distributions a regression prediction mixes; every tensor is ``(K, batch, ...)``."""

    discrete: bool

    @property
    @abstractmethod
    def mean(self) -> Tensor:
        """Expected outcome of each component."""

    @property
    @abstractmethod
    def variance(self) -> Tensor:
        """Variance of each component: the noise, and whatever epistemic variance was integrated in closed form."""

    @abstractmethod
    def log_prob(self, y: Tensor) -> Tensor:
        """Log density at ``y`` ``(batch, ...)`` under each component."""

    @abstractmethod
    def cdf(self, y: Tensor) -> Tensor:
        """Distribution function at ``y`` ``(batch, ...)`` under each component."""

    @abstractmethod
    def sample(self, index: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """One outcome for each entry of ``index`` ``(n, batch, ...)``, which names the component to draw from."""


class JoinedComponents(Components):
    """The components of several predictions as one set, those of the first part first."""

    def __init__(self, parts: Sequence[Components]):
        self.parts = list(parts)
        self.discrete = self.parts[0].discrete

    @property
    def mean(self) -> Tensor:
        return torch.cat([part.mean for part in self.parts])

    @property
    def variance(self) -> Tensor:
        return torch.cat([part.variance for part in self.parts])

    def log_prob(self, y: Tensor) -> Tensor:
        return torch.cat([part.log_prob(y) for part in self.parts])

    def cdf(self, y: Tensor) -> Tensor:
        return torch.cat([part.cdf(y) for part in self.parts])

    def sample(self, index: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        drawn, first = None, 0
        for part in self.parts:
            count = part.mean.shape[0]
            own = part.sample((index - first).clamp(0, count - 1), generator=generator)
            drawn = own if drawn is None else torch.where(index >= first, own, drawn)
            first += count
        assert drawn is not None
        return drawn


class ShapedComponents(Components):
    """The ``inner`` components with outcomes of another shape, such as ``()`` in place of ``(1,)``."""

    def __init__(self, inner: Components, shape: tuple[int, ...]):
        self.inner, self.discrete = inner, inner.discrete
        self._inside, self._outside = inner.mean.shape[2:], shape

    @property
    def mean(self) -> Tensor:
        return self._out(self.inner.mean)

    @property
    def variance(self) -> Tensor:
        return self._out(self.inner.variance)

    def log_prob(self, y: Tensor) -> Tensor:
        return self._out(self.inner.log_prob(y.reshape(len(y), *self._inside)))

    def cdf(self, y: Tensor) -> Tensor:
        return self._out(self.inner.cdf(y.reshape(len(y), *self._inside)))

    def sample(self, index: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return self._out(self.inner.sample(index.reshape(*index.shape[:2], *self._inside), generator=generator))

    def _out(self, values: Tensor) -> Tensor:
        return values.reshape(*values.shape[:2], *self._outside)
