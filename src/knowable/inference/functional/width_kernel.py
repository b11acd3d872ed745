r"""The kernels of infinitely wide networks, read off the layers of a network of any width.

With independent weights of prior variance s² and biases of b², the outputs of a layer of many units are a Gaussian
process given its inputs, layer by layer (Neal, 1996; Lee et al., 2018; Matthews et al., 2018):

.. math:: K_{l+1}(x, x') = b^2 + n s^2\, E[\varphi(u)\, \varphi(v)], \qquad
    (u, v) \sim \mathcal{N}\big(0, K_l \text{ at } x, x'\big)

where n is the number of units that the layer sums over. The limit is taken with n s² held at what it is in the network
given: its kernel is the one that this network's prior has, as if every layer were as wide as needed.

The neural tangent kernel is the covariance of the network linearised in its weights under the same prior (Jacot et al.,
2018), :math:`\Theta = E\big[\sum_j s_j^2\, \partial_j f(x)\, \partial_j f(x')\big]`:

.. math:: \Theta_{l+1} = K_{l+1} + n s^2\, \dot K_l\, \Theta_l, \qquad \Theta_1 = K_1

which is what others call NTK parameterisation. Convolutions sum over the positions of their window (Novak et al.,
2019). Covariances between positions are carried along only where pooling needs them.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model.data import as_input
from knowable.core.model.model import Model
from knowable.core.network.own_modules import Residual
from knowable.core.network.params import Buffers, Params
from knowable.core.support.checks import check_choice
from knowable.errors import Unsupported
from knowable.inference.functional.activations import dual_of
from knowable.inference.functional.width_layers import (
    Activation,
    Flatten,
    Layer,
    Mean,
    State,
    Sum,
    Weights,
    Window,
    all_pairs,
    own_pairs,
)

KINDS = ("nngp", "ntk")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_MEANS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_GLOBAL_MEANS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_WITHOUT_EFFECT = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)  # in predictions
_NUMBERS_AT_ONCE = 2**24  # of covariances between positions


def infinite_width_kernel(model: Model, x: Any, other: Any = None, *, kind: str = "nngp") -> Tensor:
    r"""The covariance of function values of a model's network in the limit of infinite width.

    Every output of the network has this covariance, and outputs are independent of each other.

    Args:
        model: A model whose network is an ``nn.Sequential`` of linear layers, convolutions, activations, average
            pooling, ``Flatten`` and :class:`~knowable.core.network.own_modules.Residual`. Variances are those of its
            prior, which must be normal around 0.
        x: Inputs, ``(n, ...)``.
        other: Further inputs ``(m, ...)``; None is ``x`` again.
        kind: ``"nngp"``: the covariance of the network's own functions. ``"ntk"``: the neural tangent kernel, that of
            the network linearised in its weights.

    Returns:
        The kernel ``(n, m)`` in double precision.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 100), torch.nn.ReLU(), torch.nn.Linear(100, 1))
        >>> prior = {"2.weight": kn.Normal(0.1), "*": kn.Normal(1.0)}
        >>> model = kn.Model(net, kn.Gaussian(0.1), prior)
        >>> kn.infinite_width_kernel(model, torch.zeros(1, 2))  # 1 + 100 · 0.1² · 1/2
        tensor([[1.5000]], dtype=torch.float64)
    """
    kernel = WidthKernel(model)
    check_choice("kind", kind, KINDS)
    left = kernel.features(as_input(x, model))
    right = left if other is None else kernel.features(as_input(other, model))
    return kernel.between(left, right, kind, kernel.variances(model.params()))


class WidthKernel:
    """The kernel of a model's network, as a function of the variances of its prior.

    Layers in front that have no random parameter (a frozen backbone, ``Flatten``) are features of the inputs.

    Args:
        model: The model, whose network is read here, once.
        buffers: The network's buffers; None are the model's.
    """

    def __init__(self, model: Model, buffers: Buffers | None = None):
        self.model = model
        self._buffers = model.buffers() if buffers is None else buffers
        net, params = model.net, dict(model.net.named_parameters())
        if model.network.output is not None:
            raise Unsupported(
                "The limit of infinite width is that of the network's own output: leave out output= of the model."
            )
        modules = _children(net) if is_sequence(net) else [("", net)]
        random, fixed = set(model.random_names), 0
        for path, module in modules:
            if any(_joined(path, name) in random for name, _ in module.named_parameters()):
                break
            fixed += 1
        self._front = modules[:fixed]
        self._refuse_points()
        self._names = {id(value): name for name, value in params.items()}
        self._used: set[str] = set()
        self._layers = list(self._read(modules[fixed:], ""))
        self._between_positions = any(isinstance(each, Mean) for each in _all(self._layers))
        if not self._layers or not isinstance(self._layers[-1], Weights):
            raise Unsupported(
                "The network must end in a linear layer, whose outputs are those of a Gaussian process in the limit of "
                "infinite width. Leave out what comes after its last nn.Linear; a likelihood has its own link."
            )

    def _refuse_points(self) -> None:
        own = [name for name in self.model.point_names if name not in self.model.hyper_names]
        own = [name for name in own if not name.startswith("likelihood.")]
        if own:
            raise Unsupported(
                f"An infinitely wide network has no point estimates of weights, and {', '.join(own[:5])} "
                f"{'is one' if len(own) == 1 else 'are'}: freeze them with frozen=, or make them random."
            )

    def _read(self, modules: list[tuple[str, nn.Module]], above: str) -> Iterator[Layer]:
        for name, module in modules:
            path = _joined(above, name)
            if is_sequence(module) or isinstance(module, Residual):
                inner = list(self._read(_children(module), path))
                yield from [Sum(inner, path)] if isinstance(module, Residual) else inner
            elif not isinstance(module, _WITHOUT_EFFECT):
                yield self._layer(module, path)

    def _layer(self, module: nn.Module, path: str) -> Layer:
        if isinstance(module, (nn.Linear, *_CONVOLUTIONS)):
            bias = None if module.bias is None else self._name(module.bias)
            return Weights(path, _units(module), self._name(module.weight), bias, _window(module, path))
        if isinstance(module, _MEANS):
            return Mean(_pooling_window(module, path))
        if isinstance(module, _GLOBAL_MEANS):
            if any(size != 1 for size in _each(module.output_size, 1)):  # None leaves a dimension as it is
                raise Unsupported(f"Layer {path!r} must pool to one position, AdaptiveAvgPool2d(1), not to several.")
            return Mean(None)
        if isinstance(module, nn.Flatten) and module.start_dim == 1 and module.end_dim == -1:
            return Flatten()
        dual = dual_of(module, path)
        if dual is None:
            raise Unsupported(
                f"The limit of infinite width is not known here for layer {path!r}, {type(module).__name__}. Known are "
                f"nn.Sequential of Linear, Conv1d to Conv3d, average pooling, Flatten, activations that act on each "
                f"number by itself, and kn.Residual(...) for sums; layers before the first random one may be any."
            )
        return Activation(dual, path)

    def _name(self, value: Tensor) -> str:
        name = self._names[id(value)]
        if name not in self.model.random_names:
            raise Unsupported(
                f"Parameter {name!r} is frozen, behind random ones: no limit of infinite width is known. Make it "
                f"random."
            )
        if name in self._used:
            raise Unsupported(
                f"Parameter {name!r} is used twice: no limit of infinite width is known for shared weights."
            )
        self._used.add(name)
        return name

    @property
    def outputs(self) -> int:
        """How many outputs the network has."""
        last = self._layers[-1]
        assert isinstance(last, Weights)
        return last.units

    @property
    def weight_names(self) -> set[str]:
        """Names of the random weights that are not biases."""
        return {layer.weight for layer in _all(self._layers) if isinstance(layer, Weights)}

    # --- values ------------------------------------------------------------------------------------------------------

    def variances(self, params: Params) -> Params:
        """The prior variance of each weight and bias, at the hyperparameters in ``params``, in double precision."""
        found = {}
        for name in sorted(self._used):
            prior = self.model.prior.bound(name, params)
            moments = None if prior is None else prior.normal_moments()
            if moments is None:
                raise Unsupported(f"The limit of infinite width needs a normal prior on {name!r}, got {prior!r}.")
            mean, precision = (torch.as_tensor(each, dtype=torch.float64) for each in moments)
            if mean.numel() > 1 or precision.numel() > 1 or mean != 0 or precision == 0:
                raise Unsupported(
                    f"The limit of infinite width needs one variance for all of {name!r}, around 0: kn.Normal(scale); "
                    f"its prior is {prior!r}."
                )
            found[name] = 1 / precision.reshape(())
        return found

    def features(self, x: Tensor) -> Tensor:
        """Inputs of the first random layer, in double precision."""
        if not isinstance(x, Tensor) or not x.is_floating_point():
            raise Unsupported("The limit of infinite width is for networks of one tensor of numbers.")
        if not self._front:
            return x.double()
        front = copy.deepcopy(nn.Sequential(*(module for _, module in self._front))).double().eval()
        held = {**self.model.frozen_params(), **self._buffers}
        own = {
            f"{place}{name[len(path) :]}": value.double() if value.is_floating_point() else value
            for place, (path, _) in enumerate(self._front)
            for name, value in held.items()
            if name.startswith(f"{path}.")
        }
        with torch.no_grad():
            return torch.func.functional_call(front, own, (x.double(),))

    def between(self, left: Tensor, right: Tensor, kind: str, variances: Params) -> Tensor:
        """The kernel between all rows of :meth:`features`, ``(n, m)``."""
        rows = self._rows_at_once(left, right)
        full = self._full(left)

        def block(some: Tensor, others: Tensor) -> Tensor:
            return self._run(all_pairs(some, others, full), kind, variances)

        return torch.cat([torch.cat([block(a, b) for b in right.split(rows)], 1) for a in left.split(rows)])

    def diagonal(self, x: Tensor, kind: str, variances: Params) -> Tensor:
        """The kernel of each row with itself, ``(n,)``."""
        rows = self._rows_at_once(x, x[:1])
        return torch.cat([self._run(own_pairs(some, self._full(x)), kind, variances) for some in x.split(rows)])

    def _full(self, x: Tensor) -> bool:
        return self._between_positions and x.dim() > 2

    def numbers_of_a_row(self, x: Tensor) -> int:
        """How many covariances one row of :meth:`features` has with all rows ``x``."""
        return len(x) * math.prod(x.shape[2:]) ** (2 if self._full(x) else 1)

    def _rows_at_once(self, left: Tensor, right: Tensor) -> int:
        positions = math.prod(left.shape[2:])
        each = positions**2 if self._full(left) else positions
        if each > _NUMBERS_AT_ONCE:
            raise Unsupported(
                f"Pooling needs the covariances between all {positions:,} positions of two images: {each:,} numbers "
                f"for each pair of rows. Make the images smaller."
            )
        most = max(len(left), len(right)) if each == 1 else math.isqrt(_NUMBERS_AT_ONCE // each)
        return max(1, most)

    def _run(self, start: State, kind: str, variances: Params) -> Tensor:
        state = start
        for layer in self._layers:
            state = layer(state, variances, kind == "ntk")
        if state.cross.places:
            raise Unsupported(
                "The network's outputs must be one vector for each row: add Flatten before its last layer."
            )
        found = state.cross.kernel if kind == "nngp" else state.cross.tangent
        assert found is not None
        return found


def is_sequence(module: nn.Module) -> bool:
    """Whether a module runs its children one after the other, and does nothing else."""
    return isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """All children in order, also those that are there twice, which ``named_children`` leaves out."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


