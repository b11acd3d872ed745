"""Writes "How knowable compares" and the tables of the README and of *choose a method*: ``python -m benchmarks.proof``.

All of it is from stored results. Losses come first. Every table names the command that makes its figures, the day and
the machine. ``--check`` writes nothing and ends with 1 if a page says something else than the results.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks import fidelity
from benchmarks.proof_rows import PLAIN, QUALITY, SPEED, Row, number, tables_of_fidelity
from benchmarks.report import _cells, _write_atomically

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "how_it_compares.md"
README = ROOT / "README.md"
CHOICE = ROOT / "docs" / "how_to" / "choose_a_method.md"
_BEGIN, _END = "<!-- written by python -m benchmarks.proof -->", "<!-- end of what is written -->"
_TITLES = {
    "step_time": "A training step of mean-field inference",
    "sizes": "A training step at ten million weights",
    "laplace": "Laplace: fits and predictions",
    "laplace_limits": "Laplace where memory is short",
    "gradients": "Gradients of many chains",
    "effective_samples": "Effective samples",
    "stochastic_gradient": "A step of SGLD and SGHMC",
    "ensembles": "A step of eight networks",
    "epoch": "An epoch through a small network",
    "prediction": "Predictions by draws",
    "serving": "A service",
    "uci_default": "UCI regression: the default method, fixed beforehand",
    "uci_methods": "UCI regression: one network of 50 units, published rows of the same methods",
    "uci_tables": "UCI regression: the estimator beside other packages",
    "uci_chains": "UCI regression: chains beside published deep ensembles",
    "gaussian_processes": "Gaussian processes beside published ones",
    "tables": "Tables of Python packages, both estimators at their defaults",
    "trained_networks": "Around a trained network",
    "image_methods": "MNIST",
    "infinite_width": "The limit of infinite width",
    "compression.lenets": "Sparse networks",
    "continual": "One task after the other",
    "active_learning": "Labels needed",
    "bayesian_optimisation": "Expensive functions",
    "fidelity": "Is it the posterior? Width of posteriors as documented",
}
_COMMANDS = {"tables": "python -m benchmarks.tables"}
_HEADER = ("what", "beside", "ours", "theirs", "verdict")
_INTRO = """# How knowable compares

What was measured, beside everybody it was measured against. Losses come first. The page is written by
`python -m benchmarks.proof` from `benchmarks/results/*.json`: no figure is typed by hand.

