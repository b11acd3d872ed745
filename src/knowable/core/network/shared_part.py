"""The part of a network that some of its weights have no influence on, run once for all their values.

Draws of a Bayesian head differ in the head alone; what the frozen layers compute before it is the same for all of them.
The network runs once, watched: which calls of submodules gave results that no varying tensor and no random number had
a part in. Their outputs are kept. Every further run, with other values of the varying tensors, takes them from there
and computes the rest. It is the user's own ``forward`` that runs each time, so that ``vmap``, derivatives and hooks
work as always.

Dependence is followed from operation to operation through the memory that they read and write. What is not seen to be
independent counts as dependent; where Python code asks for the value of a dependent tensor, nothing is shared.
"""

from __future__ import annotations

import bisect
import copy
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten

from knowable.core.network.params import Buffers, Params
from knowable.core.support.randomness import own_randomness

if TYPE_CHECKING:
    from knowable.core.network.network import Network

Place = tuple[str, int]
"""A call of a submodule: its path, and how many calls of it came before."""


@dataclass(frozen=True)
class Result:
    """What a call returned."""

    output: Any  # a tree of tensors
    read: tuple[bool, ...]  # of its leaves: False where only such calls use it, and zeros that take no memory are there
    changed: bool  # whether the network works on it in place, so that every run needs a copy


Features = dict[Place, Result]
"""The results of the calls that are the same for all."""

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device, slice)


