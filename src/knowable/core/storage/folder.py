"""A folder on disk: tensors in safetensors, everything else in JSON, no pickle, never half-written.

The manifest is the commit point. Tensors go to a file named by their hash, are flushed to disk, and only then is the
manifest put in place by an atomic rename; whoever reads at any moment, even after a kill, finds the old folder or the
new one. Reading checks both hashes, so a flipped bit, a truncated file or a newer format is an error and not a wrong
answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from knowable.core.support.checks import check_number
from knowable.core.support.files import check_folder, flush, write_atomically
from knowable.errors import DamagedArtifact, InvalidArgument, InvalidType

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_TENSORS = re.compile(r"tensors-[0-9a-f]{16}\.safetensors")
_PARTIAL = re.compile(  # the last two: of earlier versions, and safetensors' own
    r"\.manifest\.[0-9]+\.partial\.json|tensors\.[0-9]+\.partial|manifest\.json\.[0-9]+\.partial|\.tmp\w{6}"
)
_TRIES = 20
_MOST_MANIFEST_BYTES = 256 * 1024 * 1024
_ALIGNMENT = 64  # bytes, of every tensor that torch makes on a CPU


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
    folder.mkdir(parents=True, exist_ok=True)
    tensor_file = _write_tensors(folder, tensors)
    body = {"format": FORMAT_VERSION, "kind": kind, "tensors": tensor_file, "content": content}
    _write_manifest(folder, body)
    for stale in folder.iterdir():
        if (_TENSORS.fullmatch(stale.name) and stale.name != tensor_file["name"]) or _PARTIAL.fullmatch(stale.name):
            stale.unlink(missing_ok=True)
    return folder


def read_folder(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a folder written by :func:`write_folder`, or raise :class:`DamagedArtifact` saying what is wrong with it."""
    folder = as_path(path)
    for _ in range(_TRIES):
        body = _read_manifest(folder)
        try:
            return _read_content(folder, kind, body)
        except (OSError, DamagedArtifact):
            if _read_manifest(folder) == body:  # else another process saved while we were reading: read again
                raise
    raise DamagedArtifact(f"{folder} was rewritten by another process during every attempt to read it.")


def _read_content(folder: Path, kind: str, body: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if body["kind"] != kind:
        raise DamagedArtifact(f"{folder} holds a {body['kind']}, not a {kind}.")
    entry = body["tensors"]
    file = folder / Path(entry["name"]).name
    if not file.is_file():
        raise DamagedArtifact(f"{folder} is incomplete: {file.name} is missing. Save it again.")
    if file.stat().st_size != entry["bytes"] or _hash_file(file) != entry["sha256"]:
        raise DamagedArtifact(
            f"{file} was altered or truncated after it was saved: its hash does not match the manifest."
        )
    try:
        return body["content"], {name: _aligned(value) for name, value in load_file(file).items()}
    except (SafetensorError, RuntimeError, OSError) as error:
        raise DamagedArtifact(f"{file} cannot be read as safetensors: {error}") from None


def _aligned(value: Tensor) -> Tensor:
    """The tensor where torch would have put it: the last bits of a product may depend on the place in memory."""
    return value if value.data_ptr() % _ALIGNMENT == 0 else value.clone()


def kind_of(path: str | os.PathLike[str]) -> str:
    """What was saved at ``path``: the ``kind`` it was written with."""
    return _read_manifest(as_path(path))["kind"]


def manifest_hash(path: str | os.PathLike[str]) -> str:
    """A hash of everything that was saved at ``path``."""
    return hashlib.sha256(_canonical(_read_manifest(as_path(path))).encode()).hexdigest()


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether something was saved at ``path``."""
    return (Path(path) / MANIFEST).is_file()


def as_path(path: str | os.PathLike[str]) -> Path:
    """A path, or an error if it is not one."""
    if not isinstance(path, str | os.PathLike):
        raise InvalidType(f"path must be the name of a folder, got {type(path).__name__} {path!r}.")
    return Path(path)


def check_place(path: str | os.PathLike[str], kind: str, parts: Callable[[str], bool] = lambda entry: False) -> None:
    """Refuse to write where something else is: a file, a folder of other files, or a saved folder of another kind."""
    folder = as_path(path)
    check_folder(
        folder,
        ours=lambda name: bool(name == MANIFEST or _TENSORS.fullmatch(name) or _PARTIAL.fullmatch(name) or parts(name)),
    )
    if is_folder(folder):
        try:
            found = _read_manifest(folder)["kind"]
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
    save_file(_each_in_its_own_memory(tensors), partial)
    digest, size = _hash_file(partial), partial.stat().st_size
    flush(partial)
    name = f"tensors-{digest[:16]}.safetensors"
    os.replace(partial, folder / name)
    return {"name": name, "sha256": digest, "bytes": size}


def _each_in_its_own_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors on the CPU; tensors are copied only if they share memory, since draws are large."""
    found, taken = {}, set()
    for name, value in tensors.items():
        here = value.detach().cpu().contiguous()
        place = here.untyped_storage().data_ptr()
        found[name] = here.clone() if place in taken else here
        taken.add(place)
    return found


def _write_manifest(folder: Path, body: dict[str, Any]) -> None:
    try:
        text = _canonical(body)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"This cannot be saved: {error}.") from None
    document = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": body}
    write_atomically(folder / MANIFEST, json.dumps(document, indent=1))
    flush(folder)


