"""An ensemble of any method's posteriors."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from knowable.core.checkpoint import Checkpoint, as_checkpoint, part_of
from knowable.core.checks import check_choice, check_count, check_type
from knowable.core.data import Data
from knowable.core.deadline import share_of_time
from knowable.core.engine import as_engine
from knowable.core.fresh_start import fresh_start
from knowable.core.method import Method, admit
from knowable.core.mixture import Mixture
from knowable.core.model import Model
from knowable.core.posterior import Posterior
from knowable.core.randomness import derive_seed, own_randomness
from knowable.core.types import Params
from knowable.errors import Interrupted, InvalidArgument
from knowable.inference.ensembles.diversity import with_diversity
from knowable.inference.ensembles.member_weights import (
    WEIGHTS,
    evidence_log_weights,
    held_out_log_densities,
    mixture_evidence,
    stacking_log_weights,
)
from knowable.inference.ensembles.members import joint_diagnostics
from knowable.inference.ensembles.swag import SWAG

_DEFAULT = SWAG()


@dataclass(frozen=True, repr=False)
class EnsembleOf(Method):
    r"""Several posteriors of one method, each fitted from its own start, as one mixture.

    .. math:: q(\theta) = \sum_k w_k\, q_k(\theta)

    What a single approximation misses, other modes, the ensemble visits; what an ensemble of points misses, the spread
    within a mode, its members have (Wilson and Izmailov, 2020). A mixture of one is the method itself. Where the model
    has point estimates, those of the first member serve all.

    Args:
        method: Any method.
        members: How often it is fitted.
        weights: ``"equal"``; ``"evidence"``, proportional to each member's evidence or its bound, so that the best mode
            takes nearly all; or ``"validation"``, so that the mixture is best on the held-out rows of the fit
            (stacking; Yao et al., 2018).
        start: ``"fresh"``: all members but the first begin at new initial weights. ``"network"``: all begin at the
            network's own, and only their seeds differ; for networks that are already trained.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.EnsembleOf(kn.MeanFieldVI(epochs=100), members=3).fit(model, (x, 2 * x))
        >>> [type(member).__name__ for member in posterior.members]
        ['DiagonalNormal', 'DiagonalNormal', 'DiagonalNormal']
    """

    method: Method = _DEFAULT
    members: int = 5
    weights: str = "equal"
    start: str = "fresh"

    def __post_init__(self) -> None:
        check_type("method", self.method, Method, "a method such as MAP()")
        check_count("members", self.members)
        check_choice("weights", self.weights, WEIGHTS)
        check_choice("start", self.start, ("fresh", "network"))

    def fit(self, model, data, *, validation=None, seed=0, progress=None, checkpoint=None, engine=None) -> Mixture:
        """Fit the members one after the other; see :meth:`knowable.core.method.Method.fit`."""
        rows, held_out, seed = admit(model, data, validation, seed, weighted=True)
        if self.weights == "validation" and held_out is None:
            raise InvalidArgument("weights='validation' needs held-out rows: pass validation=(x, y) to fit.")
        fits = self._fits(model, data, validation, seed, progress, as_checkpoint(checkpoint), as_engine(engine))
        points = _shared_points(model, fits)
        plain = Mixture(model, fits, points=points)
        log_weights = self._log_weights(plain, held_out)
        posterior = Mixture(
            model, plain.members, log_weights, points=points, seed=seed,
            log_evidence=mixture_evidence(plain.members, log_weights),
            diagnostics=joint_diagnostics(self, fits, self.members),
        )  # fmt: skip
        with own_randomness(derive_seed(seed, "first rows")):  # a loader may shuffle
            return with_diversity(posterior, next(iter(held_out or rows))[0])

    def _fits(
        self, model: Model, data: Any, validation: Any, seed: int, progress: bool | None, saver: Checkpoint | None,
        engine: Any,
    ) -> list[Posterior]:  # fmt: skip
        """The members that were fitted; an interrupt leaves those that are whole, or the first as it is."""
        fits: list[Posterior] = []
        given = model
        for k in range(self.members):
            start = given if k == 0 or self.start == "network" else given.starting_at(*fresh_start(given, seed, k))
            try:
                with share_of_time(1 / (self.members - k)):
                    fit = self.method.fit(
                        start, data, validation=validation, seed=seed if k == 0 else derive_seed(seed, "member", k),
                        progress=progress, checkpoint=part_of(saver, f"member {k}"), engine=engine,
                    )  # fmt: skip
            except KeyboardInterrupt:  # this member had nothing to return yet
                if not fits:
                    raise
                warnings.warn(f"The fit was stopped from the keyboard at member {k}.", Interrupted, stacklevel=3)
                break
            if not fit.diagnostics.interrupted or not fits:
                fits.append(fit)
            if fit.diagnostics.interrupted:
                break
            if k == 0:
                given = model.given(
                    _shared_points(model, fits, hyper=False), fit.buffers if model.point_names else None
                )
        return fits

    def _log_weights(self, mixture: Mixture, held_out: Data | None) -> Tensor:
        members = mixture.members
        if self.weights == "equal" or len(members) == 1:
            return torch.zeros(len(members), dtype=torch.float64).log_softmax(0)
        if self.weights == "evidence":
            return evidence_log_weights(members)
        assert held_out is not None
        return stacking_log_weights(held_out_log_densities(members, held_out))


def _shared_points(model: Model, fits: list[Posterior], *, hyper: bool = True) -> Params:
    """Point estimates that all members share: the first one's, and the mean of what the prior learned."""
    wanted = [name for name in model.point_names if name in fits[0].points]
    points = {name: fits[0].points[name] for name in wanted if name not in model.hyper_names}
    if hyper:
        learned = [name for name in wanted if name in model.hyper_names]
        points |= {name: torch.stack([fit.points[name] for fit in fits]).mean(0) for name in learned}
    return points
