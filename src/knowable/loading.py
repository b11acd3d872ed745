"""Loading what was saved: a posterior of any family, a certificate, an estimator or a run."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

import knowable.decisions.distill
import knowable.inference.dropout
import knowable.inference.ensembles
import knowable.inference.exact
import knowable.inference.functional
import knowable.inference.laplace
import knowable.inference.point
import knowable.inference.variational
import knowable.likelihoods
import knowable.priors  # noqa: F401  (these register what an artifact may name)
from knowable.core.posterior.saving import load_posterior
from knowable.core.storage.files import Files
from knowable.core.storage.folder import kind_of
from knowable.core.storage.signing import signed_files
from knowable.decisions.certificate import Certificate
from knowable.decisions.certificate_saving import KIND as CERTIFICATE
from knowable.errors import KnowableError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

_MOST_SAID = 1000  # letters of an error
ESTIMATOR = "estimator.json"  # the file that makes a folder an estimator; a run has it too


def load(
    path: str | os.PathLike[str],
    net: nn.Module | None = None,
    *,
    classes: Iterable[type] = (),
    output: Callable[[Any], Tensor] | None = None,
    verify: str | os.PathLike[str] | Ed25519PublicKey | None = None,
) -> Any:
    """Load what was saved: a posterior, a certificate, an estimator or a run. No code in it is ever run.

    Args:
        path: The folder, or the file whose name ends in ``.knowable``.
        net: The network it was fitted with, if that was not made of plain ``torch.nn`` layers, or if frozen parameters
            were saved by reference. It is not changed.
        classes: Classes of your own likelihood and priors, if it was fitted with such.
        output: The model's ``output``, if that was a function; a name or a place is saved.
        verify: The public key (Ed25519, or its PEM file) of whoever must have signed it with ``knowable sign``.

    Returns:
        The :class:`Posterior`, the :class:`Certificate` with its posterior, or the estimator.

    Raises:
        DamagedArtifact: If it is missing files, truncated, altered, or of a newer format.
        NotSigned: If it must be signed and is not, or was altered since.
    """
    try:
        return _loaded(Files.at(path) if verify is None else signed_files(path, verify), net, classes, output)
    except KnowableError as error:
        if len(str(error)) > _MOST_SAID:  # a name or a value that fills pages
            raise type(error)(f"{str(error)[:_MOST_SAID]} ...") from None
        raise


def _loaded(
    files: Files, net: nn.Module | None, classes: Iterable[type], output: Callable[[Any], Tensor] | None
) -> Any:
    if files.has(ESTIMATOR):
        from knowable.tabular.classifier import BayesianClassifier  # which need scikit-learn
        from knowable.tabular.regressor import BayesianRegressor
        from knowable.tabular.saving import load_estimator

        return load_estimator([BayesianRegressor, BayesianClassifier], files, net)
    if kind_of(files) == CERTIFICATE:
        return Certificate.load(files, lambda posterior: load_posterior(posterior, net, classes, output))
    return load_posterior(files, net, classes, output)
