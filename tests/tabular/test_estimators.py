"""Tests of what both estimators do: tables in, settings, budgets, updates, and scikit-learn's tools around them."""

from __future__ import annotations

import itertools
import subprocess
import sys
import time
import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import nn

import knowable as kn
from knowable.core.model.posterior_prior import PosteriorPrior
from knowable.tabular import Schema, read_table
from knowable.tabular.auto import BUDGETS, Effort
from knowable.tabular.estimators import can_update
from knowable.tabular.networks import ResidualMLP
from tests.tabular.cases import QUICK, linear_network, mixed_frame, small_network

QUICK_MAP = QUICK["map"]
BOTH = [kn.BayesianRegressor, kn.BayesianClassifier]


def problem(cls: type) -> tuple[pd.DataFrame, np.ndarray]:
    frame, y = mixed_frame()
    return (frame, y) if cls is kn.BayesianRegressor else (frame, np.where(y > np.median(y), "large", "small"))


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", BOTH)
def test_a_table_of_all_kinds_of_columns_is_fitted_and_predicted(cls: type):
    frame, y = problem(cls)
    model = cls(QUICK_MAP, network=small_network, random_state=0).fit(frame, y)
    assert model.score(frame, y) > 0.6  # gaps hide about a tenth of the variance
    assert model.feature_names_in_.tolist() == list(frame.columns)
    assert model.n_features_in_ == 4
    assert [column.kind for column in model.schema_.columns] == ["numeric", "categorical", "boolean", "date"]
    assert [column.gaps for column in model.schema_.columns] == [True, True, False, False]


def test_a_file_with_a_named_target_gives_the_same_as_its_columns(tmp_path):
    frame, y = mixed_frame()
    frame.assign(y=y).to_csv(tmp_path / "data.csv", index=False)
    table = read_table(tmp_path / "data.csv")
    named = kn.BayesianRegressor(QUICK_MAP, network=small_network, random_state=0).fit(table, "y")
    assert named.schema_.target == ("y",)
    columns = kn.BayesianRegressor(QUICK_MAP, network=small_network, random_state=0).fit(table.without(["y"]), y)
    np.testing.assert_allclose(named.predict(table), columns.predict(table), rtol=1e-9)


def test_a_bad_target_in_a_file_is_named_by_its_line(tmp_path):
    (tmp_path / "data.csv").write_text("x,y\n1,2\n2,\n3,4\n")
    with pytest.raises(kn.InvalidData, match=r"data.csv, line 3, column 'y': the target is missing"):
        kn.BayesianRegressor(QUICK_MAP).fit(read_table(tmp_path / "data.csv"), "y")


def test_mappings_and_names_of_files_are_tables_too(tmp_path):
    frame, y = mixed_frame()
    frame.assign(y=y).to_csv(tmp_path / "data.csv", index=False)
    model = kn.BayesianRegressor(QUICK_MAP, network=small_network, random_state=0)
    expected = model.fit(read_table(tmp_path / "data.csv"), "y").predict(frame)
    np.testing.assert_array_equal(model.fit(tmp_path / "data.csv", "y").predict(tmp_path / "data.csv"), expected)
    columns = {name: frame[name].to_numpy() for name in frame}
    # the same numbers in another order of rows, for dates are texts in the file: sums differ in their last digits
    np.testing.assert_allclose(model.fit(columns, y).predict(columns), expected, rtol=1e-4)


def test_labels_are_not_taken_for_names_of_columns():
    table = read_table({"a": np.linspace(0, 1, 20), "b": np.linspace(1, 2, 20) ** 2})
    model = kn.BayesianClassifier(QUICK_MAP, network=small_network).fit(table, ["u", "v"] * 10)
    assert model.classes_.tolist() == ["u", "v"]


def test_a_fit_that_fails_leaves_nothing_that_looks_fitted():
    model = kn.BayesianRegressor(QUICK_MAP, network=small_network).fit(np.eye(4), np.arange(4.0))
    with pytest.raises(ValueError, match="NaN"):
        model.fit(np.eye(4), [1.0, 2.0, np.nan, 3.0])
    with pytest.raises(NotFittedError):
        model.predict(np.eye(4))


