"""Loading a saved posterior of any family."""

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
from knowable.core.posterior.posterior import Posterior
from knowable.core.posterior.saving import load_posterior


def load(
    path: str | os.PathLike[str],
    net: nn.Module | None = None,
    *,
    classes: Iterable[type] = (),
    output: Callable[[Any], Tensor] | None = None,
) -> Posterior:
    """Load a posterior saved by ``posterior.save(path)``. No code in the folder is ever run.

    Args:
        path: The folder.
        net: The network it was fitted with, if that was not made of plain ``torch.nn`` layers, or if frozen parameters
            were saved by reference. It is not changed.
        classes: Classes of your own likelihood and priors, if it was fitted with such.
        output: The model's ``output``, if that was a function; a name or a place is saved.

    Raises:
        DamagedArtifact: If the folder is missing files, truncated, altered, or of a newer format.
    """
    return load_posterior(path, net, classes, output)
