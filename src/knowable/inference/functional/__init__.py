"""Gaussian processes and their like: posteriors over functions, without weights; and priors over functions."""

from knowable.inference.functional.deep_gaussian_process import DeepGaussianProcess
from knowable.inference.functional.deep_kernel import DeepKernel
from knowable.inference.functional.gaussian_process import GaussianProcess
from knowable.inference.functional.infinite_width import InfiniteWidth
from knowable.inference.functional.matched_prior import MatchedPrior, match_prior
from knowable.inference.functional.sparse_gaussian_process import SparseGaussianProcess
from knowable.inference.functional.tangent_kernel import empirical_ntk
from knowable.inference.functional.width_kernel import infinite_width_kernel

__all__ = [
    "DeepGaussianProcess",
    "DeepKernel",
    "GaussianProcess",
    "InfiniteWidth",
    "MatchedPrior",
    "SparseGaussianProcess",
    "empirical_ntk",
    "infinite_width_kernel",
    "match_prior",
]