def test_a_polars_frame_gives_the_same_as_a_pandas_frame():
    pl = pytest.importorskip("polars")
    frame, y = mixed_frame()
    plain = frame.drop(columns="joined")
    polars = pl.DataFrame({name: plain[name].tolist() for name in plain.columns}, nan_to_null=True, strict=False)
    fits = [
        kn.BayesianRegressor(QUICK_MAP, network=small_network, random_state=0).fit(each, y) for each in (plain, polars)
    ]
    np.testing.assert_allclose(fits[0].predict(plain), fits[1].predict(polars), rtol=1e-9)


def test_a_frame_in_training_and_an_array_in_prediction_go_by_position():
    frame = pd.DataFrame({"a": np.linspace(0, 1, 30), "b": np.linspace(1, 5, 30) ** 2})
    model = kn.BayesianRegressor(QUICK_MAP, network=small_network, random_state=0).fit(frame, frame["a"])
    with pytest.warns(UserWarning, match="feature names"):
        found = model.predict(frame.to_numpy())
    np.testing.assert_array_equal(found, model.predict(frame))


def test_other_names_than_in_training_are_refused():
    frame = pd.DataFrame({"a": np.linspace(0, 1, 30), "b": np.linspace(1, 5, 30) ** 2})
    model = kn.BayesianRegressor(QUICK_MAP, network=small_network).fit(frame, frame["a"])
    with pytest.raises(ValueError, match="feature names"):
        model.predict(frame.rename(columns={"a": "c"}))
    with pytest.raises(kn.InvalidData, match="lacks the column a"):
        model.predict(read_table(frame.rename(columns={"a": "c"})))


def test_the_order_of_the_rows_does_not_matter(seed: int):
    frame, y = mixed_frame()
    shuffle = np.random.default_rng(seed).permutation(len(y))
    first = kn.BayesianRegressor(QUICK_MAP, network=small_network, random_state=seed).fit(frame, y)
    second = kn.BayesianRegressor(QUICK_MAP, network=small_network, random_state=seed)
    second.fit(frame.iloc[shuffle], y[shuffle])
    np.testing.assert_array_equal(first.predict(frame), second.predict(frame))


def test_kinds_are_heeded_also_those_of_the_target():
    frame = pd.DataFrame({"code": [1, 2, 3] * 10, "x": np.linspace(0, 1, 30), "y": np.linspace(0, 1, 30)})
    frame.loc[3, "y"] = 1e12
    table = read_table(frame)
    with pytest.raises(kn.InvalidData, match="times the usual spread"):
        kn.BayesianRegressor(QUICK_MAP).fit(table, "y")
    model = kn.BayesianRegressor(QUICK_MAP, network=small_network, kinds={"code": "categorical", "y": "numeric"})
    assert model.fit(table, "y").schema_.columns[0].kind == "categorical"


# --- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"method": "mapp"}, kn.InvalidArgument, "Did you mean 'map'"),
        ({"method": 3}, kn.InvalidType, "method must be 'auto'"),
        ({"network": 3}, kn.InvalidType, "network must be a torch.nn.Module"),
        ({"likelihood": 3}, kn.InvalidType, "likelihood must be one such as"),
        ({"likelihood": "gausian"}, kn.InvalidArgument, "likelihood must be one of"),
        ({"budget": "long"}, kn.InvalidArgument, "budget must be"),
        ({"budget": 20}, kn.InvalidType, "use time_limit=20"),
        ({"time_limit": -1}, kn.InvalidArgument, "time_limit must be"),
        ({"samples": 0}, kn.InvalidArgument, "samples must be"),
        ({"precision": "half"}, kn.InvalidArgument, "precision must be one of"),
        ({"kinds": ["a"]}, kn.InvalidType, "kinds must be a mapping"),
    ],
)
def test_wrong_settings_are_named_when_fitting_and_not_before(settings: dict, error: type[Exception], words: str):
    model = kn.BayesianRegressor(**{"method": QUICK_MAP, **settings})
    with pytest.raises(error, match=words):
        model.fit(np.eye(3), [1.0, 2.0, 3.0])


