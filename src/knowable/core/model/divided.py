"""Data of a fit that several processes make, each of which has rows that no other has."""

from __future__ import annotations

from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from knowable.core.model.data import Data
from knowable.core.model.row_source import OwnRows, RowSource
from knowable.core.model.stream import Stream, sampler_of
from knowable.core.support.processes import Processes
from knowable.errors import InvalidArgument, InvalidData, Unsupported


def divided(data: Data, processes: Processes, *, own: bool) -> Data:
    """The rows of this process as its part of the data of all.

    Args:
        data: What this process was given.
        processes: This process among those of the fit.
        own: Whether these rows are only this process's. Otherwise all have the same: files are divided, and of
            everything else each process takes its part of every batch, so that the data stay as they are.
    """
    loader = None if data.in_memory else data._stream.loader
    if not own and isinstance(loader, RowSource):
        loader = loader.share(processes)
        own = loader is not None
    if not processes.several:
        return data
    if not own:
        if isinstance(loader, DataLoader) and isinstance(sampler_of(loader), DistributedSampler):
            raise InvalidArgument(
                "data is a loader with a DistributedSampler, which gives each process rows of its own: say so with "
                "TorchDistributed(shards=True), or pass a loader of all rows."
            )
        return data
    if data.weights is not None:
        raise Unsupported("Rows with weights cannot be a process's own: pass all rows to all, and shards=False.")
    if loader is None:
        loader = OwnRows(data.tensors, data.most_rows)
    size = loader.size if isinstance(loader, RowSource) else data.size
    sizes = processes.gather(size)
    if 0 in sizes:
        raise InvalidData(f"Process {sizes.index(0)} has no rows: every process needs some.")
    if data.in_memory:
        stream = Stream(loader, size, processes=processes)
        stream.target_shape = data.target_shape
    else:
        old = data._stream
        stream = Stream(loader, size, old.model, old.name, old.class_weights, old.target, processes)
    return Data(stream, sum(sizes), class_weights=data.class_weights, target=data.target)
