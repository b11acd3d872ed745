"""The average over models: posteriors of different models, weighed by how probable each model is given the data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from knowable.core.model.data import as_input
from knowable.core.network.params import with_prefix, without_prefix
from knowable.core.posterior.diagnostics import Diagnostics, LogEvidence
from knowable.core.posterior.posterior import Posterior
from knowable.core.posterior.saving import build_whole, describe_whole, own_classes
from knowable.core.posterior.weightless import Weightless
from knowable.core.prediction.prediction import Prediction
from knowable.core.support.checks import check_count
from knowable.core.support.randomness import derive_seed
from knowable.errors import InvalidArgument, Unsupported

_NEGLIGIBLE = 1e-12  # probability of a model that predictions leave out


class ModelAverage(Weightless, Posterior):
    r"""Several models with their probabilities: :math:`p(y \mid x, D) = \sum_m p(M_m \mid D)\, p(y \mid x, D, M_m)`.

    The variance of a prediction is that of the mixture: the models' variances on average, and how much their means
    differ, which counts as epistemic. The models have different weights, so :meth:`sample`, :meth:`mean`, :meth:`std`
    and :meth:`log_prob`, which are about weights, raise ``Unsupported``: ask the ``members``.

    Args:
        members: Posteriors of the models, by name, fitted to the same data.
        probabilities: Of each model; normalised here.
        common: See :class:`~knowable.core.posterior.posterior.Posterior`.

    Attributes:
        members: The posteriors by name.
        probabilities: p(M | D) by name.
    """

    family = "model_average"

    def __init__(self, members: Mapping[str, Posterior], probabilities: Sequence[float], **common: Any):
        if not members or len(members) != len(probabilities):
            raise InvalidArgument(
                f"members must be posteriors by name with one probability each, got {len(members)} posteriors and "
                f"{len(probabilities)} probabilities."
            )
        total = math.fsum(probabilities)
        self.members = dict(members)
        self.probabilities = {name: p / total for name, p in zip(members, probabilities, strict=True)}
        best = self.members[max(self.probabilities, key=self.probabilities.__getitem__)]
        super().__init__(best.model, **{**common, "points": {}, "buffers": best.buffers})
        self.target_shape, self.training_rows = best.target_shape, best.training_rows

    # --- prediction --------------------------------------------------------------------------------------------------

    def _predict(self, x: Tensor, samples: int, seed: int, memory: int | None) -> Prediction:
        return self._joined(x, samples, seed, memory, jointly=False)

    def predict_jointly(self, x: Any, samples: int = 64, generator: torch.Generator | None = None) -> Prediction:
        """A prediction whose draws are functions, see :meth:`Posterior.predict_jointly`; each is of one model."""
        check_count("samples", samples)
        seed = self._seed_from(generator)
        with torch.no_grad():
            return self._joined(x, samples, seed, None, jointly=True).shaped(self.target_shape)

    def _joined(self, x: Any, samples: int, seed: int, memory: int | None, *, jointly: bool) -> Prediction:
        """The mixture of the models' predictions. Each model makes a share of the draws, which keep its probability."""
        shares, parts = self._shares(samples), []
        for number, name in enumerate(self.members):
            if name not in shares:
                continue
            member, count, own = self.members[name], shares[name], derive_seed(seed, "model", number)
            if jointly:
                made = member.predict_jointly(x, count, torch.Generator().manual_seed(own % 2**62))
            else:
                budget = None if memory is None else max(1, memory * count // samples)
                made = member._predict(as_input(x, member.model), count, own, budget)
            if parts or self.target_shape is not None:  # networks may differ in whether one output is a dimension
                made = made.shaped(self.target_shape if not parts else tuple(parts[0].samples.shape[2:]))
            parts.append(made)
        weights = torch.tensor(
            [self.probabilities[name] for name in self.members if name in shares], dtype=torch.float64
        )
        return type(parts[0]).joined(parts, weights.log().log_softmax(0).to(parts[0].samples))

    def _shares(self, samples: int) -> dict[str, int]:
        """Draws of each model: about in proportion to its probability, at least one where there are enough for all."""
        ranked = sorted(self.probabilities, key=self.probabilities.__getitem__, reverse=True)
        kept = [name for name in ranked if self.probabilities[name] > _NEGLIGIBLE][:samples]
        spare = samples - len(kept)
        counts = {name: 1 + math.floor(spare * self.probabilities[name]) for name in kept}
        counts[kept[0]] += samples - sum(counts.values())
        return counts

    # --- what is about weights ---------------------------------------------------------------------------------------

    def _no_weights(self) -> str:
        return (
            f"A model average has no weights of its own: its {len(self.members)} models have different ones. Ask one "
            f"of them, such as average.members[{next(iter(self.members))!r}], or predict(x)."
        )

    # --- on disk -----------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for number, member in enumerate(self.members.values()):
            found |= with_prefix(f"{number}.", describe_whole(member)[1])
        return found

    def _settings(self) -> dict[str, Any]:
        about = {}
        for name, member in self.members.items():
            about[name] = describe_whole(member)[0]
            lacks = "a network not made of plain torch.nn layers" * (about[name]["network"]["structure"] is None)
            lacks = lacks or "a likelihood or prior of your own" * bool(own_classes(member.model))
            lacks = lacks or "an output that is a function" * callable(member.model.network.output)
            if lacks:
                raise Unsupported(
                    f"This model average cannot be saved as one: model {name!r} has {lacks}, and an artifact contains "
                    f"no code. Save its members one by one: average.members[{name!r}].save(path)."
                )
        return {"about_members": about, "probabilities": list(self.probabilities.values())}

    @classmethod
    def _from_tensors(
        cls, model: Any, tensors: dict[str, Tensor], *, about_members: dict[str, Any], probabilities: list[float],
        **common: Any,
    ) -> ModelAverage:  # fmt: skip
        members = {
            name: build_whole(about, without_prefix(f"{number}.", tensors))
            for number, (name, about) in enumerate(about_members.items())
        }
        loaded = cls(members, probabilities, **common)
        loaded.probabilities = dict(zip(members, probabilities, strict=True))  # to the bit
        return loaded

    def __repr__(self) -> str:
        ranked = sorted(self.probabilities.items(), key=lambda each: -each[1])
        shown = ", ".join(f"{name}: {p:.3g}" for name, p in ranked[:5]) + ", ..." * (len(ranked) > 5)
        return f"ModelAverage({len(ranked)} models; {shown})"


def average_of(
    members: Mapping[str, Posterior], log_prior: Mapping[str, float], *, seed: int, method: str
) -> ModelAverage:
    r"""The average over models whose posteriors know their evidence.

    .. math:: p(M_m \mid D) = \frac{p(M_m)\, p(D \mid M_m)}{\sum_j p(M_j)\, p(D \mid M_j)}

    Its own evidence is the sum below the line: exact, a bound or an estimate, as the worst of the members'.
    """
    known = {name: member.log_evidence for name, member in members.items()}
    each = [value for value in known.values() if value is not None]
    assert len(each) == len(known)
    joint = torch.tensor([float(known[name] or 0.0) + log_prior[name] for name in members], dtype=torch.float64)
    probabilities, value = joint.softmax(0).tolist(), joint.logsumexp(0).item()
    error = math.sqrt(sum((p * e.standard_error) ** 2 for p, e in zip(probabilities, each, strict=True)))
    kinds = {e.kind for e in each}
    kind = "estimate" if "estimate" in kinds else "bound" if "bound" in kinds else "exact"
    return ModelAverage(
        members, probabilities, seed=seed, log_evidence=LogEvidence(value, kind, error),
        diagnostics=Diagnostics(method, {"log_evidence": value}, converged=None, message="averaged over models"),
    )  # fmt: skip
