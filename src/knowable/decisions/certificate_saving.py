"""A certificate on disk: a folder of safetensors and JSON with the folder of its posterior inside, without code."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import asdict, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from knowable.core.posterior.posterior import Posterior
from knowable.core.posterior.saving import foreign
from knowable.core.storage.files import Files, as_path, destination, saving
from knowable.core.storage.folder import (
    MANIFEST,
    check_place,
    manifest_hash,
    read_folder,
    refuse_existing,
    write_folder,
)
from knowable.errors import DamagedArtifact, KnowableError
from knowable.evaluation.calibration import CoverageCurve, ReliabilityCurve
from knowable.evaluation.detection import RiskCoverage
from knowable.evaluation.risk_control import RejectionRule

if TYPE_CHECKING:
    from knowable.decisions.certificate import Certificate, Guarantee

KIND = "certificate"
_POSTERIOR = re.compile(r"posterior-[0-9a-f]{16}")
_PARTIAL = re.compile(r"posterior\.[0-9]+\.partial")
_CURVES = {"classes": ReliabilityCurve, "numbers": CoverageCurve}


def save_certificate(certificate: Certificate, path: str | os.PathLike[str], *, overwrite: bool = False) -> Path:
    """Write a certificate to a folder or a single file, atomically."""
    with destination(path, overwrite=overwrite) as folder, saving(as_path(path)):
        _write(certificate, folder, overwrite=overwrite)
    return as_path(path)


def _write(certificate: Certificate, folder: Path, *, overwrite: bool) -> None:
    """The posterior goes first, under a name made of its hash."""
    check_place(folder, KIND, _is_part)
    if not overwrite:
        refuse_existing(folder, MANIFEST)
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"posterior.{os.getpid()}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    certificate.posterior.save(partial)
    digest = manifest_hash(partial)
    name = f"posterior-{digest[:16]}"
    if (folder / name).exists():
        shutil.rmtree(partial)
    else:
        os.replace(partial, folder / name)
    kind = "classes" if isinstance(certificate.calibration, ReliabilityCurve) else "numbers"
    content = {
        **_plain_fields(certificate),
        "kind": kind,
        "posterior": name,
        "posterior_hash": digest,
        "thresholds": [[group, value] for group, value in certificate.thresholds.items()],
        "rejection": {key: _as_text(value) for key, value in asdict(certificate.rejection).items()},
        "guarantees": [asdict(each) for each in certificate.guarantees],
    }
    tensors = {
        "novelty_scores": certificate.novelty_scores,
        "risk": certificate.risk_coverage.risk,
        "coverage": certificate.risk_coverage.coverage,
        **{f"curve.{key}": value for key, value in vars(certificate.calibration).items()},
    }
    write_folder(folder, KIND, content, tensors, overwrite=True, parts=_is_part)
    for entry in folder.iterdir():
        if _is_part(entry.name) and entry.name != name:
            shutil.rmtree(entry, ignore_errors=True)


def read_certificate(
    path: str | os.PathLike[str] | Files, load_posterior: Callable[[Files], Posterior], guarantee: type[Guarantee]
) -> dict[str, Any]:
    """The fields of a certificate; ``load_posterior`` reads the posterior in the folder that it is given."""
    content, tensors = read_folder(path, KIND)
    try:
        if not _POSTERIOR.fullmatch(content["posterior"]):
            raise DamagedArtifact(f"{path} has its posterior in {content['posterior'][:80]!r}, which is not its own.")
        inside = Files.at(path).folder(content["posterior"])
        if manifest_hash(inside) != content["posterior_hash"]:
            raise DamagedArtifact(f"{inside} is not the posterior that this certificate is about.")
        curve = _CURVES[content["kind"]]
        own: dict[str, Any] = {name: content[name] for name in ("n", "alpha", "delta", "score", "samples", "seed")}
        return dict(
            **own,
            posterior=load_posterior(inside),
            thresholds={group: float(value) for group, value in content["thresholds"]},
            groups=content.get("groups"),
            rejection=RejectionRule(**{key: _from_text(value) for key, value in content["rejection"].items()}),
            novelty=content["novelty"],
            novelty_scores=tensors["novelty_scores"].to(torch.float64),
            calibration=curve(**{key: tensors[f"curve.{key}"] for key in curve.__dataclass_fields__}),
            risk_coverage=RiskCoverage(tensors["coverage"], tensors["risk"]),
            guarantees=tuple(guarantee(**each) for each in content["guarantees"]),
        )
    except KnowableError:
        raise
    except Exception as error:  # whatever a manifest that nobody of ours wrote leads to
        raise foreign(path, error) from error


def certified_hash(path: str | os.PathLike[str] | Files) -> str:
    """The hash of the posterior that a certificate is about."""
    return str(read_folder(path, KIND)[0].get("posterior_hash"))


def _plain_fields(certificate: Certificate) -> dict[str, Any]:
    """Those that are numbers and texts."""
    every = {each.name: getattr(certificate, each.name) for each in fields(certificate)}
    return {name: value for name, value in every.items() if isinstance(value, str | int | float | None)}


def _is_part(entry: str) -> bool:
    return bool(_POSTERIOR.fullmatch(entry) or _PARTIAL.fullmatch(entry))


def _as_text(value: Any) -> Any:
    """Numbers that JSON does not have, as texts."""
    return repr(value) if isinstance(value, float) and value - value != 0 else value


def _from_text(value: Any) -> Any:
    return float(value) if isinstance(value, str) else value
