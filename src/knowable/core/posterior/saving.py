"""Saving and loading posteriors: a folder of safetensors and JSON that never contains code."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from knowable.core.model.joint_normal import JointNormal
from knowable.core.model.likelihood import Likelihood
from knowable.core.model.model import Model
from knowable.core.model.posterior_prior import PosteriorPrior
from knowable.core.model.prior import JointPrior, Prior, PriorByName
from knowable.core.network.network import copy_module
from knowable.core.network.outputs import Output, as_said
from knowable.core.network.params import Buffers, Params, with_prefix, without_prefix
from knowable.core.posterior.diagnostics import Diagnostics, LogEvidence
from knowable.core.posterior.training_rows import TrainingRows
from knowable.core.storage.folder import read_folder, tensor_fingerprint, write_folder
from knowable.core.support.checks import check_choice
from knowable.core.support.randomness import own_randomness
from knowable.errors import DamagedArtifact, InvalidArgument, InvalidType, KnowableError, NeedsClasses

if TYPE_CHECKING:
    from knowable.core.posterior.posterior import Posterior


KIND = "posterior"
FAMILIES: dict[str, type[Posterior]] = {}
"""Posterior classes by the name of their family in an artifact; they enter themselves."""


FROZEN = ("stored", "reference")


def save_posterior(
    posterior: Posterior, path: str | os.PathLike[str], *, overwrite: bool = False, frozen: str = "stored"
) -> Path:
    """Write ``posterior`` to a folder, atomically."""
    check_choice("frozen", frozen, FROZEN)
    model = posterior.model
    held, hashes = model.frozen_params(), {}
    if frozen == "reference":  # what the network itself has; values from elsewhere are stored in any case
        own = dict(model.net.named_parameters())
        hashes = {name: _hash(value) for name, value in held.items() if value.data_ptr() == own[name].data_ptr()}
    tensors = {
        **with_prefix("posterior.", posterior._tensors()),
        **with_prefix("point.", posterior.points),
        **with_prefix("buffer.", posterior.buffers),
        **with_prefix("frozen.", {name: value for name, value in held.items() if name not in hashes}),
    }
    prior, prior_tensors = _describe_prior(model.prior)
    content = {
        **describe_posterior(posterior),
        "network": {
            "class": type(model.net).__name__,
            "structure": describe(model.net),
            "parameters": {name: list(value.shape) for name, value in model.net.named_parameters()},
        },
        **_describe_dtypes(model),
        "likelihood": describe_object(model.likelihood),
        "prior": prior,
        "random": model.random_names,
        "frozen": sorted(model.frozen_names),
        **({"hashes": hashes} if hashes else {}),
        **_describe_output(model.network.output),
        **({} if model.network.autocast is None else {"autocast": _name(model.network.autocast)}),
    }
    tensors |= with_prefix("prior.", prior_tensors)
    if posterior.training_rows is not None:
        tensors |= with_prefix("training_rows.", posterior.training_rows.tensors())
    folder = write_folder(path, KIND, content, tensors, overwrite=overwrite)
    own = sorted({cls.__name__ for cls in classes_of(model) if not _is_knowables(cls)})
    if own:
        warnings.warn(
            f"The posterior has parts that are not knowable's own ({', '.join(own)}), and an artifact contains no "
            f"code: in a new process load it with knowable.load(path, classes=[{', '.join(own)}]).",
            NeedsClasses,
            stacklevel=3,
        )
    if content.get("output") == _FUNCTION:
        warnings.warn(
            "The model's output is a function, and an artifact contains no code: load it with "
            "knowable.load(path, net, output=function).",
            NeedsClasses,
            stacklevel=3,
        )
    return folder


def _hash(value: Tensor) -> str:
    """Of all of its values, its shape and its dtype."""
    return tensor_fingerprint(value, rows=max(1, value.numel()))


_FUNCTION = {"function": True}  # in place of an output that is a function


def _describe_output(output: Output | None) -> dict[str, Any]:
    """Which output of the network is meant, where that is said."""
    said = as_said(output)
    each = said.values() if isinstance(said, Mapping) else [said]
    plain = all(isinstance(one, str | int) for one in each)
    return {} if said is None else {"output": said if plain else _FUNCTION}


def load_posterior(
    path: str | os.PathLike[str],
    net: nn.Module | None = None,
    classes: Iterable[type] = (),
    output: Callable[[Any], Tensor] | None = None,
) -> Posterior:
    """Read a posterior; ``net`` is needed if the network was not made of plain ``torch.nn`` layers."""
    classes = _checked_classes(classes)
    content, tensors = read_folder(path, KIND)
    try:
        model = _load_model(content, tensors, net, classes, output)
        here = {name: value.to(model.device) for name, value in tensors.items()}
        own, points, buffers = (without_prefix(part, here) for part in ("posterior.", "point.", "buffer."))
        posterior = build_posterior(model, content, own, points=points, buffers=buffers)
        posterior.training_rows = TrainingRows.from_tensors(without_prefix("training_rows.", tensors))
        return posterior
    except KnowableError:
        raise
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamagedArtifact(f"{path} was written by another version of knowable, or by hand: {error}.") from None


def describe_posterior(posterior: Posterior) -> dict[str, Any]:
    """What an artifact says about a posterior besides its tensors and its model."""
    evidence = posterior.log_evidence
    return {
        "family": posterior.family,
        "settings": posterior._settings(),
        "seed": posterior.seed,
        "target_shape": posterior.target_shape,
        "diagnostics": posterior.diagnostics.to_json(),
        "log_evidence": None if evidence is None else [float(evidence), evidence.kind, evidence.standard_error],
    }


def build_posterior(
    model: Model, description: dict[str, Any], tensors: dict[str, Tensor], *, points: Params, buffers: Buffers
) -> Posterior:
    """The inverse of :func:`describe_posterior`, with the posterior's own ``tensors``."""
    evidence = description["log_evidence"]
    shape = description.get("target_shape")
    posterior = FAMILIES[description["family"]]._from_tensors(
        model,
        tensors,
        **description.get("settings", {}),
        points=points,
        buffers=buffers,
        diagnostics=Diagnostics.from_json(description["diagnostics"]),
        log_evidence=None if evidence is None else LogEvidence(*evidence),
        seed=description["seed"],
    )
    named = isinstance(shape, dict)
    posterior.target_shape = (
        {name: tuple(each) for name, each in shape.items()} if named else None if shape is None else tuple(shape)
    )
    return posterior