def _read_manifest(folder: Path) -> dict[str, Any]:
    file = folder / MANIFEST
    if not folder.exists():
        raise DamagedArtifact(f"There is no folder {str(folder)!r} (in {Path.cwd()}).")
    if not file.is_file():
        raise DamagedArtifact(f"{folder} is not a saved folder: it has no {MANIFEST}.")
    if file.stat().st_size > _MOST_MANIFEST_BYTES:
        raise DamagedArtifact(f"{file} is too large to be a manifest ({file.stat().st_size:,} bytes).")
    try:
        document = json.loads(file.read_bytes())
        body, digest = document["body"], document["sha256"]
        version = body["format"]
        for part, keys in ((body, ("kind", "tensors", "content")), (body["tensors"], ("name", "sha256", "bytes"))):
            if not part.keys() >= set(keys):
                raise KeyError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise DamagedArtifact(f"{file} is not a readable manifest. Save it again.") from None
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise DamagedArtifact(
            f"{folder} has format {version}; this version of knowable reads up to {FORMAT_VERSION}. Upgrade knowable."
        )
    if hashlib.sha256(_canonical(body).encode()).hexdigest() != digest:
        raise DamagedArtifact(f"{file} was altered after it was saved: its hash does not match its content.")
    return body


def _canonical(body: dict[str, Any]) -> str:
    return json.dumps(body, sort_keys=True, separators=(",", ":"))


def _hash_file(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


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

    Args:
        path: The folder.
        seconds: Least time between two saves.
    """

    path: str | os.PathLike[str]
    seconds: float = 30.0
    _identity: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    _last: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        as_path(self.path)
        check_number("seconds", self.seconds, at_least=0)

    def begin(self, identity: dict[str, Any]) -> None:
        """Say which fit this is; its state can only be taken up by the same fit."""
        self._identity = {key: str(value) for key, value in identity.items()}
        self._last = time.monotonic()
        check_place(self.path, "checkpoint")

    @property
    def due(self) -> bool:
        """Whether it is time to save again."""
        return time.monotonic() - self._last >= self.seconds

    def save(self, content: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Save a state, replacing the last one atomically."""
        write_folder(self.path, "checkpoint", {"identity": self._identity, "state": content}, tensors)
        self._last = time.monotonic()

    def load(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """The saved state, None if there is none, an error if it belongs to another fit."""
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
    return None if checkpoint is None else Checkpoint(Path(os.fspath(checkpoint.path)) / name, checkpoint.seconds)
