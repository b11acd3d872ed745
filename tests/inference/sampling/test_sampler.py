"""Tests of samplers as methods: networks and bare densities in, draws and diagnostics out."""

from __future__ import annotations

import inspect
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn
from knowable.core.chains.convergence import prediction_error, rhat, share_between_chains
from knowable.core.chains.posterior import ChainPosterior, Samples
from knowable.core.network.params import Layout
from knowable.inference.sampling import sampler
from knowable.inference.sampling.hmc import HMC
from knowable.inference.sampling.initial_positions import Start
from knowable.inference.sampling.sampler import FunctionMonitor, coordinate_monitor
from knowable.priors import EmpiricalBayes
from tests.core.cases import DTYPE, linear_data, linear_model, mlp, same_params

QUICK = {"chains": 2, "draws": 6, "warmup": 4, "steps": 2}


def quick(**settings) -> HMC:
    return HMC(**{**QUICK, **settings})


def normal(p) -> Tensor:
    return -0.5 * p["x"].square().sum()


def start(**settings) -> dict[str, Tensor]:
    return {"x": torch.zeros(2, **settings)}


def fit(method: HMC | None = None, model: kn.Model | None = None, data=None, **settings) -> ChainPosterior:
    model = model or kn.Model(mlp().to(DTYPE), kn.Gaussian())
    return (method or quick(start="network")).fit(model, data or linear_data(), **settings)


# --- bare densities --------------------------------------------------------------------------------------------------


def test_draws_come_by_name_chain_and_number_with_their_log_density():
    found = quick(storage=kn.ChainStorage(thin=3)).sample(
        lambda p: normal(p) - (p["s"] - 2) ** 2, {**start(dtype=DTYPE), "s": 1.0}
    )
    assert isinstance(found, Samples)
    assert found.draws["x"].shape == (2, 6, 2) and found.draws["s"].shape == (2, 6)
    exact = -0.5 * found.draws["x"].square().sum(-1) - (found.draws["s"] - 2) ** 2
    torch.testing.assert_close(found.log_density, exact)
    assert all(value.shape == (2, 6) for value in found.info.values())


def test_the_log_density_of_a_tempered_run_is_the_densitys_own():
    found = quick(temperature=4.0).sample(normal, start(dtype=DTYPE))
    torch.testing.assert_close(found.log_density, -0.5 * found.draws["x"].square().sum(-1))


@pytest.mark.parametrize("rows", [8, 11])
@pytest.mark.parametrize("draws", [20, 45])
def test_draws_that_memory_let_go_take_their_figures_with_them(rows, draws):
    found = quick(draws=draws, storage=kn.ChainStorage(max_memory=rows * 2 * 2 * 8)).sample(normal, start(dtype=DTYPE))
    assert found.draws["x"].shape[1] <= rows
    assert found.log_density.shape == found.draws["x"].shape[:2]
    torch.testing.assert_close(found.log_density, -0.5 * found.draws["x"].square().sum(-1))
    assert all(value.shape == found.log_density.shape for value in found.info.values())


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"x": torch.zeros(2)}, torch.float32),
        ({"x": torch.zeros(2, dtype=DTYPE)}, DTYPE),
        ({"x": torch.zeros(2, dtype=torch.int64)}, DTYPE),
        ({"x": [0, 0]}, DTYPE),
        ({"x": np.zeros(2)}, DTYPE),
        ({"x": torch.zeros(2), "s": 0.5}, torch.float32),
        ({"x": torch.zeros(2), "s": torch.zeros((), dtype=DTYPE)}, DTYPE),
        ({"x": torch.zeros(2, requires_grad=True)}, torch.float32),
    ],
    ids=["single", "double", "whole", "list", "array", "single and a number", "single and double", "with gradient"],
)
def test_draws_have_the_precision_of_the_start(given, expected):
    found = quick().sample(lambda p: normal(p) - sum(v.square().sum() for k, v in p.items() if k != "x"), given)
    assert all(value.dtype == expected and not value.requires_grad for value in found.draws.values())


