"""Variational inference in function space (Sun et al., 2019; Rudner et al., 2022)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from knowable.core.method import FitJob
from knowable.core.model.data import Data, as_input
from knowable.core.model.model import Model
from knowable.core.network.inputs import tensors_of
from knowable.core.network.params import Params
from knowable.core.posterior.normal import DiagonalNormal
from knowable.core.posterior.posterior import Posterior
from knowable.core.storage.folder import tensor_fingerprint
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.core.support.randomness import generator_for
from knowable.core.training.loop import TrainingResult
from knowable.errors import InvalidArgument, InvalidData, InvalidType, Unsupported
from knowable.inference.variational.divergence import prior_segments
from knowable.inference.variational.function_space.linearised import LinearisedNetwork
from knowable.inference.variational.function_space.priors import (
    FunctionPrior,
    NetworkPrior,
    PriorValues,
    as_function_prior,
)
from knowable.inference.variational.gaussian_weight import local_rule, local_weights
from knowable.inference.variational.method import VariationalMethod, check_normals, warmup_notes
from knowable.inference.variational.normals import FlatNormalDistribution, FlatNormals, standard_noise
from knowable.inference.variational.objective import (
    VariationalObjective,
    expected_log_likelihood,
    first_values,
    negative_elbo,
)

_NO_BOUND = (
    "log_evidence is None: functions are compared at finitely many points, with the network linearised, which does not "
    "bound the evidence."
)


@dataclass(frozen=True, repr=False, kw_only=True)
class FunctionSpaceVI(VariationalMethod):
    r"""An independent normal for every weight, held to a prior over *functions* instead of one over weights.

    What is maximised, exactly (Rudner et al., 2022):

    .. math:: E_{q(\theta)}[\log p(D \mid \theta)]
        - \beta\, E_C\Big[\sum_o \mathrm{KL}\big(\tilde q(f_o(C)) \,\|\, p(f_o(C))\big)\Big]

    The first term is that of mean-field inference. In the second, C are ``context_points`` inputs drawn again in every
    step, :math:`\tilde q` is the Gaussian process that q becomes when the network is linearised in its weights at their
    means m,

    .. math:: \tilde q(f) = \mathcal{GP}\big(f(\cdot\,; m),\; J \operatorname{diag}(s^2) J^\top\big),

    and p the prior, independent for every output o (function values are all outputs; correlations of q between outputs
    are not counted). Both covariances have a little noise on their diagonal, the ``jitter``. **This does not bound the
    evidence**: the KL at finitely many points is at most that of the whole processes, the points need not contain the
    training inputs, and the network is not linear in its weights. So ``log_evidence`` is None. On a network that is
    linear in its weights, with the kernel that the weights' prior makes and at least as many points as weights, it is
    mean-field inference.

    The model's prior over the network's random weights is not used, unless through ``prior=None``; the likelihood's own
    parameters and weights that are point estimates keep theirs. Predictions use weight draws, not the linearisation.
    The covariance of the context points is cheap for linear layers; for convolutions, attention and recurrent layers it
    takes points × outputs × weights numbers several times over: where these are large make only the last layers random,
    or take fewer points.

    Args:
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size of the optimiser; None chooses it from the number of parameters.
        batch_size: Rows per step; None is all rows up to 1,024 and 128 beyond.
        training: Optimiser, gradient clipping, patience, divergence and accumulation: ``kn.Training(...)``.
        prior: The prior over functions: a kernel
            (:class:`~knowable.inference.variational.function_space.priors.RBFKernel`, ``MaternKernel``,
            ``LinearKernel``, or any of GPyTorch), or a
            :class:`~knowable.inference.variational.function_space.priors.NetworkPrior`. None is ``NetworkPrior()``: the
            functions that the model's own prior over weights makes.
        context: Where functions are compared. ``"box"``: uniformly in the box around the training inputs.
            ``"data"``: at training inputs. A tensor of inputs, or a function ``(count, generator) -> inputs``.
            ``"auto"``: a box where inputs are vectors of up to 16 numbers, else data. A pool of up to 1,024 points is
            drawn once (a tensor is taken whole), and each step takes a few of them at random.
        context_points: How many in each step.
        context_outputs: How many of the network's outputs in each step: of more than these a few are drawn at random
            and count for all, which leaves the mean as it is and costs as much less as there are fewer.
        margin: How far the box reaches beyond the data on each side, as a share of its width.
        jitter: Variance of the noise on function values, as a share of the prior's variance. It is what keeps the
            divergence finite where the prior is smoother than anything the network can do; smaller is stricter.
        draws: Weight draws for the likelihood in each step.
        beta: Factor on the KL. Anything but 1 weighs prior against data otherwise than the model states.
        kl_warmup: Epochs over which that factor rises to its full value.
        start: ``"network"`` (the network's own weights are the first means), ``"map"`` (a MAP fit is, under the model's
            prior over weights), or a fitted posterior.
        initial_scale: Standard deviation all weights start with.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
        >>> method = kn.FunctionSpaceVI(prior=kn.RBFKernel(lengthscale=0.5), epochs=100)
        >>> posterior = method.fit(kn.Model(net, kn.Gaussian(0.1)), (x, x.abs()))
        >>> posterior.log_evidence is None
        True
    """

    family = "variational"
    summary = "an independent normal for every weight, held to a prior over functions"
    aliases = ("fsvi",)
    references = ("rudner2022", "sun2019", "burt2020")

    initial_scale: float = 0.02
    prior: FunctionPrior | Any = None
    context: str | Tensor | DrawPoints = "auto"
    context_points: int = 16
    context_outputs: int = 4
    margin: float = 0.5
    jitter: float = 1e-3
    draws: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_normals(self.initial_scale)
        prior = as_function_prior(self.prior)
        check_context(self.context)
        check_count("context_points", self.context_points)
        check_count("context_outputs", self.context_outputs)
        check_number("margin", self.margin, at_least=0)
        check_number("jitter", self.jitter, above=0)
        check_count("draws", self.draws)
        if isinstance(prior, NetworkPrior) and prior.draws <= self.context_points:
            raise InvalidArgument(
                f"prior has {prior.draws} draws, too few for the covariance of context_points="
                f"{self.context_points} function values. Take some ten times as many draws as points."
            )

    @property
    def makes_inputs(self) -> bool:
        return True

    def _fit(self, job: FitJob) -> Posterior:
        check_model(job.model)
        return super()._fit(job)

    def objective(
        self,
        model: Model,
        x: Tensor,
        size: int,
        *,
        start: Params | None = None,
        pool: Tensor | None = None,
        seed: int = 0,
    ) -> FunctionSpaceObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data that look like ``x``.

        Without a ``pool`` of context points it is made from ``x`` alone.
        """
        pool = self._pool(model, Data((x, x), len(x)), seed) if pool is None else pool
        generator = generator_for(seed, "prior", device=model.device)
        return FunctionSpaceObjective(
            model, x, size, prior=as_function_prior(self.prior).at(pool, model, generator=generator), pool=pool,
            context_points=self.context_points, context_outputs=self.context_outputs, jitter=self.jitter,
            draws=self.draws, **self.elbo_settings(start),
        )  # fmt: skip

    def _objective_for(self, model: Model, rows: Data, seed: int, start: Params | None) -> FunctionSpaceObjective:
        pool = self._pool(model, rows, seed)
        return self.objective(model, rows.first[0], rows.size, start=start, pool=pool, seed=seed)

    def _identity(self, objective: FunctionSpaceObjective) -> dict[str, Any]:
        return {"context": tensor_fingerprint(*tensors_of(objective.pool))}

    def _pool(self, model: Model, data: Data, seed: int) -> Tensor:
        generator = generator_for(seed, "context")
        return context_pool(self.context, data, model, margin=self.margin, generator=generator)

    def _evidence(
        self, objective: FunctionSpaceObjective, rows: Data, seed: int, epochs: float
    ) -> tuple[None, dict[str, float]]:
        return None, {}

    def _notes(self, model: Model, size: int, result: TrainingResult) -> tuple[str, ...]:
        notes = (_NO_BOUND, *warmup_notes(self.kl_warmup or 0, result))
        if self.beta == 1.0:
            return notes
        return (*notes, f"beta={self.beta:g}: prior and data are not weighed as in the model; beta=1 does.")


