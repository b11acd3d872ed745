"""Record a function of tensors once, and run it as a graph of tensor operations from then on.

``vmap`` and ``grad`` cost more per call than the arithmetic of a small network. So they are applied once: the tensor
operations of a call are recorded for the shapes at hand (``make_fx``), and later calls run that flat list, which
torch's compiler may also fuse. :class:`Recorded` is the one mechanism; :class:`BatchedGradient` (the gradient of every
chain), fused sampler steps, compiled training losses and ensembles use it.
"""

from __future__ import annotations

import os
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from knowable.core.compiling.simplify import simplify
from knowable.core.network.batched import LINEAR_ALGEBRA_ERROR, batched
from knowable.core.network.inputs import Structure, flattened, taking_flat
from knowable.core.support.tensors import keep_free_memory
from knowable.core.support.time_limit import time_left

Function = Callable[..., Tensor]  # (flat (D,), *data) -> scalar
_LARGE = 128  # both sides of a matrix that all chains share: below it one product for all chains is no faster
_COMPILE_AFTER = 20_000  # calls: by then a long run is likely, and compiling (seconds) pays for itself
_TIME_TO_COMPILE = 60.0  # seconds that must be left for it where time is limited
_COMPILE_AFTER_OUTSIDE = 100  # gradients taken outside fused steps before they get a compiled graph of their own


class Recorded:
    """A function of tensors that is recorded once for every set of shapes, and run as recorded from then on.

    A function that cannot be recorded, because it reads a value out of a tensor, runs its own code.

    Args:
        function: Takes tensors (or :class:`~knowable.core.network.inputs.Inputs`, of which the graph takes the tensors)
            and returns tensors; it changes none of them.
        mode: ``"eager"`` (run the function itself), ``"traced"`` (run the recorded operations), ``"compiled"`` (fuse
            them with torch's compiler), or a function that returns one of these at each call.
        record: The same function in the form to be recorded, where that differs.
    """

    def __init__(
        self, function: Callable[..., Any], mode: str | Callable[[], str], *, record: Callable[..., Any] | None = None
    ):
        self.function, self.record = function, record or function
        self.mode = mode
        self._graphs: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *tensors: Tensor) -> Any:
        """The function's result."""
        tensors = tuple([each.contiguous() for each in tensors])  # a graph is recorded for one memory layout
        mode = self.mode if isinstance(self.mode, str) else self.mode()
        flat, structure = flattened(tensors)
        key = mode, structure, tensors[0].dtype, *[each.shape for each in flat]
        graph = self._graphs.get(key)
        if graph is None:
            with torch.random.fork_rng():  # a resumed run records again, and must draw the same random numbers
                graph = self._graphs[key] = self._prepare(mode, structure, *flat)
        with torch.no_grad():
            return graph(*flat)

    def _prepare(self, mode: str, structure: Structure, *example: Tensor) -> Callable[..., Any]:
        function, record = (taking_flat(each, structure) for each in (self.function, self.record))
        if mode == "eager":
            return function
        function(*example)  # if vmap refuses, its error comes from here and not from inside the recording
        try:
            return (compiled if mode == "compiled" else traced)(record, *example)
        except RuntimeError:  # a value is read out of a tensor
            return function


# --- the gradient of a log density, for all chains ------------------------------------------------------------------


