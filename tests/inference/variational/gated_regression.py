"""A regression with gates on fixed weights, all of whose answers can be counted out."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

import knowable as kn
from knowable.inference.variational.discrete import all_settings


@dataclass(frozen=True)
class GatedRegression:
    r"""y = Σ_j z_j w_j x_j + noise with known weights w and unknown gates z, each open with probability p.

    Attributes:
        x: Inputs, ``(n, 4)``.
        y: Targets, ``(n, 1)``.
        weights: The known weights.
        noise: Standard deviation of the noise.
        probability: Of an open gate, before the data.
    """

    x: Tensor
    y: Tensor
    weights: Tensor
    noise: float = 1.0
    probability: float = 0.4

    @classmethod
    def make(cls, *, n: int = 16, correlation: float = 0.6, seed: int = 0) -> GatedRegression:
        """Four inputs, orthogonal or mixed; noise so large that the data leave some gates in doubt."""
        generator = torch.Generator().manual_seed(seed)
        basis, _ = torch.linalg.qr(torch.randn(n, 4, generator=generator, dtype=torch.float64))
        mixing = math.sqrt(n) * ((1 - correlation) * torch.eye(4) + correlation * torch.ones(4, 4) / 2).double()
        x = basis @ mixing
        weights = torch.tensor([0.6, -0.5, 0.4, 0.3], dtype=torch.float64)
        gates = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=torch.float64)
        y = x @ (gates * weights) + torch.randn(n, generator=generator, dtype=torch.float64)
        return cls(x, y.unsqueeze(1), weights)

    @property
    def data(self) -> tuple[Tensor, Tensor]:
        return self.x, self.y

    def model(self) -> kn.Model:
        """Gates in front of a linear layer that is frozen."""
        net = nn.Sequential(kn.Gates(4), nn.Linear(4, 1, bias=False)).double()
        with torch.no_grad():
            net[1].weight.copy_(self.weights)
        prior = {"0.gate": kn.BernoulliPrior(self.probability)}
        return kn.Model(net, kn.Gaussian(self.noise), prior, frozen="1.*")

    # --- by counting -------------------------------------------------------------------------------------------------

    @property
    def settings(self) -> Tensor:
        """All sixteen, ``(16, 4)``."""
        return all_settings(4, like=self.x)

    @property
    def log_joint(self) -> Tensor:
        """Log p(y, z) of every setting, ``(16,)``."""
        means = self.x @ (self.settings * self.weights).T  # (n, 16)
        log_likelihood = torch.distributions.Normal(means, self.noise).log_prob(self.y).sum(0)
        prior = torch.distributions.Bernoulli(torch.tensor(self.probability, dtype=torch.float64))
        return log_likelihood + prior.log_prob(self.settings).sum(1)

    @property
    def log_evidence(self) -> float:
        return self.log_joint.logsumexp(0).item()

    @property
    def marginals(self) -> Tensor:
        """Posterior probability that each gate is open, ``(4,)``."""
        return self.log_joint.softmax(0) @ self.settings

    def elbo(self, probabilities: Tensor) -> float:
        """The bound of independent Bernoullis."""
        log_q = torch.distributions.Bernoulli(probabilities).log_prob(self.settings).sum(1)
        return (log_q.exp() * (self.log_joint - log_q)).sum().item()
