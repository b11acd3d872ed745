"""The posterior of SWAG: a normal distribution whose draws have running statistics of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from knowable.core.low_rank_normal import LowRankNormal
from knowable.core.model import Model
from knowable.core.params import Layout, index_params
from knowable.core.types import Buffers


class SWAGPosterior(LowRankNormal):
    """A normal distribution with a diagonal and a low-rank part of its covariance.

    Where the network has batch normalisation, the running statistics of every draw are those that its weights have on
    ``inputs``, a sample of the training rows, which is kept and saved for that purpose.

    Args:
        model: The model.
        layout: Order of the random parameters in the flat vector.
        loc: Mean, ``(D,)``.
        scale: See :class:`~knowable.core.low_rank_normal.LowRankNormal`, and so for ``basis`` and ``stretch``.
        inputs: Rows on which running statistics are computed, or None where the network has none.
        common: See :class:`~knowable.core.posterior.Posterior`.
    """

    family = "swag"

    def __init__(
        self,
        model: Model,
        layout: Layout,
        loc: Tensor,
        scale: Tensor,
        basis: Tensor,
        stretch: Tensor,
        *,
        inputs: Tensor | None = None,
        **common: Any,
    ):
        super().__init__(model, layout, loc, scale, basis, stretch, **common)
        self.inputs = inputs

    def buffer_block(self, start: int, stop: int, samples: int, seed: int) -> Buffers:
        """The running statistics of draws ``start`` to ``stop``."""
        if self.inputs is None:
            return {}
        network = self.model.network
        draws = self.model.network_params(self.draw_block(start, stop, samples, seed))
        each = [network.statistics(index_params(draws, k), self.inputs, self.buffers) for k in range(stop - start)]
        return {name: torch.stack([own[name] for own in each]) for name in network.statistics_names}

    def _tensors(self) -> dict[str, Tensor]:
        return super()._tensors() if self.inputs is None else {**super()._tensors(), "inputs": self.inputs}

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> SWAGPosterior:
        rest = {name: value for name, value in tensors.items() if name != "inputs"}
        loaded = super()._from_tensors(model, rest, **common)
        assert isinstance(loaded, SWAGPosterior)
        loaded.inputs = tensors.get("inputs")
        return loaded
