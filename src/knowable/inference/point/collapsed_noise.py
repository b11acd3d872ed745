r"""Whether a learned noise has collapsed: whether it is far smaller than the errors on new rows.

Weights and noise together are most probable where a network with enough weights goes through all rows and the noise is
next to nothing. A fit converges there as it does anywhere, and its predictions of new rows are far too sure. A fit that
may have done so is fitted once more, to four fifths of the rows; the others show how large its errors are.

That costs a second fit, so it is asked first whether there is reason to. The network at its initial weights, linearised
in them, is a regression with the kernel :math:`K = J \Lambda^{-1} J^\top`, whose errors on rows that are left out are

.. math:: e_i = \frac{[(K + \sigma^2)^{-1} y]_i}{[(K + \sigma^2)^{-1}]_{ii}}

At the best of some :math:`\sigma` they are about those of the network itself, or larger. With fewer weights than half
of the targets there is nothing to ask.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from knowable.core.method import FitJob
from knowable.core.model.data import Data
from knowable.core.model.likelihood import LIKELIHOOD_PREFIX
from knowable.core.model.model import Model
from knowable.core.model.prior import fixed_normal
from knowable.core.network.jacobian import BatchJacobian, unit_directions
from knowable.core.network.layers import NetworkLayers
from knowable.core.network.params import Buffers, Layout, Params
from knowable.core.posterior.posterior import Posterior
from knowable.core.support.randomness import generator_for
from knowable.core.support.time_limit import Deadline
from knowable.errors import ConvergenceWarning, KnowableError

_MOST_TARGETS = 1_100  # whose kernel is decomposed
_COLUMNS = 3  # weights that are looked at, at most, for each target
_SMALL = 0.4  # of the targets' spread: a noise that is larger is not looked at
_COLLAPSED = 3.0  # times the noise: errors of this size cost 2.9 nats a target
_TO_STANDARD_DEVIATION = 1.4826  # from the median of absolute values of a normal
_HELD_OUT = 0.2
_FEWEST_TARGETS = 10
_NUMBERS_AT_ONCE = 2**24  # of a Jacobian


def noise_checked(
    posterior: Any, job: FitJob, refit: Callable[[FitJob], Posterior] | None, params: Params | None = None, *,
    start: Params | None = None, use_prior: bool = True,
) -> Any:  # fmt: skip
    """The posterior; with a warning and a note in its diagnostics where its noise has collapsed.

    Args:
        posterior: What was fitted.
        job: Its fit.
        refit: Fits one network, as the posterior's was, to other rows. None where the weights came from elsewhere: then
            the warning is about what may be.
        params: Of one member of an ensemble; None is the posterior's mean.
        start: Weights before training; None is the model's own start values.
        use_prior: Whether the fit was one with the prior.
    """
    if posterior.diagnostics.interrupted or job.validation is not None or Deadline.within_limit() is not None:
        return posterior
    fitted: Params = posterior.mean() if params is None else params
    rows, times = _in_doubt(job, fitted, posterior.buffers, job.model.params() if start is None else start, use_prior)
    if rows is None:
        return posterior
    said = "may have collapsed: errors on new rows may be"
    if refit is not None:
        times = _errors_of_refit(job, rows, refit)
        said = "has collapsed: of a network fitted to four fifths of the rows, errors on the others are"
    if times > _COLLAPSED:
        said = (
            f"The learned noise {said} {float(f'{times:.2g}'):g} times as large. Weights and noise together are most "
            f"probable where a network goes through all rows, and predictions of new ones are far too sure. Pass "
            f"validation=(x, y), rows that were not trained on, fix the noise (kn.Gaussian(noise=...)), or use a "
            f"method that integrates over the weights: Laplace(), MeanFieldVI(), NUTS()."
        )
        warnings.warn(said, ConvergenceWarning, stacklevel=5)
        found = posterior.diagnostics
        posterior.diagnostics = replace(found, notes=(*found.notes, said))
    return posterior


def _errors_of_refit(job: FitJob, rows: Data, refit: Callable[[FitJob], Posterior]) -> float:
    """The size of errors on rows that were left out, in units of the noise learned there; 0 if unknown."""
    order = torch.randperm(rows.size, generator=generator_for(job.seed, "left out"))
    order = order.to(rows.tensors[1].device)
    held, kept = order.tensor_split([round(_HELD_OUT * rows.size)])
    some = [tuple(each.index_select(0, chosen) for each in rows.tensors) for chosen in (held, kept)]
    part = replace(rows, source=some[1][:2], size=len(kept), weights=some[1][2] if len(some[1]) > 2 else None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            again = refit(replace(job, rows=part, checkpoint=None, progress=False))
        except KnowableError:  # too few rows for this network
            return 0.0
    if again.diagnostics.interrupted:
        return 0.0
    errors, noise = _errors_and_noise(job.model, again.mean(), some[0][0], some[0][1], again.buffers)
    return _size((errors / noise).flatten())


def _errors_and_noise(model: Model, params: Params, x: Tensor, y: Tensor, buffers: Buffers) -> tuple[Tensor, Tensor]:
    """Targets less outputs, NaN where there is no target, and the noise, in double precision and the same shape."""
    with torch.no_grad():
        output = model.forward(params, x, buffers=buffers)
    noise = params[f"{LIKELIHOOD_PREFIX}{model.likelihood.noise_name}"].exp()
    return (model.align(y, output).to(output) - output).double(), noise.expand_as(output).double()


def _size(errors: Tensor) -> float:
    return _TO_STANDARD_DEVIATION * errors.abs().nanmedian().item()


# --- whether there is reason to ask ----------------------------------------------------------------------------------


@torch.no_grad()
def _in_doubt(
    job: FitJob, params: Params, buffers: Buffers, start: Params, use_prior: bool
) -> tuple[Data | None, float]:
    """All rows where the noise of ``params`` may have collapsed, and how many times as large errors may be."""
    model, weights = job.model, job.model.network_params(start)
    layout, learned = Layout.of(weights), f"{LIKELIHOOD_PREFIX}{model.likelihood.noise_name}" in params
    most = min(_MOST_TARGETS, 2 * layout.size)
    rows = job.rows.held if learned and job.rows.size <= most else None
    if rows is None:
        return None, 0.0
    x, y = rows.tensors[:2]
    errors, noise = (each.flatten() for each in _errors_and_noise(model, params, x, y, buffers))
    known = ~torch.isnan(errors)
    targets, noise = (errors + model.forward(params, x, buffers=buffers).flatten())[known], noise[known]
    spread = targets.std().item()
    if not _FEWEST_TARGETS <= len(targets) <= most or noise.median() > _SMALL * spread:
        return None, 0.0
    chosen = torch.randperm(layout.size, generator=generator_for(job.seed, "weights"))[: _COLUMNS * len(targets)]
    scales = _scales(model, weights, use_prior)
    try:
        jacobian = _jacobian(model, weights, layout, chosen.to(x.device), x)[known].double()
    except (KnowableError, RuntimeError, NotImplementedError):  # a network without one
        return None, 0.0
    jacobian = jacobian * layout.flatten(scales)[chosen.to(x.device)]
    values, vectors = torch.linalg.eigh(jacobian @ jacobian.T)
    values, z, squares = values.clamp_min(0.0), vectors.T @ (targets - targets.mean()), vectors.square()
    found = []
    for sigma in (noise.median().item(), *(share * spread for share in (0.03, 0.1, 0.3, 1.0, 3.0))):
        inverse = 1.0 / (values + sigma**2)
        found.append(_size((vectors @ (inverse * z)) / (squares @ inverse) / noise))
    return (rows, min(found)) if min(found) > _COLLAPSED else (None, 0.0)


def _jacobian(model: Model, weights: Params, layout: Layout, chosen: Tensor, x: Tensor) -> Tensor:
    """Derivatives of all outputs of all rows in the chosen weights, ``(rows x outputs, chosen)``."""
    layers = NetworkLayers.of(model.network, layout.names, weights, x[:8], model.buffers())
    found = []
    for some in x.split(max(1, _NUMBERS_AT_ONCE // max(1, layout.size))):
        batch = BatchJacobian(model.network, layers, weights, some, model.buffers())
        each = [batch.flat(one.unsqueeze(0), layout)[0][:, chosen] for one in unit_directions(batch.output)]
        found.append(torch.stack(each, 1).flatten(0, 1))
    return torch.cat(found)


def _scales(model: Model, weights: Params, use_prior: bool) -> Params:
    """The scale of every weight: of its prior where that is normal, otherwise the size of its tensor."""
    found = {}
    for name, value in weights.items():
        moments = fixed_normal(model.prior.prior_of(name)) if use_prior else None
        precision = torch.as_tensor(0.0 if moments is None else moments[1], dtype=torch.float64, device=value.device)
        size = value.double().square().mean().sqrt()
        found[name] = torch.where(precision > 0, precision.rsqrt(), size).expand(value.shape)
    return found
