"""Kernels of Gaussian processes: GPyTorch's, by name or as the user made them, and how they are saved without code."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.support.checks import check_choice
from knowable.errors import DamagedArtifact, InvalidArgument, InvalidType, MissingExtra

KERNELS = ("rbf", "matern12", "matern32", "matern52", "linear")
_SMOOTHNESS = {"matern12": 0.5, "matern32": 1.5, "matern52": 2.5}
_MOST_SCALES = 100  # inputs that have a length scale each; of more, all have the same
_SPREAD = 2.0  # standard deviation of the logarithm of a length scale, variance or output scale, under its prior


def gpytorch() -> Any:
    """The package, or an error that says how to get it."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of torch.jit, which a dependency still uses
            import gpytorch
    except ImportError:
        raise MissingExtra("Gaussian processes need GPyTorch: pip install 'knowable[gp]'.") from None
    return gpytorch


def check_kernel(kernel: Any) -> None:
    """Refuse what is neither the name of a kernel nor one of GPyTorch's."""
    if isinstance(kernel, str):
        check_choice("kernel", kernel, KERNELS)
        return
    if not isinstance(kernel, nn.Module) or not isinstance(kernel, gpytorch().kernels.Kernel):
        raise InvalidType(
            f"kernel must be one of {', '.join(map(repr, KERNELS))} or a kernel of GPyTorch, got "
            f"{type(kernel).__name__}."
        )
    if kernel.batch_shape:
        raise InvalidArgument(f"kernel must be one kernel, got a batch of shape {tuple(kernel.batch_shape)}.")  # type: ignore[arg-type]


class Covariance(nn.Module):
    """A kernel as a function of points, in double precision.

    Positive hyperparameters are parameters by their logarithms: a step changes them in proportion.

    Args:
        kernel: A kernel of GPyTorch; a copy is taken.
    """

    def __init__(self, kernel: Any):
        super().__init__()
        self.kernel = copy.deepcopy(kernel).double()
        found = [(param, bounds, bounds.transform(param.detach())) for _, param, bounds in self._positive()]
        for param, bounds, value in found:
            del bounds._transform  # a module, in whose place no function may be set
            bounds._transform, bounds._inv_transform = torch.exp, torch.log
            param.data = bounds.inverse_transform(value)

    @classmethod
    def of(cls, kernel: Any, dimension: int) -> Covariance:
        """Of a kernel, or of a name for inputs of so many standardised columns."""
        if not isinstance(kernel, str):
            return cls(kernel)
        parts, priors = gpytorch().kernels, gpytorch().priors

        def prior(mode: float) -> Any:
            return priors.LogNormalPrior(math.log(mode) + _SPREAD**2, _SPREAD)

        scales, first = dimension if dimension <= _MOST_SCALES else None, math.sqrt(dimension)
        if kernel == "linear":
            made = parts.LinearKernel(variance_prior=prior(1 / dimension), ard_num_dims=scales)
            made.variance = 1 / dimension
            return cls(made)
        common = {"ard_num_dims": scales, "lengthscale_prior": prior(first)}
        inner = parts.RBFKernel(**common) if kernel == "rbf" else parts.MaternKernel(_SMOOTHNESS[kernel], **common)
        inner.lengthscale = first
        made = parts.ScaleKernel(inner, outputscale_prior=prior(1.0))
        made.outputscale = 1.0
        return cls(made)

    def forward(self, a: Tensor | None = None, b: Tensor | None = None) -> Tensor:
        """Covariances ``(..., rows of a, rows of b)``; without points, the log prior of the hyperparameters."""
        if a is None:
            some = next(self.kernel.parameters(), None)
            total = torch.zeros((), dtype=torch.float64, device=None if some is None else some.device)
            for _, module, prior, value, _ in self.kernel.named_priors():
                total = total + prior.log_prob(value(module)).sum()
            return total
        with gpytorch().settings.lazily_evaluate_kernels(False):
            return self.kernel(a, a if b is None else b).to_dense()

    def diagonal(self, a: Tensor) -> Tensor:
        """Variances ``(..., rows)``."""
        with gpytorch().settings.lazily_evaluate_kernels(False):
            found = self.kernel(a, diag=True)
        return found if isinstance(found, Tensor) else found.to_dense()

    def learned(self) -> dict[str, Tensor]:
        """Values of the hyperparameters that are to be learned: those that require a gradient."""
        return {name: value.detach().clone() for name, value in self.named_parameters() if value.requires_grad}

    def terms(self) -> dict[str, float]:
        """The hyperparameters in their own units, averaged over the inputs, for the diagnostics."""
        found = {}
        for name, param, bounds in self.kernel.named_parameters_and_constraints():
            value = param.detach() if bounds is None else bounds.transform(param.detach())
            found[f"kernel.{name.replace('raw_', '').replace('base_kernel.', '')}"] = value.mean().item()
        return found

    def _positive(self) -> list[tuple[str, Tensor, Any]]:
        bounds = gpytorch().constraints
        every = self.kernel.named_parameters_and_constraints()
        return [each for each in every if type(each[2]) in (bounds.Positive, bounds.GreaterThan) and each[2].enforced]

    # --- on disk -----------------------------------------------------------------------------------------------------

    def described(self) -> dict[str, Any]:
        """The kernel's structure as plain values; its numbers are :meth:`tensors`."""
        try:
            description = {"kernel": _describe(self.kernel), "intervals": self._intervals()}
            Covariance.built(description, self.tensors())
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError, DamagedArtifact):
            raise InvalidArgument(
                f"A posterior with the kernel {type(self.kernel).__name__} cannot be saved: an artifact holds kernels "
                f"made of {', '.join(_SAVED)} with numbers as settings, and no code."
            ) from None
        return description

    @classmethod
    def built(cls, description: Mapping[str, Any], state: Mapping[str, Tensor]) -> Covariance:
        """The inverse of :meth:`described`."""
        made = cls(_build(description["kernel"]))
        for name, (lower, upper) in description["intervals"].items():
            path, _, raw = name.rpartition(".")
            made.kernel.get_submodule(path).register_constraint(raw, gpytorch().constraints.Interval(lower, upper))
        made.double().load_state_dict(dict(state))
        return made.to(next(iter(state.values())).device) if state else made

    def tensors(self) -> dict[str, Tensor]:
        """Hyperparameters, bounds and dimensions by name; priors, which count only in a fit, are left out."""
        return {name: value for name, value in self.state_dict().items() if "_prior." not in name}

    def _intervals(self) -> dict[str, list[float]]:
        """Bounds of hyperparameters that stay between two numbers."""
        every = self.kernel.named_parameters_and_constraints()
        kind = gpytorch().constraints.Interval
        return {name: [float(b.lower_bound), float(b.upper_bound)] for name, _, b in every if type(b) is kind}


