"""A compressed network for other runtimes: torch.export programs and ONNX files, for batches of any size."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.files import as_file
from knowable.errors import InvalidArgument, MissingExtra


def export_program(net: nn.Module, example: Tensor, path: str | os.PathLike[str]) -> Path:
    """Write ``net`` as a ``torch.export`` program, which ``torch.export.load`` reads without the network's source.

    Args:
        net: The network.
        example: A batch of inputs.
        path: The file, ``*.pt2``.
    """
    file = _named(path, ".pt2")
    program = torch.export.export(net, (_two_rows(example),), dynamic_shapes=(_any_batch(),))
    return _whole(file, lambda partial: torch.export.save(program, partial))


def export_onnx(net: nn.Module, example: Tensor, path: str | os.PathLike[str]) -> Path:
    """Write ``net`` as an ONNX file with one input ``x`` and one output ``y``.

    Args:
        net: The network.
        example: A batch of inputs.
        path: The file, ``*.onnx``.

    Raises:
        MissingExtra: If onnx or onnxscript is not installed.
    """
    file = _named(path, ".onnx")
    _require("onnx", "onnxscript")
    with _quietly():
        program: Any = torch.onnx.export(
            net,
            (_two_rows(example),),
            input_names=["x"],
            output_names=["y"],
            dynamic_shapes=(_any_batch(),),
            dynamo=True,
            verbose=False,
        )
    return _whole(file, lambda partial: program.save(partial, external_data=False))


@contextmanager
def _quietly() -> Iterator[None]:
    """Without what the exporter says about itself and about packages it would have liked to find."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


def _require(*names: str) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            raise MissingExtra(f"ONNX files need {name}: pip install 'knowable[export]'.") from None


def _any_batch() -> dict[int, Any]:
    return {0: torch.export.Dim("batch")}


def _two_rows(example: Tensor) -> Tensor:
    """At least two rows: a batch of one would be taken for a constant."""
    return example[:2] if len(example) > 1 else example.expand(2, *example.shape[1:]).contiguous()


def _named(path: str | os.PathLike[str], ending: str) -> Path:
    file = as_file(path)
    if file.suffix != ending:
        raise InvalidArgument(f"path must end in {ending}, got {str(file)!r}.")
    return file


def _whole(file: Path, write: Callable[[str], Any]) -> Path:
    """Write beside the file and put it in place in one step."""
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f".{file.stem}.{os.getpid()}.partial{file.suffix}")
    try:
        write(str(partial))
        os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)
    return file
