"""The whole comparison against a loop written by hand; its file, its limits and what it refuses."""

from __future__ import annotations

import json
import math
import sys

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import knowable as kn
from knowable.comparison.compare import compare
from knowable.comparison.folds import as_splits
from knowable.comparison.run import fit_seed
from knowable.errors import InvalidArgument, InvalidType, KnowableError, KnowableWarning
from tests.comparison.cases import MeanEstimator, ShareEstimator, class_problem, linear_problem

SHORT = kn.MAP(epochs=3)
TIMED = ("seconds", "predict_seconds", "memory_mb")


def untimed(comparison: kn.Comparison) -> list[tuple[str, int, dict[str, float]]]:
    return [
        (each.method, each.fold, {name: value for name, value in each.scores.items() if name not in TIMED})
        for each in comparison.records
    ]


def test_means_and_errors_are_those_of_a_loop_written_by_hand():
    model, (x, y) = linear_problem()
    found = compare(model, (x, y), methods=["exact_linear", SHORT], cv=4, seed=3)
    values, rows = {"exact_linear": [], "MAP(epochs=3)": []}, {"exact_linear": [], "MAP(epochs=3)": []}
    for fold, split in enumerate(as_splits(4, 40, y.numpy(), seed=3)):
        for name, method in (("exact_linear", kn.ExactLinear()), ("MAP(epochs=3)", SHORT)):
            posterior = method.fit(model, (x[split.train], y[split.train]), seed=fit_seed(3, fold))
            scores = kn.evaluate(posterior.predict(x[split.test], samples=256), y[split.test])
            values[name].append(scores["nll"])
            rows[name] += scores.per_row["nll"].tolist()
    for name, each in values.items():
        assert found.mean(name).mean == pytest.approx(np.mean(each), rel=1e-5)
        assert found.mean(name).standard_error == pytest.approx(np.std(each, ddof=1) / 2, rel=1e-4)
    apart = np.subtract(rows["MAP(epochs=3)"], rows["exact_linear"])
    difference = found.difference("MAP(epochs=3)", "exact_linear")
    assert difference.mean == pytest.approx(apart.mean(), rel=1e-4)
    assert difference.standard_error == pytest.approx(apart.std(ddof=1) / 40**0.5, rel=1e-4)
    assert found.best == "exact_linear" and found.folds == 4 and found.reference is None


def test_the_exact_posterior_beats_a_barely_trained_point_on_any_seed(seed):
    # three steps from a random start leave errors of order one under noise of 0.3: a gap of many standard errors
    model, data = linear_problem()
    places = compare(model, data, methods=["exact_linear", SHORT], cv=4, seed=seed).ranking()
    assert [place.method for place in places] == ["exact_linear", "MAP(epochs=3)"]
    assert places[1].verdict == "worse" and places[1].difference.mean > 0


def test_the_same_seed_gives_the_same_scores_and_another_gives_others():
    model, data = linear_problem()
    one, same, other = (
        untimed(compare(model, data, methods=[kn.MeanFieldVI(epochs=3)], cv=2, seed=seed)) for seed in (1, 1, 2)
    )
    assert one == same and one != other


@pytest.mark.slow
def test_an_estimator_is_compared_by_protocol_alone():
    # predictions N(mean, (c sd)²) of the training rows with c = 1/2, 1, 2: the right spread has the lowest score
    y = np.random.default_rng(0).normal(10.0, 3.0, 300)
    frame = pd.DataFrame({"a": np.arange(300), "b": ["x", "y", "z"] * 100})
    found = compare(MeanEstimator(), (frame, y), methods=["map", "mfvi", "ensemble"], cv=5)
    assert found.best == "mean_field_vi" and found.ranking()[-1].method == "map"
    splits = as_splits(5, 300, y, seed=0)
    expected = [
        -(-0.5 * ((y[s.test] - y[s.train].mean()) / y[s.train].std()) ** 2 - np.log(y[s.train].std())
          - 0.5 * math.log(2 * math.pi)).mean() for s in splits
    ]  # fmt: skip
    assert found.mean("mean_field_vi").mean == pytest.approx(np.mean(expected), rel=1e-4)
    assert found.mean("mean_field_vi", "coverage_90").mean == pytest.approx(0.9, abs=0.06)  # 3 s.e. of 300 rows


def test_labels_of_any_kind_are_scored():
    labels = np.array(["yes", "no", "no"] * 20)
    found = compare(ShareEstimator(), (np.zeros((60, 1)), labels), methods=["map"], cv=5)
    assert found.mean("map", "accuracy").mean == pytest.approx(2 / 3)  # "no" every time, folds have equal shares
    assert found.mean("map").mean == pytest.approx(-(2 / 3) * math.log(2 / 3) - (1 / 3) * math.log(1 / 3), rel=1e-5)


def test_a_dataset_and_classes_work_with_a_model():
    data = kn.datasets.linear(n=40, d=2, noise=0.3)
    model = kn.Model(nn.Linear(2, 1), kn.Gaussian(noise=0.3))
    assert compare(model, data, methods=["exact_linear"], cv=2).folds == 2
    found = compare(*class_problem(), methods=[kn.MAP(epochs=30)], cv=3)
    assert {kind.name for kind in found.scores} >= {"nll", "accuracy", "brier", "ece"}


