"""What a likelihood must be able to do.

A likelihood turns the network's output into a distribution over the target. Its own parameters (a noise scale) are
parameters of the model like any other: they are passed in, they have priors, and they get a posterior.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from knowable.core.model.output_information import OutputInformation
from knowable.core.model.prior import Prior
from knowable.core.network.params import Params
from knowable.core.prediction.normal_outputs import NormalOutputs
from knowable.core.prediction.targets import align_target
from knowable.errors import Unsupported

if TYPE_CHECKING:
    from knowable.core.prediction.prediction import Prediction

LIKELIHOOD_PREFIX = "likelihood."


class Likelihood(ABC):
    """p(y | output, own parameters). Concrete likelihoods are frozen dataclasses whose fields are plain numbers.

    Attributes:
        noise_name: The own parameter, if there is one, that is the logarithm of the outputs' noise: their information
            is proportional to exp(-2 of it). One number, or one for each entry of the last dimension.
    """

    noise_name: ClassVar[str | None] = None

    def params(self) -> Params:
        """Initial values of the likelihood's own parameters, by short name (none by default)."""
        return {}

    def priors(self) -> dict[str, Prior]:
        """Default priors of its own parameters, by the same short names."""
        return {}

    def align(self, y: Tensor, output: Tensor) -> Tensor:
        """Give ``y`` the shape and dtype that :meth:`log_prob` wants; shapes are checked, values are not."""
        return align_target(y.to(output.dtype), output.shape[1:])

    @abstractmethod
    def check_target(self, y: Tensor, output: Tensor, *, name: str = "y") -> Tensor:
        """Return ``y`` cast and shaped to be scored against outputs like ``output``, or raise InvalidData saying where.

        ``output`` is the network's output on a row or two of the data: only its trailing shape, dtype and device
        matter.
        """

    @abstractmethod
    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        """Log likelihood per example, ``(batch,)``, for one draw of parameters; extra output dimensions are summed."""

    @abstractmethod
    def predict(self, outputs: Tensor, params: Params, log_weights: Tensor) -> Prediction:
        """The predictive distribution from K draws.

        Args:
            outputs: Network outputs, ``(K, batch, ...)``.
            params: The likelihood's own parameters by short name, each with a leading dimension K.
            log_weights: Normalised log weights of the draws, ``(K,)``.
        """

    def predict_normal(self, outputs: NormalOutputs, params: Params) -> Prediction:
        """The predictive distribution where outputs are normal: in closed form if there is one, else from the draws.

        Args:
            outputs: Normal distributions over the outputs of each row.
            params: The likelihood's own parameters by short name, one value each.
        """
        stack = {name: value.expand(len(outputs.draws), *value.shape) for name, value in params.items()}
        return self.predict(outputs.draws, stack, outputs.log_weights)

    def information(self, output: Tensor, params: Params) -> OutputInformation:
        """The Fisher information of each row's target in its outputs ``(batch, ...)``."""
        raise Unsupported(
            f"{type(self).__name__} does not implement information(), the Fisher information in the network's outputs, "
            f"which curvature='ggn' needs. Define it, or use curvature='empirical_fisher' or 'hessian'."
        )
