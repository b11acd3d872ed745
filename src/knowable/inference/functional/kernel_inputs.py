"""What a kernel sees of the data: rows of numbers, or features that a network makes of them, in units of their own."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model.model import Model
from knowable.core.network.network import Network
from knowable.core.network.params import Buffers, Params, with_prefix, without_prefix
from knowable.core.posterior.saving import build, describe
from knowable.core.support.randomness import own_randomness
from knowable.errors import InvalidArgument, InvalidType, Unsupported
from knowable.likelihoods import Gaussian, StudentT


def numbers_of(x: Any, method: str) -> Tensor:
    """Inputs as rows of numbers, in double precision."""
    if not isinstance(x, Tensor) or not x.is_floating_point():
        what = f"{x.dtype}" if isinstance(x, Tensor) else "several inputs"
        raise Unsupported(
            f"{method} takes one tensor of floating-point numbers, got {what}: a kernel compares rows by their "
            f"distance. Use DeepKernel, whose network makes features of any inputs."
        )
    return x.flatten(1).double()


class Body:
    """A network up to its last layer, or a whole module, as a function of its parameters.

    Args:
        network: The network.
        last: Path of the layer whose input the features are; None: the network's own output.
        prefix: Before the names of parameters and buffers.
    """

    def __init__(self, network: Network, last: str | None = None, prefix: str = ""):
        self.network, self.last, self.prefix = network.copy(), last, prefix
        self._found: Any = None
        self._names = {name for name, _ in network.net.named_parameters()}
        if last is not None:
            for training in (False, True):
                self.network.modules(training=training)[last].register_forward_pre_hook(self._keep)

    def _keep(self, module: nn.Module, given: tuple[Any, ...]) -> None:
        self._found = given[0] if given else None

    @classmethod
    def of_model(cls, model: Model) -> Body:
        """The model's network without its last layer that has parameters."""
        own = [path for path, each in model.net.named_modules() if any(True for _ in each.parameters(recurse=False))]
        return cls(model.network, own[-1])

    @classmethod
    def of_module(cls, module: nn.Module) -> Body:
        """A module whose output is the features."""
        return cls(Network(module, [n for n, value in module.named_parameters() if not value.requires_grad]),
                   prefix="features.")  # fmt: skip

    def __call__(self, params: Params, x: Tensor, buffers: Buffers, *, training: bool = False) -> Tensor:
        """Features ``(rows, d)`` in double precision; ``buffers`` are updated in training."""
        own_params, own = (without_prefix(self.prefix, each) for each in (params, buffers))
        own_params = {name: value for name, value in own_params.items() if name in self._names}
        self._found = None
        output = self.network(own_params, self.network.own_input(x), buffers=own, training=training)
        found, self._found = output if self.last is None else self._found, None
        if training:
            buffers.update(with_prefix(self.prefix, own))
        if not isinstance(found, Tensor) or len(found) != len(x):
            raise InvalidType(
                f"features must be one tensor with a row for each input, got "
                f"{tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__} for {len(x)} rows."
            )
        return found.reshape(len(found), -1).double()

    def is_steady(self, params: Params, x: Any, buffers: Buffers) -> bool:
        """Whether it computes in training what it does in evaluation: no dropout, no batch statistics."""
        with torch.no_grad(), own_randomness(0):
            rows, kept = x[:32], {name: value.clone() for name, value in buffers.items()}
            expected = self(params, rows, buffers)
            found = [self(params, rows, dict(kept), training=True) for _ in range(2)]
        return all(torch.allclose(each, expected, rtol=1e-4, atol=1e-5) for each in found)

    def start(self, model: Model, x: Tensor) -> tuple[Params, Params, Buffers]:
        """Parameters that are trained, those that are not, and buffers; ``x`` are some rows."""
        if self.prefix:
            params = self.network.params()
            buffers = {**model.buffers(), **with_prefix(self.prefix, self.network.buffers())}
            kept = {name for name, value in self.network.net.named_parameters() if not value.requires_grad}
            trained = {name: value for name, value in params.items() if name not in kept}
            held = {name: value for name, value in params.items() if name in kept}
            return with_prefix(self.prefix, trained), with_prefix(self.prefix, held), buffers
        params = {name: value.requires_grad_() for name, value in model.network_params(model.params()).items()}
        with torch.enable_grad():
            total = self(params, x, model.buffers()).sum()
            slopes = [None] * len(params)
            if total.requires_grad:
                slopes = torch.autograd.grad(total, list(params.values()), allow_unused=True)
        used = [name for name, slope in zip(params, slopes, strict=True) if slope is not None]
        return {name: params[name].detach() for name in used}, {}, model.buffers()

    def described(self) -> Any:
        """What an artifact says of it."""
        if not self.prefix:
            return "network"
        structure = describe(self.network.net)
        if structure is None:
            raise InvalidArgument(
                f"features ({type(self.network.net).__name__}) is not made of plain torch.nn layers, so it cannot be "
                f"saved. Make it the body of the model's network, kn.Model(nn.Sequential(features, nn.Linear(d, 1)), "
                f"...), and leave features out: kn.load(path, net) then takes the network."
            )
        return structure

    @classmethod
    def built(cls, description: Any, model: Model) -> Body | None:
        """The inverse of :meth:`described`; None of None."""
        if description is None:
            return None
        return cls.of_model(model) if description == "network" else cls.of_module(build(description).to(model.dtype))


