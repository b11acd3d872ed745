"""How near the variational families come to posteriors that are known: their divergence from it, and their bound.

Three posteriors: that of a linear model with correlated features (normal), that of a linear layer with several outputs
(normal, and a Kronecker product), and a bent one of two weights. The divergence KL(q ‖ p) is estimated from draws of
the fitted posterior and its density; with the bound it adds up to the log evidence.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from fnmatch import fnmatch
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.harness import one_line
from benchmarks.study import Rows, describe, page, say, table

SETTINGS: dict[str, Any] = {"epochs": 2000, "learning_rate": 0.03, "draws": 4}
_QUICK: dict[str, Any] = {"epochs": 20, "learning_rate": 0.02}
_DRAWS = 20_000  # for the divergence
_HEADER = ("family", "KL to the posterior", "least possible", "bound (ELBO)", "bound + KL - log evidence", "seconds")
_NOTE = (
    "Nats, ± standard errors of the estimates. Least possible: the divergence of the best member of the family, in "
    "closed form or by numerical optimisation of the exact bound, where there is one."
)
CONTENDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mean field": ("mean_field_vi", {}),
    "natural gradient, mean field": ("natural_vi", {}),
    "mixture of two": ("mixture_vi", {"components": 2}),
    "matrix normal": ("matrix_normal_vi", {}),
    "low rank, 1 direction": ("low_rank_vi", {"rank": 1}),
    "low rank, 5 directions": ("low_rank_vi", {"rank": 5}),
    "full rank": ("full_rank_vi", {}),
    "flow": ("flow_vi", {}),
}
"""Methods by name and settings; those that do not exist are left out."""


@dataclass(frozen=True)
class Problem:
    """A model whose posterior is known.

    Attributes:
        title: What it is.
        model: Makes the model.
        data: Inputs and targets.
        log_evidence: Log p(D).
        log_posterior: Log density of draws ``(K, ...)`` under the exact posterior, ``(K,)``.
        least: The smallest divergence that contenders can reach, where it is known.
    """

    title: str
    model: Callable[[], Any]
    data: tuple[Tensor, Tensor]
    log_evidence: float
    log_posterior: Callable[[dict[str, Tensor]], Tensor]
    least: Mapping[str, float]


def correlated() -> Problem:
    """A linear model with four correlated features."""
    from knowable.testing import LinearGaussian

    problem = LinearGaussian.make(n=40, d=4, noise=0.7, correlation=0.9, seed=0)
    exact = torch.distributions.MultivariateNormal(problem.mean, precision_matrix=problem.precision)
    independent = problem.divergence(problem.mean, problem.mean_field_std)
    weights, bias = (torch.linalg.inv(problem.precision[part, part]) for part in (slice(0, 4), slice(4, 5)))
    return Problem(
        "Linear model, 4 features with correlation 0.9", problem.model, problem.data, problem.log_evidence,
        lambda draws: exact.log_prob(problem.as_flat(draws)),
        {
            "mean field": independent, "natural gradient, mean field": independent,
            "matrix normal": _block_divergence(problem.precision, torch.block_diag(weights, bias)),
            "low rank, 1 direction": _best_low_rank(problem.precision, 1), "low rank, 5 directions": 0.0,
            "full rank": 0.0,
        },
    )  # fmt: skip


def several_outputs() -> Problem:
    """A linear layer with three outputs, whose posterior is a Kronecker product."""
    import knowable as kn

    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    x = 0.5 * normal(30, 4) + 0.9 * normal(30, 1)
    y = x @ normal(4, 3) + 0.5 * normal(30, 3)
    block = torch.eye(4, dtype=torch.float64) + x.T @ x / 0.25
    precision = torch.kron(torch.eye(3, dtype=torch.float64), block)  # of the rows of the weight, one after the other
    mean = torch.linalg.solve(block, x.T @ y / 0.25).T.flatten()
    exact = torch.distributions.MultivariateNormal(mean, precision_matrix=precision)
    rows = torch.distributions.MultivariateNormal(
        torch.zeros(30, dtype=torch.float64), x @ x.T + 0.25 * torch.eye(30, dtype=torch.float64)
    )
    independent = _block_divergence(precision, precision.diagonal().reciprocal().diag())
    return Problem(
        "Linear layer with 4 correlated inputs and 3 outputs",
        lambda: kn.Model(nn.Linear(4, 3, bias=False).double(), kn.Gaussian(0.5)), (x, y),
        sum(rows.log_prob(y[:, k]).item() for k in range(3)),
        lambda draws: exact.log_prob(draws["weight"].flatten(1)),
        {
            "mean field": independent, "natural gradient, mean field": independent, "matrix normal": 0.0,
            "low rank, 1 direction": _best_low_rank(precision, 1),
            "low rank, 5 directions": _best_low_rank(precision, 5), "full rank": 0.0,
        },
    )  # fmt: skip


def banana() -> Problem:
    """Two weights along a parabola."""
    from knowable.testing import BananaRegression

    problem = BananaRegression()
    best = {correlated: _best_normal(problem, correlated) for correlated in (False, True)}
    normals = dict.fromkeys(("low rank, 1 direction", "low rank, 5 directions", "full rank"), best[True])
    independent = dict.fromkeys(("mean field", "natural gradient, mean field", "matrix normal"), best[False])
    return Problem(
        "A bent posterior of two weights", problem.model, problem.data, problem.log_evidence,
        lambda draws: problem.log_posterior(problem.as_flat(draws)), {**normals, **independent},
    )  # fmt: skip


PROBLEMS: dict[str, Callable[[], Problem]] = {
    "correlated": correlated, "several_outputs": several_outputs, "banana": banana,
}  # fmt: skip


def _block_divergence(precision: Tensor, covariance: Tensor) -> float:
    """KL to N(m, precision⁻¹) from a normal with the same mean and this covariance."""
    product = precision @ covariance
    return 0.5 * (product.trace() - len(precision) - torch.logdet(product)).item()


def _best_low_rank(precision: Tensor, rank: int) -> float:
    """The smallest divergence of a normal with a diagonal and so many directions: the best of several searches."""
    from scipy.optimize import minimize

    size, generator = len(precision), torch.Generator().manual_seed(0)
    scale = precision.diagonal().rsqrt()

    def divergence(at: Any) -> tuple[float, Any]:
        numbers = torch.tensor(at, requires_grad=True)
        factor = numbers[size:].view(size, rank)
        product = precision @ ((2 * numbers[:size]).exp().diag() + factor @ factor.T)
        value = 0.5 * (product.trace() - size - torch.logdet(product))
        return value.item(), torch.autograd.grad(value, numbers)[0].numpy()

    def search() -> float:
        factor = 0.5 * scale.unsqueeze(1) * torch.randn((size, rank), generator=generator, dtype=torch.float64)
        start = torch.cat([scale.log(), factor.flatten()]).numpy()
        return float(minimize(divergence, start, jac=True, method="L-BFGS-B").fun)

    return min(search() for _ in range(8))


def _best_normal(problem: Any, correlated: bool) -> float:
    """The smallest divergence of a normal from a bent posterior, over its mean and Cholesky factor."""
    from scipy.optimize import minimize

    def divergence(at: Any) -> float:
        factor = torch.tensor(at[2:4]).exp().diag()
        factor[1, 0] = float(at[4]) if correlated else 0.0
        return problem.divergence(torch.tensor(at[:2]), factor @ factor.T)

    return float(minimize(divergence, [0.0, 0.0, -1.0, -1.0, 0.0], method="BFGS").fun)


def evaluate(problem: Problem, name: str, *, quick: bool, seed: int = 0) -> dict[str, float]:
    """Fit one family; its divergence and its bound, with their errors."""
    import warnings

    from knowable.registry import METHODS

    method_name, own = CONTENDERS[name]
    cls = METHODS[method_name].cls
    known = {field.name for field in fields(cls)}  # type: ignore[arg-type]
    settings = {key: value for key, value in (_QUICK if quick else SETTINGS).items() if key in known}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        posterior = cls(**settings, **own).fit(problem.model(), problem.data, seed=seed, progress=False)
    draws = posterior.sample(_DRAWS, torch.Generator().manual_seed(seed))
    ratio = posterior.log_prob(draws) - problem.log_posterior(draws)
    evidence = posterior.log_evidence
    return {
        "kl": ratio.mean().item(), "kl_error": ratio.std().item() / math.sqrt(_DRAWS),
        "bound": math.nan if evidence is None else float(evidence),
        "bound_error": (evidence.standard_error or 0.0) if evidence is not None else math.nan,
        "seconds": posterior.diagnostics.seconds,
    }  # fmt: skip


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """All families on all problems; ``only`` is a glob of problems. Finished rows are not run again."""
    from knowable.registry import METHODS

    names = [name for name, (method, _) in CONTENDERS.items() if method in METHODS]
    found = {}
    for key, make in PROBLEMS.items():
        if fnmatch(key, only):
            problem = make()
            results = {name: _row(key, problem, name, quick, rows) for name in names}
            found[key] = {
                "title": problem.title, "log_evidence": problem.log_evidence, "least": dict(problem.least),
                "families": results,
            }  # fmt: skip
    return describe("variational_families", quick=quick, packages=(), settings=SETTINGS, problems=found)


def _row(key: str, problem: Problem, name: str, quick: bool, rows: Rows) -> dict[str, Any]:
    row_key = f"{key}, {name}, {SETTINGS}" + ", quick" * quick
    known = rows.get(row_key)
    if known is not None:
        return known
    try:
        row: dict[str, Any] = {"error": None, **evaluate(problem, name, quick=quick)}
    except Exception as error:
        row = {"error": one_line(error)}
    say(f"{key}, {name}: {row['error'] or 'KL {kl:.4f}, {seconds:.0f} s'.format(**row)}")
    return rows.add(row_key, row)


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table for each problem."""
    parts = [
        table(
            f"{found['title']}: log evidence {found['log_evidence']:.3f}", _HEADER,
            [_cells(name, row, found) for name, row in found["families"].items()], _NOTE,
        )
        for found in run["problems"].values()
    ]  # fmt: skip
    return page(run, *parts)


def _cells(name: str, row: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    if row["error"] is not None:
        return [name, f"failed: {row['error']}"]
    least = found["least"].get(name)
    rest = row["bound"] + row["kl"] - found["log_evidence"]
    error = math.hypot(row["bound_error"], row["kl_error"])
    return [
        name, f"{row['kl']:.4f} ± {row['kl_error']:.4f}", "" if least is None else f"{least:.4f}",
        f"{row['bound']:.3f} ± {row['bound_error']:.3f}", f"{rest:+.3f} ± {error:.3f}", f"{row['seconds']:.0f}",
    ]  # fmt: skip
