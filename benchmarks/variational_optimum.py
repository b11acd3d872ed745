"""How far variational fits at their defaults end from the optimum of their own family, and whether they say so.

Linear models with known noise have a normal posterior, so that the optimum of each family is known. A fit is good if
it ends within half a nat of that optimum, or if a ``ConvergenceWarning`` says by how much the ELBO could still rise and
the number is at least half of the truth. The last table has a regression whose targets are far from standardised.
"""

from __future__ import annotations

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import one_line
from benchmarks.study import Rows, describe, page, say, table
from benchmarks.variational_families import _block_divergence

SIZES = {"5 weights, 30 rows": (5, 30), "40 weights, 20 rows": (40, 20)}
NOISES = (1.0, 0.1, 0.01, 0.001)
SEEDS = range(10)
METHODS = ("MeanFieldVI", "NaturalVI", "MomentVI", "MixtureVI", "MatrixNormalVI", "LowRankVI", "FullRankVI", "FlowVI")
NETWORKS = ("linear", "MLP")
ENOUGH = 0.5  # nats
_HEADER = (
    "method", "noise", "nats missing, median", "worst", "sd over the optimum's", "converged", "warned",
    "possible rise where worst", "good", "seconds",
)  # fmt: skip
_NOTE = (
    "Nats missing: KL(q ‖ posterior) less that of the best member of the family, in closed form. FlowVI: KL by draws. "
    "MixtureVI: the mean over components, which is what it maximises. Best member: independent normals with the "
    "precisions' diagonal; a block for the weights and one for the bias (matrix normal); the posterior itself (full "
    "rank, flow); the best of several searches in double precision (low rank). Standard deviations: least and greatest "
    "ratio over weights and seeds. Seconds by the clock, pauses of a busy machine included."
)
_FITS = len(METHODS) * len(NOISES) * len(SEEDS)  # of each size
_SCALED = ("network", "ELBO", "greatest ELBO", "RMSE", "predictive sd", "converged", "warnings", "seconds")
_SCALED_NOTE = (
    "The priors N(0, 1) hold a bias of 1,000,000 for impossible: the posterior explains the targets by noise of that "
    "size. A fit that says so is right, and the warning says what to do."
)
HALF_LOG_TWO_PI = 0.5 * math.log(2.0 * math.pi)


# --- the optimum of each family --------------------------------------------------------------------------------------


def best_covariance(method: str, precision: Tensor) -> Tensor:
    """The covariance of the best member of a family for a normal posterior; means are exact in all of them."""
    if method == "LowRankVI":
        return best_low_rank(precision, 4)
    if method in ("FullRankVI", "FlowVI"):
        return torch.linalg.inv(precision)
    if method == "MatrixNormalVI":  # one row of weights, and the bias
        return torch.block_diag(torch.linalg.inv(precision[:-1, :-1]), precision[-1:, -1:].reciprocal())
    return precision.diagonal().reciprocal().diag()


def best_low_rank(precision: Tensor, rank: int, starts: int = 4) -> Tensor:
    """The best diagonal plus ``rank`` directions: there are several valleys, and L-BFGS begins in as many places.

    Written as diag(s) (I + Uᵀ U) diag(s), which has no units. The first places are where the library's own alternation
    ends, and the directions of least precision; the others are random.
    """
    from scipy.optimize import minimize

    from knowable.inference.variational.low_rank import nearest_low_rank

    size, generator = len(precision), torch.Generator().manual_seed(0)
    scale = precision.diagonal().rsqrt()
    standard = scale * precision * scale.unsqueeze(1)

    def covariance(numbers: Tensor) -> Tensor:
        half = numbers[:size].exp() * torch.cat([torch.eye(size, dtype=torch.float64), numbers[size:].view(rank, size)])
        return half.T @ half

    def divergence(at: Any) -> tuple[float, Any]:
        numbers = torch.tensor(at, requires_grad=True)
        product = standard @ covariance(numbers)
        value = 0.5 * (product.trace() - size - torch.linalg.slogdet(product).logabsdet)
        return value.item(), torch.autograd.grad(value, numbers)[0].numpy()

    values, vectors = torch.linalg.eigh(standard)
    lengths = (values[:rank].reciprocal() - 1.0).clamp_min(0.0).sqrt()
    flat = torch.zeros(size, dtype=torch.float64)
    first = [nearest_low_rank(standard, rank), (flat, lengths.unsqueeze(1) * vectors[:, :rank].T)]
    for _ in range(starts - len(first)):
        first.append((flat, 0.5 * torch.randn((rank, size), generator=generator, dtype=torch.float64)))
    ends = [
        minimize(
            divergence, torch.cat([log_scale, factor.flatten()]).numpy(), jac=True, method="L-BFGS-B",
            options={"maxiter": 3000, "maxfun": 4000},
        )
        for log_scale, factor in first
    ]  # fmt: skip
    best = min(ends, key=lambda end: end.fun)
    return scale * covariance(torch.tensor(best.x)) * scale.unsqueeze(1)


