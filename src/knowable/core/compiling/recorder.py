"""A log density and its gradient for many chains at once, as one plain graph of tensor operations.

``vmap`` and ``grad`` describe what is wanted, but passing every operation through them at every step costs more than
the arithmetic of a small network. So the two are applied once: what they do is recorded for the shapes at hand
(``make_fx``) and from then on run as a flat list of tensor operations, which a compiler may also fuse. Functions that
``vmap`` cannot take (data-dependent branches, recurrent layers) are run chain by chain with ordinary autograd.
"""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from knowable.core.compiling.simplify import simplify
from knowable.core.network.network import no_hidden_loops
from knowable.core.support.memory import keep_free_memory
from knowable.core.support.time_limit import time_left

NOT_FACTORISED: type[RuntimeError] = torch.linalg.LinAlgError  # type: ignore[reportPrivateImportUsage]
Function = Callable[..., Tensor]  # (flat (D,), *data) -> scalar
_LARGE = 128  # both sides of a matrix that all chains share: below it one product for all chains is no quicker
_COMPILE_AFTER = 20_000  # calls: by then a long run is likely, and compiling (seconds) pays for itself
_TIME_TO_COMPILE = 60.0  # seconds that must be left for it where time is limited
_DIRECTLY = 100  # gradients taken by themselves, not within a fused step: until then it is not worth a graph


