"""Variational inference with normalising flows (Rezende and Mohamed, 2015; Dinh et al., 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model.model import Model
from knowable.core.network.params import Layout, Params
from knowable.core.support.checks import check_choice, check_count
from knowable.core.support.randomness import fast_randn
from knowable.inference.variational.family import Family, FamilyModule
from knowable.inference.variational.flow.layers import KINDS, CouplingLayer, PlanarLayer, make_layers
from knowable.inference.variational.flow.posterior import FlowPosterior, NormalisingFlow
from knowable.inference.variational.method import VariationalMethod, check_normals
from knowable.inference.variational.structured import StructuredObjective, check_groups, group_weights

# --- Normalising flows over a group of weights, as a variational family ----------------------------------------------

_LAYERS, _FEWER_LAYERS, _MANY = 8, 4, 10_000  # and 4 for more weights than that, and of real NVP
_WIDEST, _NUMBERS = 32, 4096  # hidden units, and their number times that of the weights
_PATH_BELOW = 300  # weights


@dataclass(frozen=True)
class Flow(Family):
    r"""A normalising flow: invertible maps turn a normal distribution into one of any shape.

    .. math:: \theta = m + s \odot f_L(\cdots f_1(\epsilon)), \qquad
        \log q(\theta) = \log N(\epsilon) - \sum_l \log\det f_l - \sum_d \log s_d

    Args:
        kind: ``"planar"`` or ``"radial"`` (Rezende and Mohamed, 2015): each layer bends the distribution at a plane, or
            around a point; two numbers a weight and layer, and one. ``"real_nvp"`` (Dinh et al., 2017): each layer
            moves every second weight by what the others say, through a small network; more general, and slower to
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
        layers = make_layers(
            self.kind,
            size,
            self.layers or _layers_for(self.kind, size),
            hidden=self.hidden or _hidden_for(size),
            like=loc,
        )
        return FlowModule(layout, NormalisingFlow(loc, torch.full_like(loc, initial_scale), layers))


class FlowModule(FamilyModule):
    """A flow that is being trained.

    Attributes:
        flow: The distribution.
    """

    def __init__(self, layout: Layout, flow: NormalisingFlow):
        super().__init__(layout)
        self.flow = flow

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
        return self.flow.size <= _PATH_BELOW

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


def _layers_for(kind: str, size: int) -> int:
    return _FEWER_LAYERS if kind == CouplingLayer.kind or size > _MANY else _LAYERS


def _hidden_for(size: int) -> int:
    return max(1, min(_WIDEST, _NUMBERS // size))


# --- Variational inference with normalising flows (Rezende and Mohamed, 2015; Dinh et al., 2017) ---------------------


@dataclass(frozen=True, repr=False, kw_only=True)
class FlowVI(VariationalMethod):
    r"""A normal distribution bent by invertible maps into any shape, fitted by maximising the evidence lower bound.

    .. math:: \theta = m + s \odot f_L(\cdots f_1(\epsilon)), \qquad \epsilon \sim \mathcal{N}(0, I)

    For posteriors that are no normal: curved, skewed, with heavy tails. It begins as a mean-field normal, and the
    expected log density of q has no closed form, so that its gradients are noisier than those of normals: a few
    ``draws`` a step are worth their time. Maps of all weights of a large network are coarse; a flow is best given to
    the weights that matter, ``MeanFieldVI(families={"last_layer": Flow()})``, or to a model in which only those are
    random.

    Args:
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size of the optimiser; None chooses it from the number of parameters.
        batch_size: Rows per step; None is all rows up to 1,024 and 128 beyond.
        training: Optimiser, gradient clipping, patience, divergence and accumulation: ``kn.Training(...)``.
        beta: Factor on the KL: every row counts 1/beta times. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which that factor rises to its full value. It changes the path and not the target. None:
            about 2,000 steps, at most a third of the epochs.
        start: ``"network"`` (the network's own weights are the first means), ``"map"`` (those of a MAP fit, in which
            learned scales of the prior stay at their initial values), or a fitted posterior.
        initial_scale: Standard deviation of all weights at the start: small, so that training begins like that of a
            point estimate.
        temperature: T of the tempered posterior p(θ | D)^(1/T), as in the samplers: the entropy of q counts T times.
            Anything but 1 is not the Bayes posterior. (``beta`` raises the likelihood alone to the power 1/beta.)
        draws: Weight draws per step; None is one.
        families: Families for groups of weights by name, glob or ``"last_layer"``, such as
            ``{"head.*": kn.families.FullRank()}``; the first match wins, and groups are independent. All other weights
            have the method's own family.
        kl_gradient: How the gradient of the KL is computed. ``"closed"``: from its closed form, where there is one.
            ``"path"``: along the weight draws that the likelihood is given too (Roeder et al., 2017); the noise of the
            two cancels as q approaches the posterior, and until then there is more of it. ``"auto"``: what suits each
            family, which is ``"path"`` for a full covariance, or a radial or real NVP flow, of up to 300 weights. All
            aim at the same optimum.
        kind: ``"planar"``, ``"radial"`` or ``"real_nvp"``, see
            :class:`~knowable.inference.variational.flow.flow.Flow`.
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
