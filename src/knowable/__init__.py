"""knowable: turn any PyTorch network into a Bayesian one, and know what it doesn't know.

>>> import torch
>>> import knowable as kn
>>> x = torch.linspace(-2, 2, 50).unsqueeze(1)
>>> y = torch.sin(2 * x) + 0.1 * torch.randn(50, 1)
>>> net = torch.nn.Sequential(torch.nn.Linear(1, 20), torch.nn.Tanh(), torch.nn.Linear(20, 1))
>>> model = kn.Model(net, kn.Gaussian(), kn.Normal(1.0))
>>> posterior = kn.MeanFieldVI(epochs=50).fit(model, (x, y))
>>> prediction = posterior.predict(x)
>>> low, high = prediction.interval(0.9)
"""

from __future__ import annotations

import difflib
import importlib
from typing import TYPE_CHECKING, Any

from knowable import engines
from knowable._version import __version__
from knowable.comparison import Comparison, Selection, compare, select
from knowable.core.chains.diagnostics import ChainDiagnostics
from knowable.core.chains.posterior import ChainPosterior, Samples
from knowable.core.chains.settings import ChainStorage
from knowable.core.compiling.engine import Engine
from knowable.core.model.data import Data
from knowable.core.model.likelihood import Likelihood
from knowable.core.model.model import Model
from knowable.core.model.prior import Prior
from knowable.core.network import feature_maps as features
from knowable.core.network.gates import Gates, gated
from knowable.core.network.own_modules import Erf, Residual
from knowable.core.posterior.diagnostics import Diagnostics, LogEvidence
from knowable.core.posterior.functions import FunctionPosterior
from knowable.core.posterior.mixture import Mixture
from knowable.core.posterior.model_average import ModelAverage
from knowable.core.posterior.normal import DiagonalNormal, FullNormal, KroneckerNormal, LowRankNormal, ProductPosterior
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.core.posterior.recalibrated import Recalibrated
from knowable.core.prediction.joint import JointPrediction
from knowable.core.prediction.prediction import ClassPrediction, Prediction, RegressionPrediction
from knowable.core.storage.folder import Checkpoint
from knowable.core.support.progress import Progress
from knowable.core.support.time_limit import time_limit
from knowable.core.training.settings import Training
from knowable.decisions.certificate import Certificate, CertifiedPrediction, Guarantee
from knowable.decisions.certify import certify
from knowable.decisions.stream_alarm import StreamAlarm
from knowable.engines.tracking import MLflow, TensorBoard
from knowable.errors import (
    CalibrationWarning,
    CannotConnect,
    CannotSave,
    ConvergenceWarning,
    DamagedArtifact,
    Diverged,
    Interrupted,
    InvalidArgument,
    InvalidData,
    InvalidType,
    KnowableError,
    KnowableWarning,
    MissingExtra,
    ModelWarning,
    NeedsClasses,
    NotSigned,
    ProcessLost,
    TooFewSteps,
    UnseenCategory,
    Unsupported,
    WorkerLost,
    WorseThanNetwork,
)
from knowable.evaluation import conformal, metrics
from knowable.evaluation.calibration_plots import coverage_plot, pit_plot, rejection_plot, reliability_diagram
from knowable.evaluation.chain_plots import rank_plot, trace_plot
from knowable.evaluation.detect import Detection, detect
from knowable.evaluation.evaluate import Scores, evaluate
from knowable.evaluation.pixel_plots import pixel_plot
from knowable.evaluation.reference import ReferenceComparison, compare_to_reference
from knowable.evaluation.sparsity_plots import sparsity_plot, weights_film, weights_plot
from knowable.inference import dropout, ensembles, exact, functional, laplace, point, sampling, variational
from knowable.inference.dropout import *
from knowable.inference.ensembles import *
from knowable.inference.exact import *
from knowable.inference.functional import *
from knowable.inference.laplace import *
from knowable.inference.point import *
from knowable.inference.sampling import *
from knowable.inference.variational import *
from knowable.likelihoods import (
    Bernoulli,
    Categorical,
    DistributionLikelihood,
    Gaussian,
    HeteroscedasticGaussian,
    HeteroscedasticStudentT,
    Joint,
    NegativeBinomial,
    Poisson,
    StudentT,
)
from knowable.loading import load
from knowable.priors import (
    BernoulliPrior,
    EmpiricalBayes,
    Flat,
    Horseshoe,
    LaplacePrior,
    LogUniform,
    Normal,
    NormalInverseGamma,
    ScaleMixture,
    StudentTPrior,
)
from knowable.registry import METHODS, cite

if TYPE_CHECKING:
    from knowable import datasets, tabular, testing
    from knowable.decisions import attack
    from knowable.decisions import botorch_model as botorch
    from knowable.decisions.active import ActiveLearner
    from knowable.decisions.compress import Compressed, compress, load_compressed
    from knowable.decisions.continual import ContinualLearner
    from knowable.decisions.coreset import Coreset
    from knowable.decisions.distill import Distilled, distill
    from knowable.decisions.export import export
    from knowable.decisions.feature_density import FeatureDensity
    from knowable.decisions.optimizer import Optimizer
    from knowable.decisions.space import Choice, Integer, Real
    from knowable.evaluation import shift
    from knowable.tabular import BayesianClassifier, BayesianRegressor

