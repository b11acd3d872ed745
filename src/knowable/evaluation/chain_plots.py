"""Trace plots and rank plots of chains (Vehtari et al., 2021).

Both draw a few quantities, those with the largest R-hat first. They return a matplotlib ``Figure`` and touch nothing
global: no pyplot, no backend; ``figure.savefig("trace.png")`` writes it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from knowable.core.chains.convergence import ess_bulk, rhat
from knowable.core.chains.diagnostics import element_name
from knowable.core.chains.posterior import ChainPosterior, Samples
from knowable.core.support.checks import check_count
from knowable.core.support.figure import BAND, COLOURS, GRID, INK, MUTED, new_figure
from knowable.errors import InvalidArgument, InvalidType

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_WELL, _BADLY = 1.01, 1.05  # R-hat
_POINTS = 2_000  # of a trace; longer ones are thinned
_SHOWN_CHAINS = 8  # rows of ranks
_DENSITY = 160  # points of a density's curve


def trace_plot(
    samples: Samples | ChainPosterior | Mapping[str, Tensor], *, x: Any = None, names: Any = None, most: int = 4
) -> Figure:
    """Traces of the chains, with the density of each chain beside them.

    Chains that have mixed overlap, without a trend and with low autocorrelation. A chain that drifts, does not move or
    stays apart from the others has not mixed.

    Args:
        samples: Result of a sampler: ``Samples``, a ``ChainPosterior``, or draws by name ``(chains, draws, ...)``.
        x: Inputs: plot the network's outputs there instead of weights, which may be permuted between chains.
        names: Which parameters to draw; None is all of them.
        most: How many quantities to draw: those with the largest R-hat.

    Returns:
        The figure; ``figure.savefig("trace.png")`` writes it.

    Raises:
        MissingExtra: If matplotlib is not installed.
    """
    chosen = _chosen(samples, x, names, most)

    def draw(figure: Figure) -> None:
        grid = figure.add_gridspec(len(chosen), 2, width_ratios=(4, 1), wspace=0.02, hspace=0.08)
        for row, quantity in enumerate(chosen):
            left = figure.add_subplot(grid[row, 0])
            right = figure.add_subplot(grid[row, 1], sharey=left)
            _trace(left, quantity)
            _densities(right, quantity)
            left.set_title(quantity.name, loc="left", color=INK, fontweight="bold")
            _verdict(right, quantity, x=1.0)
            left.tick_params(labelbottom=row == len(chosen) - 1)
        left.set_xlabel("draw")  # type: ignore[possibly-undefined]
        right.set_xlabel("density")  # type: ignore[possibly-undefined]

    return new_figure(8.6, 0.5 + 1.75 * len(chosen), draw)


def rank_plot(
    samples: Samples | ChainPosterior | Mapping[str, Tensor],
    *,
    x: Any = None,
    names: Any = None,
    most: int = 4,
    bins: int = 20,
) -> Figure:
    """Histograms of the ranks of each chain's draws among the draws of all chains.

    If all chains draw from the same distribution their ranks are uniform: nearly every bar ends in the shaded band,
    which covers 95% of the bars of independent draws (autocorrelated ones vary more); bars outside are drawn dark. A
    slope shows a chain with another mean, a hump in the middle or at the ends one with a smaller or larger variance.

    Args:
        samples: Result of a sampler: ``Samples``, a ``ChainPosterior``, or draws by name ``(chains, draws, ...)``.
        x: Inputs: rank the network's outputs there instead of weights.
        names: Which parameters to draw; None is all of them.
        most: How many quantities to draw: those with the largest R-hat.
        bins: Bars for each chain.

    Returns:
        The figure; ``figure.savefig("ranks.png")`` writes it.

    Raises:
        MissingExtra: If matplotlib is not installed.
    """
    check_count("bins", bins, at_least=2)
    chosen = _chosen(samples, x, names, most)
    rows = min(len(chosen[0].draws), _SHOWN_CHAINS)

    def draw(figure: Figure) -> None:
        grid = figure.add_gridspec(rows, len(chosen), wspace=0.06, hspace=0.12)
        found = [rank_counts(quantity.draws, bins) for quantity in chosen]
        shown = _least_even([counts for counts, *_ in found], rows)
        for column, (quantity, (counts, expected, low, high)) in enumerate(zip(chosen, found, strict=True)):
            top = 1.1 * max(float(counts.max()), high)
            for row, chain in enumerate(shown):
                axes = figure.add_subplot(grid[row, column])
                _bars(axes, counts[chain], chain, expected, (low, high), top)
                axes.tick_params(labelbottom=row == rows - 1)
                if column == 0:
                    axes.set_ylabel(f"chain {chain + 1}", rotation=0, ha="right", va="center")
                if row == 0:
                    axes.set_title(quantity.name, loc="left", color=INK, fontweight="bold", pad=16)
                    _verdict(axes, quantity, x=0.0, ha="left")
        figure.supxlabel("rank among all draws", fontsize=9, color=INK)

    return new_figure(0.9 + 2.3 * len(chosen), 0.95 + 0.72 * rows, draw)


# --- what is drawn ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Quantity:
    name: str
    draws: Tensor  # (chains, draws)
    rhat: float
    ess: float


def _chosen(samples: Any, x: Any, names: Any, most: int) -> list[_Quantity]:
    """The quantities with the largest R-hat; those that are constant (R-hat is NaN) come last."""
    check_count("most", most)
    draws = _selected(_draws_of(samples, x), names)
    worst = torch.cat([rhat(value).reshape(-1) for value in draws.values()])
    order = worst.nan_to_num(-1.0).argsort(descending=True, stable=True)[:most].tolist()
    return [_quantity(draws, place, worst[place].item()) for place in order]


def _quantity(draws: dict[str, Tensor], place: int, worst: float) -> _Quantity:
    """Number ``place`` of all elements of all names, one name after the other."""
    for key, value in draws.items():
        shape = value.shape[2:]
        if place < math.prod(shape):
            one = value.reshape(*value.shape[:2], -1)[..., place].cpu().double()
            return _Quantity(element_name(key, shape, place), one, worst, ess_bulk(one).item())
        place -= math.prod(shape)
    raise IndexError(place)


def _draws_of(samples: Any, x: Any) -> dict[str, Tensor]:
    if isinstance(samples, ChainPosterior):
        given: Mapping[str, Any] = samples.draws if x is None else {"f": samples.function_draws(x)}
    elif x is not None:
        raise InvalidArgument("x needs a ChainPosterior, whose network has outputs at x; samples are draws alone.")
    elif isinstance(samples, Samples):
        given = samples.draws
    elif isinstance(samples, Mapping) and samples:
        given = samples
    else:
        raise InvalidType(
            f"samples must be Samples, a ChainPosterior or a dict of draws (chains, draws, ...), "
            f"got {type(samples).__name__}."
        )
    draws = {str(name): torch.as_tensor(value).detach() for name, value in given.items()}
    for name, value in draws.items():
        if value.dim() < 2 or value.shape[1] < 4 or value.numel() == 0:
            raise InvalidArgument(
                f"samples[{name!r}] must be draws (chains, draws, ...) with at least 4 draws, got shape "
                f"{tuple(value.shape)}."
            )
    if len({value.shape[:2] for value in draws.values()}) > 1:
        raise InvalidArgument("samples must have the same numbers of chains and draws for every name.")
    return draws


def _selected(draws: dict[str, Tensor], names: Any) -> dict[str, Tensor]:
    if names is None:
        return draws
    wanted = [names] if isinstance(names, str) else list(names)
    unknown = [name for name in wanted if name not in draws]
    if unknown or not wanted:
        raise InvalidArgument(f"names must be of {', '.join(map(repr, list(draws)[:12]))}; got {names!r}.")
    return {name: draws[name] for name in wanted}


def rank_counts(draws: Tensor, bins: int) -> tuple[Tensor, float, float, float]:
    """How many of each chain's ``(chains, draws)`` ranks fall in each bin, the number expected, and its 95% band.

    The band is that of independent draws (a hypergeometric count, nearly normal). Ties are ranked at random.
    """
    chains, count = draws.shape
    shuffled = torch.randperm(chains * count, generator=torch.Generator().manual_seed(0))
    flat = draws.flatten()
    order = shuffled[flat[shuffled].argsort(stable=True)]
    rank = torch.empty(len(flat), dtype=torch.long)
    rank[order] = torch.arange(len(flat))
    place = (rank * bins // len(flat)).view(chains, count)
    counts = torch.stack([row.bincount(minlength=bins) for row in place])
    total, share = chains * count, 1 / bins
    expected = count * share
    variance = count * share * (1 - share) * (total - count) / max(1, total - 1)
    half = 1.96 * math.sqrt(variance if chains > 1 else 0.0)
    return counts, expected, max(0.0, expected - half), expected + half


def _least_even(counts: list[Tensor], rows: int) -> list[int]:
    """All chains, or where there are too many those whose ranks are least uniform, in order."""
    uneven = torch.stack([each.double().var(1) for each in counts]).sum(0)
    return sorted(uneven.argsort(descending=True, stable=True)[:rows].tolist())


# --- drawing ---------------------------------------------------------------------------------------------------------


def _trace(axes: Axes, quantity: _Quantity) -> None:
    chains, count = quantity.draws.shape
    step = max(1, count // _POINTS)
    where = range(1, count + 1, step)
    width, alpha = 0.7 if count > 200 else 1.0, max(0.35, 0.9 - 0.06 * chains)
    for number, chain in enumerate(quantity.draws):
        colour = COLOURS[number % len(COLOURS)]
        axes.plot(where, chain[::step].numpy(), color=colour, lw=width, alpha=alpha, rasterized=True)
    axes.set_xlim(1, count)
    axes.grid(axis="y", color=GRID, lw=0.6)
    axes.margins(y=0.06)
    axes.locator_params(axis="y", nbins=4)


def _densities(axes: Axes, quantity: _Quantity) -> None:
    draws = quantity.draws
    finite = draws[torch.isfinite(draws)]
    low, high = (finite.min().item(), finite.max().item()) if len(finite) else (0.0, 1.0)
    margin = 0.06 * (high - low) or 1.0
    at = torch.linspace(low - margin, high + margin, _DENSITY, dtype=torch.float64)
    for number, chain in enumerate(draws):
        colour = COLOURS[number % len(COLOURS)]
        curve = kernel_density(chain, at).numpy()
        axes.plot(curve, at.numpy(), color=colour, lw=1.1, alpha=0.9)
        if len(draws) <= _SHOWN_CHAINS:
            axes.fill_betweenx(at.numpy(), 0, curve, color=colour, alpha=0.3 / math.sqrt(len(draws)), lw=0)
    axes.set_xlim(left=0)
    axes.set_xticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(left=False, labelleft=False)


def kernel_density(draws: Tensor, at: Tensor) -> Tensor:
    """A normal kernel estimate of the density of ``draws`` ``(n,)`` at ``at``; Silverman's (1986) width."""
    draws = draws[torch.isfinite(draws)][-5000:]
    if len(draws) < 2:
        return torch.zeros_like(at)
    spread = draws.quantile(torch.tensor([0.25, 0.75], dtype=draws.dtype)).diff().item() / 1.349
    scale = min(draws.std().item(), spread) if spread > 0 else draws.std().item()
    width = max(0.9 * scale * len(draws) ** -0.2, 0.5 * (at[1] - at[0]).item())  # a constant chain is a spike
    z = (at.unsqueeze(1) - draws) / width
    return torch.exp(-0.5 * z.square()).mean(1) / (width * math.sqrt(2 * math.pi))


