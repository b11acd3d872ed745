"""Monte Carlo batch normalisation (Teye, Azizpour and Smith, 2018)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from knowable.core.method import FitJob, Method
from knowable.core.model.data import Data
from knowable.core.model.model import Model
from knowable.core.network.params import Buffers, Params, expand_params, stack_params, with_prefix, without_prefix
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_count
from knowable.core.support.randomness import derive_seed, generator_for, own_randomness
from knowable.core.training.settings import Trained
from knowable.errors import InvalidArgument, Unsupported
from knowable.inference.point.point import fit_point

_MOST_ROWS = 128


@dataclass(frozen=True, repr=False, kw_only=True)
class MonteCarloBatchNorm(Trained, Method):
    r"""A MAP fit whose batch normalisation uses, draw by draw, the statistics of random batches of training data.

    .. math:: h \mapsto \gamma\, \frac{h - \mu_B}{\sqrt{\sigma_B^2 + \epsilon}} + \beta,
        \qquad B \text{ a random batch of } D

    In training each example is normalised with the mean and variance of a random batch. Teye, Azizpour and Smith (2018)
    read this noise as a distribution over the network's function; keeping it in prediction gives draws. The weights are
    a point estimate, so all epistemic uncertainty is that of the statistics, whose variances are inversely proportional
    to the batch size.

    Args:
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size; None chooses it from the number of parameters.
        batch_size: Rows of a batch, in training and in the statistics. None: a quarter of the data, at most 128. (With
            all rows in one batch the statistics would not be random.)
        training: How the optimisation loop works: ``kn.Training(optimiser, clip, patience, ...)``.
        draws: Number of batches whose statistics are kept: the largest number of draws of a prediction.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> from torch import nn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))
        >>> posterior = kn.MonteCarloBatchNorm(epochs=20).fit(kn.Model(net, kn.Gaussian(0.1)), (x, x.abs()))
        >>> bool((posterior.predict(x).epistemic > 0).all())
        True
    """

    family = "dropout"
    summary = "a MAP fit whose batch normalisation sees random training batches in prediction"
    aliases = ("mcbn",)
    references = ("teye2018",)
    supports_row_weights = True

    draws: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("draws", self.draws)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size, at_least=2)

    def rows_per_step(self, size: int) -> int:
        """The batch size for N rows."""
        return min(size, self.batch_size or min(_MOST_ROWS, max(2, size // 4)))

    def _fit(self, job: FitJob) -> BatchStatistics:
        model, rows, seed = job.model, job.rows, job.seed
        layers = normalisation_layers(model)
        if not layers:
            raise Unsupported(
                "MonteCarloBatchNorm needs a network with batch normalisation that keeps running statistics and is not "
                "frozen; this network has none. MCDropout and MeanFieldVI support any network."
            )
        found = fit_point(job, self.training_settings(batch_size=self.rows_per_step(rows.size)))
        params = found.mean()
        with own_randomness(derive_seed(seed, "statistics")):
            batches = random_batches(rows, self.rows_per_step(rows.size), self.draws, seed)
            statistics = batch_statistics(model, params, found.buffers, layers, batches)
        common = {"points": found.points, "buffers": found.buffers, "seed": seed, "diagnostics": found.diagnostics}
        return BatchStatistics(model, params, statistics, **common)


class BatchStatistics(Posterior):
    """One set of weights, and the statistics of many batches for its batch normalisation.

    Args:
        model: The model.
        loc: The weights.
        statistics: Running means and variances by name, each with a leading dimension: one entry for each batch.
        common: See :class:`~knowable.core.posterior.posterior.Posterior`.
    """

    family = "batch_statistics"

    def __init__(self, model: Model, loc: Params, statistics: Buffers, **common: Any):
        super().__init__(model, **common)
        self.loc = {name: loc[name].detach().clone() for name in model.random_names if name in loc}
        self.statistics = {name: value.detach().clone() for name, value in statistics.items()}

    def __len__(self) -> int:
        return len(next(iter(self.statistics.values())))

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        return {name: value.clone() for name, value in expand_params(self.loc, n).items()}

    def _mean_random(self) -> Params:
        return {name: value.clone() for name, value in self.loc.items()}

    def _std_random(self) -> Params:
        return {name: torch.zeros_like(value) for name, value in self.loc.items()}

    def draws_for_prediction(self, samples: int, seed: int) -> tuple[int, Tensor]:
        """At most as many draws as batches."""
        return super().draws_for_prediction(min(samples, len(self)), seed)

    def draw_block(self, start: int, stop: int, samples: int, seed: int) -> Params:
        """The weights, once for each draw."""
        return self._ordered(expand_params({**self.loc, **self.points}, stop - start))

    def buffer_block(self, start: int, stop: int, samples: int, seed: int) -> Buffers:
        """Statistics of all batches, or of ``samples`` of them chosen at random."""
        order = torch.arange(len(self))
        if samples < len(self):
            order = torch.randperm(len(self), generator=generator_for(seed, "predict"))[:samples]
        chosen = order[start:stop].to(self.model.device)
        return {name: value[chosen] for name, value in self.statistics.items()}

    def _tensors(self) -> dict[str, Tensor]:
        return {**with_prefix("loc.", self.loc), **with_prefix("statistics.", self.statistics)}

    @classmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> BatchStatistics:
        return cls(model, without_prefix("loc.", tensors), without_prefix("statistics.", tensors), **common)


def normalisation_layers(model: Model) -> list[str]:
    """Paths of the batch normalisation layers that use the batch in training and running statistics in evaluation."""
    return [
        path
        for path, module in model.network.modules(training=True).items()
        if isinstance(module, _BatchNorm) and module.training and module.running_mean is not None
    ]


def random_batches(data: Data, rows: int, number: int, seed: int) -> Iterator[Tensor]:
    """Inputs of ``number`` random batches; those from a loader have as many rows as its own, which it gave already."""
    kept = data.kept
    if kept is not None:
        x, rows = kept.tensors[0], rows if data.in_memory else min(kept.size, len(data.first[0]))
        found = (
            x[torch.randperm(len(x), generator=generator_for(seed, "batch", k))[:rows].to(x.device)]
            for k in range(number)
        )
    else:
        whole = [batch[0] for batch in data.some_batches(rows, number, seed=seed)]
        rows, found = max(map(len, whole)), islice(cycle([x for x in whole if len(x) > 1]), number)
    if rows < 2:  # one row has no variance
        raise InvalidArgument(
            "data is a loader whose batches all have one row, which has no variance. Use larger batches."
        )
    yield from found


def batch_statistics(
    model: Model, params: Params, buffers: Buffers, layers: list[str], batches: Iterator[Tensor]
) -> Buffers:
    """Mean and variance with which each layer normalises each batch in training, named as its running statistics.

    All other layers are in evaluation mode. The variances are the biased ones (over n, not n - 1), as in training.
    """
    network = model.network.copy()
    seen: Buffers = {}
    modules = network.modules(training=False)
    for path in layers:
        modules[path].training = True
        modules[path].register_forward_pre_hook(partial(_record_statistics, seen, path))
    found = []
    with torch.no_grad():
        for x in batches:
            own = {name: value.clone() for name, value in buffers.items()}  # which the layers update
            network(model.network_params(params), x, buffers=own)
            found.append(dict(seen))
    return stack_params(found)


def _record_statistics(seen: Buffers, path: str, module: nn.Module, args: tuple[Tensor, ...]) -> None:
    x = args[0]
    dims = [dim for dim in range(x.dim()) if dim != 1]
    variance, mean = torch.var_mean(x, dims, correction=0)
    prefix = f"{path}." if path else ""
    seen[f"{prefix}running_mean"], seen[f"{prefix}running_var"] = mean, variance
