"""The Laplace approximation (MacKay, 1992; Ritter et al., 2018; Daxberger et al., 2021)."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from knowable.core.method import FitJob, Method
from knowable.core.model.data import Data
from knowable.core.model.joint_normal import FullCovarianceNormal, JointNormal
from knowable.core.model.model import Model
from knowable.core.model.prior import Normal
from knowable.core.model.structured_normal import KroneckerFactored
from knowable.core.network.params import Buffers, Layout, Params
from knowable.core.posterior.diagnostics import Diagnostics, LogEvidence
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_choice, check_count
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.core.support.time_limit import share_of_time
from knowable.core.training.settings import Trained
from knowable.errors import InvalidArgument
from knowable.inference.laplace.curvature import Curvature, FullCurvature, PriorPrecision, prior_precision
from knowable.inference.laplace.curvature_diagonal import DiagonalCurvature
from knowable.inference.laplace.curvature_kron import KroneckerCurvature
from knowable.inference.laplace.curvature_low_rank import LowRankCurvature
from knowable.inference.laplace.evidence import Evidence, TuningObjective
from knowable.inference.laplace.expansion import CURVATURES, ExpansionPoint, random_weights
from knowable.inference.laplace.posteriors import PREDICTIONS, LaplacePosterior
from knowable.inference.point.point import PointObjective, fit_point
from knowable.inference.point.trained import TrainedWeights, check_start, given_point, without_spread
from knowable.priors import EmpiricalBayes

STRUCTURES: dict[str, type[Curvature]] = {
    "full": FullCurvature,
    "kron": KroneckerCurvature,
    "diag": DiagonalCurvature,
    "lowrank": LowRankCurvature,
}
_MAX_ROUNDS = 20  # of Newton steps and tuning in turn
_ADVICE = (
    "Leave the prior out, and its scale is chosen so that this does not happen (with validation= on held-out rows); or "
    "make fewer weights random: Model(..., random='last_layer')."
)
_FAR_FROM_MODE = 1.0  # nats that the log joint could still gain, above which a note says so


@dataclass(frozen=True, repr=False, kw_only=True)
class Laplace(Trained, Method):
    r"""A normal distribution around the most probable weights, with the inverse curvature there as its covariance.

    .. math:: p(\theta \mid D) \approx \mathcal{N}\big(\hat\theta,\ (H + \Lambda_0)^{-1}\big)

    with H the curvature of the negative log likelihood at the mode, on the full-data scale, and Λ₀ the precision of the
    prior. The mode is found by training, unless ``start`` is trained already. The model determines which weights are
    random: ``random="last_layer"`` gives the last-layer Laplace approximation.

    The scales that the model leaves open maximise the log marginal likelihood (evidence): a learned noise
    (``Gaussian()``), and prior scales under ``EmpiricalBayes`` (one for a glob of names, for each tensor, or for each
    weight). ``log_evidence`` is integrated over the noise, by Laplace's method in its logarithm. A prior that is itself
    a Laplace posterior makes this online Laplace.

    Args:
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size of the optimiser; None chooses it from the number of parameters.
        batch_size: Rows per step; None is all rows up to 1,024, and 128 beyond.
        training: How the optimisation loop works: optimiser, gradient clipping, early stopping, divergence.
        structure: Which part of the curvature is kept. ``"full"``: all of it, for up to ``max_parameters`` weights.
            ``"kron"``: a Kronecker product for each layer (K-FAC). ``"diag"``: its diagonal. ``"lowrank"``: its leading
            eigenvectors, beside the prior.
        curvature: ``"ggn"``: the generalised Gauss-Newton matrix, which is the Fisher information.
            ``"empirical_fisher"``: outer products of gradients at the targets. ``"hessian"``: second derivatives, for
            small networks (``"full"`` and ``"diag"``).
        rounds: How often the curvature is then averaged over draws of the normal that it gives, as at the optimum of
            variational inference (Opper and Archambeau, 2009), and replaces it. 0 is Laplace's method. A network that
            is sure of its training rows is flat at the mode and steep beside it: for a posterior that will be a prior
            (continual learning), 1 keeps what the mode's own curvature forgets. The log evidence is the mode's.
        prediction: ``"linearised"``: the network linearised in its weights, in closed form (for classes,
            averaged over normal logits). ``"linearised_sampling"``: draws of linearised functions.
            ``"sampling"``: the network at drawn weights.
        tune: When open scales are chosen: ``"during"`` training, every few epochs; ``"after"`` it, at fixed weights; or
            ``"never"``: the noise at its most probable value, prior scales at their initial values.
        rank: Number of eigenvectors kept by ``"lowrank"``.
        max_columns: For networks with more outputs than this (pixels), that many random combinations of the outputs are
            differentiated instead of each output: an unbiased estimate of the curvature.
        max_parameters: The largest number of random weights for which a ``"full"`` matrix is formed.
        polish: Newton steps after training, to reach the mode exactly; None is up to 20 for ``"full"`` (none with
            validation data, where training stops early on purpose) and none for the other structures.
        start: Weights that are trained already: ``"network"`` (the model's own network), a posterior (its means), a
            network or its ``state_dict()``. None trains first. Parameters of the likelihood that are missing from it
            are set to their most probable values. Where the model was given no prior, the scale of its normal prior
            maximises the evidence too, or the likelihood of ``validation`` rows, and is smaller where that would make
            predictions of the training rows worse than the network's own; ``diagnostics`` say what it is. The NLL
            is reported beside the network's, with a warning where it is worse.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.Laplace(structure="full", epochs=200).fit(model, (x, 2 * x))
        >>> posterior.predict(x).std.shape
        torch.Size([40, 1])
    """

    family = "laplace"
    summary = "a normal around the most probable weights, with the inverse curvature there as its covariance"
    references = ("mackay1992", "opper2009", "ritter2018", "immer2021", "daxberger2021", "eschenhagen2023")
    supports_row_weights = True

    structure: str = "kron"
    curvature: str = "ggn"
    rounds: int = 0
    prediction: str = "linearised"
    tune: str = "during"
    rank: int = 20
    max_columns: int = 64
    max_parameters: int = 10_000
    polish: int | None = None
    start: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("structure", self.structure, STRUCTURES)
        check_choice("curvature", self.curvature, CURVATURES)
        check_choice("prediction", self.prediction, PREDICTIONS)
        check_choice("tune", self.tune, ("during", "after", "never"))
        check_count("rounds", self.rounds, at_least=0)
        check_count("rank", self.rank)
        check_count("max_columns", self.max_columns)
        check_count("max_parameters", self.max_parameters)
        if self.polish is not None:
            check_count("polish", self.polish, at_least=0)
        check_start(self.start, none=True)
        if self.curvature == "hessian" and self.structure not in ("full", "diag"):
            raise InvalidArgument(
                f"curvature='hessian' needs structure='full' or 'diag', got structure={self.structure!r}. Use 'ggn'."
            )
        if self.curvature == "hessian" and self.rounds:
            raise InvalidArgument(f"rounds={self.rounds} needs curvature='ggn' or 'empirical_fisher', got 'hessian'.")

    def _fit(self, job: FitJob) -> Posterior:
        """Find the mode and the curvature there."""
        started = time.monotonic()
        self._check(job.model)
        if self._chooses_prior(job.model):
            prior = {"*": EmpiricalBayes(Normal(1.0))}
            job = replace(job, model=job.model.with_priors(prior, random=job.model.random_names))
        point = self._train(job) if self.start is None else given_point(job, self.start)
        if point.diagnostics.interrupted:
            return without_spread(point, "before the mode was found")
        try:
            with own_randomness(derive_seed(job.seed, "curvature")):  # a loader may draw
                return self._around(point, job, started)
        except KeyboardInterrupt:
            return without_spread(point, "before the curvature was computed")

    # --- the mode ----------------------------------------------------------------------------------------------------

    def _train(self, job: FitJob) -> Particles:
        model, rows, seed = job.model, job.rows, job.seed
        open_scales = self._open_scales(model) if self.tune == "during" else []

        def choose(params: Params, buffers: Buffers) -> tuple[Params, float]:
            with own_randomness(derive_seed(seed, "tuning")):
                return self._evidence(self._point(model, rows, params, buffers, seed)).maximised(open_scales)

        if open_scales:
            objective = TuningObjective(model, rows.size, names=open_scales, choose=choose)
        else:
            objective = PointObjective(model, rows.size, use_prior=True, held=model.hyper_names)
        with share_of_time(0.75):  # the rest is for the curvature
            return fit_point(job, self.training_settings(), objective=objective)

    # --- the curvature -----------------------------------------------------------------------------------------------

    def _around(self, point: Particles, job: FitJob, started: float) -> Posterior:
        at_mode = self.start is None and job.validation is None
        polish = (20 if self.structure == "full" and at_mode else 0) if self.polish is None else self.polish
        evidence, settings = self._tuned(
            self._point(job.model, job.rows, point.mean(), point.buffers, job.seed), polish
        )
        posterior = self._posterior(evidence, settings, point.diagnostics, started)
        if self.start is not None:
            counted = self.structure != "diag"  # a diagonal counts weights that go together several times
            parameters = posterior.diagnostics["effective_parameters"] if counted else 0.0
            trained = TrainedWeights.of(job, point, parameters)
            if self._chooses_prior(job.model):
                posterior = self._narrowed(posterior, evidence, settings, trained)
            trained.compared(posterior, _ADVICE)
        return posterior

    def _narrowed(
        self, posterior: LaplacePosterior, evidence: Evidence, settings: Params, trained: TrainedWeights
    ) -> LaplacePosterior:
        """The posterior under a prior that was not given, of a scale that does no harm, see TrainedWeights.best.

        Its log evidence remains that of the scale where it is largest.
        """
        (name,) = evidence.expansion.model.hyper_names
        others = [each for each in settings if each != name]
        largest = settings[name].item()

        def make(log_scale: float) -> LaplacePosterior:
            scale = torch.full_like(evidence.expansion.params[name], log_scale)
            there = replace(evidence, expansion=evidence.expansion.at({name: scale}))
            return self._normal(there, there.maximised(others)[0])

        scales = range(-2, 14) if trained.held_out else range(28)
        step = math.log(2.0) if trained.held_out else 0.5 * math.log(2.0)
        log_scale = trained.best(make, [largest - step * number for number in scales])
        by = "the marginal likelihood"
        if trained.held_out:
            by = "the NLL of the validation rows"
        elif log_scale < largest:
            by += (
                f" ({math.exp(largest):.3g}), then reduced until training rows were predicted as well as by the weights"
            )
        note = f"No prior was given: Normal({math.exp(log_scale):.3g}), its scale chosen by {by}."
        made, known = make(log_scale), posterior.diagnostics
        terms = {**known.terms, **_own(made), "prior_scale": math.exp(log_scale)}
        made.diagnostics = replace(known, terms=terms, notes=(note, *known.notes))
        made.log_evidence = posterior.log_evidence
        return made

    def _normal(self, evidence: Evidence, settings: Params) -> LaplacePosterior:
        """The normal distribution with the curvature at these settings."""
        expansion = evidence.expansion
        params = {**expansion.params, **_cast(settings, expansion.params)}
        prior, names = prior_precision(expansion, settings), expansion.layout.names
        normal = evidence.curvature.normal(expansion, prior, evidence.weights(settings))
        for number in range(self.rounds):
            drawn = replace(expansion, around=normal, params=params, seed=derive_seed(expansion.seed, "round", number))
            averaged = STRUCTURES[self.structure].of(drawn, rank=self.rank)
            normal = averaged.normal(drawn, prior, evidence.weights(settings))
        return LaplacePosterior(
            expansion.model, normal,
            points={name: value for name, value in params.items() if name not in names},
            buffers=expansion.buffers, seed=expansion.seed, prediction=self.prediction,
        )  # fmt: skip

    def _posterior(
        self, evidence: Evidence, settings: Params, trained: Diagnostics, started: float
    ) -> LaplacePosterior:
        expansion, posterior = evidence.expansion, self._normal(evidence, settings)
        prior = prior_precision(expansion, settings)
        said: list[str] = []
        if evidence.proper:
            value, note = evidence.over_noise(settings)
            said = [note] if note else []
            posterior.log_evidence = LogEvidence(value.item(), "estimate")
        terms, far = _report(evidence, settings, posterior, given=self.start is not None)
        posterior.diagnostics = replace(
            trained, terms={**trained.terms, **_own(posterior), **terms}, seconds=time.monotonic() - started,
            notes=(*trained.notes, *evidence.curvature.notes, *prior.notes, *self._notes(expansion), *far, *said),
        )  # fmt: skip
        return posterior

    def _tuned(self, expansion: ExpansionPoint, polish: int) -> tuple[Evidence, Params]:
        """Newton steps and tuning in turn until neither moves; one round where there are no Newton steps."""
        names = [] if self.tune == "never" else self._open_scales(expansion.model)
        for number in range(_MAX_ROUNDS):
            expansion = polished(expansion, polish)
            evidence = self._evidence(expansion)
            settings, _ = evidence.maximised(names)
            moves = [(value - expansion.params[name].double()).abs().max().item() for name, value in settings.items()]
            if not polish or self.tune != "during" or max(moves, default=0.0) < 1e-7 or number == _MAX_ROUNDS - 1:
                break
            expansion = expansion.at(_cast(settings, expansion.params))
        return evidence, settings

    def _point(self, model: Model, rows: Data, params: Params, buffers: Buffers, seed: int) -> ExpansionPoint:
        return ExpansionPoint(model, rows, params, buffers, self.curvature, self.max_columns, seed)

    def _evidence(self, expansion: ExpansionPoint) -> Evidence:
        return Evidence(expansion, STRUCTURES[self.structure].of(expansion, rank=self.rank))

    def _open_scales(self, model: Model) -> list[str]:
        """What maximises the evidence: the prior's hyperparameters, and the noise if the curvature scales with it."""
        noise = model.likelihood.noise_name if self.curvature == "ggn" else None
        names = [*model.hyper_names, *([f"likelihood.{noise}"] if noise is not None else [])]
        return [name for name in names if name in model.params()]

    def _chooses_prior(self, model: Model) -> bool:
        """Whether the weights come from elsewhere and no prior was given, so that its scale has to be chosen."""
        return self.start is not None and self.tune != "never" and not model.prior_given

    # --- checks and notes --------------------------------------------------------------------------------------------

    def _check(self, model: Model) -> None:
        start = model.params()
        size = Layout.of({name: start[name] for name in random_weights(model)}).size
        whole = self.structure == "full" or self.curvature == "hessian" or self.polish
        if whole and size > self.max_parameters:
            raise InvalidArgument(
                f"Laplace(structure={self.structure!r}, curvature={self.curvature!r}) would need a {size:,} x {size:,} "
                f"matrix; max_parameters is {self.max_parameters:,}. Use structure='kron', make fewer parameters "
                f"random, or raise max_parameters."
            )

    def _notes(self, expansion: ExpansionPoint) -> tuple[str, ...]:
        notes = []
        if expansion.has_random_columns and (self.structure == "lowrank" or not expansion.is_head):
            notes.append(
                f"The network has more outputs than max_columns={self.max_columns}: the curvature is estimated from "
                f"random combinations of them."
            )
        if self.tune == "never" and expansion.model.hyper_names:
            notes.append("tune='never': the prior's scale has its initial value.")
        return tuple(notes)


def _report(
    evidence: Evidence, settings: Params, posterior: LaplacePosterior, *, given: bool
) -> tuple[dict[str, float], list[str]]:
    """Terms of the log marginal likelihood, and a note if the weights are far from the mode."""
    expansion = evidence.expansion
    names = expansion.layout.names
    variance = expansion.layout.flatten({k: v.square() for k, v in posterior.std().items() if k in names}).double()
    there = expansion.at(_cast(settings, expansion.params)) if settings else expansion
    precision, shares = prior_precision(expansion, settings), evidence.weights(settings)

    def possible_gain(gradient: Tensor) -> float:
        return 0.5 * (gradient @ evidence.curvature.solve(precision, shares, gradient)).item()

    gain = possible_gain(log_joint_and_gradient(there)[1])
    terms = {
        "log_likelihood": evidence.log_likelihood(settings).item(),
        "log_prior": evidence.log_prior(settings).item(),
        "effective_parameters": expansion.layout.size - _trace_of_prior(precision, posterior.normal, variance).item(),
        "distance_from_mode": gain,
    }
    if posterior.log_evidence is not None:
        terms["log_evidence"] = float(posterior.log_evidence)
    if gain > _FAR_FROM_MODE and not given:
        note = f"The weights are not at the mode: the log joint could rise by some {gain:.3g} nats. Train longer."
        return terms, [note]
    if given:
        terms["distance_from_likelihood_mode"] = possible_gain(there.log_likelihood()[1])
        return terms, _notes_on_given_weights(terms, weighted=expansion.data.weighted)
    return terms, []


def _trace_of_prior(prior: PriorPrecision, normal: JointNormal, variance: Tensor) -> Tensor:
    """The trace of the prior's precision times the posterior's covariance, whose diagonal is ``variance``."""
    if isinstance(prior.joint, KroneckerFactored) and isinstance(normal, KroneckerFactored):
        before = {block.names: block for block in prior.joint.blocks}
        shares = [before[block.names].along(block) / block.precision for block in normal.blocks]
        return torch.stack([share.double().sum() for share in shares]).sum()
    if prior.joint is not None and isinstance(normal, FullCovarianceNormal):
        root = normal.scale_tril.double()
        return (root * (prior.dense() @ root)).sum()
    return (prior.flat * variance).sum()


def _notes_on_given_weights(terms: Mapping[str, float], *, weighted: bool) -> list[str]:
    """What to know of weights that were trained elsewhere: at a maximum of the likelihood, or under another prior."""
    likelihood, joint = terms["distance_from_likelihood_mode"], terms["distance_from_mode"]
    if min(likelihood, joint) > _FAR_FROM_MODE:  # neither with this prior nor without
        with_weights = " with the weights of the rows, which count in the covariance but do not move the mean"
        return [
            f"The given weights are not where these rows are most probable: their log likelihood could rise by some "
            f"{likelihood:.3g} nats. The posterior is centred at them all the same. Train longer"
            f"{with_weights if weighted else ''}, or leave start out and the mode is found."
        ]
    if joint > max(_FAR_FROM_MODE, 0.5 * terms["effective_parameters"]):  # more than a standard deviation each
        return [
            f"The given weights were trained without this prior, which would move them by {math.sqrt(2 * joint):.3g} "
            f"posterior standard deviations (the log joint could rise by some {joint:.3g} nats). The posterior is "
            f"centred at the given weights, and its log evidence is that of this centre. That is usual for trained "
            f"networks; where the prior is meant as it stands, leave start out and the mode is found."
        ]
    return []


def _own(posterior: Posterior) -> dict[str, float]:
    """The likelihood's own parameters, for the diagnostics."""
    values = posterior.model.likelihood_params(posterior.points)
    return {name: value.double().mean().item() for name, value in values.items()}


def _cast(values: Params, like: Params) -> Params:
    return {name: value.detach().to(like[name]) for name, value in values.items()}


# --- the last steps to the mode, by Newton's method -----------------------------------------------------------------

_SHORTEST_STEP = 1e-3  # as a fraction of the Newton step
_ARMIJO = 0.2  # the least gain, as a fraction of what the gradient promises


def polished(expansion: ExpansionPoint, most: int) -> ExpansionPoint:
    """The point after up to ``most`` damped Newton steps that increase the log joint.

    With the generalised Gauss-Newton curvature they are Levenberg-Marquardt steps, in which the prior keeps the matrix
    positive definite. Newton's method converges quadratically: one more step after the gain has become negligible makes
    all digits right. In single precision that step is rounding error, and not taken.
    """
    double = expansion.model.dtype == torch.float64
    little = 1e-10 if double else 1e-6  # nats
    for _ in range(most):
        curvature = FullCurvature.of(expansion)
        value, gradient = log_joint_and_gradient(expansion)
        ones = torch.ones(expansion.groups, dtype=torch.float64, device=gradient.device)
        step = curvature.solve(prior_precision(expansion), ones, gradient)
        slope = gradient @ step  # twice the gain that the quadratic approximation promises
        last = not 0.5 * slope > little
        if last and not (double and slope > 0):
            break
        higher = _search(expansion, value, step, slope)
        if higher is None:
            break
        expansion = higher
        if last:
            break
    return expansion


def _search(expansion: ExpansionPoint, value: Tensor, step: Tensor, slope: Tensor) -> ExpansionPoint | None:
    """Backtracking line search: the longest of the step, its half, its quarter, ... with enough gain (Armijo)."""
    layout = expansion.layout
    flat = layout.flatten(expansion.params)
    slack = 10 * torch.finfo(flat.dtype).eps * value.abs()
    length = 1.0
    while length > _SHORTEST_STEP:
        there = expansion.at(layout.views(flat + (length * step).to(flat)))
        if log_joint(there) >= value + _ARMIJO * length * slope - slack:
            return there
        length /= 2
    return None


def log_joint(expansion: ExpansionPoint) -> Tensor:
    """The log joint log p(D, θ) of all rows, in double precision."""
    model, params, buffers = expansion.model, expansion.params, expansion.buffers
    with torch.no_grad():
        parts = [
            model.score(model.forward(params, x, buffers=buffers), y, params, *weights)
            for x, y, *weights in expansion.data
        ]
        return torch.cat(parts).double().sum() + model.log_prior(params)


def log_joint_and_gradient(expansion: ExpansionPoint) -> tuple[Tensor, Tensor]:
    """The log joint log p(D, θ) and its gradient in the random weights, ``(D,)``, in double precision."""
    value, gradient = expansion.log_likelihood()
    with torch.enable_grad():
        flat = expansion.layout.flatten(expansion.params).detach().requires_grad_()
        prior = expansion.model.log_prior({**expansion.params, **expansion.layout.views(flat)})
        if prior.requires_grad:
            gradient = gradient + torch.autograd.grad(prior, flat)[0]
    return value + prior.detach(), gradient
