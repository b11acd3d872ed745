"""Mixtures of mean-field normals (Jaakkola and Jordan, 1998; Gershman, Hoffman and Blei, 2012)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from knowable.core.compiling.engine import Engine
from knowable.core.method import FitJob
from knowable.core.model.data import Data
from knowable.core.model.model import Model
from knowable.core.network.params import Params, index_params
from knowable.core.posterior.diagnostics import Diagnostics, LogEvidence
from knowable.core.posterior.mixture import Mixture
from knowable.core.posterior.normal import DiagonalNormal
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_choice, check_count, check_type
from knowable.core.support.randomness import derive_seed, generator_for, own_randomness
from knowable.core.support.time_limit import share_of_time
from knowable.core.training.loop import train
from knowable.errors import Unsupported
from knowable.inference.point.point import training_diagnostics
from knowable.inference.start import fresh_start, means_for
from knowable.inference.variational.mean_field import MeanFieldObjective, MeanFieldVI
from knowable.inference.variational.method import VariationalMethod, check_normals, final_elbo, start_values
from knowable.inference.variational.mixture_objective import ComponentsInTurn, ComponentsTogether

ESTIMATORS = ("auto", "local", "weight")
_TOGETHER_BELOW = 100_000  # parameters; beyond it a batched step is no quicker than one component after the other


@dataclass(frozen=True, repr=False, kw_only=True)
class MixtureVI(VariationalMethod):
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
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size of the optimiser; None chooses it from the number of parameters.
        batch_size: Rows per step; None is all rows up to 1,024 and 128 beyond.
        training: Optimiser, gradient clipping, patience, divergence and accumulation: ``kn.Training(...)``.
        beta: Factor on the KL: every row counts 1/beta times. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which that factor rises to its full value. It changes the path and not the target. None:
            about 2,000 steps, at most a third of the epochs.
        start: Where the components begin. ``"network"``: the first at the network's own weights, the others at new
            initial ones. ``"map"``: at the modes that MAP fits from there find. A posterior: at its members' means (a
            mixture) or its atoms (an ensemble), as far as there are any, else at its mean, and then at draws.
        initial_scale: Standard deviation of all weights at the start: small, so that training begins like that of a
            point estimate.
        temperature: T of the tempered posterior p(θ | D)^(1/T), as in the samplers: the entropy of q counts T times.
            Anything but 1 is not the Bayes posterior. (``beta`` raises the likelihood alone to the power 1/beta.)
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

    family = "variational"
    summary = "several mean-field normals, each around its own mode, trained together"
    aliases = ("mixture",)
    references = ("jaakkola1998", "bishop1998", "gershman2012")

    initial_scale: float = 0.02
    temperature: float = 1.0
    estimator: str = "auto"
    draws: int = 1
    components: int = field(default=5, kw_only=False)
    vectorise: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_normals(self.initial_scale, self.beta, self.temperature)
        check_count("components", self.components)
        check_choice("estimator", self.estimator, ESTIMATORS)
        check_count("draws", self.draws)
        if self.vectorise is not None:
            check_type("vectorise", self.vectorise, bool, "True, False or None")

    def _fit(self, job: FitJob) -> Mixture:
        """Maximise the mean of the bounds."""
        model, rows, seed, engine = job.model, job.rows, job.seed, job.engine
        with own_randomness(derive_seed(seed, "start")), share_of_time(0.3):
            x, y = next(iter(rows))[:2]
            components = [self.objective(each, x, rows.size) for each in self._starts(job)]
            objective = self._objective(components, x, y, engine)
        job = replace(job, label=f"{type(self).__name__}, {self.components} components")
        with share_of_time(0.9):  # the rest is for the bound
            options = {**job.options, "identity": {**job.identity, "engine": repr(engine)}}
            result = train(objective, rows, self.training_settings(), **options)
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
            epochs=self.epochs, learning_rate=self.learning_rate, batch_size=self.batch_size, training=self.training,
            estimator=self.estimator, draws=self.draws, beta=self.beta, temperature=self.temperature,
            kl_warmup=self.kl_warmup, start=self.start, initial_scale=self.initial_scale,
        )  # fmt: skip

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> MeanFieldObjective:
        """The loss of one component by itself; :meth:`fit` minimises the mean of all components' losses."""
        return MeanFieldObjective(
            model, x, size, estimator=self.estimator, draws=self.draws, **self.elbo_settings(start)
        )

    def _starts(self, job: FitJob) -> list[Model]:
        """The model, begun where each component begins."""
        model, seed = job.model, job.seed
        if isinstance(self.start, Posterior):
            return [model.starting_at(each) for each in _centres(self.start, self.components, model, seed)]
        fresh = [model, *(model.starting_at(*fresh_start(model, seed, k)) for k in range(1, self.components))]
        found = []
        for k, each in enumerate(fresh):
            own_seed = seed if k == 0 else derive_seed(seed, "component", k)
            with share_of_time(1 / (self.components - k)):
                found.append(each.starting_at(start_values(self, replace(job, model=each, seed=own_seed)) or {}))
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


