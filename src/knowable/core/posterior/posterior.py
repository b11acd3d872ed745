"""A distribution over parameters, bound to its model: sample it, predict with it, save it."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from knowable.core.model.data import as_input
from knowable.core.model.model import Model
from knowable.core.model.prior import JointPrior
from knowable.core.network.params import Buffers, Params, expand_params
from knowable.core.posterior.diagnostics import Diagnostics, LogEvidence
from knowable.core.posterior.predicting import parse_memory, predict_outputs, rows_that_fit
from knowable.core.posterior.saving import FAMILIES, save_posterior
from knowable.core.prediction.prediction import Prediction
from knowable.core.support.checks import check_count, check_generator
from knowable.core.support.randomness import generator_for
from knowable.errors import Unsupported


class Posterior(ABC):
    """A distribution over all parameters of a model that are not frozen.

    Random parameters vary from draw to draw; parameters that are point estimates are the same in every draw.

    Attributes:
        model: The model this is a posterior of.
        points: Values of the parameters that are point estimates.
        buffers: The network's buffers after the fit.
        diagnostics: How the fit went.
        log_evidence: log p(D): exact, a bound, an estimate, or None.
        seed: Fixes the draws that :meth:`predict` uses when it is given no generator.
    """

    log_alpha_threshold: ClassVar[float] = 3.0
    """Where the log of noise over signal, :math:`-2 \\log` :meth:`signal_to_noise`, says that a weight can go."""
    family: ClassVar[str]
    families: ClassVar[dict[str, type[Posterior]]] = FAMILIES

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "family" in cls.__dict__:
            Posterior.families[cls.family] = cls

    def __init__(
        self,
        model: Model,
        *,
        points: Params | None = None,
        buffers: Buffers | None = None,
        diagnostics: Diagnostics | None = None,
        log_evidence: LogEvidence | None = None,
        seed: int = 0,
    ):
        self.model = model
        self.points = {name: value.detach() for name, value in (points or {}).items()}
        self.buffers = model.buffers() if buffers is None else {k: v.detach().clone() for k, v in buffers.items()}
        self.diagnostics = Diagnostics() if diagnostics is None else diagnostics
        self.log_evidence = log_evidence
        self.seed = seed
        self._kept: tuple[int, Params] | None = None  # draws kept from one prediction to the next

    # --- what a family defines ---------------------------------------------------------------------------------------

    @abstractmethod
    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        """Draw n sets of the random parameters, stacked."""

    @abstractmethod
    def _mean_random(self) -> Params:
        """Means of the random parameters."""

    @abstractmethod
    def _std_random(self) -> Params:
        """Standard deviations of the random parameters."""

    @abstractmethod
    def _tensors(self) -> dict[str, Tensor]:
        """What has to be saved, by name."""

    @classmethod
    @abstractmethod
    def _from_tensors(cls, model: Model, tensors: dict[str, Tensor], **common: Any) -> Posterior:
        """The inverse of :meth:`_tensors` and :meth:`_settings`; ``common`` goes to ``__init__``."""

    def _settings(self) -> dict[str, Any]:
        """Plain values that are saved beside the tensors, and come back as arguments of :meth:`_from_tensors`."""
        return {}

    def log_prob(self, params: Params) -> Tensor:
        """Log density of the random parameters in ``params``: a scalar for one draw, ``(n,)`` for a stack."""
        raise Unsupported(f"{type(self).__name__} has no density. Families with one: {', '.join(_with_density())}.")

    def as_prior(self) -> JointPrior:
        """This posterior as the prior of the next data set."""
        raise Unsupported(
            f"{type(self).__name__} has no density, so it cannot be a prior. Fit a method whose posterior has one, "
            f"such as MeanFieldVI."
        )

    # --- draws -------------------------------------------------------------------------------------------------------

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """Draw n sets of parameters: a dict in which every tensor has a leading dimension n."""
        check_count("n", n)
        check_generator(generator)
        return self._ordered({**self._sample_random(n, generator), **expand_params(self.points, n)})

    def mean(self) -> Params:
        """Posterior mean of every parameter."""
        return self._ordered({**self._mean_random(), **self.points})

    def std(self) -> Params:
        """Posterior standard deviation of every parameter (0 for point estimates)."""
        return self._ordered({**self._std_random(), **{k: torch.zeros_like(v) for k, v in self.points.items()}})

    def signal_to_noise(self) -> Params:
        """|mean| / standard deviation of every random parameter, elementwise; infinite where there is no spread."""
        return {
            name: _ratio(mean.abs(), std)
            for (name, mean), std in zip(self.mean().items(), self.std().values(), strict=True)
            if name in self.model.random_names and name not in self.points
        }

    def _ordered(self, params: Params) -> Params:
        return {name: params[name] for name in self.model.params()}

    def draws_for_prediction(self, samples: int, seed: int) -> tuple[int, Tensor]:
        """How many draws a prediction uses, and their normalised log weights."""
        zeros = torch.zeros(samples, dtype=self.model.dtype, device=self.model.device)
        return samples, zeros.log_softmax(0)

    def draw_block(self, start: int, stop: int, samples: int, seed: int) -> Params:
        """Draws ``start`` to ``stop`` of a prediction. Each has its own stream, so blocks may be of any size."""
        count, device = stop - start, self.model.device
        block: Params = {}
        for k in range(count):
            draw = self._sample_random(1, generator_for(seed, "predict", start + k, device=device))
            block = block or {name: value.new_empty((count, *value.shape[1:])) for name, value in draw.items()}
            for name, value in draw.items():
                block[name][k] = value[0]
        return self._ordered({**block, **expand_params(self.points, count)})

    def buffer_block(self, start: int, stop: int, samples: int, seed: int) -> Buffers:
        """Buffers that differ from draw to draw, for the draws of :meth:`draw_block`, stacked; none by default."""
        return {}

    def run_draws(self, stack: Params, x: Tensor, *, first: int, seed: int, vectorise: bool) -> Tensor:
        """Network outputs ``(K, rows, ...)`` for K draws, of which number ``first`` of the prediction is the first.

        ``stack`` holds the network's parameters, and the buffers that differ from draw to draw.
        """
        return self.model.network.over_draws(stack, x, buffers=self.buffers, vectorise=vectorise)

    # --- prediction --------------------------------------------------------------------------------------------------

    def predict(
        self,
        x: Any,
        samples: int = 64,
        generator: torch.Generator | None = None,
        max_memory: int | str | None = None,
    ) -> Prediction:
        """The predictive distribution at ``x``, by Monte Carlo over the weights.

        The same posterior gives the same prediction every time, unless a ``generator`` is passed.

        Args:
            x: Inputs, one row each.
            samples: Number of posterior draws (a posterior of K atoms uses its atoms, at most this many).
            generator: Makes the draws new.
            max_memory: Bytes (or ``"500MB"``) the computation and its result may take.
        """
        check_count("samples", samples)
        x = as_input(x, self.model)
        return self._predict(x, samples, self._seed_from(generator), parse_memory(max_memory))

    def _predict(self, x: Tensor, samples: int, seed: int, memory: int | None) -> Prediction:
        with torch.no_grad():
            outputs, params, log_weights = predict_outputs(self, x, samples, seed, memory)
            return self.model.likelihood.predict(outputs, self.model.likelihood_params(params), log_weights)

    def predict_stream(
        self,
        x: Any,
        samples: int = 64,
        generator: torch.Generator | None = None,
        max_memory: int | str = "1GB",
    ) -> Iterator[Prediction]:
        """Predictions for consecutive blocks of rows, each small enough for ``max_memory``."""
        check_count("samples", samples)
        x = as_input(x, self.model)
        memory = parse_memory(max_memory)
        seed = self._seed_from(generator)
        for rows in x.split(rows_that_fit(self, x, samples, memory)):
            yield self._predict(rows, samples, seed, memory)

    def _seed_from(self, generator: torch.Generator | None) -> int:
        check_generator(generator)
        if generator is None:
            return self.seed
        return int(torch.randint(2**62, (), generator=generator, device=generator.device))

    # --- on disk -----------------------------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write a folder of safetensors and JSON that ``knowable.load`` reads; it never contains code."""
        return save_posterior(self, path)

    def __repr__(self) -> str:
        start = self.model.params()
        size = sum(start[name].numel() for name in self.model.random_names if name not in self.points)
        evidence = f", log evidence {self.log_evidence!r}" if self.log_evidence is not None else ""
        target = "" if self.diagnostics.bayes else ", not the Bayes posterior: see diagnostics.notes"
        return f"{type(self).__name__}({size:,} random parameters of {type(self.model.net).__name__}{evidence}{target})"


def _ratio(size: Tensor, spread: Tensor) -> Tensor:
    """Their ratio, infinite where there is no spread, also of nothing."""
    return torch.where(spread > 0, size / spread, torch.full_like(size, torch.inf))


def _with_density() -> list[str]:
    return sorted(cls.__name__ for cls in Posterior.families.values() if cls.log_prob is not Posterior.log_prob)
