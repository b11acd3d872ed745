"""A posterior as numbers to be drawn: curves or maps, weights, the terms of the fit, chains."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import interpolate

import knowable as kn
from knowable.core.model.likelihood import LIKELIHOOD_PREFIX
from knowable.errors import Unsupported
from knowable.interfaces.lab.problem import Problem

CURVE, MAP = 141, 44  # points of a curve, and of a side of a map
_COARSE, _COARSEST = 26, 18  # the same where the posterior is over functions; of the draws, which cost the sixth power
_SAMPLES, _FUNCTIONS, _BORDERS = 200, 12, 6  # draws of a prediction; functions, or borders of classes, that are shown
_WEIGHTS, _MOST_OF_A_LAYER = 200, 16  # draws of the weights; weights of a layer that are shown
_PATH, _CLOUD = 60, 300  # last positions of a chain; draws in the slice of weight space
_QUANTILES = torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95])
_RECORDS = 160  # of the terms


def grid_of(problem: Problem, side: int = MAP) -> Tensor:
    """Inputs at which a picture is computed: ``(141, 1)`` from left to right, or ``(side * side, 2)`` row by row."""
    left, right, bottom, top = problem.view
    if problem.task == "regression":
        return torch.linspace(left, right, CURVE).unsqueeze(1)
    x, y = torch.linspace(left, right, side), torch.linspace(bottom, top, side)
    return torch.stack([x.repeat(side), y.repeat_interleave(side)], 1)


def picture(problem: Problem, posterior: kn.Posterior) -> dict[str, Any]:
    """What is drawn of a posterior."""
    found = _curve(problem, posterior) if problem.task == "regression" else _map(problem, posterior)
    if isinstance(posterior, kn.ChainPosterior):
        found["chains"] = _chains(posterior)
    weights = _weights(posterior)
    return found if weights is None else {**found, "weights": weights}


def _curve(problem: Problem, posterior: kn.Posterior) -> dict[str, Any]:
    grid = grid_of(problem)
    found: Any = posterior.predict(grid, samples=_SAMPLES)
    draws = _functions(posterior, grid, _FUNCTIONS).flatten(1)
    return {
        "mean": rounded(found.mean.flatten()),
        "epistemic": rounded(found.epistemic.flatten().clamp_min(0).sqrt()),
        "aleatoric": rounded(found.aleatoric.flatten().clamp_min(0).sqrt()),
        "draws": [rounded(draw) for draw in draws],
    }


def _functions(posterior: kn.Posterior, grid: Tensor, count: int) -> Tensor:
    """Functions drawn from the posterior, without noise, ``(count, rows, ...)``."""
    if isinstance(posterior, kn.FunctionPosterior):
        return posterior.sample_functions(grid, count)
    if isinstance(posterior, kn.ChainPosterior):  # as many of each chain
        draws = posterior.function_draws(grid)
        each = max(1, count // draws.shape[0])
        return draws[:, :: max(1, draws.shape[1] // each)][:, :each].flatten(0, 1)
    return posterior.predict_jointly(grid, count).samples


def _map(problem: Problem, posterior: kn.Posterior) -> dict[str, Any]:
    side, coarse = (_COARSE, _COARSEST) if isinstance(posterior, kn.FunctionPosterior) else (MAP, MAP)
    most = math.log(problem.classes)
    found: Any = posterior.predict(grid_of(problem, side), samples=_SAMPLES)
    joint: Any = posterior.predict_jointly(grid_of(problem, coarse), _BORDERS)
    draws = joint.draw_log_probs.exp()[:_BORDERS]  # (draws, rows, classes)
    return {
        "probs": [_bytes(found.probs[:, each]) for each in range(problem.classes)],
        **{name: _bytes(getattr(found, name) / most) for name in ("total", "aleatoric", "epistemic")},
        "draws": [[_bytes(_lead(draw)[:, each]) for each in _with_borders(problem.classes)] for draw in draws],
    }


def _with_borders(classes: int) -> range:
    """Classes whose borders are drawn: of two there is one border."""
    return range(1, 2) if classes == 2 else range(classes)


def _lead(probs: Tensor) -> Tensor:
    """The root of each class's lead over the best of the others, from 0 to 1; 0.5 is the border, ``(rows, classes)``.

    By the root, so that borders between classes of nearly the same probability are lines in bytes too.
    """
    others = [probs[:, [k for k in range(probs.shape[1]) if k != c]].amax(1) for c in range(probs.shape[1])]
    lead = probs - torch.stack(others, 1)
    return 0.5 + 0.5 * lead.sign() * lead.abs().sqrt()


# --- weights and chains ----------------------------------------------------------------------------------------------


def _weights(posterior: kn.Posterior) -> dict[str, Any] | None:
    """Quantiles of the weights, layer by layer, and draws of two of them."""
    try:
        draws = posterior.sample(_WEIGHTS)
    except Unsupported:  # a distribution over functions
        return None
    names = [name for name in posterior.model.random_names if not name.startswith(LIKELIHOOD_PREFIX)]
    layers = []
    for name in names:
        flat = draws[name].flatten(1)
        some = flat[:, :: max(1, math.ceil(flat.shape[1] / _MOST_OF_A_LAYER))]
        quantiles = some.quantile(_QUANTILES, dim=0).T
        layers.append({"name": name, "count": flat.shape[1], "quantiles": [rounded(each) for each in quantiles]})
    pair = _slice(names, draws, 1)
    cloud = torch.stack([draws[name].flatten(1)[:, place] for name, place in pair], 1)
    return {"layers": layers, "slice": pair, "cloud": [rounded(each) for each in cloud]}


def _slice(names: list[str], draws: Mapping[str, Tensor], before: int) -> list[tuple[str, int]]:
    """Two weights by name and place: the first of the first layer and of the last, or two of one that is alone."""
    matrices = [name for name in names if name.endswith("weight")] or names
    first, last = matrices[0], matrices[-1]
    several = draws[first].flatten(before).shape[-1] > 1
    return [(first, 0), (last, int(first == last and several))]


def _chains(posterior: kn.ChainPosterior) -> dict[str, Any]:
    draws = posterior.draws
    names = [name for name in posterior.model.random_names if not name.startswith(LIKELIHOOD_PREFIX)]
    shown = [draws[name].flatten(2)[..., place] for name, place in _slice(names, draws, 2)]
    pair = torch.stack(shown, -1)[:8]  # (chains, draws, 2)
    step = max(1, pair.shape[1] // (_CLOUD // len(pair)))
    return {
        "draws": pair.shape[1],
        "paths": [[rounded(place) for place in chain[-_PATH:]] for chain in pair],
        "cloud": [[rounded(place) for place in chain[::step]] for chain in pair],
    }


def convergence(problem: Problem, posterior: kn.ChainPosterior) -> dict[str, float] | None:
    """R-hat and effective sample size of the function among the data; None where there are too few draws to tell."""
    if next(iter(posterior.draws.values())).shape[1] < 8:
        return None
    x = problem.data[0]
    found = posterior.function_diagnostics(x[:: max(1, len(x) // 12)])
    rhat, ess = found.rhat["f"].max().item(), found.ess["f"].min().item()
    return {"rhat": rhat, "ess": ess} if math.isfinite(rhat + ess) else None


# --- terms -----------------------------------------------------------------------------------------------------------


class Terms:
    """The terms of the objective as they come, thinned where there are many."""

    def __init__(self, size: int):
        self._size, self._label, self.rows = size, "", []
        self.names: tuple[str, ...] = ()

    def add(self, progress: kn.Progress) -> None:
        """Take those of one more record."""
        terms = progress.terms
        pair = next((pair for pair in _PAIRS if all(name in terms for name in pair)), None)
        if pair is None or "loss" not in terms:
            return
        if progress.label != self._label:  # a part of the fit with terms of its own
            self._label, self.rows = progress.label, []
        self.names = pair
        self.rows.append([progress.done, *(terms[name] for name in pair), -self._size * terms["loss"]])

    def content(self) -> dict[str, Any] | None:
        """Names and rows ``[step, likelihood, penalty, objective]``."""
        if not self.rows:
            return None
        step = max(1, math.ceil(len(self.rows) / _RECORDS))
        kept = [*self.rows[:-1][::step], self.rows[-1]]
        return {"names": self.names, "rows": [[float(f"{value:.6g}") for value in row] for row in kept]}


_PAIRS = (("expected_log_likelihood", "kl"), ("log_likelihood", "log_prior"))


# --- numbers on their way --------------------------------------------------------------------------------------------


def rounded(values: Tensor) -> list[float]:
    """Four digits, as the page needs no more; what is not finite is refused by JSON, and here a large number."""
    safe = values.detach().double().nan_to_num(0.0, 1e9, -1e9).clamp(-1e9, 1e9)
    return [float(f"{value:.4g}") for value in safe.tolist()]


def _bytes(values: Tensor) -> str:
    """Numbers between 0 and 1 at the places of a map, as bytes in base 64; those of a coarser one are interpolated."""
    side = math.isqrt(len(values))
    if side != MAP:
        image = values.detach().reshape(1, 1, side, side).double()
        values = interpolate(image, size=(MAP, MAP), mode="bilinear", align_corners=True).flatten()
    whole = (values.detach().nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)
    return base64.b64encode(whole.numpy().tobytes()).decode()


def as_line(content: dict[str, Any]) -> bytes:
    """A line of the stream to the page."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n"
