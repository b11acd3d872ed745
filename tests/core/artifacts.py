"""Artifacts for tests: small ones of every kind, and altering one so that its hashes are right again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import torch

import knowable as kn
from knowable.core.chains.posterior import ChainPosterior
from knowable.core.storage import tensor_file
from knowable.core.storage.folder import manifest_hash
from tests.core.cases import mlp


def rewrite(file: Path, **changes: Any) -> None:
    """Give a manifest, or an estimator's description, other entries and a hash that fits; None removes an entry."""
    body = json.loads(file.read_text())["body"]
    body = {key: value for key, value in {**body, **changes}.items() if value is not None}
    file.write_text(json.dumps(sealed(body)))


def sealed(body: Any) -> dict[str, Any]:
    """A document with the hash of its body, as an attacker would write it."""
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return {"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": body}


def tensor_bytes(head: Any, data: bytes) -> bytes:
    """A safetensors file of any head, right or wrong."""
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    return len(text).to_bytes(8, "little") + text + data


def put_tensors(folder: Path, content: bytes) -> None:
    """Replace the tensors of a saved folder, with hashes and size that fit."""
    (old,) = folder.glob("tensors-*")
    old.unlink()
    digest = hashlib.sha256(content).hexdigest()
    name = f"tensors-{digest[:16]}.safetensors"
    (folder / name).write_bytes(content)
    entry: dict[str, Any] = {"name": name, "sha256": digest, "bytes": len(content)}
    if "blocks" in json.loads((folder / "manifest.json").read_text())["body"]["tensors"]:
        hashes = [hashlib.sha256(content[at : at + 4096]).hexdigest() for at in range(0, len(content), 4096)]
        entry["blocks"] = {"bytes": 4096, "sha256": hashes}
    rewrite(folder / "manifest.json", tensors=entry)


def seal_outside(folder: Path) -> None:
    """Let a certificate or an estimator name the posterior inside that is there now, as an attacker would."""
    for inside in [*folder.glob("posterior-*"), *folder.glob("posterior")]:
        try:
            own = manifest_hash(inside)
        except kn.KnowableError:
            continue
        if inside.name == "posterior":
            rewrite(folder / "estimator.json", posterior=own)
        else:
            content = json.loads((folder / "manifest.json").read_text())["body"]["content"]
            rewrite(folder / "manifest.json", content={**content, "posterior_hash": own})


def make_originals(place: Path) -> dict[str, Path]:
    """A good artifact of every kind, as a folder, by its name."""
    torch.manual_seed(0)
    x, y = kn.datasets.sine_with_gap(n=60)
    model = kn.Model(mlp(1), kn.Gaussian())
    plain = kn.MAP(epochs=2).fit(model, (x, y), progress=False)
    variational = kn.MeanFieldVI(epochs=2).fit(model, (x, y), progress=False)
    chain = ChainPosterior(model, variational.sample(40), 2)
    columns = {"a": x[:, 0].numpy(), "b": ["x", "y"] * 30}
    estimator = kn.BayesianRegressor("map", random_state=0).fit(pd.DataFrame(columns), y.numpy().ravel())
    saved = {
        "point": plain, "variational": variational, "chain": chain, "estimator": estimator,
        "certificate": kn.certify(variational, (x + 0.01, y), alpha=0.2, delta=0.2),
    }  # fmt: skip
    found = {name: each.save(place / name) for name, each in saved.items()}
    with mock.patch.object(tensor_file, "MAPPED_FROM", 0):  # as if it were large
        return {**found, "mapped": chain.save(place / "mapped")}