class SharedPart:
    """Runs a network with the results of some calls of its submodules given.

    Args:
        network: A network that may be changed: a copy.
    """

    def __init__(self, network: Network):
        self.network = network
        self._running: _Recording | _Replaying | None = None
        self._known: dict[tuple[frozenset[str], bool], tuple[list[nn.Module], dict[str, bool]]] = {}
        self.possible = not any(isinstance(each, torch.jit.ScriptModule) for each in network.net.modules())
        for training in (True, False) if self.possible else ():
            for path, module in network.modules(training=training).items():
                if path:
                    module.forward = _Watched(self, path, module.forward)  # type: ignore[method-assign]

    def features(
        self, params: Params, varying: Collection[str], x: Tensor, buffers: Buffers, *, training: bool = False
    ) -> Features | None:
        """What is the same for all values of the ``varying`` parameters and buffers; None where nothing is.

        Args:
            params: Values of the parameters and of the buffers that vary, of the varying ones any that are typical.
            varying: Their names.
            x: Inputs, one row each.
            buffers: The other buffers.
            training: Of the network in training mode.
        """
        modules, fixed = self._modules(frozenset(varying), training)
        if not self.possible or not any(fixed.values()):
            return None
        buffers = dict(buffers)  # code that assigns them would put its own in their place
        own = {name: params[name].clone() for name in varying}  # in memory that no other tensor shares
        known = [*params.values(), *buffers.values(), *tree_leaves(x), *_tensors([vars(each) for each in modules])]
        recording = _Recording(own.values(), known, fixed.keys())
        try:
            with torch.no_grad(), own_randomness(0), self._as(recording), recording:
                output = self.network({**params, **own}, x, buffers=buffers, training=training)
        except (RuntimeError, NotImplementedError):  # a tensor without memory of its own, or an error of the network
            return None
        if recording.failed:  # now what is inside of them, and every time that follows
            for path in recording.failed:
                del fixed[path]
            return self.features(params, varying, x, buffers, training=training)
        found = recording.found(output)
        return found if found is not None and any(fixed[path] for path, _ in found) else None

    def _modules(self, varying: frozenset[str], training: bool) -> tuple[list[nn.Module], dict[str, bool]]:
        """All modules, and those without a varying tensor by path: whether they have weights."""
        if (varying, training) not in self._known:
            modules = self.network.modules(training=training)
            fixed = {path: any(True for _ in each.parameters()) for path, each in _without(modules, varying).items()}
            self._known[varying, training] = list(modules.values()), fixed
        return self._known[varying, training]

    def __call__(self, params: Params, x: Tensor, features: Features, buffers: Buffers) -> Tensor:
        """The network's output, with ``features`` as the results of the calls that they belong to."""
        with self.replaying(features):
            return self.network(params, x, buffers=buffers)

    def replaying(self, features: Features) -> AbstractContextManager[None]:
        """A context in which calls of the network find ``features`` in the places of their results."""
        return self._as(_Replaying(features))

    @contextmanager
    def _as(self, running: _Recording | _Replaying) -> Iterator[None]:
        before, self._running = self._running, running
        try:
            yield
        finally:
            self._running = before

    def call(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A submodule's call; outside of a run of this part (a block that is recomputed for a gradient) as it is."""
        return forward(*args, **kwargs) if self._running is None else self._running.call(path, forward, args, kwargs)


def _without(modules: Mapping[str, nn.Module], varying: Collection[str]) -> dict[str, nn.Module]:
    """The submodules that hold no tensor of these names, and whose own submodules have no hooks."""
    named = dict(modules[""].named_parameters()) | dict(modules[""].named_buffers())
    own = {id(named[name]) for name in varying}
    return {
        path: module
        for path, module in modules.items()
        if path
        and not any(id(each) in own for each in (*module.parameters(), *module.buffers()))
        and not any(_has_hooks(each) for each in module.modules() if each is not module)
    }


class _Watched:
    """A module's ``forward`` that reports its calls. Copies of the module report to the same part."""

    def __init__(self, part: SharedPart, path: str, forward: Callable[..., Any]):
        self.part, self.path, self.forward = part, path, forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.part.call(self.path, self.forward, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Watched:
        return _Watched(self.part, self.path, copy.deepcopy(self.forward, memo))


class _Replaying:
    """A run in which some calls give what is known of them."""

    def __init__(self, features: Features):
        self.features, self.calls = features, Counter[str]()

    def call(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        place = (path, self.calls[path])
        self.calls[path] += 1
        if place not in self.features:
            return forward(*args, **kwargs)
        found = self.features[place]
        return tree_map_only(Tensor, torch.clone, found.output) if found.changed else found.output


@dataclass
class _Call:
    """A call that no varying tensor had a part in."""

    place: Place
    start: int  # operations before it
    stop: int  # operations until its end
    output: Any
    memory: list[int | None]  # of each leaf of its output
    used: set[int] = field(default_factory=set)  # memory that was read
    read: set[int] = field(default_factory=set)  # by an operation outside of all such calls
    written: bool = False  # changed in place by such an operation
    lost: set[int] = field(default_factory=set)  # changed by a later call, before anyone else read it


class _Recording(TorchDispatchMode):
    """A run in which the calls are found that varying tensors have no part in."""

    def __init__(self, varying: Iterable[Tensor], known: Iterable[Tensor], fixed: Collection[str]):
        super().__init__()
        self.fixed = fixed
        self.held = list(varying)  # kept alive, so that their memory is not used again
        self.touched = {_memory(each) for each in self.held}
        self.known = {_memory(each) for each in known}
        self.time = self.dependent = 0
        self.calls: list[_Call] = []
        self.counts = Counter[str]()
        self.inside = False  # a call that seems independent is running
        self.made: dict[int, _Call] = {}  # by memory: the last call that returned it
        self.reads: list[tuple[int, _Call, int]] = []
        self.failed: set[str] = set()  # modules that depend on something after all
        self.branches = False  # whether Python code saw the value of a dependent tensor

    # --- operations --------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = _tensors(args) + _tensors(kwargs)
        written = _written(func, args, kwargs or {})
        for each in given:
            self._reads(_memory(each), changes=any(each is other for other in written))
        depends = _draws_random_numbers(func, args, kwargs or {}) or any(self._depends(each) for each in given)
        if func is torch.ops.aten.lift_fresh.default:  # a constant of the code, if it is a single number
            depends = given[0].numel() > 1
        result = func(*args, **(kwargs or {}))
        self.time += 1
        made = [*_tensors(result), *written]
        if depends:
            self.dependent += 1
            self.held += made
            self.touched.update(map(_memory, made))
            self.branches |= isinstance(result, bool | int | float | complex)
        else:
            for each in made:
                self.known.add(_memory(each))
        return result

    def _depends(self, each: Tensor) -> bool:
        memory = _memory(each)
        return memory in self.touched or memory not in self.known

    def _reads(self, memory: int, *, changes: bool) -> None:
        call = self.made.get(memory)
        if call is None:
            return
        if changes and self.inside and memory not in call.used:  # no one else has seen it as it was
            call.lost.add(memory)
        elif changes and not call.written:
            call.output = tree_map_only(Tensor, torch.clone, call.output)
            call.written = not self.inside
        call.used.add(memory)
        self.reads.append((self.time, call, memory))

    # --- calls -------------------------------------------------------------------------------------------------------

    def call(self, path: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        place = (path, self.counts[path])
        self.counts[path] += 1
        if self.inside or path not in self.fixed:
            return forward(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        plain = all(isinstance(each, (Tensor, *_PLAIN)) for each in leaves)
        may_be = plain and not any(self._depends(each) for each in _tensors(leaves))
        start, dependent = self.time, self.dependent
        self.inside = may_be
        try:
            output = forward(*args, **kwargs)
        finally:
            self.inside = False
        leaves = tree_leaves(output)
        same = self.dependent == dependent and all(isinstance(each, (Tensor, *_PLAIN)) for each in leaves)
        if may_be and not same:
            self.failed.add(path)
        elif may_be:
            memory = [_memory(each) if isinstance(each, Tensor) else None for each in leaves]
            call = _Call(place, start, self.time, output, memory)
            self.calls.append(call)
            self.made.update((each, call) for each in memory if each is not None)
        return output

    def found(self, output: Any) -> Features | None:
        """The results of all independent calls."""
        if self.branches:
            return None
        starts = [call.start for call in self.calls]
        for time, call, memory in self.reads:
            within = bisect.bisect_right(starts, time) - 1
            if within < 0 or time >= self.calls[within].stop:
                call.read.add(memory)
        for memory in map(_memory, _tensors(output)):
            if memory in self.made:
                self.made[memory].read.add(memory)
        if any(call.read & call.lost for call in self.calls):
            return None
        return {call.place: _result(call) for call in self.calls}


def _result(call: _Call) -> Result:
    leaves, spec = tree_flatten(call.output)
    read = tuple(memory is None or memory in call.read for memory in call.memory)
    kept = [
        each if wanted else each.new_zeros(()).expand(each.shape) for each, wanted in zip(leaves, read, strict=True)
    ]
    return Result(tree_unflatten(kept, spec), read, call.written)


def _tensors(tree: Any) -> list[Tensor]:
    """All tensors in tuples, lists and dicts: of every operation, where ``torch.utils._pytree`` would be slow."""
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple | list) else ()
    return [found for each in parts if not isinstance(each, _PLAIN) for found in _tensors(each)]


def _memory(each: Tensor) -> int:
    """Identifies the memory of a tensor, which its views share."""
    return each.untyped_storage()._cdata


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors that an operation changes in place."""
    if not func._schema.is_mutable:
        return []
    given = _by_name(func, args, kwargs)
    changed = [each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    return _tensors([given.get(name) for name in changed])


def _draws_random_numbers(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    takes_rate = any(each.name == "dropout_p" for each in func._schema.arguments)  # fused attention
    return not takes_rate or _by_name(func, args, kwargs).get("dropout_p", 0.0) > 0


def _by_name(func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operation that were given."""
    return {each.name: value for each, value in zip(func._schema.arguments, args, strict=False)} | kwargs


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)
