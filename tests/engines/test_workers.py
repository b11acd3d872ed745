"""Whoever does the work, in whatever order, and however often it is lost: the same bits."""

from __future__ import annotations

import contextlib
import signal
import warnings

import pytest
import torch

import knowable as kn
from knowable.core.chains import target
from knowable.core.compiling.engine import as_engine
from knowable.core.compiling.workers import ATTEMPTS, Surroundings, in_worker
from knowable.core.support.progress import Bar, Tracker
from knowable.core.support.time_limit import time_left
from tests.engines.artifacts import artifact_sha
from tests.engines.lossy import Lossy, LossyPool

pytestmark = pytest.mark.filterwarnings("ignore:.*lost with their workers:knowable.KnowableWarning")


def problem() -> tuple[kn.Model, tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(40, 3)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    return kn.Model(net, kn.Gaussian(0.3)), (x, x.sum(1, keepdim=True).sin())


METHODS = [
    kn.DeepEnsemble(5, epochs=4, vectorise=False),
    kn.BayesianBootstrap(4, epochs=4, vectorise=False),
    kn.EnsembleOf(kn.MeanFieldVI(epochs=3), 3),
    kn.MAP(epochs=4),
]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_work_on_workers_gives_the_same_artifact(method, seed):
    model, data = problem()
    here = artifact_sha(method.fit(model, data, seed=seed))
    for workers in (Lossy(1), Lossy(2, seed=1), Lossy(4, lost=(0, 2), seed=2)):
        assert artifact_sha(method.fit(model, data, seed=seed, engine=workers)) == here
        counts = workers.counts
        assert counts.lost == len([each for each in workers.lost if each < counts.started])
        assert counts.started == counts.done + counts.lost  # what had finished is not done again


@pytest.mark.parametrize("method", [pytest.param(kn.NUTS, marks=pytest.mark.slow), kn.HMC])
@pytest.mark.filterwarnings("ignore::knowable.ConvergenceWarning")
def test_tuned_chains_draw_in_groups_with_the_same_artifact(method, seed, monkeypatch, tmp_path):
    x = torch.randn(30, 2).double()
    model, data = kn.Model(torch.nn.Linear(2, 1).double(), kn.Gaussian(0.5)), (x, x.sum(1, keepdim=True))
    sampler = method(chains=5, draws=80, warmup=60, start="network")
    monkeypatch.setattr(target, "_GROUP_FLOPS", 2 * 30 * 2 * 3)  # two chains, on all rows
    workers = Lossy(2, lost=(1, 4))
    here, there = sampler.fit(model, data, seed=seed), sampler.fit(model, data, seed=seed, engine=workers)
    assert artifact_sha(here) == artifact_sha(there)
    assert workers.counts.done == 3 * 2 and workers.counts.lost == 2  # groups, times blocks of transitions
    again = sampler.fit(model, data, seed=seed, checkpoint=tmp_path / "run")
    assert artifact_sha(again) == artifact_sha(here)
    exact = kn.ExactLinear().fit(model, data)
    for name, mean in exact.mean().items():
        error = exact.std()[name] / here.diagnostics["ess_bulk"] ** 0.5
        assert ((here.mean()[name] - mean).abs() < 5 * error).all()


def test_the_posterior_of_a_whole_fit_is_of_the_model_that_was_given():
    model, data = problem()
    assert kn.MAP(epochs=2).fit(model, data, engine=Lossy(1)).model is model


def test_a_bare_density_is_not_sampled_elsewhere():
    with pytest.raises(kn.Unsupported, match="in this process"):
        kn.HMC().sample(lambda p: -(p["x"] ** 2).sum(), {"x": torch.zeros(2)}, engine=kn.Engine(workers=Lossy()))


@pytest.mark.parametrize("method", [kn.DeepEnsemble(5, epochs=4), kn.BayesianBootstrap(5, epochs=4)])
def test_members_in_groups_give_the_same_artifact(method, seed, monkeypatch):
    monkeypatch.setattr(target, "_GROUP_FLOPS", 2 * 40 * 2 * (3 * 5 + 5))  # two members, on all rows
    model, data = problem()
    posterior = method.fit(model, data, seed=seed)
    assert "5 members in 3 groups" in posterior.diagnostics.message and len(posterior) == 5
    workers = Lossy(3, lost=(1,))
    assert artifact_sha(method.fit(model, data, seed=seed, engine=workers)) == artifact_sha(posterior)
    assert (workers.counts.started, workers.counts.done, workers.counts.lost) == (4, 3, 1)


def test_groups_are_as_large_as_a_step_is_worth():
    assert target.worthwhile_group(8, 1.0) == 8  # overhead is all there is
    assert target.worthwhile_group(8, 1e9) == 1
    assert target.worthwhile_group(8, target._GROUP_FLOPS / 5) == 4  # equal groups, of at most five


def test_point_estimates_of_the_first_member_serve_the_others_on_workers_too(seed):
    model = kn.Model(problem()[0].net, kn.Gaussian(), random="last_layer")
    _, data = problem()
    for method in (kn.EnsembleOf(kn.MeanFieldVI(epochs=3), 3), kn.DeepEnsemble(3, epochs=3)):
        here = artifact_sha(method.fit(model, data, seed=seed))
        assert artifact_sha(method.fit(model, data, seed=seed, engine=Lossy(2))) == here


@pytest.mark.parametrize("reference", [pytest.param(False, marks=pytest.mark.slow), kn.MAP(epochs=9)])
def test_a_comparison_on_workers_has_the_same_records(reference, seed):
    model, data = problem()
    methods = [kn.MAP(epochs=2), kn.DeepEnsemble(2, epochs=2, vectorise=False)]
    options = {"methods": methods, "cv": 2, "reference": reference, "seed": seed, "samples": 8, "progress": False}
    workers = Lossy(3, lost=(1,), seed=3)
    found = [artifact_sha(kn.compare(model, data, engine=engine, **options)) for engine in (None, workers)]
    assert found[0] == found[1] and workers.counts.lost == 1


def test_a_comparison_takes_no_other_settings_of_an_engine():
    with pytest.raises(kn.Unsupported, match="where fits are made"):
        kn.compare(*problem(), methods=["map"], engine=kn.Engine(mode="eager"))


def test_what_is_lost_again_and_again_is_an_error_and_the_rest_is_stopped():
    model, data = problem()
    with pytest.raises(kn.WorkerLost, match=f"begun {ATTEMPTS} times"):
        kn.MAP(epochs=2).fit(model, data, engine=Lossy(2, lost=(0, 1, 2)))


def failing(shared: str, task: int) -> int:
    if task == 2:
        raise kn.Diverged(shared)
    warnings.warn(f"warning {task}", kn.ConvergenceWarning, stacklevel=2)
    return task


def test_errors_and_warnings_of_the_work_arrive_as_they_are():
    engine = kn.Engine(workers=Lossy(1))
    with pytest.warns(kn.ConvergenceWarning, match="warning 1"), pytest.raises(kn.Diverged, match="the loss is NaN"):
        list(engine.run(failing, "the loss is NaN", [1, 2]))


def around(shared: None, task: int) -> tuple[int, torch.dtype, float | None, bool]:
    return torch.get_num_threads(), torch.get_default_dtype(), time_left(), in_worker()


def test_work_has_the_threads_the_precision_and_a_share_of_the_time_of_whoever_asks():
    torch.set_default_dtype(torch.float64)
    try:
        with kn.time_limit(100):
            found = [result for _, result in kn.Engine(workers=Lossy(2)).run(around, None, [1, 2, 3, 4])]
    finally:
        torch.set_default_dtype(torch.float32)
    assert all(each[:2] == (torch.get_num_threads(), torch.float64) and each[3] for each in found)
    assert all(each[2] is not None and 40 < each[2] <= 50 for each in found[:1])  # two rounds of two
    assert not in_worker()


def test_a_worker_with_other_versions_is_refused():
    other = Surroundings(1, torch.float32, ("0.0", "1.0"), None, told=False).restored()
    with pytest.raises(kn.Unsupported, match=r"this process knowable 0\.0 and torch 1\.0"):
        other.__enter__()


def interrupting(shared: None, task: int) -> int:
    if task == 1:
        signal.raise_signal(signal.SIGINT)
    return task


def test_ctrl_c_stops_what_is_under_way(monkeypatch):
    pools: list[LossyPool] = []
    started = LossyPool.start
    monkeypatch.setattr(LossyPool, "start", lambda self, *given: (pools.append(self), started(self, *given))[1])
    monkeypatch.setattr(LossyPool, "wait", lambda self, running, seconds: running[:1])
    results = kn.Engine(workers=Lossy(2)).run(interrupting, None, [0, 1, 2, 3])
    assert next(results) == (0, 0)
    with pytest.raises(KeyboardInterrupt):
        next(results)
    assert pools[0].cancelled == [2]


def test_an_ensemble_that_is_stopped_keeps_the_members_that_were_done(monkeypatch):
    model, data = problem()
    done = LossyPool.result

    def result(self, ended):
        if ended == 3:
            raise KeyboardInterrupt
        return done(self, ended)

    monkeypatch.setattr(LossyPool, "result", result)
    monkeypatch.setattr(LossyPool, "wait", lambda self, running, seconds: running[:1])
    with pytest.warns(kn.Interrupted, match="3 of 5 pieces"):
        posterior = kn.DeepEnsemble(5, epochs=2, vectorise=False).fit(model, data, engine=Lossy(2))
    assert len(posterior) == 3 and posterior.diagnostics.interrupted


class Noted(Tracker):
    def __init__(self) -> None:
        self.figures: dict[str, list[tuple[int, float]]] = {}

    def __reduce__(self):  # a worker gets one, and does not use it
        return Noted, ()

    @contextlib.contextmanager
    def opened(self, label):
        noted = self.figures.setdefault(label, [])

        class Into(Bar):
            def update(self, done, total, text, terms=None, make=None):
                if terms:
                    noted.append((done, terms["loss"]))

        yield Into()


def test_a_tracker_gets_the_same_figures_of_every_member_from_here_and_from_workers():
    model, data = problem()
    found = []
    for engine in (None, Lossy(2)):
        tracker = Noted()
        kn.DeepEnsemble(3, epochs=2, vectorise=False).fit(model, data, progress=tracker, engine=engine)
        found.append(tracker.figures)
    assert found[0] == found[1] and sorted(found[0]) == [f"DeepEnsemble, member {k}" for k in range(3)]


def test_engines_are_named_and_anything_else_is_refused():
    assert as_engine("ray") == kn.Engine(workers=kn.engines.Ray())
    assert repr(kn.Engine(workers=Lossy())) == repr(kn.Engine())  # a checkpoint does not depend on workers
    with pytest.raises(kn.InvalidArgument, match=r"engine must be .* one of \[.*'ray'.*\], got 'spark'"):
        as_engine("spark")
    with pytest.raises(kn.InvalidType, match="workers must be"):
        kn.Engine(workers=2)  # type: ignore[arg-type]
