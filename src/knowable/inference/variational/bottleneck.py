"""The deep variational information bottleneck (Alemi et al., 2017)."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import vmap

from knowable.core.method import FitJob, Method
from knowable.core.model.data import Batch, Data, as_input
from knowable.core.model.model import Model
from knowable.core.network.batched import no_hidden_loops
from knowable.core.network.network import DRAWS_AT_ONCE
from knowable.core.network.params import Params, expand_params, index_params, number_of_draws, without_prefix
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_choice, check_count, check_number
from knowable.core.support.randomness import derive_seed, generator_for, own_randomness
from knowable.core.support.time_limit import share_of_time
from knowable.core.training.loop import train
from knowable.core.training.settings import Trained
from knowable.errors import InvalidArgument, InvalidType, Unsupported
from knowable.inference.point.point import PointObjective, refuse_learned_prior, training_diagnostics
from knowable.inference.variational.method import estimates_of_all_rows, mean_and_error

_NOTE = "Weights are point estimates: predictions differ from draw to draw by the code alone."


@dataclass(frozen=True, repr=False, kw_only=True)
class InformationBottleneck(Trained, Method):
    r"""A random code in the middle of the network that keeps of the input only what helps to predict.

    .. math:: \min\; D + \beta R, \qquad D = E\big[-\log p(y \mid z)\big], \quad
        R = E\big[\mathrm{KL}(p(z \mid x) \,\|\, r(z))\big], \quad
        z \mid x \sim \mathcal{N}\big(\mu(x), \operatorname{diag}\sigma^2(x)\big)

    averaged over the data, with - log p(θ) / N for the weights' prior (``Flat()`` leaves it out, as the paper does).
    The distortion D and the rate R are reported in nats per example, as ``diagnostics["distortion"]`` and ``["rate"]``.
    They bound what the code knows: I(z; x) ≤ R, and I(z; y) ≥ H(y) - D. **It is not a posterior over weights**, which
    are point estimates: predictions average over draws of the code, and there is no evidence. As ``beta`` goes to 0 the
    noise vanishes and with it the difference to ordinary training.

    The network needs no change. The output of the chosen layer becomes the mean of the code; its log variance comes
    from a linear layer that is added beside it, or from half of the layer's own features. Features are the channels of
    images (dimension 1 of four or more), the last dimension otherwise; every position has its own code.

    Args:
        layer: The layer whose output is the code's mean, by its path in the network (``"encoder.3"``). None: what the
            last layer with parameters takes in.
        beta: β, the price of a nat of rate in nats of distortion; 0 charges nothing.
        epochs: Passes over the data; None stops when the objective has settled.
        learning_rate: Step size of the optimiser; None chooses it from the number of parameters.
        batch_size: Rows per step; None is all rows up to 1,024 and 128 beyond.
        training: Optimiser, gradient clipping, patience, divergence and accumulation: ``kn.Training(...)``.
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
    supports_row_weights = True

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

    def _model_for_data(self, model: Model) -> Model:
        """With a split layer, only the network with the code in it accepts inputs."""
        return tapped(model, CodePlace.of(model, self.layer, self.scale))[0]

    def _fit(self, job: FitJob) -> RandomCode:
        """Minimise distortion and rate."""
        rows, seed = job.rows, job.seed
        refuse_learned_prior(self, job.model)
        place = CodePlace.of(job.model, self.layer, self.scale)
        model, tap = tapped(job.model, place)
        job = replace(job, model=model)
        with own_randomness(derive_seed(seed, "start")):
            shape = code_shape(model, tap, rows.first[0])
        objective = BottleneckObjective(
            model, tap, shape, rows.size, beta=self.beta, marginal=self.marginal, draws=self.draws,
            initial_scale=self.initial_scale,
        )  # fmt: skip
        with share_of_time(0.9):  # the rest is for the distortion
            result = train(objective, rows, self.training_settings(), **job.options)
        params = {name: value.detach() for name, value in objective.params().items()}
        terms = objective.final_terms(rows, seed, result.epochs)
        return RandomCode(
            model, params, objective.code_tensors(), place=place, shape=shape, seed=seed, buffers=objective.net_buffers,
            points={name: params[name] for name in model.point_names},
            diagnostics=training_diagnostics(self, model, result, params, terms, (_NOTE, *rows.sample_notes)),
        )  # fmt: skip


_VALIDATION_DRAWS = 8


