"""All methods on all folds, fold after fold, so that finished fits can be compared in pairs."""

from __future__ import annotations

import gc
import math
import re
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from knowable.comparison.budget import Budget
from knowable.comparison.folds import Split
from knowable.comparison.journal import Journal, Record
from knowable.comparison.methods import Candidate
from knowable.comparison.problem import Fitted, Problem
from knowable.core.compiling.engine import Engine
from knowable.core.prediction.prediction import ClassPrediction, Prediction
from knowable.core.support.progress import progress_bar
from knowable.core.support.randomness import derive_seed, own_randomness
from knowable.core.support.tensors import give_back_free_memory
from knowable.errors import Interrupted, InvalidArgument, KnowableWarning
from knowable.evaluation.detection import auroc
from knowable.evaluation.evaluate import evaluate
from knowable.evaluation.reference import compare_predictions
from knowable.report.warned import Warned, collect_warnings


@dataclass
class ComparisonRun:
    """A comparison while it runs."""

    conditions: Conditions
    candidates: Sequence[Candidate]
    splits: Sequence[Split]
    reference: Candidate | None
    journal: Journal
    budget: Budget
    engine: Engine = field(default_factory=Engine)  # where the fits are made
    records: list[Record] = field(default_factory=list)  # what came out, failures too
    not_run: list[tuple[str, int]] = field(default_factory=list)  # methods and folds that there was no time for

    def go(self, progress: bool | None = None) -> None:
        """Make every fit that is not in the journal yet, as far as the time goes."""
        fits = deque(fit for fold in range(len(self.splits)) for fit in self._first_of(fold))
        with progress_bar("comparing", progress) as bar:

            def begin(fit: Fit) -> Fit | None:
                text = f"fold {fit.fold + 1}, {fit.candidate.name}"
                bar.update(self._done, len(self.splits) * len(self.candidates), text)
                return self._begun(fit, fits)

            for fit, outcome in self.engine.run(_attempted, self.conditions, fits, begin=begin, progress=False):
                self._ended(fit, outcome, fits)
        self.records.sort(key=lambda record: (record.fold, self._place(record.method)))

    def _first_of(self, fold: int) -> list[Fit]:
        """The fits of a fold to begin with: the reference's, if the others need it, or all that are missing."""
        missing = []
        for candidate in self.candidates:
            known = self._known(candidate, fold)
            if known is None:
                missing.append(candidate)
            else:
                self.records.append(replace(known, method=candidate.name))
        fits = [Fit(candidate, fold, self.splits[fold], self._reference_of(candidate)) for candidate in missing]
        if self.reference is None or not missing:
            return fits
        others = tuple(fit for fit in fits if fit.candidate is not self.reference)
        keep = len(others) < len(fits)  # else its scores are known, and only the others need it
        return [Fit(self.reference, fold, self.splits[fold], "", keep=keep, others=others)]

    def _begun(self, fit: Fit, fits: deque[Fit]) -> Fit | None:
        """The fit as it is made, if there is time for it."""
        if self.budget.allows(fit.candidate.name):
            fit.began = self.budget.left
            return replace(
                fit, seconds=self.budget.for_fit(fit.candidate.name), others=None if fit.others is None else ()
            )
        if fit.keep:
            self.not_run.append((fit.candidate.name, fit.fold))
            self.budget.skip()
        fits.extendleft(reversed(fit.others or ()))
        return None

    def _ended(self, fit: Fit, outcome: Outcome, fits: deque[Fit]) -> None:
        """Keep what came out, unless it was only made again for the sake of others, which come next."""
        if fit.keep:
            self.journal.add(outcome.record)
            self.records.append(outcome.record)
            self.budget.count(fit.candidate.name, began=fit.began, fit=outcome.seconds)
        fits.extendleft(replace(each, truth=outcome.fitted) for each in reversed(fit.others or ()))

    def _known(self, candidate: Candidate, fold: int) -> Record | None:
        return self.journal.find(candidate.settings, self._reference_of(candidate), fold)

    def _reference_of(self, candidate: Candidate) -> str:
        """Settings of what a method is held against: the reference is held against nothing."""
        return "" if self.reference is None or candidate is self.reference else self.reference.settings

    def _place(self, name: str) -> int:
        return next(place for place, candidate in enumerate(self.candidates) if candidate.name == name)

    @property
    def _done(self) -> int:
        return len(self.records) + len(self.not_run)


@dataclass
class Fit:
    """One method on one fold, to be made."""

    candidate: Candidate
    fold: int
    split: Split
    reference: str  # settings of what it is held against
    seconds: float | None = None  # that it may take
    truth: Fitted | None = None  # what it is held against
    keep: bool = True  # whether its scores are wanted
    others: tuple[Fit, ...] | None = None  # of the reference: those that wait for it
    began: float = 0.0  # seconds left when it began


def _attempted(conditions: Conditions, fit: Fit) -> Outcome:
    """Make a fit; of the reference alone more than the record is needed."""
    outcome = attempt(
        conditions, fit.candidate, fit.fold, fit.split, seconds=fit.seconds, reference=fit.reference, truth=fit.truth
    )
    return outcome if fit.others is not None else replace(outcome, fitted=None)


def fits_to_make(
    journal: Journal, candidates: Sequence[Candidate], splits: Sequence[Split], reference: Candidate | None
) -> int:
    """How many fits are not in the journal yet."""
    wanted = [
        journal.find(each.settings, "" if reference is None or each is reference else reference.settings, fold)
        for each in candidates
        for fold in range(len(splits))
    ]
    return sum(record is None for record in wanted)


# --- One method on one fold: fitted, predicted with, scored and measured ---------------------------------------------