class BatchedGradient:
    """``(position (C, D), *data) -> value (C,), gradient (C, D)`` of a function of one position.

    A function that ``vmap`` refuses (data-dependent branches, recurrent layers) is differentiated chain by chain.

    Args:
        function: Takes one flat position ``(D,)`` and the data, returns a scalar.
        mode: ``"eager"`` (through ``vmap`` at every call), ``"traced"`` (recorded once per shape), ``"compiled"``
            (recorded and fused; seconds of warm-up), or ``"auto"`` (traced, and compiled after many calls).

    Attributes:
        calls: Gradients of all chains taken so far; a resumed run sets it, so that it compiles at the same call.
        direct: How many of them were taken outside fused steps since compiling began.
    """

    def __init__(self, function: Function, *, mode: str = "auto"):
        keep_free_memory()
        self.function, self.mode = function, mode
        self.calls = self.direct = 0
        self._may_compile = True
        self._time_suffices: bool | None = None  # to compile; None: not yet checked
        self._value, self._gradient = (
            batched(
                Recorded(partial(self._through_vmap, what), mode_now, record=partial(self.operations, what)),
                partial(self._one_by_one, what),
            )
            for what, mode_now in (("value", self._mode_of_values), ("gradient", self._mode_of_gradients))
        )

    @property
    def compiling(self) -> bool:
        """Whether sampler steps are compiled: see :class:`~knowable.core.chains.fused_step.FusedStep`."""
        if not self._may_compile or self._gradient.refused:
            return False
        return self.mode == "compiled" or (
            self.mode == "auto" and self.calls > _COMPILE_AFTER and self._enough_time_to_compile()
        )

    @contextmanager
    def uncompiled(self) -> Iterator[None]:
        """For a few gradients in shapes that do not come again, for which compiling would not pay."""
        self._may_compile = False
        try:
            yield
        finally:
            self._may_compile = True

    def _enough_time_to_compile(self) -> bool:
        if self._time_suffices is None:
            left = time_left()
            self._time_suffices = left is None or left > _TIME_TO_COMPILE
        return self._time_suffices

    def value_and_grad(self, position: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
        """Values and gradients."""
        self.calls += 1
        if self.mode != "traced":
            self.direct += self.compiling
        value, gradient = self._gradient(position, *data)
        return value, gradient.contiguous()

    def value(self, position: Tensor, *data: Tensor) -> Tensor:
        """Values alone."""
        return self._value(position, *data)

    def _mode_of_values(self) -> str:
        return "eager" if self.mode == "eager" else "traced"

    def _mode_of_gradients(self) -> str:
        if self.mode in ("eager", "traced"):
            return self.mode
        return "compiled" if self.direct > _COMPILE_AFTER_OUTSIDE and self.compiling else "traced"

    def operations(self, what: str, position: Tensor, *data: Tensor) -> Any:
        """The ``"value"``, or value and ``"gradient"``, of all chains as plain operations, to be recorded in a graph.

        A single chain goes without ``vmap``: plain products of matrices are faster than batches of one.
        """
        if len(position) > 1:
            return self._through_vmap(what, position, *data)
        if what == "value":
            return self._value_of(position[0], *data).unsqueeze(0)
        value, gradient = self._gradient_of(position[0], *data)
        return value.unsqueeze(0), gradient.unsqueeze(0)

    def _through_vmap(self, what: str, position: Tensor, *data: Tensor) -> Any:
        function = self._value_of if what == "value" else self._gradient_of
        return vmap(function, in_dims=(0, *(None for _ in data)), randomness="different")(position, *data)

    def _value_of(self, flat: Tensor, *data: Tensor) -> Tensor:
        with unchecked_distributions():
            return self.function(flat, *data).reshape(()).to(flat.dtype)

    def _gradient_of(self, flat: Tensor, *data: Tensor) -> tuple[Tensor, Tensor]:
        gradient, value = grad_and_value(self._value_of)(flat, *data)
        return value, gradient

    def _one_by_one(self, what: str, position: Tensor, *data: Tensor) -> Any:
        """Chain by chain; where a matrix cannot be factorised or inverted, the density is zero."""
        if what == "value":
            with torch.no_grad():
                return torch.stack([self._value_alone(flat, data) for flat in position])
        found = [self._gradient_alone(flat, data) for flat in position]
        return torch.stack([value for value, _ in found]), torch.stack([gradient for _, gradient in found])

    def _value_alone(self, flat: Tensor, data: tuple[Tensor, ...]) -> Tensor:
        try:
            return self._value_of(flat, *data)
        except LINEAR_ALGEBRA_ERROR:
            return torch.full_like(flat[0], -torch.inf)

    def _gradient_alone(self, flat: Tensor, data: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            start = flat.detach().clone().requires_grad_()
            value = self._value_alone(start, data)
            if not value.requires_grad:
                return value.detach(), torch.full_like(flat, torch.nan if value.isinf() else 0.0)
            (gradient,) = torch.autograd.grad(value, start, allow_unused=True)
        return value.detach(), torch.zeros_like(flat) if gradient is None else gradient


@contextmanager
def unchecked_distributions() -> Iterator[None]:
    """Leave arguments of torch's distributions unchecked: a check is a branch, and out of range gives NaN anyway.

    The setting is one for the whole process: of several threads, the first one to enter changes it, and the last one to
    leave puts it back.
    """
    with _UNCHECKED.lock:
        if _UNCHECKED.inside == 0:
            _UNCHECKED.before = torch.distributions.Distribution._validate_args
            torch.distributions.Distribution.set_default_validate_args(False)
        _UNCHECKED.inside += 1
    try:
        yield
    finally:
        with _UNCHECKED.lock:
            _UNCHECKED.inside -= 1
            if _UNCHECKED.inside == 0:
                torch.distributions.Distribution.set_default_validate_args(_UNCHECKED.before)


@dataclass
class _Unchecked:
    """How many contexts leave distributions unchecked now, and what the setting was before the first."""

    lock: Any = field(default_factory=threading.Lock)
    inside: int = 0
    before: bool = True


_UNCHECKED = _Unchecked()


# --- recording and compiling -----------------------------------------------------------------------------------------


def traced(function: Callable[..., Any], *example: Tensor) -> Callable[..., Any]:
    """``function`` as the list of tensor operations that it runs on ``example``, simplified."""
    # shape and type of each result are kept as a fake tensor: unless all share one mode, each makes its own, and that
    # takes longer than the rest of the recording
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
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
        warnings.simplefilter("ignore")  # deprecation warnings of the compiler's own modules
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.decomposition import decompositions

    table = {**decompositions, torch.ops.aten.tanh.default: _tanh_that_fuses}
    graph = make_fx(function, decomposition_table=table)(*example)
    join_shared_products(graph)
    graph.graph.eliminate_dead_code()
    graph.recompile()
    for own_cache in (False, True):  # a compilation that was killed can leave a broken file in the shared cache
        try:
            # random numbers of the graph come from torch's own generator, as in the code that is not compiled
            with (
                config.patch(fallback_random=True),
                warnings.catch_warnings(),
                torch.no_grad(),
                _compiler_cache(own_cache),
            ):
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
