"""Gates: 0/1 parameters that keep or remove a unit of a network."""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from knowable.core.network.network import check_module
from knowable.core.support.checks import check_choice, check_count, check_type
from knowable.errors import InvalidArgument, InvalidType


class Gates(nn.Module):
    r"""A layer that multiplies each unit of its input by its parameter ``gate``: :math:`h_j \mapsto z_j h_j`.

    All gates are initially open (1), which is the identity. With a prior over 0 and 1
    (``{"*.gate": kn.BernoulliPrior(0.5), "*": kn.Normal(1.0)}``) their posterior says which units the network needs.

    Args:
        units: Number of gates; 1 is a single gate on the whole input.
        dim: The dimension of the units: 1 for features and channels, -1 for features of tokens.

    Example:
        >>> Gates(3)(torch.ones(2, 3)).shape
        torch.Size([2, 3])
    """

    def __init__(self, units: int, *, dim: int = 1):
        super().__init__()
        self.units, self.dim = check_count("units", units), check_type("dim", dim, int, "a dimension")
        self.gate = nn.Parameter(torch.ones(units))

    def forward(self, x: Tensor) -> Tensor:
        """The input, zero where gates are closed."""
        shape = [1] * x.dim()
        shape[self.dim] = self.units
        return x * self.gate.view(shape)

    def extra_repr(self) -> str:
        return f"{self.units}, dim={self.dim}"


def gated(net: nn.Module, where: str | Iterable[str], *, per: str = "unit", dim: int = 1) -> nn.Module:
    """A copy of a network with gates behind some of its modules.

    A module at path ``a`` becomes a sequence of itself (``a.0``) and its gates (``a.1``); every other parameter keeps
    its name.

    Args:
        net: Any network; it is not changed.
        where: Paths or globs of modules (``"0"``, ``"blocks.*.conv"``), as in ``net.named_modules()``.
        per: ``"unit"``: a gate for each output feature of a linear layer or channel of a convolution. ``"layer"``: one
            gate on the whole output, of any module.
        dim: The dimension of the units in the output: 1 for features and channels, -1 for features of tokens.

    Example:
        >>> net = gated(nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 1)), "0")
        >>> [name for name, _ in net.named_parameters()]
        ['0.0.weight', '0.0.bias', '0.1.gate', '2.weight', '2.bias']
    """
    check_module(net)
    check_choice("per", per, ("unit", "layer"))
    made = copy.deepcopy(net)
    like = next(iter(made.parameters()), torch.zeros(()))
    for path in _paths(made, where):
        module = made.get_submodule(path)
        gates = Gates(_units(path, module) if per == "unit" else 1, dim=dim).to(like)
        made.set_submodule(path, nn.Sequential(module, gates))
    return made


def _paths(net: nn.Module, where: str | Iterable[str]) -> list[str]:
    patterns = [where] if isinstance(where, str) else list(where) if isinstance(where, Iterable) else [where]
    if not patterns or not all(isinstance(each, str) for each in patterns):
        raise InvalidType(f"where must be a path or glob of modules, or several of these; got {where!r}.")
    known = [path for path, _ in net.named_modules() if path]
    found = []
    for pattern in patterns:
        matching = fnmatch.filter(known, pattern)
        if not matching:
            listing = ", ".join(known[:12]) + (", ..." if len(known) > 12 else "")
            raise InvalidArgument(f"where={pattern!r} matches no module. The modules are: {listing}.")
        found += [path for path in matching if path not in found]
    inside = [path for path in found if any(path.startswith(f"{other}.") for other in found)]
    if inside:
        raise InvalidArgument(f"where names {inside[0]!r} and also a module that contains it. Name only one of them.")
    return found


def _units(path: str, module: nn.Module) -> int:
    if isinstance(module, nn.Linear | nn.Bilinear):
        return module.out_features
    if isinstance(module, _ConvNd):
        return module.out_channels
    raise InvalidArgument(
        f"where names {path!r}, a {type(module).__name__}; per='unit' supports linear layers and convolutions. Use "
        f"per='layer', or put Gates(units) into the network."
    )
