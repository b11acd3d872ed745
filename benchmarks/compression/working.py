"""How these studies work through their cases: rows that are known are skipped, and long fits go on where they stopped.

A fit that is worth keeping is a folder beside the rows: while it runs, its checkpoint; when it is done, the posterior.
"""

from __future__ import annotations

import hashlib
import time
import warnings
from collections.abc import Callable, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from benchmarks.harness import one_line
from benchmarks.study import Rows, say

if TYPE_CHECKING:
    from knowable.core.method import Method
    from knowable.core.model.data import Data
    from knowable.core.model.model import Model
    from knowable.core.posterior.posterior import Posterior


def work_through(
    cases: Mapping[str, Callable[[], dict[str, Any]]], *, only: str, rows: Rows, recipe: object, quick: bool
) -> dict[str, dict[str, Any]]:
    """Run the cases whose names match, each once for a recipe; what fails is a row with its error."""
    found = {}
    for name, case in cases.items():
        if fnmatch(name, only):
            key = f"{name}, {recipe}" + ", quick" * quick
            found[name] = rows.get(key) or rows.add(key, _row(name, case))
    return found


def _row(name: str, case: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        row: dict[str, Any] = {"error": None, **case()}
    except Exception as error:
        row = {"error": one_line(error)}
    said = {key: value for key, value in row.items() if not isinstance(value, (list, dict))}  # histories are long
    say(f"{name}: {said}")
    return row


class Fits:
    """Fits that survive a stop, in a folder; None keeps nothing.

    Args:
        folder: Where their folders are.
    """

    def __init__(self, folder: Path | None):
        self.folder = folder
        self._made: list[tuple[Posterior, str]] = []  # what was fitted or found, and the names of their folders

    @classmethod
    def beside(cls, rows: Rows) -> Fits:
        """In ``fits/`` beside the rows, shared by all studies with the same folder of results."""
        return cls(None if rows.path is None else rows.path.parent / "fits")

    def fit(
        self, name: str, method: Method, model: Model, data: tuple[Tensor, Tensor] | Data, *, seed: int = 0
    ) -> tuple[Posterior, float]:
        """The finished fit of that name, or a new one, and the minutes it took (since it was last taken up).

        Args:
            name: Names the folder, beside a digest of method, number of rows, seed and the fit it starts from.
            method: What fits.
            model: What is fitted.
            data: To what.
            seed: Of the fit.
        """
        rows = len(data[0]) if isinstance(data, tuple) else data.size
        label = f"{name}, {_digest(method, rows, seed, *self._origin(method))}"
        place = None if self.folder is None else self.folder / label
        posterior = self._found_or_fitted(name, place, method, model, data, seed)
        self._made.append((posterior, label))
        return posterior, posterior.diagnostics.seconds / 60

    def _origin(self, method: Method) -> list[str]:
        """The fit that the method starts from, if it is one of these: a posterior's looks do not tell it apart."""
        start = getattr(method, "start", None)
        return [label for posterior, label in self._made if posterior is start]

    def _found_or_fitted(
        self, name: str, place: Path | None, method: Method, model: Model, data: tuple[Tensor, Tensor] | Data, seed: int
    ) -> Posterior:
        import knowable as kn

        if place is not None and (place / "posterior").exists():
            return kn.load(place / "posterior", net=model.net)
        begin = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the number of epochs is fixed, whether the loss has settled or not
            checkpoint = None if place is None else place / "checkpoint"
            posterior = method.fit(model, data, seed=seed, progress=False, checkpoint=checkpoint)
        if posterior.diagnostics.interrupted:
            raise KeyboardInterrupt  # its checkpoint is where the next run goes on
        say(f"{name}: fitted in {(time.monotonic() - begin) / 60:.1f} minutes")
        if place is not None:
            posterior.save(place / "posterior")
        return posterior


def _digest(*what: object) -> str:
    return hashlib.sha256(repr(what).encode()).hexdigest()[:8]
