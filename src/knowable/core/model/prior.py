"""What a prior must be able to do, and how priors over parameters compose.

Two levels. A :class:`Prior` is a distribution over the elements of one tensor (``Normal(1.0)``). A :class:`JointPrior`
is a distribution over all parameters of a model: :class:`PriorByName` puts one Prior on each parameter by glob, and a
fitted posterior is a joint prior for the next data set.
"""

from __future__ import annotations

import fnmatch
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from knowable.core.network.params import Layout, Params, without_prefix
from knowable.core.prediction.components import normal_log_prob
from knowable.core.support.checks import check_number, readable_fields
from knowable.errors import InvalidArgument, InvalidType, Unsupported

HYPER_PREFIX = "prior."


class Prior(ABC):
    """A distribution over the elements of a tensor, independent and identical.

    Concrete priors are frozen dataclasses whose fields are plain numbers (they are written to JSON by name) and define
    :meth:`log_prob`; for draws from it, such as those of ``model.prior_predict``, also :meth:`sample`. Where a closed
    form exists they define :meth:`kl_from_normal` and :meth:`normal_moments`.

    Attributes:
        proper: Whether it integrates to one; an improper prior has no evidence and no draws.
        binary: Whether its values are 0 and 1, and nothing between.
    """

    proper: ClassVar[bool] = True
    binary: ClassVar[bool] = False

    @abstractmethod
    def log_prob(self, value: Tensor) -> Tensor:
        """Log density of each element of ``value`` (same shape)."""

    def sample(self, shape: Iterable[int], *, generator: torch.Generator | None = None, like: Tensor) -> Tensor:
        """Draw a tensor of ``shape`` with the dtype and device of ``like``."""
        if self.proper:
            raise Unsupported(
                f"{type(self).__name__} does not define sample(shape, generator=..., like=...): define it."
            )
        raise Unsupported(f"{self!r} is improper and cannot be sampled. Use a proper prior such as Normal(1.0).")

    def kl_from_normal(self, loc: Tensor, scale: Tensor) -> Tensor | None:
        """KL(N(loc, scale²) ‖ self) summed over elements, or None where there is no closed form."""
        return None

    def normal_moments(self) -> tuple[float | Tensor, float | Tensor] | None:
        """``(mean, precision)`` if this prior is Gaussian (a flat prior has precision 0), else None."""
        return None

    def __repr__(self) -> str:
        return readable_fields(self) if is_dataclass(self) else super().__repr__()

    # Priors with hyperparameters of their own (EmpiricalBayes) define the methods below.

    def hyperparams(self, like: Tensor) -> Params:
        """Initial values of hyperparameters that are learned with everything else, by name."""
        return {}

    def bind(self, hyperparams: Params) -> Prior:
        """The prior at given values of its hyperparameters."""
        return self

    def log_hyperprior(self, hyperparams: Params) -> Tensor | float:
        """Log density of the hyperparameters."""
        return 0.0

    def hyper_group(self, name: str, glob: str) -> str:
        """Which parameters share one set of hyperparameters: by default all that the ``glob`` matches."""
        return glob


