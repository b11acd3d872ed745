"""A folder on disk: tensors in safetensors, everything else in JSON, no pickle, never half-written.

The manifest is the commit point. Tensors go to a file named by their hash, are flushed to disk, and only then is the
manifest put in place by an atomic rename; whoever reads at any moment, even after a kill, finds the old folder or the
new one. Reading checks both hashes, so a flipped bit, a truncated file or a newer format is an error and not a wrong
answer. The format is described in ``artifact.schema.json`` beside this file, and in docs/reference/artifact_format.md.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import platform
import re
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import safetensors
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from knowable._version import __version__
from knowable.core.storage.files import Files, as_path, parse_json, saving
from knowable.core.storage.tensor_file import Unchecked, block_hashes, read_tensors
from knowable.core.support.checks import check_number
from knowable.core.support.files import check_folder, flush, write_atomically
from knowable.core.support.processes import ALONE, Processes
from knowable.errors import CannotSave, DamagedArtifact, InvalidArgument, InvalidType

FORMAT_VERSION = 2
MANIFEST, SIGNATURE = "manifest.json", "signature.json"
_TENSORS = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
_PARTIAL = re.compile(  # the last two: of earlier versions, and safetensors' own
    r"\.manifest\.[0-9]+\.partial\.json|tensors\.[0-9]+\.partial|manifest\.json\.[0-9]+\.partial|\.tmp\w{6}"
)
_TRIES = 20


def write_folder(
    path: str | os.PathLike[str],
    kind: str,
    content: dict[str, Any],
    tensors: dict[str, Tensor],
    *,
    overwrite: bool = True,
    parts: Callable[[str], bool] = lambda entry: False,
) -> Path:
    """Write a folder of the given ``kind``, atomically; an older one is replaced only with ``overwrite``.

    ``parts`` says of the name of an entry that it may be there too, such as a folder inside.
    """
    folder = as_path(path)
    check_place(folder, kind, parts)
    if not overwrite:
        refuse_existing(folder, MANIFEST)
    with saving(folder):
        folder.mkdir(parents=True, exist_ok=True)
        tensor_file = _write_tensors(folder, tensors)
        write_document(folder / MANIFEST, kind, {"tensors": tensor_file, "content": content})
        for stale in folder.iterdir():
            old = _TENSORS.fullmatch(stale.name) and stale.name != tensor_file["name"]
            if old or _PARTIAL.fullmatch(stale.name) or stale.name == SIGNATURE:
                stale.unlink(missing_ok=True)
    return folder


def read_folder(path: str | os.PathLike[str] | Files, kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a folder written by :func:`write_folder`, or raise :class:`DamagedArtifact` saying what is wrong with it."""
    content, tensors, _ = read_mapped(path, kind, lambda content, name: False)
    return content, tensors


def read_mapped(
    path: str | os.PathLike[str] | Files, kind: str, lazily: Callable[[dict[str, Any], str], bool]
) -> tuple[dict[str, Any], dict[str, Tensor], Unchecked | None]:
    """Like :func:`read_folder`; large tensors that are read ``lazily``, by content and name, are mapped, not read."""
    files = Files.at(path)
    for _ in range(_TRIES):
        body = _read_manifest(files)
        try:
            return _read_content(files, kind, body, lazily)
        except (OSError, DamagedArtifact):
            if _read_manifest(files) == body:  # else another process saved while we were reading: read again
                raise
    raise DamagedArtifact(f"{files} was rewritten by another process during every attempt to read it.")


def _read_content(
    files: Files, kind: str, body: dict[str, Any], lazily: Callable[[dict[str, Any], str], bool]
) -> tuple[dict[str, Any], dict[str, Tensor], Unchecked | None]:
    content, entry = body["content"], body["tensors"]
    if body["kind"] != kind:
        raise DamagedArtifact(f"{files} holds a {body['kind']}, not a {kind}.")
    if not _TENSORS.fullmatch(entry["name"]):
        raise DamagedArtifact(f"{files} is incomplete: {entry['name'][:80]!r} is not the name of a file of tensors.")
    tensors, unchecked = read_tensors(files.open(entry["name"]), entry, lambda name: lazily(content, name))
    return content, tensors, unchecked


def kind_of(path: str | os.PathLike[str] | Files) -> str:
    """What was saved at ``path``: the ``kind`` it was written with."""
    return _read_manifest(Files.at(path))["kind"]


