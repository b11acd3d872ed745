"""Variational inference with parameters that are 0 or 1, by the score function (Williams, 1992; Kool et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from knowable.core.checks import check_choice, check_count, check_number
from knowable.core.data import Data
from knowable.core.diagnostics import LogEvidence
from knowable.core.model import Model
from knowable.core.types import Params
from knowable.core.variational_method import BoundMethod
from knowable.errors import InvalidArgument, Unsupported
from knowable.inference.variational.discrete_objective import ESTIMATORS, MOST_ENUMERATED, DiscreteObjective

_SCORE_DRAWS = 8
_BY_DIFFERENCES = 16  # gates at the most, where it is not said how


@dataclass(frozen=True, repr=False)
class DiscreteVI(BoundMethod):
    r"""An independent Bernoulli for every parameter that is 0 or 1, an independent normal for every other.

    .. math:: q(z, w) = \prod_j \pi_j^{z_j} (1 - \pi_j)^{1 - z_j} \prod_d \mathcal{N}(w_d \mid m_d, s_d^2), \qquad
        \max_{\pi, m, s}\; E_q[\log p(D \mid z, w)] - \mathrm{KL}(q(z) \,\|\, p(z)) - \mathrm{KL}(q(w) \,\|\, p(w))

    Binary parameters are those with a :class:`~knowable.priors.bernoulli.BernoulliPrior`: gates on units or layers
    (:func:`~knowable.core.gates.gated` puts them into any network), or whatever a network of your own makes of zeros
    and ones. The normals are fitted through reparameterised draws. The Bernoullis have no such gradient: theirs is
    estimated from values of the likelihood, at the same draw of the weights for all settings that are compared.

    A factorised q leaves one thing out by design: of two units that do the same, either may be closed but not both, and
    independent gates cannot say so. They settle on one of the two.

    Args:
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how the bound is maximised.
        beta: This and the other fields of
            :class:`~knowable.core.variational_method.BoundMethod` and
            :class:`~knowable.core.variational_method.VariationalMethod` say what is maximised, from
            where; but there is no ``start="map"`` for zeros and ones.
        estimator: How the bound is differentiated in the probabilities.
            ``"auto"``: ``"local_expectation"`` up to 16 gates, ``"score"`` beyond.
            ``"score"``: log-derivative with a leave-one-out baseline; ``draws`` forward passes a step. A gate that is
            hardly ever closed is hardly ever compared: such probabilities stay a little away from 0 and 1.
            ``"local_expectation"``: for every gate in turn the difference between open and closed, the others as drawn
            (Rao-Blackwellised; Titsias and Lázaro-Gredilla, 2015). Far less noise, and a forward pass for every gate.
            ``"enumerate"``: all settings, each with its probability: exact, for up to ten gates.
        draws: Settings drawn in each step; None is 8 for ``"score"`` and 1 for the others.
        initial_probability: What all gates start with; None is their prior's, or what they are in ``start`` (but 0.05
            to 0.95).

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        >>> prior = {"*.gate": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)}
        >>> model = kn.Model(kn.gated(net, "0"), kn.Gaussian(0.1), prior)
        >>> posterior = kn.DiscreteVI(epochs=100).fit(model, (x, x.abs()))
        >>> posterior.probabilities["0.1.gate"].shape
        torch.Size([8])
    """

    estimator: str = "auto"
    draws: int | None = None
    initial_probability: float | None = None

    takes_binary: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("estimator", self.estimator, ("auto", *ESTIMATORS))
        if self.draws is not None:
            check_count("draws", self.draws)
        if self.estimator == "score" and self.draws == 1:
            raise InvalidArgument("draws must be >= 2 with estimator='score': each draw is compared with the others.")
        if isinstance(self.start, str) and self.start == "map":
            raise InvalidArgument(
                "start must be 'network' or a posterior, got 'map': there is no gradient by which to find the most "
                "probable zeros and ones."
            )
        if self.initial_probability is not None:
            check_number("initial_probability", self.initial_probability, above=0, below=1)

    def objective(self, model: Model, x: Tensor, size: int, *, start: Params | None = None) -> DiscreteObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data."""
        known = model.params()
        gates = sum(known[name].numel() for name in model.binary_names)
        estimator = self.estimator
        if estimator == "auto":
            estimator = "local_expectation" if gates <= _BY_DIFFERENCES else "score"
        if estimator == "enumerate" and gates > MOST_ENUMERATED:
            raise Unsupported(
                f"estimator='enumerate' goes through all 2^{gates} settings of the model's {gates} binary parameters; "
                f"it does so for up to {MOST_ENUMERATED}. Use 'score' or 'local_expectation'."
            )
        draws = self.draws or (_SCORE_DRAWS if estimator == "score" else 1)
        return DiscreteObjective(
            model, size, estimator=estimator, draws=max(2, draws) if estimator == "score" else draws,
            beta=self.beta, temperature=self.temperature, kl_warmup=self.kl_warmup, initial_scale=self.initial_scale,
            initial_probability=self.initial_probability, start=start,
        )  # fmt: skip

    def _evidence(
        self, objective: DiscreteObjective, rows: Data, seed: int
    ) -> tuple[LogEvidence | None, dict[str, float]]:
        bound, terms = super()._evidence(objective, rows, seed)
        return bound, {**terms, "kl_of_gates": objective.divergence_of_gates().item()}
