"""Loading what was saved: a posterior of any family, or a certificate."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor, nn

import knowable.decisions.distill
import knowable.inference.dropout
import knowable.inference.ensembles
import knowable.inference.exact
import knowable.inference.laplace
import knowable.inference.point
import knowable.inference.variational
import knowable.likelihoods
import knowable.priors  # noqa: F401  (these register what an artifact may name)
from knowable.core.posterior.saving import load_posterior
from knowable.core.storage.folder import kind_of
from knowable.decisions.certificate import Certificate
from knowable.decisions.certificate_saving import KIND as CERTIFICATE


def load(
    path: str | os.PathLike[str],
    net: nn.Module | None = None,
    *,
    classes: Iterable[type] = (),
    output: Callable[[Any], Tensor] | None = None,
) -> Any:
    """Load what ``posterior.save(path)`` or ``certificate.save(path)`` wrote. No code in the folder is ever run.

    Args:
        path: The folder.
        net: The network it was fitted with, if that was not made of plain ``torch.nn`` layers, or if frozen parameters
            were saved by reference. It is not changed.
        classes: Classes of your own likelihood and priors, if it was fitted with such.
        output: The model's ``output``, if that was a function; a name or a place is saved.

    Returns:
        The :class:`Posterior`, or the :class:`Certificate` with its posterior.

    Raises:
        DamagedArtifact: If the folder is missing files, truncated, altered, or of a newer format.
    """
    if kind_of(path) == CERTIFICATE:
        return Certificate.load(path, lambda posterior: load_posterior(posterior, net, classes, output))
    return load_posterior(path, net, classes, output)
