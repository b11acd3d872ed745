"""A fit on cached features: the frozen layers run once for every row, and not at every step.

The data of the fit are the rows with their features, its model is the same with a network that takes them
(:mod:`knowable.core.network.feature_network`), and the posterior is put back upon the user's model. So every method can
do it, and none knows of it.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from knowable.core.model.data import Data
from knowable.core.model.model import Model
from knowable.core.network.feature_network import FeatureNetwork, FrozenFeatures
from knowable.core.posterior.monte_carlo import bytes_per_row
from knowable.core.posterior.posterior import Posterior
from knowable.core.posterior.saving import build_posterior, describe_posterior
from knowable.core.support.checks import parse_memory
from knowable.errors import Unsupported

_MEMORY = 10**9  # of all features, beyond which they are in a file
_WORKING_MEMORY = 256 * 2**20  # of a batch of rows on its way through the frozen layers
_MOST_ROWS = 4096  # of such a batch


@contextmanager
def with_features(
    model: Model, datas: Sequence[Data], limit: bool | int | str
) -> Iterator[tuple[Model, Sequence[Data]]]:
    """The model and its data with the frozen layers computed.

    Args:
        model: The model.
        datas: Training data, and what else the fit will see.
        limit: Memory of the features; beyond it they are in a temporary file. True is the default limit.

    Raises:
        Unsupported: Where the result could be another one, with the reason.
    """
    if not all(data.in_memory for data in datas):
        raise Unsupported(
            "cache_features=True needs data in memory, (x, y): a Dataset or a DataLoader may give other rows every "
            "time (augmentation). Pass tensors, or leave cache_features out."
        )
    x, buffers = datas[0].source[0], model.buffers()
    frozen = FrozenFeatures(model.network, model.network_params(model.params()), x, buffers)
    known = copy.copy(model)
    known.network = frozen.network
    rows = max(1, min(_MOST_ROWS, _WORKING_MEMORY // bytes_per_row(model, x, buffers)))
    with TemporaryDirectory(prefix="knowable-features-") as folder:
        store = _Store(_MEMORY if limit is True else parse_memory(limit, "cache_features") or 0, Path(folder))
        yield known, [_with_features(data, frozen, rows, store) for data in datas]


def _with_features(data: Data, frozen: FrozenFeatures, rows: int, store: _Store) -> Data:
    x, y = data.source
    features: list[Tensor] = []
    done = 0
    for part in x.split(rows):
        found = frozen.of(part)
        if not features:
            features = store.empty(found, len(x))
        for whole, each in zip(features, found, strict=True):
            whole[done : done + len(part)] = each
        done += len(part)
    return replace(data, source=(FeatureNetwork.inputs(x, features), y))


class _Store:
    """Where features are: in memory as long as they fit, then in files, which are gone with the process."""

    def __init__(self, memory: int, folder: Path):
        self._left, self._folder = memory, folder

    def empty(self, like: Sequence[Tensor], rows: int) -> list[Tensor]:
        """Tensors of so many rows."""
        shapes = [(rows, *each.shape[1:]) for each in like]
        size = sum(math.prod(shape) * each.element_size() for shape, each in zip(shapes, like, strict=True))
        if size <= self._left:
            self._left -= size
            return [each.new_empty(shape) for shape, each in zip(shapes, like, strict=True)]
        return [self._mapped(shape, each.dtype) for shape, each in zip(shapes, like, strict=True)]

    def _mapped(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        file = self._folder / f"{len(list(self._folder.iterdir()))}.features"
        return torch.from_file(str(file), shared=True, size=math.prod(shape), dtype=dtype).view(shape)


def rebound(posterior: Posterior, model: Model) -> Posterior:
    """The same posterior of the same parameters, of a model with another network."""
    return build_posterior(
        model,
        describe_posterior(posterior),
        posterior._tensors(),
        points=posterior.points,
        buffers=posterior.buffers,
    )
