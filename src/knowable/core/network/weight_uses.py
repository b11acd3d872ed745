"""Which operations of a network use which weights, on what inputs: found by running the network.

A layer is recognised by the function that is called (``F.linear``, a convolution) with a parameter as its weight, not
by its module: attention, recurrent layers, tied weights and functional code are seen too.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from knowable.core.network.batched import no_hidden_loops
from knowable.core.network.layer_operations import (
    CONVOLUTIONS,
    LINEAR,
    METADATA,
    gru_by_steps,
    gru_is_plain,
    lstm_by_steps,
    lstm_is_plain,
    operands,
    right_product,
)
from knowable.core.network.network import Network
from knowable.core.network.params import Buffers, Params


@dataclass(frozen=True, eq=False)
class WeightUse:
    """One operation that takes traced parameters.

    Linear maps and convolutions are ``s = W a + b`` at every row and position: the gradient in W is a sum of outer
    products of gradients in s with the inputs a, and :meth:`activations` and :meth:`in_front` give both as
    ``(..., features)``, with rows and positions in front.
    """

    operation: Callable[..., Any]  # the torch function
    names: tuple[str, ...]  # the traced parameters among its arguments
    weight: str | None  # the one that is the weight of a linear map or convolution, if that is traced
    bias: str | None  # the one that is its bias, if that is traced
    inputs: Any  # the input of a linear map or convolution; of other operations the first argument
    output: Any  # the result, with respect to which gradients are taken
    passed_on: Any  # the same values, with which the network went on
    settings: dict[str, Any] = field(default_factory=dict)  # of a convolution: stride, padding, dilation, groups
    kernel: tuple[int, ...] = ()  # the size of a convolution's kernel
    transposed: bool = False  # whether the weight is held as (in, out), the second factor of x W
    tensors: tuple[Tensor, ...] = ()  # all tensors among the arguments (where fused operations are not taken apart)

    @property
    def kind(self) -> str:
        """``"linear"``, ``"convolution"``, or the name of any other operation."""
        if self.operation is LINEAR:
            return "linear"
        return "convolution" if self.operation in CONVOLUTIONS else self.operation.__name__

    def rows_first(self, rows: int) -> bool:
        """Whether the first dimension of the input can be that of the ``rows``."""
        x = self.inputs
        return isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == rows

    def once_per_row(self, rows: int) -> bool:
        """Whether the weights act once on each of the ``rows``: no image positions, no sequence steps."""
        return self.rows_first(rows) and self.inputs.dim() == 2

    # --- linear maps and convolutions as products with a matrix ------------------------------------------------------

    @property
    def feature_dim(self) -> int:
        """The dimension of the output that holds its features: the last one, or the channels of a convolution."""
        return 1 if self.kernel else self.output.dim() - 1

    @property
    def count(self) -> int:
        """Number of rows and positions."""
        return self.output.numel() // self.output.shape[self.feature_dim]

    def in_front(self, values: Tensor, *, lead: int = 0) -> Tensor:
        """Values of the output's shape as ``(..., out)``: rows and positions in front, behind ``lead`` dimensions.

        In single precision at least, as inputs are too: what follows is linear algebra.
        """
        values = _in_full(values)
        return values.flatten(2 + lead).mT if self.kernel else values

    def inputs_in_front(self) -> Tensor:
        """Inputs as ``(..., in)``: of a convolution the patches ``(rows, positions, in * kernel)``."""
        inputs = _in_full(self.inputs)
        if not self.kernel:
            return inputs
        kernel, (stride, dilation) = self.kernel, (_each(self.settings.get(k, 1), self.kernel) for k in _STEPS)
        image = _padded(inputs, self.settings.get("padding", 0), kernel, dilation)
        if len(kernel) == 1:  # an image of one line
            image, kernel, stride, dilation = image.unsqueeze(2), (1, *kernel), (1, *stride), (1, *dilation)
        return F.unfold(image, kernel, dilation=dilation, stride=stride).mT

    def activations(self) -> Tensor:
        """What the weight is multiplied with, ``(..., in)``, with a 1 at the end for the bias."""
        if self.weight is None:
            return _in_full(self.output.new_ones((*self.in_front(self.output).shape[:-1], 1)))
        inputs = self.inputs_in_front()
        return inputs if self.bias is None else F.pad(inputs, (0, 1), value=1.0)


_STEPS = ("stride", "dilation")


def _in_full(values: Tensor) -> Tensor:
    """Values in single precision where they have less."""
    return values.float() if values.dtype in (torch.bfloat16, torch.float16) else values


def _each(value: Any, like: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,) * len(like)


def _padded(image: Tensor, padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> Tensor:
    if padding == "valid":
        return image
    if padding == "same":
        around = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        sides = [(total // 2, total - total // 2) for total in around]
    else:
        sides = [(int(size), int(size)) for size in _each(padding, kernel)]
    return F.pad(image, [size for side in reversed(sides) for size in side])  # the last dimension comes first


class WeightTracer(TorchFunctionMode):
    """Notes the uses of some parameters, recognised by identity, while it is active.

    Args:
        weights: The parameters, by name.
        take_apart: Compute fused operations (LSTM, GRU, multi-head attention) by single steps, which have every kind
            of derivative, and note only products with weight matrices: ``F.linear``, ``x @ weight`` and ``addmm``, and
            ``F.conv1d`` and ``F.conv2d`` without groups. Otherwise every operation runs as it is and is noted.
        cut: Whether gradients stop at the noted products: what gradient a parameter still has then comes from uses that
            were not noted.
        twice: Take apart layer and instance normalisation too, whose second derivatives are wrong under ``vmap`` in
            PyTorch (2.13 and before).
        listener: Called with every operation, also those without a traced parameter (if nothing is taken apart).
    """

    def __init__(
        self, weights: Params, *, take_apart: bool = False, cut: bool = False, twice: bool = False,
        listener: Callable[[WeightUse], None] | None = None,
    ):  # fmt: skip
        super().__init__()
        self.uses: list[WeightUse] = []
        self._names = {id(value): name for name, value in weights.items()}
        self._casts: list[Tensor] = []
        self._take_apart, self._cut, self._twice, self._listener = take_apart, cut, twice, listener

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Called for every function of torch that the network calls."""
        kwargs = kwargs or {}
        if func is Tensor.to and id(args[0]) in self._names:
            return self._same_elsewhere(args[0], func(*args, **kwargs))
        if not self._take_apart:
            return self._observe(func, args, kwargs)
        if func is LINEAR or func in (F.conv1d, F.conv2d):
            return self._product(func, *operands(func, args, kwargs))
        product = right_product(func, args, kwargs)
        if product is not None and any(id(each) in self._names for each in product[1:]):
            return self._product(LINEAR, *product, {}, transposed=True)
        apart = _taken_apart(func, args) or (_NORMS.get(func) if self._twice else None)
        if apart is None:
            return func(*args, **kwargs)
        with self:
            return apart(*args, **kwargs)

    def _same_elsewhere(self, weight: Tensor, cast: Tensor) -> Tensor:
        """A parameter in another dtype is that parameter."""
        self._names[id(cast)] = self._names[id(weight)]
        self._casts.append(cast)  # so that nothing else gets its id
        return cast

    def _observe(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        if func.__name__ in METADATA and not isinstance(result, Tensor):
            return result
        tensors = tuple(leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
        names = tuple(self._names[id(leaf)] for leaf in tensors if id(leaf) in self._names)
        if not names and self._listener is None:
            return result
        weight, bias, settings = None, None, {}
        x = args[0] if args else kwargs.get("input")
        if func is LINEAR or func in CONVOLUTIONS:
            x, weight, bias, settings = operands(func, args, kwargs)
        use = WeightUse(
            func, names, self._names.get(id(weight)), self._names.get(id(bias)), x, result, result, settings,
            tensors=tensors,
        )  # fmt: skip
        if names:
            self.uses.append(use)
        if self._listener is not None:
            self._listener(use)
        return result

    def _product(
        self, func: Callable[..., Any], x: Tensor, weight: Tensor, bias: Tensor | None, settings: dict[str, Any], *,
        transposed: bool = False,
    ) -> Tensor:  # fmt: skip
        name, bias_name = self._names.get(id(weight)), self._names.get(id(bias))
        if settings.get("groups", 1) != 1 or (name is None and bias_name is None):
            return func(x, weight, bias, **settings)
        kernel = () if func is LINEAR else tuple(weight.shape[2:])
        if self._cut:
            weight = weight if name is None else weight.detach()
            bias = bias if bias is None or bias_name is None else bias.detach()
        output = func(x, weight.mT if transposed else weight, bias, **settings)
        if not output.requires_grad:
            output = output.detach().requires_grad_()
        passed_on = output.clone()  # the network may change it in place
        names = tuple(each for each in (name, bias_name) if each is not None)
        held = transposed and name is not None
        self.uses.append(WeightUse(func, names, name, bias_name, x, output, passed_on, settings, kernel, held))
        return passed_on


class ForwardTrace:
    """One batch through the network in evaluation mode, with gradients at every product with a weight matrix.

    Args:
        network: The network.
        names: Its parameters that are traced.
        params: Values of its parameters.
        x: The batch.
        buffers: Its buffers.
        noted: Those of them whose products are noted; None is all.
        cut: Whether gradients stop at the noted products, for :meth:`unnoted`.
        differentiable: Whether what is computed from here can be differentiated in ``params``.
    """

    def __init__(
        self, network: Network, names: Sequence[str], params: Params, x: Tensor, buffers: Buffers, *,
        noted: Sequence[str] | None = None, cut: bool = False, differentiable: bool = False,
    ):  # fmt: skip
        self.differentiable = differentiable
        self._leaves = {name: params[name] if differentiable else params[name].detach() for name in names}
        for name, value in self._leaves.items():
            self._leaves[name] = value if value.requires_grad else value.detach().requires_grad_()
        self.noted = tuple(names if noted is None else noted)
        tracer = WeightTracer(
            {name: self._leaves[name] for name in self.noted}, take_apart=True, cut=cut, twice=differentiable
        )
        with torch.enable_grad(), tracer:
            self.output = network({**params, **self._leaves}, x, buffers=buffers)
        self.uses = tracer.uses
        self._batches = not self.convolves  # and until an operation refuses

    @property
    def convolves(self) -> bool:
        """Whether a product is a convolution, whose backward pass is as quick for one direction as for many at once."""
        return any(use.kind == "convolution" for use in self.uses)

    def gradients(self, directions: Tensor) -> list[Tensor]:
        """Gradients of the output's product with each of K ``directions`` ``(K, *output)``, at each use.

        They are ``(K, ..., features)``, with rows and positions in front.
        """
        places = [use.output for use in self.uses]
        found = self._backward(directions, places) if places and self.output.requires_grad else [None] * len(places)
        zeros = (
            directions.new_zeros((len(directions), *place.shape)) if each is None else each
            for each, place in zip(found, places, strict=True)
        )  # fmt: skip
        return [
            use.in_front(each if self.differentiable else each.detach(), lead=1)
            for use, each in zip(self.uses, zeros, strict=True)
        ]

    def _backward(self, directions: Tensor, places: list[Tensor]) -> Sequence[Tensor | None]:
        """All directions in one pass, unless the network has an operation for which that does not pay or work."""
        options: dict[str, Any] = {
            "retain_graph": True, "allow_unused": True, "create_graph": self.differentiable,
        }  # fmt: skip
        if len(directions) > 1 and self._batches:
            try:
                with no_hidden_loops():
                    return torch.autograd.grad(self.output, places, directions, is_grads_batched=True, **options)
            except RuntimeError:
                self._batches = False
        each = [torch.autograd.grad(self.output, places, direction, **options) for direction in directions]
        return [None if one[0] is None else _stacked(one) for one in zip(*each, strict=True)]

    def is_output(self, use: WeightUse) -> bool:
        """Whether the result of this use is the network's output."""
        return self.output is use.passed_on

    def unnoted(self) -> set[str]:
        """Parameters that act on the output in other ways than by the noted products, of a trace that is cut there."""
        found = self._in_leaves(torch.ones_like(self.output))
        return {name for name, each in found.items() if each is not None}

    def in_parameters(self, direction: Tensor) -> Params:
        """Gradients of the output's product with ``direction``, of a trace that is not cut."""
        found = self._in_leaves(direction)
        return {name: torch.zeros_like(self._leaves[name]) if each is None else each for name, each in found.items()}

    def _in_leaves(self, direction: Tensor) -> dict[str, Tensor | None]:
        if not self.output.requires_grad:
            return dict.fromkeys(self._leaves)
        leaves = list(self._leaves.values())
        found = torch.autograd.grad(self.output, leaves, direction, retain_graph=True, allow_unused=True)
        return dict(zip(self._leaves, found, strict=True))


def _stacked(each: Sequence[Tensor]) -> Tensor:
    """A stack, which of one tensor is no copy."""
    return each[0].unsqueeze(0) if len(each) == 1 else torch.stack(tuple(each))


def _taken_apart(func: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., Any] | None:
    """The same function as several calls, where there is one."""
    if func == F.multi_head_attention_forward:
        return _ATTENTION
    if func == torch.lstm and lstm_is_plain(args):
        return lstm_by_steps
    if func == torch.gru and gru_is_plain(args):
        return gru_by_steps
    return None


def _unintercepted(function: Any) -> Callable[..., Any]:
    """A function of torch.nn.functional that does not hand itself as a whole to the active torch function mode.

    The mode would then never see the operations inside.
    """
    namespace = {**function.__globals__, "has_torch_function": lambda _: False}
    made = types.FunctionType(
        function.__code__, namespace, function.__name__, function.__defaults__, function.__closure__
    )
    made.__kwdefaults__ = function.__kwdefaults__
    return made


_ATTENTION = _unintercepted(F.multi_head_attention_forward)


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """What ``F.layer_norm`` computes."""
    values = _standardised(input, tuple(range(-len(normalized_shape), 0)), eps)
    values = values if weight is None else values * weight
    return values if bias is None else values + bias


def _instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:  # fmt: skip
    """What ``F.instance_norm`` computes."""
    if not use_input_stats:
        return F.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    values = _standardised(input, tuple(range(2, input.dim())), eps)
    by_channel = (-1, *(1,) * (input.dim() - 2))
    values = values if weight is None else values * weight.view(by_channel)
    return values if bias is None else values + bias.view(by_channel)


def _standardised(values: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    variance, mean = torch.var_mean(values, dims, correction=0, keepdim=True)
    return (values - mean) * (variance + eps).rsqrt()


_NORMS: dict[Any, Callable[..., Tensor]] = {F.layer_norm: _layer_norm, F.instance_norm: _instance_norm}
