"""Mixtures of mean-field normals (Jaakkola and Jordan, 1998; Gershman, Hoffman and Blei, 2012)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from knowable.core.compiling.engine import Engine
from knowable.core.compiling.recorder import Recorded, unchecked_distributions
from knowable.core.method import FitJob
from knowable.core.model.data import Data
from knowable.core.model.model import Model
from knowable.core.network.batched import batched, no_hidden_loops
from knowable.core.network.params import Layout, Params, index_params
from knowable.core.posterior.diagnostics import Diagnostics, LogEvidence
from knowable.core.posterior.mixture import Mixture
from knowable.core.posterior.normal import DiagonalNormal
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_choice, check_count, check_type
from knowable.core.support.randomness import derive_seed, fast_randn, generator_for, own_randomness
from knowable.core.support.time_limit import share_of_time
from knowable.core.training.loop import train
from knowable.core.training.objective import Objective
from knowable.errors import Unsupported
from knowable.inference.point.point import fresh_start, means_for, training_diagnostics
from knowable.inference.variational.divergence import entropy_of_normals, remaining_kl
from knowable.inference.variational.gaussian_weight import local_weights, plain_local_rule
from knowable.inference.variational.mean_field import MeanFieldObjective, MeanFieldVI
from knowable.inference.variational.method import VariationalMethod, check_normals, final_elbo, start_values

ESTIMATORS = ("auto", "local", "weight")
_TOGETHER_BELOW = 100_000  # parameters; beyond it a batched step is no quicker than one component after the other


@dataclass(frozen=True, repr=False, kw_only=True)
class MixtureVI(VariationalMethod):
    r"""Several mean-field normals of equal weight, each around a mode of its own, trained together.

    .. math:: q(\theta) = \frac1K \sum_k q_k(\theta), \qquad q_k(\theta) = \prod_d \mathcal{N}(m_{kd}, s_{kd}^2)

    What is maximised is the mean of the components' ELBOs. It is a lower bound of the mixture's own ELBO, since the
    entropy is concave, and so of the log evidence:

    .. math:: \frac1K \sum_k \mathrm{ELBO}(q_k) \;\le\; \mathrm{ELBO}(q)
        = \frac1K \sum_k \mathrm{ELBO}(q_k) + I \;\le\; \log p(D), \qquad 0 \le I \le \log K

    I is the mutual information of a draw and its component: log K where the components do not overlap. The posterior's
    ``log_evidence`` is the mixture's own ELBO, by Monte Carlo with its standard error; the report has the mean of the
    components' as ``mean_elbo`` and I as ``separation``, and every member its own ELBO. Training does not drive
    components apart: they differ because they start apart, and two that end in the same mode count it twice. With one
    component it is :class:`~knowable.inference.variational.mean_field.MeanFieldVI`.

    In networks without batch statistics and dropout all components take one batched call; in others each goes through
    the network in turn, at every step. Parameters that are point estimates are the same for all components.

    Args:
        components: How many normals are mixed.
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size of the optimiser; None chooses it from the number of parameters.
        batch_size: Rows per step; None is all rows up to 1,024 and 128 beyond.
        training: Optimiser, gradient clipping, patience, divergence and accumulation: ``kn.Training(...)``.
        beta: Factor on the KL: every row counts 1/beta times. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which that factor rises to its full value, which changes only the path. None: about 2,000
            steps, at most a third of the epochs.
        start: Where the components begin. ``"network"``: the first at the network's own weights, the others at new
            initial ones. ``"map"``: at the modes that MAP fits from there find. A posterior: at its members' means (a
            mixture) or its atoms (an ensemble), as far as there are any, else at its mean, and then at draws.
        initial_scale: Standard deviation of all weights at the start.
        temperature: T of the tempered posterior p(θ | D)^(1/T); anything but 1 is not the Bayes posterior.
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
    says_rise = True
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

    def _maximise_elbo(self, job: FitJob) -> Mixture:
        model, rows, seed, engine = job.model, job.rows, job.seed, job.engine
        with own_randomness(derive_seed(seed, "start")), share_of_time(0.3):
            x, y = rows.first[:2]
            components = [self.objective(each, x, rows.size) for each in self._starts(job)]
            objective = self._objective(components, x, y, engine)
        job = replace(job, label=f"{type(self).__name__}, {self.components} components")
        with share_of_time(0.9):  # the rest is for the final ELBO
            options = {**job.options, "identity": {**job.identity, "engine": repr(engine)}}
            result = train(objective, rows, self.training_settings(), **options)
        trained: Sequence[MeanFieldObjective] = list(objective.components)  # type: ignore[arg-type]
        result, rise = self._settle(trained, rows, seed, result)
        evidence, terms, each = mixture_elbo(trained, rows, seed, result.epochs)
        points = trained[0].point_params()
        members = [
            DiagonalNormal(
                model, *component.loc_and_scale(), points=points, buffers=component.net_buffers, seed=seed,
                log_evidence=own, diagnostics=Diagnostics(repr(self._single()), own_terms, message=result.message),
            )
            for component, (own, own_terms) in zip(trained, each, strict=True)
        ]  # fmt: skip
        mixture = Mixture(model, members, points=points, seed=seed, log_evidence=evidence)
        notes = (*self._notes(model, rows.size, result), *rows.sample_notes)
        mixture.diagnostics = training_diagnostics(self, model, result, mixture.mean(), {**terms, **rise}, notes)
        return mixture

    def _single(self) -> MeanFieldVI:
        """The method that fits one component by itself."""
        shared = [each.name for each in fields(MeanFieldVI) if hasattr(self, each.name)]
        return MeanFieldVI(**{name: getattr(self, name) for name in shared})

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