class FunctionSpaceObjective(FlatNormalDistribution, VariationalObjective):
    r"""- (1/N) of the objective in function space, on the full-data scale.

    .. math:: E_q\Big[\frac{N}{M} \sum_m \log p(y_m \mid x_m, \theta)\Big]
        - \beta\, E_C\Big[\sum_o \mathrm{KL}\big(\tilde q(f_o(C)) \,\|\, p(f_o(C))\big)\Big]
        - \beta\, \mathrm{KL}\big(q(\eta) \,\|\, p(\eta)\big)

    with q independent normals, :math:`\tilde q` the process of the network linearised in its weights at their means, C
    a few points of the pool drawn in every step, o the outputs, and η the likelihood's own parameters, whose prior
    is that of the model. Of many outputs a step takes a few at random, and their part for the whole: that has the same
    mean.
    """

    def __init__(
        self,
        model: Model,
        x: Tensor,
        size: int,
        *,
        prior: PriorValues,
        pool: Tensor,
        context_points: int,
        context_outputs: int,
        jitter: float,
        initial_scale: float = 0.02,
        start: Params | None = None,
        **common: Any,
    ):
        super().__init__(model, size, start=start, **common)
        self.prior, self.pool, self.jitter = prior, pool, jitter
        self.context_points, self.context_outputs = min(context_points, len(pool)), context_outputs
        first = first_values(model, start)
        normals = FlatNormals.of(model, x, first, "auto")
        names = normals.layout.names
        self.network_names = list(model.network_params(dict.fromkeys(names, x)))
        own = [name for name in names if name not in self.network_names]  # weights have empty segments
        segments, others = prior_segments(normals.layout, model, names=own)
        self.hold(replace(normals, segments=tuple(segments), others=tuple(others)), first, initial_scale)
        self.linearised = LinearisedNetwork(model)
        self.outputs = self.linearised.count_outputs(x, model.network_params(model.params()), self.net_buffers)

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms."""
        points = self.point_params()
        noise = standard_noise(self.draws, self.normals.drawn.size, like=self.q)
        kl, loc, variance, draws = self.normals.draw(self.q, noise)
        thetas = [{**draw, **local_weights(loc, variance, local_rule)} for draw in draws]
        log_likelihood = expected_log_likelihood(self, x, y, points, thetas, weights)
        if self.normals.others:
            kl = kl + self.normals.remaining_kl(self.q, self.model, points, self.draws)
        loss, terms = negative_elbo(self, log_likelihood, kl, points)  # its KL is that of the likelihood's parameters
        index = torch.randperm(len(self.pool))[: self.context_points].to(self.pool.device)
        with torch.autocast(x.device.type, enabled=False):
            function_kl = self.function_divergence(index, self._some_outputs(), (loc, variance)).to(loss.dtype)
        loss = loss + (self.kl_weight() / self.size) * function_kl
        value = function_kl.detach()
        return loss, {**terms, "kl": terms["kl"] + value, "function_kl": value}

    def posterior(self, **common: Any) -> DiagonalNormal:
        """Independent normals."""
        return DiagonalNormal(self.model, *self.loc_and_scale(), **self.shared(common))

    def _moments(self, known: tuple[Params, Params]) -> tuple[Params, Params]:
        """Means and variances of the network's random weights: those of this step, as far as they are ``known``."""
        loc, variance = known
        if any(name not in loc for name in self.network_names):
            means, scales = self.loc_and_scale()
            loc = {**means, **loc}
            variance = {name: variance[name] if name in variance else scales[name].square() for name in loc}
        return {name: loc[name] for name in self.network_names}, variance

    def _some_outputs(self) -> Tensor | None:
        """Those that this step looks at; None for all."""
        if self.outputs <= self.context_outputs:
            return None
        return torch.randperm(self.outputs)[: self.context_outputs].to(self.pool.device)

    def function_divergence(
        self, index: Tensor, only: Tensor | None = None, known: tuple[Params, Params] = ({}, {})
    ) -> Tensor:
        """KL of function values at some points of the pool, summed over outputs."""
        loc, variance = self._moments(known)
        fixed = self.model.network_params(self.point_params())
        mean, covariance = self.linearised.moments(
            self.pool[index], loc, variance, fixed=fixed, buffers=self.net_buffers, only=only
        )
        each = process_divergence(mean, covariance, *self.prior.moments(index, only), jitter=self.jitter)
        return each.sum() if only is None else each.mean() * self.outputs


