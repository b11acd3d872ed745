"""The methods that a demonstration compares, and how each is fitted and watched."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from knowable.core.method import Method
from knowable.core.model import Model
from knowable.core.posterior import Posterior
from knowable.datasets import Dataset
from knowable.errors import Interrupted, KnowableWarning
from knowable.interfaces.report.content import Notice


@dataclass(frozen=True)
class Contender:
    """A method on a model.

    Attributes:
        name: What tables call it.
        method: The method.
        build: Makes the model, with a network freshly initialised from the global generator.
    """

    name: str
    method: Method
    build: Callable[[], Model]


@dataclass
class Watch:
    """Collects what fits warn about, and their times."""

    problem: str
    seconds: Counter[str] = field(default_factory=Counter)
    fits: Counter[str] = field(default_factory=Counter)
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)

    def fit(self, contender: Contender, data: Dataset, *, seed: int) -> Posterior:
        """Fit a contender to standardised data; the global generator is left as it was.

        Raises:
            KeyboardInterrupt: If the fit was stopped from the keyboard.
        """
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(seed)
            posterior = contender.method.fit(contender.build(), (data.x, data.y), seed=seed, progress=False)
        for warning in caught:
            if issubclass(warning.category, Interrupted):
                raise KeyboardInterrupt
            if not issubclass(warning.category, KnowableWarning):
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        # One line for each method and kind of warning, however many fits gave it.
        kinds = {warning.category: str(warning.message) for warning in caught}
        self.seen.update((contender.name, text) for kind, text in kinds.items() if issubclass(kind, KnowableWarning))
        self.seconds[contender.name] += posterior.diagnostics.seconds
        self.fits[contender.name] += 1
        return posterior

    def mean_seconds(self, name: str) -> float:
        """Mean time of a fit."""
        return self.seconds[name] / max(1, self.fits[name])

    def notices(self) -> list[Notice]:
        """The warnings, each said once for each method."""
        by_method: dict[str, list[str]] = {}
        for name, text in self.seen:
            by_method.setdefault(name, []).append(text)
        return [
            Notice(f"{self.problem}, {name}", f"{texts[0]} (one of {len(texts)} like it in {self.fits[name]} fits)")
            if len(texts) > 1
            else Notice(f"{self.problem}, {name}", texts[0])
            for name, texts in by_method.items()
        ]


def names_of(contenders: Sequence[Contender]) -> tuple[str, ...]:
    """Their names, in order."""
    return tuple(contender.name for contender in contenders)
