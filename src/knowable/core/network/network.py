"""A network as a pure function of parameters and buffers.

The user's module is never changed. Two structural copies, one in training mode and one in evaluation mode, share its
tensors (nothing is duplicated in memory), so switching mode touches neither the user's module nor anything another call
is using.

What happens to running statistics: in training, batch normalisation uses the statistics of the batch and updates the
buffers it is handed, which belong to the fit, and so does code that assigns a buffer (``self.m = ...``); in evaluation,
and so in every prediction and under ``vmap``, the buffers stay as they are. A module whose parameters are all frozen
stays in evaluation mode during training too.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves, tree_map_only

from knowable.core.network.batched import batched
from knowable.core.network.inputs import call, check_arguments, described
from knowable.core.network.outputs import Output, check_output, picked, refuse_output
from knowable.core.network.params import Buffers, Params, index_params, number_of_draws
from knowable.core.network.recomputation import RUN_ONCE_MORE
from knowable.core.network.refusals import rows_to_try, why_refused
from knowable.core.network.shared_part import SharedPart
from knowable.core.support.randomness import own_randomness
from knowable.errors import InvalidArgument, InvalidData, InvalidType, KnowableError

_ROWS_TRIED, _TRIES = 32, 3  # to find out whether training mode differs from evaluation mode
DRAWS_AT_ONCE = 8  # in one batched call: more save little and take memory
_STATISTICS_BATCH = 256  # rows whose statistics are taken together

_Held = list[tuple[dict[str, Any], str, Any]]
"""Tensors and their places: in a module's parameters or buffers, by the name there."""


