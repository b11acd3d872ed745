"""An ensemble of any method's posteriors."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor

from knowable.core.method import FitJob, Method
from knowable.core.model.data import Data
from knowable.core.model.model import Model
from knowable.core.network.params import Params
from knowable.core.posterior.diagnostics import LogEvidence
from knowable.core.posterior.mixture import Mixture
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_choice, check_count, check_type
from knowable.core.support.randomness import derive_seed
from knowable.core.support.time_limit import share_of_time
from knowable.errors import Interrupted, InvalidArgument, Unsupported
from knowable.inference.ensembles.diversity import with_diversity
from knowable.inference.ensembles.members import joint_diagnostics
from knowable.inference.ensembles.swag import SWAG
from knowable.inference.point.point import fresh_start, warn_of_replaced_weights

_DEFAULT = SWAG()


@dataclass(frozen=True, repr=False, kw_only=True)
class EnsembleOf(Method):
    r"""Several posteriors of one method, each fitted from its own start, as one mixture.

    .. math:: q(\theta) = \sum_k w_k\, q_k(\theta)

    What a single approximation misses, other modes, the ensemble visits; what an ensemble of points misses, the spread
    within a mode, its members have (Wilson and Izmailov, 2020). A mixture of one is the method itself. Where the model
    has point estimates, those of the first member serve all.

    Args:
        method: Any method.
        members: How often it is fitted.
        weights: ``"equal"``; ``"evidence"``, proportional to each member's evidence or its bound, so that the best mode
            takes nearly all; or ``"validation"``, so that the mixture is best on the held-out rows of the fit
            (stacking; Yao et al., 2018).
        start: ``"fresh"``: all members but the first begin at new initial weights. ``"network"``: all begin at the
            network's own, and only their seeds differ; for networks that are already trained.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.EnsembleOf(kn.MeanFieldVI(epochs=100), members=3).fit(model, (x, 2 * x))
        >>> [type(member).__name__ for member in posterior.members]
        ['DiagonalNormal', 'DiagonalNormal', 'DiagonalNormal']
    """

    family = "ensembles"
    summary = "a mixture of any method's posteriors, each from its own start"
    references = ("wilson2020", "yao2018")
    supports_row_weights = True

    method: Method = field(default=_DEFAULT, kw_only=False)
    members: int = field(default=5, kw_only=False)
    weights: str = "equal"
    start: str = "fresh"

    def __post_init__(self) -> None:
        check_type("method", self.method, Method, "a method such as MAP()")
        check_count("members", self.members)
        check_choice("weights", self.weights, WEIGHTS)
        check_choice("start", self.start, ("fresh", "network"))

    def _divides(self, job: FitJob) -> bool:
        return True

    def _fit(self, job: FitJob) -> Mixture:
        """Fit the members one after the other."""
        model = job.model
        if self.weights == "validation" and job.validation is None:
            raise InvalidArgument("weights='validation' needs held-out rows: pass validation=(x, y) to fit.")
        fits = self._fits(job)
        points = _shared_points(model, fits)
        plain = Mixture(model, fits, points=points)
        log_weights = self._log_weights(plain.members, job.validation)
        posterior = Mixture(
            model, plain.members, log_weights, points=points, seed=job.seed,
            log_evidence=mixture_evidence(plain.members, log_weights),
            diagnostics=joint_diagnostics(self, fits, self.members),
        )  # fmt: skip
        return with_diversity(posterior, job)

    def _fits(self, job: FitJob) -> list[Posterior]:
        """The members that were fitted; an interrupt leaves those that are whole, or the first as it is."""
        found: dict[int, Posterior] = {}
        given, model = job.model, job.model
        apart = model.point_names and self.members > 1
        first = [[0], list(range(1, self.members))] if apart else [list(range(self.members))]
        if self.members > 1 and self.start == "fresh":
            warn_of_replaced_weights(given, job.seed, "To keep them in every member: EnsembleOf(..., start='network').")
        for tasks in first:  # the others begin with the first member's point estimates, if there are any
            try:
                with share_of_time(len(tasks) / (self.members - len(found))):
                    for k, fit in job.engine.run(
                        _member, (self, job, given), tasks, label=type(self).__name__, progress=job.progress
                    ):
                        if not fit.diagnostics.interrupted or not found:
                            found[k] = fit
                        if fit.diagnostics.interrupted:
                            return [found[k] for k in sorted(found)]
            except KeyboardInterrupt:  # the members under way had nothing to return yet
                if not found:
                    raise
                text = f"The fit was stopped from the keyboard with {len(found)} of {self.members} members fitted."
                warnings.warn(text, Interrupted, stacklevel=3)
                break
            if model.point_names and 0 in found:
                shared = _shared_points(model, [found[0]], hyper=False)
                given = model.with_fixed(shared, found[0].buffers)
        return [found[k] for k in sorted(found)]

    def _log_weights(self, members: Sequence[Posterior], held_out: Data | None) -> Tensor:
        if self.weights == "equal" or len(members) == 1:
            return torch.zeros(len(members), dtype=torch.float64).log_softmax(0)
        if self.weights == "evidence":
            return evidence_log_weights(members)
        assert held_out is not None
        return stacking_log_weights(held_out_log_densities(members, held_out))


def _member(shared: tuple[EnsembleOf, FitJob, Model], k: int) -> Posterior:
    """Fit one member."""
    ensemble, job, given = shared
    start = given if k == 0 or ensemble.start == "network" else given.starting_at(*fresh_start(given, job.seed, k))
    seed = job.seed if k == 0 else derive_seed(job.seed, "member", k)
    member = job.part(f"member {k}", model=start, seed=seed, label=f"{type(ensemble.method).__name__}, member {k}")
    return ensemble.method._fit(member.for_method(ensemble.method))


def _shared_points(model: Model, fits: list[Posterior], *, hyper: bool = True) -> Params:
    """Point estimates that all members share: the first one's, and the mean of what the prior learned."""
    wanted = [name for name in model.point_names if name in fits[0].points]
    points = {name: fits[0].points[name] for name in wanted if name not in model.hyper_names}
    learned = [name for name in wanted if hyper and name in model.hyper_names]
    points |= {name: torch.stack([fit.points[name] for fit in fits]).mean(0) for name in learned}
    return points


