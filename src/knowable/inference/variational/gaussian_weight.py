r"""Weights that are Gaussian variables, carried through an unmodified network by a tensor subclass.

A :class:`GaussianWeight` looks like its mean to the module that holds it. When it reaches ``F.linear`` or a
convolution, the operation is replaced by one that samples its result:

- local reparameterisation (Kingma, Salimans and Welling, 2015): the output is normal with mean :math:`x m^\top` and
  variance :math:`x^2 v^\top`, so draw the output, independently for each example;
- flipout (Wen et al., 2018): one draw of the weights' perturbation, whose signs are flipped at random for each example.

Any other operation gets one reparameterised draw of the weight, the same for the whole forward pass.

Local reparameterisation of weights that act several times per example (convolution positions, tokens) draws independent
noise at each: an approximation. :func:`trace_usage` finds out which weights those are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from knowable.core.model.model import Model
from knowable.core.network.inputs import as_rows
from knowable.core.network.layer_operations import CONVOLUTIONS, LINEAR, METADATA, is_transposed, operands
from knowable.core.network.params import Params
from knowable.core.network.weight_uses import WeightTracer, WeightUse
from knowable.core.support.randomness import fast_randn, own_randomness


class GaussianWeight(torch.Tensor):
    """A weight with a mean and a variance; see the module's text.

    Attributes:
        loc: The mean, a plain tensor.
        variance: The variance.
        rule: What replaces a linear or convolution operation: a function ``(op, x, weight, bias, rest)``.
    """

    loc: Tensor
    variance: Tensor
    rule: Callable[..., Tensor]
    _draw: Tensor | None
    _seen: torch.dtype

    @staticmethod
    def __new__(cls, loc: Tensor, variance: Tensor, rule: Callable[..., Tensor]) -> GaussianWeight:
        self = loc.as_subclass(cls)
        self.loc, self.variance, self.rule, self._draw, self._seen = loc, variance, rule, None, loc.dtype
        return self

    def draw(self) -> Tensor:
        """One reparameterised draw, the same each time it is asked for."""
        if self._draw is None:
            drawn = torch.addcmul(self.loc, self.variance.sqrt(), torch.randn_like(self.loc))
            self._draw = drawn.to(self._seen)
        return self._draw

    def seen_as(self, dtype: torch.dtype) -> GaussianWeight:
        """The same weight in a network of another dtype."""
        made = GaussianWeight(self.loc, self.variance, self.rule)
        made._seen = dtype
        return made

    @classmethod
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace operations on the weight."""
        kwargs = kwargs or {}
        if func.__name__ in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is LINEAR or func in CONVOLUTIONS:
            x, weight, bias, rest = operands(func, args, kwargs)
            if not isinstance(x, GaussianWeight):
                owner: Any = weight if isinstance(weight, GaussianWeight) else bias
                return _by_rule(owner, func, x, weight, bias, rest)
        if func is Tensor.to and isinstance(args[0], GaussianWeight) and isinstance(args[1], torch.dtype):
            return args[0].seen_as(args[1])
        return func(*tree_map(_drawn, args), **tree_map(_drawn, kwargs))


@dataclass(frozen=True)
class GaussianPair:
    """The same as a :class:`GaussianWeight`, and no tensor: for recordings, in which no tensor subclass can be made.

    The network is given the mean, and :class:`PairRules` puts the pair in its place again where an operation takes it.
    """

    loc: Tensor
    variance: Tensor
    rule: Callable[..., Tensor]