def _joined(above: str, name: str) -> str:
    return f"{above}.{name}" if above and name else above or name


def _all(layers: list[Layer]) -> Iterator[Layer]:
    for layer in layers:
        yield layer
        yield from _all(layer.layers) if isinstance(layer, Sum) else ()


# --- windows of PyTorch's layers -------------------------------------------------------------------------------------


def _units(module: nn.Module) -> int:
    return module.out_features if isinstance(module, nn.Linear) else module.out_channels  # type: ignore[return-value]


def _window(module: nn.Module, path: str) -> Window | None:
    if isinstance(module, nn.Linear):
        return None
    assert isinstance(module, _CONVOLUTIONS)
    if module.groups != 1 or module.padding_mode != "zeros":
        raise Unsupported(f"Convolution {path!r} must have groups=1 and padding_mode='zeros'.")
    if module.padding == "valid":
        padding = tuple((0, 0) for _ in module.kernel_size)
    elif module.padding == "same":
        total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size, strict=True)]
        padding = tuple((each // 2, each - each // 2) for each in total)
    else:
        padding = tuple((each, each) for each in module.padding)  # type: ignore[misc]
    return Window(module.kernel_size, module.stride, padding, module.dilation)  # type: ignore[arg-type]


def _pooling_window(module: Any, path: str) -> Window:
    count = int(type(module).__name__[-2])
    size, stride, padding = (_each(each, count) for each in (module.kernel_size, module.stride, module.padding))
    if module.ceil_mode or any(padding) or getattr(module, "divisor_override", None):
        raise Unsupported(f"Pooling {path!r} must have no padding, ceil_mode or divisor_override.")
    return Window(size, stride, ((0, 0),) * count, (1,) * count)


def _each(value: Any, count: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,) * count
