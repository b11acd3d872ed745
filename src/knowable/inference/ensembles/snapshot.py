"""Snapshot ensembles: train one, get several for free (Huang et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from knowable.core.compiling.engine import as_engine
from knowable.core.method import Method, admit, identity_of
from knowable.core.model.model import Model
from knowable.core.network.params import Buffers, Layout, Params
from knowable.core.posterior.particles import Particles
from knowable.core.storage.checkpoint import as_checkpoint, part_of
from knowable.core.support.checks import check_count
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.core.support.time_limit import share_of_time
from knowable.core.training.loop import Training, train
from knowable.errors import InvalidArgument
from knowable.inference.ensembles.diversity import with_diversity
from knowable.inference.point.point import PointObjective, fit_point, refuse_learned_prior, training_diagnostics


@dataclass(frozen=True, repr=False)
class SnapshotEnsemble(Method, Training):
    r"""One network whose learning rate falls and rises again; it is kept each time it has fallen.

    .. math:: \alpha(t) = \frac{\alpha_0}{2} \Big( \cos\frac{\pi\,(t \bmod T/M)}{T/M} + 1 \Big)

    M members for the price of one training of T steps. A rise of the rate moves the network out of the optimum it was
    in; whether it finds another one depends on how high the rate is and how long the cycle. Members are less different
    than those of a :class:`~knowable.inference.ensembles.deep_ensemble.DeepEnsemble`. Held-out rows are only used to
    report how far members differ: nothing stops early.

    Args:
        epochs: All cycles together. None: the first cycle goes on until the objective has settled, and the others take
            as long as its fall.
        cycles: M, how often the rate falls. The other fields are those of
            :class:`~knowable.core.training.loop.Training`.
        keep: How many snapshots to keep, the last ones; None keeps all.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 10), torch.nn.Tanh(), torch.nn.Linear(10, 1))
        >>> posterior = kn.SnapshotEnsemble(cycles=4, epochs=400).fit(kn.Model(net, kn.Gaussian()), (x, x.sin()))
        >>> len(posterior)
        4
    """

    cycles: int = 5
    keep: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("cycles", self.cycles)
        if self.keep is not None:
            check_count("keep", self.keep)
            if self.keep > self.cycles:
                raise InvalidArgument(f"keep must be at most cycles={self.cycles}, got {self.keep}.")

    def fit(self, model, data, *, validation=None, seed=0, progress=None, checkpoint=None, engine=None) -> Particles:
        """Train through all cycles; see :meth:`knowable.core.method.Method.fit`."""
        rows, held_out, seed = admit(model, data, validation, seed, batch_size=self.batch_size, weighted=True)
        refuse_learned_prior(self, model)
        saver, engine = as_checkpoint(checkpoint), as_engine(engine)
        points, given = {}, model
        if model.point_names:
            with share_of_time(0.3):
                trained = fit_point(
                    self, model, rows, training=self._one_fall(), use_prior=True, seed=seed, progress=progress,
                    checkpoint=part_of(saver, "points"), engine=engine,
                )  # fmt: skip
            if trained.diagnostics.interrupted:
                return trained
            points = trained.points
            given = model.given(points, trained.buffers).starting_at(trained.mean())
        objective = SnapshotObjective(given, rows.size, self.cycles)
        result = train(
            objective, rows, self, seed=seed, progress=progress, checkpoint=part_of(saver, "cycles"), engine=engine,
            label=type(self).__name__, identity=identity_of(self, given, rows),
        )  # fmt: skip
        stack, buffers = objective.kept(self.keep)
        mean = {**points, **{name: value.mean(0) for name, value in stack.items()}}
        posterior = Particles(
            model, stack, points=points, buffers=objective.net_buffers, buffer_stack=buffers, seed=seed,
            diagnostics=training_diagnostics(self, model, result, mean),
        )  # fmt: skip
        with own_randomness(derive_seed(seed, "first rows")):  # a loader may shuffle
            return with_diversity(posterior, next(iter(held_out or rows))[0])

    def _one_fall(self) -> Training:
        """How point estimates are trained, before the cycles."""
        plain = Training(**{each.name: getattr(self, each.name) for each in fields(Training)})
        return replace(plain, cycles=1, epochs=None if self.epochs is None else max(1, self.epochs // self.cycles))


class SnapshotObjective(PointObjective):
    """The negative log joint of one network, which is kept at the end of every cycle.

    Attributes:
        count: How many snapshots there are, a tensor.
        snapshots: The random parameters of each, ``(cycles, D)``.
        buffer_snapshots: The network's buffers of each, ``(cycles, ...)``.
    """

    def __init__(self, model: Model, size: int, cycles: int):
        super().__init__(model, size, use_prior=True)
        start = model.params()
        self.layout = Layout.of({name: start[name] for name in model.random_names})
        self.count = torch.zeros((), dtype=torch.int64)
        self.snapshots = torch.zeros((cycles, self.layout.size), dtype=model.dtype, device=model.device)
        self.buffer_snapshots = {
            name: value.new_zeros((cycles, *value.shape)) for name, value in self.net_buffers.items()
        }

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training changes, the snapshots included."""
        buffers = {f"snapshot_buffer.{name}": value for name, value in self.buffer_snapshots.items()}
        return {**super().tensors(), **buffers, "snapshot.count": self.count, "snapshot.values": self.snapshots}

    def end_of_cycle(self) -> None:
        """Keep the network as it is."""
        number = int(self.count)
        with torch.no_grad():
            self.snapshots[number] = self.layout.flatten(self.params())
            for name, value in self.net_buffers.items():
                self.buffer_snapshots[name][number] = value
        self.count += 1

    def kept(self, most: int | None) -> tuple[Params, Buffers]:
        """The last snapshots and the buffers that are not as they are now; the network as it is where there is none."""
        count = int(self.count)
        if count == 0:
            return {name: self.params()[name].detach().unsqueeze(0).clone() for name in self.layout.names}, {}
        last = slice(max(0, count - (most or count)), count)
        stack = {name: value.clone() for name, value in self.layout.views(self.snapshots[last]).items()}
        buffers = {name: value[last].clone() for name, value in self.buffer_snapshots.items()}
        return stack, {name: value for name, value in buffers.items() if (value != self.net_buffers[name]).any()}
