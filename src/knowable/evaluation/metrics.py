"""All scores in one place: ``kn.metrics``.

Every function takes a Prediction or plain tensors and arrays, and returns a float (the curves return their data). Those
for chains take draws ``(chains, draws, ...)`` and return a number for each quantity.
"""

from knowable.core.chains.convergence import ess_bulk as ess
from knowable.core.chains.convergence import ess_tail, rhat
from knowable.evaluation.agreement import agreement, total_variation
from knowable.evaluation.calibration import (
    CoverageCurve,
    ReliabilityCurve,
    coverage,
    coverage_curve,
    ece,
    interval_width,
    reliability_curve,
)
from knowable.evaluation.detection import (
    RiskCoverage,
    aupr,
    auroc,
    fpr95,
    risk_coverage,
    threshold_at_fpr,
    tpr_at_fpr,
)
from knowable.evaluation.scores import accuracy, brier, crps, nll, rmse

__all__ = [
    # scores
    "nll",
    "rmse",
    "crps",
    "accuracy",
    "brier",
    # calibration
    "ece",
    "coverage",
    "interval_width",
    "reliability_curve",
    "ReliabilityCurve",
    "coverage_curve",
    "CoverageCurve",
    # detection
    "auroc",
    "aupr",
    "tpr_at_fpr",
    "threshold_at_fpr",
    "fpr95",
    "risk_coverage",
    "RiskCoverage",
    # agreement
    "agreement",
    "total_variation",
    # chains
    "rhat",
    "ess",
    "ess_tail",
]