def _bars(axes: Axes, counts: Tensor, chain: int, expected: float, band: tuple[float, float], top: float) -> None:
    bins = len(counts)
    axes.axhspan(*band, color=BAND, lw=0, zorder=0)
    axes.axhline(expected, color=MUTED, lw=0.8, ls=(0, (4, 3)), zorder=3)
    outside = (counts < band[0]) | (counts > band[1])
    colour = COLOURS[chain % len(COLOURS)]
    for alpha, mask in ((0.45, ~outside), (0.95, outside)):
        places = torch.arange(bins)[mask] + 0.5
        axes.bar(places.numpy() / bins, counts[mask].numpy(), width=0.86 / bins, color=colour, alpha=alpha, zorder=2)
    axes.set(xlim=(0, 1), ylim=(0, top))
    axes.set_xticks([0, 0.5, 1], ["lowest", "", "highest"])
    for label, side in zip(axes.get_xticklabels(), ("left", "center", "right"), strict=True):
        label.set_horizontalalignment(side)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _verdict(axes: Axes, quantity: _Quantity, *, x: float, ha: str = "right") -> None:
    """R-hat and effective sample size above the axes, in red where the chains have not mixed."""
    known = not math.isnan(quantity.rhat)
    colour = MUTED if not known or quantity.rhat <= _WELL else "#8a6d00" if quantity.rhat <= _BADLY else "#c0392b"
    number = f"{quantity.rhat:.3f}" if quantity.rhat < 10 else f"{quantity.rhat:.0f}".replace("inf", "∞")
    text = f"R-hat {number}   ess {quantity.ess:,.0f}" if known else "never moved"
    place: dict[str, Any] = {"xycoords": "axes fraction", "xytext": (0, 4), "textcoords": "offset points"}
    axes.annotate(text, (x, 1.0), **place, ha=ha, va="bottom", color=colour, fontsize=8)
