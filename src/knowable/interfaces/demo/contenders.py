"""The methods that a demonstration compares, and how each is fitted and watched."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from knowable.core.method import Method
from knowable.core.model.model import Model
from knowable.core.posterior.posterior import Posterior
from knowable.datasets import Dataset
from knowable.errors import ConvergenceWarning, Interrupted, KnowableWarning
from knowable.report.report import Listing, Notice

_SETTLED = {True: "yes", False: "no", None: "cannot be told"}


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
    seconds: dict[str, float] = field(default_factory=dict)
    fits: Counter[str] = field(default_factory=Counter)
    seen: dict[tuple[str, type[Warning]], list[str]] = field(default_factory=dict)

    def fit(self, contender: Contender, data: Dataset, *, seed: int) -> Posterior:
        """Fit a contender to standardised data; the global generator is left as it was.

        Raises:
            KeyboardInterrupt: If the fit was stopped from the keyboard.
        """
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.manual_seed(seed)
            posterior = contender.method.fit(contender.build(), (data.x, data.y), seed=seed, progress=False)
        self._take(contender.name, caught)
        if posterior.diagnostics.converged is False and (contender.name, ConvergenceWarning) not in self.seen:
            text = f"The objective had not settled: {posterior.diagnostics.message}."
            self.seen.setdefault((contender.name, KnowableWarning), []).append(text)
        self.seconds[contender.name] = self.seconds.get(contender.name, 0.0) + posterior.diagnostics.seconds
        self.fits[contender.name] += 1
        return posterior

    def mean_seconds(self, name: str) -> float:
        """Mean time of a fit."""
        return self.seconds.get(name, 0.0) / max(1, self.fits[name])

    def listing(self, fitted: Mapping[str, Posterior]) -> Listing:
        """What each fit says about itself."""
        rows = tuple(
            (
                name,
                _SETTLED[each.diagnostics.converged],
                each.diagnostics.message,
                "none" if each.log_evidence is None else repr(each.log_evidence),
            )
            for name, each in fitted.items()
        )
        return Listing(
            "What the fits say about themselves", ("Method", "Settled", "How it ended", "Log evidence"), rows
        )

    def notices(self) -> list[Notice]:
        """The warnings: one for each method and kind, with the number of fits that gave it."""
        return [
            Notice(
                f"{self.problem}, {name}",
                texts[0] if self.fits[name] == 1 else f"{texts[0]} (in {len(texts)} of {self.fits[name]} fits)",
            )
            for (name, _), texts in self.seen.items()
        ]

    def _take(self, name: str, caught: list[warnings.WarningMessage]) -> None:
        """Keep our own warnings, one of a kind for each fit, and pass on those of others."""
        own: dict[type[Warning], str] = {}
        for warning in caught:
            if issubclass(warning.category, Interrupted):
                raise KeyboardInterrupt
            if issubclass(warning.category, KnowableWarning):
                own[warning.category] = str(warning.message)
            else:
                warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        for kind, text in own.items():
            self.seen.setdefault((name, kind), []).append(text)


def stopping_note(epochs: int | None) -> tuple[str, ...]:
    """What to say of training that was not left to stop by itself."""
    if epochs is None:
        return ()
    return (
        f"To keep this short, networks are trained for {epochs:,} passes over the data. By default a fit goes on "
        "until its objective has settled.",
    )
