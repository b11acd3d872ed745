"""Estimators on disk: a folder with the schema as JSON and the posterior, without code in it."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from knowable.core.method import Method
from knowable.core.model.likelihood import Likelihood
from knowable.core.model.prior import Prior
from knowable.core.posterior.saving import build_object, describe_object, load_posterior
from knowable.core.storage.files import Files, as_path, destination, whole_folder
from knowable.core.storage.folder import (
    FORMAT_VERSION,
    SIGNATURE,
    manifest_hash,
    read_document,
    refuse_existing,
    write_document,
)
from knowable.core.support.files import check_folder
from knowable.errors import DamagedArtifact, InvalidArgument, KnowableError
from knowable.registry import METHODS, find_method
from knowable.tabular.auto import Choice
from knowable.tabular.networks import network_from_json, network_to_json
from knowable.tabular.schema import Schema

if TYPE_CHECKING:
    from knowable.tabular.estimators import BayesianEstimator

DESCRIPTION, POSTERIOR, KIND = "estimator.json", "posterior", "estimator"
_PLAIN = ("budget", "time_limit", "samples", "precision", "verbose")


def save_estimator(estimator: BayesianEstimator, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write a fitted estimator to a folder or a single file, atomically."""
    content = {
        "estimator": type(estimator).__name__,
        "schema": estimator.schema_.to_json(),
        "network": network_to_json(estimator.model_.net),
        "inputs": list(estimator.input_names_),
        "named": "feature_names_in_" in vars(estimator),
        "seed": estimator.seed_,
        "choice": {"method": _describe_method(estimator.method_), "why": estimator.choice_.why},
        "settings": _describe_settings(estimator),
    }
    with destination(path, overwrite=overwrite) as folder:
        check_folder(folder, ours=_is_ours)
        if not overwrite:
            refuse_existing(folder, DESCRIPTION)
        with whole_folder(folder) as new:
            estimator.posterior_.save(new / POSTERIOR)
            own = manifest_hash(new / POSTERIOR)
            write_document(new / DESCRIPTION, KIND, {"posterior": own, "content": content})
    return as_path(path)


def load_estimator(
    known: Sequence[type], path: str | os.PathLike[str] | Files, network: nn.Module | None
) -> BayesianEstimator:
    """Read an estimator, which must be of one of the ``known`` classes."""
    import numpy as np

    files = Files.at(path)
    try:
        content, own = _read_description(files)
        cls: Any = next((each for each in known if each.__name__ == content["estimator"]), None)
        if cls is None:
            raise InvalidArgument(f"{files} holds a {content['estimator']}: write {content['estimator']}.load.")
        if own is not None and manifest_hash(files.folder(POSTERIOR)) != own:
            raise DamagedArtifact(f"{files.folder(POSTERIOR)} is not the posterior of this estimator.")
        estimator = cls(**_build_settings(content["settings"], network))
        estimator.schema_ = Schema.from_json(content["schema"])
        estimator.input_names_ = tuple(content["inputs"])
        estimator.n_features_in_ = len(estimator.input_names_)
        if content["named"]:
            estimator.feature_names_in_ = np.array(estimator.input_names_, dtype=object)
        estimator.seed_ = content["seed"]
        estimator.method_ = _build_method(content["choice"]["method"])
        estimator.choice_ = Choice(estimator.method_, content["choice"]["why"])
        made = network_from_json(content["network"]) if network is None else network
        estimator.posterior_ = load_posterior(files.folder(POSTERIOR), made)
        estimator.model_ = estimator.posterior_.model
        return estimator
    except KnowableError:
        raise
    except Exception as error:  # whatever a description that nobody of ours wrote leads to
        raise DamagedArtifact(f"{files}/{DESCRIPTION} cannot be read: {error!r:.300}. Save it again.") from error


def _read_description(files: Files) -> tuple[dict[str, Any], str | None]:
    """What an estimator says of itself, and the hash of its posterior where it says that."""
    if not files.has(DESCRIPTION):
        raise DamagedArtifact(f"{files} is not a saved estimator: it has no {DESCRIPTION}.")
    found = files.read_json(DESCRIPTION)
    if "body" in found:
        body = read_document(files, DESCRIPTION)
        return body["content"], str(body["posterior"])
    if found["format"] != 1:  # that of version 0.1, which had no hash
        raise DamagedArtifact(f"{files} has format {found['format']}, newer than {FORMAT_VERSION}. Upgrade knowable.")
    return found, None


