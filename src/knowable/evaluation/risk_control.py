"""Risk control: settings and rejection rules whose risk on new rows is bounded, chosen on held-out rows.

A row is whatever is exchangeable: a row of a table, an image. Its loss is a number between 0 and ``largest``: whether
the label is wrong, the share of a mask that is missed, the share of pixels outside their interval.

0-1 losses (booleans or whole numbers) get the exact binomial bound; losses with a decimal point the bound of Hoeffding
and Bentkus, which holds for any bounded loss.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import betainc, betaincinv
from torch import Tensor

from knowable.core.prediction.prediction import check_finite_target
from knowable.core.support.checks import check_number
from knowable.core.support.tensors import to_tensor
from knowable.errors import InvalidData
from knowable.evaluation.inputs import Array, by_row, check_rows, score_tensor

_ROUNDING = 1e-9
_BISECTIONS = 60


@dataclass(frozen=True)
class RiskControl:
    """A setting whose risk is bounded.

    Attributes:
        index: Its place in the grid: the first of those from which on the bound holds.
        risk: Mean loss of the held-out rows there.
        bound: What bounds the risk on new rows: with ``delta`` the upper confidence bound; without, the bound of the
            expected loss. At most ``alpha``.
        n: Number of held-out rows.
        alpha: The risk that was asked for.
        delta: Probability that the risk is larger, over draws of the held-out rows; None: the bound is of the expected
            loss of a new row, the mean over draws of the held-out rows too.
    """

    index: int
    risk: float
    bound: float
    n: int
    alpha: float
    delta: float | None

    @property
    def statement(self) -> str:
        """The guarantee as a sentence that may be quoted."""
        if self.delta is None:
            return (
                f"The expected loss of a new row is at most {self.alpha:g}, on average over draws of {self.n:,} "
                f"held-out rows."
            )
        return (
            f"With probability {1 - self.delta:g} over the draw of {self.n:,} held-out rows, the expected loss of a "
            f"new row is at most {self.alpha:g} (upper bound {self.bound:.4g})."
        )


@torch.no_grad()
def control_risk(losses: Array, alpha: float, delta: float | None = None, *, largest: float = 1.0) -> RiskControl:
    r"""The least cautious setting of a grid whose risk is at most ``alpha``.

    With ``delta``, risk-controlling prediction sets (Bates et al., 2021): the first setting from which on the upper
    confidence bound of the risk stays within ``alpha``; then, with probability :math:`1 - \delta`, so does the risk.
    Without, conformal risk control (Angelopoulos et al., 2022): the first setting with

    .. math:: \frac{n}{n + 1} \hat R + \frac{B}{n + 1} \le \alpha

    where B is the ``largest`` loss; then the expected loss of a new row is at most ``alpha``.

    Args:
        losses: ``(n, grid)``: the loss of each held-out row at each setting, from the least to the most cautious one,
            never growing along the grid. Booleans and whole numbers are 0-1 losses.
        alpha: The risk allowed, in units of the loss.
        delta: Probability with which the risk may be larger; None for a bound of the expectation.
        largest: The largest loss there can be.

    Raises:
        InvalidData: If losses grow along the grid, leave [0, ``largest``], or no setting of the grid is good enough;
            the message says how many rows are needed.
    """
    largest = check_number("largest", largest, above=0.0)
    alpha = check_number("alpha", alpha, above=0.0, below=largest)
    values, binary = _checked_losses(losses, largest)
    if values.dim() != 2:
        raise InvalidData(f"losses must have shape (rows, grid), got {tuple(values.shape)}.")
    grows = (values[:, 1:] > values[:, :-1] + _ROUNDING * largest).any(1)
    if grows.any():
        raise InvalidData(
            f"losses must not grow along the grid, those of row {int(torch.nonzero(grows)[0])} (counting from 0) do. "
            f"Order the grid from the least to the most cautious setting; losses.flip(1).cummax(1).values.flip(1) is "
            f"the least monotone loss above yours."
        )
    n, means = len(values), values.mean(0)
    if delta is None:
        bounds = (n * means + largest) / (n + 1)
    else:
        delta = check_number("delta", delta, above=0.0, below=1.0)
        bounds = largest * risk_bound(values / largest, delta, binary=binary)
    good = (bounds <= alpha + _ROUNDING * largest).flip(0).cummin(0).values.flip(0)
    if not good.any():
        raise InvalidData(
            f"No setting of the grid keeps the risk within {alpha:g}: at the most cautious one the mean loss of "
            f"{n:,} rows is {means[-1]:.4g} and its bound {bounds[-1]:.4g}. Were that loss 0, "
            f"{rows_for_risk(alpha / largest, delta, binary=binary):,} rows would be needed. Hold out more rows, go on "
            f"to more cautious settings, or raise alpha."
        )
    index = int(torch.nonzero(good)[0])
    return RiskControl(index, means[index].item(), bounds[index].item(), n, alpha, delta)


def rows_for_risk(alpha: float, delta: float | None, *, binary: bool = True) -> int:
    """Least number of held-out rows, all without any loss, that bound a risk by ``alpha``, losses being at most 1."""
    if delta is None:
        return math.ceil(1 / alpha - _ROUNDING) - 1
    return math.ceil(math.log(delta) / math.log1p(-alpha) - _ROUNDING)


@torch.no_grad()
def risk_p_value(losses: Array, alpha: float, *, binary: bool | None = None) -> Tensor:
    r"""P-value of "the risk is larger than ``alpha``", for each column of ``losses``.

    0-1 losses: :math:`P(\mathrm{Bin}(n, \alpha) \le n \hat R)`, exact. Others between 0 and 1: the smaller of
    Hoeffding's and Bentkus' bounds (Bates et al., 2021),

    .. math:: \min\left(e^{-n\, \mathrm{kl}(\min(\hat R, \alpha), \alpha)},\;
        e\, P(\mathrm{Bin}(n, \alpha) \le \lceil n \hat R \rceil)\right).

    Args:
        losses: ``(n,)`` or ``(n, grid)``, between 0 and 1; booleans and whole numbers are 0-1 losses.
        alpha: The risk.
        binary: Whether losses are 0 or 1 and nothing between; None: by their dtype.
    """
    alpha = check_number("alpha", alpha, above=0.0, below=1.0)
    values, found = _checked_losses(losses, 1.0)
    p = _p_values(values.sum(0).numpy(), len(values), alpha, found if binary is None else binary)
    return torch.as_tensor(p, dtype=torch.float64)


@torch.no_grad()
def risk_bound(losses: Array, delta: float, *, binary: bool | None = None) -> Tensor:
    """Upper confidence bound of the risk at level ``1 - delta``, for each column of ``losses``.

    The largest risk that :func:`risk_p_value` does not reject at level ``delta``: of Clopper and Pearson (1934) for 0-1
    losses, of Hoeffding and Bentkus for others between 0 and 1.

    Args:
        losses: ``(n,)`` or ``(n, grid)``, between 0 and 1; booleans and whole numbers are 0-1 losses.
        delta: Probability that the risk is above the bound.
        binary: Whether losses are 0 or 1 and nothing between; None: by their dtype.
    """
    delta = check_number("delta", delta, above=0.0, below=1.0)
    values, found = _checked_losses(losses, 1.0)
    sums, n = np.asarray(values.sum(0).numpy()), len(values)
    if found if binary is None else binary:
        bound = np.where(sums >= n, 1.0, betaincinv(sums + 1, np.maximum(n - sums, 1e-300), 1 - delta))
        return torch.as_tensor(bound, dtype=torch.float64)
    low, high = np.minimum(sums / n, 1.0), np.ones_like(sums, dtype=float)
    for _ in range(_BISECTIONS):  # the p-value falls as alpha rises
        middle = (low + high) / 2
        rejected = _p_values(sums, n, middle, binary=False) <= delta
        high, low = np.where(rejected, middle, high), np.where(rejected, low, middle)
    return torch.as_tensor(high, dtype=torch.float64)


def _p_values(sums: np.ndarray, n: np.ndarray | int, alpha: np.ndarray | float, binary: bool) -> np.ndarray:
    """P-values for sums of n losses."""
    if binary:
        return _binomial_cdf(np.round(sums), n, alpha)
    mean = np.minimum(sums / np.maximum(n, 1), alpha)
    bentkus = math.e * _binomial_cdf(np.ceil(sums - _ROUNDING), n, alpha)
    return np.minimum(np.minimum(np.exp(-n * _divergence(mean, alpha)), bentkus), 1.0)


def _binomial_cdf(count: np.ndarray, n: np.ndarray | int, alpha: np.ndarray | float) -> np.ndarray:
    """P(Bin(n, alpha) <= count)."""
    return np.where(count >= n, 1.0, betainc(np.maximum(n - count, 1e-300), count + 1, 1 - np.asarray(alpha)))


def _divergence(mean: np.ndarray, alpha: np.ndarray | float) -> np.ndarray:
    """KL divergence of Bernoulli(mean) from Bernoulli(alpha)."""
    with np.errstate(divide="ignore", invalid="ignore"):
        ones = np.where(mean > 0, mean * np.log(mean / alpha), 0.0)
        zeros = np.where(mean < 1, (1 - mean) * np.log((1 - mean) / (1 - np.asarray(alpha))), 0.0)
    return ones + zeros


def _checked_losses(losses: Array, largest: float) -> tuple[Tensor, bool]:
    """Losses in double precision on the CPU, and whether they are 0-1 losses by their dtype."""
    given = to_tensor(losses, "losses")
    values = check_rows("losses", score_tensor("losses", given)).double().cpu()
    check_finite_target(values, name="losses")
    binary = not given.is_floating_point()
    if binary and not ((values == 0) | (values == largest)).all():
        raise InvalidData(
            f"losses are whole numbers but not all 0 or {largest:g}. Convert losses between these to floating point."
        )
    if values.min() < -_ROUNDING or values.max() > largest * (1 + _ROUNDING):
        raise InvalidData(
            f"losses must lie between 0 and {largest:g}, got values from {values.min():.4g} to {values.max():.4g}. "
            f"Pass largest=..., or clip them."
        )
    return values.clamp(0.0, largest), binary


# --- losses of images, at every setting of a grid ---------------------------------------------------------------------


@torch.no_grad()
def missed_shares(probs: Array, mask: Array, thresholds: Array) -> Tensor:
    """Share of each true mask that is missed by the mask ``probs >= threshold``: the false negative rate.

    Args:
        probs: Probability of the mask at each pixel, ``(n, ...)``.
        mask: Which pixels truly belong to it, ``(n, ...)``.
        thresholds: The grid, from large (a small mask) to small, ``(grid,)``; end it with 0, which misses nothing.

    Returns:
        ``(n, grid)``; 0 for an image without a mask.
    """
    p = check_finite_target(by_row(check_rows("probs", score_tensor("probs", probs)).double()), name="probs")
    true = by_row(score_tensor("mask", mask)).to(p.device)
    if true.shape != p.shape:
        raise InvalidData(f"mask must have the shape of probs, {tuple(p.shape)} by rows; got {tuple(true.shape)}.")
    if not ((true == 0) | (true == 1)).all():
        raise InvalidData("mask must hold 0 and 1, or booleans.")
    grid = score_tensor("thresholds", thresholds).double().to(p.device)
    true, inside = true.bool(), p.where(true.bool(), torch.inf)
    size = true.sum(1).clamp_min(1)
    return torch.stack([(inside < t).sum(1) / size.double() for t in grid], 1)


@torch.no_grad()
def outside_shares(scores: Array, thresholds: Array) -> Tensor:
    """Share of each row's outputs or pixels whose conformity score is above the threshold.

    Args:
        scores: How far each outcome is from its prediction, ``(n, ...)``: one of the scores of ``knowable.conformal``
            for numbers, such as ``normalised_scores``; NaN where no outcome is known.
        thresholds: The grid, from small (narrow intervals) to large, ``(grid,)``.

    Returns:
        ``(n, grid)``.
    """
    values = by_row(check_rows("scores", score_tensor("scores", scores)).double())
    known, grid = ~values.isnan(), score_tensor("thresholds", thresholds).double().to(values.device)
    size = known.sum(1).clamp_min(1)
    return torch.stack([((values > t) & known).sum(1) / size.double() for t in grid], 1)


# --- rejection: which predictions to keep, so that few of them are wrong ----------------------------------------------


@dataclass(frozen=True)
class RejectionRule:
    """Accept a prediction whose uncertainty is at most a threshold.

    Attributes:
        threshold: Largest uncertainty that is accepted; minus infinity if none could be certified.
        risk: Mean loss of the held-out rows that were accepted, among those the rule was tested on; NaN if none.
        bound: Upper confidence bound of the risk among accepted rows, at level ``1 - delta``; 1 if none are.
        accepted: Share of those held-out rows that were accepted.
        n: Number of rows that the rule was tested on.
        alpha: The risk that was asked for; None: no risk was asked for, and the bound is what came out.
        delta: Probability that the risk is above its bound.
    """

    threshold: float
    risk: float
    bound: float
    accepted: float
    n: int
    alpha: float | None
    delta: float

    @property
    def certified(self) -> bool:
        """Whether there is a threshold."""
        return math.isfinite(self.threshold)


@torch.no_grad()
def rejection_rule(
    uncertainty: Array, losses: Array, alpha: float, delta: float = 0.05, *, seed: int = 0, start: float | None = None
) -> RejectionRule:
    r"""The rule that accepts most rows while, with probability 1 - delta, the mean loss of accepted ones is in bounds.

    .. math:: P\big(E[\ell \mid u \le t] \le \alpha\big) \ge 1 - \delta

    A fixed sequence of tests (Angelopoulos et al., 2021, "Learn then test"): beginning at ``start``, "the risk below t
    is larger than alpha" is tested at level ``delta`` for one threshold after the other, up to the first that cannot be
    rejected; the last before it is taken. Between two rows nothing changes, so these are tests at *every* number t: a
    sequence that does not depend on the rows, and the level needs no correction for their number. Where to begin is
    chosen on a fifth of the rows, drawn by ``seed``, and tested on the others.

    Geifman and El-Yaniv (2017) have the same bound with a correction for a binary search.

    Args:
        uncertainty: A number for each row, ``(n,)``: larger is less certain.
        losses: ``(n,)`` between 0 and 1; booleans and whole numbers (1 is wrong) get the exact binomial test.
        alpha: The risk allowed among accepted rows.
        delta: Probability with which it may be larger, over draws of the rows.
        seed: Which rows choose where to begin.
        start: Where to begin, known beforehand; then all rows are used for the tests.

    Raises:
        InvalidData: With fewer rows than any such rule needs; the message says how many.
    """
    alpha = check_number("alpha", alpha, above=0.0, below=1.0)
    delta = check_number("delta", delta, above=0.0, below=1.0)
    values, binary = _checked_losses(losses, 1.0)
    u = _checked_uncertainty(uncertainty, len(values))
    if values.dim() != 1:
        raise InvalidData(f"losses must have one number a row, got shape {tuple(values.shape)}. Average each row's.")
    needed = rows_for_risk(alpha, delta)
    if len(u) < needed:
        raise InvalidData(
            f"A rejection rule with risk at most {alpha:g} with probability {1 - delta:g} needs at least {needed:,} "
            f"held-out rows, got {len(u):,}. Hold out more rows, or raise alpha or delta."
        )
    if start is None:
        order = torch.randperm(len(u), generator=torch.Generator().manual_seed(seed))
        first = min(len(u) // 5, len(u) - needed)
        chosen, rest = order[:first], order[first:]
        start = _promising_start(u[chosen], values[chosen], alpha, len(rest), binary)
        u, values = u[rest], values[rest]
    return _fixed_sequence(u, values, float(start), alpha, delta, binary)


def accepting_rule(uncertainty: Array, losses: Array, threshold: float, delta: float) -> RejectionRule:
    """A rule with a threshold that was chosen on other rows, and the bound of its risk on these."""
    values, binary = _checked_losses(losses, 1.0)
    u = _checked_uncertainty(uncertainty, len(values))
    return _rule(u, values, threshold, None, check_number("delta", delta, above=0.0, below=1.0), binary)


def _checked_uncertainty(uncertainty: Array, rows: int) -> Tensor:
    u = check_rows("uncertainty", score_tensor("uncertainty", uncertainty)).double().cpu()
    if u.shape != (rows,):
        raise InvalidData(f"uncertainty must have one number for each of {rows} losses, got shape {tuple(u.shape)}.")
    if u.isnan().any():
        raise InvalidData(f"uncertainty is missing in row {int(torch.nonzero(u.isnan())[0])} (counting from 0).")
    return u


def _cumulative(u: Tensor, losses: Tensor) -> tuple[Tensor, np.ndarray, np.ndarray]:
    """Distinct uncertainties in order; how many rows are at most that uncertain, and the sum of their losses."""
    distinct, place = u.unique(return_inverse=True)
    counts = torch.zeros(len(distinct), dtype=torch.float64).index_add_(0, place, torch.ones_like(losses)).cumsum(0)
    sums = torch.zeros(len(distinct), dtype=torch.float64).index_add_(0, place, losses).cumsum(0)
    return distinct, counts.numpy(), sums.numpy()


def _promising_start(u: Tensor, losses: Tensor, alpha: float, rows: int, binary: bool) -> float:
    """The threshold with the smallest p-value to be expected on so many other rows."""
    if len(u) == 0:
        return math.inf
    distinct, counts, sums = _cumulative(u, losses)
    n = np.floor(counts * rows / len(u))
    p = _p_values(np.ceil(n * (sums + 0.5) / (counts + 1)), n, alpha, binary)
    return distinct[int(np.argmin(p))].item()


def _fixed_sequence(u: Tensor, losses: Tensor, start: float, alpha: float, delta: float, binary: bool) -> RejectionRule:
    distinct, counts, sums = _cumulative(u, losses)
    first = int((distinct <= start).sum()) - 1  # the test at ``start`` is the one at the last row below it
    tested = _p_values(sums[max(first, 0) :], counts[max(first, 0) :], alpha, binary) <= delta
    if first < 0 or not tested[0]:
        return _rule(u, losses, -math.inf, alpha, delta, binary)
    passed = len(tested) if tested.all() else int(np.argmin(tested))
    return _rule(u, losses, distinct[first + passed - 1].item(), alpha, delta, binary)


def _rule(
    u: Tensor, losses: Tensor, threshold: float, alpha: float | None, delta: float, binary: bool
) -> RejectionRule:
    kept = losses[u <= threshold]
    risk = kept.mean().item() if len(kept) else math.nan
    bound = risk_bound(kept, delta, binary=binary).item() if len(kept) else 1.0
    return RejectionRule(threshold, risk, bound, len(kept) / max(1, len(u)), len(u), alpha, delta)