_SAVED: dict[str, tuple[str, ...]] = {  # kernels that are saved, and their settings
    "RBFKernel": (), "MaternKernel": ("nu",), "RQKernel": (), "LinearKernel": (), "PeriodicKernel": (),
    "CosineKernel": (), "ConstantKernel": (), "PolynomialKernel": ("power",), "PiecewisePolynomialKernel": ("q",),
    "SpectralMixtureKernel": ("num_mixtures",), "ScaleKernel": (), "AdditiveKernel": (), "ProductKernel": (),
}  # fmt: skip


def _describe(kernel: Any) -> dict[str, Any]:
    name = type(kernel).__name__
    if type(kernel) is not getattr(gpytorch().kernels, name):
        raise TypeError(name)
    settings = {each: getattr(kernel, each) for each in _SAVED[name]}
    if kernel.ard_num_dims is not None:
        settings["ard_num_dims"] = int(kernel.ard_num_dims)
    if kernel.active_dims is not None:
        settings["active_dims"] = kernel.active_dims.tolist()
    if not all(isinstance(value, int | float | list) for value in settings.values()):
        raise TypeError(name)
    parts = [kernel.base_kernel] if name == "ScaleKernel" else list(getattr(kernel, "kernels", []))
    return {"name": name, "settings": settings, "parts": [_describe(part) for part in parts]}


def _build(description: Mapping[str, Any]) -> Any:
    name = description["name"]
    if name not in _SAVED:
        raise DamagedArtifact(f"The saved posterior has a kernel {name!r}, which this version does not have.")
    return getattr(gpytorch().kernels, name)(*map(_build, description["parts"]), **description["settings"])
