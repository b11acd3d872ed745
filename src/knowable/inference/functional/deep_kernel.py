"""Deep kernel learning: a Gaussian process on the features of a network (Wilson et al., 2016)."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.method import FitJob, Method
from knowable.core.model.model import Model
from knowable.core.network.params import Params
from knowable.core.posterior.diagnostics import LogEvidence
from knowable.core.support.checks import check_count, check_type
from knowable.core.training.loop import train
from knowable.core.training.objective import Objective
from knowable.core.training.settings import Trained
from knowable.inference.functional.gaussian_process import (
    GaussianProcessPosterior,
    log_prior_of_noise,
    own_points,
)
from knowable.inference.functional.inducing_fit import fit_inducing, log_prior_of_weights
from knowable.inference.functional.inducing_posterior import InducingPosterior
from knowable.inference.functional.kernel_inputs import Body, Units
from knowable.inference.functional.kernels import Covariance, check_kernel, gpytorch
from knowable.inference.functional.targets import MEAN, Numbers, counted_rows
from knowable.inference.point.point import refuse_learned_prior, training_diagnostics
from knowable.likelihoods import Gaussian


@dataclass(frozen=True, repr=False, kw_only=True)
class DeepKernel(Trained, Method):
    r"""A Gaussian process on the features of a network, which are trained with it.

    .. math:: k_\phi(x, x') = k(h_\phi(x), h_\phi(x')), \qquad
        \hat\phi = \arg\max_\phi\, \log p(D \mid \phi) + \log p(\phi)

    With normal noise and few rows p(D | φ) is the exact evidence of the Gaussian process, and the ELBO of a sparse one
    otherwise. The weights φ of the features are point estimates under the model's prior: what they might be else is not
    part of the uncertainty, and a large network can overfit.

    Args:
        features: A module whose output the kernel sees; None: the model's network without its last layer. A module of
            your own is trained without a prior, but for its parameters with ``requires_grad=False``, which stay.
        kernel: As for ``GaussianProcess``. A kernel given by its name sees features that are standardised by what they
            are at first.
        inducing: Number of inducing points, where the ELBO is used.
        exact_rows: The largest number of rows for the exact evidence, of which a step takes O(N³) time.
        epochs: Steps with the exact evidence, and otherwise passes over the data; None stops when it has converged.
        learning_rate: Step size of Adam; None: 0.01, less for the exact evidence of large networks.
        batch_size: Rows per step of the ELBO, which is then used also for few rows; None takes all up to 2,048, and
            1,000 of more.
        training: Further settings of the training loop.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 30).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
        >>> posterior = kn.DeepKernel(epochs=20).fit(kn.Model(net, kn.Gaussian()), (x, torch.sin(3 * x)))
        >>> posterior.predict(x).epistemic.shape
        torch.Size([30, 1])
    """

    family = "functional"
    summary = "a Gaussian process on the features of a network, trained together"
    aliases = ("dkl",)
    references = ("wilson2016", "gardner2018")
    supports_row_weights = True
    fits_network = False

    features: nn.Module | None = None
    kernel: Any = "rbf"
    inducing: int = 100
    exact_rows: int = 1_000

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.features is not None:
            check_type("features", self.features, nn.Module, "a torch.nn.Module or None")
        check_kernel(self.kernel)
        check_count("inducing", self.inducing)
        check_count("exact_rows", self.exact_rows)

    def _fit(self, job: FitJob) -> GaussianProcessPosterior | InducingPosterior:
        model, size = job.model, job.rows.size
        refuse_learned_prior(self, model)
        if self.features is None:
            body = Body.of_model(model)
        else:
            body = Body.of_module(copy.deepcopy(self.features).to(dtype=model.dtype, device=model.device))
        likelihood = model.likelihood
        exact = isinstance(likelihood, Gaussian) and not likelihood.missing and size <= self.exact_rows
        if exact and job.rows.in_memory and (self.batch_size is None or self.batch_size >= size):
            return self._fit_exactly(job, body)
        return fit_inducing(job, self, kernel=self.kernel, inducing=self.inducing, body=body)

    def _fit_exactly(self, job: FitJob, body: Body) -> GaussianProcessPosterior:
        model = job.model
        gpytorch()
        x, y, counts = counted_rows(job, self.exact_rows, "use fewer rows")
        objective = EvidenceObjective(model, job.rows.size, body, self.kernel, x, y, counts)
        settings = self.training_settings(batch_size=job.rows.size)
        result = train(objective, job.rows, settings, **job.options)
        posterior = objective.posterior(seed=job.seed)
        params = {**model.params(), **{n: v.detach() for n, v in objective.point_params().items()}}
        terms = {"log_evidence": float(posterior.log_evidence or 0.0), **objective.covariance.terms()}
        posterior.diagnostics = training_diagnostics(self, model, result, params, terms)  # type: ignore[arg-type]
        return posterior


class EvidenceObjective(Objective):
    """Minus the log evidence of a Gaussian process on the features of all rows, with the priors, divided by N."""

    remedy = "Standardise the data, lower learning_rate, or use fewer features."

    def __init__(self, model: Model, size: int, body: Body, kernel: Any, x: Any, y: Tensor, counts: Tensor):
        super().__init__(model, size)
        self.body, self.rows = body, (x, y, counts)
        trained, self.held, self.net_buffers = body.start(model, x[:8])
        with torch.no_grad():
            features = body({**trained, **self.held}, x, self.net_buffers)
        outputs = model.probe(x).shape[1:].numel()
        self.units = Units.of(features, y, counts, model, outputs, standardise=isinstance(kernel, str))
        self.covariance = Covariance.of(kernel, features.shape[1]).to(features.device)
        self.targets = Numbers(model, outputs, self.units.y_shift, self.units.y_scale)
        zeros = torch.zeros(outputs, dtype=torch.float64, device=features.device)
        first = {**own_points(model, self.units, y), MEAN: zeros, **trained}
        self.names = list(first)
        self.values = nn.ParameterList([nn.Parameter(value.clone()) for value in first.values()])

    def point_params(self) -> Params:
        """What is estimated as a point besides the kernel, by name."""
        return {**dict(zip(self.names, self.values, strict=True)), **self.held}

    def forward(self, x: Any, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of all rows and its terms."""
        points, counts = self.point_params(), torch.ones(len(y), dtype=torch.float64, device=y.device)
        seen = self.units.seen(self.body(points, x, self.net_buffers, training=True))
        if weights is not None:
            kept = weights > 0
            seen, y, counts = seen[kept], y[kept], weights[kept].double()
        evidence = self.targets.evidence(self.covariance(seen), y, counts, points)
        prior = log_prior_of_noise(self.model, points, self.units) + self.covariance()
        prior = prior + log_prior_of_weights(self.model, points)
        return -(evidence + prior) / self.size, {"log_evidence": evidence.detach(), "log_prior": prior.detach()}

    def is_smooth(self, x: Any, y: Tensor, weights: Tensor | None = None) -> bool:
        """Where the network computes in training what it does in evaluation."""
        return self.body.is_steady(self.point_params(), x, self.net_buffers)

    def predictive_log_likelihood(self, x: Any, y: Tensor) -> Tensor:
        """Log density of held-out rows."""
        return self.posterior()._predict(x, 1, 0, None).log_prob(y)

    def posterior(self, **common: Any) -> GaussianProcessPosterior:
        """The Gaussian process at the present features."""
        x, y, counts = self.rows
        points = {name: value.detach() for name, value in self.point_params().items()}
        with torch.no_grad():
            seen = self.units.seen(self.body(points, x, self.net_buffers))
            found = self.targets.solve(self.covariance(seen), y, counts, points)
        like = self.model.params()
        own = {name: value.to(like.get(name, value)) for name, value in points.items() if name != MEAN}
        return GaussianProcessPosterior(
            self.model, copy.deepcopy(self.covariance), self.units, seen, found.slope, found.information,
            points[MEAN], self.body, points=own, buffers=self.net_buffers,
            log_evidence=LogEvidence(found.evidence or 0.0, "estimate"), **common,
        )  # fmt: skip
