"""Saving and loading posteriors: a folder of safetensors and JSON that never contains code."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from knowable.core.model.likelihood import Likelihood
from knowable.core.model.model import Model
from knowable.core.model.posterior_prior import PosteriorPrior
from knowable.core.model.prior import JointPrior, Prior, PriorByName
from knowable.core.network.network import copy_module
from knowable.core.network.outputs import Output, as_said
from knowable.core.network.params import Buffers, Params, with_prefix, without_prefix
from knowable.core.posterior.diagnostics import Diagnostics, LogEvidence
from knowable.core.posterior.structure import build, describe
from knowable.core.posterior.training_rows import TrainingRows
from knowable.core.storage.files import Files, as_path, destination
from knowable.core.storage.folder import read_mapped, tensor_fingerprint, write_folder
from knowable.core.storage.tensor_file import Unchecked
from knowable.core.support.checks import check_choice
from knowable.core.support.randomness import own_randomness
from knowable.errors import DamagedArtifact, InvalidArgument, InvalidType, KnowableError, NeedsClasses, Unsupported

if TYPE_CHECKING:
    from knowable.core.posterior.posterior import Posterior


KIND = "posterior"
FAMILIES: dict[str, type[Posterior]] = {}
"""Posterior classes by the name of their family in an artifact; they enter themselves."""


FROZEN = ("stored", "reference")


def save_posterior(
    posterior: Posterior, path: str | os.PathLike[str], *, overwrite: bool = False, frozen: str = "stored"
) -> Path:
    """Write ``posterior`` to a folder or a single file, atomically."""
    content, tensors = describe_whole(posterior, frozen=frozen)
    with destination(path, overwrite=overwrite) as folder:
        write_folder(folder, KIND, content, tensors, overwrite=overwrite)
    own = own_classes(posterior.model)
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
    return as_path(path)


def describe_whole(posterior: Posterior, *, frozen: str = "stored") -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What an artifact holds: of the posterior, of its model and of its network, as JSON and tensors by name."""
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
        **({"citation": list(posterior.citation)} if posterior.citation else {}),
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
    return content, tensors


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
    path: str | os.PathLike[str] | Files,
    net: nn.Module | None = None,
    classes: Iterable[type] = (),
    output: Callable[[Any], Tensor] | None = None,
) -> Posterior:
    """Read a posterior; ``net`` is needed if the network was not made of plain ``torch.nn`` layers."""
    classes = _checked_classes(classes)
    content, tensors, unchecked = read_mapped(path, KIND, _may_be_mapped)
    try:
        return build_whole(content, tensors, net, classes, output, unchecked)
    except KnowableError:
        raise
    except Exception as error:  # whatever a manifest that nobody of ours wrote leads to
        raise foreign(path, error) from error


def _may_be_mapped(content: dict[str, Any], name: str) -> bool:
    """Whether a tensor is the draws of a chain, of which a prediction uses a few."""
    return content.get("family") == "chains" and name.startswith("posterior.stack.")


def foreign(path: Any, error: Exception) -> DamagedArtifact:
    """The error of an artifact whose content makes no sense."""
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return DamagedArtifact(f"{path} was written by another version of knowable, or by hand: {what[:300]}.")


def _check_draw(posterior: Posterior) -> None:
    """Refuse tensors that do not make weights of the model: now, and not in a prediction."""
    buffers = {name: value.shape for name, value in posterior.model.buffers().items()}
    if any(buffers.get(name) != value.shape for name, value in posterior.buffers.items()):
        raise DamagedArtifact("The saved buffers are not those of the network.")
    try:
        draw = posterior.sample(1, generator=torch.Generator(posterior.model.device).manual_seed(0))
    except Unsupported:  # a posterior over functions
        return
    for name, value in posterior.model.params().items():
        if name not in draw or draw[name].shape != (1, *value.shape):
            found = tuple(draw[name].shape[1:]) if name in draw else "missing"
            raise DamagedArtifact(
                f"A draw of {name!r} must have shape {tuple(value.shape)}; what was saved is {found}."
            )
        if not bool(draw[name].isfinite().all()):
            raise DamagedArtifact(f"A draw of {name!r} is not finite: the saved numbers are not those of a posterior.")


def build_whole(
    content: dict[str, Any],
    tensors: dict[str, Tensor],
    net: nn.Module | None = None,
    classes: Sequence[type] = (),
    output: Callable[[Any], Tensor] | None = None,
    unchecked: Unchecked | None = None,
) -> Posterior:
    """The inverse of :func:`describe_whole`; tensors may be mapped from a file whose hash is not checked yet."""
    model = _load_model(content, tensors, net, classes, output)
    if unchecked is not None and model.device.type != "cpu":  # all of it is moved, hence used
        unchecked.check_all()
        unchecked = None
    here = {name: value.to(model.device) for name, value in tensors.items()}
    own, points, buffers = (without_prefix(part, here) for part in ("posterior.", "point.", "buffer."))
    posterior = build_posterior(model, content, own, points=points, buffers=buffers)
    posterior.training_rows = TrainingRows.from_tensors(without_prefix("training_rows.", tensors))
    posterior.citation = tuple(str(key) for key in content.get("citation", ()))
    posterior.check_when_used(unchecked)
    _check_draw(posterior)
    return posterior


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
    if type(description["seed"]) is not int or description["seed"] < 0:
        raise DamagedArtifact(f"The seed of the saved posterior is {str(description['seed'])[:80]!r}, which is none.")
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


def own_classes(model: Model) -> list[str]:
    """Names of those that are not knowable's, which a new process has to be given."""
    return sorted({cls.__name__ for cls in classes_of(model) if not _is_knowables(cls)})


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
            net = build(structure, stored=sum(value.numel() for value in tensors.values()))
            net = net.to(_dtype(content["dtype"]))
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
    for name, value in values.items():
        if name not in every or every[name].shape != value.shape:
            raise DamagedArtifact(f"The saved frozen parameter {name!r} is not one of the network's.")
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
    if not all(type(size) is int for shape in saved.values() for size in shape):
        raise DamagedArtifact("The saved shapes of the network's parameters are not made of whole numbers.")
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
    about, tensors = prior.described()
    return ({} if isinstance(prior, PosteriorPrior) else {"joint": prior.kind}) | about, tensors


def _build_prior(description: Mapping[str, Any], tensors: dict[str, Tensor], classes: Sequence[type]) -> Any:
    kind = description.get("joint", PosteriorPrior.kind if "posterior" in description else None)
    if kind is not None:
        return JointPrior.kinds[kind].from_description(description, tensors)
    return {glob: build_object(each, Prior, classes) for glob, each in description["globs"].items()}


def _subclasses(base: type) -> set[type]:
    return {base} | {each for direct in base.__subclasses__() for each in _subclasses(direct)}
