"""Training the members of an ensemble: all in one batched step where the network allows it, in turn elsewhere."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knowable.core.chains.target import worthwhile_group
from knowable.core.method import FitJob, Method
from knowable.core.model.data import Data
from knowable.core.model.model import Model
from knowable.core.network.params import Layout, Params, index_params
from knowable.core.posterior.diagnostics import Diagnostics
from knowable.core.posterior.monte_carlo import flops_per_row
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.randomness import derive_seed
from knowable.core.support.time_limit import share_of_time
from knowable.core.training.loop import train
from knowable.core.training.settings import TrainingSettings
from knowable.errors import Interrupted, Unsupported
from knowable.inference.ensembles.diversity import first_batch, with_diversity
from knowable.inference.ensembles.side_by_side import EnsembleObjective
from knowable.inference.point.collapsed_noise import noise_checked
from knowable.inference.point.point import (
    PointObjective,
    fit_point,
    fresh_start,
    nearby_start,
    refuse_learned_prior,
    training_diagnostics,
    warn_of_replaced_weights,
)

_TOGETHER_BELOW = 100_000  # parameters; beyond it a batched step is no faster than one member after the other


@dataclass(frozen=True)
class Members:
    """The training of ``count`` networks; the ensemble is atoms of equal weight.

    The first member begins at the network's own weights, the others at new ones or nearby. Rows may have weights, the
    same for all members or ``(N, members)``. Parameters that are point estimates are trained once, for all members.

    Members are trained in groups, each in one batched step, or in turn: these are the pieces of work that an engine may
    do elsewhere. What is in a group depends on the network and on the rows of a step, and not on the engine.
    """

    job: FitJob
    settings: TrainingSettings
    count: int
    vectorise: bool | None = None  # in one batched step (True), in turn (False), or in groups that are quick (None)
    attack: Tensor | None = None  # size of adversarial perturbations, see PointObjective
    notes: tuple[str, ...] = ()
    nearby: bool = False  # whether the other members begin near the network's own weights, and not at new ones

    def fit(self) -> Particles:
        """Train all members."""
        model, rows, seed = self.job.model, self.job.rows, self.job.seed
        refuse_learned_prior(self.job.method, model)
        each_its_own = rows.weights is not None and rows.weights.dim() == 2
        if self.count == 1 and not each_its_own:
            return self._with_notes(self._alone(self.job, "member 0"))
        points, given = {}, model
        if model.point_names:
            with share_of_time(0.3):
                trained = self._alone(self._with_equal_rows, "points")
            if trained.diagnostics.interrupted:
                return trained
            points, given = trained.points, model.with_fixed(trained.points, trained.buffers)
        if not self.nearby:
            warn_of_replaced_weights(given, seed, "To keep them in every member: DeepEnsemble(start='network').")
        size = self._group_size(given)
        return self._with_notes(self._train(given, points, size))

    @property
    def _with_equal_rows(self) -> FitJob:
        """The fit, without weights of the rows that differ from member to member."""
        weights = self.job.rows.weights
        each_its_own = weights is not None and weights.dim() == 2
        return replace(self.job, rows=replace(self.job.rows, weights=None)) if each_its_own else self.job

    def _with_notes(self, found: Particles) -> Particles:
        found.diagnostics = replace(found.diagnostics, notes=(*found.diagnostics.notes, *self.notes))
        first = {**found.points, **index_params(found.stack, 0)}
        found = noise_checked(found, self._with_equal_rows, lambda job: self._alone(job, "left out"), first)
        return with_diversity(found, self.job)

    # --- pieces of work ----------------------------------------------------------------------------------------------

    def _group_size(self, model: Model) -> int:
        """How many members are trained in one step; 0 where they are trained in turn."""
        size = sum(value.numel() for value in model.params().values())
        if self.vectorise is False or (self.vectorise is None and size > _TOGETHER_BELOW):
            return 0
        batch = first_batch(self.job.rows, self.job.seed)
        if self.job.engine.precision != "full":
            why = f"precision={self.job.engine.precision!r} is for one network at a time"
        elif callable(self.settings.training.optimiser):
            why = "an optimiser of your own may look at all weights of a tensor, and members would share one"
        elif not model.network.is_steady(model.network_params(model.params()), batch[0], model.buffers()):
            why = "batch statistics or dropout make its training mode differ from its evaluation mode"
        elif not self._objective(model, range(self.count)).vectorises(*batch):
            why = "vmap cannot take one of its operations"
        elif self.vectorise:
            return self.count
        else:
            rows = self.settings.rows_per_step(self.job.rows.size)
            return worthwhile_group(self.count, rows * flops_per_row(model, batch[0]))
        if self.vectorise:
            raise Unsupported(
                f"vectorise=True: members of this network cannot be trained in one step: {why}. Leave vectorise out to "
                f"train them in turn."
            )
        return 0

    def _train(self, given: Model, points: Params, size: int) -> Particles:
        """All groups, or all members in turn; what an interrupt leaves half-trained counts only if nothing else is."""
        groups = [range(first, min(first + size, self.count)) for first in range(0, self.count, size or self.count)]
        tasks = groups if size else [range(k, k + 1) for k in range(self.count)]
        work, found = (_group if size else _member), dict[int, Particles]()
        try:
            for members, fit in self.job.engine.run(
                work, (self, given, points), tasks, label=type(self.job.method).__name__, progress=self.job.progress
            ):
                stopped = fit.diagnostics.interrupted
                if not stopped or not found:
                    found[members.start] = fit
                if stopped:
                    break
        except KeyboardInterrupt:  # the pieces under way had nothing to return
            if not found:
                raise
            text = f"The fit was stopped from the keyboard with {len(found)} of {len(tasks)} pieces of work done."
            warnings.warn(text, Interrupted, stacklevel=5)
        fits = [found[first] for first in sorted(found)]
        if size and len(tasks) == 1:
            diagnostics = fits[0].diagnostics
            diagnostics = replace(diagnostics, message=f"{self.count} members together: {diagnostics.message}")
        else:
            diagnostics = joint_diagnostics(self.job.method, fits, self.count, [len(fit) for fit in fits])
        return _joined(self.job.model, fits, points, self.job.seed, diagnostics)

    def _alone(self, job: FitJob, name: str) -> Particles:
        """One fit that others wait for."""
        ((_, fit),) = job.engine.run(_one, (self, job), [name], label=type(job.method).__name__, progress=job.progress)
        return fit

    def _objective(self, given: Model, members: range) -> EnsembleObjective:
        """The objective of some members in one step."""
        layout = Layout.of({name: given.params()[name] for name in given.random_names})
        positions = torch.stack([layout.flatten(self._start(given, k).params()) for k in members])
        mode = self.job.engine.mode if self.job.engine.mode in ("eager", "compiled") else "traced"
        return EnsembleObjective(given, self.job.rows.size, positions, attack=self.attack, mode=mode)

    def _start(self, given: Model, k: int) -> Model:
        """The model as member k begins."""
        new = nearby_start if self.nearby else fresh_start
        return given if k == 0 else given.starting_at(*new(given, self.job.seed, k))

    def _rows_of(self, members: range) -> Data:
        """The rows with these members' weights, where each member has its own."""
        rows = self.job.rows
        if rows.weights is None or rows.weights.dim() == 1 or len(members) == self.count:
            return rows
        own = rows.weights[:, members.start : members.stop]
        return replace(rows, weights=(own[:, 0] if len(members) == 1 else own).contiguous())


