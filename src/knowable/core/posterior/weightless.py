"""What posteriors without weights of their own answer to questions about weights."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from knowable.core.network.params import Params
from knowable.errors import Unsupported


class Weightless:
    """Methods about weights that say where to ask instead; comes before ``Posterior`` among the bases."""

    def _no_weights(self) -> str:
        """Why there are none, and what to ask."""
        raise NotImplementedError

    def _refuse(self) -> NoReturn:
        raise Unsupported(self._no_weights())

    def sample(self, n: int, generator: torch.Generator | None = None) -> Params:
        """Not defined: there are no weights that it is about."""
        self._refuse()

    def mean(self) -> Params:
        """Not defined: there are no weights that it is about. The mean function is ``predict(x).mean``."""
        self._refuse()

    def std(self) -> Params:
        """Not defined: there are no weights that it is about."""
        self._refuse()

    def log_prob(self, params: Params) -> Tensor:
        """Not defined: there are no weights that it is about."""
        self._refuse()

    def as_prior(self) -> NoReturn:
        """Not defined: a prior is over weights."""
        self._refuse()

    def to_arviz(self, *arguments: Any, **settings: Any) -> NoReturn:
        """Not defined: ArviZ describes draws of parameters."""
        self._refuse()

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        self._refuse()

    def _mean_random(self) -> Params:
        self._refuse()

    def _std_random(self) -> Params:
        self._refuse()
