"""The predictive distribution of several named outcomes of each input."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from knowable.core.prediction.prediction import Prediction, joined_log_weights
from knowable.core.support.checks import check_count, check_generator
from knowable.errors import InvalidArgument

Named = dict[str, Tensor]


class JointDraws(ABC):
    """What K posterior draws say of all outcomes together."""

    count: int
    """Number of draws K."""

    @abstractmethod
    def named(self, y: Any) -> Named:
        """Outcomes by name, checked, from what a user passes."""

    @abstractmethod
    def log_probs(self, y: Named) -> Tensor:
        """Log density of all outcomes of a row under each draw, ``(K, batch)``."""

    @abstractmethod
    def prediction(self, draw: int) -> dict[str, Prediction]:
        """What one draw alone predicts, by name."""


class JointPrediction(Prediction):
    """Predictions of several outcomes of the same inputs: ``prediction["price"]`` is that of one of them.

    Given the weights outcomes are independent; averaged over the posterior they are not, and :meth:`log_prob` and
    :meth:`draw` know that. Their uncertainties have different units (a variance, an entropy), and so ``total``,
    ``aleatoric`` and ``epistemic`` are dicts by name.

    Attributes:
        heads: The prediction of each outcome, by name.
        log_weights: Normalised log weights of the draws, ``(K,)``.
    """

    def __init__(self, heads: dict[str, Prediction], draws: Sequence[JointDraws], log_weights: Tensor):
        self.heads, self.log_weights = heads, log_weights
        self._draws = list(draws)  # several where predictions were mixed
        self._shapes: dict[str, Any] = {}  # of outcomes, where the user's differ from the network's

    def __getitem__(self, name: str) -> Any:
        """The prediction of one outcome."""
        if name not in self.heads:
            known = ", ".join(map(repr, self.heads))
            raise InvalidArgument(f"There is no outcome {name!r}: the prediction has {known}.")
        return self.heads[name]

    def __iter__(self) -> Iterator[str]:
        """Names of the outcomes."""
        return iter(self.heads)

    def __len__(self) -> int:
        """Number of rows."""
        return len(next(iter(self.heads.values())))

    @cached_property
    def samples(self) -> Tensor:  # type: ignore[override]
        """What each draw predicts of all outcomes, one after the other in a row, ``(K, batch, values)``."""
        return torch.cat([each.samples.flatten(2) if each.samples.dim() > 2 else each.samples.unsqueeze(2)
                          for each in self.heads.values()], 2)  # fmt: skip

    @property
    def total(self) -> Named:  # type: ignore[override]
        """Total uncertainty of each outcome, by name: variance or entropy."""
        return {name: each.total for name, each in self.heads.items()}

    @property
    def aleatoric(self) -> Named:  # type: ignore[override]
        """The part that more data would not remove, by name."""
        return {name: each.aleatoric for name, each in self.heads.items()}

    @property
    def epistemic(self) -> Named:  # type: ignore[override]
        """The part that more data would remove, by name."""
        return {name: each.epistemic for name, each in self.heads.items()}

    def named(self, y: Any) -> Named:
        """Outcomes by name, from a dict, a data frame, or a matrix with their columns in order."""
        return self._draws[0].named(y)

    def log_prob(self, y: Any) -> Tensor:
        """Log predictive density of all outcomes of a row together, ``(batch,)``: log-mean-exp over the draws.

        Where it is not the sum over :attr:`heads`, outcomes are correlated by what is not known of the weights. It is
        by Monte Carlo also where each outcome alone has a closed form.
        """
        known = self.named(y)
        return self._log_mix(torch.cat([each.log_probs(known) for each in self._draws]))

    def draw(self, n: int = 1, *, generator: torch.Generator | None = None) -> Named:  # type: ignore[override]
        """Draw outcomes by name, ``(n, batch, ...)`` each; the n-th of all rows and names come from one draw."""
        check_count("n", n)
        check_generator(generator)
        chosen = torch.multinomial(self.log_weights.exp(), n, replacement=True, generator=generator).tolist()
        places = [(each, k) for each in self._draws for k in range(each.count)]
        found: dict[str, list[Tensor]] = {name: [] for name in self}
        for source, k in (places[place] for place in chosen):
            for name, each in source.prediction(k).items():
                found[name].append(each.shaped(self._shapes.get(name)).draw(1, generator=generator))
        return {name: torch.cat(each) for name, each in found.items()}

    def shaped(self, target_shape: Any) -> JointPrediction:
        if not isinstance(target_shape, dict):
            return self
        heads = {name: each.shaped(target_shape.get(name)) for name, each in self.heads.items()}
        made = JointPrediction(heads, self._draws, self.log_weights)
        made._shapes = target_shape
        return made

    @classmethod
    def joined(cls, parts: Sequence[JointPrediction], log_weights: Tensor) -> JointPrediction:
        heads = {
            name: type(first).joined([part.heads[name] for part in parts], log_weights)
            for name, first in parts[0].heads.items()
        }
        draws = [each for part in parts for each in part._draws]
        return cls(heads, draws, joined_log_weights(parts, log_weights))

    def __repr__(self) -> str:
        inside = "".join(f"\n  {name}: {each!r}," for name, each in self.heads.items())
        return f"JointPrediction(rows={len(self)},{inside}\n)"