class Network:
    """The pure function ``(params, x, buffers) -> output`` of an unmodified module.

    ``x`` is a tensor or :class:`~knowable.core.network.inputs.Inputs`, which are spread as the module's arguments.
    """

    def __init__(
        self, net: nn.Module, frozen: Collection[str] = (), held: Params | None = None, output: Output | None = None,
        autocast: torch.dtype | None = None,
    ):  # fmt: skip
        """Wrap ``net``; parameters in ``held`` take these values where the module's own would be used.

        ``output`` says which tensor of what the module returns is meant. With ``autocast`` the module runs under
        ``torch.autocast`` of that dtype, and its output is in single precision.
        """
        check_module(net)
        self.net, self.output, self.autocast = net, check_output(output), check_autocast(autocast)
        self._frozen, self._held = frozen, held or {}
        self._dtypes, self._full, self._input_dtype = _own_dtypes(net, frozen)
        self._evaluating = _Swappable(_structural_copy(net, self._held).eval())
        self._training = _Swappable(_structural_copy(net, self._held).train())
        _hold_frozen_modules_in_evaluation(self._training.module, frozen)
        self._all_draws = batched(_draws_together, _draws_in_turn)
        self._counting: _Swappable | None = None  # made when statistics are first asked for
        self._shared: SharedPart | None = None  # made when several draws first share a part of the network

    def copy(self) -> Network:
        """The same network once more, with modules of its own that may be changed (see :meth:`modules`)."""
        return self.holding(self._frozen, self._held)

    def holding(self, frozen: Collection[str], held: Params) -> Network:
        """The same network with other parameters frozen, and with these values."""
        made = Network(self.net, frozen, held, self.output, self.autocast)
        made._input_dtype = self._input_dtype
        return made

    def returning(self, output: Output | None) -> Network:
        """The same network, of which another output is meant."""
        return Network(self.net, self._frozen, self._held, output, self.autocast)

    def modules(self, *, training: bool) -> dict[str, nn.Module]:
        """The modules that run in one of the two modes, by path: to look at, or in a :meth:`copy` to change.

        The user's module has no part in it: what is changed here (a rate, a hook) stays here.
        """
        return dict((self._training if training else self._evaluating).module.named_modules())

    def params(self) -> Params:
        """Copies of what every parameter is when a call does not say."""
        return {name: value.detach().clone() for name, value in self._evaluating.module.named_parameters()}

    def own_params(self, names: Collection[str]) -> Params:
        """What these parameters are when a call does not say, in the memory of the module."""
        return {name: value.detach() for name, value in self._evaluating.module.named_parameters() if name in names}

    def buffers(self) -> Buffers:
        """Copies of the module's current buffers."""
        return {name: value.detach().clone() for name, value in self.net.named_buffers()}

    def __call__(self, params: Params, x: Tensor, *, buffers: Buffers | None = None, training: bool = False) -> Tensor:
        """Run the module with ``params`` (and ``buffers``) in place of its own; the rest is the module's."""
        swappable = self._training if training else self._evaluating
        try:
            if self.autocast is not None or self._dtypes:
                return self._in_own_dtypes(swappable, params, x, buffers or {}, training)
            found = swappable({**params, **buffers} if buffers else params, x, buffers if training else None)
            return found if self.output is None else picked(found, self.output)
        except ValueError as error:
            if training and "more than 1 value per channel" in str(error):
                raise InvalidData(
                    "Batch normalisation needs at least 2 rows in every batch of training, and got one of 1 row: a "
                    "single row has no variance. Use a larger batch_size, with a loader drop_last=True, or more rows."
                ) from error
            raise

    def own_input(self, x: Tensor) -> Tensor:
        """``x`` in the dtype that the module itself takes."""
        return x if self._input_dtype is None or not x.is_floating_point() else x.to(self._input_dtype)

    def _in_own_dtypes(
        self, swappable: _Swappable, params: Params, x: Tensor, buffers: Buffers, training: bool
    ) -> Tensor:
        """The output in full precision of a network that computes with less, by its own dtypes or by autocast."""
        params = {name: value.to(self._dtypes.get(name, value.dtype)) for name, value in params.items()}
        x = self.own_input(x)
        context = nullcontext()
        if self.autocast is not None:
            context = torch.autocast(x.device.type, dtype=self.autocast, cache_enabled=False)
        with context:
            found = swappable({**params, **buffers}, x, buffers if training else None)
        found = found if self.output is None else picked(found, self.output)
        return found.to(self._full) if isinstance(found, Tensor) and found.is_floating_point() else found

    def over_draws(
        self,
        stack: Params,
        x: Tensor,
        *,
        buffers: Buffers | None = None,
        vectorise: bool,
        at_once: int | None = None,
    ) -> Tensor:
        """Outputs ``(K, batch, ...)`` for a stack of K draws, in evaluation mode.

        Buffers that differ from draw to draw are in ``stack`` like parameters; ``buffers`` are those all draws share.
        ``vectorise`` asks for batched calls, of ``at_once`` draws each (None: all of them); a module that ``vmap``
        refuses is called draw by draw instead. What does not depend on the tensors that differ runs once.
        """
        shared = {name: value for name, value in (buffers or {}).items() if name not in stack}
        own = {name: value for name, value in stack.items() if value.stride(0) != 0}  # the others are expanded
        if number_of_draws(stack) == 1 or not own:
            own = stack
        function = self.given(index_params(stack, 0), own, x, shared)
        return (self._all_draws if vectorise else _draws_in_turn)(function, own, at_once)

    def given(
        self, params: Params, varying: Collection[str], x: Tensor, buffers: Buffers
    ) -> Callable[[Params], Tensor]:
        """The outputs at ``x`` as a function of the parameters (and buffers) whose names are ``varying``.

        What they have no influence on, such as the frozen layers before a random head, is computed once, here.
        ``params`` has the values of all others, and typical ones of these.
        """
        common = {name: value for name, value in params.items() if name not in varying}
        part = self._shared_part(params, x) if common or self._frozen else None
        features = None if part is None else part.features(params, varying, x, buffers)
        if part is None or features is None:
            return lambda own: self({**common, **own}, x, buffers=buffers)
        return lambda own: part({**common, **own}, x, features, buffers)

    def _shared_part(self, params: Params, x: Tensor) -> SharedPart | None:
        """What runs a part of the network once; not where gradients are wanted, which the part itself may need."""
        if torch.is_grad_enabled() or any(map(_is_wrapped, tree_leaves((params, x)))):
            return None
        self._shared = self._shared or SharedPart(self.copy())
        return self._shared

    def is_steady(self, params: Params, x: Tensor, buffers: Buffers) -> bool:
        """Whether training mode computes what evaluation mode does: no batch statistics, no dropout.

        It is found out by trying, a few times, on the first rows of ``x``.
        """
        rows = x[:_ROWS_TRIED]
        with torch.no_grad(), own_randomness(0):
            expected = self(params, rows, buffers=buffers)
            for _ in range(_TRIES):
                own = {name: value.clone() for name, value in buffers.items()}
                try:
                    output = self(params, rows, buffers=own, training=True)
                except ValueError:  # batch statistics of a single row
                    return False
                if not torch.allclose(output, expected, rtol=1e-4, atol=1e-5, equal_nan=True):
                    return False
                if any(not torch.equal(value, own[name]) for name, value in buffers.items()):
                    return False
        return True

    @property
    def statistics_names(self) -> list[str]:
        """Names of the running statistics that training updates: those of batch normalisation that is not frozen."""
        return [
            f"{path}.{name}" if path else name
            for path, module in self._training.module.named_modules()
            if _keeps_statistics(module)
            for name, _ in module.named_buffers(recurse=False)
        ]

    def statistics(self, params: Params, x: Tensor, buffers: Buffers) -> Buffers:
        """``buffers`` with the running statistics that these ``params`` have on the inputs ``x``.

        They are the plain mean over batches, of the network as it predicts: all but the normalisation is in evaluation
        mode.
        """
        if self._counting is None:
            self._counting = _Swappable(_counting_copy(self._training.module))
        own = {name: value.clone() for name, value in buffers.items()}
        for name in self.statistics_names:
            own[name].fill_(1.0 if name.endswith("running_var") else 0.0)
        with torch.no_grad():
            for rows in _even_parts(x, _STATISTICS_BATCH):
                self._in_own_dtypes(self._counting, params, rows, own, False)
        return own

    def _tried(self, params: Params, x: Tensor, buffers: Buffers | None) -> Tensor:
        """The output; a network of several dtypes that refuses inputs in full precision gets them with fewer digits."""
        try:
            return self(params, x, buffers=buffers)
        except RuntimeError:
            few = [dtype for dtype in self._dtypes.values() if dtype != self._full]
            if self._input_dtype is not None or not few:
                raise
            self._input_dtype = few[0]
            try:
                return self(params, x, buffers=buffers)
            except RuntimeError:
                self._input_dtype = None
                raise

    def _check_arguments(self, x: Tensor) -> None:
        check_arguments(self.net, x)

    def probe(self, x: Tensor, params: Params, buffers: Buffers | None = None) -> Tensor:
        """The output for the first rows of ``x``, or a clear error if the module cannot take them."""
        self._check_arguments(x)
        rows = rows_to_try(self._evaluating.module, x)
        try:
            with torch.no_grad():
                output = self._tried(params, x[rows], buffers)
        except KnowableError:  # a part of ours inside the network, which says what is wrong itself
            raise
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            why = why_refused(self._evaluating.module, lambda some: self(params, some, buffers=buffers), x, rows)
            said = str(error).splitlines()[0].replace(f"[{len(rows)}, ", "[rows, ")  # of those tried
            raise InvalidData(f"The network cannot take {described(x)}: {why or said}") from error
        refuse_output(output)
        if output.dim() == 0 or output.shape[0] != len(rows):
            advice = "Batches come first (use batch_first=True in recurrent and attention layers)."
            if isinstance(x, Tensor) and (x.dim() == 1 or output.dim() > 0):
                advice = f"If x of shape {tuple(x.shape)} is one row, write x[None]; or X[:1] and not X[0]. {advice}"
            raise InvalidData(
                f"The network's output must have one row per row of x: when tried on {len(rows)} rows it had shape "
                f"{tuple(output.shape)}. {advice}"
            )
        return output