def test_one_start_is_scattered_and_one_for_each_chain_is_not():
    still = HMC(chains=3, draws=1, warmup=0, step_size=1e-12, steps=1)
    near = still.sample(normal, {"x": torch.full((2,), 5.0, dtype=DTYPE)}).draws["x"][:, 0]
    assert len(near.unique(dim=0)) == 3 and (near - 5).abs().max() <= 1.0
    given = [{"x": torch.full((2,), float(k), dtype=DTYPE)} for k in range(3)]
    exact = still.sample(normal, given).draws["x"][:, 0]
    torch.testing.assert_close(exact, torch.tensor([[0.0, 0], [1, 1], [2, 2]], dtype=DTYPE))
    alone = HMC(chains=1, draws=1, warmup=0, step_size=1e-12, steps=1).sample(normal, given[2:]).draws["x"]
    torch.testing.assert_close(alone[0, 0], torch.tensor([2.0, 2.0], dtype=DTYPE))


def test_chains_are_scattered_to_where_the_density_is_finite():
    def confined(p):
        return torch.where((p["x"] - 3).abs().max() < 0.05, normal(p), -torch.inf)

    found = HMC(chains=4, draws=2, warmup=0, step_size=1e-6, steps=1).sample(confined, {"x": torch.full((2,), 3.0)})
    assert (found.draws["x"] - 3).abs().max() < 0.05


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "init_params must be a dict"),
        (torch.zeros(2), "init_params must be a dict"),
        ([], "init_params"),
        ([{"x": torch.zeros(2)}] * 3, "3 dicts for 2 chains"),
        ([{"x": torch.zeros(2)}, {"x": torch.zeros(3)}], "same names and shapes"),
        ([{"x": torch.zeros(2)}, {"y": torch.zeros(2)}], "same names and shapes"),
        ({"x": torch.tensor([0.0, torch.nan])}, "must be finite"),
        ({"x": "zero"}, r"init_params\['x'\] must be"),
        ({"x": torch.zeros(0)}, "init_params"),
        ({"x": None}, r"init_params\['x'\] must be"),
    ],
    ids=str,
)
def test_starts_that_make_no_sense_are_refused(wrong, message):
    with pytest.raises(kn.KnowableError, match=message):
        quick().sample(normal, wrong)


@pytest.mark.parametrize(
    ("density", "message"),
    [
        (lambda p: p["x"].sum().log(), "log_density is -inf at init_params"),
        (lambda p: (p["x"].sum() - 1).log(), "log_density is nan at init_params"),
        (lambda p: -p["x"].norm().sqrt(), "no finite gradient at init_params"),
        (lambda p: -p["x"].square(), "log_density must return one number"),
        (lambda p: 0.0, "log_density must return one number"),
        (None, "log_density must be a function"),
    ],
)
def test_densities_that_cannot_be_sampled_are_refused(density, message):
    with pytest.raises(kn.KnowableError, match=message):
        quick().sample(density, start())


@pytest.mark.parametrize("wrong", [{"seed": -1}, {"seed": 1.5}, {"engine": "fast"}, {"checkpoint": 3}], ids=str)
def test_arguments_that_make_no_sense_are_refused(wrong):
    with pytest.raises(kn.KnowableError, match=next(iter(wrong))):
        quick().sample(normal, start(), **wrong)


def test_short_precision_is_refused():
    with pytest.raises(kn.Unsupported, match="needs exact gradients"):
        quick().sample(normal, start(), engine=kn.Engine("bfloat16"))
    with pytest.raises(kn.Unsupported, match="needs exact gradients"):
        fit(engine=kn.Engine("bfloat16"))


def test_the_seed_fixes_the_draws_and_nothing_global_moves():
    before = torch.get_rng_state()
    first, again, other = (quick().sample(normal, start(), seed=seed).draws["x"] for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), before)