def test_a_method_may_be_a_name_or_a_method():
    X, y = np.linspace(0, 1, 20).reshape(-1, 1), np.linspace(0, 1, 20)
    model = kn.BayesianRegressor("exact", likelihood=kn.Gaussian(0.1)).fit(X, y)
    assert model.method_ == kn.ExactLinear()
    assert isinstance(model.model_.net, nn.Linear)
    assert model.choice_.why == "it was asked for"


def test_a_network_of_the_users_own_is_used_and_not_changed():
    net = small_network(2, 1)
    before = [value.clone() for value in net.parameters()]
    model = kn.BayesianRegressor(QUICK_MAP, network=net).fit(
        np.random.default_rng(0).normal(size=(20, 2)), np.arange(20.0)
    )
    assert model.model_.net is net
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


@pytest.mark.parametrize(("precision", "dtype"), [("double", torch.float64), ("single", torch.float32)])
def test_the_precision_is_that_of_the_network(precision: str, dtype: torch.dtype):
    model = kn.BayesianRegressor(kn.MAP(epochs=2), precision=precision).fit(np.eye(3), [1.0, 2.0, 3.0])
    assert model.model_.dtype == dtype


def test_the_same_random_state_gives_the_same_and_another_another():
    X, y = np.random.default_rng(0).normal(size=(30, 2)), np.arange(30.0)
    fit = lambda state: kn.BayesianRegressor(QUICK_MAP, random_state=state).fit(X, y).predict(X)  # noqa: E731
    np.testing.assert_array_equal(fit(0), fit(0))
    assert not np.array_equal(fit(0), fit(1))


def test_the_users_random_numbers_are_left_alone():
    X, y = np.random.default_rng(0).normal(size=(30, 2)), np.arange(30.0)
    before = torch.get_rng_state()
    kn.BayesianRegressor(QUICK_MAP, random_state=0).fit(X, y).predict(X)
    assert torch.equal(torch.get_rng_state(), before)


def test_it_must_be_fitted_first(tmp_path):
    for cls in BOTH:
        with pytest.raises(NotFittedError):
            cls().predict([[1.0]])
        with pytest.raises(NotFittedError):
            cls().save(tmp_path / "model")


# --- auto and the budget ---------------------------------------------------------------------------------------------


def test_auto_says_what_it_chose_and_why(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(BUDGETS, "normal", replace(BUDGETS["normal"], steps=0.02))
    X, y = np.random.default_rng(0).normal(size=(2_000, 3)), np.arange(2_000.0)
    model = kn.BayesianRegressor(random_state=0).fit(X, y)
    assert isinstance(model.method_, kn.DeepEnsemble)
    assert "2,000 rows, 3 inputs" in model.choice_.why


def test_a_fit_that_a_time_limit_cuts_short_says_so_with_the_option():
    X, y = np.random.default_rng(0).normal(size=(60, 2)), np.arange(60.0)
    with pytest.warns(kn.ConvergenceWarning, match="time_limit"):
        model = kn.BayesianRegressor(kn.MeanFieldVI(epochs=10**7), time_limit=1.5, random_state=0).fit(X, y)
    assert model.posterior_.diagnostics.out_of_time


def test_a_fit_of_a_few_steps_is_an_error():
    X, y = np.random.default_rng(0).normal(size=(60, 2)), np.arange(60.0)
    model = kn.BayesianRegressor("map", time_limit=1e-3, random_state=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)
        with pytest.raises(kn.errors.TooFewSteps, match=r"time_limit=0.001 ended the fit after \d+ steps"):
            model.fit(X, y)
    assert not hasattr(model, "posterior_")


def test_noise_begins_at_the_spread_of_the_targets():
    """So that a fit that is cut short is underconfident: a step changes its logarithm by the learning rate, 0.01."""
    X, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60.0)
    model = kn.BayesianRegressor(kn.MAP(epochs=1), random_state=0).fit(X, y)
    assert abs(np.log(model.predict(X, return_std=True)[1] / y.std())).max() < 0.0101