_MOST_ROWS = 200  # at which functions are compared with the reference's
_REFERENCE_DRAWS = 1000
_DISTANCE = {True: "total_variation", False: "wasserstein"}  # for classes, for numbers


@dataclass(frozen=True)
class Conditions:
    """What is the same for every fit."""

    problem: Problem
    seed: int
    samples: int
    outside: Any = None  # inputs from elsewhere, or None


@dataclass(frozen=True)
class Outcome:
    """A record, and the fit behind it where there is one."""

    record: Record
    fitted: Fitted | None  # for comparison with others, if the fit succeeded
    seconds: float  # that the fit alone took


def attempt(
    conditions: Conditions,
    candidate: Candidate,
    fold: int,
    split: Split,
    *,
    seconds: float | None = None,
    reference: str = "",
    truth: Fitted | None = None,
) -> Outcome:
    """Fit a method to a fold's training rows and score it on the others. What goes wrong is written into the record.

    Raises:
        KeyboardInterrupt: If the fit was stopped from the keyboard.
    """
    known: dict[str, Any] = {
        "method": candidate.name, "settings": candidate.settings, "fold": fold, "reference": reference,
    }  # fmt: skip
    warned: list[Warned] = []
    begun, took = time.perf_counter(), 0.0
    seed = fit_seed(conditions.seed, fold)
    with own_randomness(seed):
        try:
            with collect_warnings(warned), watched_memory() as peak:
                started = time.perf_counter()
                fitted = conditions.problem.fit(candidate.method, split.train, seed=seed, seconds=seconds)
                took = time.perf_counter() - started
            if any(issubclass(category, Interrupted) for category, _ in warned):
                raise KeyboardInterrupt
            with collect_warnings(warned):
                scores, rows, agreement = _scored(conditions, fitted, split, truth)
        except Exception as error:  # one method's failure must not end the others
            known |= {"warnings": _texts(warned), "elapsed": time.perf_counter() - begun}
            return Outcome(Record(**known, error=one_line(error)), None, known["elapsed"])
    measured = {"seconds": took, "memory_mb": peak.megabytes}
    record = Record(
        **known,
        scores={**scores, **{name: value for name, value in measured.items() if value == value}},
        rows=rows,
        agreement=agreement,
        converged=fitted.diagnostics.converged,
        message=fitted.diagnostics.message,
        warnings=_texts(warned),
        elapsed=time.perf_counter() - begun,
    )
    return Outcome(record, fitted, took)


def fit_seed(seed: int, fold: int) -> int:
    """The seed of all fits on a fold, small enough for NumPy and scikit-learn."""
    return derive_seed(seed, "fit", fold) % 2**31


def one_line(error: Exception) -> str:
    """An error as one line, its kind first."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _texts(warned: list[Warned]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(text for _, text in warned))


def _scored(
    conditions: Conditions, fitted: Fitted, split: Split, truth: Fitted | None
) -> tuple[dict[str, float], dict[str, list[float]], dict[str, float]]:
    """Scores on the rows held out, the values behind those that are means over rows, agreement with the reference."""
    problem, samples = conditions.problem, conditions.samples
    x = problem.inputs(split.test)
    begun = time.perf_counter()
    prediction = fitted.predict(x, samples=samples)
    seconds = time.perf_counter() - begun
    found = evaluate(prediction, fitted.outcomes(problem.outcomes(split.test), prediction))
    scores = dict(found)
    rows = {name: [_short(each) for each in found.per_row[name].tolist()] for name in found if name in found.per_row}
    if conditions.outside is not None:
        scores["auroc_outside"] = auroc(prediction, fitted.predict(conditions.outside, samples=samples))
    agreement = {} if truth is None else _agreement(problem, fitted, truth, split.test)
    if agreement:
        scores["reference_distance"] = agreement[_DISTANCE[isinstance(prediction, ClassPrediction)]]
    return {**scores, "predict_seconds": seconds}, rows, agreement


def _short(value: float) -> float:
    """Seven digits, which is what a difference of two methods needs."""
    return float(f"{value:.7g}")


def _agreement(problem: Problem, fitted: Fitted, truth: Fitted, test: np.ndarray) -> dict[str, float]:
    """Figures of the distance between two fits, as functions at rows held out; none where they cannot be compared."""
    x = problem.inputs(test[:_MOST_ROWS])
    pair: list[Prediction] = [each.predict(x, samples=_REFERENCE_DRAWS) for each in (fitted, truth)]
    try:
        return dict(compare_predictions(*pair))
    except InvalidArgument as error:
        warnings.warn(f"Not compared with the reference: {error}", KnowableWarning, stacklevel=2)
        return {}


# --- Peak memory of a piece of work in this process ------------------------------------------------------------------

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class Peak:
    """The largest resident memory less what was held before, in units of 10^6 bytes; NaN where it is not known."""

    megabytes: float = math.nan


@contextmanager
def watched_memory() -> Iterator[Peak]:
    """Measure the block inside by the kernel's high-water mark, which is reset at its beginning (Linux).

    Free memory is given back first, so that it counts if it is used again; a few megabytes either way are noise.
    """
    peak = Peak()
    gc.collect()
    give_back_free_memory()
    before = _begin()
    try:
        yield peak
    finally:
        if before is not None:
            peak.megabytes = max(0.0, _status("VmHWM") - before)


def _begin() -> float | None:
    """Reset the mark; the memory held now, or None where that cannot be done."""
    try:
        _RESET.write_text("5")
        return _status("VmRSS")
    except OSError:
        return None


def _status(key: str) -> float:
    """A field of the process's status, in MB."""
    found = re.search(rf"{key}:\s+(\d+) kB", _STATUS.read_text())
    if found is None:
        raise OSError(f"the kernel does not report {key}")
    return int(found.group(1)) * 1024 / 1e6
