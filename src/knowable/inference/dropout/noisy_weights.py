"""The posterior of dropout by noise: independent normals, and what was seen of one of them during training."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from knowable.core.model import Model
from knowable.core.normal_posterior import DiagonalNormal
from knowable.core.types import Params


class NoisyWeights(DiagonalNormal):
    r"""Independent normals :math:`\mathcal{N}(\theta, \alpha \theta^2)` over the weights that have noise.

    Args:
        model: The model, with the log-uniform priors that the method put on those weights.
        loc: Means θ.
        scale: Standard deviations.
        watched: The weight that was watched.
        frames: Its means and log alphas after every epoch, ``(epochs, 2, *shape)`` in float16. They are saved with the
            rest.
        common: See :class:`~knowable.core.posterior.Posterior`.
    """

    family = "noisy_weights"

    def __init__(
        self,
        model: Model,
        loc: Params,
        scale: Params,
        *,
        watched: str | None = None,
        frames: Tensor | None = None,
        **common: Any,
    ):
        super().__init__(model, loc, scale, **common)
        self.watched, self.frames = watched, frames

    def sparsity(self) -> dict[str, float]:
        """The share of each weight's elements whose log alpha is above :attr:`log_alpha_threshold`."""
        gone = {name: value > self.log_alpha_threshold for name, value in self.log_alpha().items()}
        return {name: value.double().mean().item() for name, value in gone.items()}

    def _settings(self) -> dict[str, Any]:
        return {**super()._settings(), "watched": self.watched}

    def _tensors(self) -> dict[str, Tensor]:
        return {**super()._tensors(), **({} if self.frames is None else {"frames": self.frames})}

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> NoisyWeights:
        return super()._from_tensors(model, tensors, frames=tensors.get("frames"), **common)  # type: ignore[return-value]
