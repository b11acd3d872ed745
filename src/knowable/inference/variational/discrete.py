"""Variational inference with parameters that are 0 or 1, by the score function (Williams, 1992; Kool et al., 2019)."""

from __future__ import annotations

from dataclasses import dataclass

from knowable.core.checks import check_choice, check_count, check_number
from knowable.core.method import Method, admit, identity_of
from knowable.core.model import Model
from knowable.core.point_estimate import training_diagnostics
from knowable.core.training import Training, train
from knowable.errors import InvalidArgument, Unsupported
from knowable.inference.variational.discrete_objective import ESTIMATORS, MOST_ENUMERATED, DiscreteObjective
from knowable.inference.variational.discrete_posterior import BernoulliNormal
from knowable.inference.variational.target_notes import learned_scale_notes, warmup_notes

_SCORE_DRAWS = 8
_BY_DIFFERENCES = 16  # gates at the most, where it is not said how


@dataclass(frozen=True, repr=False)
class DiscreteVI(Method, Training):
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
        estimator: How the bound is differentiated in the probabilities.
            ``"auto"``: ``"local_expectation"`` up to 16 gates, ``"score"`` beyond.
            ``"score"``: log-derivative with a leave-one-out baseline; ``draws`` forward passes a step. A gate that is
            hardly ever closed is hardly ever compared: such probabilities stay a little away from 0 and 1.
            ``"local_expectation"``: for every gate in turn the difference between open and closed, the others as drawn
            (Rao-Blackwellised; Titsias and Lázaro-Gredilla, 2015). Far less noise, and a forward pass for every gate.
            ``"enumerate"``: all settings, each with its probability: exact, for up to ten gates.
        draws: Settings drawn in each step; None is 8 for ``"score"`` and 1 for the others.
        kl_warmup: Epochs over which the divergence rises to its full weight.
        initial_scale: Standard deviation all weights start with.
        initial_probability: What all gates start with; None is their prior's (but 0.05 to 0.95).

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
    kl_warmup: int = 0
    initial_scale: float = 0.02
    initial_probability: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("estimator", self.estimator, ("auto", *ESTIMATORS))
        if self.draws is not None:
            check_count("draws", self.draws)
        if self.estimator == "score" and self.draws == 1:
            raise InvalidArgument("draws must be >= 2 with estimator='score': each draw is compared with the others.")
        check_count("kl_warmup", self.kl_warmup, at_least=0)
        if self.epochs is not None and 2 * self.kl_warmup > self.epochs:
            raise InvalidArgument(f"kl_warmup must be at most half of epochs={self.epochs}, got {self.kl_warmup}.")
        check_number("initial_scale", self.initial_scale, above=0)
        if self.initial_probability is not None:
            check_number("initial_probability", self.initial_probability, above=0, below=1)

    def fit(
        self, model, data, *, validation=None, seed=0, progress=None, checkpoint=None, engine=None
    ) -> BernoulliNormal:
        """Maximise the bound; see :meth:`knowable.core.method.Method.fit`."""
        rows, held_out, seed = admit(model, data, validation, seed, batch_size=self.batch_size, binary=True)
        objective = self.objective(model, rows.size)
        result = train(
            objective, rows, self, validation=held_out, seed=seed, progress=progress, checkpoint=checkpoint,
            engine=engine, label=type(self).__name__, identity=identity_of(self, model, rows, held_out),
        )  # fmt: skip
        evidence, terms = objective.final_bound(rows, seed)
        loc, scale = objective.loc_and_scale()
        points = objective.point_params()
        notes = (*warmup_notes(self.kl_warmup, result), *learned_scale_notes(model, rows.size))
        return BernoulliNormal(
            model, objective.probabilities(), loc, scale, points=points, buffers=objective.net_buffers, seed=seed,
            log_evidence=evidence,
            diagnostics=training_diagnostics(self, model, result, {**loc, **points}, terms, notes),
        )  # fmt: skip

    def objective(self, model: Model, size: int) -> DiscreteObjective:
        """The loss that :meth:`fit` minimises, for ``size`` rows of data."""
        start = model.params()
        gates = sum(start[name].numel() for name in model.binary_names)
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
            kl_warmup=self.kl_warmup, initial_scale=self.initial_scale, initial_probability=self.initial_probability,
        )  # fmt: skip
