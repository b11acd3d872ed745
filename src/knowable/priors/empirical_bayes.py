"""A prior whose scale is learned from the data."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from knowable.core.model.prior import Normal, Prior
from knowable.core.network.params import Params
from knowable.core.support.checks import check_choice, check_type
from knowable.priors.laplace import LaplacePrior
from knowable.priors.student_t import StudentTPrior

_ROOT = "(network)"  # the module whose path is empty


@dataclass(frozen=True, repr=False)
class EmpiricalBayes(Prior):
    r"""Learn the scale of a prior together with the posterior: type-II maximum likelihood (MacKay, 1992).

    .. math:: \max_{s}\ \log p(D \mid s) + \log p(\log s)

    The logarithm of the scale joins the parameters of the model, and whatever bound or estimate of the evidence the
    method maximises is maximised over it as well.

    Args:
        prior: What to learn the scale of: ``Normal``, ``LaplacePrior`` or ``StudentTPrior``. Its scale is where the
            search begins.
        hyperprior: A prior on the logarithm of the scale; None is flat.
        per: ``"glob"``: all parameters that the glob matches share one scale (a single one if it is ``"*"``).
            ``"layer"``: of these, the parameters of each module, its weight and its bias. ``"parameter"``: each tensor
            has its own. ``"weight"``: each element of every tensor has its own (automatic relevance determination).
            The more scales, the more the data choose their own prior: see the page on empirical Bayes before going
            beyond layers.

    Example:
        >>> EmpiricalBayes(Normal(1.0)).hyperparams(torch.zeros(3))
        {'log_scale': tensor(0.)}
    """

    prior: Normal | LaplacePrior | StudentTPrior
    hyperprior: Prior | None = None
    per: str = field(default="glob", kw_only=True)

    def __post_init__(self) -> None:
        check_type(
            "prior", self.prior, (Normal, LaplacePrior, StudentTPrior), "a Normal, LaplacePrior or StudentTPrior"
        )
        if self.hyperprior is not None:
            check_type("hyperprior", self.hyperprior, Prior, "None or a prior such as Normal(1.0)")
        check_choice("per", self.per, ("glob", "layer", "parameter", "weight"))

    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of each element at the initial scale."""
        return self.prior.log_prob(value)

    def sample(self, shape: Iterable[int], *, generator: torch.Generator | None = None, like: Tensor) -> Tensor:
        return self.prior.sample(shape, generator=generator, like=like)

    def kl_from_normal(self, loc: Tensor, scale: Tensor) -> Tensor | None:
        """KL from a normal at the initial scale, where the wrapped prior has one."""
        return self.prior.kl_from_normal(loc, scale)

    def normal_moments(self) -> tuple[float | Tensor, float | Tensor] | None:
        return self.prior.normal_moments()

    def hyperparams(self, like: Tensor) -> Params:
        shape = like.shape if self.per == "weight" else ()
        return {"log_scale": torch.full(shape, math.log(self.prior.scale), dtype=like.dtype, device=like.device)}

    def bind(self, hyperparams: Params) -> Prior:
        """The wrapped prior at the given scale, differentiable in it."""
        return dataclasses.replace(self.prior, scale=hyperparams["log_scale"].exp())

    def log_hyperprior(self, hyperparams: Params) -> Tensor | float:
        return 0.0 if self.hyperprior is None else self.hyperprior.log_prob(hyperparams["log_scale"]).sum()

    def hyper_group(self, name: str, glob: str) -> str:
        """Which parameters share a scale: those of the glob, of the module, or no others."""
        if self.per != "layer":
            return glob if self.per == "glob" else name
        module = name.rpartition(".")[0] or _ROOT
        return module if glob == "*" else f"{module} ({glob})"