**How to read it.** Times and rates within 10 % are ties; so are scores within one standard error of both sides together
(one per cent where no error is published). Times of one table were taken in turns, in one process or in rounds, on a
machine that was not always quiet: the ratios hold, the milliseconds less so. Published rows are those of the papers and
repositories that the studies name; a study that compares with a *nearest relative* says so. What is not on this page
was not measured. [How the benchmarks work](developer/benchmarks.md).
"""


def stored(study: str) -> Any:
    """The results of a study, or None."""
    file = RESULTS / f"{study.replace('.', '_')}.json"
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def rows_of(studies: dict[str, Callable[[Any], Iterator[Row]]]) -> dict[str, list[Row]]:
    """Every comparison of the studies whose results are there."""
    found = {name: (stored(name), rows) for name, rows in studies.items()}
    return {name: list(rows(run)) for name, (run, rows) in found.items() if run is not None}


def page() -> str:
    """The whole page."""
    speed, quality = rows_of(SPEED), rows_of(QUALITY)
    both = {**speed, **quality}
    peers = {name: [row for row in rows if not row.peer.startswith(PLAIN)] for name, rows in both.items()}
    lost = [row for rows in peers.values() for row in rows if row.outcome == "behind"]
    count = sum(map(len, peers.values()))
    tied = sum(row.outcome == "tie" for rows in peers.values() for row in rows)
    parts = [
        _INTRO,
        f"{count} comparisons with other libraries and published results: ahead in {count - tied - len(lost)}, "
        f"level in {tied}, behind in {len(lost)}. Comparisons with plain PyTorch, which does less, are not counted.\n",
        "## Where we lose\n",
        _lost(lost),
        "## Speed\n",
        *(_section(name, rows) for name, rows in speed.items()),
        "## Quality\n",
        *(_section(name, rows) for name, rows in quality.items()),
        _distances(),
    ]
    return "\n".join(part for part in parts if part)


def _lost(rows: Sequence[Row]) -> str:
    if not rows:
        return "Nowhere in these results.\n"
    ordered = sorted(rows, key=lambda row: row.gap)
    lines = [_cells([row.what, row.peer, row.ours, row.theirs, row.verdict, f"`{row.study}`"]) for row in ordered]
    head = [_cells((*_HEADER, "study")), _cells(["---"] * (len(_HEADER) + 1))]
    return "\n".join([*head, *lines, "", "The widest margins first, in multiples of what would be a tie.", ""])


def _section(name: str, rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    lines = [_cells([row.what, row.peer, row.ours, row.theirs, _marked(row)]) for row in rows]
    return "\n".join(
        [f"### {_TITLES[name]}\n", _cells(_HEADER), _cells(["---"] * len(_HEADER)), *lines, "", _origin(name)]
    )


def _marked(row: Row) -> str:
    return (
        f"**{row.verdict}**"
        if row.outcome == "behind"
        else f"level ({row.verdict})"
        if row.outcome == "tie"
        else row.verdict
    )


def _origin(name: str) -> str:
    run = stored(name)
    command = f"`{_COMMANDS.get(name, f'python -m benchmarks.run {name}')}`"
    if isinstance(run, list):  # a study of its own that keeps only its rows; its page says when
        return f"{command}.\n"
    machine = run["environment"]
    versions = ", ".join(
        f"{each} {version}" for each, version in machine["versions"].items() if version != "not installed"
    )
    place = f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, load {machine['load']}"
    return f"{command}; {machine['date']}; {place}; {versions}.\n"


def _distances() -> str:
    run = stored("fidelity")
    if run is None:
        return ""
    distances, ratios = (text.replace("## ", "### ", 1) for text in tables_of_fidelity(run))
    note = ratios.rstrip().rpartition("\n\n")[2]
    return f"{note}\n\n{distances}\n{_origin('fidelity')}"


# --- the README ------------------------------------------------------------------------------------------------------


def _median_ratio(rows: Iterable[Row]) -> tuple[float, float, float]:
    """Median, least and greatest of how many times ahead we are, from the gaps of rows of times."""
    ratios = sorted(math.exp(row.gap * math.log(1.1)) for row in rows if math.isfinite(row.gap))
    return statistics.median(ratios), ratios[0], ratios[-1]


def ratios() -> str:
    """The README's table: for each job the ratio to the others, the range, and where it is worse than theirs."""
    speed, quality = rows_of(SPEED), rows_of(QUALITY)
    jobs: list[tuple[str, str, list[Row]]] = []

    def job(text: str, beside: str, study: str, keep: Callable[[Row], bool]) -> None:
        rows = [row for row in speed.get(study, []) if keep(row)]
        if rows:
            jobs.append((text, beside, rows))

    others = "bayesian-torch, torchbnn, BLiTZ, Pyro, torch-uncertainty, IVON"
    job("a training step of `MeanFieldVI`", others, "step_time", lambda row: row.peer != PLAIN)
    job("a fit of `Laplace`", "laplace-torch, every backend", "laplace", lambda row: "fit to" in row.what)
    job("a linearised prediction", "laplace-torch", "laplace", lambda row: "prediction" in row.what)
    job("gradients of many chains", "JAX", "gradients", lambda row: True)
    exact = ("NUTS",)
    job("effective samples a second, `HMC`", "NUTS of NumPyro, BlackJAX, Pyro", "effective_samples",
        lambda row: row.what.endswith(": HMC") and row.peer.endswith(exact))  # fmt: skip
    job("effective samples a second, `NUTS`", "NUTS of NumPyro, BlackJAX, Pyro", "effective_samples",
        lambda row: row.what.endswith(": NUTS") and row.peer.endswith(exact))  # fmt: skip
    job("an epoch of a small network", "`DataLoader` and a plain loop", "epoch", lambda row: True)
    lines = [_cells(("job", "beside", "times as fast", "from", "to")), _cells(["---"] * 5)]
    for text, beside, rows in jobs:
        lines.append(_cells([text, beside, *(number(each) for each in _median_ratio(rows))]))
    cost = [row for row in speed.get("step_time", []) if row.peer == PLAIN]
    _, least, most = _median_ratio(cost)
    both = {**speed, **quality}
    peers = [row for rows in both.values() for row in rows if not row.peer.startswith(PLAIN)]
    lost = sum(row.outcome == "behind" for row in peers)
    return "\n".join([
        *lines,
        "",
        "Medians over networks and peers; below 1 is slower. A step of `MeanFieldVI` takes "
        f"{number(1 / most)} to {number(1 / least)} times a plain step.",
        f"Of {len(peers)} comparisons in speed and quality we are behind in {lost}: "
        "[all of them, losses first](docs/how_it_compares.md).",
    ])  # fmt: skip