# --- What a mixture of normals says of the evidence ------------------------------------------------------------------
#
# For equal weights the mixture's own bound is the mean of its components' bounds and a gain that is never negative:
#
# .. math:: \mathrm{ELBO}(q) = \frac1K \sum_k \mathrm{ELBO}(q_k) + I, \qquad
#     I = \frac1K \sum_k E_{q_k}\Big[\log \frac{q_k(\theta)}{q(\theta)}\Big] \in [0, \log K]
#
# I is how much a draw tells about which component it came from: 0 where all components are the same, log K where they
# are
# apart. It needs no network, only densities of normals, so that it is cheap to know well.

_MOST_DRAWS, _FEWEST_DRAWS = 2048, 32  # of each component
_VALUES = 2**26  # numbers handled for the gain, where that is enough draws
_BLOCK = 2**21  # numbers in memory at a time


def mixture_bound(
    components: Sequence[MeanFieldObjective], data: Data, seed: int
) -> tuple[LogEvidence | None, dict[str, float], list[tuple[LogEvidence | None, dict[str, float]]]]:
    """The mixture's bound and its terms, and those of every component by itself.

    The terms are the expected log likelihood, the KL from the mixture to the prior, the bound, the mean of the
    components' bounds, and the gain between the two.
    """
    each = [
        final_elbo(component, data, seed if k == 0 else derive_seed(seed, "component", k))
        for k, component in enumerate(components)
    ]
    mean = {name: sum(terms[name] for _, terms in each) / len(each) for name in each[0][1]}
    with torch.no_grad(), own_randomness(derive_seed(seed, "separation")):
        gain, gain_error = separation(*_moments(components))
    terms = {
        **mean,
        "kl": mean["kl"] - gain,
        "elbo": mean["elbo"] + gain,
        "mean_elbo": mean["elbo"],
        "separation": gain,
    }
    bounds = [bound for bound, _ in each if bound is not None]
    if len(bounds) < len(each):
        return None, terms, each  # the prior is improper: there is no evidence to bound
    error = math.hypot(*(bound.standard_error for bound in bounds)) / len(bounds)
    return LogEvidence(terms["elbo"], "bound", math.hypot(error, gain_error)), terms, each


def separation(loc: Tensor, log_scale: Tensor) -> tuple[float, float]:
    """The gain I of an equal mixture of normals with means and log scales ``(K, D)``, and its standard error."""
    count, size = loc.shape
    if count == 1:
        return 0.0, 0.0
    draws = max(_FEWEST_DRAWS, min(_MOST_DRAWS, _VALUES // (count**2 * size)))
    block = max(1, min(draws, _BLOCK // size))
    means, variances = [], []
    for k in range(count):
        parts = [_gains(loc, log_scale, k, min(block, draws - first)) for first in range(0, draws, block)]
        gains = torch.cat(parts)
        means.append(gains.mean().item())
        variances.append(gains.var().item() / draws)
    return sum(means) / count, math.sqrt(sum(variances)) / count


def _gains(loc: Tensor, log_scale: Tensor, k: int, draws: int) -> Tensor:
    """Log q_k - log q at ``draws`` draws of component k."""
    noise = torch.randn((draws, loc.shape[1]), dtype=loc.dtype, device=loc.device)
    values = torch.addcmul(loc[k], log_scale[k].exp(), noise)
    log_densities = torch.stack(
        [
            -0.5 * (noise if j == k else (values - loc[j]) / log_scale[j].exp()).square().sum(1) - log_scale[j].sum()
            for j in range(len(loc))
        ]
    )  # (K, draws), up to a constant that all share
    return log_densities[k] - log_densities.logsumexp(0) + math.log(len(loc))


def _moments(components: Sequence[MeanFieldObjective]) -> tuple[Tensor, Tensor]:
    """Means and log scales of all components in double precision, each ``(K, D)``."""
    loc, log_scale = torch.stack([each.q.detach().double() for each in components], dim=1)
    return loc, log_scale
