"""Mixtures of mean-field normals (Jaakkola and Jordan, 1998; Gershman, Hoffman and Blei, 2012)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.checks import check_choice, check_count, check_type
from knowable.core.data import Data
from knowable.core.deadline import share_of_time
from knowable.core.diagnostics import Diagnostics
from knowable.core.engine import Engine, as_engine
from knowable.core.fresh_start import fresh_start
from knowable.core.method import admit, identity_of
from knowable.core.mixture import Mixture
from knowable.core.model import Model
from knowable.core.normal_posterior import DiagonalNormal
from knowable.core.params import index_params
from knowable.core.particles import Particles
from knowable.core.point_estimate import training_diagnostics
from knowable.core.posterior import Posterior
from knowable.core.randomness import derive_seed, generator_for, own_randomness
from knowable.core.start_values import means_for
from knowable.core.training import train
from knowable.core.types import Params
from knowable.core.variational_method import BoundMethod
from knowable.errors import Unsupported
from knowable.inference.variational.mean_field import MeanFieldVI
from knowable.inference.variational.mean_field_objective import MeanFieldObjective
from knowable.inference.variational.mixture_bound import mixture_bound
from knowable.inference.variational.mixture_objective import ComponentsInTurn, ComponentsTogether

ESTIMATORS = ("auto", "local", "weight")
_TOGETHER_BELOW = 100_000  # parameters; beyond it a batched step is no quicker than one component after the other


@dataclass(frozen=True)
class Components:
    """What comes first among the settings of a mixture.

    Args:
        components: How many normals are mixed.
    """

    components: int = 5


@dataclass(frozen=True, repr=False)
class MixtureVI(BoundMethod, Components):
    r"""Several mean-field normals of equal weight, each around a mode of its own, trained together.

    .. math:: q(\theta) = \frac1K \sum_k q_k(\theta), \qquad q_k(\theta) = \prod_d \mathcal{N}(m_{kd}, s_{kd}^2)

    What is maximised is the mean of the components' bounds. It is a lower bound of the mixture's own, since the entropy
    is concave, and so of the log evidence:

    .. math:: \frac1K \sum_k \mathrm{ELBO}(q_k) \;\le\; \mathrm{ELBO}(q)
        = \frac1K \sum_k \mathrm{ELBO}(q_k) + I \;\le\; \log p(D), \qquad 0 \le I \le \log K

    I is the information a draw has on its component: log K where the components do not overlap. The posterior's
    ``log_evidence`` is the middle one, the mixture's own bound, by Monte Carlo with its standard error; the report has
    the first as ``mean_elbo`` and I as ``separation``, and every member its own bound. The first bound does not drive
    components apart: what makes them differ is where they start, and two that end in the same mode count it twice. With
    one component it is :class:`~knowable.inference.variational.mean_field.MeanFieldVI`.

    Networks without batch statistics and dropout take all components through one batched call; in others each goes
    through the network in turn, at every step. Parameters that are point estimates are the same for all components.

    Args:
        components: How many normals are mixed.
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how the bound is maximised.
        beta: This and the other fields of
            :class:`~knowable.core.variational_method.BoundMethod` and
            :class:`~knowable.core.variational_method.VariationalMethod` say what is maximised, from
            where.
        start: Where the components begin. ``"network"``: the first at the network's own weights, the others at new
            initial ones. ``"map"``: at the modes that MAP fits from there find. A posterior: at its members' means (a
            mixture) or its atoms (an ensemble), as far as there are any, else at its mean, and then at draws.
        estimator: ``"auto"``, ``"local"`` or ``"weight"``, see
            :class:`~knowable.inference.variational.mean_field.MeanFieldVI`.
        draws: Weight draws of each component per step.
        vectorise: Take all components through the network at once (True) or in turn (False). None: at once where the
            network allows it and has up to 100,000 parameters.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 10), torch.nn.Tanh(), torch.nn.Linear(10, 1))
        >>> posterior = kn.MixtureVI(3, epochs=200).fit(kn.Model(net, kn.Gaussian(0.1)), (x, x.sin()))
        >>> len(posterior)
        3
    """

    estimator: str = "auto"
    draws: int = 1
    vectorise: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("components", self.components)
        check_choice("estimator", self.estimator, ESTIMATORS)
        check_count("draws", self.draws)
        if self.vectorise is not None:
            check_type("vectorise", self.vectorise, bool, "True, False or None")

    def fit(self, model, data, *, validation=None, seed=0, progress=None, checkpoint=None, engine=None) -> Mixture:
        """Maximise the mean of the bounds; see :meth:`knowable.core.method.Method.fit`."""
        rows, held_out, seed = admit(model, data, validation, seed, batch_size=self.batch_size)
        engine = as_engine(engine)
        with own_randomness(derive_seed(seed, "start")), share_of_time(0.3):
            x, y = next(iter(rows))[:2]
            starts = self._starts(model, rows, held_out, seed, progress, engine)
            components = [self.objective(each, x, rows.size) for each in starts]
            objective = self._objective(components, x, y, engine)
        with share_of_time(0.9):  # the rest is for the bound
            result = train(
                objective, rows, self, validation=held_out, seed=seed, progress=progress, checkpoint=checkpoint,
                engine=engine, label=f"{type(self).__name__}, {self.components} components",
                identity={**identity_of(self, model, rows, held_out), "engine": repr(engine)},
            )  # fmt: skip
        trained: Sequence[MeanFieldObjective] = list(objective.components)  # type: ignore[arg-type]
        bound, terms, each = mixture_bound(trained, rows, seed)
        points = trained[0].point_params()
        members = [
            DiagonalNormal(
                model, *component.loc_and_scale(), points=points, buffers=component.net_buffers, seed=seed,
                log_evidence=own, diagnostics=Diagnostics(repr(self._single()), own_terms, message=result.message),
            )
            for component, (own, own_terms) in zip(trained, each, strict=True)
        ]  # fmt: skip
        mixture = Mixture(model, members, points=points, seed=seed, log_evidence=bound)
        mixture.diagnostics = training_diagnostics(
            self, model, result, mixture.mean(), terms, self._notes(model, rows.size, result)
        )
        return mixture

    def _single(self) -> MeanFieldVI:
        """The method that fits one component by itself."""
        return MeanFieldVI(
            self.epochs, self.learning_rate, self.batch_size, self.optimiser, self.clip, self.patience,
            self.on_divergence, self.schedule, self.cycles, self.accumulate, estimator=self.estimator,
            draws=self.draws, beta=self.beta, temperature=self.temperature, kl_warmup=self.kl_warmup, start=self.start,
            initial_scale=self.initial_scale,
        )  # fmt: skip

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> MeanFieldObjective:
        """The loss of one component by itself; :meth:`fit` minimises the mean of all components' losses."""
        return MeanFieldObjective(
            model, x, size, estimator=self.estimator, draws=self.draws, beta=self.beta, temperature=self.temperature,
            kl_warmup=self.kl_warmup, initial_scale=self.initial_scale, start=start,
        )  # fmt: skip

    def _starts(
        self, model: Model, rows: Data, held_out: Data | None, seed: int, progress: bool | None, engine: Engine
    ) -> list[Model]:
        """The model, begun where each component begins."""
        if isinstance(self.start, Posterior):
            return [model.starting_at(each) for each in _centres(self.start, self.components, model, seed)]
        fresh = [model, *(model.starting_at(*fresh_start(model, seed, k)) for k in range(1, self.components))]
        found = []
        for k, each in enumerate(fresh):
            own_seed = seed if k == 0 else derive_seed(seed, "component", k)
            with share_of_time(1 / (self.components - k)):
                found.append(each.starting_at(self._start(each, rows, held_out, own_seed, progress, engine) or {}))
        return found

    def _objective(
        self, components: list[MeanFieldObjective], x: Tensor, y: Tensor, engine: Engine
    ) -> ComponentsTogether | ComponentsInTurn:
        """Components side by side where the network allows it and it is quicker, in turn elsewhere."""
        model = components[0].model
        size = sum(value.numel() for value in model.params().values())
        if self.vectorise is False or (self.vectorise is None and (size > _TOGETHER_BELOW or self.components == 1)):
            return ComponentsInTurn(components)
        mode = engine.mode if engine.mode in ("eager", "compiled") else "traced"
        together = ComponentsTogether(components, mode=mode)
        if engine.precision != "full":
            why = f"precision={engine.precision!r} is for one network at a time"
        elif not model.network.is_steady(model.network_params(model.params()), x, model.buffers()):
            why = "batch statistics or dropout make its training mode differ from its evaluation mode"
        elif not together.vectorises(x, y):
            why = "vmap cannot take one of its operations"
        else:
            return together
        if self.vectorise:
            raise Unsupported(
                f"vectorise=True: components cannot go through this network in one call: {why}. Leave vectorise out to "
                f"take them in turn."
            )
        return ComponentsInTurn(components)


def _centres(posterior: Posterior, count: int, model: Model, seed: int) -> list[Params]:
    """Where the components begin: at the members or atoms of a posterior or at its mean, and then at draws."""
    like = means_for("start", model, posterior)
    if isinstance(posterior, Mixture):
        found = [member.mean() for member in posterior.members[:count]]
    elif isinstance(posterior, Particles):
        places = torch.arange(min(count, len(posterior)), device=posterior.model.device)
        atoms = posterior._atoms(places)
        found = [{**posterior.points, **index_params(atoms, k)} for k in range(len(places))]
    else:
        found = [posterior.mean()]
    if len(found) < count:
        drawn = posterior.sample(count - len(found), generator_for(seed, "start", device=posterior.model.device))
        found += [index_params(drawn, k) for k in range(count - len(found))]
    return [{name: each[name].to(value) for name, value in like.items()} for each in found]