# --- Weights of the members of a mixture ------------------------------------------------------------------------

WEIGHTS = ("equal", "evidence", "validation")
_ITERATIONS = 10_000
_SETTLED = 1e-10  # change of the mean log density in one iteration


def evidence_log_weights(members: Sequence[Posterior]) -> Tensor:
    r"""Log weights proportional to the members' evidence, :math:`w_k \propto p(D)_k`."""
    lacking = [type(member).__name__ for member in members if member.log_evidence is None]
    if lacking:
        raise Unsupported(
            f"weights='evidence' needs members that know their evidence; {lacking[0]} does not. Use 'equal', "
            f"'validation', or a method such as MeanFieldVI, which has a bound."
        )
    return torch.tensor([float(member.log_evidence or 0.0) for member in members], dtype=torch.float64).log_softmax(0)


def stacking_log_weights(log_densities: Tensor) -> Tensor:
    r"""Log weights under which the mixture is best on held-out rows (stacking; Yao et al., 2018).

    .. math:: \max_w \frac1n \sum_i \log \sum_k w_k\, p_k(y_i \mid x_i), \qquad w_k \ge 0, \; \sum_k w_k = 1

    The problem is concave; it is solved by the EM iteration for the weights of a mixture, from ``log_densities``
    log p_k(y_i | x_i), ``(K, n)``.
    """
    each = log_densities.double()
    log_weights = torch.zeros(len(each), dtype=torch.float64).log_softmax(0)
    before = -torch.inf
    for _ in range(_ITERATIONS):
        joint = each + log_weights.unsqueeze(1)
        mixed = joint.logsumexp(0)
        value = mixed.mean().item()
        if value - before < _SETTLED:
            break
        before = value
        log_weights = (joint - mixed).logsumexp(1).log_softmax(0)  # each member's share in every row, averaged
    return log_weights


def held_out_log_densities(members: Sequence[Posterior], rows: Data) -> Tensor:
    """Log predictive densities of held-out rows under each member, ``(K, n)``."""
    each = [torch.cat([member.predict(x).log_prob(y) for x, y in rows]) for member in members]
    return torch.stack(each).cpu()


def mixture_evidence(members: Sequence[Posterior], log_weights: Tensor) -> LogEvidence | None:
    """The weighted mean of the members' log evidence, where all have one.

    Where these are bounds or exact it is a bound: a mixture is never further from the posterior than its members are on
    average.
    """
    known = [member.log_evidence for member in members]
    values = [each for each in known if each is not None]
    if len(values) < len(known):
        return None
    weights = log_weights.double().exp().tolist()
    kinds = {each.kind for each in values}
    kind = values[0].kind if len(values) == 1 else "estimate" if "estimate" in kinds else "bound"
    error = sum((w * each.standard_error) ** 2 for w, each in zip(weights, values, strict=True)) ** 0.5
    return LogEvidence(sum(w * float(each) for w, each in zip(weights, values, strict=True)), kind, error)


# --- MultiSWAG: a mixture of SWAG posteriors (Wilson and Izmailov, 2020) ---------------------------------------------


@dataclass(frozen=True, repr=False, kw_only=True)
class MultiSWAG(SWAG):
    r"""Several SWAG posteriors, each around a mode of its own.

    .. math:: q(\theta) = \frac1M \sum_m \mathcal{N}(\theta \mid \bar\theta_m, \Sigma_m)

    The same as ``EnsembleOf(SWAG(...), members)``: the members' modes are those of a deep ensemble, and each has the
    spread that SGD finds around it.

    Args:
        members: How many SWAG posteriors, M.
        epochs: Passes over the data to find a member's mode; None stops when the objective has converged.
        learning_rate: Step size while finding the mode; None chooses it from the number of parameters.
        batch_size: Rows per step, see :class:`~knowable.inference.ensembles.swag.SWAG`.
        training: Optimiser, gradient clipping, patience, divergence and accumulation: ``kn.Training(...)``.
        rank: Number of deviations in the low-rank part of each covariance; 0 keeps the diagonal alone.
        snapshots: Number of epochs at the constant rate; None: from 20 to 100.
        rate: Constant learning rate of SGD around the modes; None chooses it.
        start: Where the members begin: ``"map"``, ``"network"``, or a fitted posterior.
        weights: Weights of the members: ``"equal"``, or ``"validation"`` (stacking on held-out rows).

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.MultiSWAG(members=2, epochs=100, snapshots=20).fit(model, (x, 2 * x))
        >>> len(posterior)
        2
    """

    family = "ensembles"
    summary = "a mixture of SWAG posteriors around several modes"
    references = ("wilson2020", "maddox2019")
    supports_row_weights = True

    members: int = field(default=5, kw_only=False)
    weights: str = "equal"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("members", self.members)
        check_choice("weights", self.weights, tuple(each for each in WEIGHTS if each != "evidence"))

    def _divides(self, job: FitJob) -> bool:
        return True

    def _fit(self, job: FitJob) -> Mixture:
        one = SWAG(**{each.name: getattr(self, each.name) for each in fields(SWAG)})
        posterior = EnsembleOf(one, self.members, weights=self.weights)._fit(job)
        posterior.diagnostics = replace(posterior.diagnostics, method=repr(self))
        return posterior
