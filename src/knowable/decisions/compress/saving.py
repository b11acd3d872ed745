"""A compressed network on disk: a folder of safetensors and JSON that never contains code."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save as as_safetensors
from torch import Tensor, nn

from knowable.core.network.network import check_module
from knowable.core.posterior.saving import foreign
from knowable.core.posterior.structure import build, describe
from knowable.core.storage.files import Files, as_path, destination
from knowable.core.storage.folder import read_folder, write_folder
from knowable.core.support.files import as_file, write_atomically
from knowable.core.support.randomness import own_randomness
from knowable.decisions.compress.rewrite import RewritePlan
from knowable.decisions.compress.sparse_code import QuantisationGrid, SparseCode, decode, encode
from knowable.errors import DamagedArtifact, InvalidArgument, KnowableError, MissingExtra

KIND = "compressed network"
_MOST_ZEROS = 64  # weights for a byte of their code, a quarter of what an artifact may have
_INTEGERS = (torch.uint8, torch.int16, torch.int32)  # the smallest that holds the values is taken


def encode_weights(
    net: nn.Module, plan: RewritePlan, grids: Mapping[str, QuantisationGrid]
) -> dict[str, tuple[SparseCode, Tensor]]:
    """All matrices and kernels of a rewritten network in their shortest codes; ``grids`` has the original's names."""
    found = {plan.new_name(name): grid for name, grid in grids.items()}
    return {
        name: encode(value, found.get(name))
        for name, value in net.named_parameters()
        if value.dim() >= 2 and value.is_floating_point()
    }


def save_network(
    path: str | os.PathLike[str],
    net: nn.Module,
    *,
    original: nn.Module,
    plan: RewritePlan,
    codes: Mapping[str, tuple[SparseCode, Tensor]],
    overwrite: bool = False,
) -> Path:
    """Write a rewritten network and how it differs from the original to a folder, atomically.

    The structure of the original is saved if it consists of plain ``torch.nn`` layers.
    """
    content = {
        "network": {
            "class": type(original).__name__,
            "structure": describe(original),
            "parameters": {name: list(value.shape) for name, value in original.named_parameters()},
        },
        "dtype": str(next(iter(net.parameters())).dtype).removeprefix("torch."),
        "plan": plan.to_json(),
        "codes": {name: code.to_json() for name, (code, _) in codes.items()},
    }
    streams = {name: stream for name, (_, stream) in codes.items() if len(stream)}
    rest = {name: _narrow(value) for name, value in _tensors(net) if name not in codes}
    with destination(path, overwrite=overwrite) as folder:
        write_folder(folder, KIND, content, {**rest, **streams}, overwrite=overwrite)
    return as_path(path)


def load_compressed(path: str | os.PathLike[str] | Files, net: nn.Module | None = None) -> nn.Module:
    """Load a network saved by ``compressed.save(path)``, dense, in evaluation mode. The folder contains no code.

    Args:
        path: The folder or file.
        net: The original network, before compression, if it is not made of plain ``torch.nn`` layers. It is not
            changed.

    Raises:
        DamagedArtifact: If the folder is missing files, truncated, altered, or of a newer format.
    """
    content, tensors = read_folder(path, KIND)
    try:
        own = _original(content, tensors, net)
        made = RewritePlan.from_json(content["plan"]).apply(own).eval().requires_grad_(False)
        _fill(made, {name: SparseCode.from_json(code) for name, code in content["codes"].items()}, tensors)
        return made
    except KnowableError:
        raise
    except Exception as error:  # whatever a manifest that nobody of ours wrote leads to
        raise foreign(path, error) from error


def _original(content: dict[str, Any], tensors: Mapping[str, Tensor], net: nn.Module | None) -> nn.Module:
    saved = content["network"]
    if net is None:
        if saved["structure"] is None:
            raise InvalidArgument(
                f"The compressed network ({saved['class']}) is not made of plain torch.nn layers, each used once: pass "
                f"the original one, with the same structure, as load_compressed(path, net=...)."
            )
        with own_randomness(0):
            own = build(saved["structure"], stored=_MOST_ZEROS * sum(each.nbytes for each in tensors.values()))
    else:
        check_module(net)
        own = copy.deepcopy(net)
    shapes = {name: list(value.shape) for name, value in own.named_parameters()}
    for name in [*saved["parameters"], *shapes]:
        if shapes.get(name) != saved["parameters"].get(name):
            raise InvalidArgument(
                f"net is not the network that was compressed: parameter {name!r} has shape {shapes.get(name, 'none')} "
                f"in net and {saved['parameters'].get(name, 'none')} in the saved original."
            )
    if content["dtype"] not in ("float16", "bfloat16", "float32", "float64"):
        raise DamagedArtifact(f"The saved network has an unknown dtype {content['dtype']!r}.")
    return own.to(getattr(torch, content["dtype"]))


