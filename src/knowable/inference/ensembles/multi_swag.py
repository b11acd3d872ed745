"""MultiSWAG: a mixture of SWAG posteriors (Wilson and Izmailov, 2020)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from knowable.core.checks import check_choice, check_count
from knowable.core.mixture import Mixture
from knowable.inference.ensembles.ensemble_of import EnsembleOf
from knowable.inference.ensembles.member_weights import WEIGHTS
from knowable.inference.ensembles.members import Ensemble
from knowable.inference.ensembles.swag import SWAG


@dataclass(frozen=True, repr=False)
class MultiSWAG(SWAG, Ensemble):
    r"""Several SWAG posteriors, each around a mode of its own.

    .. math:: q(\theta) = \frac1M \sum_m \mathcal{N}(\theta \mid \bar\theta_m, \Sigma_m)

    The same as ``EnsembleOf(SWAG(...), members)``: the members' modes are those of a deep ensemble, and each has the
    spread that SGD finds around it.

    Args:
        members: How many SWAG posteriors, M.
        epochs: This and the other fields are those of :class:`~knowable.inference.ensembles.swag.SWAG`.
        weights: See :class:`~knowable.inference.ensembles.ensemble_of.EnsembleOf`.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.MultiSWAG(members=2, epochs=100, snapshots=20).fit(model, (x, 2 * x))
        >>> len(posterior)
        2
    """

    weights: str = "equal"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_count("members", self.members)
        check_choice("weights", self.weights, tuple(each for each in WEIGHTS if each != "evidence"))

    def fit(self, model, data, *, validation=None, seed=0, progress=None, checkpoint=None, engine=None) -> Mixture:
        """Fit the members one after the other; see :meth:`knowable.core.method.Method.fit`."""
        one = SWAG(**{each.name: getattr(self, each.name) for each in fields(SWAG)})
        posterior = EnsembleOf(one, self.members, self.weights).fit(
            model, data, validation=validation, seed=seed, progress=progress, checkpoint=checkpoint, engine=engine
        )
        posterior.diagnostics = replace(posterior.diagnostics, method=repr(self))
        return posterior
