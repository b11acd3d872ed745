"""Problems with known answers, networks of every kind, and the suite that any new method must pass."""

from knowable.testing.banana_regression import BananaRegression
from knowable.testing.conformance import CHECKS, Check, check_method, parametrize_with_checks
from knowable.testing.densities import Density, banana, bimodal, correlated_gaussian, funnel
from knowable.testing.networks import NETWORKS, NetworkCase, network_case
from knowable.testing.subject import Subject
from knowable.testing.targets import LinearGaussian

__all__ = [
    # problems with known answers
    "LinearGaussian",
    "BananaRegression",
    "Density",
    "correlated_gaussian",
    "banana",
    "bimodal",
    "funnel",
    # networks
    "NETWORKS",
    "NetworkCase",
    "network_case",
    # the suite
    "CHECKS",
    "Check",
    "Subject",
    "check_method",
    "parametrize_with_checks",
]