@torch.no_grad()
def _fill(net: nn.Module, codes: Mapping[str, SparseCode], tensors: Mapping[str, Tensor]) -> None:
    for name, value in _tensors(net):
        if name in codes:
            if codes[name].shape != tuple(value.shape):
                raise DamagedArtifact(f"The saved {name!r} has shape {codes[name].shape}, not {tuple(value.shape)}.")
            found = decode(codes[name], tensors.get(name, torch.zeros(0, dtype=torch.uint8)))
        else:
            found = tensors[name]
        if found.shape != value.shape:
            raise DamagedArtifact(f"The saved {name!r} has shape {tuple(found.shape)}, not {tuple(value.shape)}.")
        value.copy_(found)


def _tensors(net: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from net.named_parameters()
    yield from net.named_buffers()


def _narrow(value: Tensor) -> Tensor:
    """Integers in the smallest dtype that holds them."""
    if value.is_floating_point() or value.dtype == torch.bool or value.numel() == 0:
        return value
    low, high = int(value.min()), int(value.max())
    fitting = [dtype for dtype in _INTEGERS if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max]
    return value.to(fitting[0]) if fitting else value


def dense_bytes(net: nn.Module) -> int:
    """Size of the network's parameters and buffers as one safetensors file."""
    return len(as_safetensors({name: value.detach().cpu().clone().contiguous() for name, value in _tensors(net)}))


def sparse_bytes(
    net: nn.Module, *, original: nn.Module, plan: RewritePlan, codes: Mapping[str, tuple[SparseCode, Tensor]]
) -> int:
    """Size of the folder that :func:`save_network` writes, by writing it."""
    with TemporaryDirectory() as folder:
        made = save_network(Path(folder) / "network", net, original=original, plan=plan, codes=codes)
        return sum(file.stat().st_size for file in made.iterdir())


# --- other runtimes: torch.export programs and ONNX files, for batches of any size -----------------------------------


def export_program(net: nn.Module, example: Tensor, path: str | os.PathLike[str]) -> Path:
    """Write ``net`` as a ``torch.export`` program, which ``torch.export.load`` reads without the network's source."""
    file = _named(path, ".pt2")
    program = torch.export.export(net, (_two_rows(example),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    return write_atomically(file, lambda partial: torch.export.save(program, partial))


def export_onnx(
    net: nn.Module, example: Tensor, path: str | os.PathLike[str], *, outputs: Sequence[str] = ("y",)
) -> Path:
    """Write ``net`` as an ONNX file with one input ``x`` and these outputs."""
    file = _named(path, ".onnx")
    for package in ("onnx", "onnxscript"):
        try:
            importlib.import_module(package)
        except ImportError:
            raise MissingExtra(f"ONNX files need {package}: pip install 'knowable[export]'.") from None
    with _quietly():
        program: Any = torch.onnx.export(
            net,
            (_two_rows(example),),
            input_names=["x"],
            output_names=list(outputs),
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            dynamo=True,
            verbose=False,
        )
    return write_atomically(file, lambda partial: program.save(partial, external_data=False))


@contextmanager
def _quietly() -> Iterator[None]:
    """Without the exporter's log messages and warnings about optional packages."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _two_rows(example: Tensor) -> Tensor:
    """Two rows: torch.export would specialise on a batch of one."""
    return example[:2] if len(example) > 1 else example.expand(2, *example.shape[1:]).contiguous()


def _named(path: str | os.PathLike[str], ending: str) -> Path:
    file = as_file(path)
    if file.suffix != ending:
        raise InvalidArgument(f"path must end in {ending}, got {str(file)!r}.")
    return file
