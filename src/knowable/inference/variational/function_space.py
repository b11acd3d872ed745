"""Variational inference in function space (Sun et al., 2019; Rudner et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from knowable.core.checks import check_count, check_number
from knowable.core.data import Data
from knowable.core.model import Model
from knowable.core.posterior import Posterior
from knowable.core.randomness import generator_for
from knowable.core.storage import tensor_fingerprint
from knowable.core.training import TrainingResult
from knowable.core.types import Params
from knowable.core.variational_method import VariationalMethod
from knowable.errors import InvalidArgument
from knowable.inference.variational.function_context import DrawPoints, check_context, context_pool
from knowable.inference.variational.function_priors import FunctionPrior, NetworkPrior, as_function_prior
from knowable.inference.variational.function_space_objective import FunctionSpaceObjective, check_model

_NO_BOUND = (
    "log_evidence is None: functions are compared at finitely many points, with the network linearised, which is no "
    "bound of the evidence."
)


@dataclass(frozen=True, repr=False)
class FunctionSpaceVI(VariationalMethod):
    r"""An independent normal for every weight, held to a prior over *functions* instead of one over weights.

    What is maximised, exactly (Rudner et al., 2022):

    .. math:: E_{q(\theta)}[\log p(D \mid \theta)]
        - \beta\, E_C\Big[\sum_o \mathrm{KL}\big(\tilde q(f_o(C)) \,\|\, p(f_o(C))\big)\Big]

    The first term is that of mean-field inference. In the second, C are ``context_points`` inputs drawn anew in every
    step, :math:`\tilde q` is the Gaussian process that q becomes when the network is linearised in its weights at their
    means m,

    .. math:: \tilde q(f) = \mathcal{GP}\big(f(\cdot\,; m),\; J \operatorname{diag}(s^2) J^\top\big),

    and p the prior, independent for every output o (function values are all outputs; correlations of q between outputs
    are not counted). Both covariances have a little noise on their diagonal, the ``jitter``. **This is no bound of the
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
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how it is maximised.
        prior: The prior over functions: a kernel (:class:`~knowable.inference.variational.function_priors.RBFKernel`,
            ``MaternKernel``, ``LinearKernel``, or any of GPyTorch), or a
            :class:`~knowable.inference.variational.function_priors.NetworkPrior`. None is ``NetworkPrior()``: the
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
        beta: Factor on the divergence. Anything but 1 weighs prior and data otherwise than the model says.
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

    prior: FunctionPrior | Any = None
    context: str | Tensor | DrawPoints = "auto"
    context_points: int = 16
    context_outputs: int = 4
    margin: float = 0.5
    jitter: float = 1e-3
    draws: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
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

    def fit(self, model, data, *, validation=None, seed=0, progress=None, checkpoint=None, engine=None) -> Posterior:
        """Maximise the objective; see :meth:`knowable.core.method.Method.fit`."""
        if isinstance(model, Model):  # what is not is refused by the next line
            check_model(model)
        return super().fit(
            model, data, validation=validation, seed=seed, progress=progress, checkpoint=checkpoint, engine=engine
        )

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
            draws=self.draws, beta=self.beta, kl_warmup=self.kl_warmup, initial_scale=self.initial_scale, start=start,
        )  # fmt: skip

    def _objective_for(self, model: Model, rows: Data, seed: int, start: Params | None) -> FunctionSpaceObjective:
        pool = self._pool(model, rows, seed)
        return self.objective(model, next(iter(rows))[0], rows.size, start=start, pool=pool, seed=seed)

    def _identity(self, objective: FunctionSpaceObjective) -> dict[str, Any]:
        return {"context": tensor_fingerprint(objective.pool)}

    def _pool(self, model: Model, data: Data, seed: int) -> Tensor:
        generator = generator_for(seed, "context")
        return context_pool(self.context, data, model, margin=self.margin, generator=generator)

    def _notes(self, model: Model, size: int, result: TrainingResult) -> tuple[str, ...]:
        notes = (_NO_BOUND, *super()._notes(model, size, result))
        if self.beta == 1.0:
            return notes
        return (*notes, f"beta={self.beta:g}: prior and data are not weighed as the model says (beta=1 is).")