class BottleneckObjective(PointObjective):
    r"""Distortion + β rate - log p(θ) / N, per example.

    .. math:: D = -\frac1N \sum_n E_{z \mid x_n}[\log p(y_n \mid z)], \qquad
        R = \frac1N \sum_n \mathrm{KL}\big(p(z \mid x_n) \,\|\, r(z)\big)
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
        given = (x, y) if weights is None else (x, y, weights)
        batch = (torch.cat([each] * self.draws) for each in given)  # several codes: the rows again
        log_likelihood, rates = self.fit_and_rate(params, *batch, training=True)
        distortion, rate = -log_likelihood.mean(), rates.mean()
        log_prior = self.model.log_prior(params)
        terms = {
            "log_likelihood": -distortion.detach() * self.size,
            "log_prior": log_prior.detach(),
            "distortion": distortion.detach(),
            "rate": rate.detach(),
        }
        return distortion + self.beta * rate - log_prior / self.size, terms

    def fit_and_rate(
        self, params: Params, x: Tensor, y: Tensor, weights: Tensor | None = None, *, training: bool
    ) -> tuple[Tensor, Tensor]:
        """Log likelihood given a new code for each row, and the rate of each row (times its weight), ``(batch,)``."""
        tensors = self.code_tensors()
        with self.tap.drawing(tensors, torch.randn_like):
            output = self.model.forward(params, x, buffers=self.net_buffers, training=training)
            assert self.tap.moments is not None
            rate = rate_of(*self.tap.moments, tensors)
        return self.model.score(output, y, params, weights), rate if weights is None else weights * rate

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log-mean-exp over a few codes, in evaluation mode."""
        params = self.params()
        each = [self.fit_and_rate(params, x, y, training=False)[0] for _ in range(_VALIDATION_DRAWS)]
        return torch.stack(each).logsumexp(0) - math.log(_VALIDATION_DRAWS)

    def final_terms(self, data: Data, seed: int, epochs: float = math.inf) -> dict[str, float]:
        """Rate and distortion over all rows, in nats per example, and the distortion's standard error."""
        params = self.params()

        def total(batches: Iterable[Batch]) -> Tensor:
            found = [self.fit_and_rate(params, *batch, training=False) for batch in batches]
            return sum(torch.stack([fit.sum(), rate.sum()]).double() for fit, rate in found) / data.size  # type: ignore[return-value]

        with torch.no_grad(), own_randomness(derive_seed(seed, "rate and distortion")):
            found = torch.stack(estimates_of_all_rows(total, data, seed, epochs, self.dimension))
        distortion, error = mean_and_error((-found[:, 0]).tolist())
        return {"rate": found[:, 1].mean().item(), "distortion": distortion, "distortion_standard_error": error}


# --- the code in the network -----------------------------------------------------------------------------------------

SCALES = ("head", "split")
MARGINALS = ("standard", "learned")
HEAD_WEIGHT, HEAD_BIAS = "head_weight", "head_bias"
MARGINAL_LOC, MARGINAL_LOG_SCALE = "marginal_loc", "marginal_log_scale"

Noise = Callable[[Tensor], Tensor]
"""Standard normal noise for a code of that shape (or for one row of it, shared by all)."""


@dataclass(frozen=True)
class CodePlace:
    """Which activations are the code."""

    layer: str  # path of a module
    entrance: bool  # whether they are its input and not its output
    scale: str

    @classmethod
    def of(cls, model: Model, layer: str | None, scale: str) -> CodePlace:
        """The output of a named layer, or else the input of the last layer that has parameters."""
        modules = model.network.modules(training=False)
        if layer is not None:
            return cls(check_choice("layer", layer, [path for path in modules if path]), False, scale)
        if scale == "split":
            raise InvalidArgument("scale='split' needs a layer= whose output is mean and log variance side by side.")
        own = [path for path, module in modules.items() if list(module.parameters(recurse=False))]
        if not own:
            raise InvalidArgument("layer must be named: the network has no layer with parameters.")
        return cls(own[-1], True, scale)

    @property
    def name(self) -> str:
        """What messages call it."""
        return f"the {'input' if self.entrance else 'output'} of {self.layer or 'the network'!r}"