class PairRules(TorchFunctionMode):
    """Inside this block, linear operations and convolutions that take the mean of a pair follow its rule."""

    def __init__(self, params: Params):
        super().__init__()
        self._pairs: dict[int, Any] = {id(pair.loc): pair for pair in params.values() if isinstance(pair, GaussianPair)}
        self._casts: list[Tensor] = []
        self.params = {name: v.loc if isinstance(v, GaussianPair) else v for name, v in params.items()}

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace operations on the means."""
        kwargs = kwargs or {}
        if func is LINEAR or func in CONVOLUTIONS:
            x, weight, bias, rest = operands(func, args, kwargs)
            weight, bias = (self._pairs.get(id(each), each) for each in (weight, bias))
            owner = next((each for each in (weight, bias) if isinstance(each, GaussianPair)), None)
            if owner is not None:
                return _by_rule(owner, func, x, weight, bias, rest)
        found = func(*args, **kwargs)
        if func is Tensor.to and id(args[0]) in self._pairs:
            self._pairs[id(found)] = self._pairs[id(args[0])]
            self._casts.append(found)  # so that nothing else gets its id
        return found


def _by_rule(
    owner: Any, op: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, rest: dict[str, Any]
) -> Tensor:
    """The owner's rule, in its own precision where the network has less."""
    if x.dtype == owner.loc.dtype or torch.is_autocast_enabled(x.device.type):
        return owner.rule(op, x, weight, bias, rest)
    in_full: Any = [
        each if each is None or isinstance(each, GaussianWeight | GaussianPair) else each.to(owner.loc.dtype)
        for each in (weight, bias)
    ]
    return owner.rule(op, x.to(owner.loc.dtype), *in_full, rest).to(x.dtype)


def local_weights(loc: Params, variance: Params, rule: Callable[..., Tensor], *, recording: bool = False) -> Params:
    """Weights whose layers draw their outputs by the rule."""
    kind: Any = GaussianPair if recording else GaussianWeight
    return {name: kind(loc[name], variance[name], rule) for name in loc}


def local_rule(
    op: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, rest: dict[str, Any]
) -> Tensor:
    """Draw the result of a linear operation from its own normal distribution."""
    loc, variance = _moments(weight)
    if variance is not None and not torch.is_autocast_enabled(x.device.type):
        if op is LINEAR:
            return LocalLinear.apply(x, loc, variance, *_moments(bias))
        recording = isinstance(weight, GaussianPair)  # the noise would be the same each time
        geometry = None if recording else Geometry.of(x, loc, rest, transposed=is_transposed(op))
        if geometry is not None:
            return LocalConvolution.apply(x, loc, variance, *_moments(bias), geometry)
    return plain_local_rule(op, x, weight, bias, rest)


def plain_local_rule(
    op: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, rest: dict[str, Any]
) -> Tensor:
    """The same by plain operations, which ``vmap`` takes and autocast rounds."""
    mean, spread = output_moments(op, x, weight, bias, rest)
    return torch.addcmul(mean, spread.sqrt(), _noise_like(mean))


def _noise_like(x: Tensor) -> Tensor:
    """Standard normal noise in the memory layout of ``x``; torch is slow to draw channels that lie last as such."""
    if x.dim() > 2 and x.stride(1) == 1:
        return torch.randn_like(x.movedim(1, -1)).movedim(-1, 1)
    return torch.randn_like(x)


