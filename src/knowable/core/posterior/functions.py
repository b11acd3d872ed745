"""A posterior over functions: there are no weights, only the distribution of the function's values at any inputs."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, NoReturn

import torch
from torch import Tensor

from knowable.core.model.data import as_input
from knowable.core.network.params import Params, expand_params
from knowable.core.posterior.monte_carlo import check_result_fits, free_memory
from knowable.core.posterior.posterior import Posterior
from knowable.core.posterior.weightless import Weightless
from knowable.core.prediction.components import NormalOutputs, root_of
from knowable.core.prediction.prediction import Prediction
from knowable.core.support.checks import check_count
from knowable.core.support.randomness import generator_for
from knowable.errors import InvalidArgument, Unsupported


class FunctionPosterior(Weightless, Posterior):
    r"""A normal distribution over the values of a function at any inputs.

    .. math:: f(x_1), \ldots, f(x_n) \mid D \sim \mathcal{N}(m, \Sigma)

    The function takes the place of the model's network, whose weights have no part in it; the network says how many
    outputs there are, and the likelihood what they mean. So :meth:`sample`, :meth:`mean`, :meth:`std`,
    :meth:`log_prob` and :meth:`as_prior`, which are about weights, raise ``Unsupported``. :meth:`predict` integrates
    functions out, in closed form where the likelihood has one; :meth:`sample_functions` draws them.

    A family defines :meth:`_marginal` and :meth:`_joint`, and the two halves of saving, ``_tensors`` and
    ``_from_tensors``. Both are differentiable in x, and may be in double precision. The likelihood's own parameters
    are ``points``. A mixture of normal distributions defines ``_predict`` and ``_function_draws`` in place of the two.
    """

    row_numbers: int = 10_000
    """Numbers that :meth:`_marginal` holds for each row, from which it is decided how many rows it gets at once."""

    # --- what a family defines ---------------------------------------------------------------------------------------

    @abstractmethod
    def _marginal(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means ``(rows, outputs)``, and each row's covariance ``(rows, outputs, outputs)`` between its outputs."""

    @abstractmethod
    def _joint(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Means ``(rows, outputs)``, and the covariance of all rows and outputs together.

        It is ``(outputs, rows, rows)`` where outputs are independent of each other, otherwise ``(1, n, n)`` with all
        n = outputs × rows values, those of the first output first.
        """

    # --- prediction --------------------------------------------------------------------------------------------------

    def _predict(self, x: Tensor, samples: int, seed: int, memory: int | None) -> Prediction:
        check_result_fits(self, x, samples, memory)
        rows = max(1, (memory or free_memory(self.model.device)) // (2 * 8 * self.row_numbers))
        parts = [self._marginal(some) for some in x.split(rows)]
        mean, covariance = (torch.cat(each) for each in zip(*parts, strict=True))
        return self._prediction(mean, covariance, self._noise((samples, mean.shape[1]), seed), x)

    def _prediction(self, mean: Tensor, covariance: Tensor, noise: Tensor, x: Tensor) -> Prediction:
        """What the likelihood makes of normal outputs; the draws of each row are made of the same ``noise``."""
        model = self.model
        shaped = mean.reshape(len(x), *model.probe(x).shape[1:])
        found = NormalOutputs.of_moments(shaped, covariance, noise.to(mean))
        mean, variance, draws = (each.to(model.dtype) for each in (found.mean, found.variance, found.draws))
        outputs = NormalOutputs(mean, variance, covariance, draws)
        return model.likelihood.predict_normal(outputs, model.likelihood_params(self.points))

    def predict_jointly(self, x: Any, samples: int = 64, generator: torch.Generator | None = None) -> Prediction:
        """A prediction whose draws are functions: draw k of every row of this call is one function.

        Two calls have other functions: ask for all rows whose dependence counts in one call.

        Args:
            x: Inputs, as for :meth:`predict`.
            samples: Number of functions.
            generator: Makes the draws new.
        """
        return super().predict_jointly(x, samples, generator)

    def sample_functions(self, x: Any, n: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Draw n functions and return their values at ``x``, without noise, ``(n, rows, ...)``.

        They are what the likelihood takes: the mean of a Gaussian, the logits of classes.

        Args:
            x: Inputs, as for :meth:`predict`.
            n: Number of functions.
            generator: Makes the draws new.
        """
        check_count("n", n)
        x = as_input(x, self.model)
        with torch.no_grad():
            return self._function_draws(x, n, self._seed_from(generator))

    def _function_draws(self, x: Tensor, n: int, seed: int) -> Tensor:
        """Values of n functions at ``x``, ``(n, rows, ...)``."""
        self._check_rows(x)
        shape = self.model.probe(x).shape[1:]
        mean, covariance = self._joint(x)
        return self._of_joint(mean, covariance, self._noise((n, mean.numel()), seed)).view(n, len(x), *shape)

    def _check_rows(self, x: Tensor) -> None:
        """Refuse more rows than a covariance between all of them has memory for."""
        count = len(x) * self.model.probe(x).shape[1:].numel()
        if 3 * 8 * count * len(x) > free_memory(self.model.device):
            raise InvalidArgument(
                f"x has {len(x):,} rows, and functions are drawn with a covariance between all of them. Give fewer "
                f"rows at a time; predict() takes any number."
            )

    def _of_joint(self, mean: Tensor, covariance: Tensor, noise: Tensor) -> Tensor:
        """Draws ``(n, rows, outputs)`` from what :meth:`_joint` returns."""
        blocks = noise.to(mean).view(len(noise), *covariance.shape[:2])
        drawn = torch.einsum("bij,kbj->kbi", root_of(covariance), blocks)
        return (mean + drawn.reshape(len(noise), *mean.mT.shape).mT).to(self.model.dtype)

    def _noise(self, shape: tuple[int, ...], seed: int) -> Tensor:
        device = self.model.device
        return torch.randn(shape, generator=generator_for(seed, "predict", device=device), dtype=torch.float64,
                           device=device)  # fmt: skip

    def _outputs_of_draws(
        self, x: Tensor | None, samples: int, seed: int, memory: int | None
    ) -> tuple[Params, Tensor | None, Tensor]:
        outputs = None if x is None else self._function_draws(x, samples, seed)
        _, log_weights = self.draws_for_prediction(samples, seed)
        return expand_params(self.points, samples), outputs, log_weights

    # --- what is about weights ---------------------------------------------------------------------------------------

    def _no_weights(self) -> str:
        return (
            f"{type(self).__name__} is a distribution over functions: there are no weights to sample, average or "
            f"score. Use predict(x), or sample_functions(x, n) for values of whole functions."
        )

    def as_prior(self) -> NoReturn:
        """Not defined: a prior is over weights."""
        raise Unsupported(
            f"{type(self).__name__} is a distribution over functions, so it cannot be a prior over the weights of a "
            f"model. Fit all data together, or use a method whose posterior is over weights, such as Laplace."
        )

    def __repr__(self) -> str:
        evidence = f", log evidence {self.log_evidence!r}" if self.log_evidence is not None else ""
        return f"{type(self).__name__}(functions of {type(self.model.likelihood).__name__} outcomes{evidence})"
