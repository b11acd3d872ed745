"""One method on one fold: fitted, predicted with, scored and measured."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from knowable.comparison.contenders import Contender
from knowable.comparison.folds import Split
from knowable.comparison.journal import Record
from knowable.comparison.kinds import BY_NAME
from knowable.comparison.memory import watched_memory
from knowable.comparison.subject import Fitted, Subject
from knowable.core.prediction import ClassPrediction, Prediction
from knowable.core.randomness import derive_seed, own_randomness
from knowable.errors import Interrupted, InvalidArgument, KnowableWarning
from knowable.evaluation.detection import auroc
from knowable.evaluation.evaluate import evaluate
from knowable.evaluation.reference import compare_predictions

_MOST_ROWS = 200  # at which functions are compared with the reference's
_REFERENCE_DRAWS = 1000
_DISTANCE = {True: "total_variation", False: "wasserstein"}  # for classes, for numbers


@dataclass(frozen=True)
class Conditions:
    """What is the same for every fit.

    Attributes:
        subject: What is compared on.
        seed: Fixes everything random.
        samples: Draws of a prediction.
        outside: Inputs from elsewhere, or None.
    """

    subject: Subject
    seed: int
    samples: int
    outside: Any = None


@dataclass(frozen=True)
class Outcome:
    """A record, and the fit behind it where there is one.

    Attributes:
        record: What is kept.
        fitted: For comparison with others, if the fit succeeded.
        seconds: That the fit alone took.
    """

    record: Record
    fitted: Fitted | None
    seconds: float


def attempt(
    conditions: Conditions,
    contender: Contender,
    fold: int,
    split: Split,
    *,
    seconds: float | None = None,
    reference: str = "",
    truth: Fitted | None = None,
) -> Outcome:
    """Fit a method to a fold's training rows and score it on the others. What goes wrong is written into the record.

    Args:
        conditions: What is the same for every fit.
        contender: The method.
        fold: Number of the fold.
        split: Its rows.
        seconds: Limit of time for the fit.
        reference: Settings of the method to be held against.
        truth: That method fitted to the same rows, or None where it is not there.

    Raises:
        KeyboardInterrupt: If the fit was stopped from the keyboard.
    """
    known: dict[str, Any] = {
        "method": contender.name, "settings": contender.settings, "fold": fold, "reference": reference,
    }  # fmt: skip
    notes, begun, took = Notes(), time.perf_counter(), 0.0
    seed = fit_seed(conditions.seed, fold)
    with own_randomness(seed):
        try:
            with notes.taken(), watched_memory() as peak:
                started = time.perf_counter()
                fitted = conditions.subject.fit(contender.method, split.train, seed=seed, seconds=seconds)
                took = time.perf_counter() - started
            with notes.taken():
                scores, agreement = _scored(conditions, fitted, split, truth)
        except Exception as error:  # one method's failure must not end the others
            known |= {"warnings": tuple(notes.texts), "elapsed": time.perf_counter() - begun}
            return Outcome(Record(**known, error=one_line(error)), None, known["elapsed"])
    measured = {"seconds": took, "memory_mb": peak.megabytes}
    record = Record(
        **known,
        scores={**scores, **{name: value for name, value in measured.items() if value == value}},
        agreement=agreement,
        converged=fitted.diagnostics.converged,
        message=fitted.diagnostics.message,
        warnings=tuple(notes.texts),
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


def _scored(
    conditions: Conditions, fitted: Fitted, split: Split, truth: Fitted | None
) -> tuple[dict[str, float], dict[str, float]]:
    """Scores on the rows held out, and the agreement with the reference."""
    subject, samples = conditions.subject, conditions.samples
    x = subject.inputs(split.test)
    begun = time.perf_counter()
    prediction = fitted.predict(x, samples=samples)
    seconds = time.perf_counter() - begun
    found = evaluate(prediction, fitted.outcomes(subject.outcomes(split.test), prediction))
    scores = {name: value for name, value in found.items() if name in BY_NAME}
    if conditions.outside is not None:
        scores["auroc_outside"] = auroc(prediction, fitted.predict(conditions.outside, samples=samples))
    agreement = {} if truth is None else _agreement(subject, fitted, truth, split.test)
    if agreement:
        scores["reference_distance"] = agreement[_DISTANCE[isinstance(prediction, ClassPrediction)]]
    return {**scores, "predict_seconds": seconds}, agreement


def _agreement(subject: Subject, fitted: Fitted, truth: Fitted, test: np.ndarray) -> dict[str, float]:
    """Figures of the distance between two fits, as functions at rows held out; none where they cannot be compared."""
    x = subject.inputs(test[:_MOST_ROWS])
    pair: list[Prediction] = [each.predict(x, samples=_REFERENCE_DRAWS) for each in (fitted, truth)]
    try:
        return dict(compare_predictions(*pair))
    except InvalidArgument as error:
        warnings.warn(f"Not compared with the reference: {error}", KnowableWarning, stacklevel=2)
        return {}


@dataclass
class Notes:
    """What fits warned of, each text once."""

    texts: list[str] = field(default_factory=list)

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Take down the library's own warnings inside, and pass on those of others.

        Raises:
            KeyboardInterrupt: If one of them says that the fit was stopped from the keyboard.
        """
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                yield
            finally:
                own = [each for each in caught if issubclass(each.category, KnowableWarning)]
                self.texts += dict.fromkeys(str(each.message) for each in own if str(each.message) not in self.texts)
        for each in caught:
            if issubclass(each.category, Interrupted):
                raise KeyboardInterrupt
            if not issubclass(each.category, KnowableWarning):
                warnings.warn_explicit(each.message, each.category, each.filename, each.lineno)
