"""The Student-t likelihood: numbers with outliers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from knowable.core.model.likelihood import DiagonalInformation, Likelihood
from knowable.core.model.prior import Normal
from knowable.core.network.params import Params
from knowable.core.prediction.prediction import Components, RegressionPrediction, as_numbers, sum_over_event
from knowable.core.support.checks import check_number
from knowable.priors.student_t import standard_student_t, student_t_log_prob


@dataclass(frozen=True)
class StudentT(Likelihood):
    r"""Regression with heavy-tailed noise: one outlier cannot drag the fit away (Lange et al., 1989).

    .. math:: p(y \mid f) = \frac{\Gamma(\frac{\nu + 1}{2})}{\Gamma(\frac{\nu}{2}) \sqrt{\nu \pi}\, s}
        \Big(1 + \frac{(y - f)^2}{\nu s^2}\Big)^{-(\nu + 1) / 2}

    The noise variance is :math:`s^2 \nu / (\nu - 2)`, infinite for ``df`` of 2 or less; for ``df`` of 1 or less there
    is no mean either, and the prediction's ``mean`` is the mixture of the centres.

    Args:
        df: Degrees of freedom, above 0. Small is heavy-tailed; the default of 4 is robust and still has a finite
            variance.
        scale: Scale of the noise. None: learned, with the prior ``Normal(2.0, loc=-1.0)`` on its logarithm. A positive
            number: fixed.
    """

    noise_name: ClassVar[str | None] = "log_scale"

    df: float = 4.0
    scale: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "df", check_number("df", self.df, above=0.0))
        if self.scale is not None:
            object.__setattr__(self, "scale", check_number("scale", self.scale, above=0.0))

    def params(self) -> Params:
        return {"log_scale": torch.tensor(0.0)} if self.scale is None else {}

    def priors(self) -> dict[str, Normal]:
        return {"log_scale": Normal(2.0, loc=-1.0)} if self.scale is None else {}

    def noise_scale(self, params: Params, *, like: Tensor) -> Tensor:
        """Scale of the noise, of shape ``()`` (after any leading sample dimension)."""
        if self.scale is None:
            return params["log_scale"].exp()
        return torch.tensor(self.scale, dtype=like.dtype, device=like.device)

    def check_target(self, y: Tensor, output: Tensor, *, name: str = "y") -> Tensor:
        return as_numbers(y, output, output.shape[1:], name=name)

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        scale = self.noise_scale(params, like=output)
        return sum_over_event(student_t_log_prob(y - output, self.df, scale))

    def predict(self, outputs: Tensor, params: Params, log_weights: Tensor) -> RegressionPrediction:
        scale = self.noise_scale(params, like=outputs).reshape(-1, *(1,) * (outputs.dim() - 1))  # (K or 1, 1, ...)
        return RegressionPrediction(StudentTComponents(self.df, outputs, scale), log_weights)

    def information(self, output: Tensor, params: Params) -> DiagonalInformation:
        """(df + 1) / (df + 3) / scale²."""
        factor = (self.df + 1.0) / (self.df + 3.0)
        return DiagonalInformation((factor * self.noise_scale(params, like=output).pow(-2.0)).expand_as(output))


@dataclass
class StudentTComponents(Components):
    """One Student-t distribution for each posterior draw, row and output."""

    discrete = False

    df: float  # degrees of freedom
    loc: Tensor  # centres, (K, batch, ...)
    scale: Tensor  # scales, broadcastable to loc

    @property
    def mean(self) -> Tensor:
        return self.loc  # the centre, also where ``df`` is 1 or less and there is no mean

    @property
    def variance(self) -> Tensor:
        factor = self.df / (self.df - 2.0) if self.df > 2.0 else torch.inf
        return (factor * self.scale.square()).expand_as(self.loc)

    def log_prob(self, y: Tensor) -> Tensor:
        return student_t_log_prob(y - self.loc, self.df, self.scale)

    def cdf(self, y: Tensor) -> Tensor:
        from scipy.special import stdtr  # on the CPU

        distance = ((y - self.loc) / self.scale).detach().cpu().double().numpy()
        return torch.as_tensor(stdtr(self.df, distance)).to(dtype=self.loc.dtype, device=self.loc.device)

    def sample(self, index: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        noise = standard_student_t(self.df, index.shape, generator=generator, like=self.loc)
        return self.loc.gather(0, index) + self.scale.expand_as(self.loc).gather(0, index) * noise


@dataclass
class CorrelatedStudentT(StudentTComponents):
    """Student-t components whose outputs are correlated within a row, and share what makes their tails heavy."""

    factor: Tensor  # cholesky factor of each row's scale matrix, (rows, outputs, outputs)

    def log_prob(self, y: Tensor) -> Tensor:
        r"""Log density of each output given those before it in the row; their sum is the joint log density.

        In standardised coordinates z the next one is again a Student t (Ding, 2016):

        .. math:: z_k \mid z_{<k} \sim \mathrm{St}_{\nu + k - 1}\Big(0,
            \tfrac{\nu + |z_{<k}|^2}{\nu + k - 1}\Big)
        """
        difference = (y - self.loc[0]).reshape(*self.factor.shape[:-1], 1)
        standard = torch.linalg.solve_triangular(self.factor, difference, upper=False).squeeze(-1)
        before = standard.square().cumsum(-1) - standard.square()
        df = self.df + torch.arange(standard.shape[-1], dtype=standard.dtype, device=standard.device)
        scale = ((self.df + before) / df).sqrt()
        constant = torch.lgamma((df + 1) / 2) - torch.lgamma(df / 2) - 0.5 * (df * torch.pi).log()
        each = constant - scale.log() - (df + 1) / 2 * torch.log1p((standard / scale).square() / df)
        return (each - self.factor.diagonal(dim1=-2, dim2=-1).log()).reshape(self.loc.shape)

    def sample(self, index: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        """One outcome for each entry of ``index`` ``(n, rows, ...)``; outputs of a row are drawn together."""
        flat = (len(index), *self.factor.shape[:-1], 1)
        noise = torch.randn(flat, generator=generator, dtype=self.loc.dtype, device=self.loc.device)
        half = torch.full((*flat[:2], 1, 1), 0.5 * self.df, dtype=torch.float64, device=self.loc.device)
        gamma = torch._standard_gamma(half, generator=generator)  # pyright: ignore[reportPrivateImportUsage]
        shrink = (gamma / (0.5 * self.df)).rsqrt().to(noise.dtype)
        return self.loc + (self.factor @ noise * shrink).reshape(index.shape)
