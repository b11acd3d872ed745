"""Whether certificates keep what they promise: coverage, risk of what is accepted, false alarms, over many resplits.

A posterior is fitted once. Rows that it has not seen are the population: a random part of them is held out for
``kn.certify``, the others are new, and this again and again. Then

- the number of new rows inside their sets or intervals, and of those with a p-value above alpha, has a beta-binomial
  distribution, whatever the model: the table has its mean, and the band that holds the mean over all resplits with
  probability 99%;
- the rejection rule is wrong when the risk of accepted rows in the whole population is above its bound, which may
  happen with probability delta: the table has how often it did, and the count that is exceeded with probability 1%.

Streams: rows of the population in random order follow held-out ones, which raises a false alarm with probability delta
at most; and rows of another kind after a thousand of them, which should raise one soon.

MNIST and FashionMNIST (``mnist.npz``, ``fashion_mnist.npz``) and ``uci/*.npz`` are read from the folder that
``KNOWABLE_DATA`` names.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks import image_methods
from benchmarks.harness import one_line
from benchmarks.study import Rows, describe, page, say, table
from benchmarks.uci_data import data_folder

if TYPE_CHECKING:
    from knowable.core.posterior.posterior import Posterior


@dataclass(frozen=True)
class Case:
    """One population and what is promised about it.

    Attributes:
        name: Of the row.
        data: ``mnist`` or the name of a UCI set.
        score: Of the sets or intervals.
        alpha: Share that may fail.
        delta: Probability that the rejection rule fails.
        held_out: Rows in each certificate.
        resplits: How many certificates.
    """

    name: str
    data: str
    score: str
    alpha: float
    delta: float = 0.05
    held_out: int = 2000
    resplits: int = 200


CASES = (
    Case("MNIST, LAC, 5%", "mnist", "lac", 0.05),
    Case("MNIST, LAC, 1%", "mnist", "lac", 0.01),
    Case("MNIST, APS, 5%", "mnist", "aps", 0.05),
    Case("kin8nm, normalised, 10%", "kin8nm", "normalised", 0.1),
    Case("kin8nm, CQR, 10%", "kin8nm", "cqr", 0.1),
    Case("power plant, split, 10%", "power-plant", "split", 0.1),
)
STREAM = "stream of MNIST"
_STREAM_ROWS, _STREAMS, _CHANGE = 4000, 200, 1000
_UCI_TRAINING = 3000
_HEADER = (
    "case", "covered", "promised", "band of the mean", "size or width", "accepted", "rule wrong", "of", "allowed",
    "false alarms", "band of the mean",
)  # fmt: skip
_NOTE = (
    "Mean over resplits. Covered: share of new rows inside their set or interval. Rule wrong: resplits in which the "
    "risk of accepted rows in the whole population is above the bound."
)


@dataclass(frozen=True, eq=False)
class Population:
    """Rows that the posterior has not seen."""

    posterior: Posterior
    x: Tensor
    y: Tensor
    other: Tensor | None = None  # rows of another kind


def population(data: str, quick: bool) -> Population:
    """Fit a posterior, and return it with rows to draw from."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the number of epochs is fixed, whether the loss has settled or not
        if data == "mnist":
            return _mnist(quick)
        return _uci(data, quick)


def _mnist(quick: bool) -> Population:
    """A LeNet-5; as inputs its last hidden layer, so that images go through the others once."""
    import knowable as kn

    recipe = replace(image_methods.RECIPE, rows=640, test=600, epochs=1) if quick else image_methods.RECIPE
    images = image_methods.synthetic(recipe) if quick else image_methods.load(recipe)
    mode = image_methods.Fits(images, recipe).mode
    values = {name.removeprefix("net."): value for name, value in mode.model.network_params(mode.mean()).items()}
    net = mode.model.net
    net.load_state_dict(values)
    with torch.no_grad():
        inside, outside = (
            torch.cat([net[:-1](part) for part in x.split(500)]) for x in (images.inside, images.outside)
        )
    model = kn.Model(net[-1], kn.Categorical())
    head = kn.Particles(model, {name: value.detach()[None] for name, value in net[-1].named_parameters()})
    return Population(head, inside, images.inside_y, outside)