def _group(shared: tuple[Members, Model, Params], members: range) -> Particles:
    """Train some members in one batched step."""
    these, given, points = shared
    name = type(these.job.method).__name__
    part, label = "members", f"{name}, {these.count} members"
    if len(members) < these.count:
        part = f"members {members.start} to {members.stop - 1}"
        label = f"{name}, {part}"
    job = these.job.part(part, model=given, rows=these._rows_of(members), label=label)
    objective = these._objective(given, members)
    result = train(
        objective, job.rows, these.settings, **{**job.options, "identity": {**job.identity, "engine": repr(job.engine)}}
    )
    stack = {name: value.clone() for name, value in objective.stack().items()}
    mean = {**points, **{name: value.mean(0) for name, value in stack.items()}}
    diagnostics = training_diagnostics(job.method, these.job.model, result, mean)
    return Particles(
        these.job.model, stack, points=points, buffers=objective.net_buffers, seed=job.seed, diagnostics=diagnostics
    )


def _member(shared: tuple[Members, Model, Params], members: range) -> Particles:
    """Train one member by itself."""
    these, given, _ = shared
    k = members.start
    seed = these.job.seed if k == 0 else derive_seed(these.job.seed, "member", k)
    job = replace(these.job, model=these._start(given, k), rows=these._rows_of(members), seed=seed)
    return _one((these, job), f"member {k}")


def _one(shared: tuple[Members, FitJob], name: str) -> Particles:
    """Train one network."""
    these, job = shared
    objective = PointObjective(job.model, job.rows.size, use_prior=True, attack=these.attack)
    return fit_point(job.part(name, label=f"{type(job.method).__name__}, {name}"), these.settings, objective=objective)


def _joined(model: Model, fits: Sequence[Particles], points: Params, seed: int, diagnostics: Diagnostics) -> Particles:
    """The members of all pieces as one posterior, each with its own buffers where these differ."""
    counts = [len(fit) for fit in fits]
    buffers = {
        name: torch.cat([fit.buffers[name].expand(n, *value.shape) for fit, n in zip(fits, counts, strict=True)])
        for name, value in fits[0].buffers.items()
        if any(not torch.equal(value, fit.buffers[name]) for fit in fits)
    }
    return Particles(
        model, {name: torch.cat([fit.stack[name] for fit in fits]) for name in model.random_names}, points=points,
        buffers=fits[0].buffers, buffer_stack=buffers, seed=seed, diagnostics=diagnostics,
    )  # fmt: skip


def joint_diagnostics(
    method: Method, fits: Sequence[Posterior], asked: int, sizes: Sequence[int] | None = None
) -> Diagnostics:
    """Diagnostics of members fitted apart, or of groups of ``sizes``: means over members, and histories by member."""
    each = [fit.diagnostics for fit in fits]
    sizes = sizes or [1] * len(fits)
    first = [sum(sizes[:k]) for k in range(len(fits))]
    shared = [name for name in each[0].terms if all(name in one.terms for one in each)]
    told = [one.converged for one in each]
    shares = [size / sum(sizes) for size in sizes]
    interrupted = sum(sizes) < asked or any(one.interrupted for one in each)
    count = f"{sum(sizes)} of {asked} members" if interrupted else f"{asked} member{'s' * (asked > 1)}"
    how = "in turn" if max(sizes) == 1 else f"in {len(fits)} groups"
    return Diagnostics(
        method=repr(method),
        terms={name: sum(w * one.terms[name] for w, one in zip(shares, each, strict=True)) for name in shared},
        history=[{"member": float(k), **record} for k, one in zip(first, each, strict=True) for record in one.history],
        converged=False if interrupted else None if None in told else all(told),
        interrupted=interrupted,
        message=f"{count} {how}: {'stopped from the keyboard' if interrupted else each[-1].message}",
        seconds=sum(one.seconds for one in each),
        notes=tuple(dict.fromkeys(note for one in each for note in one.notes)),
        out_of_time=any(one.out_of_time for one in each),
    )