def process_divergence(
    mean: Tensor, covariance: Tensor, prior_mean: Tensor, prior_covariance: Tensor, *, jitter: float = 0.0
) -> Tensor:
    r"""KL of two normal distributions of n function values, for each output, ``(outputs,)``.

    .. math:: \tfrac12 \Big(\operatorname{tr}(K^{-1} S) + (\mu - m)^\top K^{-1} (\mu - m) - n
        + \log\frac{\det K}{\det S}\Big)

    Here, and nowhere else, is the jitter: both covariances get ``jitter`` times the prior's mean variance on their
    diagonal, as if function values were seen with a little independent noise. What is computed is then the KL of the
    noisy values, which is never more than that of the values themselves, and directions in which both processes are
    stiffer than the noise count for nothing.

    Args:
        mean: μ, ``(outputs, n)``, in double precision like the rest.
        covariance: S, ``(outputs, n, n)``.
        prior_mean: m, ``(outputs, n)`` or ``(1, n)`` for all outputs.
        prior_covariance: K, ``(outputs, n, n)`` or ``(1, n, n)``.
        jitter: The noise's variance as a share of the prior's.

    Returns:
        NaN, rather than an error, where a covariance is not positive definite: training then goes back a step.
    """
    return _ProcessDivergence.apply(mean, covariance, prior_mean, prior_covariance, jitter)  # type: ignore[no-any-return]