def manifest_hash(path: str | os.PathLike[str] | Files) -> str:
    """A hash of what was saved at ``path``, the same whichever version wrote it."""
    body = _read_manifest(Files.at(path))
    tensors = {name: body["tensors"][name] for name in ("name", "sha256", "bytes")}
    return _hash_of({"format": 1, "kind": body["kind"], "tensors": tensors, "content": body["content"]})


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether something was saved in the folder ``path``."""
    return (Path(path) / MANIFEST).is_file()


def check_place(path: str | os.PathLike[str], kind: str, parts: Callable[[str], bool] = lambda entry: False) -> None:
    """Refuse to write where something else is: a file, a folder of other files, or a saved folder of another kind."""
    folder = as_path(path)
    check_folder(
        folder,
        ours=lambda name: bool(
            name in (MANIFEST, SIGNATURE) or _TENSORS.fullmatch(name) or _PARTIAL.fullmatch(name) or parts(name)
        ),
    )
    if is_folder(folder):
        try:
            found = kind_of(folder)
        except DamagedArtifact:
            found = "damaged or foreign manifest"
        if found != kind:
            what = f"{MANIFEST} of a {found}"
            raise InvalidArgument(
                f"path {str(folder)!r} is a folder with something else in it ({what}). Pass a new or empty one."
            )


def refuse_existing(folder: Path, name: str) -> None:
    """Refuse a folder in which something was saved already."""
    if (folder / name).exists():
        raise InvalidArgument(
            f"path {str(folder)!r} already holds what was saved before. Pass another path, or overwrite=True to "
            f"replace it."
        )


def _write_tensors(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    partial = folder / f"tensors.{os.getpid()}.partial"
    try:
        partial.touch()
        usual = stat.S_IMODE(partial.stat().st_mode)
        save_file(_each_in_its_own_memory(tensors), partial)
        partial.chmod(usual)  # safetensors makes a file that nobody else may read: a service is often another user
        flush(partial)
        written = Files(folder).open(partial.name)
        digest, blocks = written.sha256(), block_hashes(written)
        name = f"tensors-{digest[:16]}.safetensors"
        os.replace(partial, folder / name)
    except SafetensorError as error:
        partial.unlink(missing_ok=True)
        raise CannotSave(f"{folder} cannot be saved: {error}. What was saved there before is unchanged.") from None
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    entry = {"name": name, "sha256": digest, "bytes": written.size}
    return entry if blocks is None else {**entry, "blocks": blocks}


def _each_in_its_own_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU; tensors are copied only if they share memory, since draws are large."""
    found, taken = {}, set()
    for name, value in tensors.items():
        here = value.detach().cpu().contiguous()
        place = here.untyped_storage().data_ptr()
        found[name] = here.clone() if place in taken else here
        taken.add(place)
    return found


# --- documents: JSON with its hash, its format, and what wrote it ----------------------------------------------------


def write_document(file: Path, kind: str, parts: dict[str, Any]) -> None:
    """Write a file of JSON, atomically; an older signature beside it, which is of other content, goes."""
    versions = {
        "knowable": __version__,
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "safetensors": safetensors.__version__,
        "python": platform.python_version(),
    }
    body = {"format": FORMAT_VERSION, "kind": kind, "versions": versions, **parts}
    try:
        text = json.dumps({"sha256": _hash_of(body), "body": body}, indent=1)
        parse_json(text.encode())  # what cannot be read is not written
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"This cannot be saved: {error}.") from None
    write_atomically(file, text)


