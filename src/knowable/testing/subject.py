"""What the conformance suite is told about a method, and how it runs and compares fits."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from knowable.core.compiling.engine import Engine
from knowable.core.method import Method
from knowable.core.network.params import Params
from knowable.core.posterior.functions import FunctionPosterior
from knowable.core.posterior.posterior import Posterior
from knowable.core.storage.folder import Checkpoint
from knowable.testing.networks import NETWORKS, NetworkCase, network_case

LONGER_DRAWS = 90  # and as long a warm-up: more than three blocks of transitions
LONGER_EPOCHS = 130  # 260 steps on 16 rows in batches of 8: more than two records of the history


@dataclass(frozen=True)
class Subject:
    """A method, and what it says of itself.

    Args:
        method: The method with settings that make a fit quick: a few steps, in batches of 8 rows if it has batches.
        refuses: Networks (names of ``knowable.testing.networks.NETWORKS``) that it cannot do. It must then raise
            ``Unsupported``; all the others it must fit.
        seeded: Whether the seed makes a difference. One that says no must give the same result for every seed.
        iterates: Whether a fit takes steps, so that it can be interrupted and resumed.
        trains: Whether a fit moves the weights. One that says no must give every random weight a spread.
        longer: The method with settings that take a few hundred steps, for interruptions in the middle. The default
            sets ``epochs``, or ``draws`` and ``warmup`` of a method that runs chains.
        any_value: Fields that refuse no value of their type (a location, which may be negative).
    """

    method: Method
    refuses: frozenset[str] = frozenset()
    seeded: bool = True
    iterates: bool = True
    trains: bool = True
    longer: Method | None = None
    any_value: frozenset[str] = frozenset()
    _fitted: dict[tuple[str, int], tuple[NetworkCase, Posterior]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "refuses", frozenset(self.refuses))
        object.__setattr__(self, "any_value", frozenset(self.any_value))
        unknown = self.refuses - NETWORKS.keys()
        if unknown:
            raise ValueError(f"refuses must name networks of the suite ({', '.join(NETWORKS)}); got {sorted(unknown)}.")

    @property
    def name(self) -> str:
        """Name of the method's class."""
        return type(self.method).__name__

    def case(self, *, dtype: torch.dtype = torch.float32, rows: int = 16) -> NetworkCase:
        """A regression problem that this method can do: an MLP if possible."""
        return network_case(self._usual, dtype=dtype, rows=rows)

    @property
    def _usual(self) -> str:
        names = [name for name in ("mlp", "linear", "batchnorm_mlp") if name not in self.refuses]
        expect(bool(names), "A method must fit one of mlp, linear and batchnorm_mlp to be checked.")
        return names[0]

    def fitted(self, name: str | None = None, *, rows: int = 16) -> tuple[NetworkCase, Posterior]:
        """A case, that of :meth:`case` without a name, and its fit with seed 0, made once for all checks that read it.

        A check that changes the case or the posterior makes its own with :meth:`fit`.
        """
        key = (name or self._usual, rows)
        if key not in self._fitted:
            case = network_case(key[0], rows=rows)
            self._fitted[key] = (case, self.fit(case))
        return self._fitted[key]

    def fit(
        self,
        case: NetworkCase,
        *,
        seed: int = 0,
        data: Any = None,
        checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    ) -> Posterior:
        """Fit the case, quickly: recording a graph would take longer than these few steps."""
        rows = case.data if data is None else data
        return self.method.fit(case.model(), rows, seed=seed, checkpoint=checkpoint, engine=Engine(mode="eager"))

    def longer_method(self, *, epochs: int = LONGER_EPOCHS) -> Method:
        """The method with settings that take a few hundred steps: those given, or this many ``epochs``."""
        if self.longer is not None:
            return self.longer
        if hasattr(self.method, "draws") and hasattr(self.method, "warmup"):  # a sampler: few draws give no warning
            settings = {"chains": 2, "draws": LONGER_DRAWS, "warmup": LONGER_DRAWS}
        else:
            settings = {"epochs": epochs}
        return dataclasses.replace(self.method, **settings)  # type: ignore[type-var]


def expect(condition: bool | Tensor, message: str) -> None:
    """Fail with ``message`` unless ``condition`` holds."""
    if not condition:
        raise AssertionError(message)


def expect_error(kinds: type[Exception] | tuple[type[Exception], ...], action: Callable[[], Any], what: str) -> str:
    """Fail unless ``action`` raises one of ``kinds`` with a message of more than a few words; return the message."""
    try:
        action()
    except kinds as error:
        message = str(error)
        expect(len(message.split()) >= 4, f"{what}: the error should say what to do, got {message!r}.")
        return message
    except Exception as error:
        raise AssertionError(f"{what} should raise {_names(kinds)}, got {type(error).__name__}: {error}") from error
    raise AssertionError(f"{what} should raise {_names(kinds)}, but was accepted.")


def expect_same_params(first: Params, second: Params, what: str) -> None:
    """Fail unless two sets of parameters are the same to the last bit."""
    expect(list(first) == list(second), f"{what}: parameters {list(first)} became {list(second)}.")
    for name, value in first.items():
        expect(value.dtype == second[name].dtype, f"{what}: {name} changed from {value.dtype} to {second[name].dtype}.")
        expect(torch.equal(value, second[name]), f"{what}: {name} differs by up to {_distance(value, second[name])}.")


def moments(posterior: Posterior, x: Tensor) -> Params:
    """What a fit found: mean and standard deviation of every parameter; of functions, those of their values at x."""
    if not isinstance(posterior, FunctionPosterior):
        return {**posterior.mean(), **{f"std of {name}": value for name, value in posterior.std().items()}}
    prediction = posterior.predict(x, samples=5, generator=torch.Generator().manual_seed(5))
    return {"functions": prediction.samples, "total": prediction.total, **dict(sorted(posterior.points.items()))}


def some_draws(posterior: Posterior, x: Tensor, count: int, seed: int) -> Params:
    """Draws of the parameters; of functions, their values at x."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(posterior, FunctionPosterior):
        return {"functions": posterior.sample_functions(x, count, generator)}
    return posterior.sample(count, generator)


def expect_same_posterior(first: Posterior, second: Posterior, x: Tensor, what: str) -> None:
    """Fail unless two posteriors have the same moments, draws and predictions to the last bit."""
    expect_same_params(moments(first, x), moments(second, x), f"{what}: mean() and std()")
    draws = [some_draws(each, x, 3, seed=5) for each in (first, second)]
    expect_same_params(draws[0], draws[1], f"{what}: sample()")
    predictions = [each.predict(x, samples=5) for each in (first, second)]
    expect(
        torch.equal(predictions[0].samples, predictions[1].samples),
        f"{what}: predictions differ by up to {_distance(predictions[0].samples, predictions[1].samples)}.",
    )
    expect(torch.equal(predictions[0].total, predictions[1].total), f"{what}: the predictions' uncertainty differs.")


def _distance(first: Tensor, second: Tensor) -> str:
    if first.shape != second.shape:
        return f"shape {tuple(first.shape)} against {tuple(second.shape)}"
    return f"{(first.double() - second.double()).abs().max().item():.3g}"


def _names(kinds: type[Exception] | tuple[type[Exception], ...]) -> str:
    return " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