def test_random_numbers_in_a_density_are_the_runs_own():
    def noisy(p):
        return normal(p) + 0.01 * torch.randn(())

    before = torch.get_rng_state()
    first = quick().sample(noisy, start()).draws["x"]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(quick().sample(noisy, start()).draws["x"], first)


@pytest.mark.parametrize("mode", ["eager", "traced"])
def test_ways_of_computing_agree(mode):
    found = quick().sample(normal, start(dtype=DTYPE), engine=kn.Engine(mode=mode)).draws["x"]
    torch.testing.assert_close(found, quick().sample(normal, start(dtype=DTYPE)).draws["x"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("density", "given", "number"),
    [
        (lambda p: 2 * normal(p), start(), 0),
        (lambda p: normal({"x": p["y"]}), {"y": torch.zeros(2)}, 0),
        (normal, {"x": torch.ones(2)}, 0),
        (normal, start(), 1),
    ],
    ids=["density", "names", "start", "seed"],
)
def test_a_checkpoint_of_another_run_is_refused(density, given, number, tmp_path):
    quick().sample(normal, start(), checkpoint=tmp_path / "run")
    with pytest.raises(kn.InvalidArgument, match="belongs to another fit"):
        quick().sample(density, given, seed=number, checkpoint=tmp_path / "run")


def test_a_checkpoint_with_another_start_of_another_chain_is_refused(tmp_path):
    given = [{"x": torch.zeros(2)}, {"x": torch.ones(2)}]
    quick().sample(normal, given, checkpoint=tmp_path / "run")
    with pytest.raises(kn.InvalidArgument, match="belongs to another fit"):
        quick().sample(normal, [given[0], {"x": 2 * torch.ones(2)}], checkpoint=tmp_path / "run")


def test_a_file_in_the_place_of_a_checkpoint_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(kn.InvalidArgument, match="cannot be a folder"):
        quick().sample(normal, start(), checkpoint=tmp_path / "file")


def test_a_progress_bar_changes_nothing(capsys):
    shown = quick().sample(normal, start(), progress=True).draws["x"]
    assert torch.equal(shown, quick().sample(normal, start(), progress=False).draws["x"])


def test_warnings_point_at_the_line_that_called():
    apart = [{"x": torch.full((2,), 100.0 * k)} for k in range(3)]
    stuck = HMC(chains=3, draws=120, warmup=0, step_size=1e-3, steps=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = inspect.currentframe().f_lineno + 1  # type: ignore[union-attr]
        stuck.sample(normal, apart)
    assert [(each.category, each.filename, each.lineno) for each in caught] == [(kn.ConvergenceWarning, __file__, line)]


def test_shortened_draws_are_the_draws_shortened():
    exact, short = (
        quick(storage=kn.ChainStorage(dtype=dtype)).sample(normal, start()).draws["x"] for dtype in ("same", "bfloat16")
    )
    assert torch.equal(short, exact.bfloat16())


def test_arviz_takes_thinned_draws():
    pytest.importorskip("arviz_base")
    found = quick(draws=45, storage=kn.ChainStorage(thin=2, max_memory=8 * 2 * 2 * 8)).sample(
        normal, start(dtype=DTYPE)
    )
    tree = found.to_arviz()
    assert tree["posterior"]["x"].shape[:2] == tree["sample_stats"]["energy"].shape == found.log_density.shape


# --- networks --------------------------------------------------------------------------------------------------------


def test_a_fit_is_a_posterior_of_chains_that_knows_how_it_went():
    posterior = fit()
    assert isinstance(posterior, ChainPosterior)
    assert (posterior.chains, len(posterior)) == (2, 12)
    assert posterior.diagnostics.method == repr(quick(start="network"))
    assert {"acceptance", "step_size", "gradients"} <= set(posterior.diagnostics)
    assert all(value.shape == (2, 6) for value in posterior.info.values())
    assert posterior.best is None


def test_figures_of_a_posterior_belong_to_its_draws():
    model, data = linear_model(), linear_data()
    method = HMC(chains=2, draws=45, warmup=0, steps=2, step_size=0.02, start="network")
    small = kn.ChainStorage(max_memory=8 * 2 * 3 * 8)
    whole, kept = fit(method, model, data), fit(replace(method, storage=small), model, data)
    stride = -(-45 // kept.draws["weight"].shape[1])
    stride = 1 << (stride - 1).bit_length()
    assert torch.equal(kept.draws["weight"], whole.draws["weight"][:, ::stride])
    assert torch.equal(kept.info["energy"], whole.info["energy"][:, ::stride])


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_loader_gives_the_posterior_of_its_tensors_and_nothing_global_moves(shuffle):
    data = linear_data()
    loader = DataLoader(TensorDataset(*data), batch_size=7, shuffle=shuffle)
    net = mlp().to(DTYPE)
    expected = fit(model=kn.Model(net, kn.Gaussian()), data=data)
    before = torch.get_rng_state()
    found = fit(model=kn.Model(net, kn.Gaussian()), data=loader)
    assert torch.equal(torch.get_rng_state(), before)
    assert same_params(found.mean(), expected.mean())


def test_memory_for_hardly_any_draws_is_refused_before_any_work(monkeypatch):
    monkeypatch.setattr(
        "knowable.inference.sampling.sampler.starting_points", lambda *a, **k: pytest.fail("it has begun")
    )
    with pytest.raises(kn.InvalidArgument, match="max_memory"):
        fit(quick(storage=kn.ChainStorage(max_memory=100)))


def test_draws_in_a_file_are_the_draws_and_a_second_fit_leaves_them_alone(tmp_path):
    net = mlp().to(DTYPE)
    model, data = kn.Model(net, kn.Gaussian()), linear_data()
    expected = fit(model=model, data=data)
    method = quick(start="network", storage=kn.ChainStorage(file=tmp_path / "draws.bin"))
    first = fit(method, model, data)
    fit(method, model, data, seed=1)
    assert same_params(first.stack, expected.stack)
    assert same_params(first.mean(), expected.mean())
    assert torch.equal(first.predict(data[0]).samples, expected.predict(data[0]).samples)


def test_hyperparameters_of_the_prior_are_refused():
    with pytest.raises(kn.Unsupported, match="cannot learn the prior's own scale"):
        fit(model=linear_model(prior=EmpiricalBayes(kn.Normal(1.0))))


@pytest.mark.parametrize("change", ["seed", "data", "settings", "start"])
def test_a_checkpoint_of_another_fit_is_refused(change, tmp_path):
    net = nn.Linear(2, 1).to(DTYPE)
    model, (x, y) = kn.Model(net, kn.Gaussian(0.5)), linear_data()
    posterior = kn.MAP(epochs=2).fit(model, (x, y))
    settings = {"method": quick(start=posterior), "model": model, "data": (x, y), "checkpoint": tmp_path / "run"}
    fit(**settings)
    other = {
        "seed": {"seed": 1}, "data": {"data": (x, y + 1)}, "settings": {"method": quick(start=posterior, draws=7)},
        "start": {"method": quick(start=kn.MAP(epochs=3).fit(model, (x, y)))},
    }  # fmt: skip
    with pytest.raises(kn.InvalidArgument, match="belongs to another fit"):
        fit(**{**settings, **other[change]})


def test_a_log_joint_that_is_not_finite_at_the_start_is_an_error():
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 1, dtype=DTYPE))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + 1e200 * self.weight.sum() ** 2

    with pytest.raises(kn.KnowableError, match="start"):
        fit(model=kn.Model(Broken(), kn.Gaussian(1e-120)))


# --- what is monitored -----------------------------------------------------------------------------------------------


def test_outputs_and_log_likelihoods_are_monitored():
    model, (x, y) = kn.Model(mlp().to(DTYPE), kn.Gaussian(), random="*"), linear_data(100)
    layout = Layout.of(model.params())
    monitor = FunctionMonitor(model, x, y, Start(torch.zeros(1, layout.size), {}, model.buffers()), layout)
    positions = torch.randn(4, 3, layout.size, dtype=DTYPE)
    found = monitor(positions)
    assert found.shape == (4, 3, 32 + 32)
    params = layout.views(positions[2, 1])
    rows = slice(None, 96, 3)
    torch.testing.assert_close(found[2, 1, :32], model.forward(params, x[rows]).flatten(), rtol=1e-9, atol=1e-9)
    expected = model.log_likelihood(params, x[rows], y[rows])
    torch.testing.assert_close(found[2, 1, 32:], expected, rtol=1e-9, atol=1e-9)


def monitored(likelihood: kn.Likelihood, own: Tensor, seed: int) -> Tensor:
    """R-hat of what is monitored, where all chains agree on the function and each has its own value for the noise."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn((32, 1), generator=generator, dtype=DTYPE)
    y = torch.randn((32, 1), generator=generator, dtype=DTYPE)
    outputs = 2 if isinstance(likelihood, kn.HeteroscedasticStudentT) else 1
    model = kn.Model(nn.Linear(1, outputs).to(DTYPE), likelihood)
    layout = Layout.of(model.params())
    positions = 0.1 * torch.randn((200, len(own), layout.size), generator=generator, dtype=DTYPE)
    (name,) = [name for name in model.params() if name.startswith("likelihood.")]
    layout.views(positions)[name].add_(own.reshape(-1, *[1] * model.params()[name].dim()))
    start = Start(positions[0], {}, model.buffers())
    return rhat(FunctionMonitor(model, x, y, start, layout)(positions).transpose(0, 1))


def test_chains_that_differ_in_their_noise_have_not_mixed(seed):
    assert monitored(kn.Gaussian(), torch.tensor([0.0, 0.0, 0.0, 0.5]), seed).max() > 1.1


def test_chains_need_not_agree_on_degrees_of_freedom_that_no_prediction_feels(seed):
    found = monitored(kn.HeteroscedasticStudentT(), torch.tensor([14.0, 15.0, 16.0, 17.0]), seed)
    assert found.max() < 1.1
    assert monitored(kn.HeteroscedasticStudentT(), torch.tensor([0.0, 0.0, 0.0, 4.0]), seed).max() > 1.1


@pytest.mark.parametrize("likelihood", [kn.Gaussian(), kn.Gaussian(0.5)])
def test_error_of_predictions_is_of_the_scores_of_evenly_spaced_draws(likelihood, monkeypatch):
    model, (x, y) = kn.Model(mlp().to(DTYPE), likelihood, random="last_layer"), linear_data(10)
    layout = Layout.of({name: model.params()[name] for name in model.random_names})
    points = {name: value + 1 for name, value in model.params().items() if name in model.point_names}
    monitor = FunctionMonitor(model, x, y, Start(torch.zeros(1, layout.size, dtype=DTYPE), points, {}), layout)
    draws = torch.randn(3, 150, layout.size, dtype=DTYPE)
    found = monitor.prediction_terms(draws)
    each = [[{**points, **layout.views(at)} for at in chain] for chain in draws[:, ::2]]
    scores = torch.stack([torch.stack([model.log_likelihood(p, x, y) for p in chain]) for chain in each])
    outputs = torch.stack([torch.stack([model.forward(p, x).flatten() for p in chain]) for chain in each])
    assert found["prediction_error"] == pytest.approx(prediction_error(scores))
    assert found["between_chains"] == pytest.approx(share_between_chains(outputs))
    monkeypatch.setattr(sampler, "_BYTES", 3 * 7 * 8 * layout.size)  # seven draws of each chain at once
    assert monitor.prediction_terms(draws) == pytest.approx(found)


def test_chains_of_a_network_that_predict_different_things_have_not_converged():
    model, data = kn.Model(mlp(), kn.Gaussian(0.1)), linear_data(20)
    data = tuple(each.float() for each in data)
    stuck = HMC(chains=4, draws=100, warmup=0, step_size=1e-7, steps=1, start="prior")
    with pytest.warns(kn.ConvergenceWarning, match="not mixed"):
        found = stuck.fit(model, data)
    assert found.diagnostics.converged is False and found.diagnostics["prediction_error"] > 0.1
    assert found.diagnostics["between_chains"] > 0.99


def test_chains_of_a_network_that_disagree_by_less_than_the_noise_are_no_failure():
    model, data = kn.Model(mlp(), kn.Gaussian(100.0)), linear_data(20)
    data = tuple(each.float() for each in data)
    found = HMC(chains=4, draws=100, warmup=0, step_size=1e-7, steps=1, start="prior").fit(model, data)
    assert found.diagnostics.converged is None and found.diagnostics["rhat"] > 2
    assert "but predictions are known to" in found.diagnostics.message


@pytest.mark.parametrize("thin", [1, 2])
def test_gradients_bound_a_run_that_does_not_mix(thin):
    stuck = HMC(chains=3, max_gradients=900, warmup=0, step_size=1e-3, steps=4, storage=kn.ChainStorage(thin=thin))
    with pytest.warns(kn.ConvergenceWarning, match="not mixed"):
        found = stuck.sample(normal, [{"x": torch.tensor([k])} for k in (-1.0, 0.0, 1.0)])
    assert 900 <= found.diagnostics["gradients"] / 3 <= 950
    assert found.diagnostics.converged is False


def test_a_bounded_run_of_too_few_draws_has_not_mixed():
    stuck = HMC(chains=2, max_gradients=1, warmup=0, step_size=1e-3, steps=4)
    with pytest.warns(kn.ConvergenceWarning, match="not mixed"):
        found = stuck.sample(normal, {"x": torch.zeros(1)})
    assert found.draws["x"].shape == (2, 1, 1) and found.diagnostics.converged is False
    with pytest.raises(kn.InvalidArgument, match="Give one of them"):
        HMC(draws=10, max_gradients=10)


def test_point_estimates_are_part_of_the_function_that_is_monitored():
    model, (x, y) = kn.Model(mlp().to(DTYPE), kn.Gaussian(), random="last_layer"), linear_data(10)
    random = Layout.of({name: model.params()[name] for name in model.random_names})
    points = {name: value + 1 for name, value in model.params().items() if name in model.point_names}
    monitor = FunctionMonitor(model, x, y, Start(torch.zeros(1, random.size), points, model.buffers()), random)
    positions = torch.randn(1, 1, random.size, dtype=DTYPE)
    expected = model.forward({**points, **random.views(positions[0, 0])}, x).flatten()
    torch.testing.assert_close(monitor(positions)[0, 0, :10], expected, rtol=1e-9, atol=1e-9)


def test_of_very_many_coordinates_some_are_monitored():
    positions = torch.randn(2, 3, 10_000)
    found = coordinate_monitor(10_000)(positions)
    assert 1000 <= found.shape[-1] <= 4000
    assert coordinate_monitor(50)(positions[..., :50]).shape == (2, 3, 50)
    found.zero_()
    assert positions.abs().min() > 0, "a copy, for positions may be let go"


def test_a_parameter_with_which_the_density_does_not_change_is_named():
    """It is no distribution: chains would wander for ever."""

    def log_density(params):
        return -0.5 * params["x"].square().sum()

    start = {"x": torch.zeros(2), "unused": torch.zeros(1)}
    with pytest.warns(kn.errors.ModelWarning, match="does not change with unused near init_params"):
        kn.Metropolis(chains=2, draws=4, warmup=4, steps=1).sample(log_density, start)
