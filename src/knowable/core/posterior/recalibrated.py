"""A posterior whose predictions are recalibrated on held-out data."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.data import as_data
from knowable.core.model.model import Model
from knowable.core.model.prior import JointPrior
from knowable.core.network.params import Params, with_prefix, without_prefix
from knowable.core.posterior.posterior import Posterior
from knowable.core.posterior.saving import build_posterior, describe_posterior
from knowable.core.posterior.training_rows import TrainingRows, refuse_training_rows
from knowable.core.prediction.prediction import Prediction
from knowable.core.prediction.recalibration import FEWEST, FOR_CLASSES, FOR_NUMBERS, Recalibration, fitted
from knowable.core.support.checks import check_choice, check_count
from knowable.core.support.randomness import generator_for
from knowable.errors import CalibrationWarning, Unsupported

_MOST_VALUES = 50_000_000  # predicted numbers, of all draws, that a fit sees
_FACTS = ("method", "rows", "outcomes", "nll_before", "nll_after", "standard_error")


class Recalibrated(Posterior):
    """Another posterior, whose predictions go through a map that was fitted to held-out data.

    Its weights are those of the inner posterior: :meth:`sample`, :meth:`mean`, :meth:`log_prob`, ``diagnostics`` and
    :meth:`as_prior` are the inner one's. :meth:`predict` recalibrates what the inner one predicts.

    Args:
        model: The model.
        inner: The posterior that was recalibrated.
        recalibration: The fitted map.
        common: See :class:`~knowable.core.posterior.posterior.Posterior`.
    """

    family = "recalibrated"

    def __init__(self, model: Model, inner: Posterior, recalibration: Recalibration, **common: Any):
        taken = {
            "points": inner.points,
            "buffers": inner.buffers,
            "diagnostics": inner.diagnostics,
            "log_evidence": inner.log_evidence,
            "seed": inner.seed,
        }
        super().__init__(model, **{**taken, **common})
        self.inner, self.recalibration = inner, recalibration
        self.target_shape, self.training_rows = inner.target_shape, inner.training_rows

    @classmethod
    def of(cls, posterior: Posterior, held_out: Any, method: str, samples: int) -> Recalibrated:
        """Fit the map, see :meth:`Posterior.recalibrated`."""
        check_choice("method", method, ("auto", *FOR_CLASSES, *FOR_NUMBERS))
        check_count("samples", samples)
        model = posterior.model
        data = as_data(held_out, model, name="held_out")
        if data.weighted:
            raise Unsupported("held_out has row weights: held-out rows all count the same. Leave weights out.")
        refuse_training_rows(posterior, data)
        x, y = data.tensors[:2]
        most = max(1, _MOST_VALUES // (samples * max(1, model.probe(x)[0].numel())))
        if len(y) > most:
            chosen = torch.randperm(len(y), generator=generator_for(0, "held out"))[:most].to(y.device)
            x, y = x.index_select(0, chosen), y.index_select(0, chosen)
        found = fitted(posterior._predict(x, samples, posterior.seed, None), y, method)
        _warn(found)
        made, own = cls(model, posterior, found), TrainingRows.of(data)
        made.citation = posterior.citation
        made.training_rows = posterior.training_rows if own is None else own.joined(posterior.training_rows)
        return made

    # --- the inner posterior -----------------------------------------------------------------------------------------

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        return self.inner._sample_random(n, generator)

    def _mean_random(self) -> Params:
        return self.inner._mean_random()

    def _std_random(self) -> Params:
        return self.inner._std_random()

    def log_prob(self, params: Params) -> Tensor:
        """Log density of the weights, where the inner posterior has one."""
        return self.inner.log_prob(params)

    def as_prior(self) -> JointPrior:
        """The inner posterior as the prior of the next data set."""
        return self.inner.as_prior()

    def to_arviz(self, x: Any = None, y: Any = None, **settings: Any) -> Any:
        """Draws of the weights, see :meth:`Posterior.to_arviz`; outcomes only of the inner posterior."""
        if x is not None or y is not None:
            raise Unsupported(
                "to_arviz has the outcomes of each draw before recalibration: write posterior.inner.to_arviz(x, y)."
            )
        return self.inner.to_arviz(**settings)

    # --- prediction --------------------------------------------------------------------------------------------------

    def _predict(self, x: Tensor, samples: int, seed: int, memory: int | None) -> Prediction:
        return self.recalibration(self.inner._predict(x, samples, seed, memory))

    # --- on disk -----------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        return {
            **with_prefix("inner.", self.inner._tensors()),
            **with_prefix("buffer.", self.inner.buffers),
            **with_prefix("map.", self.recalibration.values),
        }

    def _settings(self) -> dict[str, Any]:
        found = self.recalibration
        facts = {name: getattr(found, name) for name in _FACTS}
        return {"about_inner": describe_posterior(self.inner), "recalibration": facts}

    @classmethod
    def _from_tensors(
        cls,
        model: Model,
        tensors: dict[str, Tensor],
        *,
        about_inner: dict[str, Any],
        recalibration: dict[str, Any],
        **common: Any,
    ) -> Recalibrated:
        own, buffers, values = (without_prefix(part, tensors) for part in ("inner.", "buffer.", "map."))
        inner = build_posterior(model, about_inner, own, points=common.get("points") or {}, buffers=buffers)
        found = Recalibration(values={name: value.cpu() for name, value in values.items()}, **recalibration)
        return cls(model, inner, found, **common)

    def __repr__(self) -> str:
        return f"Recalibrated({self.recalibration!r}; {self.inner!r})"


def _warn(found: Recalibration) -> None:
    change = found.nll_after - found.nll_before
    said = []
    if found.outcomes < FEWEST[found.method]:
        how = "whether" if found.method == "none" else f"how, by method={found.method!r},"
        said.append(
            f"held_out has {found.outcomes} outcomes: it takes {FEWEST[found.method]} or more to say {how} predictions "
            f"should change."
        )
    if change > 2 * found.standard_error:
        said.append(
            f"Recalibration made predictions of held-out rows worse: negative log likelihood {found.nll_before:.4g} "
            f"before and {found.nll_after:.4g} after, by cross-validation. Leave it out, or pass more rows."
        )
    for each in said:
        warnings.warn(each, CalibrationWarning, stacklevel=4)