class JointPrior(ABC):
    """A distribution over a model's parameters as a whole."""

    kind: ClassVar[str]  # name in saved artifacts
    kinds: ClassVar[dict[str, type[JointPrior]]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "kind" in cls.__dict__:
            JointPrior.kinds[cls.kind] = cls

    def described(self) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Plain values and tensors from which :meth:`from_description` makes it again."""
        raise InvalidArgument(f"A model whose prior is {self!r} cannot be saved.")

    @classmethod
    def from_description(cls, about: Mapping[str, Any], tensors: dict[str, Tensor]) -> JointPrior:
        """The inverse of :meth:`described`."""
        raise Unsupported(f"{cls.__name__} cannot be loaded.")

    @abstractmethod
    def log_prob(self, params: Params) -> Tensor:
        """Log density of one set of parameters (a scalar)."""

    @abstractmethod
    def sample(self, like: Params, *, generator: torch.Generator | None = None) -> Params:
        """Draw one set of parameters with the shapes of ``like``."""

    @abstractmethod
    def prior_of(self, name: str) -> Prior | None:
        """The elementwise prior on one parameter, or None if the prior does not factorise that way."""

    def hyperparams(self) -> Params:
        """Initial values of all hyperparameters, by name (each begins with ``prior.``)."""
        return {}

    def bound(self, name: str, params: Params) -> Prior | None:
        """The elementwise prior on one parameter at the hyperparameters found in ``params``, or None."""
        return self.prior_of(name)

    def log_hyperprior(self, params: Params) -> Tensor | float:
        """Log density of the hyperparameters."""
        return 0.0

    def joint_normal(self, layout: Layout) -> tuple[Tensor, Tensor] | None:
        """Mean ``(D,)`` and precision ``(D, D)`` over ``layout``, where the prior is one correlated normal."""
        return None

    def joint_kl(self, loc: Params, scale: Params) -> Tensor | None:
        """KL(q ‖ self) for independent normals q over all random parameters, where it has a closed form as a whole."""
        return None


@runtime_checkable
class BecomesPrior(Protocol):
    """Something that a model takes as its prior once it has been turned into one: a fitted posterior."""

    def as_prior(self) -> JointPrior:
        """The same distribution as a prior."""
        ...


class PriorByName(JointPrior):
    """One elementwise prior on each parameter, chosen by the first glob that matches its name."""

    def __init__(self, prior: Prior | Mapping[str, Prior], params: Params, *, own: Mapping[str, Prior] | None = None):
        """Resolve ``prior`` over ``params``.

        Args:
            prior: One prior for all parameters, or globs in order of precedence.
            params: The parameters to cover.
            own: Priors the likelihood brings for its own parameters, used unless a glob names them explicitly.
        """
        self.globs = {"*": prior} if isinstance(prior, Prior) else dict(prior)
        for glob, each in self.globs.items():
            if not isinstance(glob, str):
                raise InvalidType(f"prior must map names or globs to priors; {glob!r} is not a name.")
            if not isinstance(each, Prior):
                raise InvalidType(f"prior[{glob!r}] must be a knowable prior such as Normal(1.0), got {each!r}.")
        self._glob_of: dict[str, str] = {}
        self._own = dict(own or {})
        for name in params:
            self._resolve(name)
        used = {glob for glob in self.globs for name in params if fnmatch.fnmatchcase(name, glob)}
        unused = [glob for glob in self.globs if glob != "*" and glob not in used]
        if unused:
            raise InvalidArgument(
                f"prior has no parameter to match {', '.join(map(repr, unused))}. "
                f"The parameters are: {_listing(params)}."
            )
        self._hyperparams = self._make_hyperparams(params)

    def _resolve(self, name: str) -> None:
        if name in self._own:
            explicit = [g for g in self.globs if g.startswith(name.split(".")[0]) and fnmatch.fnmatchcase(name, g)]
            if not explicit:
                return
            self._own.pop(name)
            self._glob_of[name] = explicit[0]
            return
        for glob in self.globs:
            if fnmatch.fnmatchcase(name, glob):
                self._glob_of[name] = glob
                return
        raise InvalidArgument(
            f"prior has no entry for parameter {name!r}: add a glob that matches it, or '*' for all other parameters."
        )

    def _make_hyperparams(self, params: Params) -> Params:
        made: Params = {}
        for name, value in params.items():
            prefix = self._hyper_prefix(name)
            for key, initial in self._unbound(name).hyperparams(value).items():
                made.setdefault(prefix + key, initial)
        return made

    def _hyper_prefix(self, name: str) -> str:
        glob = self._glob_of.get(name, name)  # what the likelihood brings has no glob
        return f"{HYPER_PREFIX}{self._unbound(name).hyper_group(name, glob)}."

    def _unbound(self, name: str) -> Prior:
        return self._own[name] if name in self._own else self.globs[self._glob_of[name]]

    def hyperparams(self) -> Params:
        return dict(self._hyperparams)

    def prior_of(self, name: str) -> Prior:
        """The elementwise prior on one parameter, before its hyperparameters are bound."""
        return self._unbound(name)

    def bound(self, name: str, params: Params) -> Prior:
        prior = self._unbound(name)
        return prior.bind(self._own_hyperparams(name, params)) if self._hyperparams else prior

    def _own_hyperparams(self, name: str, params: Params) -> Params:
        return without_prefix(self._hyper_prefix(name), params)

    def log_prob(self, params: Params) -> Tensor:
        terms = [
            self.bound(name, params).log_prob(value).sum()
            for name, value in params.items()
            if name not in self._hyperparams
        ]
        return torch.stack(terms).sum() + self.log_hyperprior(params) if terms else torch.zeros(())

    def log_hyperprior(self, params: Params) -> Tensor | float:
        """Sum of the log densities of the hyperparameters, each set counted once."""
        total: Tensor | float = 0.0
        seen = set()
        for name in [*self._glob_of, *self._own]:
            prefix = self._hyper_prefix(name)
            if prefix not in seen:
                seen.add(prefix)
                total = total + self._unbound(name).log_hyperprior(self._own_hyperparams(name, params))
        return total

    def sample(self, like: Params, *, generator: torch.Generator | None = None) -> Params:
        """Draw every parameter from its prior; hyperparameters stay at their values in ``like``."""
        drawn: Params = {}
        for name, value in like.items():
            if name in self._hyperparams:
                drawn[name] = value
                continue
            try:
                drawn[name] = self.bound(name, like).sample(value.shape, generator=generator, like=value)
            except Unsupported as error:
                raise Unsupported(f"Cannot draw parameter {name!r} from its prior: {error}") from None
        return drawn

    def __repr__(self) -> str:
        if set(self.globs) == {"*"}:
            return repr(self.globs["*"])
        return "{" + ", ".join(f"{glob!r}: {prior!r}" for glob, prior in self.globs.items()) + "}"


def _listing(names: Iterable[str], most: int = 12) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (f", and {len(names) - most} more" if len(names) > most else "")


@dataclass(frozen=True, repr=False)
class Normal(Prior):
    r"""Independent normal distributions over the elements of a parameter.

    .. math:: p(w) = \mathcal{N}(w \mid \mathrm{loc}, \mathrm{scale}^2)

    Args:
        scale: Standard deviation, above 0. The default suits networks whose inputs are standardised.
        loc: Mean.

    Example:
        >>> Normal(2.0).normal_moments()
        (0.0, 0.25)
    """

    scale: Scale = 1.0
    loc: Scale = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "scale", check_scale("scale", self.scale))
        if not isinstance(self.loc, Tensor):
            object.__setattr__(self, "loc", check_number("loc", self.loc))

    def log_prob(self, value: Tensor) -> Tensor:
        return normal_log_prob(value, self.loc, self.scale)

    def sample(self, shape: Iterable[int], *, generator: torch.Generator | None = None, like: Tensor) -> Tensor:
        noise = torch.randn(tuple(shape), generator=generator, dtype=like.dtype, device=like.device)
        return self.loc + self.scale * noise

    def kl_from_normal(self, loc: Tensor, scale: Tensor) -> Tensor:
        r"""KL from a normal, in closed form.

        .. math:: \sum \tfrac{1}{2}\Big(\frac{s^2 + (m - \mathrm{loc})^2}{\mathrm{scale}^2} - 1\Big)
            - \log\frac{s}{\mathrm{scale}}
        """
        ratio = scale / self.scale
        distance = (loc - self.loc) / self.scale
        return (0.5 * (ratio.square() + distance.square() - 1.0) - ratio.log()).sum()

    def normal_moments(self) -> tuple[Scale, Scale]:
        return self.loc, 1.0 / self.scale**2


def fixed_normal(prior: Prior | None) -> tuple[Scale, Scale] | None:
    """Mean and precision of a normal or flat prior whose values are not learned, else None."""
    return None if prior is None or prior.hyperparams(torch.zeros(())) else prior.normal_moments()


Scale = float | Tensor
"""A positive scale. Users give a number; a learned scale is a tensor."""


def check_scale(name: str, value: Any) -> Scale:
    """Return ``value`` as a positive float; a tensor is a learned scale, positive by construction, and passes."""
    return value if isinstance(value, Tensor) else check_number(name, value, above=0.0)


def log_of(scale: Scale) -> Scale:
    """The logarithm of a scale, of the same kind."""
    return scale.log() if isinstance(scale, Tensor) else math.log(scale)
