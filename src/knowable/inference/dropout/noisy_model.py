"""The model that dropout by noise is the inference of: log-uniform priors on the noisy weights, points elsewhere."""

from __future__ import annotations

from knowable.core.model import Model
from knowable.core.params import select_names
from knowable.errors import InvalidArgument, Unsupported
from knowable.priors.log_uniform import LogUniform


def noisy_names(model: Model, where: str | tuple[str, ...] | None) -> list[str]:
    """Which weights are to be noisy: those that ``where`` names among the random ones, or all of two dimensions."""
    start = model.params()
    weights = [name for name in model.network_params(start) if name in model.random_names]
    if where is not None:
        chosen = select_names("where", where, weights, model.net)
        return [name for name in weights if name in chosen]
    found = [name for name in weights if start[name].dim() >= 2]
    if not found:
        raise InvalidArgument(
            "model has no random weight matrix or kernel to put noise on. Name the weights in where=, or make them "
            "random."
        )
    return found


def with_log_uniform(model: Model, names: list[str]) -> Model:
    """The same model, log-uniform in the ``names``, all else that is not frozen a point under its own prior."""
    try:
        target = model.believing({name: LogUniform() for name in names}, random=names)
    except Unsupported:
        raise Unsupported(
            "model has a posterior as its prior, which dropout by noise would replace by the log-uniform prior. Give "
            "the model an ordinary prior, and the posterior to the method as start=."
        ) from None
    if target.hyper_names:
        raise Unsupported(
            f"model has parameters that would be point estimates under a prior whose scale is learned "
            f"({target.hyper_names[0]}): the joint density grows without bound as both shrink together. Give biases "
            f"and other such parameters a prior with a fixed scale."
        )
    return target


def prior_notes(model: Model, names: list[str]) -> tuple[str, ...]:
    """Which priors of the model were replaced."""
    replaced = [name for name in names if not isinstance(model.prior.prior_of(name), LogUniform)]
    if not replaced:
        return ()
    which = f"{', '.join(replaced[:5])}{', ...' if len(replaced) > 5 else ''}"
    return (f"The prior of {which} is log-uniform here, whatever the model says of them.",)
