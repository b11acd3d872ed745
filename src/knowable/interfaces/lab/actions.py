"""Questions to a posterior: where to label or evaluate next, an attack, what to reject, how far it is from another."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import knowable as kn
from knowable.core.support.checks import check_number
from knowable.decisions.acquisition import upper_confidence_bound
from knowable.errors import InvalidArgument, Unsupported
from knowable.interfaces.lab.picture import grid_of, rounded
from knowable.interfaces.lab.problem import Problem

_FEWEST_HELD = 10  # rows to certify on
_POOL = 400  # places that may be labelled
_COMPARED = 40  # inputs at which posteriors are compared
_STEPS, _RESTARTS = 60, 4  # of an attack


def label_next(problem: Problem, posterior: kn.Posterior, *, method: Any, **_: Any) -> dict[str, Any]:
    """The point of the plane whose label would tell most, by BALD."""
    x, y = problem.data
    pool = torch.cat([x, _inside(problem)])
    spread: Any = posterior.predict(pool, samples=50)
    if spread.epistemic.max() <= 0:
        raise Unsupported("One network has no epistemic uncertainty: by BALD no label tells more than another.")
    learner = kn.ActiveLearner(posterior.model, method, pool, acquisition="bald")
    learner.label(range(len(x)), y, posterior=posterior)
    place = pool[int(learner.query(1)[0])]
    return {"point": rounded(place), "text": f"A label at {_words(place)} would tell most (BALD)."}


def evaluate_next(problem: Problem, posterior: kn.Posterior, *, beta: Any = 2.0, **_: Any) -> dict[str, Any]:
    """Where the upper confidence bound is largest: the next evaluation of a function to be maximised."""
    _only_numbers(problem, "Where to evaluate next")
    grid, beta = grid_of(problem), check_number("beta", beta, at_least=0.0, at_most=10.0)
    prediction: Any = posterior.predict(grid, samples=200)
    bound = upper_confidence_bound(prediction, beta)
    best = int(bound.argmax())
    return {
        "point": [*rounded(grid[best]), *rounded(bound[best : best + 1])],
        "curve": rounded(bound),
        "text": f"The bound m(x) + {beta:g} σ(x), dashed, is largest at {grid[best].item():.3g}.",
    }


def attack(problem: Problem, posterior: kn.Posterior, *, point: Any, epsilon: Any = 0.3, **_: Any) -> dict[str, Any]:
    """Move a point a little so that the prediction is wrong."""
    epsilon = check_number("epsilon", epsilon, at_least=0.0, at_most=100.0)
    place = check_number("point", point, at_least=0, at_most=len(problem.points) - 1)
    x, y = (each[int(place) : int(place) + 1] for each in problem.data)
    moved = kn.attack.pgd(posterior, x, y, epsilon, steps=_STEPS, restarts=_RESTARTS, norm=2)
    before: Any
    after: Any
    before, after = posterior.predict(x, samples=200), posterior.predict(moved, samples=200)
    found: dict[str, Any] = {"from": rounded(x[0]), "to": rounded(moved[0]), "epsilon": epsilon}
    if problem.task == "classes":
        right = int(y[0])
        pair = [each.probs[0, right].item() for each in (before, after)]
        fate = "The label changes." if int(after.labels[0]) != right else "The label stays."
        sure = f"Uncertainty goes from {before.total[0]:.2f} to {after.total[0]:.2f} nats."
        return {**found, "text": f"The class has probability {pair[0]:.2f}, then {pair[1]:.2f}. {fate} {sure}"}
    values = [each.mean.item() for each in (before, after)]
    return {**found, "values": values, "text": f"The mean goes from {values[0]:.3g} to {values[1]:.3g}, away from y."}


def reject(
    problem: Problem, posterior: kn.Posterior, *, again: Callable[[Problem], kn.Posterior], risk: Any = 0.1, **_: Any
) -> dict[str, Any]:
    """Fit to a half of the points, certify on the others which predictions to accept at a risk."""
    risk = check_number("risk", risk, at_least=0.01, at_most=0.5)
    order = torch.randperm(len(problem.points), generator=torch.Generator().manual_seed(problem.seed)).tolist()
    held, kept = sorted(order[: len(order) // 2]), sorted(order[len(order) // 2 :])
    if len(held) < _FEWEST_HELD:
        raise InvalidArgument(
            f"Half of the points are held out to prove the risk, and {len(held)} are too few. Add points: "
            f"{2 * _FEWEST_HELD} at least, and the more the smaller the risk."
        )
    part = replace(problem, points=tuple(problem.points[each] for each in kept))
    x, y = (each[held] for each in problem.data)
    certificate = kn.certify(again(part), (x, y), risk=risk if problem.task == "classes" else None, alpha=risk)
    said = certificate.predict(grid_of(problem))
    classes = problem.task == "classes"
    proven = {each.name: each.statement for each in certificate.guarantees}["rejection" if classes else "interval"]
    seen = "Hatched is refused" if classes else "Dashed are the intervals"
    found: dict[str, Any] = {
        "accept": "".join("1" if each else "0" for each in said.accept.tolist()),
        "held": held,
        "text": f"{seen}, rings are held out. {proven}",
    }
    if said.interval is not None:
        found |= {"low": rounded(said.interval[0].flatten()), "high": rounded(said.interval[1].flatten())}
    return found


def judged(problem: Problem, posterior: kn.Posterior, *, reference: kn.Posterior, **_: Any) -> dict[str, Any]:
    """How far the posterior is from the judge's, as functions, over the plane."""
    grid = grid_of(problem)
    found = kn.compare_to_reference(posterior, reference, grid[:: max(1, len(grid) // _COMPARED)], samples=300)
    names = ("wasserstein",) if problem.task == "regression" else ("total_variation", "agreement")
    figures: dict[str, Any] = {name: float(f"{found[name]:.3g}") for name in names}
    if problem.task == "regression":  # from the narrowest place to the widest: a mean would hide that there are both
        figures["sd_ratio"] = rounded(torch.stack(found.per_input["sd_ratio"].aminmax()))
    return figures


ACTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "label": label_next,
    "evaluate": evaluate_next,
    "attack": attack,
    "reject": reject,
    "judged": judged,
}


def _inside(problem: Problem) -> Tensor:
    """Points of the grid, not quite at the edge of the view."""
    grid = grid_of(problem)
    low, high = grid.amin(0), grid.amax(0)
    margin = 0.05 * (high - low)
    found = grid[((grid > low + margin) & (grid < high - margin)).all(1)]
    order = torch.randperm(len(found), generator=torch.Generator().manual_seed(0))
    return found[order[:_POOL]]


def _only_numbers(problem: Problem, what: str) -> None:
    if problem.task != "regression":
        raise Unsupported(f"{what}: a function of one input is maximised. For classes ask where to label next.")


def _words(place: Tensor) -> str:
    return f"({', '.join(f'{each:.2g}' for each in place.tolist())})" if len(place) > 1 else f"x = {place.item():.3g}"