def _uci(name: str, quick: bool) -> Population:
    import knowable as kn

    if quick:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1000, 3, generator=generator)
        y = x[:, :1] + 0.3 * torch.randn(1000, 1, generator=generator)
    else:
        with np.load(data_folder() / "uci" / f"{name}.npz") as file:
            x, y = (torch.from_numpy(file[key]).float() for key in ("x", "y"))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    train, rest = order[: 400 if quick else _UCI_TRAINING], order[400 if quick else _UCI_TRAINING :]
    x = (x - x[train].mean(0)) / x[train].std(0)
    y = ((y - y[train].mean()) / y[train].std()).reshape(-1, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 2))
    model = kn.Model(net, kn.HeteroscedasticGaussian())
    ensemble = kn.DeepEnsemble(5, epochs=2 if quick else 200)
    return Population(ensemble.fit(model, (x[train], y[train]), progress=False), x[rest], y[rest])


def resplit(case: Case, people: Population, number: int) -> dict[str, float]:
    """One certificate, and how it does on the rows that were not held out."""
    import knowable as kn

    order = torch.randperm(len(people.x), generator=torch.Generator().manual_seed(number))
    held, new = order[: case.held_out], order[case.held_out :]
    certificate = kn.certify(
        people.posterior, (people.x[held], people.y[held]), alpha=case.alpha, delta=case.delta, score=case.score,
        seed=number,
    )  # fmt: skip
    said = certificate.predict(people.x)
    if said.set is not None:
        covered = said.set.gather(1, people.y.view(-1, 1))[:, 0]
        size, wrong = said.set.sum(1).double(), said.prediction.labels != people.y
    else:
        low, high = said.interval
        covered = ((people.y >= low) & (people.y <= high))[:, 0]
        size, wrong = (high - low)[:, 0].double(), ~covered
    kept, rule = said.accept, certificate.rejection
    risk = wrong[kept].double().mean().item() if kept.any() else 0.0
    return {
        "covered": covered[new].double().mean().item(),
        "size": size[new].mean().item(),
        "accepted": kept[new].double().mean().item(),
        "rule_wrong": float(risk > (rule.bound if rule.alpha is None else rule.alpha)),
        "false_alarms": (said.p_value[new] <= case.alpha).double().mean().item(),
    }


def evaluate(case: Case, quick: bool, people: Population) -> dict[str, Any]:
    """All resplits of a case."""
    case = replace(case, held_out=400, resplits=5) if quick else case
    found = [resplit(case, people, number) for number in range(case.resplits)]
    means = {name: statistics.fmean(each[name] for each in found) for name in found[0]}
    new, n = len(people.x) - case.held_out, case.held_out
    certified = n if case.data == "mnist" else math.ceil(n / 2)  # rows behind sets or intervals
    return {
        "error": None,
        **asdict(case),
        "means": means,
        "coverage": _band(certified, case.alpha, new, case.resplits, inside=True),
        "alarms": _band(n, case.alpha, new, case.resplits, inside=False),
        "wrong": sum(each["rule_wrong"] for each in found),
        "allowed": _allowed(case.resplits, case.delta),
    }


def _band(n: int, alpha: float, new: int, resplits: int, *, inside: bool) -> tuple[float, float, float]:
    """Expected share of new rows inside (or outside), and the band of its mean over resplits: 2.58 standard errors."""
    outside = math.floor((n + 1) * alpha + 1e-9)
    a, b = (n + 1 - outside, outside) if inside else (outside, n + 1 - outside)
    mean = a / (a + b)
    variance = mean * (1 - mean) * (a + b + new) / (new * (a + b + 1))
    spread = 2.576 * math.sqrt(variance / resplits)
    return mean, mean - spread, mean + spread


def _allowed(resplits: int, delta: float) -> int:
    """The largest count that a binomial variable exceeds with probability above 1%."""
    from scipy.stats import binom

    return int(binom.ppf(0.99, resplits, delta))


