"""Likelihoods: how the network's output becomes a distribution over the target. One per file."""

from knowable.likelihoods.bernoulli import Bernoulli
from knowable.likelihoods.categorical import Categorical
from knowable.likelihoods.distribution import DistributionLikelihood
from knowable.likelihoods.gaussian import Gaussian
from knowable.likelihoods.heteroscedastic_gaussian import HeteroscedasticGaussian
from knowable.likelihoods.heteroscedastic_student_t import HeteroscedasticStudentT
from knowable.likelihoods.joint import Joint
from knowable.likelihoods.negative_binomial import NegativeBinomial
from knowable.likelihoods.poisson import Poisson
from knowable.likelihoods.student_t import StudentT

__all__ = [
    # numbers
    "Gaussian",
    "HeteroscedasticGaussian",
    "StudentT",
    "HeteroscedasticStudentT",
    # counts
    "NegativeBinomial",
    "Poisson",
    # labels
    "Bernoulli",
    "Categorical",
    # several outcomes
    "Joint",
    # any other
    "DistributionLikelihood",
]
