"""The one function: methods side by side on one's own data."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from torch import Tensor

from knowable._version import __version__
from knowable.comparison.budget import Budget
from knowable.comparison.comparison import Comparison
from knowable.comparison.folds import Split, as_splits, splits_fingerprint
from knowable.comparison.journal import Journal
from knowable.comparison.methods import Contender, as_contenders
from knowable.comparison.run import Conditions, Run, fits_to_make
from knowable.comparison.subject import (
    DistributionEstimator,
    EstimatorSubject,
    ModelSubject,
    Subject,
    table_fingerprint,
)
from knowable.core.method import Method
from knowable.core.model.model import Model
from knowable.core.support.checks import check_count, check_number
from knowable.errors import InvalidType, KnowableError, KnowableWarning

REFERENCE = "nuts"
"""The method that others are held against where it is among those compared."""

MOST_PARAMETERS = 5_000
"""Random parameters of a network for which a reference that was only named is still fitted."""


def compare(
    model_or_estimator: Model | DistributionEstimator,
    data: Any,
    *,
    methods: Iterable[Method | str] | Mapping[str, Method | str],
    cv: Any = 5,
    budget: float | None = None,
    seed: int = 0,
    out: str | os.PathLike[str] | None = None,
    outside: Any = None,
    reference: Method | str | bool | None = None,
    samples: int = 256,
    progress: bool | None = None,
) -> Comparison:
    """Fit several methods to the same folds of the same data, and score each on the rows it has not seen.

    Every method meets the same folds from the same seed, so that differences are taken in pairs. A method that fails on
    a fold is shown with the reason, and the others go on.

    Args:
        model_or_estimator: A :class:`~knowable.core.model.model.Model`; or an estimator after the conventions of
            scikit-learn with a parameter ``method``, ``fit`` and ``predict_dist``, which takes tables as they are.
        data: ``(x, y)``. With a model: numbers about standardised, as for ``fit``.
        methods: Methods, or their names, in a list; or in a dict that gives them names of your own.
        cv: Number of folds; or a cross-validator of scikit-learn; or pairs ``(train, test)`` of positions or masks.
        budget: Seconds for everything, or None. Every fit gets an equal share of what is left, and is brought to an end
            in time; fits that there is no time for are not begun, and the result names them.
        seed: Fixes the folds and everything random in the fits.
        out: A file that gets one line for each finished fit (or a folder, for ``comparison.jsonl`` in it). Called again
            with the same arguments, after a kill too, a comparison goes on from there and ends with the same scores.
            Methods, and seconds, may be added.
        outside: Inputs unlike the data: how well does uncertainty tell them from rows held out?
        reference: A method that the others are held against, as functions; it is compared too. None: ``NUTS`` if it is
            among the methods. One that is given by its name is left out, with a warning, where the network has more
            than 5,000 random parameters. False: none.
        samples: Draws of a prediction. An estimator has its own number.
        progress: Show a bar; None shows it only on a terminal.

    Returns:
        Scores with standard errors, paired differences and the ranking: ``print`` it, or see its methods.

    Raises:
        InvalidArgument: If an argument makes no sense, or ``out`` belongs to another comparison.
        KnowableError: If no method could be fitted at all.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> found = kn.compare(model, (x, 2 * x), methods=["exact_linear", kn.MAP(epochs=2)], cv=2)
        >>> found.best
        'exact_linear'
    """
    seed = check_count("seed", seed, at_least=0)
    check_count("samples", samples, at_least=2)
    if budget is not None:
        check_number("budget", budget, above=0)
    subject = as_subject(model_or_estimator, data)
    contenders, held, notices = _with_reference(as_contenders(methods, subject.resolve), reference, subject)
    splits = as_splits(cv, subject.rows, _all_outcomes(subject), seed=seed)
    conditions = Conditions(subject, seed, samples, None if outside is None else subject.outside(outside))
    journal = Journal(out, identity(conditions, splits))
    clock = Budget(budget, fits_to_make(journal, contenders, splits, held), spent=journal.seconds)
    run = Run(conditions, contenders, splits, held, journal, clock)
    run.go(progress)
    _check_any(run)
    return Comparison(
        records=tuple(run.records),
        not_run=tuple(run.not_run),
        methods=tuple(contender.name for contender in contenders),
        folds=len(splits),
        reference=None if held is None else held.name,
        facts=_facts(conditions, run, budget),
        notices=tuple(notices),
        citations={each.name: each.entry.bibtex for each in contenders if each.entry is not None},
    )


def as_subject(model_or_estimator: Any, data: Any) -> Subject:
    """A model or an estimator with its data.

    Raises:
        InvalidType: If it is neither.
    """
    from knowable.datasets.dataset import Dataset

    if isinstance(data, Dataset):
        data = (data.x, data.y)
    if isinstance(model_or_estimator, Model):
        return ModelSubject(model_or_estimator, data)
    if isinstance(model_or_estimator, type):
        raise InvalidType(f"compare needs an object: write {model_or_estimator.__name__}() with parentheses.")
    if isinstance(model_or_estimator, DistributionEstimator):
        return EstimatorSubject(model_or_estimator, data)
    raise InvalidType(
        f"compare needs a knowable Model, or an estimator with fit, predict_dist, get_params and set_params; got "
        f"{type(model_or_estimator).__name__}."
    )


def identity(conditions: Conditions, splits: tuple[Split, ...]) -> dict[str, str]:
    """What makes a comparison this one: its file can only be taken up by the same. Methods may differ."""
    outside = conditions.outside
    return {
        **conditions.subject.identity(),
        "cv": splits_fingerprint(splits),
        "seed": str(conditions.seed),
        "samples": str(conditions.samples),
        "outside": "none" if outside is None else table_fingerprint(outside),
    }


def _with_reference(
    contenders: tuple[Contender, ...], reference: Any, subject: Subject
) -> tuple[tuple[Contender, ...], Contender | None, list[str]]:
    """The methods with the reference among them, the reference, and what has to be said about it."""
    if reference is False:
        return contenders, None, []
    if reference is True:
        reference = REFERENCE
    if reference is None:
        there = [each for each in contenders if each.entry is not None and each.entry.name == REFERENCE]
        return contenders, (there[0] if there else None), []
    (wanted,) = as_contenders([reference], subject.resolve)
    same = next((each for each in contenders if each.settings == wanted.settings), None)
    if same is not None:
        return contenders, same, []
    size = subject.parameters()
    if isinstance(reference, str) and size is not None and size > MOST_PARAMETERS:
        text = (
            f"The reference {wanted.name} was left out: the network has {size:,} random parameters, and a reference is "
            f"fitted by name up to {MOST_PARAMETERS:,}. Pass the method itself to have it all the same."
        )
        warnings.warn(text, KnowableWarning, stacklevel=3)
        return contenders, None, [text]
    if any(each.name == wanted.name for each in contenders):
        wanted = Contender(f"{wanted.name} (reference)", wanted.method)
    return (*contenders, wanted), wanted, []


def _all_outcomes(subject: Subject) -> Any:
    y = subject.outcomes(np.arange(subject.rows))
    return y.numpy(force=True) if isinstance(y, Tensor) else y


def _check_any(run: Run) -> None:
    """Raise where nothing could be fitted, with the first reason."""
    if any(record.error is None for record in run.records):
        return
    failed = next((record for record in run.records if record.error is not None), None)
    if failed is not None:
        raise KnowableError(f"No method could be fitted. The first, {failed.method}: {failed.error}")
    raise KnowableError("budget was spent before any method could be fitted. Give more seconds.")


def _facts(conditions: Conditions, run: Run, budget: float | None) -> dict[str, str]:
    """How it was made, for people."""
    subject = conditions.subject
    own = {"Draws": str(conditions.samples)} if isinstance(subject, ModelSubject) else {}
    return {
        "Compared on": subject.describe(),
        "Rows": f"{subject.rows:,}",
        "Folds": str(len(run.splits)),
        **own,
        "Seed": str(conditions.seed),
        "Budget": "none" if budget is None else f"{budget:g} s",
        "Time taken": f"{sum(record.elapsed for record in run.records):.0f} s",
        "knowable": __version__,
    }
