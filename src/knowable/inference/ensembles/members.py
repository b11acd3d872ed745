"""Training the members of an ensemble: all in one batched step where the network allows it, in turn elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from knowable.core.method import FitJob, Method
from knowable.core.model.model import Model
from knowable.core.network.params import Layout, Params, index_params
from knowable.core.posterior.diagnostics import Diagnostics
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.randomness import derive_seed
from knowable.core.support.time_limit import share_of_time
from knowable.core.training.loop import train
from knowable.core.training.settings import TrainingSettings
from knowable.errors import Unsupported
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
    """

    job: FitJob
    settings: TrainingSettings
    count: int
    vectorise: bool | None = None  # in one batched step (True), in turn (False), or whichever is faster (None)
    attack: Tensor | None = None  # size of adversarial perturbations, see PointObjective
    notes: tuple[str, ...] = ()
    nearby: bool = False  # whether the other members begin near the network's own weights, and not at new ones

    def fit(self) -> Particles:
        """Train all members."""
        model, rows, seed = self.job.model, self.job.rows, self.job.seed
        refuse_learned_prior(self.job.method, model)
        each_its_own = rows.weights is not None and rows.weights.dim() == 2
        if self.count == 1 and not each_its_own:
            return self._with_notes(self._one(self.job, "member 0"))
        points, given = {}, model
        if model.point_names:
            with share_of_time(0.3):
                trained = self._one(self._with_equal_rows, "points")
            if trained.diagnostics.interrupted:
                return trained
            points, given = trained.points, model.with_fixed(trained.points, trained.buffers)
        if not self.nearby:
            warn_of_replaced_weights(given, seed, "To keep them in every member: DeepEnsemble(start='network').")
        new = nearby_start if self.nearby else fresh_start
        starts = [given, *(given.starting_at(*new(given, seed, k)) for k in range(1, self.count))]
        objective = self._objective(given, starts)
        if objective is None:
            return self._with_notes(self._train_in_turn(starts, points))
        return self._with_notes(self._train_together(given, points, objective))

    @property
    def _with_equal_rows(self) -> FitJob:
        """The fit, without weights of the rows that differ from member to member."""
        weights = self.job.rows.weights
        each_its_own = weights is not None and weights.dim() == 2
        return replace(self.job, rows=replace(self.job.rows, weights=None)) if each_its_own else self.job

    def _with_notes(self, found: Particles) -> Particles:
        found.diagnostics = replace(found.diagnostics, notes=(*found.diagnostics.notes, *self.notes))
        first = {**found.points, **index_params(found.stack, 0)}
        found = noise_checked(found, self._with_equal_rows, lambda job: self._one(job, "left out"), first)
        return with_diversity(found, self.job)

    # --- all in one step ---------------------------------------------------------------------------------------------

    def _objective(self, model: Model, starts: Sequence[Model]) -> EnsembleObjective | None:
        """The objective of all members in one step, or None where they are trained in turn."""
        size = sum(value.numel() for value in model.params().values())
        if self.vectorise is False or (self.vectorise is None and size > _TOGETHER_BELOW):
            return None
        batch = first_batch(self.job.rows, self.job.seed)
        layout = Layout.of({name: model.params()[name] for name in model.random_names})
        positions = torch.stack([layout.flatten(each.params()) for each in starts])
        mode = self.job.engine.mode if self.job.engine.mode in ("eager", "compiled") else "traced"
        objective = EnsembleObjective(model, self.job.rows.size, positions, attack=self.attack, mode=mode)
        if self.job.engine.precision != "full":
            why = f"precision={self.job.engine.precision!r} is for one network at a time"
        elif callable(self.settings.training.optimiser):
            why = "an optimiser of your own may look at all weights of a tensor, and members would share one"
        elif not model.network.is_steady(model.network_params(model.params()), batch[0], model.buffers()):
            why = "batch statistics or dropout make its training mode differ from its evaluation mode"
        elif not objective.vectorises(*batch):
            why = "vmap cannot take one of its operations"
        else:
            return objective
        if self.vectorise:
            raise Unsupported(
                f"vectorise=True: members of this network cannot be trained in one step: {why}. Leave vectorise out to "
                f"train them in turn."
            )
        return None

    def _train_together(self, given: Model, points: Params, objective: EnsembleObjective) -> Particles:
        model = self.job.model
        job = self.job.part("members", model=given, label=f"{type(self.job.method).__name__}, {self.count} members")
        options = {**job.options, "identity": {**job.identity, "engine": repr(job.engine)}}
        result = train(objective, job.rows, self.settings, **options)
        stack = {name: value.clone() for name, value in objective.stack().items()}
        mean = {**points, **{name: value.mean(0) for name, value in stack.items()}}
        diagnostics = training_diagnostics(job.method, model, result, mean)
        diagnostics = replace(diagnostics, message=f"{self.count} members together: {result.message}")
        return Particles(
            model, stack, points=points, buffers=objective.net_buffers, seed=job.seed, diagnostics=diagnostics
        )

    # --- in turn -----------------------------------------------------------------------------------------------------

    def _train_in_turn(self, starts: Sequence[Model], points: Params) -> Particles:
        """One member after the other; what an interrupt leaves half-trained counts only if there is nothing else."""
        model, rows = self.job.model, self.job.rows
        fits: list[Particles] = []
        for k, start in enumerate(starts):
            own = rows
            if rows.weights is not None and rows.weights.dim() == 2:
                own = replace(rows, weights=rows.weights[:, k].contiguous())
            with share_of_time(1 / (len(starts) - k)):
                seed = self.job.seed if k == 0 else derive_seed(self.job.seed, "member", k)
                fit = self._one(replace(self.job, model=start, rows=own, seed=seed), f"member {k}")
            if not fit.diagnostics.interrupted or not fits:
                fits.append(fit)
            if fit.diagnostics.interrupted:
                break
        buffers = {
            name: torch.stack([fit.buffers[name] for fit in fits])
            for name, value in fits[0].buffers.items()
            if any(not torch.equal(value, fit.buffers[name]) for fit in fits)
        }
        return Particles(
            model, {name: torch.cat([fit.stack[name] for fit in fits]) for name in model.random_names}, points=points,
            buffers=fits[0].buffers, buffer_stack=buffers, seed=self.job.seed,
            diagnostics=joint_diagnostics(self.job.method, fits, self.count),
        )  # fmt: skip

    def _one(self, job: FitJob, name: str) -> Particles:
        objective = PointObjective(job.model, job.rows.size, use_prior=True, attack=self.attack)
        return fit_point(
            job.part(name, label=f"{type(job.method).__name__}, {name}"), self.settings, objective=objective
        )


def joint_diagnostics(method: Method, fits: Sequence[Posterior], asked: int) -> Diagnostics:
    """Diagnostics of members fitted in turn: means of their terms, and their histories by member."""
    each = [fit.diagnostics for fit in fits]
    shared = [name for name in each[0].terms if all(name in one.terms for one in each)]
    told = [one.converged for one in each]
    interrupted = len(fits) < asked or any(one.interrupted for one in each)
    count = f"{len(fits)} of {asked} members" if interrupted else f"{asked} member{'s' * (asked > 1)}"
    return Diagnostics(
        method=repr(method),
        terms={name: sum(one.terms[name] for one in each) / len(each) for name in shared},
        history=[{"member": float(k), **record} for k, one in enumerate(each) for record in one.history],
        converged=False if interrupted else None if None in told else all(told),
        interrupted=interrupted,
        message=f"{count} in turn: {'stopped from the keyboard' if interrupted else each[-1].message}",
        seconds=sum(one.seconds for one in each),
        notes=tuple(dict.fromkeys(note for one in each for note in one.notes)),
        out_of_time=any(one.out_of_time for one in each),
    )