def output_moments(
    op: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, rest: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """Mean and variance of the result of a linear operation with normal weights, for given inputs."""
    loc, variance = _moments(weight)
    bias_loc, bias_variance = _moments(bias)
    mean = op(x, loc, bias_loc, **rest)
    if variance is not None:
        spread = op(x.square(), variance, bias_variance, **rest)
    else:  # only the bias is random
        assert bias_variance is not None
        spread = bias_variance if op is LINEAR else _along_channels(bias_variance, mean)
    return mean, spread.clamp_min(1e-16)


class LocalLinear(torch.autograd.Function):
    """``x m' + b + sqrt(x² v' + c) ε`` with its gradient written by hand."""

    @staticmethod
    def forward(ctx, x: Tensor, loc: Tensor, variance: Tensor, bias_loc: Tensor | None, bias_variance: Tensor | None):
        """Draw the outputs; the noise is independent for each of them."""
        squares = x * x
        std = F.linear(squares, variance, bias_variance).clamp_min_(1e-16).sqrt_()
        noise = torch.randn_like(std)
        output = F.linear(x, loc, bias_loc).addcmul_(std, noise)
        half_slope = noise.div_(std).mul_(0.5)  # d output / d variance of the output
        ctx.save_for_backward(x, squares, loc, variance, half_slope)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        """Gradients of inputs, means and variances."""
        x, squares, loc, variance, half_slope = ctx.saved_tensors
        need_x, need_loc, need_variance, need_bias, need_bias_variance = ctx.needs_input_grad
        grad_spread = grad * half_slope
        rows, spread_rows = grad.flatten(0, -2), grad_spread.flatten(0, -2)  # (rows, outputs)
        return (
            (grad @ loc).addcmul_(grad_spread @ variance, x, value=2.0) if need_x else None,
            rows.T @ x.flatten(0, -2) if need_loc else None,
            spread_rows.T @ squares.flatten(0, -2) if need_variance else None,
            rows.sum(0) if need_bias else None,
            spread_rows.sum(0) if need_bias_variance else None,
        )


def flipout_rule(
    op: Callable[..., Tensor], x: Tensor, weight: Tensor, bias: Tensor | None, rest: dict[str, Any]
) -> Tensor:
    """Share one perturbation over the batch, with signs of its own for every example."""
    loc, variance = _moments(weight)
    bias_loc, bias_variance = _moments(bias)
    mean = op(x, loc, bias_loc, **rest)
    channel = -1 if op is LINEAR else 1
    out_signs = _signs(mean, channel)
    if variance is not None:
        shift = variance.sqrt() * torch.randn_like(variance)
        mean = torch.addcmul(mean, op(x * _signs(x, channel), shift, None, **rest), out_signs)
    if bias_variance is not None:
        shift = bias_variance.sqrt() * torch.randn_like(bias_variance)
        mean = torch.addcmul(mean, shift if op is LINEAR else _along_channels(shift, mean), out_signs)
    return mean


@dataclass(frozen=True)
class Usage:
    """How the random weights of a network are used in one forward pass."""

    uses: Sequence[WeightUse] = ()
    rows: int = 0
    coupled: bool = False  # one example's output depends on another's input (batch normalisation)

    def suits(self, name: str, estimator: str) -> bool:
        """Whether the weight may be left to its layer's own rule under this estimator."""
        uses = [use for use in self.uses if name in use.names]
        if len(uses) != 1 or uses[0].kind not in ("linear", "convolution"):
            return False  # used twice, or by something else
        if estimator == "local":
            return True
        if self.coupled or not uses[0].rows_first(self.rows):
            return False
        return estimator == "flipout" or (uses[0].kind == "linear" and uses[0].once_per_row(self.rows))


def trace_usage(model: Model, x: Tensor) -> Usage:
    """Run the network in training mode on a few rows, and note what happens to each random parameter."""
    params, rows = model.params(), as_rows(x)[:4]
    changed = rows[torch.tensor([len(rows) - 1, *range(1, len(rows))], device=rows.device)]
    tracer, outputs = WeightTracer({name: params[name] for name in model.random_names}), []
    for inputs, watching in ((rows, tracer), (changed, nullcontext())):
        with own_randomness(0), torch.no_grad(), watching:
            outputs.append(model.forward(params, inputs, buffers=model.buffers(), training=True))
    return Usage(tracer.uses, len(rows), coupled=not torch.equal(outputs[0][1:], outputs[1][1:]))


def _drawn(leaf: Any) -> Any:
    return leaf.draw() if isinstance(leaf, GaussianWeight) else leaf


def _moments(weight: Tensor | None) -> tuple[Any, Tensor | None]:
    return (weight.loc, weight.variance) if isinstance(weight, GaussianWeight | GaussianPair) else (weight, None)


def _along_channels(values: Tensor, like: Tensor) -> Tensor:
    return values.view(-1, *(1,) * (like.dim() - 2))


def _signs(like: Tensor, channel: int) -> Tensor:
    """Random signs for every example and channel, the same at all positions."""
    shape = [like.shape[0], *(1,) * (like.dim() - 1)]
    shape[channel] = like.shape[channel]
    return torch.randint(0, 2, shape, dtype=torch.int8, device=like.device).to(like.dtype).mul_(2).sub_(1)


# --- local reparameterisation of a convolution -----------------------------------------------------------------------

_convolution: Any = torch.ops.aten.convolution
_convolution_backward: Any = torch.ops.aten.convolution_backward


class Geometry(NamedTuple):
    """The arguments of a convolution beside its operands, a number for each dimension."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    @classmethod
    def of(cls, x: Tensor, weight: Tensor, rest: dict[str, Any], *, transposed: bool) -> Geometry | None:
        """That of a call with these arguments; None for inputs that are no batch, and padding in words."""
        n = weight.dim() - 2
        if x.dim() != n + 2 or isinstance(rest.get("padding"), str):
            return None
        stride, dilation = (_for_each(rest.get(name, 1), n) for name in ("stride", "dilation"))
        padding, more = (_for_each(rest.get(name, 0), n) for name in ("padding", "output_padding"))
        return cls(stride, padding, dilation, transposed, more, rest.get("groups", 1))


def _for_each(value: Any, n: int) -> list[int]:
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * n if len(numbers) == 1 else numbers


class LocalConvolution(torch.autograd.Function):
    """``conv(x, m) + b + sqrt(conv(x², v) + c) ε`` with its gradient written by hand."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,
        loc: Tensor,
        variance: Tensor,
        bias_loc: Tensor | None,
        bias_variance: Tensor | None,
        geometry: Geometry,
    ):
        """Draw the outputs; the noise is independent for each of them."""
        squares = x * x
        std = _convolution(squares, variance, bias_variance, *geometry).clamp_min_(1e-16).sqrt_()
        noise = _noise_of_shape(std)
        output = _convolution(x, loc, bias_loc, *geometry).addcmul_(std, noise)
        half_slope = noise.div_(std).mul_(0.5)  # d output / d variance of the output
        ctx.geometry = geometry
        ctx.save_for_backward(x, squares, loc, variance, half_slope)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        """Gradients of inputs, means and variances, those that are asked for."""
        x, squares, loc, variance, half_slope = ctx.saved_tensors
        need_x, need_loc, need_variance, need_bias, need_bias_variance, _ = ctx.needs_input_grad
        spread = grad * half_slope
        by_x, by_loc = _gradients(grad, x, loc, ctx.geometry, need_x, need_loc)
        by_squares, by_variance = _gradients(spread, squares, variance, ctx.geometry, need_x, need_variance)
        channels = (0, *range(2, grad.dim()))  # all dimensions but theirs
        return (
            by_x.addcmul_(by_squares, x, value=2.0) if by_x is not None else None,
            by_loc,
            by_variance,
            grad.sum(channels) if need_bias else None,
            spread.sum(channels) if need_bias_variance else None,
            None,
        )


def _noise_of_shape(std: Tensor) -> Tensor:
    """Standard normal noise in the memory layout of ``std``, whose channels may lie first or last."""
    shape = std.movedim(1, -1).shape if std.stride(1) == 1 else std.shape
    noise = fast_randn(len(std), std[0].numel(), like=std).view(shape)
    return noise.movedim(-1, 1) if std.stride(1) == 1 else noise


def _gradients(grad: Tensor, x: Tensor, weight: Tensor, geometry: Geometry, *wanted: bool) -> tuple[Any, Any]:
    """Of the input and of the weight of one convolution, None where not wanted."""
    by_x, by_weight, _ = _convolution_backward(grad, x, weight, None, *geometry, [*wanted, False])
    return by_x, by_weight