_MOST_DRAWS, _FEWEST_DRAWS = 2048, 32  # of each component
_VALUES = 2**26  # numbers drawn for I, where that is enough draws
_BLOCK = 2**21  # numbers in memory at a time


def mixture_elbo(
    components: Sequence[MeanFieldObjective], data: Data, seed: int, epochs: float = math.inf
) -> tuple[LogEvidence | None, dict[str, float], list[tuple[LogEvidence | None, dict[str, float]]]]:
    r"""The mixture's ELBO and its terms, and those of every component by itself.

    .. math:: \mathrm{ELBO}(q) = \frac1K \sum_k \mathrm{ELBO}(q_k) + I, \qquad
        I = \frac1K \sum_k E_{q_k}\Big[\log \frac{q_k(\theta)}{q(\theta)}\Big] \in [0, \log K]

    I needs no network, only densities of normals.
    """
    each = [
        final_elbo(component, data, seed if k == 0 else derive_seed(seed, "component", k), epochs)
        for k, component in enumerate(components)
    ]
    mean = {name: sum(terms[name] for _, terms in each) / len(each) for name in each[0][1]}
    with torch.no_grad(), own_randomness(derive_seed(seed, "separation")):
        gain, gain_error = separation(*torch.stack([each.q.detach().double() for each in components], dim=1))
    own = {"kl": mean["kl"] - gain, "elbo": mean["elbo"] + gain, "mean_elbo": mean["elbo"], "separation": gain}
    terms = {**mean, **own}
    bounds = [bound for bound, _ in each if bound is not None]
    if len(bounds) < len(each):
        return None, terms, each  # the prior is improper: there is no evidence
    error = math.hypot(*(bound.standard_error for bound in bounds)) / len(bounds)
    return LogEvidence(terms["elbo"], "bound", math.hypot(error, gain_error)), terms, each


def separation(loc: Tensor, log_scale: Tensor) -> tuple[float, float]:
    """The mutual information I for normals with means and log scales ``(K, D)``, and its standard error."""
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
    )  # (K, draws), up to a shared constant
    return log_densities[k] - log_densities.logsumexp(0) + math.log(len(loc))