def read_document(files: Files, name: str) -> dict[str, Any]:
    """The body of a file that :func:`write_document`, of this version or of an earlier one, wrote."""
    try:
        document = parse_json(files.read(name))
        body, digest = document["body"], document["sha256"]
        version, _ = body["format"], body["kind"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DamagedArtifact(f"{files}/{name} is not a readable manifest. Save it again.") from None
    if type(version) is int and version > FORMAT_VERSION:
        raise DamagedArtifact(
            f"{files} has format {version}; this version of knowable reads up to {FORMAT_VERSION}. Upgrade knowable."
        )
    if _hash_of(body) != digest:
        raise DamagedArtifact(f"{files}/{name} was altered after it was saved: its hash does not match its content.")
    if type(version) is not int or version < 1 or not isinstance(body["kind"], str) or len(body["kind"]) > 80:
        raise DamagedArtifact(f"{files}/{name} is not a readable manifest: its format is {str(version)[:40]}.")
    for earlier in range(version, FORMAT_VERSION):
        body = _UPGRADES[earlier](body)
    return body


def _from_1(body: dict[str, Any]) -> dict[str, Any]:
    """Format 1, of version 0.1, did not say what wrote it."""
    return {**body, "format": 2, "versions": {"knowable": "0.1"}}


_UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {1: _from_1}
"""From each format to the next one."""


def _read_manifest(files: Files) -> dict[str, Any]:
    if not files.path.exists():
        raise DamagedArtifact(f"There is no folder {str(files.path)!r} (in {Path.cwd()}).")
    if not files.has(MANIFEST):
        raise DamagedArtifact(f"{files} is not a saved folder: it has no {MANIFEST}.")
    body = read_document(files, MANIFEST)
    if not _is_manifest(body):
        raise DamagedArtifact(f"{files}/{MANIFEST} is not a readable manifest. Save it again.")
    return body


def _is_manifest(body: dict[str, Any]) -> bool:
    entry = body.get("tensors")
    if not isinstance(entry, dict) or not isinstance(body.get("content"), dict):
        return False
    texts = all(isinstance(entry.get(name), str) for name in ("name", "sha256"))
    return texts and type(entry.get("bytes")) is int and isinstance(entry.get("blocks", {}), dict)


def _hash_of(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def tensor_fingerprint(*tensors: Tensor, rows: int = 512) -> str:
    """A hash of the shapes and of evenly spaced rows, which tells data sets apart."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tuple(tensor.shape)}{tensor.dtype}".encode())
        step = max(1, tensor.shape[0] // rows) if tensor.dim() else 1
        chosen = tensor[::step] if tensor.dim() else tensor
        digest.update(memoryview(chosen.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return digest.hexdigest()


# --- checkpoints: a folder that always holds one complete state of a run ---------------------------------------------


@dataclass
class Checkpoint:
    """Where and how often a fit saves its state; a fit that finds its own state there goes on from it.

    Of several processes that make a fit together, the first one reads and writes.

    Args:
        path: The folder.
        seconds: Least time between two saves.
    """

    path: str | os.PathLike[str]
    seconds: float = 30.0
    _identity: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    _last: float = field(default=0.0, init=False, repr=False)
    _processes: Processes = field(default=ALONE, init=False, repr=False)

    def __post_init__(self) -> None:
        as_path(self.path)
        check_number("seconds", self.seconds, at_least=0)

    def begin(self, identity: dict[str, Any]) -> None:
        """Say which fit this is; its state can only be taken up by the same fit."""
        self._identity = {key: str(value) for key, value in identity.items()}
        self._last = time.monotonic()
        self._processes.from_first(lambda: check_place(self.path, "checkpoint"))

    @property
    def due(self) -> bool:
        """Whether it is time to save again."""
        return self._processes.first and time.monotonic() - self._last >= self.seconds

    def save(self, content: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Save a state, replacing the last one atomically."""
        if not self._processes.first:
            return
        write_folder(self.path, "checkpoint", {"identity": self._identity, "state": content}, tensors)
        self._last = time.monotonic()

    def load(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The saved state, None if there is none, an error if it belongs to another fit."""
        return self._processes.from_first(self._load)

    def _load(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        if not is_folder(self.path):
            return None
        saved, tensors = read_folder(self.path, "checkpoint")
        different = [key for key in self._identity if saved["identity"].get(key) != self._identity[key]]
        if different:
            raise InvalidArgument(
                f"checkpoint {str(Path(self.path))!r} belongs to another fit: {', '.join(different)} differ"
                f"{'s' if len(different) == 1 else ''}. Give another folder or delete this one."
            )
        return saved["state"], tensors


def as_checkpoint(value: Checkpoint | str | os.PathLike[str] | None) -> Checkpoint | None:
    """Accept a folder's name or a Checkpoint."""
    if value is None or isinstance(value, Checkpoint):
        return value
    if not isinstance(value, str | os.PathLike):
        raise InvalidType(f"checkpoint must be the path of a folder or a Checkpoint, got {type(value).__name__}.")
    return Checkpoint(value)


def part_of(checkpoint: Checkpoint | None, name: str) -> Checkpoint | None:
    """A checkpoint inside another one's folder, for a fit that is made of several."""
    if checkpoint is None:
        return None
    part = Checkpoint(Path(os.fspath(checkpoint.path)) / name, checkpoint.seconds)
    return of_processes(part, checkpoint._processes)


def of_processes(checkpoint: Checkpoint, processes: Processes) -> Checkpoint:
    """The same checkpoint of a fit that several processes make together."""
    found = copy.copy(checkpoint)
    found._processes = processes
    return found
