"""The bound of sparse variational dropout, what it records of sparsity, and the frames it keeps of one weight."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knowable.core.model import Model
from knowable.core.normal_objective import FlatNormalObjective
from knowable.core.posterior import Posterior
from knowable.inference.dropout.noisy_weights import NoisyWeights


class SparseObjective(FlatNormalObjective):
    """-ELBO / N of independent normals under log-uniform priors.

    Args:
        model: The model, with its log-uniform priors.
        x: Rows like those of the data.
        size: Number of training examples N.
        watch: A weight whose mean and log alpha are kept after every epoch; None for none.
        common: See :class:`~knowable.core.normal_objective.FlatNormalObjective`.
    """

    recordable = True

    def __init__(self, model: Model, x: Tensor, size: int, *, watch: str | None = None, **common: Any):
        super().__init__(model, x, size, estimator="local", **common)
        self.watch = watch

    def posterior(self, **common: Any) -> NoisyWeights:
        """Independent normals, and the frames."""
        loc, scale = self.loc_and_scale()
        about = {"points": self.point_params(), "buffers": self.net_buffers, **common}
        return NoisyWeights(self.model, loc, scale, watched=self.watch, frames=self.frames(), **about)

    def summary(self) -> dict[str, float]:
        """The share of each weight's elements that are drowned in noise."""
        gone = (self.log_alpha() > Posterior.log_alpha_threshold).to(self.q.dtype)
        return {f"sparsity.{name}": part.mean().item() for name, part in self.layout.views(gone).items()}

    def log_alpha(self) -> Tensor:
        """Log of noise over signal of all weights, ``(D,)``."""
        loc, log_scale = self.q.detach()
        return 2.0 * (log_scale - loc.abs().log())

    def end_of_epoch(self) -> None:
        """Keep a frame of the weight that is watched."""
        if self.watch is not None:
            loc = self.layout.views(self.q.detach()[0])[self.watch]
            log_alpha = self.layout.views(self.log_alpha())[self.watch]
            self.album.append(torch.stack([loc, log_alpha]).to(torch.float16))  # infinite where it leaves the range

    def frames(self) -> Tensor | None:
        """All frames, ``(epochs, 2, *shape)``: means and log alphas."""
        return torch.stack(self.album) if self.album else None