class ComponentsInTurn(Objective):
    """The mean loss of components that go through the network one after the other, in training mode.

    It suits every network. Each component has buffers (running statistics) of its own.
    """

    def __init__(self, components: Sequence[MeanFieldObjective]):
        super().__init__(components[0].model, components[0].size)
        self.components = nn.ModuleList(components)
        for each in components[1:]:
            each.points = components[0].points
        for each in components[0].points:  # they learn by the mean of the losses, a component by its own
            each.register_hook(lambda gradient: gradient / len(components))

    @property
    def settles_from(self) -> float:
        """The end of the KL's warm-up."""
        return self.components[0].settles_from  # type: ignore[return-value]

    @property
    def dimension(self) -> int:
        """How many numbers one component trains."""
        return self.components[0].dimension  # type: ignore[return-value]

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss of a batch and the means of its terms."""
        losses, terms = [], []
        for each in self.components:
            each.epoch = self.epoch  # type: ignore[assignment]
            loss, own = each(x, y, weights)
            losses.append(loss)
            terms.append(own)
        means = {name: torch.stack([own[name] for own in terms]).mean() for name in terms[0]}
        total = torch.stack(losses).sum()  # whose gradient is every component's own
        return total + (total / len(losses) - total).detach(), means

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log density of held-out rows under the mixture."""
        return _mixed_log_likelihood(list(self.components), x, y)  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor]:
        """All components' parameters and buffers."""
        found: dict[str, Tensor] = {f"parameter.{name}": value for name, value in self.named_parameters()}
        for k, each in enumerate(self.components):
            found |= {f"buffer.{k}.{name}": value for name, value in each.net_buffers.items()}  # type: ignore[union-attr]
        return found

    def clip_gradient(self, most: float) -> None:
        """Shorten the gradient of each component by itself, and that of the point estimates."""
        if len(self.components) == 1:
            super().clip_gradient(most)
            return
        for own in (*([each.q] for each in self.components), list(self.components[0].points)):  # type: ignore[arg-type]
            nn.utils.clip_grad_norm_(own, most)  # type: ignore[arg-type]


