"""Draws as an ArviZ ``DataTree``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knowable.core.model.checking import checked_pair
from knowable.core.model.data import as_input
from knowable.core.network.params import Params, expand_params, index_params
from knowable.core.prediction.joint import JointPrediction
from knowable.core.prediction.prediction import RegressionPrediction
from knowable.core.support.randomness import generator_for
from knowable.errors import InvalidArgument, MissingExtra

if TYPE_CHECKING:
    from knowable.core.posterior.posterior import Posterior

_STATISTICS = {"acceptance": "acceptance_rate", "diverging": "diverging", "energy": "energy", "steps": "n_steps"}
_OF_ROWS = {"y": ["row"], "f": ["row"]}  # variables with an entry for each row of the data


def exported(posterior: Posterior, x: Any, y: Any, samples: int | None, seed: int, memory: int | None) -> Any:
    """What :meth:`Posterior.to_arviz` returns."""
    if x is None and y is not None:
        raise InvalidArgument("y needs the inputs x of the same rows: to_arviz(x, y).")
    model, points = posterior.model, posterior.points
    if y is not None:
        x, y = checked_pair(x, y, model)
    elif x is not None:
        x = as_input(x, model)
    source, samples, chains, info = posterior._draws_to_export(samples)
    with torch.no_grad():
        stack, outputs, log_weights = source._outputs_of_draws(x, samples, seed, memory)
        if not torch.allclose(log_weights, log_weights[0]):
            generator = generator_for(seed, "resample", device=model.device)
            chosen = torch.multinomial(log_weights.exp(), samples, replacement=True, generator=generator)
            stack, outputs = index_params(stack, chosen), None if outputs is None else outputs[chosen]
        groups = {"posterior": {name: stack[name] for name in model.random_names if name not in points}}
        if outputs is not None:
            groups["posterior"]["f"] = outputs
            groups |= _scored(posterior, stack, outputs, y, generator_for(seed, "outcomes", device=model.device))
    by_chain = {
        group: {name: value.unflatten(0, (chains, -1)) for name, value in each.items()}
        for group, each in groups.items()
    }
    if y is not None:
        by_chain["observed_data"] = _observed(posterior, y, outputs)
    return data_tree(by_chain, info)


def _scored(
    posterior: Posterior, stack: Params, outputs: Tensor, y: Tensor | None, generator: torch.Generator
) -> dict[str, Params]:
    """An outcome of every draw, and the log likelihood of every draw and row where there are targets."""
    groups = {"posterior_predictive": _outcomes(posterior, stack, outputs, generator)}
    if y is not None:
        likelihood, own = posterior.model.likelihood, posterior.model.likelihood_params
        scores = [likelihood.log_prob(each, y, own(index_params(stack, k))) for k, each in enumerate(outputs)]
        groups["log_likelihood"] = {"y": torch.stack(scores)}
    return groups


def _observed(posterior: Posterior, y: Tensor, outputs: Tensor | None) -> Params:
    """Targets by name, in the shape in which they were given."""
    shape = posterior.target_shape
    if not isinstance(shape, dict):
        return {"y": y.reshape(len(y), *(y.shape[1:] if shape is None else shape))}
    assert outputs is not None  # where there are targets there are inputs
    made = posterior.model.likelihood.predict(
        outputs[:1], posterior.model.likelihood_params(posterior.sample(1)), outputs.new_zeros(1)
    )
    assert isinstance(made, JointPrediction)
    return {name: each.reshape(len(y), *shape[name]) for name, each in made.named(y).items()}


def _outcomes(posterior: Posterior, stack: Params, outputs: Tensor, generator: torch.Generator) -> Params:
    """One outcome of each draw, ``(K, rows, ...)``, called y or by the names that there are."""
    model, shape = posterior.model, posterior.target_shape
    equal = torch.zeros(len(outputs), dtype=outputs.dtype, device=outputs.device).log_softmax(0)
    made = model.likelihood.predict(outputs, model.likelihood_params(stack), equal).shaped(shape)
    if isinstance(made, RegressionPrediction):
        draws = torch.arange(len(outputs), device=outputs.device)
        index = draws.view(-1, *(1,) * (made.samples.dim() - 1)).expand_as(made.samples)
        return {"y": made.components.sample(index, generator=generator)}
    drawn = []
    for k, output in enumerate(outputs):
        own = model.likelihood_params(index_params(stack, k))
        single = model.likelihood.predict(output.unsqueeze(0), expand_params(own, 1), torch.zeros_like(equal[:1]))
        drawn.append(single.shaped(shape).draw(1, generator=generator))
    if isinstance(made, JointPrediction):
        return {name: torch.cat([each[name] for each in drawn]) for name in made}
    return {"y": torch.cat(drawn)}


def data_tree(groups: Mapping[str, Mapping[str, Tensor]], info: Mapping[str, Tensor]) -> Any:
    """An ArviZ ``DataTree``.

    Args:
        groups: Variables of each group, ``(chains, draws, *shape)``; those of ``observed_data`` without draws.
        info: What a sampler said of each draw, ``(chains, draws)``: the group ``sample_stats``.
    """
    try:
        from arviz_base import from_dict
    except ImportError:
        raise MissingExtra("to_arviz needs ArviZ: pip install 'knowable[diag]'.") from None
    arrays = {group: {name: _array(value) for name, value in each.items()} for group, each in groups.items()}
    statistics = {_STATISTICS.get(name, name): _array(value) for name, value in info.items()}
    if "diverging" in statistics:
        statistics["diverging"] = statistics["diverging"].astype(bool)
    if statistics:
        arrays["sample_stats"] = statistics
    return from_dict(arrays, dims=_OF_ROWS if "posterior_predictive" in groups else None)


def _array(value: Tensor) -> Any:
    return value.detach().cpu().to(torch.float32 if value.dtype == torch.bfloat16 else value.dtype).numpy()
