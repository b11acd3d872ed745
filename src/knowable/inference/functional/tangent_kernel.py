r"""The neural tangent kernel of a network as it is: :math:`J J^\top` at its weights (Jacot et al., 2018)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from knowable.core.model.data import as_input
from knowable.core.model.model import Model
from knowable.core.network.inputs import as_rows, check_inputs
from knowable.core.network.network import Network
from knowable.core.network.params import Buffers, Params
from knowable.errors import InvalidType, Unsupported

_NUMBERS_AT_ONCE = 2**25  # of a Jacobian


def empirical_ntk(net: nn.Module | Model, x: Any, other: Any = None, *, params: Params | None = None) -> Tensor:
    r"""The neural tangent kernel of any network at given weights, in evaluation mode.

    .. math:: \Theta(x, x') = \sum_j s_j^2\, \frac{\partial f(x)}{\partial \theta_j}\,
        \frac{\partial f(x')}{\partial \theta_j}^\top

    Of a network, over all its parameters that require a gradient, with s = 1. Of a model, over its random parameters,
    with the scales s of its prior: that is the covariance of its linearised functions under the prior, and approaches
    ``infinite_width_kernel(model, x, kind="ntk")`` as layers grow, at weights drawn from the prior.

    Args:
        net: A network, or a model.
        x: Inputs, ``(n, ...)``.
        other: Further inputs ``(m, ...)``; None is ``x`` again.
        params: Values of parameters; those not named are the network's own, or the model's start values.

    Returns:
        ``(n, m, outputs, outputs)``.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> kn.empirical_ntk(torch.nn.Linear(2, 1), torch.tensor([[1.0, 2.0]])).squeeze()  # 1² + 2² + 1
        tensor(6.)
    """
    if isinstance(net, Model):
        start = net.params()
        names = [name for name in net.random_names if not name.startswith("likelihood.")]
        network, scales, buffers = net.network, _prior_scales(net, names, start), net.buffers()
        x, other = as_input(x, net), None if other is None else as_input(other, net, name="other")
        values = {**net.network_params(start), **net.network_params(params or {})}
    elif isinstance(net, nn.Module):
        network = Network(net, ())
        values, buffers = {**network.params(), **(params or {})}, network.buffers()
        names = [name for name, value in net.named_parameters() if value.requires_grad]
        scales = dict.fromkeys(names, torch.ones(()))
        x, other = _inputs_of(network, x, "x"), None if other is None else _inputs_of(network, other, "other")
    else:
        raise InvalidType(f"net must be a torch.nn.Module or a knowable Model, got {type(net).__name__}.")
    size = sum(values[name].numel() for name in names) * network(values, x[:1], buffers=buffers).numel()
    rows = max(1, _NUMBERS_AT_ONCE // max(1, size))
    found = []
    for some in x.split(rows):
        left = _jacobian(network, values, scales, some, buffers)
        again = (left if other is None and len(x) <= rows else None,)
        parts = [some] if again[0] is not None else (x if other is None else other).split(rows)
        blocks = [again[0] if again[0] is not None else _jacobian(network, values, scales, o, buffers) for o in parts]
        found.append(torch.cat([torch.einsum("nod,mpd->nmop", left, right) for right in blocks], dim=1))
    return torch.cat(found)


def _inputs_of(network: Network, x: Any, name: str) -> Tensor:
    """Inputs of a network without a model, checked as a model's are."""
    x = check_inputs(as_rows(x, name), name)
    network.probe(x, network.params())
    return x


def _jacobian(network: Network, values: Params, scales: Params, x: Tensor, buffers: Buffers) -> Tensor:
    """The Jacobian of each row, times the scales: ``(rows, outputs, D)``."""
    fixed = {name: value for name, value in values.items() if name not in scales}

    def outputs(own: Params, row: Tensor) -> Tensor:
        return network({**fixed, **own}, row.unsqueeze(0), buffers=buffers).flatten()

    own = {name: values[name] for name in scales}
    with sdpa_kernel(SDPBackend.MATH):  # fused attention cannot be batched
        found = vmap(jacrev(outputs), in_dims=(None, 0))(own, x)
    return torch.cat([(found[name] * scale).flatten(2).detach() for name, scale in scales.items()], dim=-1)


def _prior_scales(model: Model, names: list[str], params: Params) -> Params:
    scales = {}
    for name in names:
        prior = model.prior.bound(name, params)
        moments = None if prior is None else prior.normal_moments()
        if moments is None or not torch.as_tensor(moments[1] > 0).all():
            raise Unsupported(
                f"The neural tangent kernel of a model needs a normal prior on {name!r}, got {prior!r}. That of its "
                f"network, without a prior: kn.empirical_ntk(net, x)."
            )
        scales[name] = torch.as_tensor(moments[1], dtype=params[name].dtype).rsqrt()
    return scales