@dataclass(frozen=True)
class Units:
    """Shifts and scales: the kernel sees (features - shift) / scale, and functions are shift + scale times its own."""

    x_shift: Tensor  # (d,)
    x_scale: Tensor
    y_shift: Tensor  # (outputs,)
    y_scale: Tensor

    @classmethod
    def of(
        cls, features: Tensor, y: Tensor, counts: Tensor, model: Model, outputs: int, *, standardise: bool,
        centre: bool = True,
    ) -> Units:  # fmt: skip
        """From rows and how much each counts.

        Args:
            features: What the kernel sees, ``(N, d)``.
            y: Targets.
            counts: ``(N,)``.
            model: The model, whose likelihood says whether targets are numbers that functions come near.
            outputs: Of the network.
            standardise: Whether there are other units than the data's own.
            centre: Whether functions are about the mean of the targets.
        """
        zeros = torch.zeros(outputs, dtype=torch.float64, device=features.device)
        x_shift, x_scale = _moments(features, counts)
        if not standardise:
            x_shift, x_scale = torch.zeros_like(x_shift), torch.ones_like(x_scale)
        y_shift, y_scale = zeros, zeros + 1
        if isinstance(model.likelihood, Gaussian | StudentT):
            values = y.double().reshape(len(y), -1)
            mean, scale = _moments(values, counts)
            y_shift = mean if centre else zeros
            y_scale = (scale if centre else (scale.square() + mean.square()).sqrt()) if standardise else y_scale
        return cls(x_shift, x_scale, y_shift, y_scale)

    def seen(self, features: Tensor) -> Tensor:
        """Features as the kernel sees them."""
        return (features - self.x_shift) / self.x_scale

    def functions(self, mean: Tensor) -> Tensor:
        """Means ``(..., outputs)`` in the units of functions."""
        return self.y_shift + self.y_scale * mean

    def tensors(self) -> dict[str, Tensor]:
        """By name, to be saved."""
        return {each.name: getattr(self, each.name) for each in fields(self)}


def _moments(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (1 where it is 0) of each column, over the rows that count and are not NaN."""
    known = ~values.isnan()
    share = counts.unsqueeze(1) * known
    total = share.sum(0).clamp_min(1e-300)
    mean = (share * values.nan_to_num()).sum(0) / total
    scale = ((share * (values - mean).nan_to_num().square()).sum(0) / total).sqrt()
    size = torch.maximum(mean.abs(), torch.ones_like(mean))
    return mean, torch.where(scale > 1e-12 * size, scale, torch.ones_like(scale))
