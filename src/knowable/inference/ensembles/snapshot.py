"""Snapshot ensembles: train one, get several for free (Huang et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.method import FitJob, Method
from knowable.core.model.model import Model
from knowable.core.network.params import Buffers, Layout, Params, index_params
from knowable.core.posterior.particles import Particles
from knowable.core.support.checks import check_count
from knowable.core.support.time_limit import share_of_time
from knowable.core.training.loop import train
from knowable.core.training.settings import Trained
from knowable.errors import InvalidArgument
from knowable.inference.ensembles.diversity import with_diversity
from knowable.inference.point.collapsed_noise import noise_checked
from knowable.inference.point.point import PointObjective, fit_point, refuse_learned_prior, training_diagnostics


@dataclass(frozen=True, repr=False, kw_only=True)
class SnapshotEnsemble(Trained, Method):
    r"""One network trained with a cyclical learning rate, kept at the end of each cycle.

    .. math:: \alpha(t) = \frac{\alpha_0}{2} \Big( \cos\frac{\pi\,(t \bmod T/M)}{T/M} + 1 \Big)

    M members for the price of one training of T steps. The restart of the rate moves the network out of its optimum;
    whether it finds another one depends on how high the rate is and how long the cycle. Members are less diverse
    than those of a :class:`~knowable.inference.ensembles.deep_ensemble.DeepEnsemble`. Held-out rows are only used to
    report how far members differ: nothing stops early.

    Args:
        epochs: All cycles together. None: the first cycle lasts until the objective has converged, the others as long
            as its annealing phase.
        learning_rate: Step size α₀ at the beginning of each cycle; None chooses it from the number of parameters.
        batch_size: Rows per step; None takes all rows up to 1,024, and 128 beyond.
        training: Optimiser, gradient clipping, divergence and accumulation: ``kn.Training(...)``.
        cycles: Number of cycles M of the learning rate.
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

    family = "ensembles"
    summary = "one network, kept each time its learning rate has fallen"
    aliases = ("snapshot",)
    references = ("huang2017",)
    supports_row_weights = True

    cycles: int = 5
    keep: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("cycles", self.cycles)
        if self.epochs is not None and self.cycles > self.epochs:
            raise InvalidArgument(f"cycles must be at most epochs={self.epochs}, got {self.cycles}.")
        if self.keep is not None:
            check_count("keep", self.keep)
            if self.keep > self.cycles:
                raise InvalidArgument(f"keep must be at most cycles={self.cycles}, got {self.keep}.")

    def _fit(self, job: FitJob) -> Particles:
        """Train through all cycles."""
        model, rows = job.model, job.rows
        refuse_learned_prior(self, model)
        points, given = {}, model
        one_cycle = self.training_settings(epochs=self.epochs and max(1, self.epochs // self.cycles))
        if model.point_names:
            with share_of_time(0.3):
                trained = fit_point(job.part("points", validation=None), one_cycle)
            if trained.diagnostics.interrupted:
                return trained
            points = trained.points
            given = model.with_fixed(points, trained.buffers).starting_at(trained.mean())
        objective = SnapshotObjective(given, rows.size, self.cycles)
        cycles = job.part("cycles", model=given, validation=None)
        result = train(objective, rows, self.training_settings(cycles=self.cycles), **cycles.options)
        stack, buffers = objective.kept(self.keep)
        mean = {**points, **{name: value.mean(0) for name, value in stack.items()}}
        posterior = Particles(
            model, stack, points=points, buffers=objective.net_buffers, buffer_stack=buffers, seed=job.seed,
            diagnostics=training_diagnostics(self, model, result, mean),
        )  # fmt: skip
        last = {**points, **index_params(stack, -1)}
        return with_diversity(noise_checked(posterior, job, lambda part: fit_point(part, one_cycle), last), job)


class SnapshotObjective(PointObjective):
    """The negative log joint of one network, which is kept at the end of every cycle."""

    def __init__(self, model: Model, size: int, cycles: int):
        super().__init__(model, size, use_prior=True)
        start = model.params()
        self.layout = Layout.of({name: start[name] for name in model.random_names})
        self.count = torch.zeros((), dtype=torch.int64)
        self.kept_params = torch.zeros((cycles, self.layout.size), dtype=model.dtype, device=model.device)
        self.kept_buffers = {name: value.new_zeros((cycles, *value.shape)) for name, value in self.net_buffers.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Everything that training changes, the snapshots included."""
        buffers = {f"snapshot_buffer.{name}": value for name, value in self.kept_buffers.items()}
        return {**super().tensors(), **buffers, "snapshot.count": self.count, "snapshot.values": self.kept_params}

    def end_of_cycle(self) -> None:
        """Keep the network as it is."""
        number = int(self.count)
        with torch.no_grad():
            self.kept_params[number] = self.layout.flatten(self.params())
            for name, value in self.net_buffers.items():
                self.kept_buffers[name][number] = value
        self.count += 1

    def kept(self, most: int | None) -> tuple[Params, Buffers]:
        """The last snapshots and the buffers that are not as they are now; the network as it is where there is none."""
        count = int(self.count)
        if count == 0:
            return {name: self.params()[name].detach().unsqueeze(0).clone() for name in self.layout.names}, {}
        last = slice(max(0, count - (most or count)), count)
        stack = {name: value.clone() for name, value in self.layout.views(self.kept_params[last]).items()}
        buffers = {name: value[last].clone() for name, value in self.kept_buffers.items()}
        return stack, {name: value for name, value in buffers.items() if (value != self.net_buffers[name]).any()}