def streams(quick: bool, people: Population) -> dict[str, Any]:
    """False alarms over whole streams, and rows until a change is noticed."""
    import knowable as kn

    rows, count, change = (300, 5, 100) if quick else (_STREAM_ROWS, _STREAMS, _CHANGE)
    inside = people.posterior.predict(people.x).total.double()
    outside = people.posterior.predict(people.other).total.double()
    false, early, delays = 0, 0, []
    for number in range(count):
        generator = torch.Generator().manual_seed(number)
        order = inside[torch.randperm(len(inside), generator=generator)]
        held = len(order) // 5
        alarm = kn.StreamAlarm(order[:held], delta=0.05, seed=number)
        false += alarm.update(order[held : held + rows])
        alarm = kn.StreamAlarm(order[:held], delta=0.05, seed=number)
        if alarm.update(order[held : held + change]):
            early += 1
            continue
        alarm.update(outside[torch.randperm(len(outside), generator=generator)[:200]])
        delays.append(math.inf if alarm.alarm_at is None else alarm.alarm_at - change)
    return {
        "error": None, "streams": count, "rows": rows, "change": change, "false": false, "early": early,
        "median_delay": statistics.median(delays), "longest_delay": max(delays), "allowed": _allowed(count, 0.05),
    }  # fmt: skip


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All cases and the streams; ``only`` is a glob of names. Finished rows are not run again."""
    found: dict[str, Any] = {}
    fitted: dict[str, Population] = {}
    for case in CASES:
        if fnmatch(case.name, only):
            found[case.name] = _row(
                case.name + ", quick" * quick,
                rows,
                lambda case=case: evaluate(case, quick, _fitted(case.data, quick, fitted)),
            )
    stream = None
    if fnmatch(STREAM, only):
        stream = _row(STREAM + ", quick" * quick, rows, lambda: _streams(quick, fitted))
    return describe("guarantees", quick=quick, packages=(), cases=found, stream=stream)


def _streams(quick: bool, fitted: dict[str, Population]) -> dict[str, Any]:
    return streams(quick, _fitted("mnist", quick, fitted))


def _fitted(data: str, quick: bool, fitted: dict[str, Population]) -> Population:
    if data not in fitted:
        fitted[data] = population(data, quick)
    return fitted[data]


def _row(key: str, rows: Rows, make: Any) -> dict[str, Any]:
    known = rows.get(key)
    if known is not None:
        return known
    try:
        row = make()
    except Exception as error:
        row = {"error": one_line(error)}
    say(f"{key}: {row}")
    return rows.add(key, row)


def to_markdown(run: Mapping[str, Any]) -> str:
    """A table of certificates, and one of streams."""
    parts = [table("Certificates", _HEADER, [_cells(name, row) for name, row in run["cases"].items()], _NOTE)]
    row = run["stream"]
    if row is not None:
        header = ("streams", "rows of each", "false alarms", "allowed", "median rows to notice", "longest")
        cells = (
            [
                *(row[name] for name in ("streams", "rows", "false", "allowed")),
                *(f"{row[name]:g}" for name in ("median_delay", "longest_delay")),
            ]
            if row["error"] is None
            else [f"failed: {row['error']}"]
        )
        note = "MNIST at delta=5%; FashionMNIST follows after 1,000 rows of MNIST."
        parts.append(table("Alarm for a stream", header, [cells], note))
    return page(run, *parts)


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    if row["error"] is not None:
        return [name, f"failed: {row['error']}"]
    means, (expected, low, high), alarms = row["means"], row["coverage"], row["alarms"]
    return [
        name, f"{means['covered']:.4f}", f"{1 - row['alpha']:g}", f"{expected:.4f} ({low:.4f} to {high:.4f})",
        f"{means['size']:.3f}", f"{means['accepted']:.3f}", f"{row['wrong']:.0f}", str(row["resplits"]),
        str(row["allowed"]), f"{means['false_alarms']:.4f}", f"{alarms[0]:.4f} ({alarms[1]:.4f} to {alarms[2]:.4f})",
    ]  # fmt: skip
