"""Priors: distributions of a parameter before the data, one per file."""

from knowable.core.model.prior import Normal
from knowable.priors.bernoulli import BernoulliPrior
from knowable.priors.empirical_bayes import EmpiricalBayes
from knowable.priors.flat import Flat
from knowable.priors.horseshoe import Horseshoe
from knowable.priors.laplace import LaplacePrior
from knowable.priors.log_uniform import LogUniform
from knowable.priors.normal_inverse_gamma import NormalInverseGamma
from knowable.priors.scale_mixture import ScaleMixture
from knowable.priors.student_t import StudentTPrior

__all__ = [
    # one shape
    "Normal",
    "LaplacePrior",
    "StudentTPrior",
    # of weights and noise together
    "NormalInverseGamma",
    # sparse
    "ScaleMixture",
    "Horseshoe",
    "LogUniform",
    # improper
    "Flat",
    # of zeros and ones
    "BernoulliPrior",
    # learned
    "EmpiricalBayes",
]
