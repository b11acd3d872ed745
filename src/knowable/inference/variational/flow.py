"""Variational inference with normalising flows (Rezende and Mohamed, 2015; Dinh et al., 2017)."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from knowable.core.model.joint_normal import check_has
from knowable.core.model.model import Model
from knowable.core.model.prior import JointPrior
from knowable.core.network.params import Layout, Params
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_choice, check_count
from knowable.core.support.randomness import fast_randn, generator_for, own_randomness
from knowable.errors import Unsupported
from knowable.inference.variational.flow_layers import (
    KINDS,
    Bijection,
    CouplingLayer,
    PlanarLayer,
    make_layers,
    through_planes,
)
from knowable.inference.variational.method import VariationalMethod, check_normals
from knowable.inference.variational.structured import (
    Family,
    FamilyModule,
    StructuredObjective,
    check_groups,
    group_weights,
    lower_factor,
)

_LAYERS, _FEWER_LAYERS, _MANY = 8, 4, 10_000  # and 4 for more weights than that, and of real NVP
_WIDEST, _NUMBERS = 32, 4096  # hidden units, and their number times that of the weights
_CORRELATED_UP_TO = 300  # weights
_STEPS_OF_A_BASE = 10  # after which the base absorbs what was learned


@dataclass(frozen=True)
class Flow(Family):
    r"""A normalising flow: invertible maps turn a normal distribution into one of any shape.

    .. math:: \theta = m + A f_L(\cdots f_1(\epsilon)), \qquad
        \log q(\theta) = \log N(\epsilon) - \sum_l \log\det f_l - \log\det A

    With maps that change nothing it is a normal with covariance :math:`A A^\top`: A is any lower triangular matrix for
    groups of up to 300 weights, and diagonal for larger ones.

    Args:
        kind: ``"planar"`` or ``"radial"`` (Rezende and Mohamed, 2015): each layer bends the distribution at a plane, or
            around a point; two numbers a weight and layer, and one. ``"real_nvp"`` (Dinh et al., 2017): each layer
            scales and shifts every second weight by a small network of the others; more general, and slower to
            learn.
        layers: How many maps; None is 8, and 4 of real NVP or for more than 10,000 weights.
        hidden: Width of real NVP's small networks; None is 32 for up to 128 weights and less for more, down to 1, so
            that a layer has at most a few numbers for each of many weights.

    Example:
        >>> Flow("real_nvp", layers=6)
        Flow(kind='real_nvp', layers=6, hidden=None)
    """

    kind: str = "planar"
    layers: int | None = None
    hidden: int | None = None

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, KINDS)
        if self.layers is not None:
            check_count("layers", self.layers)
        if self.hidden is not None:
            check_count("hidden", self.hidden)

    def build(self, layout: Layout, loc: Tensor, initial_scale: float) -> FlowModule:
        """See :meth:`Family.build`; the directions of the layers are drawn from the global generator."""
        size = len(loc)
        few = self.kind == CouplingLayer.kind or size > _MANY
        count = self.layers or (_FEWER_LAYERS if few else _LAYERS)
        hidden = self.hidden or max(1, min(_WIDEST, _NUMBERS // size))
        layers = make_layers(self.kind, size, count, hidden=hidden, like=loc)
        scale = torch.full_like(loc, initial_scale)
        return FlowModule(layout, NormalisingFlow(loc, scale, layers, correlated=size <= _CORRELATED_UP_TO))


class FlowModule(FamilyModule):
    """A flow that is being trained; ``age`` is the number of steps made."""

    stretches: ClassVar[bool] = True
    age: Tensor

    def __init__(self, layout: Layout, flow: NormalisingFlow):
        super().__init__(layout)
        self.flow = flow
        self.register_buffer("age", torch.zeros((), dtype=torch.int64))

    def draw(self, count: int) -> tuple[Tensor, Tensor]:
        """K draws and their log densities."""
        return self.flow.draw(fast_randn(count, self.flow.size, like=self.flow.loc))

    def held_log_density(self, values: Tensor) -> Tensor | None:
        """By going back through the maps; None for planar ones, where that takes many small steps."""
        if any(isinstance(layer, PlanarLayer) for layer in self.flow.layers):
            return None
        held = {f"flow.{name}": value.detach() for name, value in self.flow.named_parameters()}
        return torch.func.functional_call(_Backwards(self.flow), held, (values,))

    @property
    def prefers_path(self) -> bool:
        """Up to a few hundred weights, which a flow can follow closely: the noise of the gradient then fades."""
        return self.flow.base is not None

    def after_step(self) -> None:
        """Every ten steps, let the base absorb what was learned; the distribution stays the same."""
        self.age += 1
        if self.flow.base is not None and self.age % _STEPS_OF_A_BASE == 0:
            self.flow.absorb()

    def fit_normal(self, mean: Tensor, precision: Tensor) -> None:
        """The normal itself, and maps that change nothing; there is no rule for more than 300 weights."""
        if self.flow.base is None:
            super().fit_normal(mean, precision)
        self.flow.become_normal(mean, lower_factor(precision))

    def posterior(self, model: Model, **common: Any) -> FlowPosterior:
        """The flow as it is now."""
        return FlowPosterior(model, self.layout, self.flow, **common)


class _Backwards(nn.Module):
    """The log density of weights, for use with other parameters in the place of the flow's own."""

    def __init__(self, flow: NormalisingFlow):
        super().__init__()
        self.flow = flow

    def forward(self, values: Tensor) -> Tensor:
        return self.flow.inverse(values)[1]


