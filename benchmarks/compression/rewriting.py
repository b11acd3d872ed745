"""From a sparse posterior to a small network: size on disk, time, error, and what other programs make of it.

The posteriors are those of the study of LeNets (fitted here where they are not there yet). ``knowable.compress`` cuts
out weights with log alpha above 3 and rewrites what is left as an ordinary dense network; with ``bits="posterior"`` it
also rounds the weights to no more than the posterior knows of them. Both are beside the dense network that was trained
by maximum likelihood.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from benchmarks.compression import lenets
from benchmarks.compression.images import Images, mnist, synthetic
from benchmarks.compression.lenets import Recipe, dense_fit, fit_name, sparse_fits
from benchmarks.compression.working import Fits, work_through
from benchmarks.study import Rows, describe, page, table

if TYPE_CHECKING:
    from knowable.core.posterior.posterior import Posterior
    from knowable.decisions.compress.compressed import Compressed

BITS = {"as they are": None, "rounded": "posterior"}
EXAMPLE_ROWS = 64
_QUICK = {"rows": 20, "dense_epochs": 1, "epochs": 2, "kl_warmup": 1, "further": (), "batch_size": 10}
_HEADER = (
    "network, weights", "test error % before", "after", "weights", "bits", "sparse file", "dense file", "time",
    "multiply-adds", "ONNX differs by",
)  # fmt: skip
_NOTE = (
    "Errors: of the network at the posterior mean with nothing taken out, and of the rewritten one. All that follows "
    "is a ratio, before over after. Weights: all over nonzero, of matrices and kernels. Bits: of these weights, values "
    "and places. Sparse file: dense weights as safetensors over the folder that `save` writes; dense file: over the "
    "rewritten dense network in the same form. Time: on one thread, for 64 images. ONNX: largest difference between "
    "outputs of ONNX Runtime and of the rewritten network, relative to the largest output or 1."
)


def evaluate(recipe: Recipe, which: str, *, quick: bool, fits: Fits) -> dict[str, Any]:
    """Compress one posterior and see what was gained and lost."""
    import knowable as kn

    images = synthetic(recipe.rows, 20) if quick else _mnist(recipe.rows)
    posterior = posterior_of(recipe, images, fits)
    test = images.test_x, images.test_y
    with one_thread():
        small = kn.compress(
            posterior, data=test, example=images.test_x[:EXAMPLE_ROWS], bits=BITS[which], repeats=3 if quick else 50
        )
    return {**small.as_dict(), "onnx_difference": onnx_difference(small, images.test_x[:EXAMPLE_ROWS])}


def posterior_of(recipe: Recipe, images: Images, fits: Fits, *, seed: int = 0) -> Posterior:
    """The sparse fit of the study of LeNets, which is taken up if it is there."""
    name = fit_name(recipe, seed=seed)
    dense = dense_fit(recipe, images, fits, seed=seed, name=name)
    return sparse_fits(recipe, images, fits, seed=seed, name=name, start=dense)[0][-1]


@contextmanager
def one_thread() -> Iterator[None]:
    """Within it, torch has one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def onnx_difference(small: Compressed, x: Tensor) -> float | None:
    """Largest difference of ONNX Runtime's outputs from the network's own; None where ONNX Runtime is not there."""
    try:
        import onnxruntime
    except ModuleNotFoundError:
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = small.to_onnx(Path(folder) / "small.onnx")
        session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return relative_difference(torch.from_numpy(found), small.net, x)


def relative_difference(found: Tensor, net: nn.Module, x: Tensor) -> float:
    """Largest difference between ``found`` and the outputs of the network, relative to the largest of these or 1."""
    with torch.no_grad():
        expected = net(x)
    return ((found - expected).abs().max() / expected.abs().max().clamp_min(1.0)).item()


@cache
def _mnist(rows: int) -> Images:
    return mnist(rows)


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """Both LeNets, weights as they are and rounded; ``only`` is a glob of cases."""
    fits, found = Fits.beside(rows), {}
    for each in lenets.RECIPES.values():
        recipe = replace(each, **_QUICK) if quick else each
        cases: dict[str, Callable[[], dict[str, Any]]] = {
            f"{recipe.network}, {which}": partial(evaluate, recipe, which, quick=quick, fits=fits) for which in BITS
        }
        found |= work_through(cases, only=only, rows=rows, recipe=recipe, quick=quick)
    return describe("compression_rewriting", quick=quick, packages=("onnx", "onnxruntime"), networks=found)


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table: a row for each network and way of keeping weights."""
    rows = [_cells(name, row) for name, row in run["networks"].items()]
    return page(run, table("LeNets rewritten without what their posteriors do not need", _HEADER, rows, _NOTE))


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    if row["error"] is not None:
        return [name, f"failed: {row['error']}"]
    accuracy, onnx = row["scores"]["accuracy"], row["onnx_difference"]
    return [
        name, *(f"{100 - 100 * accuracy[when]:.2f}" for when in ("before", "after")), f"{row['compression']:.0f}",
        f"{row['compression_by_bits']:.0f}", f"{row['compression_on_disk']:.1f}", f"{_ratio(row['bytes_dense']):.1f}",
        f"{_ratio(row['latency']):.1f}", f"{_ratio(row['multiply_adds']):.1f}", "" if onnx is None else f"{onnx:.1e}",
    ]  # fmt: skip


def _ratio(change: Mapping[str, float]) -> float:
    return change["before"] / change["after"] if change["after"] else float("inf")