__all__ = [
    # the model
    "Model",
    "Data",
    "Gates",
    "gated",
    "features",
    "Residual",
    "Erf",
    # likelihoods
    "Gaussian",
    "HeteroscedasticGaussian",
    "StudentT",
    "HeteroscedasticStudentT",
    "Categorical",
    "Bernoulli",
    "NegativeBinomial",
    "Poisson",
    "Joint",
    "DistributionLikelihood",
    "Likelihood",
    # priors
    "Normal",
    "NormalInverseGamma",
    "LaplacePrior",
    "StudentTPrior",
    "ScaleMixture",
    "LogUniform",
    "Horseshoe",
    "BernoulliPrior",
    "EmpiricalBayes",
    "Flat",
    "Prior",
    # posteriors and predictions
    "Posterior",
    "FunctionPosterior",
    "Particles",
    "DiagonalNormal",
    "FullNormal",
    "KroneckerNormal",
    "LowRankNormal",
    "Mixture",
    "ModelAverage",
    "Recalibrated",
    "ProductPosterior",
    "ChainPosterior",
    "Samples",
    "Prediction",
    "RegressionPrediction",
    "JointPrediction",
    "ClassPrediction",
    "Diagnostics",
    "ChainDiagnostics",
    "LogEvidence",
    "load",
    # running
    "Checkpoint",
    "Engine",
    "engines",
    "TensorBoard",
    "MLflow",
    "Training",
    "ChainStorage",
    "time_limit",
    "Progress",
    # tables
    "BayesianRegressor",
    "BayesianClassifier",
    "tabular",
    # evaluation
    "evaluate",
    "Scores",
    "metrics",
    "compare",
    "Comparison",
    "select",
    "Selection",
    "compare_to_reference",
    "ReferenceComparison",
    "detect",
    "Detection",
    "shift",
    "reliability_diagram",
    "coverage_plot",
    "pit_plot",
    "rejection_plot",
    "sparsity_plot",
    "weights_plot",
    "weights_film",
    "trace_plot",
    "rank_plot",
    "pixel_plot",
    # decisions
    "certify",
    "Certificate",
    "CertifiedPrediction",
    "Guarantee",
    "conformal",
    "StreamAlarm",
    "attack",
    "FeatureDensity",
    "compress",
    "Compressed",
    "load_compressed",
    "ActiveLearner",
    "Optimizer",
    "Real",
    "Integer",
    "Choice",
    "botorch",
    "ContinualLearner",
    "Coreset",
    "distill",
    "export",
    "Distilled",
    # the rest
    "cite",
    "datasets",
    "testing",
    "__version__",
    # errors and warnings
    "KnowableError",
    "InvalidArgument",
    "InvalidType",
    "InvalidData",
    "Unsupported",
    "Diverged",
    "CannotConnect",
    "CannotSave",
    "DamagedArtifact",
    "MissingExtra",
    "WorkerLost",
    "TooFewSteps",
    "KnowableWarning",
    "ConvergenceWarning",
    "Interrupted",
    "WorseThanNetwork",
    "CalibrationWarning",
    "ModelWarning",
    "NeedsClasses",
    "NotSigned",
    "ProcessLost",
    "UnseenCategory",
]
__all__ += point.__all__
__all__ += exact.__all__
__all__ += functional.__all__
__all__ += laplace.__all__
__all__ += variational.__all__
__all__ += dropout.__all__
__all__ += sampling.__all__
__all__ += ensembles.__all__

_LAZY_MODULES = {
    "attack": "knowable.decisions.attack",
    "botorch": "knowable.decisions.botorch_model",
    "datasets": "knowable.datasets",
    "shift": "knowable.evaluation.shift",
    "tabular": "knowable.tabular",
    "testing": "knowable.testing",
}
_LAZY = {
    "FeatureDensity": "knowable.decisions.feature_density",
    "BayesianRegressor": "knowable.tabular.regressor",
    "BayesianClassifier": "knowable.tabular.classifier",
    "compress": "knowable.decisions.compress",
    "Compressed": "knowable.decisions.compress",
    "load_compressed": "knowable.decisions.compress",
    "ActiveLearner": "knowable.decisions.active",
    "Optimizer": "knowable.decisions.optimizer",
    "Real": "knowable.decisions.space",
    "Integer": "knowable.decisions.space",
    "Choice": "knowable.decisions.space",
    "ContinualLearner": "knowable.decisions.continual",
    "Coreset": "knowable.decisions.coreset",
    "distill": "knowable.decisions.distill",
    "export": "knowable.decisions.export",
    "Distilled": "knowable.decisions.distill",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY_MODULES:
        return importlib.import_module(_LAZY_MODULES[name])
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'knowable' has no attribute {name!r}.{_nearest(name)}", name=name, obj=None)


def _nearest(name: str) -> str:
    """A name that may have been meant: a method by its alias or by its name elsewhere, or one that is spelled alike."""
    meant = {each.upper(): entry.cls_name for entry in METHODS.values() for each in (entry.name, *entry.aliases)}
    meant |= {"BBB": "MeanFieldVI", "BAYESBYBACKPROP": "MeanFieldVI", "VI": "MeanFieldVI", "ADVI": "MeanFieldVI"}
    meant |= {"FULLRANKADVI": "FullRankVI", "NORMALIZINGFLOWVI": "FlowVI", "IVON": "NaturalVI", "VOGN": "NaturalVI"}
    meant |= {"ENSEMBLE": "DeepEnsemble", "DROPOUT": "MCDropout", "LLLA": "Laplace", "BERNOULLILIKELIHOOD": "Bernoulli"}
    meant |= {"GAUSSIANLIKELIHOOD": "Gaussian", "GAUSSIANPRIOR": "Normal", "NORMALPRIOR": "Normal"}
    found = [meant[name.upper()]] if name.upper() in meant else difflib.get_close_matches(name, __all__, n=1)
    return f" Did you mean kn.{found[0]}?" if found and not name.startswith("_") else ""
