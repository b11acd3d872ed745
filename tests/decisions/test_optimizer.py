"""Tests of Bayesian optimisation: what it finds, what it keeps, and that nothing told is lost."""

from __future__ import annotations

import math
import warnings

import pytest
import torch

import knowable as kn
from knowable.decisions import proposals, surrogate
from knowable.decisions.optimizer_plots import best_so_far

BOX = [(0.0, 1.0), (-1.0, 2.0)]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Fewer features and a shorter search."""
    monkeypatch.setattr(surrogate, "_PAIRS", 64)
    monkeypatch.setattr(proposals, "_STEPS", 20)
    monkeypatch.setattr(proposals, "_SPREAD", 128)
    monkeypatch.setattr(proposals, "_DRAWS", 64)


def bowl(point):
    return -((point[0] - 0.3) ** 2) - (point[1] - 0.5) ** 2


def told(optimizer, n=6, function=bowl):
    for point in optimizer.ask(n):
        optimizer.tell(point, function(point))
    return optimizer


# --- what it finds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("acquisition", ["ucb", "logei", "lognei", "thompson"])
def test_every_acquisition_finds_the_top_of_a_bowl(acquisition):
    """Of twelve points at random the best is on average 0.08 below it, of those that a surrogate chooses far less."""
    optimizers = [kn.Optimizer(BOX, acquisition=acquisition, noise=0.0, initial=5, seed=seed) for seed in range(3)]
    found = [optimizer.run(bowl, 12) for optimizer in optimizers]
    for optimizer, best in zip(optimizers, found, strict=True):
        assert best.value == bowl(best.point) == max(optimizer.values)
    median, optimizer = sorted(zip(found, optimizers, strict=True), key=lambda each: each[0].value)[1]
    assert median.value > -0.02 and median.value > max(optimizer.values[:5])


def test_minimising_is_maximising_the_negative():
    runs = [kn.Optimizer(BOX, maximise=up, noise=0.0, initial=4) for up in (True, False)]
    best = [run.run(function, 6) for run, function in zip(runs, (bowl, lambda p: -bowl(p)), strict=True)]
    assert runs[0].points == runs[1].points and best[0].point == best[1].point and best[0].value == -best[1].value
    mean = [run.predict([[0.5, 0.5]])[0] for run in runs]
    torch.testing.assert_close(mean[0], -mean[1])
    assert best_so_far(runs[0]) == [-each for each in best_so_far(runs[1])]


def test_predictions_are_in_the_units_of_the_values():
    optimizer = told(kn.Optimizer(BOX, noise=0.0), 8, lambda point: 1e3 + 50 * bowl(point))
    mean, std = optimizer.predict(optimizer.points)
    values = torch.tensor(optimizer.values, dtype=torch.float64)
    assert (mean - values).abs().max() < 1.0 and (std < 2.0).all()


def test_whole_numbers_options_and_logarithms_are_searched_together():
    space = {"rate": kn.Real(1e-4, 1.0, log=True), "layers": kn.Integer(1, 8), "kind": kn.Choice(["a", "b"])}

    def score(point):
        assert isinstance(point["layers"], int) and point["kind"] in "ab"
        return -((math.log10(point["rate"]) + 2) ** 2) - 0.2 * (point["layers"] - 5) ** 2 + (point["kind"] == "b")

    best = kn.Optimizer(space, noise=0.0, seed=1).run(score, 16)
    assert best.point["kind"] == "b" and best.value > 0.3


def test_a_space_without_intervals_is_never_asked_twice_and_runs_out():
    space = [kn.Integer(0, 2), kn.Choice(["a", "b"])]
    optimizer = kn.Optimizer(space, initial=2, noise=0.0)
    best = optimizer.run(lambda point: point[0] + (point[1] == "b"), 6)
    assert best.point == [2, "b"] and len({tuple(point) for point in optimizer.points}) == 6
    with pytest.raises(kn.InvalidArgument, match="All 6 points of the space have been asked"):
        optimizer.ask()
    noisy = kn.Optimizer(space, initial=2, noise=0.5)
    noisy.run(lambda point: point[0], 8)
    assert len(noisy.points) == 8


def test_of_noisy_values_the_best_has_the_best_mean():
    """Twenty values at one point and a lucky one elsewhere: the lucky one is not believed."""
    optimizer = kn.Optimizer([(0.0, 1.0)], noise=1.0)
    optimizer.tell([[0.8]] * 20 + [[0.2]] * 20, [1.0] * 20 + [-0.5] * 19 + [2.0])
    assert optimizer.best.point == [0.8] and abs(optimizer.best.value - 1.0) < 0.6


def test_any_method_is_a_surrogate():
    net = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1)).double()
    model = kn.Model(net, kn.Gaussian(noise=0.1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)  # fits of a moment
        for method, own in ((kn.DeepEnsemble(members=3, epochs=20), None), (kn.Laplace(epochs=20), model)):
            optimizer = kn.Optimizer(BOX, method, "logei", model=own, initial=4)
            optimizer.run(bowl, 6)
            assert len(optimizer.errors) == 2 and type(method).__name__ in repr(optimizer)


# --- batches, failures, constraints ----------------------------------------------------------------------------------


def test_a_batch_does_not_repeat_itself_nor_what_is_pending():
    optimizer = told(kn.Optimizer(BOX, noise=0.0, initial=6))
    batch = optimizer.ask(3)
    assert optimizer.pending == batch
    rows = torch.tensor(batch + optimizer.ask(), dtype=torch.float64)
    assert torch.pdist(rows).min() > 0.01
    optimizer.tell(batch[1], 0.0)
    assert optimizer.pending[:2] == [batch[0], batch[2]] and len(optimizer.pending) == 3


@pytest.mark.parametrize("missing", [None, math.nan, math.inf])
def test_values_that_are_missing_are_kept_and_not_fitted(missing):
    optimizer, plain = (told(kn.Optimizer(BOX, noise=0.0, initial=6)) for _ in range(2))
    optimizer.tell([[0.3, 0.5]], [missing])
    assert optimizer.points[-1] == [0.3, 0.5] and math.isnan(optimizer.values[-1])
    assert optimizer._known().x.equal(plain._known().x) and optimizer.best.point != [0.3, 0.5]
    (point,) = optimizer.ask()
    assert abs(point[0] - 0.3) + abs(point[1] - 0.5) / 3 > 0.02


def test_constraints_are_learned_and_the_best_is_feasible():
    """The top of the bowl at 0.3 is not feasible; the best point that is lies at 0.6."""
    optimizer = kn.Optimizer([(0.0, 1.0)], constraints=1, noise=0.0, initial=5)
    best = optimizer.run(lambda point: (-((point[0] - 0.3) ** 2), [0.6 - point[0]]), 11)
    assert 0.6 <= best.point[0] < 0.65
    optimizer.tell([0.3], 0.0, constraints=[0.3])
    assert optimizer.best == best
    optimizer.tell([0.65], 5.0, constraints=[math.nan])  # not known whether it is feasible
    assert optimizer.best == best


def test_a_constraint_that_was_never_measured_and_a_constant_function_do_no_harm():
    optimizer = kn.Optimizer(BOX, constraints=1, initial=3)
    for point in optimizer.ask(4):
        optimizer.tell(point, 1.0, constraints=[math.nan])
    (point,) = optimizer.ask()
    assert 0 <= point[0] <= 1 and "best" not in repr(optimizer)


def test_arrays_are_points_too_and_are_copied():
    optimizer = kn.Optimizer(BOX)
    points = torch.tensor([[0.25, 0.5], [0.5, 1.0]], dtype=torch.float64)
    optimizer.tell(points, torch.tensor([1.0, 2.0]))
    optimizer.tell(points[0].numpy(), 3.0)
    points.zero_()
    assert optimizer.points == [[0.25, 0.5], [0.5, 1.0], [0.25, 0.5]] and optimizer.values == [1.0, 2.0, 3.0]


# --- bad input -------------------------------------------------------------------------------------------------------


def test_what_is_refused_leaves_everything_as_it_was(tmp_path):
    optimizer = told(kn.Optimizer(BOX, checkpoint=tmp_path / "run"), 3)
    before = (list(optimizer.points), list(optimizer.values))
    for points, values, error, match in (
        ([[0.5, 0.5], [0.5, 3.0]], [1.0, 2.0], kn.InvalidArgument, r"point\[1\] must be from -1 to 2, got 3.0"),
        ([[0.5, 0.5]], [1.0, 2.0], kn.InvalidData, "one for each of 1 points, got 2"),
        ([0.5, 0.5, 0.5], 1.0, kn.InvalidData, "must have 2 values, got 3"),
        ([[0.5, 0.5], [0.1, 0.1]], [1.0, "high"], kn.InvalidData, r"values\[1\] must be a number"),
        ({"x": 0.5}, 1.0, kn.InvalidData, "must be a list of 2 values"),
    ):
        with pytest.raises(error, match=match):
            optimizer.tell(points, values)
    with pytest.raises(kn.InvalidArgument, match="has no constraints"):
        optimizer.tell([0.5, 0.5], 1.0, constraints=[0.0])
    assert (optimizer.points, optimizer.values) == before
    assert kn.Optimizer(BOX, checkpoint=tmp_path / "run").points == before[0]
    limited = kn.Optimizer(BOX, constraints=2)
    for given in (None, [0.0], [[0.0]]):
        with pytest.raises(kn.InvalidData, match="constraints must have"):
            limited.tell([0.5, 0.5], 1.0, constraints=given)


@pytest.mark.parametrize(
    ("settings", "error", "match"),
    [
        ({"acquisition": "uc"}, kn.InvalidArgument, "Did you mean 'ucb'"),
        ({"beta": -1.0}, kn.InvalidArgument, "beta must be"),
        ({"noise": -0.1}, kn.InvalidArgument, "noise must be"),
        ({"noise": math.nan}, kn.InvalidArgument, "noise must be"),
        ({"initial": 1}, kn.InvalidArgument, "initial must be"),
        ({"constraints": -1}, kn.InvalidArgument, "constraints must be"),
        ({"maximise": 1}, kn.InvalidType, "maximise must be True or False"),
        ({"method": "hmc"}, kn.InvalidType, "method must be a method"),
        ({"model": kn.Model(torch.nn.Linear(2, 1), kn.Gaussian())}, kn.InvalidArgument, "model needs a method"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, error, match):
    with pytest.raises(error, match=match):
        kn.Optimizer(BOX, **settings)


def test_questions_that_come_too_early_say_so():
    optimizer = kn.Optimizer(BOX)
    with pytest.raises(kn.InvalidArgument, match="no value yet"):
        _ = optimizer.best
    with pytest.raises(kn.InvalidArgument, match="at least 2 values, got 0"):
        optimizer.predict([[0.5, 0.5]])
    with pytest.raises(kn.InvalidArgument, match="one dimension"):
        optimizer.plot()
    with pytest.raises(kn.InvalidArgument, match="n must be"):
        optimizer.ask(0)


def test_a_function_that_raises_loses_nothing():
    optimizer = kn.Optimizer(BOX, initial=5)

    def breaks(point):
        if len(optimizer.points) == 3:
            raise OSError("the machine is off")
        return bowl(point)

    with pytest.raises(OSError, match="the machine is off"):
        optimizer.run(breaks, 5)
    assert len(optimizer.points) == 3 and len(optimizer.pending) == 1
    waiting = optimizer.pending[0]
    optimizer.run(bowl, 4)
    assert optimizer.points[3] == waiting


# --- on disk ---------------------------------------------------------------------------------------------------------


def test_a_run_stopped_anywhere_goes_on_as_if_it_had_not_been(tmp_path):
    space = {"x": (0.0, 1.0), "kind": kn.Choice([None, ("a", 1)])}

    def make(folder=None):
        return kn.Optimizer(space, acquisition="logei", noise=0.0, initial=3, checkpoint=folder)

    def value(point):
        return -((point["x"] - 0.7) ** 2) + 0.1 * (point["kind"] is None)

    whole = make()
    whole.run(value, 6)
    folder = tmp_path / "run"
    for stop in range(1, 6):
        part = make(folder)
        part.run(value, stop)
        if stop % 2:  # killed between the question and the answer
            part.ask()
    last = make(folder)
    last.run(value, 6)
    assert (last.points, last.values, last.errors) == (whole.points, whole.values, whole.errors)
    with pytest.raises(kn.InvalidArgument, match="belongs to another run: beta differ"):
        kn.Optimizer(space, acquisition="logei", noise=0.0, initial=3, beta=1.0, checkpoint=folder)


# --- the check of the surrogate, and pictures ------------------------------------------------------------------------


def test_errors_are_those_of_predictions_made_before_the_value():
    optimizer = told(kn.Optimizer(BOX, noise=0.1, initial=6))
    (point,) = optimizer.ask()
    mean, std = optimizer.predict([point])
    optimizer.tell(point, 1.5)
    expected = (1.5 - mean.item()) / math.sqrt(std.item() ** 2 + 0.1**2)
    assert optimizer.errors == [pytest.approx(expected, rel=1e-3)]


def test_a_surrogate_that_is_too_sure_is_warned_about_once():
    optimizer = told(kn.Optimizer(BOX, noise=0.0, initial=6))
    optimizer.errors = [0.5] * 30
    optimizer.tell([0.1, 0.1], 0.0)
    optimizer.errors = [3.0, -0.5] * 10
    with pytest.warns(kn.CalibrationWarning, match="too sure: 10 of the last 20 values"):
        optimizer.tell([0.2, 0.1], 0.0)
    optimizer.tell([0.3, 0.1], 0.0)


def test_pictures_are_drawn():
    def value(point):
        return -((point["rate"] - 2) ** 2)

    optimizer = told(kn.Optimizer({"rate": kn.Real(0.1, 10.0, log=True)}, noise=0.0), 5, value)
    optimizer.ask()
    upper, lower = optimizer.plot().axes
    assert lower.get_xlabel() == "rate" and lower.get_ylabel() == "ucb" and len(upper.lines) >= 2
    other = told(kn.Optimizer({"rate": (0.1, 10.0)}, acquisition="random"), 5, value)
    (axes,) = optimizer.plot_regret(other, optimum=0.0).axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["ucb", "random"]
    assert axes.get_yscale() == "log"
