from __future__ import annotations

import pytest
from benchmarks.matched_prior import PRIORS, RECIPE, model_of, run, to_markdown
from benchmarks.study import Rows

import knowable as kn


def test_priors_are_those_of_their_titles():
    scales = {}
    for prior in PRIORS[:2]:
        model, _ = model_of(prior, "yacht", 0, RECIPE, True)
        scales[prior] = model.prior.prior_of("2.weight")
    assert scales == {"Normal(1.0)": kn.Normal(1.0), "1/√n": kn.Normal(50**-0.5)}


@pytest.mark.slow
def test_a_quick_run_has_every_row():
    found = run(quick=True, only="*", rows=Rows())
    assert not any("error" in row for each in found["rows"].values() for row in each)
    text = to_markdown(found)
    assert all(f"| {prior} |" in text for prior in PRIORS)