class ComponentsTogether(Objective):
    """The average loss of components that go through the network in one batched call, in evaluation mode.

    It is for networks without batch statistics and dropout, which are the same in both modes. Linear layers whose
    weights act once per example are sampled locally, as in :class:`MeanFieldObjective`. Losses and gradients come from
    one recorded graph.

    Attributes:
        q: Means and log scales of all components, ``(K, 2, D)``, laid out as one component's.
        points: The point estimates, flat; None if there are none.
    """

    def __init__(self, components: Sequence[MeanFieldObjective], *, mode: str = "traced"):
        first = components[0]
        super().__init__(first.model, first.size)
        self._components = tuple(components)  # a tuple: their parameters are not this module's
        self.net_buffers = first.net_buffers
        self.q = nn.Parameter(torch.stack([each.q.detach() for each in components]))
        points = {name: value.detach() for name, value in first.point_params().items()}
        self.point_layout = Layout.of(points)
        self.points = nn.Parameter(self.point_layout.flatten(points)) if points else None
        self._bounds = Recorded(self.losses_and_gradients, mode)

    @property
    def settles_from(self) -> float:
        """The end of the KL's warm-up."""
        return self._components[0].settles_from

    @property
    def dimension(self) -> int:
        """How many numbers one component trains."""
        return self._components[0].dimension

    @property
    def components(self) -> tuple[MeanFieldObjective, ...]:
        """The components as they are now."""
        with torch.no_grad():
            for each, q in zip(self._components, self.q, strict=True):
                each.q.copy_(q)
                each.net_buffers = self.net_buffers
                if self.points is not None:
                    now = self.point_layout.views(self.points)
                    for name, value in each.point_params().items():
                        value.copy_(now[name])
        return self._components

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss of a batch and the means of its terms."""
        by_q, by_points, loss, terms = self._evaluate(x, y, weights)
        known = (self.q * by_q).sum()
        if self.points is not None:
            known = known + (self.points * by_points).sum()
        return loss + (known - known.detach()), terms

    def whole_step(self, optimiser: torch.optim.Optimizer, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A step of all components without autograd."""
        self.q.grad, by_points, loss, terms = self._evaluate(*batch)
        if self.points is not None:
            self.points.grad = by_points
        optimiser.step()
        return loss, terms

    def clip_gradient(self, most: float) -> None:
        """Shorten the gradient of each component by itself, and that of the point estimates."""
        if self.points is not None:
            nn.utils.clip_grad_norm_([self.points], most)
        gradient = self.q.grad
        assert gradient is not None
        norm = gradient.flatten(1).norm(dim=1)
        gradient.mul_((most / (norm + 1e-6)).clamp_max(1.0).view(-1, 1, 1))

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log density of held-out rows under the mixture."""
        return _mixed_log_likelihood(self.components, x, y)

    def vectorises(self, x: Tensor, y: Tensor) -> bool:
        """Whether ``vmap`` takes the network and its priors: tried on two rows."""
        trial = batched(self.losses_and_gradients, lambda *_: None)  # the network's own errors come again in turn
        trial(*self._inputs(x[:2], y[:2]))
        return not trial.refused

    def _evaluate(
        self, x: Tensor, y: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Gradients of the components' own losses and, of the mean loss, in the points; the mean loss and its terms."""
        by_q, by_points, losses, fit, kl, log_prior = self._bounds(*self._inputs(x, y, weights))
        terms = {"expected_log_likelihood": fit.mean() * self.size, "kl": kl.mean()}
        if self.points is not None:
            terms["log_prior_of_points"] = log_prior
        return by_q.contiguous(), by_points / len(self.q), losses.mean() - log_prior / self.size, terms

    def _inputs(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, ...]:
        first, count = self._components[0], len(self.q)
        first.epoch = self.epoch
        shape = count, first.draws, first.normals.drawn.size
        noise = fast_randn(count * first.draws, first.normals.drawn.size, like=self.q).view(shape)
        weight = torch.full((), first.kl_weight() / self.size, dtype=self.q.dtype, device=self.q.device)
        points = self.q.new_zeros(0) if self.points is None else self.points.detach()
        batch = (x, y) if weights is None else (x, y, weights)
        return self.q.detach(), points, noise, weight, *batch

    def losses_and_gradients(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What is recorded.

        Args:
            inputs: Means and log scales ``(K, 2, D)``; the points; standard normal noise for the drawn weights,
                ``(K, draws, drawn weights)``; the KL's factor over N; inputs and targets of the batch, and the rows'
                weights if they have any.

        Returns:
            The gradients of the sum of all losses in the means and log scales, ``(K, 2, D)``, and in the points; the
            components' losses without the points' prior, expected log likelihoods per example and KLs, each ``(K,)``;
            and the log prior of the points.
        """
        with no_hidden_loops(), unchecked_distributions():
            slopes, (_, terms) = grad_and_value(self._total, argnums=(0, 1), has_aux=True)(*inputs)
        return *slopes, *terms

    def _total(
        self, q: Tensor, points: Tensor, noise: Tensor, weight: Tensor, *batch: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
        one = vmap(self._one, in_dims=(0, None, 0, *(None,) * len(batch)), randomness="different")
        fit, kl, entropy = one(q, points, noise, *batch)
        temperature = self._components[0].temperature
        penalty = kl if temperature == 1.0 else kl - (temperature - 1.0) * entropy
        losses, log_prior = weight * penalty - fit, q.new_zeros(())
        if self.points is not None:
            log_prior = self._components[0].log_prior_of_points(self.point_layout.views(points))
        return losses.sum() - (len(q) / self.size) * log_prior, (losses, fit, kl, log_prior)

    def _one(
        self, q: Tensor, points: Tensor, noise: Tensor, x: Tensor, y: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Expected log likelihood per example, KL and entropy of one component."""
        first = self._components[0]
        loc, log_scale = q[0], q[1]
        scale = log_scale.exp()
        fixed = self.point_layout.views(points)
        kl = torch.stack([segment.value(loc, log_scale, scale) for segment in first.normals.segments]).sum()
        if first.normals.others:
            views = first.layout.views
            kl = kl + remaining_kl(self.model, first.normals.others, views(loc), views(scale), fixed, first.draws)
        cut = first.normals.drawn.size
        fits = []
        for each in noise.unbind(0):
            drawn = first.normals.drawn.views(loc[:cut] + scale[:cut] * each)
            local = first.normals.local
            local = local_weights(local.views(loc[cut:]), local.views(scale[cut:].square()), plain_local_rule)
            params = {**fixed, **drawn, **local}
            output = self.model.forward(params, x, buffers=self.net_buffers)
            fits.append(self.model.score(output, y, params, weights).mean())
        return torch.stack(fits).mean(), kl, entropy_of_normals(log_scale)


def _mixed_log_likelihood(components: Sequence[MeanFieldObjective], x: Tensor, y: Tensor) -> Tensor:
    each = torch.stack([component.predictive_log_likelihood(x, y) for component in components])
    return each.logsumexp(0) - math.log(len(components))
