"""The one function: methods compared by cross-validation on one's own data."""

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
from knowable.comparison.methods import Candidate, as_candidates
from knowable.comparison.problem import (
    DistributionEstimator,
    EstimatorProblem,
    ModelProblem,
    Problem,
    table_fingerprint,
)
from knowable.comparison.run import ComparisonRun, Conditions, fits_to_make
from knowable.core.compiling.engine import Engine, as_engine
from knowable.core.compiling.workers import Workers
from knowable.core.method import Method
from knowable.core.model.model import Model
from knowable.core.support.checks import check_count, check_number
from knowable.errors import InvalidType, KnowableError, KnowableWarning, Unsupported

REFERENCE = "nuts"
"""The default reference, where it is among the methods compared."""

MOST_PARAMETERS = 5_000
"""Random parameters of a network up to which a reference given by name is fitted."""


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
    engine: Engine | Workers | str | None = None,
) -> Comparison:
    """Fit several methods to the same folds of the same data, and score each on the rows it has not seen.

    Every method is fitted to the same folds from the same seed, so differences are paired. A method that fails on a
    fold is shown with the reason, and the others continue.

    Args:
        model_or_estimator: A :class:`~knowable.core.model.model.Model`; or an estimator after the conventions of
            scikit-learn with a parameter ``method``, ``fit`` and ``predict_dist``, which takes tables as they are.
        data: ``(x, y)``. With a model: numbers about standardised, as for ``fit``.
        methods: Methods, or their names, in a list; or in a dict that gives them names of your own.
        cv: Number of folds; or a cross-validator of scikit-learn; or pairs ``(train, test)`` of positions or masks.
        budget: Time limit in seconds for all fits together, or None. Every fit gets an equal share of the time left;
            fits that there is no time for are not started, and the result names them.
        seed: Fixes the folds and everything random in the fits.
        out: A file that gets one line for each finished fit (or a folder, for ``comparison.jsonl`` in it). Called again
            with the same arguments, also after a kill, a comparison resumes from there and ends with the same scores.
            Methods, and time, may be added.
        outside: Out-of-distribution inputs: how well does the uncertainty tell them from held-out rows (AUROC)?
        reference: A method whose predictive functions the others are compared with; it is scored too. None: ``NUTS`` if
            it is among the methods. A reference given by name is left out, with a warning, where the network has more
            than 5,000 random parameters. False: none.
        samples: Draws of a prediction. An estimator has its own number.
        progress: Show a bar; None shows it only on a terminal.
        engine: Where the fits are made: here (None), or several at a time with ``kn.engines.Ray(...)`` or ``"ray"``.
            The scores are the same.

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
    problem = as_problem(model_or_estimator, data)
    candidates, held, notices = _with_reference(as_candidates(methods, problem.resolve), reference, problem)
    y = problem.outcomes(np.arange(problem.rows))
    splits = as_splits(cv, problem.rows, y.numpy(force=True) if isinstance(y, Tensor) else y, seed=seed)
    conditions = Conditions(problem, seed, samples, None if outside is None else problem.outside(outside))
    journal = Journal(out, identity(conditions, splits))
    made_by = _only_workers(as_engine(engine))
    clock = Budget(
        budget, fits_to_make(journal, candidates, splits, held), spent=journal.seconds, at_once=made_by.at_once
    )
    run = ComparisonRun(conditions, candidates, splits, held, journal, clock, made_by)
    run.go(progress)
    _check_any(run)
    return Comparison(
        records=tuple(run.records),
        not_run=tuple(run.not_run),
        methods=tuple(candidate.name for candidate in candidates),
        folds=len(splits),
        reference=None if held is None else held.name,
        facts=_facts(conditions, run, budget),
        notices=tuple(notices),
        citations={each.name: each.entry.bibtex for each in candidates if each.entry is not None},
    )


def as_problem(model_or_estimator: Any, data: Any) -> Problem:
    """A model or an estimator with its data.

    Raises:
        InvalidType: If it is neither.
    """
    from knowable.datasets.dataset import Dataset

    if isinstance(data, Dataset):
        data = (data.x, data.y)
    if isinstance(model_or_estimator, Model):
        return ModelProblem(model_or_estimator, data)
    if isinstance(model_or_estimator, type):
        raise InvalidType(f"compare needs an object: write {model_or_estimator.__name__}() with parentheses.")
    if isinstance(model_or_estimator, DistributionEstimator):
        return EstimatorProblem(model_or_estimator, data)
    raise InvalidType(
        f"compare needs a knowable Model, or an estimator with fit, predict_dist, get_params and set_params; got "
        f"{type(model_or_estimator).__name__}."
    )


def _only_workers(engine: Engine) -> Engine:
    """An engine that says where fits are made and nothing else: how they are made is the methods' own affair."""
    if engine != Engine(workers=engine.workers):
        raise Unsupported("engine of a comparison says where fits are made: pass kn.engines.Ray(...), or leave it out.")
    return engine