_SMALL_FIT = """
import hashlib, sys, warnings
import numpy as np
import torch
import knowable as kn
from knowable.tabular.auto import BUDGETS, Effort
warnings.simplefilter("ignore")
torch.set_num_threads(int(sys.argv[1]))
rng = np.random.default_rng(0)
X = rng.normal(size=(60, 4))
y = X[:, 0] + np.sin(X[:, 1]) + 0.2 * rng.normal(size=60)
BUDGETS["quick"] = Effort(1e12, 20, 20, 400, 0.05)
digest = hashlib.sha256()
for method in ("auto", "ensemble"):
    model = kn.BayesianRegressor(method, budget="quick", random_state=0).fit(X, y)
    digest.update(model.predict_dist(X).log_prob(torch.from_numpy(y)).numpy().tobytes())
assert torch.get_num_threads() == int(sys.argv[1])
print(digest.hexdigest())
"""


@pytest.mark.parametrize(("task", "operations"), [("regression", 1e12), ("classification", 1.0)])  # chains, networks
def test_a_fit_does_not_look_at_the_clock_and_computes_with_one_thread(
    task: str, operations: float, monkeypatch: pytest.MonkeyPatch
):
    """What makes numbers the same on a busy machine: a clock on which every look takes an hour changes no digit."""
    monkeypatch.setitem(BUDGETS, "normal", Effort(operations, 4, 4, 50, 0.05))
    rng = np.random.default_rng(0)
    X = rng.normal(size=(40, 3))
    y = X[:, 0] + 0.2 * rng.normal(size=40) if task == "regression" else (X[:, 0] > 0).astype(int)
    threads: list[int] = []

    def fitted() -> bytes:
        model = (kn.BayesianRegressor if task == "regression" else kn.BayesianClassifier)(random_state=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", kn.KnowableWarning)
            model.fit(X, y)
        return model.predict_dist(X).log_prob(torch.from_numpy(y)).numpy().tobytes()

    forward = ResidualMLP.forward
    monkeypatch.setattr(
        ResidualMLP, "forward", lambda self, x: threads.append(torch.get_num_threads()) or forward(self, x)
    )
    usual, before = fitted(), torch.get_num_threads()
    hours = itertools.count(0.0, 3600.0)
    for name in ("time", "monotonic", "perf_counter"):
        monkeypatch.setattr(time, name, lambda: next(hours))
    torch.set_num_threads(2)
    try:
        assert fitted() == usual
    finally:
        torch.set_num_threads(before)
    assert set(threads) == {1}


@pytest.mark.slow
def test_a_busy_machine_and_other_numbers_of_threads_give_the_same_numbers():
    run = [sys.executable, "-c", _SMALL_FIT]
    alone = subprocess.run([*run, "1"], capture_output=True, text=True, check=True).stdout
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(8)]
    try:
        beside = [subprocess.run([*run, n], capture_output=True, text=True, check=True).stdout for n in ("1", "2")]
    finally:
        for each in busy:
            each.kill()
            each.wait()
    assert beside == [alone, alone]


def test_networks_made_here_have_a_prior_by_their_widths_and_others_the_usual_one():
    X, y = np.random.default_rng(0).normal(size=(20, 8)), np.arange(20.0)
    made = kn.BayesianRegressor(kn.MAP(epochs=1)).fit(X, y).model_.prior
    assert made.prior_of("first.weight") == kn.Normal(0.5) and made.prior_of("first.bias") == kn.Normal(1.0)
    given = kn.BayesianRegressor(kn.MAP(epochs=1), network=small_network).fit(X, y).model_.prior
    assert given.prior_of("0.weight") == kn.Normal(1.0)


