"""Whether a fit converged, in words: how training ended, or R-hat and effective sample size of chains."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from knowable.core.chains.convergence import ACCURATE
from knowable.core.chains.posterior import ChainPosterior
from knowable.core.posterior.diagnostics import Diagnostics
from knowable.core.posterior.posterior import Posterior
from knowable.report.panels import Axes, CurvesPanel, Line, TracesPanel
from knowable.report.prediction_panels import curves_panel
from knowable.report.report import Listing

GOOD_RHAT, FAIR_RHAT = 1.01, 1.05
GOOD_ESS, FAIR_ESS = 400.0, 100.0
_MOST_CHAINS, _MOST_DRAWS = 6, 250  # of one figure

_TERMS = {
    "rhat": ("R-hat (largest)", "1 is converged; above 1.01 the chains still disagree"),
    "ess_bulk": ("Bulk effective sample size (smallest)", "independent draws that would estimate a mean as well"),
    "ess_tail": ("Tail effective sample size (smallest)", "the same for the ends of intervals"),
    "prediction_error": (
        "Monte Carlo error of predictions",
        f"nats a row lost to the finite number of draws; up to {ACCURATE:g} is good",
    ),
    "between_chains": ("Variance between chains", "share of the variance of the network's outputs; 0 for long chains"),
    "acceptance": ("Acceptance rate", "share of proposals accepted"),
    "divergences": ("Divergences", "transitions whose numerical integration diverged; should be 0"),
    "ebfmi": ("E-BFMI", "energy Bayesian fraction of missing information; below 0.3 the energy is explored poorly"),
    "elbo": ("ELBO", "evidence lower bound, in nats"),
    "loss": ("Loss", "objective of training at the end"),
    "learning_rate": ("Learning rate", "at the end of training"),
    "log_prior": ("Log prior", "log density of the prior, in nats"),
    "kl": ("KL divergence", "from the prior to the posterior, in nats"),
    "log_likelihood": ("Log likelihood", "of all training rows, in nats"),
    "expected_log_likelihood": ("Expected log likelihood", "of all training rows, in nats"),
    "noise": ("Noise", "standard deviation of the noise, in standardised units"),
}


@dataclass(frozen=True)
class Verdict:
    """A judgement."""

    good: bool | None  # True, False, or None where it is fair or unknown
    text: str


def verdict(diagnostics: Diagnostics) -> Verdict:
    """Judge a fit by its diagnostics."""
    if diagnostics.interrupted:
        return Verdict(
            False, f"The fit was {diagnostics.message}. Run it again (a command with --force) and let it end."
        )
    if "rhat" in diagnostics:
        return _chains(diagnostics)
    ended = f" ({diagnostics.message})" if diagnostics.message else ""
    if diagnostics.converged is False:
        more = "Allow more epochs, a larger budget (--budget thorough), or a longer time limit."
        return Verdict(False, f"The fit ended before it converged{ended}. {more}")
    if diagnostics.converged is None:
        return Verdict(None, f"Whether the fit converged is unknown{ended}: look at the training curve.")
    return Verdict(True, f"The fit converged{ended}.")


def _chains(terms: Diagnostics) -> Verdict:
    rhat = terms["rhat"]
    least = min(terms.get("ess_bulk", math.nan), terms.get("ess_tail", math.nan))
    numbers = f"R-hat {rhat:.3f}, effective sample size at least {least:.0f}"
    lost = terms.get("divergences", 0.0)
    more = f" {lost:.0f} transitions diverged: a region may be missing." if lost else ""
    if rhat <= GOOD_RHAT and least >= GOOD_ESS:
        return Verdict(not lost, f"The chains converged: {numbers}.{more}")
    if rhat <= FAIR_RHAT and least >= FAIR_ESS:
        text = f"The chains converged well enough for means, less so for the ends of intervals: {numbers}.{more}"
        return Verdict(None, text)
    error = terms.get("prediction_error", math.inf)
    if error <= ACCURATE:
        share = terms.get("between_chains", math.nan)
        text = (
            f"The chains do not agree on the network ({numbers}): each keeps to modes of its own or moves slowly, and "
            f"{share:.0%} of the variance of the outputs is between chains. Predictions average over all of them, with "
            f"a Monte Carlo error that is small: about {error:.1g} nats a row. Do not interpret single weights.{more}"
        )
        return Verdict(None, text)
    return Verdict(
        False,
        f"The chains did not converge: {numbers}. Draw more samples (--budget thorough), or use another method.{more}",
    )


def terms_listing(diagnostics: Diagnostics) -> Listing | None:
    """The diagnostics with what each means; None where there are none."""
    rows = []
    for term, value in diagnostics.items():
        if math.isfinite(value):
            name, meaning = _TERMS.get(term, (term.replace("_", " ").capitalize(), ""))
            rows.append((name, f"{value:.5g}", meaning))
    return Listing("Diagnostics of the fit", ("Quantity", "Value", "Meaning"), tuple(rows)) if rows else None


def training_panel(name: str, diagnostics: Diagnostics) -> CurvesPanel | None:
    """The training curves of a fit; None where there are none."""
    records = [record for record in diagnostics.history if "epoch" in record]
    if len(records) < 2:
        return None
    panel = curves_panel(
        "Training",
        {name: records},
        caption="Terms of the objective on the scale of the whole data set. Flat at the end means converged.",
    )
    return panel if panel.groups[0][1] else None


def traces_panel(posterior: Posterior, encoded: Any, lines: list[int]) -> TracesPanel | None:
    """Trace plots: the network's output for a few rows, draw by draw; None where there are no chains."""
    if not isinstance(posterior, ChainPosterior):
        return None
    draws = posterior.function_draws(encoded)  # (chains, draws, rows, ...)
    draws = draws.reshape(*draws.shape[:3], -1)[..., 0].double()
    step = max(1, draws.shape[1] // _MOST_DRAWS)
    places = tuple(float(i) for i in range(0, draws.shape[1], step))
    groups = tuple(
        (
            f"Row at line {line}",
            tuple(
                Line(f"chain {chain + 1}", places, tuple(draws[chain, ::step, row].tolist()))
                for chain in range(min(_MOST_CHAINS, len(draws)))
            ),
        )
        for row, line in enumerate(lines)
    )
    return TracesPanel(
        title="Trace plots",
        caption="The network's first output, in standardised units, for a few rows. Chains that converged look alike: "
        "flat bands of noise that cover the same range.",
        alt=f"Draws of {min(_MOST_CHAINS, len(draws))} of {len(draws)} chains for {len(lines)} rows. "
        + " ".join(_ranges(line, draws[:, :, row]) for row, line in enumerate(lines)),
        axes=Axes("draw", "output"),
        groups=groups,
    )


def _ranges(line: int, draws: Any) -> str:
    means = draws.mean(1)
    return f"Line {line}: chain means from {means.min():.3g} to {means.max():.3g}, sd {draws.std():.3g}."