def identity(conditions: Conditions, splits: tuple[Split, ...]) -> dict[str, str]:
    """What makes a comparison this one: its file can only be taken up by the same. Methods may differ."""
    outside = conditions.outside
    return {
        **conditions.problem.identity(),
        "cv": splits_fingerprint(splits),
        "seed": str(conditions.seed),
        "samples": str(conditions.samples),
        "outside": "none" if outside is None else table_fingerprint(outside),
    }


def _with_reference(
    candidates: tuple[Candidate, ...], reference: Any, problem: Problem
) -> tuple[tuple[Candidate, ...], Candidate | None, list[str]]:
    """The methods with the reference among them, the reference, and what has to be said about it."""
    if reference is False:
        return candidates, None, []
    if reference is True:
        reference = REFERENCE
    if reference is None:
        there = [each for each in candidates if each.entry is not None and each.entry.name == REFERENCE]
        return candidates, (there[0] if there else None), []
    (wanted,) = as_candidates([reference], problem.resolve)
    same = next((each for each in candidates if each.settings == wanted.settings), None)
    if same is not None:
        return candidates, same, []
    size = problem.parameters()
    if isinstance(reference, str) and size is not None and size > MOST_PARAMETERS:
        text = (
            f"The reference {wanted.name} was left out: the network has {size:,} random parameters, and a reference is "
            f"fitted by name up to {MOST_PARAMETERS:,}. Pass the method itself to fit it anyway."
        )
        warnings.warn(text, KnowableWarning, stacklevel=3)
        return candidates, None, [text]
    if any(each.name == wanted.name for each in candidates):
        wanted = Candidate(f"{wanted.name} (reference)", wanted.method)
    return (*candidates, wanted), wanted, []


def _check_any(run: ComparisonRun) -> None:
    """Raise where nothing could be fitted, with the first reason."""
    if any(record.error is None for record in run.records):
        return
    failed = next((record for record in run.records if record.error is not None), None)
    if failed is not None:
        raise KnowableError(f"No method could be fitted. The first, {failed.method}: {failed.error}")
    raise KnowableError("budget was spent before any method could be fitted. Allow more seconds.")


def _facts(conditions: Conditions, run: ComparisonRun, budget: float | None) -> dict[str, str]:
    """How it was made, for people."""
    problem = conditions.problem
    own = {"Draws": str(conditions.samples)} if isinstance(problem, ModelProblem) else {}
    return {
        "Compared on": problem.describe(),
        "Rows": f"{problem.rows:,}",
        "Folds": str(len(run.splits)),
        **own,
        "Seed": str(conditions.seed),
        "Budget": "none" if budget is None else f"{budget:g} s",
        "Time taken": f"{sum(record.elapsed for record in run.records):.0f} s",
        "knowable": __version__,
    }