def measured() -> str:
    """The decision page's table: by method the distance to NUTS, and scores on images and tables."""
    problems = (stored("fidelity") or {"problems": {}})["problems"]
    names = list(next(iter(problems.values()), {}))
    far = {name: [fidelity.summary(found.get(name, [])) for found in problems.values()] for name in names}
    near = {name: statistics.fmean(each) for name, each in far.items()}
    hidden = ("NUTS", fidelity.AGAIN)
    order = sorted((name for name in names if name not in hidden and not math.isnan(near[name])), key=near.__getitem__)
    images = (stored("image_methods") or {"rows": {}})["rows"]
    tables = (stored("uci_methods") or {"data": {}})["data"]
    header = (
        "method",
        "distance to NUTS",
        "MNIST: NLL",
        "MNIST: AUROC of foreign images",
        "UCI: log likelihood over MAP's",
    )
    lines = [_cells(header), _cells(["---"] * len(header))]
    for name in order:
        key = {"Laplace, kron": "Laplace"}.get(name, name)
        found = images.get(f"MNIST: {name}") or {}
        gains = [
            each[key]["log_likelihood"][0] - each["MAP"]["log_likelihood"][0] for each in tables.values() if key in each
        ]
        gain = f"{statistics.fmean(gains):+.2f}" if gains and name != "MAP" else ""
        nll, auroc = (
            (f"{found['nll'][0]:.3f}", f"{found['detection']['other']['entropy']['auroc']:.3f}")
            if found.get("nll")
            else ("", "")
        )
        lines.append(_cells([f"`{name}`", f"{near[name]:.3f}", nll, auroc, gain]))
    return "\n".join(lines)


def renewed(text: str, written: str) -> str:
    """A page with its table between the two marks renewed."""
    found = re.search(re.escape(_BEGIN) + ".*?" + re.escape(_END), text, re.DOTALL)
    if found is None:
        raise ValueError(f"there is no part between {_BEGIN!r} and {_END!r}")
    return text.replace(found[0], f"{_BEGIN}\n\n{written}\n\n{_END}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both, or check them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.proof", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; 1 if something is out of date")
    options = parser.parse_args(arguments)
    written = {README: ratios(), CHOICE: measured()}
    texts = {path: renewed(path.read_text(encoding="utf-8"), table) for path, table in written.items()} | {PAGE: page()}
    old = [path for path, text in texts.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if not options.check:
        for path in old:
            _write_atomically(path, texts[path])
    print("\n".join(str(path.relative_to(ROOT)) for path in old) or "up to date")
    return 1 if options.check and old else 0


if __name__ == "__main__":
    sys.exit(main())
