"""The whole demonstration: fit, print, report."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

import knowable as kn
from knowable.core.support.checks import check_count
from knowable.datasets import digits as digits_data
from knowable.datasets import motorcycle as motorcycle_data
from knowable.errors import InvalidArgument
from knowable.interfaces.cli.messages import as_rich, standard_output
from knowable.interfaces.demo import digits, motorcycle
from knowable.registry import METHODS
from knowable.report.glossary import GLOSSARY
from knowable.report.html import GENERATOR, write
from knowable.report.report import Citation, Notice, Report

REPORT = "report.html"
_LEAD = (
    "The same networks fitted in several ways to few data, and how certain each claims to be. Every score is on data "
    "the fit has not seen. The last part says what to do with it."
)
_NEXT = (
    "Next, on a table of your own: knowable fit data.csv --target COLUMN (it writes such a report for your rows, and "
    "says which to inspect)."
)
_READING = (
    ("The methods", "Maximum likelihood takes the weights that fit best. MAP adds the prior. Laplace puts a "
     "normal distribution around the MAP weights. Mean-field variational inference learns an independent normal for "
     "every weight. A deep ensemble averages networks from different random starts. MC dropout "
     "switches units off at random, in training and in prediction. Exact linear regression has a "
     "closed form and needs no approximation, but only a linear model."),
    ("What this is not", "Two small problems with few data, where uncertainty matters most and all of it runs in about "
     "a minute. Networks, sizes and methods were chosen to show it, after looking at such scores: this is an "
     "illustration, not a benchmark. With more data, or with training that is stopped early, the methods come closer "
     "to each other. On your own data: knowable compare."),
)  # fmt: skip


@dataclass(frozen=True)
class Size:
    """How much work the demonstration does."""

    folds: int
    motorcycle_epochs: int | None  # passes over the data in each fit, or None to stop when settled
    digits_epochs: int | None


FULL = Size(folds=5, motorcycle_epochs=700, digits_epochs=300)
QUICK = Size(folds=2, motorcycle_epochs=400, digits_epochs=30)


def run_demo(
    out: str | os.PathLike[str] = "knowable-demo", *, seed: int = 0, quick: bool = False, quiet: bool = False
) -> Path:
    """Fit, print one table for each problem, and write ``report.html`` into ``out``.

    Args:
        out: Folder for the report, made if it is not there. An earlier report of the demonstration is replaced; nothing
            else is touched.
        seed: Fixes every random choice.
        quick: A rough run of seconds: fewer folds, short training.
        quiet: Print nothing.

    Returns:
        Where the report is.
    """
    check_count("seed", seed, at_least=0)
    path = _place(Path(out))
    with _one_thread():
        report = make_report(seed=seed, size=QUICK if quick else FULL, quiet=quiet)
    write(report, path)
    if not quiet:
        standard_output().print(f"Report: {path.resolve()}", markup=False, soft_wrap=True)
    return path


def make_report(*, seed: int, size: Size, quiet: bool) -> Report:
    """Fit everything and say what came out, printing tables on the way."""
    console, start = standard_output(), time.perf_counter()
    progress = False if quiet else None
    ride = motorcycle.run(seed=seed, folds=size.folds, epochs=size.motorcycle_epochs, progress=progress)
    if not quiet:
        console.print(as_rich(motorcycle.table(ride)))
    image = digits.run(seed=seed, epochs=size.digits_epochs, progress=progress)
    if not quiet:
        console.print(as_rich(digits.table(image)))
        for sentence in (f"To act on: {digits.advice(image)}", _NEXT):
            console.print(sentence, markup=False, soft_wrap=True)
    notices = (*_size_notice(size), *motorcycle.notices(ride), *image.fits.notices())
    return Report(
        title="Do you know what you don't know?",
        lead=_LEAD,
        facts=_facts(seed, time.perf_counter() - start),
        notices=notices,
        sections=(motorcycle.section(ride), digits.section(image), digits.action(image, _NEXT)),
        reading=(*GLOSSARY, *_READING),
        citations=_citations(),
    )


@contextmanager
def _one_thread() -> Iterator[None]:
    """Networks this small are quicker on one thread."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _place(folder: Path) -> Path:
    """Where the report goes, or an error if that would overwrite something else."""
    if folder.exists() and not folder.is_dir():
        raise InvalidArgument(f"out must be a folder, but {str(folder)!r} is a file. Pass another name.")
    path = folder / REPORT
    if path.exists() and GENERATOR not in path.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise InvalidArgument(
            f"{str(path)!r} was not written by knowable and would be overwritten. Pass another folder."
        )
    return path


def _size_notice(size: Size) -> list[Notice]:
    if size == FULL:
        return []
    return [Notice("Quick run", "Training was cut short and the scores are rough. Run without --quick for real ones.")]


def _facts(seed: int, seconds: float) -> tuple[tuple[str, str], ...]:
    return (
        ("knowable", kn.__version__),
        ("torch", torch.__version__),
        ("Seed", str(seed)),
        ("Time taken", f"{seconds:.0f} s"),
    )


def _citations() -> tuple[Citation, ...]:
    """Each paper once, under the methods it stands for; then the data."""
    used = {type(each).__name__ for each in (*motorcycle.methods(1).values(), *digits.methods(1).values())}
    papers: dict[str, list[str]] = {}
    for entry in METHODS.values():
        if entry.cls_name in used:
            for reference in entry.bibtex:
                papers.setdefault(reference.strip(), []).append(entry.cls_name)
    methods = [Citation(", ".join(names), reference) for reference, names in papers.items()]
    data = [Citation(f"The {each.name} data", each.citation) for each in (motorcycle_data(), digits_data())]
    return (*methods, *data)
