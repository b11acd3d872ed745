"""Logistic regression whose mean-field bound and optimum are known: rows by quadrature, the optimum by L-BFGS."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import scipy.optimize
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import knowable as kn


@dataclass(frozen=True)
class Logistic:
    """Yes or no by a linear logit, with a standard normal prior on all weights; vectors have the bias last."""

    x: Tensor  # (n, d)
    y: Tensor  # (n, 1)

    @classmethod
    def make(cls, n: int = 60, d: int = 2, *, seed: int = 0) -> Logistic:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(n, d, generator=generator, dtype=torch.float64)
        logits = 1.5 * x.sum(1, keepdim=True) + 0.5
        return cls(x, torch.bernoulli(logits.sigmoid(), generator=generator))

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    def model(self) -> kn.Model:
        return kn.Model(nn.Linear(self.x.shape[1], 1).double(), kn.Bernoulli())

    def bound(self, loc: Tensor, std: Tensor) -> float:
        """The bound of independent normals: a row's logit is normal, and a hundred nodes integrate over it."""
        return self._bound(loc.double(), std.double().log()).item()

    def optimum(self) -> tuple[Tensor, Tensor]:
        """Means and standard deviations of the best independent normals."""

        def negative(flat: np.ndarray) -> tuple[float, np.ndarray]:
            both = torch.tensor(flat, requires_grad=True)
            value = -self._bound(*both.chunk(2))
            return value.item(), torch.autograd.grad(value, both)[0].numpy()

        found = scipy.optimize.minimize(negative, np.zeros(2 * self.x.shape[1] + 2), jac=True, method="L-BFGS-B")
        loc, log_std = torch.tensor(found.x).chunk(2)
        return loc, log_std.exp()

    def _bound(self, loc: Tensor, log_std: Tensor) -> Tensor:
        design = torch.cat([self.x, torch.ones(len(self.x), 1, dtype=torch.float64)], 1)
        nodes, weights = (torch.tensor(each) for each in np.polynomial.hermite_e.hermegauss(100))
        spread = (design.square() @ (2 * log_std).exp()).sqrt()
        logits = (design @ loc).unsqueeze(1) + spread.unsqueeze(1) * nodes  # (n, nodes)
        fit = (F.logsigmoid((2 * self.y - 1) * logits) @ (weights / weights.sum())).sum()
        return fit - (0.5 * ((2 * log_std).exp() + loc.square() - 1) - log_std).sum()