class BatchedGradient:
    """``(position (C, D), *data) -> value (C,), gradient (C, D)`` of a function of one position.

    Args:
        function: Takes one flat position ``(D,)`` and the data, returns a scalar.
        mode: ``"eager"`` (through ``vmap`` at every call), ``"traced"`` (recorded once per shape), ``"compiled"``
            (recorded and fused; seconds of warm-up), or ``"auto"`` (traced, and compiled after many calls).

    Attributes:
        calls: Gradients of all chains taken so far; a resumed run sets it, so that it switches where it would have.
        direct: Those of them that were taken here, and not within a fused step, since steps may be fused.
    """

    def __init__(self, function: Function, *, mode: str = "auto"):
        keep_free_memory()
        self.function, self.mode = function, mode
        self.calls = self.direct = 0
        self._vectorises = True  # until vmap refuses
        self._may_compile = True
        self._compiles: bool | None = None  # in time; None: not yet asked
        self._graphs: dict[Any, Callable[..., Any]] = {}

    @property
    def compiling(self) -> bool:
        """Whether steps are fused: see :class:`~knowable.core.chains.fused_step.FusedStep`."""
        if not self._may_compile:
            return False
        if not self._vectorises or self.mode == "compiled":
            return self._vectorises
        return self.mode == "auto" and self.calls > _COMPILE_AFTER and self._time_to_compile()

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """For gradients that are taken aside, in shapes that do not come again: no compiler is worth its time there."""
        self._may_compile = False
        try:
            yield
        finally:
            self._may_compile = True

    def _time_to_compile(self) -> bool:
        if self._compiles is None:
            left = time_left()
            self._compiles = left is None or left > _TIME_TO_COMPILE
        return self._compiles

    def value_and_grad(self, position: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
        """Values and gradients."""
        self.calls += 1
        self.direct += self.compiling
        value, gradient = self._call("gradient", position.contiguous(), data)
        return value, gradient.contiguous()

    def value(self, position: Tensor, *data: Tensor) -> Tensor:
        """Values alone."""
        return self._call("value", position.contiguous(), data)

    def _mode(self, what: str) -> str:
        if self.mode == "eager":
            return "eager"
        return "compiled" if what == "gradient" and self.compiling and self.direct > _DIRECTLY else "traced"

    def _call(self, what: str, position: Tensor, data: tuple[Tensor, ...]) -> Any:
        if self._vectorises:
            mode = self._mode(what)
            key = (mode, what, position.shape, position.dtype, *(each.shape for each in data))
            try:
                graph = self._graphs.get(key)
                if graph is None:
                    graph = self._graphs[key] = self._prepare(mode, what, position, data)
                with torch.no_grad():
                    return graph(position, *data)
            except NOT_FACTORISED:  # a matrix of some chain: the others shall not suffer
                return self._one_by_one(what, position, data)
            except RuntimeError as error:
                if not refused_by_vmap(error):
                    raise
                self._vectorises = False
                self._graphs.clear()
        return self._one_by_one(what, position, data)

    def _prepare(self, mode: str, what: str, position: Tensor, data: tuple[Tensor, ...]) -> Callable[..., Any]:
        def through_vmap(position: Tensor, *data: Tensor) -> Any:
            return self._through_vmap(what, position, *data)

        def to_be_recorded(position: Tensor, *data: Tensor) -> Any:
            return self.to_be_recorded(what, position, *data)

        if mode == "eager":
            return through_vmap
        through_vmap(position, *data)  # if vmap refuses, it says so here and not from inside the recording
        try:
            return (compiled if mode == "compiled" else traced)(to_be_recorded, position, *data)
        except RuntimeError:  # something that cannot be recorded, such as a number taken out of a constant tensor
            return through_vmap

    def _through_vmap(self, what: str, position: Tensor, *data: Tensor) -> Any:
        function = self._value_of if what == "value" else self._gradient_of
        with no_hidden_loops():
            return vmap(function, in_dims=(0, *(None for _ in data)), randomness="different")(position, *data)

    def to_be_recorded(self, what: str, position: Tensor, *data: Tensor) -> Any:
        """The ``"value"``, or value and ``"gradient"``, of all chains, for those who record it in a graph.

        A single chain goes without ``vmap``: the plain products of matrices that then come are quicker.
        """
        if len(position) > 1:
            return self._through_vmap(what, position, *data)
        if what == "value":
            return self._value_of(position[0], *data).unsqueeze(0)
        value, gradient = self._gradient_of(position[0], *data)
        return value.unsqueeze(0), gradient.unsqueeze(0)

    def _value_of(self, flat: Tensor, *data: Tensor) -> Tensor:
        with unchecked_distributions():
            return self.function(flat, *data).reshape(()).to(flat.dtype)

    def _gradient_of(self, flat: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = grad_and_value(self._value_of)(flat, *data)
        return value, gradient

    def _one_by_one(self, what: str, position: Tensor, data: tuple[Tensor, ...]) -> Any:
        """Chain by chain; where a matrix cannot be factorised or inverted, the density is zero."""
        if what == "value":
            with torch.no_grad():
                return torch.stack([self._value_alone(flat, data) for flat in position])
        found = [self._gradient_alone(flat, data) for flat in position]
        return torch.stack([value for value, _ in found]), torch.stack([gradient for _, gradient in found])

    def _value_alone(self, flat: Tensor, data: tuple[Tensor, ...]) -> Tensor:
        try:
            return self._value_of(flat, *data)
        except NOT_FACTORISED:
            return torch.full_like(flat[0], -torch.inf)

    def _gradient_alone(self, flat: Tensor, data: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            start = flat.detach().clone().requires_grad_()
            value = self._value_alone(start, data)
            if not value.requires_grad:
                return value.detach(), torch.full_like(flat, torch.nan if value.isinf() else 0.0)
            (gradient,) = torch.autograd.grad(value, start, allow_unused=True)
        return value.detach(), torch.zeros_like(flat) if gradient is None else gradient


def refused_by_vmap(error: RuntimeError) -> bool:
    """Whether an error says that ``vmap`` cannot take something, and not that something is wrong."""
    text = str(error).lower()
    return any(
        word in text for word in ("vmap", "functorch", "batching rule", "in-place", "data-dependent", "batchedtensor")
    )


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Leave arguments of torch's distributions unchecked: a check is a branch, and out of range gives nan anyhow."""
    checks = torch.distributions.Distribution._validate_args
    torch.distributions.Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        torch.distributions.Distribution.set_default_validate_args(checks)


# --- recording and fusing --------------------------------------------------------------------------------------------


class Recorded:
    """A function of tensors that is recorded once for every set of shapes, and run as recorded from then on.

    Args:
        function: Takes tensors and returns tensors; it changes none of them.
        mode: ``"eager"`` (it is not recorded), ``"traced"`` or ``"compiled"``, see :class:`BatchedGradient`.
    """

    def __init__(self, function: Callable[..., Any], mode: str):
        self.function, self.mode = function, mode
        self._graphs: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor) -> Any:
        """What the function gives."""
        tensors = tuple(each.contiguous() for each in tensors)  # a graph takes what it was recorded for
        key = tuple((each.shape, each.dtype) for each in tensors)
        graph = self._graphs.get(key)
        if graph is None:
            with torch.random.fork_rng():  # a run that is resumed records again, and must not draw more for it
                graph = self._graphs[key] = self._prepare(*tensors)
        with torch.no_grad():
            return graph(*tensors)

    def _prepare(self, *example: Tensor) -> Callable[..., Any]:
        if self.mode == "eager":
            return self.function
        self.function(*example)  # if vmap refuses, it says so here and not from inside the recording
        try:
            return (compiled if self.mode == "compiled" else traced)(self.function, *example)
        except RuntimeError:  # something that cannot be recorded, such as a number taken out of a constant tensor
            return self.function


def traced(function: Callable[..., Any], *example: Tensor) -> Callable[..., Any]:
    """``function`` as the list of tensor operations it does on ``example``, made shorter and leaner."""
    graph = make_fx(function)(*example)
    graph.graph.eliminate_dead_code()
    simplify(graph)
    return graph


def join_shared_products(graph: Any) -> None:
    """Turn products of every chain's matrix with one that all chains share into a single large product.

    ``x Wᵀ`` for all W ``(C, m, k)`` is one product of ``(C m, k)`` with ``xᵀ``, which keeps the processor busier than C
    small ones: the first layer of a network with many inputs, and the gradient of its weights.
    """
    aten = torch.ops.aten
    for node in list(graph.graph.nodes):
        if node.target is not aten.bmm.default:
            continue
        left, right = (_shared(each) for each in node.args)
        if (left is None) == (right is None):
            continue

        def call(operation: Any, *arguments: Any) -> Any:
            return graph.graph.call_function(operation, arguments)

        chains, rows, columns = node.meta["val"].shape
        with graph.graph.inserting_before(node):
            if right is not None:  # (C, n, k) (k, m)
                flat = call(aten.reshape.default, node.args[0], [chains * rows, -1])
                found = call(aten.view.default, call(aten.mm.default, flat, right), [chains, rows, columns])
            else:  # (n, k) (C, k, m)
                flat = call(aten.reshape.default, call(aten.transpose.int, node.args[1], 1, 2), [chains * columns, -1])
                product = call(aten.mm.default, flat, call(aten.t.default, left))
                found = call(aten.transpose.int, call(aten.view.default, product, [chains, columns, rows]), 1, 2)
        node.replace_all_uses_with(found)
        graph.graph.erase_node(node)


def _shared(node: Any) -> Any:
    """The matrix that ``node`` repeats for every chain, or None."""
    shape = node.meta["val"].shape
    while node.target in (torch.ops.aten.view.default, torch.ops.aten.expand.default):
        node = node.args[0]
        here = node.meta["val"].shape
        if here == shape[1:]:
            return node if min(here) >= _LARGE else None
        if here != shape:
            return None
    return None


def compiled(function: Callable[..., Any], *example: Tensor) -> Callable[..., Any]:
    """``function`` recorded on ``example`` and fused by torch's compiler; as recorded where there is no compiler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what the compiler's own modules say of each other
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.decomposition import decompositions

    table = {**decompositions, torch.ops.aten.tanh.default: _tanh_that_fuses}
    graph = make_fx(function, decomposition_table=table)(*example)
    join_shared_products(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    for own_cache in (False, True):  # a compilation that was killed can leave a broken file in the shared cache
        try:
            with warnings.catch_warnings(), torch.no_grad(), _compiler_cache(own_cache):
                warnings.simplefilter("ignore")  # the compiler's remarks on the machine
                fused: Any = compile_fx(graph, list(example))
                fused(*example)
            return fused
        except Exception:  # no compiler here, a broken cache, an operation it cannot do
            continue
    return traced(function, *example)


@contextmanager
def _compiler_cache(own: bool) -> Iterator[None]:
    """Let the compiler use its usual cache, or one of its own for this process."""
    if not own:
        yield
        return
    before = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="knowable-compiler-")
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("TORCHINDUCTOR_CACHE_DIR")
        else:
            os.environ["TORCHINDUCTOR_CACHE_DIR"] = before


_NUMERATOR = (4.89352455891786e-03, 6.37261928875436e-04, 1.48572235717979e-05, 5.12229709037114e-08,
              -8.60467152213735e-11, 2.00018790482477e-13, -2.76076847742355e-16)  # fmt: skip
_DENOMINATOR = (4.89352518554385e-03, 2.26843463243900e-03, 1.18534705686654e-04, 1.19825839466702e-06)


def _tanh_that_fuses(x: Tensor) -> Any:
    return rational_tanh(x) if x.dtype == torch.float32 else NotImplemented  # the operation as it is


def rational_tanh(x: Tensor) -> Tensor:
    """Tanh in float32 as a quotient of polynomials, which fuses; the largest error is 4e-7."""
    clipped = x.clamp(-7.9, 7.9)
    square = clipped * clipped
    return clipped * _polynomial(_NUMERATOR, square) / _polynomial(_DENOMINATOR, square)


def _polynomial(coefficients: tuple[float, ...], x: Tensor) -> Tensor:
    total: Any = coefficients[-1]
    for coefficient in coefficients[-2::-1]:
        total = x * total + coefficient
    return total
