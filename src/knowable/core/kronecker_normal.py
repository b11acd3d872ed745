"""A normal posterior with a Kronecker-factored precision for each layer, and independent layers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from knowable.core.kronecker_block import KroneckerBlock
from knowable.core.model import Model
from knowable.core.params import Layout
from knowable.core.posterior import Posterior
from knowable.core.posterior_prior import CorrelatedPrior
from knowable.core.types import Buffers, Params
from knowable.errors import InvalidArgument, Unsupported


class KroneckerNormal(Posterior):
    r"""Independent layers, each normal with :class:`~knowable.core.kronecker_block.KroneckerBlock` as its precision.

    Args:
        model: The model.
        loc: Means of the random parameters.
        blocks: Precisions; together they hold every random parameter once.
        common: See :class:`Posterior`.
    """

    family = "kronecker_normal"

    def __init__(self, model: Model, loc: Params, blocks: Iterable[KroneckerBlock], **common: Any):
        super().__init__(model, **common)
        self.loc = {name: loc[name].detach().clone() for name in model.random_names if name in loc}
        self.blocks = tuple(block.mapped(lambda value: value.detach().contiguous().clone()) for block in blocks)
        held = [name for block in self.blocks for name in block.names]
        if sorted(held) != sorted(self.loc):
            raise InvalidArgument(f"blocks must hold each of {sorted(self.loc)} once, got {sorted(held)}.")

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        drawn: Params = {}
        for block in self.blocks:
            drawn |= block.params(block.matrix(self.loc) + block.draw(n, generator))
        return {name: drawn[name] for name in self.loc}

    def _mean_random(self) -> Params:
        return {name: value.clone() for name, value in self.loc.items()}

    def _std_random(self) -> Params:
        found: Params = {}
        for block in self.blocks:
            found |= block.params(block.diagonal(block.precision.reciprocal()).sqrt())
        return {name: found[name] for name in self.loc}

    def log_prob(self, params: Params) -> Tensor:
        """Log density of the random parameters in ``params``: a scalar for one draw, ``(n,)`` for a stack."""
        lacking = [name for name in self.loc if name not in params]
        if lacking:
            raise InvalidArgument(f"params lacks {', '.join(lacking[:5])}. Use the dict that sample() or mean() gives.")
        terms = [block.log_prob(block.matrix(params) - block.matrix(self.loc)) for block in self.blocks]
        return torch.stack(terms).sum(0)

    def as_prior(self) -> KroneckerNormalPrior:
        """The same distribution as a prior; parameters that were point estimates stay fixed at their values."""
        return KroneckerNormalPrior(self.loc, self.blocks, fixed=self.points, buffers=self.buffers)

    def _tensors(self) -> dict[str, Tensor]:
        return {**{f"loc.{name}": value for name, value in self.loc.items()}, **_saved(self.blocks)}

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> KroneckerNormal:
        loc = {name.removeprefix("loc."): value for name, value in tensors.items() if name.startswith("loc.")}
        return cls(model, loc, _loaded(tensors, loc), **common)


class KroneckerNormalPrior(CorrelatedPrior):
    """The same as a prior: a quadratic form in each layer's basis."""

    kind = "kronecker"

    def __init__(self, loc: Params, blocks: Iterable[KroneckerBlock], *, fixed: Params, buffers: Buffers):
        super().__init__(Layout.of(loc), loc, fixed=fixed, buffers=buffers)
        self.blocks = tuple(blocks)

    def given(self, frozen: Params) -> KroneckerNormalPrior:
        """The prior of the other layers, which do not depend on the frozen ones; a layer is frozen as a whole."""
        kept = []
        for block in self.blocks:
            held = [name for name in block.names if name in frozen]
            if not held:
                kept.append(block)
            elif len(held) < len(block.names):
                raise Unsupported(
                    f"prior is a posterior in which {' and '.join(block.names)} go together: freeze both or neither."
                )
        if len(kept) == len(self.blocks):
            return self
        names = {name for block in kept for name in block.names}
        loc = {name: value for name, value in self.loc_by_name.items() if name in names}
        return KroneckerNormalPrior(loc, kept, fixed=self.fixed, buffers=self.buffers)

    def log_det_precision(self) -> Tensor:
        """Sum over the blocks."""
        return torch.stack([block.log_det() for block in self.blocks]).sum()

    def quadratic(self, params: Params) -> Tensor:
        """Sum over the blocks."""
        means = self.loc_by_name
        return torch.stack([block.quadratic(block.matrix(params) - block.matrix(means)) for block in self.blocks]).sum()

    def sample(self, like: Params, *, generator: torch.Generator | None = None) -> Params:
        """Draw one set of parameters."""
        drawn: Params = {}
        for block in self.blocks:
            drawn |= block.params(block.matrix(self.loc_by_name) + block.draw(1, generator)[0])
        return {name: drawn[name] for name in like}

    def precision_diagonal(self, layout: Layout) -> Tensor:
        """Diagonal of the precision."""
        found: Params = {}
        for block in self.blocks:
            found |= block.params(block.diagonal(block.precision))
        return layout.flatten(found)

    def joint_normal(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """Mean and dense precision in the order of ``layout``: for few parameters."""
        mean = layout.flatten(self.loc_by_name)
        precision = mean.new_zeros((layout.size, layout.size))
        places = layout.views(torch.arange(layout.size, device=mean.device))
        for block in self.blocks:
            index = block.matrix(places).flatten()
            precision[index.unsqueeze(1), index] = block.dense()
        return mean, precision

    def tensors(self) -> dict[str, Tensor]:
        """The blocks."""
        return _saved(self.blocks)

    @classmethod
    def from_tensors(
        cls, layout: Layout, loc: Params, tensors: dict[str, Tensor], *, fixed: Params, buffers: Buffers
    ) -> KroneckerNormalPrior:
        """From the blocks."""
        return cls(loc, _loaded(tensors, loc), fixed=fixed, buffers=buffers)


def _saved(blocks: Iterable[KroneckerBlock]) -> dict[str, Tensor]:
    """Blocks as named tensors: ``block.3.precision`` and the like; ``block.3.name.0.weight`` says what they hold."""
    saved: dict[str, Tensor] = {}
    for number, block in enumerate(blocks):
        parts = {"precision": block.precision, "out_basis": block.out_basis, "in_basis": block.in_basis}
        saved |= {f"block.{number}.{part}": value for part, value in parts.items() if value is not None}
        saved |= {f"block.{number}.name.{place}.{name}": torch.zeros(()) for place, name in enumerate(block.names)}
    return saved


def _loaded(tensors: dict[str, Tensor], loc: Params) -> list[KroneckerBlock]:
    keys = [key.split(".", 4) for key in tensors if key.startswith("block.")]
    count = 1 + max(int(key[1]) for key in keys)
    names = [
        sorted((int(key[3]), key[4]) for key in keys if key[1] == str(i) and key[2] == "name") for i in range(count)
    ]
    return [
        KroneckerBlock(
            tuple(name for _, name in held),
            tuple(loc[name].shape for _, name in held),
            tensors[f"block.{i}.precision"],
            tensors.get(f"block.{i}.out_basis"),
            tensors.get(f"block.{i}.in_basis"),
        )
        for i, held in enumerate(names)
    ]