# --- one fit ---------------------------------------------------------------------------------------------------------


def evaluate(method: str, weights: int, rows: int, noise: float, seed: int, **settings: Any) -> dict[str, Any]:
    """Fit one method to one problem; what is missing, and what the fit says about it."""
    import knowable as kn
    from knowable.errors import ConvergenceWarning
    from knowable.testing import LinearGaussian

    problem = LinearGaussian.make(rows, weights - 1, noise=noise, seed=seed)
    best = best_covariance(method, problem.precision)
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = getattr(kn, method)(**settings).fit(problem.model(seed=seed), problem.data, seed=seed)
    seconds = time.perf_counter() - began
    found, error, std = _divergence(problem, posterior)
    ratio = std / best.diagonal().sqrt()
    said = posterior.diagnostics
    row = {
        "missing": found - _block_divergence(problem.precision, best), "error": None, "missing_error": error,
        "least_ratio": ratio.min().item(), "greatest_ratio": ratio.max().item(), "converged": said.converged,
        "warned": any(issubclass(each.category, ConvergenceWarning) for each in caught),
        "rise": said.get("possible_rise"), "rise_error": said.get("possible_rise_standard_error"), "seconds": seconds,
    }  # fmt: skip
    return {**row, "good": is_good(row)}


def is_good(row: Mapping[str, Any]) -> bool:
    """Near the optimum, or a warning with a number that is at least half of what is missing."""
    near = row["missing"] <= ENOUGH + 3.0 * row["missing_error"]
    return near or (row["warned"] and row["rise"] is not None and row["rise"] >= 0.5 * row["missing"])


def _divergence(problem: Any, posterior: Any) -> tuple[float, float, Tensor]:
    """KL to the posterior with its standard error, and standard deviations."""
    from knowable.core.network.params import Layout

    exact = torch.distributions.MultivariateNormal(problem.mean, precision_matrix=problem.precision)
    if hasattr(posterior, "members"):
        parts = [_divergence(problem, member) for member in posterior.members]
        std = torch.stack([part[2] for part in parts]).mean(0)
        return statistics.fmean(part[0] for part in parts), 0.0, std
    std = problem.as_flat(posterior.std())
    if type(posterior).__name__ == "FlowPosterior":
        draws = posterior.sample(20_000, torch.Generator().manual_seed(0))
        ratio = posterior.log_prob(draws) - exact.log_prob(problem.as_flat(draws))
        return ratio.mean().item(), ratio.std().item() / len(ratio) ** 0.5, std
    layout = Layout.of(problem.model().params())
    joint = posterior.as_prior().joint_normal(layout)
    if joint is None:  # independent normals
        joint = problem.as_flat(posterior.mean()), std.square().reciprocal().diag()
    loc, precision = joint
    away = loc.double() - problem.mean
    value = _block_divergence(problem.precision, torch.linalg.inv(precision.double()))
    return value + 0.5 * (away @ problem.precision @ away).item(), 0.0, std


def evaluate_scaled(network: str, seed: int = 0) -> dict[str, Any]:
    """``MeanFieldVI()`` on targets times 1e4 plus 1e6, nothing standardised."""
    import knowable as kn
    from knowable.errors import KnowableWarning

    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((200, 3), generator=generator)
    y = x @ torch.tensor([[1.0], [-2.0], [0.5]]) + 0.1 * torch.randn((200, 1), generator=generator)
    y = 1e4 * y + 1e6
    torch.manual_seed(seed)
    net = nn.Linear(3, 1) if network == "linear" else nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 1))
    began = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        posterior = kn.MeanFieldVI().fit(kn.Model(net, kn.Gaussian()), (x, y), seed=seed)
    seconds = time.perf_counter() - began
    predicted, evidence = posterior.predict(x), posterior.log_evidence
    warned = [f"{each.category.__name__}: {each.message}" for each in caught]
    assert evidence is not None and all(issubclass(each.category, KnowableWarning) for each in caught)
    return {
        "error": None, "off": (predicted.mean - y).square().mean().sqrt().item(),
        "std": predicted.std.mean().item(), "elbo": float(evidence), "elbo_error": evidence.standard_error,
        "best": best_scaled_elbo(x.double(), y.double().squeeze(1)) if network == "linear" else None,
        "converged": posterior.diagnostics.converged, "warned": warned, "seconds": seconds,
    }  # fmt: skip


