"""Whether a fit can be trusted, in words."""

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.posterior.diagnostics import Diagnostics
from knowable.report.verdict import terms_listing, traces_panel, training_panel, verdict


def chains(**terms):
    return Diagnostics(terms={"rhat": 1.003, "ess_bulk": 900.0, "ess_tail": 700.0, **terms}, converged=True)


@pytest.mark.parametrize(
    ("diagnostics", "good", "words"),
    [
        (chains(), True, "chains converged"),
        (chains(divergences=4.0), False, "4 transitions diverged"),
        (chains(rhat=1.03), None, "well enough for means"),
        (chains(ess_tail=150.0), None, "well enough for means"),
        (chains(rhat=1.3), False, "did not converge"),
        (chains(rhat=1.3, prediction_error=0.02, between_chains=0.4), False, "did not converge"),
        (chains(rhat=1.3, prediction_error=0.002, between_chains=0.4), None, "40% of the variance"),
        (chains(ess_bulk=12.0), False, "Draw more samples"),
        (Diagnostics(converged=True, message="settled after 9 epochs"), True, "settled after 9 epochs"),
        (Diagnostics(converged=False, message="100 epochs"), False, "more epochs"),
        (Diagnostics(converged=None), None, "is unknown"),
        (Diagnostics(interrupted=True, message="stopped from the keyboard after 3 steps"), False, "let it end"),
    ],
)
def test_every_end_of_a_fit_has_its_words(diagnostics, good, words):
    judgement = verdict(diagnostics)
    assert judgement.good is good and words in judgement.text


def test_the_numbers_of_chains_are_said():
    assert "R-hat 1.003, effective sample size at least 700" in verdict(chains()).text


def test_terms_are_listed_with_their_meaning_and_without_what_is_not_finite():
    listing = terms_listing(chains(acceptance=0.8, odd_thing=2.0, ebfmi=float("nan")))
    rows = {name: (value, meaning) for name, value, meaning in listing.rows}
    assert rows["Acceptance rate"] == ("0.8", "share of proposals accepted") and rows["Odd thing"] == ("2", "")
    assert len(rows) == 5
    assert terms_listing(Diagnostics()) is None


def test_training_is_drawn_where_there_is_some():
    history = [{"step": i, "epoch": float(i), "loss": 1.0, "log_likelihood": -i} for i in (1, 2, 3)]
    panel = training_panel("VI", Diagnostics(history=history))
    assert panel.groups[0][0] == "VI" and panel.groups[0][1][0].y == (-1.0, -2.0, -3.0)
    assert training_panel("VI", Diagnostics(history=history[:1])) is None
    assert training_panel("NUTS", Diagnostics()) is None


def test_traces_are_the_outputs_of_the_draws_chain_by_chain(seed):
    x, y = torch.randn(12, 1), torch.randn(12, 1)
    model = kn.Model(nn.Linear(1, 1), kn.Gaussian(noise=0.5))
    posterior = kn.HMC(chains=3, draws=20, warmup=20, start="prior").fit(model, (x, y), seed=seed, progress=False)
    panel = traces_panel(posterior, x[:2], [4, 9])
    draws = posterior.function_draws(x[:2])
    assert [title for title, _ in panel.groups] == ["Row at line 4", "Row at line 9"]
    assert [line.name for line in panel.groups[1][1]] == ["chain 1", "chain 2", "chain 3"]
    assert panel.groups[1][1][2].y == pytest.approx(draws[2, :, 1, 0].tolist())
    point = kn.MAP(epochs=2).fit(model, (x, y), progress=False)
    assert traces_panel(point, x[:2], [4, 9]) is None