def _own_dtypes(
    net: nn.Module, frozen: Collection[str]
) -> tuple[dict[str, torch.dtype], torch.dtype, torch.dtype | None]:
    """Of parameters that are trained in another dtype than their own: that; the dtype of training; that of inputs.

    Inputs of a network that is all of one dtype with few digits have that one; others are tried.
    """
    every = {name: value.dtype for name, value in net.named_parameters()}
    trained = {name: dtype for name, dtype in every.items() if name not in frozen}
    full = full_dtype(trained.values())
    if all(dtype == full for dtype in trained.values()):
        return {}, full, None
    kinds = set(every.values())
    return trained, full, kinds.pop() if len(kinds) == 1 else None


def full_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """In which numbers of these dtypes are trained: single precision, or double where any of them is."""
    return torch.float64 if torch.float64 in list(dtypes) else torch.float32


def check_autocast(autocast: Any) -> torch.dtype | None:
    """Refuse what is not a dtype of fewer digits."""
    if autocast not in (None, torch.bfloat16, torch.float16):
        raise InvalidArgument(f"autocast must be torch.bfloat16, torch.float16 or None, got {autocast!r}.")
    return autocast


def _draws_together(function: Callable[[Params], Tensor], stack: Params, at_once: int | None) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # fused attention cannot be batched
        return vmap(function, randomness="different", chunk_size=at_once)(stack)