@pytest.mark.parametrize("weighted", [False, True])
def test_networks_that_stop_early_have_a_wider_prior(weighted: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(BUDGETS, "normal", Effort(1.0, 1, 1, 1, 0.01))
    X, y = np.random.default_rng(0).normal(size=(60, 8)), np.arange(60.0)
    weights = np.linspace(0.5, 1.5, 60) if weighted else None  # with them, no rows are held out
    model = kn.BayesianRegressor(random_state=0).fit(X, y, sample_weight=weights)
    assert model.model_.net.activation == "tanh"  # bounded: a ReLU's mean of a log-normal explodes far out
    assert model.model_.prior.prior_of("first.weight") == kn.Normal(0.5 if weighted else 5.0)
    validated = "validation_log_likelihood" in model.posterior_.diagnostics.history[-1]
    assert validated is not weighted
    classifier = kn.BayesianClassifier(random_state=0).fit(X, y > 30, sample_weight=weights)
    assert classifier.model_.net.activation == "relu"
    assert classifier.model_.prior.prior_of("first.weight") == kn.Normal(0.5 if weighted else 2.5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["auto", "nuts"])  # the others are in tests/core/support/test_time_limit.py
def test_a_time_limit_is_kept_within_a_fifth(method: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(time, "monotonic", time.process_time)  # what runs beside the test does not count
    rng = np.random.default_rng(0)
    X = rng.normal(size=(600, 6))
    y = np.sin(X[:, 0]) + 0.1 * rng.normal(size=600)
    began = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)
        kn.BayesianRegressor(method, time_limit=10, random_state=0).fit(X, y)
    assert time.process_time() - began <= 12


# --- updates ---------------------------------------------------------------------------------------------------------


def test_updating_an_exact_posterior_gives_that_of_all_rows_at_once(seed: int):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(40, 2))
    y = X @ [1.0, -2.0] + 0.3 * rng.normal(size=40)
    model = kn.BayesianRegressor("exact", likelihood=kn.Gaussian(0.3), random_state=0)
    for part in (slice(0, 25), slice(25, 40)):
        model.partial_fit(X[part], y[part])
    schema = model.schema_  # learned from the first rows
    x = torch.from_numpy(schema.encode(read_table(X)))
    target = torch.from_numpy(schema.targets.scale(y))
    at_once = kn.ExactLinear().fit(kn.Model(linear_network(2, 1), kn.Gaussian(0.3)), (x, target))
    for name, value in at_once.mean().items():
        torch.testing.assert_close(model.posterior_.mean()[name], value, rtol=1e-6, atol=1e-8)
        torch.testing.assert_close(model.posterior_.std()[name], at_once.std()[name], rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("method", ["mean_field_vi", "laplace"])
@pytest.mark.parametrize("cls", BOTH)
def test_methods_with_a_density_learn_from_more_rows(cls: type, method: str):
    frame, y = problem(cls)
    model = cls(QUICK[method], network=small_network, random_state=0)
    first = model.partial_fit(frame[:40], y[:40]).posterior_.mean()
    schema = model.schema_
    model.partial_fit(frame[40:], y[40:])
    assert model.schema_ is schema
    assert isinstance(model.model_.prior, PosteriorPrior)
    for name, value in model.model_.prior.normal.means.items():
        torch.testing.assert_close(value, first[name])
    assert any(not torch.equal(value, first[name]) for name, value in model.posterior_.mean().items())


@pytest.mark.parametrize("method", ["map", "deep_ensemble", "nuts"])
def test_methods_without_a_density_have_no_partial_fit(method: str):
    model = kn.BayesianRegressor(QUICK[method])
    assert not hasattr(model, "partial_fit")
    with pytest.raises(AttributeError, match="no attribute 'partial_fit'") as caught:
        _ = model.partial_fit
    assert isinstance(caught.value.__cause__, kn.Unsupported)
    assert type(QUICK[method]).__name__ in str(caught.value.__cause__)


def test_auto_can_be_updated_until_it_has_chosen_what_cannot():
    assert can_update(kn.BayesianRegressor())
    model = kn.BayesianRegressor().set_params(method=kn.MAP())
    with pytest.raises(kn.Unsupported, match="MAP"):
        can_update(model)


# --- weights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["map", "mean_field_vi", pytest.param("nuts", marks=pytest.mark.slow)])
def test_whole_weights_are_rows_repeated_for_every_method(method: str):
    rng = np.random.default_rng(0)
    X, y, weights = rng.normal(size=(20, 2)), rng.normal(size=20), rng.integers(0, 3, 20)
    model = kn.BayesianRegressor(QUICK[method], network=small_network, random_state=0)
    weighted = clone(model).fit(X, y, sample_weight=weights).predict(X)
    repeated = clone(model).fit(X.repeat(weights, axis=0), y.repeat(weights)).predict(X)
    np.testing.assert_array_equal(weighted, repeated)


def test_other_weights_count_as_they_should():
    """Ten times the weight in one place is as ten rows there, for the mode of a linear model."""
    X, y = np.array([[0.0], [1.0], [2.0], [3.0]]), np.array([0.0, 2.0, 1.0, 5.0])
    weights = np.array([0.5, 2.5, 1.0, 1.0])
    model = kn.BayesianRegressor(
        kn.MAP(epochs=4000), network=linear_network, likelihood=kn.Gaussian(0.5), random_state=0,
    ).fit(X, y, sample_weight=weights)  # fmt: skip
    x, target = model.schema_.encode(read_table(X)).astype(float), model.schema_.targets.scale(y)
    design = np.column_stack([x, np.ones(4)])
    precision = design.T @ (weights[:, None] * design) / 0.25 + np.eye(2)
    expected = np.linalg.solve(precision, design.T @ (weights[:, None] * target) / 0.25)
    found = [model.posterior_.mean()[name].item() for name in ("weight", "bias")]
    np.testing.assert_allclose(found, expected[:, 0], atol=1e-4)


@pytest.mark.parametrize("method", ["mean_field_vi", pytest.param("nuts", marks=pytest.mark.slow)])
def test_weights_that_are_not_whole_go_to_every_method(method: str):
    X, y = np.random.default_rng(0).normal(size=(20, 2)), np.arange(20.0)
    model = kn.BayesianRegressor(QUICK[method], network=small_network, random_state=0)
    light, plain = (clone(model).fit(X, y, sample_weight=np.full(20, each)).predict(X) for each in (0.5, 1.0))
    assert np.isfinite(light).all() and (light != plain).any()


# --- scikit-learn's tools --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", BOTH)
def test_pipelines_cross_validation_and_clones_work(cls: type):
    frame, y = problem(cls)
    X = frame[["size"]].fillna(100.0)
    model = cls(QUICK_MAP, network=small_network, random_state=0)
    assert clone(model).get_params() == model.get_params()
    scores = cross_val_score(make_pipeline(StandardScaler(), model), X, y, cv=3)
    assert scores.shape == (3,) and np.isfinite(scores).all()


def test_a_grid_may_go_over_methods():
    frame, y = mixed_frame(60)
    grid = GridSearchCV(
        kn.BayesianRegressor(network=small_network, random_state=0),
        {"method": [kn.MAP(epochs=2), QUICK_MAP]}, cv=2,
    ).fit(frame[["size", "colour"]], y)  # fmt: skip
    assert grid.best_params_ == {"method": QUICK_MAP}
    assert isinstance(grid.best_estimator_.schema_, Schema)


def test_params_are_stored_as_they_are():
    net = small_network(1, 1)
    model = kn.BayesianRegressor(
        "mfvi", network=net, budget="quick", time_limit=3, samples=7, kinds={"a": "date"}, verbose=True
    )
    found = model.get_params()
    assert found["network"] is net
    assert (found["method"], found["budget"], found["time_limit"], found["samples"]) == ("mfvi", "quick", 3, 7)
    assert repr(kn.BayesianClassifier(samples=7)) == "BayesianClassifier(samples=7)"


# --- stopped ---------------------------------------------------------------------------------------------------------


def test_chains_that_are_stopped_before_the_first_draw_are_no_posterior(monkeypatch):
    from knowable.inference.sampling.mclmc import MCLMCKernel

    advance = MCLMCKernel.advance

    def interrupted(self, target, state, n, *, warmup=None, **options):
        if warmup is None or warmup.first > 0:
            raise KeyboardInterrupt
        return advance(self, target, state, n, warmup=warmup, **options)

    monkeypatch.setattr(MCLMCKernel, "advance", interrupted)
    frame, y = mixed_frame()
    chains = kn.MCLMC(chains=2, warmup=60, draws=10, start="network", adjusted=False)
    estimator = kn.BayesianRegressor(chains, network=linear_network)
    with pytest.raises(KeyboardInterrupt, match="before the first draw"), pytest.warns(kn.Interrupted):
        estimator.fit(frame, y)
    with pytest.raises(NotFittedError):
        estimator.predict(frame)
