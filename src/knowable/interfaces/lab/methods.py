"""The methods that the lab offers, with settings for small problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import knowable as kn
from knowable.core.support.checks import check_choice
from knowable.errors import Unsupported
from knowable.interfaces.lab.problem import Problem

_FULL_BELOW = 800  # weights, up to which Laplace takes the whole matrix
_DRAWS, _JUDGE_DRAWS = 400, 600


@dataclass(frozen=True)
class Offer:
    """A method of the lab."""

    label: str
    make: Callable[[Problem], Any]  # the method with its settings
    kind: str = "trained"  # "closed": in closed form; "trained": by gradient; "chains"
    uses: tuple[str, ...] = ()  # settings that only some methods have
    linear: bool = False  # of the linear model on bumps, not of the network


def _laplace(problem: Problem) -> kn.Laplace:
    count = sum(value.numel() for value in problem.network().parameters())
    return kn.Laplace(structure="full" if count <= _FULL_BELOW else "kron")


OFFERS = {
    "exact_linear": Offer("Exact, on bumps", lambda p: kn.ExactLinear(), "closed", linear=True),
    "infinite_width": Offer("Infinite width (NNGP)", lambda p: kn.InfiniteWidth(), "closed"),
    "laplace": Offer("Laplace", _laplace),
    "map": Offer("MAP: one network", lambda p: kn.MAP()),
    "mean_field_vi": Offer("Mean-field VI", lambda p: kn.MeanFieldVI(beta=p.beta), uses=("beta",)),
    "full_rank_vi": Offer("Full-rank VI", lambda p: kn.FullRankVI(beta=p.beta), uses=("beta",)),
    "mc_dropout": Offer("MC dropout", lambda p: kn.MCDropout(p.rate), uses=("rate",)),
    "deep_ensemble": Offer("Deep ensemble of 10", lambda p: kn.DeepEnsemble(10)),
    "swag": Offer("SWAG", lambda p: kn.SWAG()),
    "svgd": Offer("SVGD", lambda p: kn.SVGD(), "chains"),
    "sgld": Offer("SGLD", lambda p: kn.SGLD(), "chains"),
    "hmc": Offer("HMC, 4 chains", lambda p: kn.HMC(chains=4, draws=_DRAWS), "chains"),
    "nuts": Offer("NUTS, 4 chains", lambda p: kn.NUTS(chains=4, draws=_DRAWS), "chains"),
}
JUDGES = {
    "hmc": Offer("long HMC, 8 chains", lambda p: kn.HMC(chains=8, draws=_JUDGE_DRAWS), "chains"),
    "nuts": Offer("long NUTS, 8 chains", lambda p: kn.NUTS(chains=8, draws=_JUDGE_DRAWS), "chains"),
}
MOST_METHODS = 4


def offer_of(name: Any, problem: Problem, *, judge: bool = False) -> Offer:
    """The offer of that name.

    Raises:
        InvalidArgument: If there is none.
        Unsupported: If it is not for this task.
    """
    offers = JUDGES if judge else OFFERS
    offer = offers[check_choice("judge" if judge else "method", name, tuple(offers))]
    if offer.linear and problem.task == "classes":
        raise Unsupported("The exact posterior of a linear model is there for numbers. For classes take Laplace.")
    return offer
