"""The Gaussian likelihood: numbers with noise of one size everywhere."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from knowable.core.model.likelihood import DiagonalInformation, Likelihood
from knowable.core.model.prior import Normal
from knowable.core.network.params import Params
from knowable.core.prediction.components import CorrelatedNormal, NormalComponents, NormalOutputs
from knowable.core.prediction.prediction import RegressionPrediction, as_numbers, sum_over_event
from knowable.core.support.checks import as_batch, check_count, check_number, check_type, readable
from knowable.errors import InvalidArgument, InvalidData

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


@dataclass(frozen=True)
class Gaussian(Likelihood):
    r"""Regression with normal noise whose size does not depend on the input.

    .. math:: p(y \mid f) = \mathcal{N}(y \mid f, \mathrm{noise}^2)

    Args:
        noise: Standard deviation of the noise. None: learned, with the prior ``Normal(2.0, loc=-1.0)`` on its
            logarithm, which for standardised targets covers all plausible noise (0.007 to 20 with probability 0.95). It
            begins at 1, their spread: a fit that is cut short is underconfident.
            A positive number: fixed. A sequence: fixed, one for each output.
        outputs: How many outputs have a noise of their own (the last dimension of the network's output); with 1, one
            noise serves all of them.
        missing: Whether NaN in the targets is a value that was not observed: it adds nothing to the log likelihood, and
            scores leave it out. False: NaN is refused. N counts rows, complete or not.

    Example:
        >>> Gaussian().params()
        {'log_noise': tensor(0.)}
        >>> Gaussian(noise=0.1).params()
        {}
    """

    noise_name: ClassVar[str | None] = "log_noise"
    copies: ClassVar[int] = 1

    noise: float | tuple[float, ...] | None = None
    outputs: int = field(default=1, kw_only=True)
    missing: bool = field(default=False, kw_only=True)

    def __repr__(self) -> str:
        missing = ", missing=True" if self.missing else ""
        return f"Gaussian(noise={readable(self.noise)}, outputs={self.outputs!r}{missing})"

    def __post_init__(self) -> None:
        check_type("missing", self.missing, bool, "True or False")
        check_count("outputs", self.outputs)
        if isinstance(self.noise, Iterable) and not isinstance(self.noise, str):
            each = tuple(check_number(f"noise[{i}]", value, above=0.0) for i, value in enumerate(self.noise))
            if not each or self.outputs not in (1, len(each)):
                raise InvalidArgument(f"noise must have one value for each of {self.outputs} outputs, got {len(each)}.")
            object.__setattr__(self, "outputs", len(each))
            object.__setattr__(self, "noise", each[0] if self.outputs == 1 else each)
        elif self.noise is not None:
            object.__setattr__(self, "noise", check_number("noise", self.noise, above=0.0))

    def params(self) -> Params:
        if self.noise is not None:
            return {}
        return {"log_noise": torch.zeros(() if self.outputs == 1 else (self.outputs,))}

    def priors(self) -> dict[str, Normal]:
        return {"log_noise": Normal(2.0, loc=-1.0)} if self.noise is None else {}

    def noise_scale(self, params: Params, *, like: Tensor) -> Tensor:
        """Standard deviation of the noise, of shape ``()`` or ``(outputs,)`` (after any leading sample dimension)."""
        return self._log_noise(params, like).exp()

    def check_target(self, y: Tensor, output: Tensor, *, name: str = "y") -> Tensor:
        if self.outputs > 1 and (output.dim() < 2 or output.shape[-1] != self.outputs):
            raise InvalidData(
                f"This Gaussian has a noise for each of {self.outputs} outputs, but the network's output has shape "
                f"{as_batch(output.shape)}. Give outputs={output.shape[-1] if output.dim() > 1 else 1}, or change the "
                f"network's last layer."
            )
        return as_numbers(y, output, output.shape[1:], name=name, missing=self.missing)

    def counted(self, y: Tensor) -> Tensor | None:
        return ~torch.isnan(y) if self.missing else None

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        if self.missing:
            known, log_noise = ~torch.isnan(y), self._log_noise(params, output)
            scaled = (torch.nan_to_num(y) - output) * torch.exp(-log_noise)
            return sum_over_event((-0.5 * scaled.square() - (log_noise + HALF_LOG_TWO_PI)) * known)
        count = output.shape[1:].numel()
        if isinstance(self.noise, float):
            squares = sum_over_event((y - output).square())
            return squares * (-0.5 / self.noise**2) - count * (math.log(self.noise) + HALF_LOG_TWO_PI)
        log_noise = self._log_noise(params, output)
        if log_noise.dim() == 0:  # sum first: one number a row to scale
            squares = sum_over_event((y - output).square()) * torch.exp(-2.0 * log_noise)
            return -0.5 * squares - count * (log_noise + HALF_LOG_TWO_PI)
        squares = sum_over_event(((y - output) * torch.exp(-log_noise)).square())
        return -0.5 * squares - (count // self.outputs) * log_noise.sum() - count * HALF_LOG_TWO_PI

    def predict(self, outputs: Tensor, params: Params, log_weights: Tensor) -> RegressionPrediction:
        scale = self.noise_scale(params, like=outputs)
        components = NormalComponents(outputs, self._over_draws(scale, outputs))
        return RegressionPrediction(components, log_weights, missing=self.missing)

    def predict_normal(self, outputs: NormalOutputs, params: Params) -> RegressionPrediction:
        """One normal distribution: the noise and the outputs' own variance add up."""
        if (outputs.covariance is None or self.missing) and outputs.mean[0].numel() > 1:  # correlations are unknown,
            return super().predict_normal(outputs, params)  # type: ignore[return-value]  # or of what was observed
        mean, within = outputs.mean.unsqueeze(0), outputs.variance.unsqueeze(0)
        noise = self.noise_scale(params, like=outputs.mean).square().expand_as(mean)
        scale = (noise + within.to(mean.dtype)).sqrt()
        if outputs.covariance is None or outputs.covariance.shape[-1] == 1:
            components = NormalComponents(mean, scale)
        else:
            total = outputs.covariance.double() + noise.double().reshape(len(mean[0]), -1).diag_embed()
            components = CorrelatedNormal(mean, scale, torch.linalg.cholesky(total).to(mean.dtype))
        log_weights = torch.zeros(1, dtype=mean.dtype, device=mean.device)
        return RegressionPrediction(
            components, log_weights, within=within.to(mean.dtype), samples=outputs.draws, missing=self.missing
        )

    def information(self, output: Tensor, params: Params) -> DiagonalInformation:
        return DiagonalInformation(self.noise_scale(params, like=output).pow(-2.0).expand_as(output))

    def _log_noise(self, params: Params, like: Tensor) -> Tensor:
        if self.noise is None:
            return params["log_noise"]
        return torch.tensor(self.noise, dtype=like.dtype, device=like.device).log()

    def _over_draws(self, scale: Tensor, outputs: Tensor) -> Tensor:
        """Reshape the noise so that it broadcasts against ``(K, batch, ...)``."""
        own = (self.outputs,) if self.outputs > 1 else ()
        if scale.dim() == len(own):  # the same for all draws
            return scale
        return scale.reshape(outputs.shape[0], *(1,) * (outputs.dim() - 1 - len(own)), *own)