def test_a_method_that_fails_is_shown_with_the_reason_and_the_others_go_on():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1))
    _, data = linear_problem()
    found = compare(kn.Model(net, kn.Gaussian(0.3)), data, methods=["exact_linear", SHORT], cv=2)
    assert found.best == "MAP(epochs=3)" and set(found.failures("exact_linear")) == {0, 1}
    assert "exact_linear, fold 1: " in repr(found) and "exact_linear, fold 2: " in repr(found)
    with pytest.raises(KnowableError, match=r"No method could be fitted\. The first, exact_linear"):
        compare(kn.Model(net, kn.Gaussian(0.3)), data, methods=["exact_linear"], cv=2)


# --- the reference ---------------------------------------------------------------------------------------------------


def test_a_reference_is_compared_too_and_the_others_are_held_against_it():
    model, data = linear_problem()
    found = compare(model, data, methods=[SHORT], cv=2, reference=kn.ExactLinear())
    assert found.methods == ("MAP(epochs=3)", "exact_linear") and found.reference == "exact_linear"
    assert found.agreement("MAP(epochs=3)")["sd_ratio"].mean == 0.0 and found.agreement("exact_linear") == {}
    assert found.mean("MAP(epochs=3)", "reference_distance").folds == 2
    assert found.by_fold("exact_linear", "reference_distance") == {}


@pytest.mark.slow
def test_nuts_is_the_reference_where_it_is_among_the_methods_unless_told_otherwise():
    model, data = linear_problem()
    nuts = kn.NUTS(chains=2, warmup=30, draws=30, start="network", max_depth=6)
    methods = {"nuts": nuts, "exact": kn.ExactLinear()}
    found = compare(model, data, methods=methods, cv=2)
    assert found.reference == "nuts" and 0.2 < found.agreement("exact")["sd_ratio"].mean < 5.0
    assert compare(model, data, methods=methods, cv=2, reference=False).reference is None
    assert compare(model, data, methods=methods, cv=2, reference=nuts).methods == ("nuts", "exact")


def test_a_named_reference_is_left_out_of_large_networks_with_a_warning(monkeypatch):
    monkeypatch.setattr(sys.modules["knowable.comparison.compare"], "MOST_PARAMETERS", 2)
    model, data = linear_problem()
    with pytest.warns(KnowableWarning, match="exact_linear was left out: the network has 3 random parameters"):
        found = compare(model, data, methods=[SHORT], cv=2, reference="exact_linear")
    assert found.reference is None and "left out" in found.notices[0] and "left out" in repr(found)
    assert compare(model, data, methods=[SHORT], cv=2, reference=kn.ExactLinear()).reference == "exact_linear"


# --- file and budget -------------------------------------------------------------------------------------------------


def test_finished_fits_are_read_back_and_methods_may_be_added(tmp_path):
    model, data = linear_problem()
    out = tmp_path / "fits.jsonl"
    first = compare(model, data, methods=["exact_linear"], cv=2, out=out)
    written = out.read_text()
    assert len(written.splitlines()) == 3 and json.loads(written.splitlines()[1])["method"] == "exact_linear"
    more = compare(model, data, methods={"exact": "exact_linear", "short": SHORT}, cv=2, out=out)
    assert out.read_text().startswith(written) and len(out.read_text().splitlines()) == 5
    assert more.by_fold("exact", "seconds") == first.by_fold("exact_linear", "seconds")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 1}, "cv, seed"),
        ({"cv": 3}, "cv"),
        ({"samples": 9}, "samples"),
        ({"outside": torch.zeros(1, 2)}, "outside"),
    ],
)
def test_the_file_of_another_comparison_is_refused_with_what_differs(tmp_path, change, named):
    model, data = linear_problem()
    compare(model, data, methods=["exact_linear"], cv=2, out=tmp_path / "fits.jsonl")
    with pytest.raises(InvalidArgument, match=f"another comparison: {named} differ"):
        compare(model, data, **{"methods": ["exact_linear"], "cv": 2, "out": tmp_path / "fits.jsonl", **change})


def test_a_budget_is_kept_by_fits_that_would_take_for_ever():
    model, data = linear_problem()
    compare(model, data, methods=[SHORT], cv=2)  # the first fit of a process has things to load
    endless = {"one": kn.MAP(epochs=10**7), "two": kn.MeanFieldVI(epochs=10**7)}
    found = compare(model, data, methods=endless, cv=2, budget=4.0)
    spent = sum(record.elapsed for record in found.records)
    assert spent <= 4.0 * 1.2
    assert len(found.records) + len(found.not_run) == 4 and len(found.records) >= 2


def test_a_spent_budget_is_said():
    model, data = linear_problem()
    with pytest.raises(KnowableError, match="budget was spent before any method"):
        compare(model, data, methods=["exact_linear"], cv=2, budget=1e-9)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"budget": 0}, InvalidArgument, "budget"),
        ({"budget": "long"}, InvalidType, "budget"),
        ({"seed": -1}, InvalidArgument, "seed"),
        ({"samples": 1}, InvalidArgument, "samples"),
        ({"cv": 1}, InvalidArgument, "cv"),
        ({"methods": []}, InvalidArgument, "methods"),
        ({"methods": ["nutz"]}, InvalidArgument, "Did you mean"),
        ({"reference": "nutz"}, InvalidArgument, "Did you mean"),
        ({"progress": 3}, InvalidType, "progress"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_by_name(change, error, words):
    model, data = linear_problem()
    with pytest.raises(error, match=words):
        compare(model, data, **{"methods": ["exact_linear"], "cv": 2, **change})


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (nn.Linear(2, 1), "a knowable Model, or an estimator"),
        (MeanEstimator, r"write MeanEstimator\(\)"),
        (None, "NoneType"),
    ],
)
def test_what_is_neither_model_nor_estimator_is_refused(what, words):
    with pytest.raises(InvalidType, match=words):
        compare(what, linear_problem()[1], methods=["map"])