def describe_object(value: Any) -> Any:
    """A likelihood or prior as JSON: its class name and fields."""
    if not isinstance(value, Likelihood | Prior):
        return [describe_object(each) for each in value] if isinstance(value, tuple) else value
    if not is_dataclass(value) or vars(value).keys() - {f.name for f in fields(value)}:
        raise InvalidArgument(
            f"{type(value).__name__} cannot be saved: make it a frozen dataclass whose fields are plain numbers."
        )
    own = {} if _is_knowables(type(value)) else {"own": True}
    kind = {"kind": "likelihood"} if isinstance(value, Likelihood) else {}
    return {
        "name": type(value).__name__,
        **own,
        **kind,
        **{f.name: describe_object(getattr(value, f.name)) for f in fields(value) if f.init},
    }  # type: ignore[arg-type]


def build_object(description: Any, base: type, classes: Sequence[type] = ()) -> Any:
    """The inverse of :func:`describe_object`; only known subclasses of ``base`` and the given ``classes`` are made."""
    if isinstance(description, list):
        return tuple(build_object(each, base, classes) for each in description)
    if not isinstance(description, dict):
        return description
    base = Likelihood if description.get("kind") == "likelihood" else base
    found = [cls for cls in (*_subclasses(base), *classes) if issubclass(cls, base)]
    built_in = {cls.__name__: cls for cls in found if _is_knowables(cls)}
    given = {cls.__name__: cls for cls in classes if issubclass(cls, base)}
    if description.get("own"):  # a name may be that of a class of each kind
        known = {cls.__name__: cls for cls in found if not _is_knowables(cls)}
    else:
        known = {**given, **built_in}
    name = description["name"]
    if name not in known:
        raise DamagedArtifact(
            f"The saved posterior has a {base.__name__.lower()} {name!r}, which this version does not have. "
            f"If it is a class of your own, pass it: load(path, classes=[{name}])."
        )
    cls = known[name]
    made = {f.name: build_object(description[f.name], Prior, classes) for f in fields(cls) if f.name in description}
    missing = [f.name for f in fields(cls) if f.init and f.name not in made and f.default is MISSING]
    if missing:
        raise KeyError(missing[0])
    return cls(**made)


