"""The deep variational information bottleneck (Alemi et al., 2017)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from knowable.core.method import FitJob, Method
from knowable.core.model.data import Data
from knowable.core.model.model import Model
from knowable.core.network.params import Params
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.core.support.time_limit import share_of_time
from knowable.core.training.loop import train
from knowable.core.training.settings import Trained
from knowable.errors import InvalidType
from knowable.inference.point.point import PointObjective, refuse_learned_prior, training_diagnostics
from knowable.inference.variational.bottleneck_code import (
    HEAD_BIAS,
    HEAD_WEIGHT,
    MARGINAL_LOC,
    MARGINAL_LOG_SCALE,
    MARGINALS,
    SCALES,
    CodePlace,
    RandomCode,
    Tap,
    code_shape,
    feature_axis,
    rate_of,
    tapped,
)
from knowable.inference.variational.method import mean_and_error, passes_over

_NOTE = "Weights are point estimates: predictions differ from draw to draw by the code alone."


@dataclass(frozen=True, repr=False)
class InformationBottleneck(Trained, Method):
    r"""A random code in the middle of the network that keeps of the input only what helps to predict.

    .. math:: \min\; D + \beta R, \qquad D = E\big[-\log p(y \mid z)\big], \quad
        R = E\big[\mathrm{KL}(p(z \mid x) \,\|\, r(z))\big], \quad
        z \mid x \sim \mathcal{N}\big(\mu(x), \operatorname{diag}\sigma^2(x)\big)

    averaged over the data, with - log p(θ) / N for the weights' prior (``Flat()`` leaves it out, as the paper does).
    The distortion D and the rate R are reported in nats per example, as ``diagnostics["distortion"]`` and ``["rate"]``.
    They bound what the code knows: I(z; x) ≤ R, and I(z; y) ≥ H(y) - D. **It is no posterior over weights**, which are
    point estimates: predictions average over draws of the code, their disagreement is that of the codes, and there is
    no evidence. As ``beta`` goes to 0 the noise vanishes and with it the difference to ordinary training.

    The network needs no change. The output of the chosen layer becomes the mean of the code; its log variance comes
    from a linear layer that is added beside it, or from half of the layer's own features. Features are the channels of
    images (dimension 1 of four or more), the last dimension otherwise; every position has its own code.

    Args:
        layer: The layer whose output is the code's mean, by its path in the network (``"encoder.3"``). None: what the
            last layer with parameters takes in.
        beta: β, the price of a nat of rate in nats of distortion; 0 charges nothing.
        epochs: This and the other fields of :class:`~knowable.core.training.settings.Trained` say how it is minimised.
        scale: ``"head"``: the log variance is a learned linear function of the layer's output. ``"split"``: the first
            half of the layer's features is the mean, the second half the log variance; what follows the layer then
            takes half as many features as the layer gives.
        marginal: r(z): ``"standard"`` normal, or ``"learned"``: normal with a mean and a standard deviation for every
            entry of the code.
        draws: Codes for each example in each step.
        initial_scale: Standard deviation of the code at the start, with a head.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
        >>> method = kn.InformationBottleneck(layer="1", beta=0.01, epochs=100)
        >>> posterior = method.fit(kn.Model(net, kn.Gaussian(0.1)), (x, x.abs()))
        >>> posterior.diagnostics["rate"] > 0
        True
    """

    family = "variational"
    summary = "a random code in the network that keeps of the input only what helps to predict"
    aliases = ("vib",)
    references = ("alemi2017", "alemi2018", "chechik2005")

    layer: str | None = field(default=None, kw_only=False)
    beta: float = 1e-3
    scale: str = "head"
    marginal: str = "standard"
    draws: int = 1
    initial_scale: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layer is not None and not isinstance(self.layer, str):
            raise InvalidType(f"layer must be the path of a layer such as 'encoder.3', or None; got {self.layer!r}.")
        check_number("beta", self.beta, at_least=0)
        check_choice("scale", self.scale, SCALES)
        check_choice("marginal", self.marginal, MARGINALS)
        check_count("draws", self.draws)
        check_number("initial_scale", self.initial_scale, above=0)

    def _fit(self, job: FitJob) -> RandomCode:
        """Minimise distortion and rate."""
        rows, seed = job.rows, job.seed
        refuse_learned_prior(self, job.model)
        place = CodePlace.of(job.model, self.layer, self.scale)
        model, tap = tapped(job.model, place)
        job = replace(job, model=model)
        with own_randomness(derive_seed(seed, "start")):
            shape = code_shape(model, tap, next(iter(rows))[0])
        objective = BottleneckObjective(
            model, tap, shape, rows.size, beta=self.beta, marginal=self.marginal, draws=self.draws,
            initial_scale=self.initial_scale,
        )  # fmt: skip
        with share_of_time(0.9):  # the rest is for the distortion
            result = train(objective, rows, self.training_settings(), **job.options)
        params = {name: value.detach() for name, value in objective.params().items()}
        terms = objective.final_terms(rows, seed)
        return RandomCode(
            model, params, objective.code_tensors(), place=place, shape=shape, seed=seed, buffers=objective.net_buffers,
            points={name: params[name] for name in model.point_names},
            diagnostics=training_diagnostics(self, model, result, params, terms, (_NOTE,)),
        )  # fmt: skip


# --- Rate and distortion of a network with a random code in it -------------------------------------------------------

_VALIDATION_DRAWS = 8


class BottleneckObjective(PointObjective):
    r"""Distortion + β rate - log p(θ) / N, per example.

    .. math:: D = -\frac1N \sum_n E_{z \mid x_n}[\log p(y_n \mid z)], \qquad
        R = \frac1N \sum_n \mathrm{KL}\big(p(z \mid x_n) \,\|\, r(z)\big)

    Args:
        model: The model, with a tap in its network.
        tap: The tap.
        shape: Shape of one row's code.
        size: Number of training examples N.
        beta: Factor on the rate.
        marginal: ``"standard"`` or ``"learned"``.
        draws: Codes for each example in each step.
        initial_scale: Standard deviation of the code at the start, where it comes from a head.

    Attributes:
        code: Parameters of the code: those of the head and of the marginal.
    """

    def __init__(
        self,
        model: Model,
        tap: Tap,
        shape: torch.Size,
        size: int,
        *,
        beta: float,
        marginal: str = "standard",
        draws: int = 1,
        initial_scale: float = 0.1,
    ):
        super().__init__(model, size, use_prior=True)
        self.tap, self.beta, self.draws = tap, beta, draws
        row = torch.zeros((1, *shape), dtype=model.dtype, device=model.device)
        start: Params = {}
        if tap.place.scale == "head":
            features = row.shape[feature_axis(row)]
            start[HEAD_WEIGHT] = row.new_zeros((features, features))
            start[HEAD_BIAS] = row.new_full((features,), 2 * math.log(initial_scale))
        if marginal == "learned":
            start |= {MARGINAL_LOC: row[0].clone(), MARGINAL_LOG_SCALE: row[0].clone()}
        self.code = nn.ParameterDict({name: nn.Parameter(value) for name, value in start.items()})

    def code_tensors(self) -> Params:
        """Parameters of the code, by name."""
        return dict(self.code.items())

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch and its terms, rate and distortion among them in nats per example."""
        params = self.params()
        x, y = (each.repeat(self.draws, *(1,) * (each.dim() - 1)) for each in (x, y))  # several codes: the rows again
        log_likelihood, rates = self.fit_and_rate(params, x, y, training=True)
        distortion, rate = -log_likelihood.mean(), rates.mean()
        log_prior = self.model.log_prior(params)
        terms = {
            "log_likelihood": -distortion.detach() * self.size,
            "log_prior": log_prior.detach(),
            "distortion": distortion.detach(),
            "rate": rate.detach(),
        }
        return distortion + self.beta * rate - log_prior / self.size, terms

    def fit_and_rate(self, params: Params, x: Tensor, y: Tensor, *, training: bool) -> tuple[Tensor, Tensor]:
        """Log likelihood given a new code for each row, and the rate of each row, both ``(batch,)``."""
        tensors = self.code_tensors()
        with self.tap.drawing(tensors, torch.randn_like):
            output = self.model.forward(params, x, buffers=self.net_buffers, training=training)
            assert self.tap.moments is not None
            rate = rate_of(*self.tap.moments, tensors)
        return self.model.score(output, y, params), rate

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log-mean-exp over a few codes, in evaluation mode."""
        params = self.params()
        each = [self.fit_and_rate(params, x, y, training=False)[0] for _ in range(_VALIDATION_DRAWS)]
        return torch.stack(each).logsumexp(0) - math.log(_VALIDATION_DRAWS)

    def final_terms(self, data: Data, seed: int) -> dict[str, float]:
        """Rate and distortion over all rows, in nats per example, and the distortion's standard error."""
        params, distortions, rate = self.params(), [], 0.0
        with torch.no_grad(), own_randomness(derive_seed(seed, "rate and distortion")):
            for _ in range(passes_over(data.size)):
                found = [self.fit_and_rate(params, x, y, training=False) for x, y in data]
                distortions.append(-sum(fit.sum().item() for fit, _ in found) / data.size)
                rate = sum(each.sum().item() for _, each in found) / data.size  # in closed form: the same each time
        distortion, error = mean_and_error(distortions)
        return {"rate": rate, "distortion": distortion, "distortion_standard_error": error}
