"""Natural-gradient variational inference: variational online Newton (Khan et al., 2018; Shen et al., 2024)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from knowable.core.model.model import Model
from knowable.core.network.params import Params
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.inference.variational.mean_field import MeanFieldObjective
from knowable.inference.variational.method import VariationalMethod, check_normals

ESTIMATORS = ("weight", "auto", "local", "flipout")


@dataclass(frozen=True, repr=False, kw_only=True)
class NaturalVI(VariationalMethod):
    r"""An independent normal for every weight, fitted along the natural gradient of the ELBO: IVON.

    The target is that of :class:`~knowable.inference.variational.mean_field.MeanFieldVI`. The way there is Newton's:
    the gradient at one draw of the weights, :math:`\theta = m + s\epsilon`, is also an estimate of the curvature,
    :math:`\hat h = \hat g\, \epsilon / s`, from which the scales follow and by which the means step. With full-data
    gradients and a prior of precision π for every weight,

    .. math:: \frac{1}{s^2} \leftarrow \frac{1}{s^2}\Big(1 + v + \tfrac{1}{2} v^2\Big), \quad
        v = \rho\,\big(s^2 (\hat h + \pi) - 1\big), \qquad
        m \leftarrow m - \eta\, \mathrm{clip}\Big(\frac{s^2}{r} \nabla,\ \pm 1\Big),

    where :math:`\nabla` averages the gradients of the last steps. A step costs a gradient of the plain network, noise
    for every weight and a dozen passes over one buffer.

    The prior's precision is each parameter's own, and N that of the data: there is no weight decay and no effective
    sample size to set. Priors that are not normal enter by the gradient of their KL. Point estimates move by
    ``optimiser``.

    Args:
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: The longest move η of a mean in one step, as for Adam; None chooses it from the number of
            parameters.
        batch_size: Rows per step; None is all rows up to 1,024 and 128 beyond.
        training: Optimiser, gradient clipping, patience, divergence and accumulation: ``kn.Training(...)``.
        beta: Factor on the KL: every row counts 1/beta times. Anything but 1 is not the Bayes posterior.
        kl_warmup: Epochs over which that factor rises to its full value, which changes only the path. None: about 2,000
            steps, at most a third of the epochs.
        start: ``"network"`` (the network's own weights are the first means), ``"map"`` (those of a MAP fit, in which
            learned scales of the prior stay at their initial values), or a fitted posterior.
        initial_scale: Standard deviation of all weights at the start.
        temperature: T of the tempered posterior p(θ | D)^(1/T); anything but 1 is not the Bayes posterior.
        draws: Weight draws per step.
        estimator: ``"weight"`` (one draw for the whole batch, the paper's), or another of
            :class:`~knowable.inference.variational.mean_field.MeanFieldVI` with less noise and a costlier step.
        momentum: Share of the gradients' average that is kept from step to step.
        curvature_rate: Share ρ of each new estimate of the curvature, such as the paper's 1e-5. None: for every weight
            twice the learning rate over the root mean square of its estimates, so that noisy ones count for less and
            all come to rest as the rate falls.
        radius: Length r of a Newton step up to which means make η / r of it; along longer ones they move by η.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.NaturalVI(epochs=300).fit(model, (x, 2 * x))
        >>> posterior.predict(x).mean.shape
        torch.Size([40, 1])
    """

    family = "variational"
    says_rise = True
    summary = "the same independent normals along the natural gradient: Newton steps at the cost of Adam"
    aliases = ("ivon", "nvi")
    references = ("shen2024", "lin2020", "khan2018")

    initial_scale: float = 0.02
    temperature: float = 1.0
    draws: int = 1
    estimator: str = "weight"
    momentum: float = 0.9
    curvature_rate: float | None = None
    radius: float = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        check_normals(self.initial_scale, self.beta, self.temperature)
        check_count("draws", self.draws)
        check_choice("estimator", self.estimator, ESTIMATORS)
        check_number("momentum", self.momentum, at_least=0, below=1)
        if self.curvature_rate is not None:
            check_number("curvature_rate", self.curvature_rate, above=0, at_most=1)
        check_number("radius", self.radius, above=0)

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> MeanFieldObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data that look like ``x``."""
        step = NaturalStep(self.momentum, self.curvature_rate, self.radius)
        return MeanFieldObjective(
            model, x, size, estimator=self.estimator, draws=self.draws, step=step, **self.elbo_settings(start)
        )


_MEMORY = 0.99  # of the mean square of the curvature's estimates: the last hundred steps


@dataclass(frozen=True)
class NaturalStep:
    """The step of variational online Newton; point estimates and hyperparameters move by the loop's own optimiser."""

    momentum: float = 0.9
    curvature_rate: float | None = None
    radius: float = 0.03

    def __call__(self, objective: MeanFieldObjective, optimiser: torch.optim.Optimizer) -> None:
        """Move the normals along the natural gradient; all memory is in the optimiser's state."""
        gradient = objective.q.grad
        assert gradient is not None
        state = optimiser.state[objective.q]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["momentum"] = torch.zeros_like(objective.q[0])
            if self.curvature_rate is None:
                state["squares"] = torch.zeros_like(objective.q[0])
        state["step"] += 1
        step, rate = int(state["step"].item()), optimiser.param_groups[0]["lr"]
        scale = objective.size / (objective.temperature * objective.kl_weight())
        if self.curvature_rate is None:
            change = adaptive_change(gradient[1], state["squares"], step=step, rate=rate)
        else:
            change = gradient[1].mul_(self.curvature_rate * scale)
        natural_step(
            objective.q.detach(), change, gradient[0], state["momentum"], step=step, scale=scale, rate=rate,
            decay=self.momentum, radius=self.radius,
        )  # fmt: skip
        objective.q.grad = None  # so that the optimiser does not move them
        if len(objective.points):
            optimiser.step()


def adaptive_change(gradient: Tensor, squares: Tensor, *, step: int, rate: float) -> Tensor:
    r"""The relative change v = ρ k of every precision, where noisy estimates count for less.

    .. math:: \rho = \frac{2 \eta}{\sqrt{\overline{k^2}}}

    so that the log scales move as fast as Adam would move them, and come to rest as the rate falls.

    Args:
        gradient: k, up to a factor that all have in common, ``(D,)``; overwritten.
        squares: Running mean of its square, ``(D,)``; changed.
        step: How many steps there were, this one included.
        rate: Learning rate η.
    """
    squares.mul_(_MEMORY).addcmul_(gradient, gradient, value=1.0 - _MEMORY)
    root = squares.sqrt().add_(torch.finfo(squares.dtype).tiny)
    return gradient.mul_(2.0 * rate * math.sqrt(1.0 - _MEMORY**step)).div_(root)


def natural_step(
    q: Tensor,
    change: Tensor,
    gradient: Tensor,
    momentum: Tensor,
    *,
    step: int,
    scale: float,
    rate: float,
    decay: float,
    radius: float,
) -> None:
    r"""One step along the natural gradient, in place.

    The derivative of the full-data loss in a log scale is, for a draw :math:`m + s\epsilon` with gradient
    :math:`\hat g`, :math:`k = s^2 (\hat g\, \epsilon / s + \pi) - 1`: the reparameterised estimate of the curvature,
    relative to the precision :math:`P = s^{-2}`. With :math:`v = \rho k`,

    .. math:: P \leftarrow P\,(1 + v + \tfrac12 v^2), \qquad
        g \leftarrow \beta_1 g + (1 - \beta_1) \hat g, \quad
        m \leftarrow m - \eta\, \mathrm{clip}\Big(\frac{s^2}{r}\, \frac{g}{1 - \beta_1^t},\ \pm 1\Big)

    The precision at most halves and never becomes negative, whatever the noise (Lin, Schmidt and Khan, 2020).

    Args:
        q: Means and log scales, ``(2, D)``; changed.
        change: v, ``(D,)``; overwritten.
        gradient: Of the loss in the means, ``(D,)``.
        momentum: Its running mean, ``(D,)``; changed.
        step: How many steps there were, this one included.
        scale: What turns the loss into one on the full-data scale whose entropy counts once: N / (β T).
        rate: Learning rate η, the longest move of a mean.
        decay: β₁.
        radius: r; moves shorter than η are η / r of a Newton step.
    """
    loc, log_scale = q[0], q[1]
    log_scale.sub_(change.addcmul_(change, change, value=0.5).log1p_(), alpha=0.5)
    momentum.lerp_(gradient, 1.0 - decay)
    factor = torch.full((), math.log(scale / (radius * (1.0 - decay**step))), dtype=q.dtype, device=q.device)
    move = torch.add(factor, log_scale, alpha=2.0).exp_()  # s² over the radius, for a loss per example
    loc.sub_(move.mul_(momentum).clamp_(-1.0, 1.0), alpha=rate)
