"""Methods with one fault each: the suite must find it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import knowable as kn
from knowable.core.posterior.posterior import Posterior
from knowable.testing import Subject

Change = Callable[..., Posterior]


def sound(**changes: Any) -> Subject:
    """A method without fault."""
    return Subject(kn.MAP(epochs=2, batch_size=8), **changes)


def faulty(change: Callable[..., Any], **declared: Any) -> Subject:
    """MAP whose ``fit`` is ``change(fit, model, data, **keywords)``."""

    @dataclass(frozen=True, repr=False)
    class Faulty(kn.MAP):
        def fit(self, model, data, **keywords) -> Posterior:  # type: ignore[override]
            return change(super().fit, model, data, **keywords)

    return Subject(Faulty(epochs=2, batch_size=8), **declared)


def rebuilt(posterior: kn.Particles, *, stack: dict | None = None, **changes: Any) -> kn.Particles:
    """The same posterior with some parts replaced."""
    common = {"points": posterior.points, "buffers": posterior.buffers, "diagnostics": posterior.diagnostics}
    return type(posterior)(posterior.model, stack or posterior.stack, **{**common, **changes})


class Restless(kn.Particles):
    """A posterior whose draws and predictions never repeat."""

    family = "restless"

    def sample(self, n, generator=None):
        return {name: value + torch.rand(()) for name, value in super().sample(n, generator).items()}

    def predict(self, x, samples=64, generator=None, max_memory=None):
        return super().predict(x + 1e-3 * torch.rand(()), samples, generator, max_memory)


def swallow_interrupts(fit: Change, model: kn.Model, data: Any, **keywords: Any) -> Posterior:
    """Interrupted without a word."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return fit(model, data, **keywords)
