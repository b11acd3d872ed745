"""Test-time augmentation, and augmentations: random transformations of the input that keep its label.

An augmentation draws one transformation and applies it to all rows, so that a draw is one function of the input, like a
draw of the weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from knowable.core.method import FitJob, Method
from knowable.core.model.model import Model
from knowable.core.model.prior import JointPrior
from knowable.core.network.params import Buffers, Params, expand_params, index_params, number_of_draws
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.checks import check_count, check_number, check_type
from knowable.core.support.randomness import derive_seed, generator_for, own_randomness
from knowable.errors import InvalidArgument, InvalidData, InvalidType, Unsupported
from knowable.inference.dropout.mc_dropout import MCDropout


class Augmentation(ABC):
    """A random transformation of inputs. Subclasses are frozen dataclasses of plain numbers, which can be saved."""

    @abstractmethod
    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Draw one transformation and apply it to all rows of ``x``."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"name": type(self).__name__, **asdict(self)}  # type: ignore[call-overload]


def augmentation_from(saved: dict[str, Any]) -> Augmentation:
    """The inverse of :meth:`Augmentation.to_json`, for the augmentations of this module."""
    known: dict[str, Any] = {cls.__name__: cls for cls in (InputNoise, Shift, Flip)}
    values = dict(saved)
    cls = known[values.pop("name")]
    return cls(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})


@dataclass(frozen=True)
class InputNoise(Augmentation):
    r"""Normal noise on every input: :math:`x + s\,\xi`, with one ξ for all rows.

    Args:
        scale: Standard deviation s, in the units of the inputs.
    """

    scale: float = 0.1

    def __post_init__(self) -> None:
        check_number("scale", self.scale, above=0)

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """``x`` with noise."""
        if not x.is_floating_point():
            raise Unsupported(
                "InputNoise needs floating-point inputs, got integers (words, classes). Use another augmentation."
            )
        noise = torch.randn(x.shape[1:], generator=generator, dtype=x.dtype, device=x.device)
        return x + self.scale * noise


@dataclass(frozen=True)
class Shift(Augmentation):
    """Images shifted by a random number of pixels, padded with zeros.

    Args:
        pixels: The largest shift, in either direction.
        dims: Dimensions along which images are shifted, each independently: by default height and width.
    """

    pixels: int = 1
    dims: tuple[int, ...] = (-2, -1)

    def __post_init__(self) -> None:
        check_count("pixels", self.pixels)
        object.__setattr__(self, "dims", _dims("dims", self.dims))

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """``x``, shifted."""
        moves: dict[str, Any] = {
            "low": -self.pixels,
            "high": self.pixels + 1,
            "generator": generator,
            "device": generator.device,
        }
        for dim in self.dims:
            x = _moved(x, int(torch.randint(size=(), **moves)), dim)
        return x


@dataclass(frozen=True)
class Flip(Augmentation):
    """Images mirrored with probability one half.

    Args:
        dims: Dimensions along which images are mirrored, each independently: by default the width.
    """

    dims: tuple[int, ...] = (-1,)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dims", _dims("dims", self.dims))

    def __call__(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """``x``, mirrored or not."""
        coins = torch.rand(len(self.dims), generator=generator, device=generator.device) < 0.5
        chosen = [dim for dim, coin in zip(self.dims, coins.tolist(), strict=True) if coin]
        return x.flip(chosen) if chosen else x


def _moved(x: Tensor, move: int, dim: int) -> Tensor:
    if move == 0:
        return x
    kept = max(0, x.shape[dim] - abs(move))
    moved = torch.zeros_like(x)
    source = x.narrow(dim, 0 if move > 0 else x.shape[dim] - kept, kept)
    moved.narrow(dim, x.shape[dim] - kept if move > 0 else 0, kept).copy_(source)
    return moved


def _dims(name: str, dims: Any) -> tuple[int, ...]:
    if not isinstance(dims, tuple | list) or not all(isinstance(dim, int) for dim in dims):
        raise InvalidType(f"{name} must be dimensions such as (-2, -1), got {dims!r}.")
    if not dims or 0 in dims:
        raise InvalidArgument(f"{name} must be one or several dimensions other than 0 (the rows), got {dims}.")
    return tuple(dims)


# --- test-time augmentation ------------------------------------------------------------------------------------------

Augment = Callable[[Tensor, torch.Generator], Tensor]

_METHOD, _AUGMENT = MCDropout(), InputNoise(0.1)


@dataclass(frozen=True, repr=False)
class TestTimeAugmentation(Method):
    r"""Fit with any method, and average predictions over random transformations of the input.

    .. math:: p(y \mid x, D) \approx \frac1K \sum_k p(y \mid a_k(x), \theta_k), \qquad a_k \sim p(a)

    The variance of predictions under the augmentation counts as epistemic uncertainty here, as the disagreement of
    draws does. (Ayhan and Berens, 2018, and Wang et al., 2019, count it as aleatoric, since it comes from the input.)
    The fit itself is not changed.

    Args:
        method: The method that fits. A point estimate (``MAP``) gets all its epistemic uncertainty from the
            augmentation; each draw of a posterior has a transformation of its own. Train on augmented data, or keep the
            transformations small: the network has seen no others.
        augment: One of :mod:`~knowable.inference.dropout.augmentation` (``InputNoise``, ``Shift``, ``Flip``), or any
            function ``(x, generator) -> x``. It should draw one transformation and apply it to all rows: a prediction
            then does not depend on the other rows of the batch. A posterior whose augmentation is a function cannot be
            saved.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(0.1))
        >>> method = kn.TestTimeAugmentation(kn.MAP(epochs=100), kn.InputNoise(0.1))
        >>> method.fit(model, (x, 2 * x)).predict(x, samples=32).epistemic.shape
        torch.Size([40, 1])
    """

    family = "dropout"
    summary = "any method, with a random transformation of the inputs for each draw"
    aliases = ("tta",)
    references = ("ayhan2018", "wang2019")
    supports_row_weights = True
    supports_binary = True

    __test__: ClassVar[bool] = False  # pytest would take it for a test

    method: Method = _METHOD
    augment: Augmentation | Augment = _AUGMENT

    def __post_init__(self) -> None:
        check_type("method", self.method, Method, "a method such as MAP()")
        if not callable(self.augment) or isinstance(self.augment, type):
            raise InvalidType(
                f"augment must be an augmentation such as InputNoise(0.1), or a function (x, generator) -> x; "
                f"got {self.augment!r}."
            )

    @property
    def makes_inputs(self) -> bool:
        return True

    def _fit(self, job: FitJob) -> AugmentedPosterior:
        inner_job, seed = job.for_method(self.method), job.seed
        generator = generator_for(seed, "augment", device=job.model.device)
        with own_randomness(derive_seed(seed, "augmentation")):  # an augmentation that fails is refused before the fit
            transformed(job.rows.first[0][:3], self.augment, generator)
        inner = self.method._fit(inner_job)
        return AugmentedPosterior(inner, self.augment, diagnostics=replace(inner.diagnostics, method=repr(self)))


class AugmentedPosterior(Posterior):
    """A posterior whose predictions transform the input at random, draw by draw.

    Args:
        inner: The distribution over weights.
        augment: The random transformation.
        common: See :class:`~knowable.core.posterior.posterior.Posterior`; by default all as in ``inner``.
    """

    family = "augmented"

    def __init__(self, inner: Posterior, augment: Augmentation | Augment, **common: Any):
        names = ("points", "buffers", "diagnostics", "log_evidence", "seed")
        same = {name: getattr(inner, name) for name in names}
        super().__init__(inner.model, **{**same, **common})
        self.inner, self.augment = inner, augment

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        return self.inner._sample_random(n, generator)

    def _mean_random(self) -> Params:
        return self.inner._mean_random()

    def _std_random(self) -> Params:
        return self.inner._std_random()

    def as_prior(self) -> JointPrior:
        """The distribution over weights as a prior."""
        return self.inner.as_prior()

    # --- prediction --------------------------------------------------------------------------------------------------

    def draws_for_prediction(self, samples: int, seed: int) -> tuple[int, Tensor]:
        """As many draws as ``samples``: where the posterior has fewer atoms, each is used several times."""
        count, log_weights = self.inner.draws_for_prediction(samples, seed)
        times = max(1, samples // count)
        return count * times, log_weights.repeat(times) - math.log(times)

    def draw_block(self, start: int, stop: int, samples: int, seed: int) -> Params:
        """Draws of the inner posterior, repeated cyclically."""
        return self._cycled(self.inner.draw_block, start, stop, samples, seed)

    def buffer_block(self, start: int, stop: int, samples: int, seed: int) -> Buffers:
        """The inner posterior's buffers of the same draws."""
        return self._cycled(self.inner.buffer_block, start, stop, samples, seed)

    def _cycled(
        self, block: Callable[[int, int, int, int], Params], start: int, stop: int, samples: int, seed: int
    ) -> Params:
        count, _ = self.inner.draws_for_prediction(samples, seed)
        if count == 1:
            return expand_params(index_params(block(0, 1, samples, seed), 0), stop - start)
        pieces = []
        while start < stop:
            first = start % count
            last = min(count, first + stop - start)
            pieces.append(block(first, last, samples, seed))
            start += last - first
        return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}

    def run_draws(self, stack: Params, x: Tensor, *, first: int, seed: int, vectorise: bool) -> Tensor:
        """Outputs of each draw on inputs with a transformation of its own."""
        outputs = []
        for k in range(number_of_draws(stack)):
            inputs = transformed(x, self.augment, generator_for(seed, "augment", first + k, device=x.device))
            one = index_params(stack, slice(k, k + 1))
            outputs.append(self.inner.run_draws(one, inputs, first=first + k, seed=seed, vectorise=False))
        return torch.cat(outputs)

    # --- on disk -----------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        return self.inner._tensors()

    def _settings(self) -> dict[str, Any]:
        if not isinstance(self.augment, Augmentation):
            raise Unsupported(
                "A posterior whose augmentation is a function of your own cannot be saved: saved folders hold no code. "
                "Save posterior.inner, and wrap it in AugmentedPosterior(loaded, augment) after loading."
            )
        settings = {"family": self.inner.family, "settings": self.inner._settings()}
        return {"inner": settings, "augment": self.augment.to_json()}

    @classmethod
    def _from_tensors(
        cls, model: Model, tensors: dict[str, Tensor], *, inner: dict[str, Any], augment: dict[str, Any], **common: Any
    ) -> AugmentedPosterior:
        family = Posterior.families[inner["family"]]
        posterior = family._from_tensors(model, tensors, **inner["settings"], **common)
        return cls(posterior, augmentation_from(augment))


def transformed(x: Tensor, augment: Augmentation | Augment, generator: torch.Generator) -> Tensor:
    """Inputs after one random transformation, checked."""
    value = augment(x.clone(), generator)
    if not isinstance(value, Tensor) or value.dim() == 0 or len(value) != len(x):
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise InvalidData(f"augment must return a tensor with {len(x)} rows, as many as it was given; got {got}.")
    return value.to(x)