def best_scaled_elbo(x: Tensor, y: Tensor) -> float:
    """The greatest ELBO of independent normals over weights and log noise of a linear model, by BFGS on its formula."""
    from scipy.optimize import minimize

    design = torch.cat([x, torch.ones_like(x[:, :1])], dim=1)
    centre, width = torch.tensor([0.0, 0, 0, 0, -1], dtype=torch.float64), torch.tensor([1.0, 1, 1, 1, 2]).double()
    normals = torch.distributions.Normal

    def loss(at: Any) -> tuple[float, Any]:
        numbers = torch.tensor(at, requires_grad=True)
        mean, std = numbers[:5], numbers[5:].exp()
        squares = (y - design @ mean[:4]).square().sum() + (design.square() @ std[:4].square()).sum()
        fit = -0.5 * squares * torch.exp(2 * std[4] ** 2 - 2 * mean[4]) - len(y) * (mean[4] + HALF_LOG_TWO_PI)
        kl = torch.distributions.kl_divergence(normals(mean, std), normals(centre, width)).sum()
        return (kl - fit).item(), torch.autograd.grad(kl - fit, numbers)[0].numpy()

    start = [0.0, 0, 0, 0, y.square().mean().sqrt().log().item(), 0, 0, 0, 0, -3]
    return -float(minimize(loss, start, jac=True, method="BFGS", options={"gtol": 1e-8, "maxiter": 2000}).fun)


# --- all of them -----------------------------------------------------------------------------------------------------


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All methods on all problems, seed by seed; ``only`` is a glob of fits, such as ``LowRankVI*`` or ``*seed [01]``.

    Finished rows are not run again.
    """
    settings: dict[str, Any] = {"epochs": 20} if quick else {}
    found: dict[str, list[dict[str, Any]]] = {size: [] for size in SIZES}
    for seed in SEEDS[:1] if quick else SEEDS:
        for noise, size, name in product(reversed(NOISES), SIZES, METHODS):
            key = f"{name}, {size}, noise {noise:g}, seed {seed}"
            if not fnmatch(key, only):
                continue
            key += ", quick" * quick
            row = _kept(rows, key, partial(evaluate, name, *SIZES[size], noise, seed, **settings))
            found[size].append({"method": name, "noise": noise, "seed": seed, **row})
    wanted = [name for name in NETWORKS if fnmatch(f"scaled, {name}", only) and not quick]
    scaled = {name: _kept(rows, f"scaled, {name}", partial(evaluate_scaled, name)) for name in wanted}
    return describe("variational_optimum", quick=quick, packages=(), sizes=found, scaled=scaled)


def _kept(rows: Rows, key: str, compute: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    known = rows.get(key)
    if known is not None:
        return known
    try:
        row = compute()
    except Exception as error:
        row = {"error": one_line(error)}
    say(f"{key}: {row['error'] or {name: value for name, value in row.items() if name != 'error'}}")
    return rows.add(key, row)


def to_markdown(run: Mapping[str, Any]) -> str:
    """A table for each size, and one for the targets that are not standardised."""
    parts = []
    for size, found in run["sizes"].items():
        groups: dict[tuple[str, float], list[dict[str, Any]]] = {}
        for row in sorted(found, key=lambda row: (METHODS.index(row["method"]), -row["noise"])):
            groups.setdefault((row["method"], row["noise"]), []).append(row)
        cells = [[name, f"{noise:g}", *_cells(group)] for (name, noise), group in groups.items()]
        seeds = ", ".join(str(seed) for seed in sorted({row["seed"] for row in found}))
        parts.append(table(size, _HEADER, cells, f"{_NOTE} Seeds run: {seeds}; {len(found)} of {_FITS} fits."))
    if run["scaled"]:
        cells = [[name, *_scaled_cells(row)] for name, row in run["scaled"].items()]
        parts.append(
            table(
                "Targets times 10,000 plus 1,000,000: MeanFieldVI(), nothing standardised", _SCALED, cells, _SCALED_NOTE
            )
        )
    return page(run, *parts)


def _cells(group: Sequence[Mapping[str, Any]]) -> list[str]:
    failed = [row["error"] for row in group if row["error"] is not None]
    if failed:
        return [f"failed: {failed[0]}"]
    worst = max(group, key=lambda row: row["missing"])
    rise = "" if worst["rise"] is None else f"{worst['rise']:.3g} ± {worst['rise_error']:.2g}"
    least, greatest = min(row["least_ratio"] for row in group), max(row["greatest_ratio"] for row in group)
    counts = [sum(bool(row[name]) for row in group) for name in ("converged", "warned", "good")]
    return [
        f"{statistics.median(row['missing'] for row in group):.3g}", f"{worst['missing']:.3g}",
        f"{least:.2f} to {greatest:.2f}", f"{counts[0]}/{len(group)}", f"{counts[1]}/{len(group)}", rise,
        f"{counts[2]}/{len(group)}", f"{statistics.median(row['seconds'] for row in group):.1f}",
    ]  # fmt: skip


def _scaled_cells(row: Mapping[str, Any]) -> list[str]:
    if row["error"] is not None:
        return [f"failed: {row['error']}"]
    best = "" if row["best"] is None else f"{row['best']:.2f}"
    return [
        f"{row['elbo']:.2f} ± {row['elbo_error']:.2f}", best, f"{row['off']:.4g}", f"{row['std']:.4g}",
        str(row["converged"]), " ".join(row["warned"]), f"{row['seconds']:.1f}",
    ]  # fmt: skip
