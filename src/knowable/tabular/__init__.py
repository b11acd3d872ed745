"""Tables: columns in, tensors out, and the estimators for scikit-learn users.

The estimators are imported when they are asked for, since scikit-learn takes its time.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from knowable.tabular.auto import Choice, choose
from knowable.tabular.networks import ResidualMLP, default_network
from knowable.tabular.reading import read_table
from knowable.tabular.schema import Schema
from knowable.tabular.table import Table

if TYPE_CHECKING:
    from knowable.tabular.classifier import BayesianClassifier
    from knowable.tabular.regressor import BayesianRegressor

__all__ = [
    # the estimators
    "BayesianRegressor",
    "BayesianClassifier",
    # tables
    "read_table",
    "Table",
    "Schema",
    # what they are made of
    "choose",
    "Choice",
    "default_network",
    "ResidualMLP",
]

_LAZY = {"BayesianRegressor": "knowable.tabular.regressor", "BayesianClassifier": "knowable.tabular.classifier"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'knowable.tabular' has no attribute {name!r}")