def classes_of(model: Model) -> list[type]:
    """Classes of the likelihood and of all priors, those inside others too."""
    priors = list(model.prior.globs.values()) if isinstance(model.prior, PriorByName) else []
    found: list[Any] = [model.likelihood, *priors]
    for each in found:
        found += [value for value in tree_leaves(list(vars(each).values())) if isinstance(value, Prior | Likelihood)]
    return [type(each) for each in found]


def _is_knowables(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "knowable"


def _checked_classes(classes: Iterable[type]) -> list[type]:
    given: list[type] = list(classes) if isinstance(classes, Iterable) else [classes]
    for each in given:
        if not (isinstance(each, type) and issubclass(each, Likelihood | Prior)):
            raise InvalidType(f"classes must be a list of likelihood and prior classes, got {each!r}.")
    return given


def _load_model(
    content: dict[str, Any], tensors: dict[str, Tensor], net: nn.Module | None, classes: Sequence[type], output: Any
) -> Model:
    saved = content.get("output")
    if (saved == _FUNCTION) != (output is not None):
        raise InvalidArgument(
            "The model's output is a function, which the artifact cannot hold: pass it as load(path, net, output=...)."
            if output is None
            else f"output is for models whose output is a function; that of this one is {saved!r}. Leave it out."
        )
    frozen = without_prefix("frozen.", tensors)
    if net is None and content.get("hashes"):
        raise InvalidArgument(
            f"This posterior was saved without its {len(content['hashes'])} frozen parameters (frozen='reference'): "
            f"pass the network that has them, load(path, net)."
        )
    if net is None:
        structure = content["network"]["structure"]
        if structure is None:
            raise InvalidArgument(
                f"This posterior's network ({content['network']['class']}) is not made of plain torch.nn layers, each "
                f"used once: pass it, with the same structure, as load(path, net=...)."
            )
        with own_randomness(0):
            net = build(structure).to(_dtype(content["dtype"]))
        for name, dtype in content.get("dtypes", {}).items():
            net.get_parameter(name).data = net.get_parameter(name).data.to(_dtype(dtype))
    _check_network(net, content)
    _check_references(net, content.get("hashes", {}))
    net = _with_values(net, frozen)
    prior = _build_prior(content["prior"], without_prefix("prior.", tensors), classes)
    fixed = prior.fixed if isinstance(prior, PosteriorPrior) else {}
    likelihood, own_frozen = (
        build_object(content["likelihood"], Likelihood, classes),
        [n for n in content["frozen"] if n not in fixed],
    )
    picks, autocast = saved if output is None else output, content.get("autocast")
    autocast = None if autocast is None else _dtype(autocast)
    return Model(net, likelihood, prior, random=content["random"], frozen=own_frozen, output=picks, autocast=autocast)


def _describe_dtypes(model: Model) -> dict[str, Any]:
    """That of the network's first parameter, and of each where they differ."""
    own = {name: _name(value.dtype) for name, value in model.net.named_parameters()}
    first = next(iter(own.values()), _name(model.dtype))
    return {"dtype": first} if set(own.values()) <= {first} else {"dtype": first, "dtypes": own}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_references(net: nn.Module, hashes: dict[str, str]) -> None:
    """Refuse a network whose frozen parameters are not those that the posterior was fitted with."""
    own = dict(net.named_parameters())
    other = [name for name, expected in hashes.items() if _hash(own[name]) != expected]
    if other:
        raise InvalidArgument(
            f"net is not the network this posterior was fitted with: {', '.join(other[:3])}{', ...' * (len(other) > 3)}"
            f" of its {len(hashes)} frozen parameters, which were saved by reference, {'have' if other[1:] else 'has'} "
            f"other values. Load the weights that it had then."
        )


def _with_values(net: nn.Module, values: Params) -> nn.Module:
    """The network with other values of some parameters, in a copy that shares the memory of all others.

    All of its parameters require a gradient: the artifact says what is frozen.
    """
    every = dict(net.named_parameters())
    same = all(torch.equal(every[name].detach().cpu(), value) for name, value in values.items())
    if same and all(value.requires_grad for value in every.values()):
        return net
    shared: dict[int, Any] = {id(buffer): buffer for buffer in net.buffers()}
    for name, value in every.items():
        other = values.get(name, value.detach())
        shared[id(value)] = nn.Parameter(value.detach() if same else other.to(value.device))
    return copy_module(net, shared)


def _dtype(name: str) -> torch.dtype:
    if name not in ("float16", "bfloat16", "float32", "float64"):
        raise DamagedArtifact(f"The saved posterior has an unknown dtype {name!r}.")
    return getattr(torch, name)


def _check_network(net: nn.Module, content: dict[str, Any]) -> None:
    """Refuse a network other than the one that was saved."""
    if not isinstance(net, nn.Module):
        raise InvalidType(f"net must be a torch.nn.Module, got {type(net).__name__}.")
    saved = {name: tuple(shape) for name, shape in content["network"]["parameters"].items()}
    own = {name: tuple(value.shape) for name, value in net.named_parameters()}
    for name in [*saved, *own]:
        if own.get(name) != saved.get(name):
            raise InvalidArgument(
                f"net is not the network this posterior was fitted with: parameter {name!r} has shape "
                f"{own.get(name, 'none')} in net and {saved.get(name, 'none')} in the saved posterior."
            )
    dtype = next((str(value.dtype).removeprefix("torch.") for value in net.parameters()), content["dtype"])
    if dtype != content["dtype"]:
        raise InvalidArgument(f"net is {dtype}, the saved posterior {content['dtype']}: convert net first.")
    structure, given = content["network"]["structure"], describe(net)
    if structure is not None and given is not None and structure != given:
        raise InvalidArgument(
            "net has the saved network's parameters but other layers. Leave net out, or pass the same one."
        )


def _describe_prior(prior: JointPrior) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if isinstance(prior, PriorByName):
        return {"globs": {glob: describe_object(each) for glob, each in prior.globs.items()}}, {}
    if isinstance(prior, PosteriorPrior):
        means = prior.normal.means
        tensors = {
            **with_prefix("loc.", means),
            **with_prefix("fixed.", prior.fixed),
            **with_prefix("buffers.", prior.buffers),
            **prior.normal.tensors(),
        }
        return {"posterior": prior.normal.kind, "order": list(means)}, tensors
    raise InvalidArgument(f"A model whose prior is {prior!r} cannot be saved.")


def _build_prior(description: Mapping[str, Any], tensors: dict[str, Tensor], classes: Sequence[type]) -> Any:
    if "globs" in description:
        return {glob: build_object(each, Prior, classes) for glob, each in description["globs"].items()}
    loc, fixed, buffers = (without_prefix(part, tensors) for part in ("loc.", "fixed.", "buffers."))
    loc = {name: loc[name] for name in description.get("order") or loc}
    normal = JointNormal.kinds[description["posterior"]].from_tensors(loc, dict(tensors))
    return PosteriorPrior(normal, fixed=fixed, buffers=buffers)


def _subclasses(base: type) -> set[type]:
    return {base} | {each for direct in base.__subclasses__() for each in _subclasses(direct)}


# --- a network's structure as JSON, so that a posterior can be loaded without its network's source -------------------
#
# Only layers on this list are ever instantiated, with plain numbers, strings and booleans; anything else is not
# described, and loading then asks for the network.

_LAYERS = frozenset(
    {
        *("Linear", "Bilinear", "Identity", "Flatten", "Embedding", "Upsample", "ZeroPad2d", "PixelShuffle"),
        *(f"{kind}{n}d" for kind in ("Conv", "ConvTranspose", "MaxPool", "AvgPool", "BatchNorm") for n in (1, 2, 3)),
        *(f"Adaptive{kind}Pool{n}d" for kind in ("Avg", "Max") for n in (1, 2, 3)),
        *("LayerNorm", "GroupNorm", "RMSNorm", "InstanceNorm1d", "InstanceNorm2d"),
        *("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout"),
        *("ReLU", "ReLU6", "LeakyReLU", "PReLU", "ELU", "SELU", "CELU", "GELU", "SiLU", "Mish", "Tanh", "Sigmoid"),
        *("Softplus", "Softsign", "Hardtanh", "Hardswish", "Hardsigmoid", "Softmax", "LogSoftmax", "LogSigmoid"),
    }
)
_LEFT_OUT = ("device", "dtype", "inplace", "_weight", "_freeze", "min_value", "max_value", "args", "kwargs")
_MOST_MODULES = 100_000


def describe(net: nn.Module) -> dict[str, Any] | None:
    """The structure of ``net``, or None if it has a part that cannot be described (tied weights are such a part)."""
    tensors = [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]
    if len({id(value) for _, value in tensors}) < len(tensors):
        return None
    return _describe(net)


def _describe(net: nn.Module) -> dict[str, Any] | None:
    name = type(net).__name__
    changed = "forward" in vars(net) or net._forward_hooks or net._forward_pre_hooks
    if type(net) is not getattr(nn, name, None) or changed:
        return None
    if name == "Sequential":
        children = {key: None if child is None else _describe(child) for key, child in net._modules.items()}
        return None if None in children.values() else {"layer": name, "children": children}
    if name not in _LAYERS:
        return None
    try:
        names = [*inspect.signature(type(net).__init__).parameters][1:]
        arguments = {key: _argument(net, key) for key in names if key not in _LEFT_OUT}
    except AttributeError:
        return None
    return {"layer": name, "arguments": arguments} if all(_plain(value) for value in arguments.values()) else None


def build(description: dict[str, Any]) -> nn.Module:
    """The network of a description, with weights not yet filled in."""
    try:
        return _build(description, [0])
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise DamagedArtifact(f"The saved network structure cannot be built: {error}. Pass net= instead.") from None


def _build(description: dict[str, Any], count: list[int]) -> nn.Module:
    count[0] += 1
    if count[0] > _MOST_MODULES:
        raise ValueError("too many layers")
    name = description["layer"]
    if name == "Sequential":
        container = nn.Sequential()
        for key, child in description["children"].items():
            container.add_module(key, _build(child, count))
        return container
    if name not in _LAYERS:
        raise ValueError(f"{name!r} is not a known layer")
    arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in description["arguments"].items()}
    return getattr(nn, name)(**arguments)


def _argument(net: nn.Module, name: str) -> Any:
    value = getattr(net, name)
    if name == "bias":
        return value is not None
    return list(value) if isinstance(value, tuple) else value


def _plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(_plain(each) for each in value)
    return value is None or isinstance(value, bool | int | float | str)