def _draws_in_turn(function: Callable[[Params], Tensor], stack: Params, at_once: int | None) -> Tensor:
    return torch.stack([function(index_params(stack, k)) for k in range(number_of_draws(stack))])


class _Swappable:
    """A module that runs with other tensors in the places of its own, and has its own back afterwards.

    What ``torch.func.functional_call`` does, with the places looked up once and not at every call. Blocks that are
    checkpointed see the same tensors when the backward pass runs them once more.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self._spares_input = False  # whether it was seen not to work in place on its input; until then it gets a copy
        first: dict[int, str] = {}  # a tied tensor goes by the name of its first use
        self._places: dict[str, list[tuple[dict[str, Any], str]]] = {}
        for path, owner in module.named_modules():
            for store in (owner._parameters, owner._buffers):
                for key, value in store.items():
                    if value is not None:
                        name = first.setdefault(id(value), f"{path}.{key}" if path else key)
                        self._places.setdefault(name, []).append((store, key))

    def __call__(self, tensors: Mapping[str, Tensor], x: Tensor, updated: Buffers | None = None) -> Tensor:
        """Run the module; buffers that its code assigns are put into ``updated``, by the names there."""
        held = [(store, key, value) for name, value in tensors.items() for store, key in self._places[name]]
        return self._holding(held, self._run, x, updated)

    def _run(self, x: Any, updated: Buffers | None) -> Tensor:
        output = call(self.module, x) if self._spares_input else self._run_on_a_copy(x)
        if updated:
            for name, value in updated.items():
                store, key = self._places[name][0]
                if store[key] is not value:
                    updated[name] = _of_this_call(name, store[key])
        return output

    def _run_on_a_copy(self, x: Any) -> Tensor:
        given = tree_map_only(Tensor, torch.clone, x)
        before = _versions(given)
        output = call(self.module, given)
        self._spares_input = before is not None and _versions(given) == before
        return output

    def _holding(self, tensors: _Held, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function returns while the module has these tensors."""
        before = [(store, key, store[key]) for store, key, _ in tensors]
        token = RUN_ONCE_MORE.set(self._with_these)
        try:
            for store, key, value in tensors:
                store[key] = value
            return function(*args, **kwargs)
        finally:
            RUN_ONCE_MORE.reset(token)
            for store, key, value in before:
                store[key] = value

    def _with_these(self, block: Callable[..., Any]) -> Callable[..., Any]:
        """``block`` with the tensors that the module has now, whenever it is called."""
        now = [(store, key, store[key]) for places in self._places.values() for store, key in places]
        return lambda *args, **kwargs: self._holding(now, block, *args, **kwargs)


def _versions(x: Any) -> list[int] | None:
    """How often each tensor was changed in place; None where torch does not count it."""
    tensors = [each for each in tree_leaves(x) if isinstance(each, Tensor)]
    uncounted = any(each.is_inference() or _is_wrapped(each) for each in tensors)
    return None if uncounted else [each._version for each in tensors]


def _is_wrapped(value: Tensor) -> bool:
    """Whether a tensor belongs to a running ``vmap`` or derivative of ``torch.func``."""
    functorch: Any = torch._C._functorch  # type: ignore[attr-defined]
    return functorch.is_functorch_wrapped_tensor(value)


def _of_this_call(name: str, value: Tensor) -> Tensor:
    """The new value of a buffer, to be kept."""
    if _is_wrapped(value):  # one value for each draw; an error that asks for a loop
        raise RuntimeError(f"The network assigns its buffer {name!r}, which cannot be done for several draws at once.")
    return value.detach().clone()


