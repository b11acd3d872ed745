"""Ensembles: several networks, or several posteriors, and what they say together."""

from knowable.inference.ensembles.bayesian_bootstrap import BayesianBootstrap
from knowable.inference.ensembles.deep_ensemble import DeepEnsemble
from knowable.inference.ensembles.diversity import Diversity, diversity
from knowable.inference.ensembles.ensemble_of import EnsembleOf, MultiSWAG
from knowable.inference.ensembles.snapshot import SnapshotEnsemble
from knowable.inference.ensembles.swag import SWAG, SWAGPosterior

__all__ = [
    "DeepEnsemble",
    "SnapshotEnsemble",
    "BayesianBootstrap",
    "EnsembleOf",
    "SWAG",
    "MultiSWAG",
    "Diversity",
    "SWAGPosterior",
    "diversity",
]