class Tap:
    """What stands in a network where the code is: it turns activations into a code, and remembers its moments.

    Outside of :meth:`drawing` the code is its mean.

    Attributes:
        calls: How often it was passed.
        shape: Shape of one row's code, at the last pass.
        moments: Mean and log variance of the code at the last pass, inside of :meth:`drawing`.
    """

    def __init__(self, place: CodePlace):
        self.place = place
        self.calls = 0
        self.shape = torch.Size()
        self.moments: tuple[Tensor, Tensor] | None = None
        self._tensors: Params | None = None
        self._noise: Noise | None = None

    @contextmanager
    def drawing(self, tensors: Params, noise: Noise | None) -> Iterator[None]:
        """Let the passes in this block compute moments, and draw codes by ``noise`` where there is any."""
        self._tensors, self._noise = tensors, noise
        try:
            yield
        finally:
            self._tensors = self._noise = self.moments = None

    def __call__(self, value: Any) -> Tensor:
        """The code in place of ``value``."""
        mean = code_mean(self._checked(value), self.place.scale)
        self.calls, self.shape = self.calls + 1, mean.shape[1:]
        if self._tensors is None:
            return mean
        log_variance = code_log_variance(value, self._tensors, self.place.scale)
        self.moments = mean, log_variance
        return mean if self._noise is None else mean + torch.exp(0.5 * log_variance) * self._noise(mean)

    def _checked(self, value: Any) -> Tensor:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.dim() < 2:
            found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise Unsupported(
                f"A code must be one tensor of numbers with a row for each example and features in it, but "
                f"{self.place.name} is {found}. Name another layer."
            )
        if self.place.scale == "split" and value.shape[feature_axis(value)] % 2:
            raise Unsupported(
                f"scale='split' needs an even number of features, but {self.place.name} has shape {tuple(value.shape)}."
            )
        return value

    def hook_output(self, module: nn.Module, args: Any, output: Any) -> Tensor:
        """To be called after a module."""
        return self(output)

    def hook_input(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """To be called before a module."""
        if not args:
            raise Unsupported(f"No code can be put in for {self.place.name}, which is passed by name. Name a layer=.")
        return (self(args[0]), *args[1:])


def tapped(model: Model, place: CodePlace) -> tuple[Model, Tap]:
    """The same model with a tap in its network."""
    network, tap = model.network.copy(), Tap(place)
    for training in (True, False):
        module = network.modules(training=training)[place.layer]
        if place.entrance:
            module.register_forward_pre_hook(tap.hook_input)
        else:
            module.register_forward_hook(tap.hook_output)
    made = copy.copy(model)
    made.network = network
    return made, tap


def code_shape(model: Model, tap: Tap, x: Tensor) -> torch.Size:
    """Shape of one row's code; the network must compute it exactly once."""
    tap.calls = 0
    with torch.no_grad():
        model.network(model.network_params(model.params()), x[:2], buffers=model.buffers())
    if tap.calls != 1:
        raise Unsupported(
            f"The network must compute {tap.place.name} once in a forward pass, for that is the code; it does so "
            f"{tap.calls} times. Name another layer."
        )
    return tap.shape


def feature_axis(value: Tensor) -> int:
    """The dimension of a code's features: the channels of images, the last one otherwise."""
    return 1 if value.dim() >= 4 else value.dim() - 1


def code_mean(value: Tensor, scale: str) -> Tensor:
    """Mean of the code, from a layer's output."""
    return value if scale == "head" else value.chunk(2, dim=feature_axis(value))[0]


def code_log_variance(value: Tensor, tensors: Params, scale: str) -> Tensor:
    """Log variance of the code, from a layer's output."""
    axis = feature_axis(value)
    if scale == "split":
        return value.chunk(2, dim=axis)[1]
    return F.linear(value.movedim(axis, -1), tensors[HEAD_WEIGHT], tensors[HEAD_BIAS]).movedim(-1, axis)


def rate_of(mean: Tensor, log_variance: Tensor, tensors: Params) -> Tensor:
    r"""KL of each row's code to the marginal r, in nats, ``(rows,)``: how much the code tells about its input.

    .. math:: \tfrac12 \sum_k \Big(\frac{\sigma_k^2 + (\mu_k - m_k)^2}{v_k} - 1 - \log\frac{\sigma_k^2}{v_k}\Big)

    with r(z) = N(m, diag v), the standard normal unless ``tensors`` has a marginal.
    """
    if MARGINAL_LOC in tensors:
        log_scale = tensors[MARGINAL_LOG_SCALE]
        mean = (mean - tensors[MARGINAL_LOC]) * torch.exp(-log_scale)
        log_variance = log_variance - 2 * log_scale
    each = log_variance.exp() + mean.square() - 1 - log_variance
    return 0.5 * each.flatten(1).sum(1)


class RandomCode(Posterior):
    r"""Weights that do not vary, and a code inside the network that does: :math:`z = \mu(x) + \sigma(x)\,\epsilon`.

    What differs from draw to draw is ε, which all inputs of a prediction share, so that a draw is one function of the
    input and does not depend on which rows come along. At each input z has the distribution that it was trained with.

    Args:
        model: The model.
        loc: The weights that the model calls random.
        code: Parameters of the code.
        place: Where in the network it is.
        shape: Shape of one row's code.
        common: See :class:`~knowable.core.posterior.posterior.Posterior`.
    """

    family = "random_code"

    def __init__(self, model: Model, loc: Params, code: Params, *, place: CodePlace, shape: torch.Size, **common: Any):
        model, self._tap = tapped(model, place)
        super().__init__(model, **common)
        self.loc = {name: loc[name].detach().clone() for name in model.random_names if name in loc}
        self.code = {name: value.detach().clone() for name, value in code.items()}
        self.place, self.shape = place, torch.Size(shape)
        self._vectorises = True  # until a module refuses vmap

    def encode(self, x: Any) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the code at inputs ``x``, each ``(rows, ...)``."""
        mean, log_variance = self._moments(x)
        return mean, torch.exp(0.5 * log_variance)

    def rate(self, x: Any) -> Tensor:
        """KL from the code at each input to the marginal, in nats, ``(rows,)``.

        How much the code tells about that input; inputs unlike the training data often have a high rate (Alemi et
        al., 2018).
        """
        return rate_of(*self._moments(x), self.code)

    def _moments(self, x: Any) -> tuple[Tensor, Tensor]:
        x = as_input(x, self.model)
        with torch.no_grad(), self._tap.drawing(self.code, None):
            self.model.forward(self.mean(), x, buffers=self.buffers)
            assert self._tap.moments is not None
            return self._tap.moments

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        return expand_params(self.loc, n)

    def _mean_random(self) -> Params:
        return {name: value.clone() for name, value in self.loc.items()}

    def _std_random(self) -> Params:
        return {name: torch.zeros_like(value) for name, value in self.loc.items()}

    def draw_block(self, start: int, stop: int, samples: int, seed: int) -> Params:
        """The same weights for every draw, without copying them."""
        return self._ordered(expand_params({**self.loc, **self.points}, stop - start))

    def run_draws(self, stack: Params, x: Tensor, *, first: int, seed: int, vectorise: bool) -> Tensor:
        """Outputs for each code; the layers before the code run once where vmap allows it."""
        params, count = index_params(stack, 0), number_of_draws(stack)
        noise = torch.stack([self._noise(seed, first + k) for k in range(count)])

        def outputs(one: Tensor) -> Tensor:
            with self._tap.drawing(self.code, lambda mean: one):
                return self.model.network(params, x, buffers=self.buffers)

        if vectorise and self._vectorises:
            try:
                with no_hidden_loops():
                    return vmap(outputs, chunk_size=DRAWS_AT_ONCE)(noise)
            except RuntimeError:
                self._vectorises = False
        return torch.stack([outputs(one) for one in noise])

    def _noise(self, seed: int, draw: int) -> Tensor:
        generator = generator_for(seed, "code", draw, device=self.model.device)
        return torch.randn(self.shape, generator=generator, dtype=self.model.dtype, device=self.model.device)

    def _tensors(self) -> dict[str, Tensor]:
        parts = ("loc", "code")
        return {f"{part}.{name}": value for part in parts for name, value in getattr(self, part).items()}

    def _settings(self) -> dict[str, Any]:
        place = {"layer": self.place.layer, "entrance": self.place.entrance, "scale": self.place.scale}
        return {"place": place, "shape": list(self.shape)}

    @classmethod
    def _from_tensors(
        cls, model: Model, tensors: dict[str, Tensor], *, place: dict[str, Any], shape: list[int], **common: Any
    ) -> RandomCode:
        loc, code = (without_prefix(part, tensors) for part in ("loc.", "code."))
        return cls(model, loc, code, place=CodePlace(**place), shape=torch.Size(shape), **common)