def check_module(net: nn.Module) -> None:
    """Refuse what is not a network of finite, real parameters."""
    if not isinstance(net, nn.Module):
        raise InvalidType(f"net must be a torch.nn.Module, got {type(net).__name__}.")
    params = dict(net.named_parameters())
    lazy = [name for name, value in params.items() if isinstance(value, nn.parameter.UninitializedParameter)]
    if lazy:
        raise InvalidArgument(f"net has lazy parameters without a shape yet ({lazy[0]}). Run it once on a batch first.")
    unreal = [name for name, value in params.items() if not value.is_floating_point()]
    if unreal:
        hint = " Hold its real and imaginary part: torch.view_as_complex in forward." * params[unreal[0]].is_complex()
        raise InvalidArgument(
            f"net's parameters must be real floating point, got {params[unreal[0]].dtype} in {unreal[0]!r}.{hint}"
        )
    for name, value in params.items():
        if value.numel() and not torch.stack(torch.aminmax(value.detach())).isfinite().all():
            raise InvalidArgument(
                f"net parameter {name!r} has missing or infinite values. Initialise the network again."
            )


def _structural_copy(net: nn.Module, held: Params) -> nn.Module:
    """A copy of the module tree that shares the memory of every parameter and buffer with the original.

    The copies' parameters want no gradient: frozen ones are not differentiated, and nothing is left on the original's.
    Of modules that ``torch.compile`` made, the copy runs the original code.
    """
    shared: dict[int, Any] = {id(buffer): buffer for buffer in net.buffers()}
    for name, param in net.named_parameters():
        shared[id(param)] = nn.Parameter(held.get(name, param).detach(), requires_grad=False)
    made = copy_module(net, shared)
    for module in made.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.sparse = False  # sparse gradients are for torch's own optimisers
        if isinstance(module, _compiled_modules()):
            module.forward = module._orig_mod.__call__  # type: ignore[union-attr]
        elif type(module) is nn.Embedding and module.padding_idx is not None:
            module.own_padding = module.weight.detach()[module.padding_idx].clone()  # type: ignore[assignment]
            module.forward = partial(_embedding_with_own_padding, module)  # type: ignore[method-assign]
    return made


def copy_module(net: nn.Module, shared: Mapping[int, Any] | None = None) -> nn.Module:
    """A deep copy, which shares what is in ``shared`` by the id of the original.

    Tensors that the module keeps of an earlier call (by a hook, or ``weight_norm``) are copied without their graph.
    """
    kept = [value for module in net.modules() for value in tree_leaves(list(vars(module).values()))]
    known = {id(value): value.detach() for value in kept if isinstance(value, Tensor) and not value.is_leaf}
    try:
        return copy.deepcopy(net, {**known, **(shared or {})})
    except Exception as error:
        raise InvalidArgument(
            f"net cannot be copied ({error}). Remove open files, locks or generators from it."
        ) from error


def _embedding_with_own_padding(module: nn.Embedding, indices: Tensor) -> Tensor:
    """Padding stays the network's own vector: no data informs it, and draws from its prior would be noise."""
    padding = (indices == module.padding_idx).unsqueeze(-1)
    own: Tensor = module.own_padding  # type: ignore[assignment]
    return torch.where(padding, own.to(module.weight.dtype), nn.Embedding.forward(module, indices))


def _compiled_modules() -> tuple[type[nn.Module], ...]:
    """The class that ``torch.compile`` wraps a module in, if it is loaded: what it calls, no function mode sees."""
    loaded = sys.modules.get("torch._dynamo.eval_frame")
    return () if loaded is None else (loaded.OptimizedModule,)


def _hold_frozen_modules_in_evaluation(net: nn.Module, frozen: Collection[str]) -> None:
    for path, module in net.named_modules():
        names = [f"{path}.{name}" if path else name for name, _ in module.named_parameters()]
        if names and all(name in frozen for name in names):
            module.eval()


def _keeps_statistics(module: nn.Module) -> bool:
    """Whether a module is batch normalisation in training mode that keeps running statistics."""
    return isinstance(module, _BatchNorm) and module.training and module.track_running_stats


def _counting_copy(training: nn.Module) -> nn.Module:
    """A copy in which only the layers that keep statistics are in training mode, and average all batches alike."""
    shared: dict[int, Any] = {id(value): value for value in (*training.parameters(), *training.buffers())}
    made = copy_module(training, shared)
    counted = [module for module in made.modules() if _keeps_statistics(module)]
    made.eval()
    for module in counted:
        module.train()
        module.momentum = None  # type: ignore[assignment]  # a plain mean over batches
    return made


def _even_parts(x: Tensor, most: int) -> tuple[Tensor, ...]:
    """Rows in parts of nearly equal size, none of them a single row unless it is the only one."""
    return x.tensor_split(-(-len(x) // most))