class _ProcessDivergence(torch.autograd.Function):
    """See :func:`process_divergence`; derivatives in μ and S alone, which are K⁻¹ (μ - m) and (K⁻¹ - S⁻¹) / 2."""

    @staticmethod
    def forward(
        ctx: Any, mean: Tensor, covariance: Tensor, prior_mean: Tensor, prior_covariance: Tensor, jitter: float
    ) -> Tensor:
        noise = jitter * prior_covariance.diagonal(dim1=-2, dim2=-1).mean(-1, keepdim=True)  # (outputs or 1, 1)
        prior_root, root = _cholesky(prior_covariance, noise), _cholesky(covariance, noise)
        log_ratio = (prior_root.diagonal(dim1=-2, dim2=-1).log() - root.diagonal(dim1=-2, dim2=-1).log()).sum(-1)
        prior_root = prior_root.expand_as(root)
        both = torch.cat([root, (mean - prior_mean).unsqueeze(-1)], -1)
        both = torch.linalg.solve_triangular(prior_root, both, upper=False)
        ctx.save_for_backward(root, prior_root, both[..., -1:])
        return 0.5 * (both.square().sum((-2, -1)) - mean.shape[-1]) + log_ratio

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        root, prior_root, shift = ctx.saved_tensors
        by_mean = torch.linalg.solve_triangular(prior_root.mT, shift, upper=True).squeeze(-1)
        by_covariance = torch.cholesky_inverse(prior_root) - torch.cholesky_inverse(root)
        return grad.unsqueeze(-1) * by_mean, (0.5 * grad)[:, None, None] * by_covariance, None, None, None


def _cholesky(covariance: Tensor, noise: Tensor) -> Tensor:
    """The root of a covariance with noise on its diagonal; not a number where there is none."""
    covariance = covariance.clone()
    covariance.diagonal(dim1=-2, dim2=-1).add_(noise)
    root, info = torch.linalg.cholesky_ex(covariance)
    return torch.where((info == 0)[:, None, None], root, torch.nan)