def _is_ours(entry: str) -> bool:
    return entry in (POSTERIOR, SIGNATURE) or entry.lstrip(".").startswith(DESCRIPTION.partition(".")[0])


def _describe_settings(estimator: BayesianEstimator) -> dict[str, Any]:
    settings = {name: getattr(estimator, name) for name in _PLAIN}
    whole = isinstance(estimator.random_state, int)
    settings["random_state"] = estimator.random_state if whole else None
    settings["method"] = estimator.method if isinstance(estimator.method, str) else _describe_method(estimator.method)
    settings["likelihood"] = describe_object(estimator.likelihood)  # names and None as they are
    settings["prior"] = _describe_prior(estimator.prior)
    kinds = {} if estimator.kinds is None else dict(estimator.kinds)
    settings["kinds"] = {name: each if isinstance(each, str) else list(each) for name, each in kinds.items()} or None
    counts = vars(estimator).get("class_weight")  # of a classifier; labels need not be texts
    settings["class_weight"] = [list(each) for each in counts.items()] if isinstance(counts, Mapping) else counts
    return settings


def _build_settings(saved: Mapping[str, Any], network: nn.Module | None) -> dict[str, Any]:
    if not isinstance(saved["budget"], str):  # before 0.2 it was a limit in seconds, or None
        saved = {**saved, "budget": "normal", "time_limit": saved["budget"]}
    settings = {name: saved[name] for name in (*_PLAIN, "random_state", "kinds")}
    method, likelihood, prior = saved["method"], saved["likelihood"], saved["prior"]
    settings["method"] = method if isinstance(method, str) else _build_method(method)
    settings["likelihood"] = build_object(likelihood, Likelihood)
    if prior is not None and "globs" in prior:
        settings["prior"] = {glob: build_object(each, Prior) for glob, each in prior["globs"].items()}
    else:
        settings["prior"] = None if prior is None else build_object(prior, Prior)
    if (counts := saved.get("class_weight")) is not None:
        settings["class_weight"] = counts if isinstance(counts, str) else dict(counts)
    return {**settings, "network": network}


def _describe_prior(prior: Any) -> Any:
    """A prior as plain values; None for a posterior, which the artifact holds."""
    if isinstance(prior, Prior):
        return describe_object(prior)
    if isinstance(prior, Mapping):
        return {"globs": {glob: describe_object(each) for glob, each in prior.items()}}
    return None


def _describe_method(method: Method) -> dict[str, Any]:
    """A method by name, with those of its settings that are plain values."""
    name = next((name for name, entry in METHODS.items() if entry.cls_name == type(method).__name__), None)
    if name is None:
        raise InvalidArgument(f"{method!r} is not a method of knowable's, so that it cannot be saved by name.")
    settings = {each.name: getattr(method, each.name) for each in fields(method)}  # type: ignore[arg-type]
    plain = {key: value for key, value in settings.items() if _is_plain(value)}
    inner = {key: _describe_method(value) for key, value in settings.items() if isinstance(value, Method)}
    grouped = {key: {"fields": asdict(value)} for key, value in settings.items() if _is_settings(value)}
    return {"name": name, "settings": {**plain, **inner, **grouped}}


def _build_method(saved: Mapping[str, Any]) -> Method:
    cls = find_method(saved["name"]).cls
    defaults = {each.name: each.default for each in fields(cls)}  # type: ignore[arg-type]
    settings = _renamed_settings(cls, saved["settings"], defaults)
    for key, value in settings.items():
        if isinstance(value, Mapping):
            settings[key] = type(defaults[key])(**value["fields"]) if "fields" in value else _build_method(value)
    return cls(**settings)


def _renamed_settings(cls: type[Method], saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as they are written now: before 0.2, those of ``training=`` and ``storage=`` were the method's own."""
    found: dict[str, Any] = {}
    for key, value in saved.items():
        if key in defaults:
            found[key] = value
        elif key in cls.moved:
            group, name = re.findall(r"(\w+)=", cls.moved[key])
            found.setdefault(group, {"fields": {}})["fields"][name] = value
        elif key not in ("schedule", "cycles"):  # those of the loop, which nobody could usefully set
            found[key] = value
    return found


def _is_settings(value: Any) -> bool:
    return is_dataclass(value) and not isinstance(value, Method | type) and all(map(_is_plain, asdict(value).values()))


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float | str)
