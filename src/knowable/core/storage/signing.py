"""Signatures of artifacts (Ed25519): who has the public key knows that not a byte changed since the owner signed it.

The signature is a file beside the others with the hash of each of them, so that signing changes nothing else. Hashes in
the manifests alone detect accidents: whoever alters a file can write a new hash, but not a new signature.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from knowable.core.storage.files import Files, as_path, pack, saving
from knowable.core.storage.folder import SIGNATURE
from knowable.core.support.files import write_atomically
from knowable.errors import InvalidArgument, MissingExtra, NotSigned

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

_FORMAT, _ALGORITHM = 1, "ed25519"
_PURPOSE = b"knowable artifact\n"  # so that the signature of anything else is none of an artifact
_MOST_BYTES = 1024 * 1024


def sign(path: str | os.PathLike[str], key: str | os.PathLike[str] | Ed25519PrivateKey) -> Path:
    """Sign what is saved at ``path``, a folder or a file: every file in it.

    Args:
        path: A saved posterior, certificate, estimator or run. A signature that it has already is replaced.
        key: The private key (Ed25519), or its PEM file without a password.
    """
    place, secret = as_path(path), _private_key(key)
    files = Files.at(place)
    listed = {name: files.open(name).sha256() for name in files.names() if name != SIGNATURE}
    if not any(name.endswith(".json") for name in listed):
        raise InvalidArgument(f"{place} is not an artifact: there is nothing to sign.")
    statement = {"format": _FORMAT, "algorithm": _ALGORITHM, "files": listed}
    made = base64.b64encode(secret.sign(_signed_bytes(statement))).decode()
    text = json.dumps({**statement, "signature": made}, indent=1)
    with saving(place):
        if files.archived:
            pack(files, place, {SIGNATURE: text.encode()})
        else:
            write_atomically(place / SIGNATURE, text)
    return place


def verify(path: str | os.PathLike[str] | Files, key: str | os.PathLike[str] | Ed25519PublicKey) -> list[str]:
    """The files of an artifact, once it is sure that the owner of ``key`` signed each of them as it is.

    Args:
        path: What was signed, a folder or a file.
        key: The public key (Ed25519), or its PEM file.

    Raises:
        NotSigned: If there is no signature, it is of another key, or a file was altered, added or removed since.
    """
    files = signed_files(path, key)
    assert files.hashes is not None
    for name, expected in files.hashes.items():
        if files.open(name).sha256() != expected:
            raise NotSigned(f"{files}: {name} was altered after it was signed.")
    return sorted(files.hashes)


def signed_files(path: str | os.PathLike[str] | Files, key: str | os.PathLike[str] | Ed25519PublicKey) -> Files:
    """The files of an artifact whose signature is that of ``key``; each is checked when it is read."""
    public, files = _public_key(key), Files.at(path)
    from cryptography.exceptions import InvalidSignature

    if not files.has(SIGNATURE):
        raise NotSigned(f"{files} is not signed: it has no {SIGNATURE}.")
    try:
        document: dict[str, Any] = files.read_json(SIGNATURE)
        statement = {name: document[name] for name in ("format", "algorithm", "files")}
        signature = base64.b64decode(document["signature"], validate=True)
        if (statement["format"], statement["algorithm"]) != (_FORMAT, _ALGORITHM):
            raise NotSigned(f"The signature of {files} is of a kind that this version does not know. Upgrade knowable.")
        public.verify(signature, _signed_bytes(statement))
    except InvalidSignature:
        raise NotSigned(f"The signature of {files} is not by the owner of this key, or was altered.") from None
    except (KeyError, TypeError, ValueError, binascii.Error):
        raise NotSigned(f"The signature of {files} cannot be read.") from None
    listed = statement["files"]
    there = {name for name in files.names() if name != SIGNATURE}
    if there != listed.keys():
        name = sorted(there ^ listed.keys())[0]
        what = "added to it" if name in there else "removed from it"
        raise NotSigned(f"{files}: {name} was {what} after it was signed.")
    return files.with_hashes(listed)


def _signed_bytes(statement: dict[str, Any]) -> bytes:
    return _PURPOSE + json.dumps(statement, sort_keys=True, separators=(",", ":")).encode()


def _private_key(key: Any) -> Ed25519PrivateKey:
    serialization, ed25519 = _cryptography()
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key
    content = _pem(key)
    try:
        found = serialization.load_pem_private_key(content, password=None)
    except (ValueError, TypeError):
        raise InvalidArgument(f"key {str(key)!r} is not a private key in PEM without a password. {_MAKE}") from None
    if not isinstance(found, ed25519.Ed25519PrivateKey):
        raise InvalidArgument(f"key {str(key)!r} is a {type(found).__name__}, not one of Ed25519. {_MAKE}")
    return found


def _public_key(key: Any) -> Ed25519PublicKey:
    serialization, ed25519 = _cryptography()
    if isinstance(key, ed25519.Ed25519PublicKey):
        return key
    content = _pem(key)
    try:
        found = serialization.load_pem_public_key(content)
    except (ValueError, TypeError):
        raise InvalidArgument(f"key {str(key)!r} is not a public key in PEM. {_EXPORT}") from None
    if not isinstance(found, ed25519.Ed25519PublicKey):
        raise InvalidArgument(f"key {str(key)!r} is a {type(found).__name__}, not one of Ed25519. {_EXPORT}")
    return found


_MAKE = "Make one: openssl genpkey -algorithm ed25519 -out key.pem"
_EXPORT = "Take it from the private one: openssl pkey -in key.pem -pubout -out pub.pem"


def _pem(key: Any) -> bytes:
    file = as_path(key)
    try:
        with file.open("rb") as stream:
            return stream.read(_MOST_BYTES)
    except OSError as error:
        raise InvalidArgument(f"key {str(file)!r} cannot be read: {error.strerror}.") from None


def _cryptography() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MissingExtra("Signatures need cryptography: pip install 'knowable[sign]'.") from None
    return serialization, ed25519