@dataclass(frozen=True, repr=False, kw_only=True)
class FlowVI(VariationalMethod):
    r"""A normal distribution bent by invertible maps into any shape, fitted by maximising the evidence lower bound.

    .. math:: \theta = m + A f_L(\cdots f_1(\epsilon)), \qquad \epsilon \sim \mathcal{N}(0, I)

    For posteriors that are not normal: curved, skewed, with heavy tails. Up to 300 weights A is lower triangular, so
    that a normal with all correlations is a member: on a normal posterior it ends where ``FullRankVI`` does. With more
    weights A is diagonal. It starts as a mean-field normal, and the expected log density of q has no closed form, so
    that its gradients are noisier than those of normals: a few ``draws`` a step are worth their time. Maps of all
    weights of a large network are coarse; a flow is best given to the weights that matter,
    ``MeanFieldVI(families={"last_layer": Flow()})``, or to a model in which only those are random.

    Args:
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size of the optimiser; None chooses it from the number of parameters.
        batch_size: Rows per step; None is all rows up to 1,024 and 128 beyond.
        training: Optimiser, gradient clipping, patience, divergence and accumulation: ``kn.Training(...)``.
        beta: Factor on the KL: every row counts 1/beta times. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which that factor rises to its full value, which changes only the path. None: about 2,000
            steps, at most a third of the epochs.
        start: ``"network"`` (the network's own weights are the first means), ``"map"`` (those of a MAP fit, in which
            learned scales of the prior stay at their initial values), or a fitted posterior.
        initial_scale: Standard deviation of all weights at the start.
        temperature: T of the tempered posterior p(θ | D)^(1/T); anything but 1 is not the Bayes posterior.
        draws: Weight draws per step; None is one.
        families: Families for groups of weights by name, glob or ``"last_layer"``, such as
            ``{"head.*": kn.families.FullRank()}``; the first match wins. All other weights have the method's own.
        kl_gradient: ``"closed"``: from the closed form of the KL, where there is one. ``"path"``: along the draws that
            the likelihood is given (Roeder et al., 2017), whose noise cancels as q approaches the posterior.
            ``"auto"``: ``"path"`` for a full covariance, or a radial or real NVP flow, of up to 300 weights. All aim at
            the same optimum.
        kind: ``"planar"``, ``"radial"`` or ``"real_nvp"``, see
            :class:`~knowable.inference.variational.flow.Flow`.
        layers: How many maps; None is 8, and 4 of real NVP or for more than 10,000 weights.
        hidden: Width of real NVP's small networks; None is 32 for up to 128 weights and less for more.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.FlowVI(epochs=300).fit(model, (x, 2 * x))
        >>> posterior.log_prob(posterior.sample(5)).shape
        torch.Size([5])
    """

    family = "variational"
    says_rise = True
    summary = "a normal bent by invertible maps, for posteriors of any shape"
    aliases = ("flow",)
    references = ("rezende2015", "dinh2017", "roeder2017")

    initial_scale: float = 0.02
    temperature: float = 1.0
    draws: int | None = None
    families: Mapping[str, Family] | None = None
    kl_gradient: str = "auto"
    kind: str = Flow.kind
    layers: int | None = None
    hidden: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_normals(self.initial_scale, self.beta, self.temperature)
        check_groups(self.draws, self.families, self.kl_gradient)
        Flow(self.kind, self.layers, self.hidden)  # which checks them

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> StructuredObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data."""
        groups = group_weights(self.families or {}, Flow(self.kind, self.layers, self.hidden), model)
        return StructuredObjective(
            model, size, groups, kl_gradient=self.kl_gradient, draws=self.draws or 1, **self.elbo_settings(start)
        )


_MOST_DRAWS, _FEWEST_DRAWS = 16_384, 256  # for the moments
_VALUES = 2**24  # numbers drawn for the moments, where that is enough draws
_BLOCK = 2**22  # numbers in memory at a time


class FlowPosterior(Posterior):
    """A standard normal pushed through invertible maps, see :class:`NormalisingFlow`.

    The density of any weights is found by going back through the maps, in double precision: in closed form for real
    NVP and radial layers, by solving an increasing equation for one number in planar ones. Means and standard
    deviations have no closed form: they are those of some thousand fixed draws (16,384 up to 1,024 weights, fewer
    beyond), in pairs of opposite noise, and so carry an error of less than one hundredth of a standard deviation up to
    1,024 weights.

    Args:
        model: The model.
        layout: Order of the random parameters in the flat vector.
        flow: The distribution of the flat vector; it is copied.
        common: See :class:`Posterior`.
    """

    family = "flow"

    def __init__(self, model: Model, layout: Layout, flow: NormalisingFlow, **common: Any):
        super().__init__(model, **common)
        self.layout = layout
        self.flow = copy.deepcopy(flow).requires_grad_(False)
        self._exact: NormalisingFlow | None = None  # in double precision, made when a density is first asked for
        self._moments: tuple[Tensor, Tensor] | None = None  # made when they are first asked for

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        return self.layout.views(self._draws(n, generator)[0])

    def _draws(self, n: int, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
        loc = self.flow.loc
        noise = torch.randn((n, len(loc)), generator=generator, dtype=loc.dtype, device=loc.device)
        return self.flow(noise)

    def log_prob(self, params: Params) -> Tensor:
        """Log density of the random parameters in ``params``: a scalar for one draw, ``(n,)`` for a stack."""
        check_has(params, self.layout.names)
        if self._exact is None:
            self._exact = copy.deepcopy(self.flow).double()
        values = self.layout.flatten(params)
        stack = values.double().reshape(-1, values.shape[-1])
        return self._exact.inverse(stack)[1].reshape(values.shape[:-1]).to(values.dtype)

    def as_prior(self) -> JointPrior:
        """Refused: priors that were posteriors are normal."""
        raise Unsupported(
            "A FlowPosterior cannot be the prior of the next data set: only normal posteriors can. Fit MeanFieldVI or "
            "Laplace for that."
        )

    def _mean_random(self) -> Params:
        return self.layout.views(self._mean_and_std()[0].clone())

    def _std_random(self) -> Params:
        return self.layout.views(self._mean_and_std()[1].clone())

    def _mean_and_std(self) -> tuple[Tensor, Tensor]:
        if self._moments is None:
            self._moments = _moments_of(self.flow)
        return self._moments

    def _tensors(self) -> dict[str, Tensor]:
        return dict(self.flow.state_dict())

    def _settings(self) -> dict[str, Any]:
        layers = self.flow.layers
        hidden = [layer.hidden for layer in layers if isinstance(layer, CouplingLayer)]
        return {
            "names": list(self.layout.names),
            "kind": str(layers[0].kind),
            "layers": len(layers),
            "hidden": hidden[0] if hidden else 1,
        }

    @classmethod
    def _from_tensors(
        cls, model: Model, tensors: dict[str, Tensor], *, names: list[str], kind: str, layers: int, hidden: int,
        **common: Any,
    ) -> FlowPosterior:  # fmt: skip
        start = model.params()
        layout = Layout.of({name: start[name] for name in names})
        loc, correlated = tensors["loc"], "base" in tensors  # folders of version 0.1.0 have none
        if max(layers, hidden) > sum(value.numel() for value in tensors.values()):
            raise ValueError(f"{layers} layers with {hidden} units would have more numbers than were saved")
        with own_randomness(0):  # new layers are drawn at random, and then given their saved values
            made = make_layers(kind, layout.size, layers, hidden=hidden, like=loc)
        flow = NormalisingFlow(loc, torch.ones_like(loc), made, correlated=correlated)
        flow.load_state_dict(tensors)
        return cls(model, layout, flow, **common)


def _moments_of(flow: NormalisingFlow) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation ``(D,)`` over fixed draws, each with its mirror image: what is odd cancels."""
    size, loc = flow.size, flow.loc if flow.centre is None else flow.centre
    pairs = max(_FEWEST_DRAWS, min(_MOST_DRAWS, _VALUES // size)) // 2
    block = max(1, min(pairs, _BLOCK // (2 * size)))
    generator = generator_for(0, "moments of a flow", device=loc.device)
    total = torch.zeros(size, dtype=torch.float64, device=loc.device)
    squares = torch.zeros_like(total)
    for first in range(0, pairs, block):
        noise = torch.randn((min(block, pairs - first), size), generator=generator, dtype=loc.dtype, device=loc.device)
        away = flow(torch.cat([noise, -noise]))[0].double() - loc.double()  # small numbers: no cancellation
        total += away.sum(0)
        squares += away.square().sum(0)
    mean = total / (2 * pairs)
    variance = (squares / (2 * pairs) - mean.square()).clamp_min(0.0)
    return (loc.double() + mean).to(loc.dtype), variance.sqrt().to(loc.dtype)


class NormalisingFlow(nn.Module):
    r"""The distribution of :math:`\theta = m + s \odot f_L(\cdots f_1(\epsilon))`, with ε standard normal.

    .. math:: \log q(\theta) = \log N(\epsilon \mid 0, I) - \sum_l \log\det f_l - \sum_d \log s_d

    The layers act on numbers of about size one, whatever the weights' own scale is. Without layers it is a mean-field
    normal, and with new ones too: they begin as the identity.

    A ``correlated`` flow is :math:`\theta = c + B\,(m + s \odot (I + R)\, f_L(\cdots f_1(\epsilon)))`, R being strictly
    lower triangular. The centre c and the lower triangular B are fixed for some steps and then absorb m, s and R: steps
    are in units of the distribution itself, as in :class:`~knowable.inference.variational.full_rank.FullRankModule`.

    Args:
        loc: The first means, ``(D,)``.
        scale: The first standard deviations, ``(D,)``.
        layers: The maps f, first to last.
        correlated: Whether there are c, B and R.
    """

    centre: Tensor | None
    base: Tensor | None

    def __init__(self, loc: Tensor, scale: Tensor, layers: Sequence[Bijection], *, correlated: bool = False):
        super().__init__()
        loc, scale = loc.detach().clone(), scale.detach()
        self.register_buffer("centre", loc if correlated else None)
        self.register_buffer("base", scale.diag() if correlated else None)
        self.loc = nn.Parameter(torch.zeros_like(loc) if correlated else loc)
        self.log_scale = nn.Parameter(torch.zeros_like(scale) if correlated else scale.log())
        self.mix = nn.Parameter(loc.new_zeros(len(loc), len(loc))) if correlated else None  # √D R and more above
        self.layers: Sequence[Bijection] = nn.ModuleList(layers)  # type: ignore[assignment]

    @property
    def size(self) -> int:
        """Length of the vectors, D."""
        return len(self.loc)

    def forward(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Draws ``(n, D)`` made of standard normal ``noise`` ``(n, D)``, and their log densities ``(n,)``."""
        values, log_det = noise, noise.new_zeros(())
        for layer in self.layers:
            values, change = layer(values)
            log_det = log_det + change
        return self._placed(noise, values, log_det)

    def draw(self, noise: Tensor) -> tuple[Tensor, Tensor]:
        """The same as calling it, in fewer passes over memory where there are; its gradient has no further one."""
        planes = [layer for layer in self.layers if isinstance(layer, PlanarLayer)]
        if not planes or len(planes) < len(self.layers):
            return self(noise)
        return self._placed(noise, *through_planes(noise, planes))

    def _placed(self, noise: Tensor, values: Tensor, log_det: Tensor) -> tuple[Tensor, Tensor]:
        """Draws at their own place and scale, and their log densities."""
        if self.mix is not None:
            values = values + values @ self._lower().T
        placed = torch.addcmul(self.loc, values, self.log_scale.exp())
        if self.base is not None and self.centre is not None:
            placed = torch.addmm(self.centre, placed, self.base.T)
        return placed, _standard_normal(noise) - log_det - self._log_det()

    def inverse(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The noise ``(n, D)`` that ``values`` ``(n, D)`` are made of, and their log densities ``(n,)``."""
        if self.base is not None and self.centre is not None:
            values = torch.linalg.solve_triangular(self.base, (values - self.centre).T, upper=False).T
        noise, log_det = (values - self.loc) * (-self.log_scale).exp(), self._log_det()
        if self.mix is not None:
            noise = torch.linalg.solve_triangular(self._lower(), noise.T, upper=False, unitriangular=True).T
        for layer in reversed(self.layers):
            noise, change = layer.inverse(noise)
            log_det = log_det + change
        return noise, _standard_normal(noise) - log_det

    def _log_det(self) -> Tensor:
        """Of what follows the layers."""
        total = self.log_scale.sum()
        return total if self.base is None else total + self.base.diagonal().log().sum()

    def _lower(self) -> Tensor:
        """R, ``(D, D)``."""
        assert self.mix is not None
        return self.mix.tril(-1) / math.sqrt(self.size)

    @torch.no_grad()
    def absorb(self) -> None:
        """Let c and B take over m, s and R, of a correlated flow; the distribution stays the same."""
        assert self.base is not None and self.centre is not None
        scale = self.log_scale.exp()
        factor = scale.unsqueeze(1) * self._lower() + scale.diag()
        self._begin_at(self.centre + self.base @ self.loc, self.base @ factor)

    @torch.no_grad()
    def become_normal(self, mean: Tensor, factor: Tensor) -> None:
        """Let a correlated flow be the normal with a mean ``(D,)`` and the Cholesky factor of a covariance."""
        self._begin_at(mean, factor)
        for layer in self.layers:
            layer.become_identity()

    def _begin_at(self, centre: Tensor, base: Tensor) -> None:
        assert self.base is not None and self.centre is not None and self.mix is not None
        self.centre.copy_(centre)
        self.base.copy_(base)
        for value in (self.loc, self.log_scale, self.mix):
            value.zero_()


def _standard_normal(noise: Tensor) -> Tensor:
    """Log density of each row."""
    return -0.5 * noise.square().sum(-1) - 0.5 * noise.shape[-1] * math.log(2 * math.pi)
