"""A second device that is only pretended: tensors in ordinary memory that refuse to meet those of the CPU.

Inside :func:`simulated_device` some tensors are marked as being elsewhere: their ``device`` is ``SIMULATED``, what is
computed from them is marked too, and operations that a real accelerator refuses are refused: tensors of two devices in
one operation (single numbers of the CPU may join, and indices), ``numpy()``, random numbers from a generator of another
device. All numbers are real.

Marks belong to storages, so that views have them, and are set below autograd and ``torch.func``: gradients and batched
tensors have them as well.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

SIMULATED = torch.device("cuda:7")
"""The name of the device: one that torch knows, and no machine of ours has."""

_MARKED: dict[int, StorageWeakRef] = {}
_CPU = torch.device("cpu")
_TO_ANOTHER = {"aten::copy_", "aten::_to_copy", "aten::_copy_from_and_resize"}
_WITH_INDICES = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_unsafe_index", "aten::_index_put_impl_"}
_READ = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero"}


def mark(*tensors: Tensor) -> None:
    """Put tensors on the simulated device, where they are in memory."""
    for value in tensors:
        storage = _plain(value).untyped_storage()
        _MARKED[storage._cdata] = StorageWeakRef(storage)


def on_device(net: nn.Module) -> nn.Module:
    """The network, on the simulated device."""
    mark(*net.parameters(), *net.buffers())
    return net


def is_marked(value: Tensor) -> bool:
    """Whether a tensor is on the simulated device."""
    plain = _plain(value)
    if plain.layout != torch.strided:
        return False
    found = _MARKED.get(plain.untyped_storage()._cdata)
    return found is not None and not found.expired()


def _plain(value: Tensor) -> Tensor:
    """The tensor inside those of ``torch.func``."""
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    while functorch.is_functorch_wrapped_tensor(value):
        value = functorch.get_unwrapped(value)
    return value


class _Generator(torch.Generator):
    """A generator that knows on which device it pretends to be."""

    simulated: bool

    def __new__(cls, device: Any = "cpu") -> _Generator:
        made = super().__new__(cls, _CPU)  # type: ignore[call-arg]
        made.simulated = torch.device(device) == SIMULATED
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return SIMULATED if self.simulated else _CPU


class _Below(TorchDispatchMode):
    """Marks what operations make of marked tensors, and refuses to mix."""

    def __init__(self, reads: list[str]):
        super().__init__()
        self.reads = reads  # operations that wait for the device: what they return depends on values there

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        marked = [each for each in given if is_marked(each)]
        if marked and name not in _TO_ANOTHER:
            judged = given
            if name in _WITH_INDICES and is_marked(args[0]):
                judged = [args[0], *(each for each in args[2:] if isinstance(each, Tensor))]  # indices may be elsewhere
            if any(each.dim() > 0 and not is_marked(each) for each in judged):
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but found at least two devices, {SIMULATED} and "
                    f"cpu! ({name}: {[(tuple(each.shape), is_marked(each)) for each in given]})"
                )
        if marked and name in _READ:
            self.reads.append(name)
        result = func(*args, **(kwargs or {}))
        if name == "aten::copy_":
            return result
        if marked:
            mark(*(each for each in tree_leaves(result) if isinstance(each, Tensor) and each.layout == torch.strided))
        return result


_DEVICE = torch.Tensor.device.__get__  # type: ignore[attr-defined]
_IS_CPU = torch.Tensor.is_cpu.__get__  # type: ignore[attr-defined]
_ORDINARY = (Tensor, nn.Parameter)
_NUMPY = (torch.Tensor.numpy, torch.Tensor.__array__)


class _Above(TorchFunctionMode):
    """Answers what Python code asks about devices, and moves tensors."""

    def __init__(self, reads: list[str]):
        super().__init__()
        self.reads = reads

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (_DEVICE, _IS_CPU):
            here = is_marked(args[0])
            if func == _DEVICE:
                return SIMULATED if here else func(*args)
            return not here and func(*args)
        if func in _NUMPY and is_marked(args[0]):
            raise TypeError(f"can't convert {SIMULATED} device type tensor to numpy. Use Tensor.cpu() first.")
        if func is torch.Tensor.tolist and is_marked(args[0]):
            self.reads.append("tolist")
        if func in (torch.Tensor.to, torch.Tensor.cpu, torch.Tensor.cuda):
            return self._moved(func, args, kwargs)
        wanted = kwargs.get("device")
        wanted = None if wanted is None else torch.device(wanted)
        generator = kwargs.get("generator")
        if generator is not None:
            given = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
            place = wanted or (SIMULATED if any(map(is_marked, given)) else _CPU)
            if generator.device != place:
                raise RuntimeError(f"Expected a {place.type!r} device type for generator but found {generator.device}")
        own = [each for each in types if each not in _ORDINARY and "__torch_function__" in vars(each)]
        if own:  # a tensor with rules of its own, whose code asks about devices too
            with self:
                return own[0].__torch_function__(func, types, args, kwargs)
        if wanted is None:
            return func(*args, **kwargs)
        result = func(*args, **{**kwargs, "device": _CPU})
        return self._put(result, wanted)

    def _moved(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        value, rest = args[0], list(args[1:])
        wanted = SIMULATED if is_marked(value) else _CPU
        if func is torch.Tensor.cpu:
            return self._put(value, _CPU)
        for place, each in enumerate(rest):
            if isinstance(each, str | torch.device):
                wanted, rest[place] = torch.device(each), _CPU
            elif isinstance(each, Tensor):
                wanted, rest[place] = SIMULATED if is_marked(each) else _CPU, each.dtype
        if kwargs.get("device") is not None:
            wanted, kwargs["device"] = torch.device(kwargs["device"]), _CPU
        return self._put(func(value, *rest, **kwargs), wanted)

    def _put(self, value: Tensor, wanted: torch.device) -> Tensor:
        if is_marked(value) == (wanted == SIMULATED):
            return value
        value = value.clone()
        if wanted == SIMULATED:
            mark(value)
        else:
            self.reads.append("cpu")
            _MARKED.pop(_plain(value).untyped_storage()._cdata, None)
        return value


@contextmanager
def simulated_device() -> Iterator[list[str]]:
    """Run a block on a machine with a second device; what waits for that device is written into the list yielded."""
    reads: list[str] = []
    ordinary = torch.Generator
    torch.Generator = _Generator  # type: ignore[misc, assignment]
    try:
        with _Below(reads), _Above(reads):
            yield reads
    finally:
        torch.Generator = ordinary  # type: ignore[misc]
        _MARKED.clear()
