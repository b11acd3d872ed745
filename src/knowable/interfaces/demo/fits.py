"""The fits of one problem of the demonstration, and what they report about themselves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from knowable.core.method import Method
from knowable.core.model.model import Model
from knowable.core.posterior.posterior import Posterior
from knowable.datasets import Dataset
from knowable.errors import ConvergenceWarning, Interrupted, KnowableWarning
from knowable.report.report import Listing, Notice
from knowable.report.warned import Warned, collect_warnings

_CONVERGED = {True: "yes", False: "no", None: "unknown"}


@dataclass
class Fits:
    """Fits methods and keeps their posteriors and warnings."""

    problem: str  # what notices call the problem
    posteriors: dict[str, Posterior] = field(default_factory=dict)
    warned: dict[str, list[Warned]] = field(default_factory=dict)

    def fit(self, name: str, method: Method, build: Callable[[], Model], data: Dataset, *, seed: int) -> Posterior:
        """Fit a method to standardised data; the global generator is left as it was.

        Raises:
            KeyboardInterrupt: If the fit was stopped from the keyboard.
        """
        warned = self.warned.setdefault(name, [])
        with torch.random.fork_rng(devices=[]), collect_warnings(warned):
            torch.manual_seed(seed)
            posterior = method.fit(build(), (data.x, data.y), seed=seed, progress=False)
        if any(issubclass(category, Interrupted) for category, _ in warned):
            raise KeyboardInterrupt
        if posterior.diagnostics.converged is False and not any(c is ConvergenceWarning for c, _ in warned):
            warned.append((KnowableWarning, f"The fit did not converge: {posterior.diagnostics.message}."))
        self.posteriors[name] = posterior
        return posterior

    def notices(self) -> list[Notice]:
        """The warnings of all methods."""
        return [Notice(f"{self.problem}, {name}", text) for name, warned in self.warned.items() for _, text in warned]

    def listing(self) -> Listing:
        """Convergence and evidence of each fit."""
        rows = tuple(
            (
                name,
                _CONVERGED[each.diagnostics.converged],
                each.diagnostics.message,
                "none" if each.log_evidence is None else repr(each.log_evidence),
            )
            for name, each in self.posteriors.items()
        )
        return Listing("Convergence of the fits", ("Method", "Converged", "How it ended", "Log evidence"), rows)


def stopping_note(epochs: int | None) -> tuple[str, ...]:
    """A note on training that was cut short."""
    if epochs is None:
        return ()
    return (
        f"To keep this short, networks are trained for {epochs:,} passes over the data. By default a fit goes on "
        "until its objective has converged.",
    )
