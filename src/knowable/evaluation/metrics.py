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
    class_calibration,
    coverage,
    coverage_curve,
    ece,
    interval_width,
    reliability_curve,
    rms_calibration_error,
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
from knowable.evaluation.pit import PITHistogram, pit_histogram, pit_values, quantile_calibration_error, sharpness
from knowable.evaluation.proper_scores import BrierDecomposition, brier_decomposition, energy_score, interval_score
from knowable.evaluation.rejection import AccuracyRejection, accuracy_rejection
from knowable.evaluation.scores import accuracy, brier, crps, nll, rmse

__all__ = [
    # scores
    "nll",
    "rmse",
    "crps",
    "accuracy",
    "brier",
    "brier_decomposition",
    "BrierDecomposition",
    "interval_score",
    "energy_score",
    # calibration
    "ece",
    "coverage",
    "interval_width",
    "reliability_curve",
    "ReliabilityCurve",
    "coverage_curve",
    "CoverageCurve",
    "class_calibration",
    "rms_calibration_error",
    "quantile_calibration_error",
    "pit_values",
    "pit_histogram",
    "PITHistogram",
    "sharpness",
    # detection
    "auroc",
    "aupr",
    "tpr_at_fpr",
    "threshold_at_fpr",
    "fpr95",
    "risk_coverage",
    "RiskCoverage",
    "accuracy_rejection",
    "AccuracyRejection",
    # agreement
    "agreement",
    "total_variation",
    # chains
    "rhat",
    "ess",
    "ess_tail",
]
