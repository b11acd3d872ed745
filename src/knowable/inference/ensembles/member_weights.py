"""How much each member of a mixture counts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from knowable.core.data import Data
from knowable.core.diagnostics import LogEvidence
from knowable.core.posterior import Posterior
from knowable.errors import Unsupported

WEIGHTS = ("equal", "evidence", "validation")
_ITERATIONS = 10_000
_SETTLED = 1e-10  # change of the mean log density in one iteration


def evidence_log_weights(members: Sequence[Posterior]) -> Tensor:
    r"""Log weights proportional to the members' evidence, :math:`w_k \propto p(D)_k`."""
    lacking = [type(member).__name__ for member in members if member.log_evidence is None]
    if lacking:
        raise Unsupported(
            f"weights='evidence' needs members that know their evidence; {lacking[0]} does not. Use 'equal', "
            f"'validation', or a method such as MeanFieldVI, which has a bound."
        )
    return torch.tensor([float(member.log_evidence or 0.0) for member in members], dtype=torch.float64).log_softmax(0)


def stacking_log_weights(log_densities: Tensor) -> Tensor:
    r"""Log weights under which the mixture is best on held-out rows (stacking; Yao et al., 2018).

    .. math:: \max_w \frac1n \sum_i \log \sum_k w_k\, p_k(y_i \mid x_i), \qquad w_k \ge 0, \; \sum_k w_k = 1

    The problem is concave; it is solved by the EM iteration for the weights of a mixture.

    Args:
        log_densities: ``log p_k(y_i | x_i)``, ``(K, n)``.
    """
    each = log_densities.double()
    log_weights = torch.zeros(len(each), dtype=torch.float64).log_softmax(0)
    before = -torch.inf
    for _ in range(_ITERATIONS):
        joint = each + log_weights.unsqueeze(1)
        mixed = joint.logsumexp(0)
        value = mixed.mean().item()
        if value - before < _SETTLED:
            break
        before = value
        log_weights = (joint - mixed).logsumexp(1).log_softmax(0)  # each member's share in every row, averaged
    return log_weights


def held_out_log_densities(members: Sequence[Posterior], rows: Data) -> Tensor:
    """Log predictive densities of held-out rows under each member, ``(K, n)``."""
    each = [torch.cat([member.predict(x).log_prob(y) for x, y in rows]) for member in members]
    return torch.stack(each).cpu()


def mixture_evidence(members: Sequence[Posterior], log_weights: Tensor) -> LogEvidence | None:
    """The weighted mean of the members' log evidence, where all have one.

    Where these are bounds or exact it is a bound: a mixture is never further from the posterior than its members are on
    average.
    """
    known = [member.log_evidence for member in members]
    values = [each for each in known if each is not None]
    if len(values) < len(known):
        return None
    weights = log_weights.double().exp().tolist()
    kind = "estimate" if any(each.kind == "estimate" for each in values) else "bound"
    if len(values) == 1:
        kind = values[0].kind
    error = sum((w * each.standard_error) ** 2 for w, each in zip(weights, values, strict=True)) ** 0.5
    return LogEvidence(sum(w * float(each) for w, each in zip(weights, values, strict=True)), kind, error)