def check_model(model: Model) -> None:
    """Refuse models whose prior over weights has no meaning beside a prior over functions."""
    if model.hyper_names:
        raise Unsupported(
            "FunctionSpaceVI has no use for a prior over weights whose scale is learned: its prior is over functions. "
            "Give the model a prior of fixed scale, or use MeanFieldVI."
        )
    own = [name for name in model.random_names if name not in model.network_params(model.params())]
    if len(own) == len(model.random_names):
        raise Unsupported("FunctionSpaceVI needs random weights in the network: its functions would not vary.")
    if any(model.prior.prior_of(name) is None for name in own):
        raise Unsupported(
            f"The model's prior has correlations between {own[0]!r} and the weights, which FunctionSpaceVI has no "
            f"prior for. Fix the noise, or give it a prior of its own."
        )


# --- context points --------------------------------------------------------------------------------------------------

CONTEXTS = ("auto", "box", "data")
POOL = 1024
"""Most points of a pool that is drawn; a tensor of the user's is taken whole."""
_BOX_INPUTS = 16  # most inputs for which "auto" is a box

DrawPoints = Callable[[int, torch.Generator], Tensor]
"""Draws ``count`` context points: ``(count, generator) -> x``."""


def check_context(context: Any) -> None:
    """Refuse what is neither a name, nor points, nor a function that draws them."""
    if isinstance(context, str):
        check_choice("context", context, CONTEXTS)
    elif isinstance(context, Tensor):
        if context.dim() == 0 or len(context) == 0:
            raise InvalidArgument(f"context must have one row for each point, got shape {tuple(context.shape)}.")
    elif not callable(context) or isinstance(context, type):
        raise InvalidType(
            f"context must be 'auto', 'box', 'data', a tensor of inputs or a function (count, generator) -> inputs; "
            f"got {context!r:.60}."
        )


def context_pool(
    context: str | Tensor | DrawPoints, data: Data, model: Model, *, margin: float, generator: torch.Generator
) -> Tensor:
    """The points at which functions are compared, ``(P, ...)``."""
    if isinstance(context, str):
        points = _points_by_name(context, data, margin, generator)
    else:
        points = context if isinstance(context, Tensor) else _drawn(context, generator)
        points = as_input(points, model, name="context")
    model.network.probe(points, model.network_params(model.params()), model.buffers())
    return points


def _points_by_name(context: str, data: Data, margin: float, generator: torch.Generator) -> Tensor:
    first = data.first[0]
    if context == "auto":
        one = isinstance(first, Tensor) and first.is_floating_point()
        flat = one and first.dim() == 2 and first.shape[1] <= _BOX_INPUTS
        context = "box" if flat else "data"
    if context == "data":
        return some_rows(data, POOL, generator)
    if not first.is_floating_point():
        raise Unsupported("context='box' needs inputs that are numbers; these are whole ones. Use context='data'.")
    low, high = box(data)
    width = high - low
    uniform = torch.rand((POOL, *low.shape), generator=generator, dtype=first.dtype).to(first.device)
    return low - margin * width + (1 + 2 * margin) * width * uniform


def box(data: Data) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of every input."""
    ends = [(batch[0].amin(0), batch[0].amax(0)) for batch in data]
    return torch.stack([low for low, _ in ends]).amin(0), torch.stack([high for _, high in ends]).amax(0)


def some_rows(data: Data, count: int, generator: torch.Generator) -> Tensor:
    """Inputs of ``count`` rows chosen at random without replacement (all, if there are fewer), in one pass."""
    kept, keys = None, torch.zeros(0)
    for batch in data:  # those with the largest random keys of all rows seen so far
        x = batch[0]
        keys = torch.cat([keys, torch.rand(len(x), generator=generator)])
        kept = x if kept is None else torch.cat([kept, x])
        if len(keys) > count:
            keys, best = keys.topk(count)
            kept = kept[best.to(kept.device)]
    assert kept is not None  # data has rows
    return kept


def _drawn(context: DrawPoints, generator: torch.Generator) -> Any:
    points = context(POOL, generator)
    if not isinstance(points, Tensor) or points.dim() == 0 or len(points) == 0:
        raise InvalidData(f"context must return a tensor with a row for each point, got {points!r:.60}.")
    return points
