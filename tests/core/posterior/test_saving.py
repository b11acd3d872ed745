"""Tests of saving and loading posteriors."""

from __future__ import annotations

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import knowable as kn
from knowable.core.model.likelihood import Likelihood
from knowable.core.model.prior import Prior
from knowable.core.posterior.saving import build_object, describe_object
from tests.core.cases import (
    DTYPE,
    Tied,
    atoms,
    batch_norm_net,
    diagonal_posterior,
    full_posterior,
    linear_data,
    linear_model,
    mlp,
    same_params,
)


def _assert_same(first: kn.Posterior, second: kn.Posterior, x: torch.Tensor) -> None:
    assert type(second) is type(first)
    assert same_params(second._tensors(), first._tensors())
    assert same_params(second.points, first.points)
    assert same_params(second.buffers, first.buffers)
    assert second.diagnostics == first.diagnostics
    assert repr(second.log_evidence) == repr(first.log_evidence)
    assert second.seed == first.seed
    assert second.model.random_names == first.model.random_names
    assert second.model.point_names == first.model.point_names
    assert second.model.frozen_names == first.model.frozen_names
    assert second.model.likelihood == first.model.likelihood
    params = first.mean()
    torch.testing.assert_close(second.model.log_prior(params), first.model.log_prior(params), rtol=0, atol=0)
    assert torch.equal(second.predict(x, 5).samples, first.predict(x, 5).samples)


def _names_in(folder) -> list[str]:
    (file,) = folder.glob("*.safetensors")
    return sorted(load_file(file))


# --- families -------------------------------------------------------------------------------------------------------

FAMILIES = {
    "one atom": lambda model: atoms(model, 1),
    "atoms": lambda model: atoms(model, 4),
    "diagonal": diagonal_posterior,
    "full": full_posterior,
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
@pytest.mark.parametrize("settings", [{}, {"random": "last_layer"}, {"random": "0.*", "frozen": "2.*"}])
@pytest.mark.parametrize("given", [False, True], ids=["alone", "with the network"])
def test_every_family_comes_back(family, settings, given, tmp_path):
    net = mlp()
    first = family(kn.Model(net, kn.Gaussian(), **settings))
    assert first.save(tmp_path / "saved") == tmp_path / "saved"
    second = kn.load(tmp_path / "saved", net if given else None)
    _assert_same(first, second, torch.randn(6, 2))


@pytest.mark.parametrize(
    "method", [kn.MAP(epochs=3), kn.MaximumLikelihood(epochs=3), kn.MeanFieldVI(epochs=3)], ids=repr
)
def test_every_fit_comes_back_with_its_report(method, tmp_path):
    x, y = linear_data()
    first = method.fit(linear_model(noise=None), (x, y), seed=5)
    _assert_same(first, kn.load(first.save(tmp_path)), x)


def test_an_exact_fit_comes_back_with_its_exact_predictions(tmp_path):
    x, y = linear_data()
    first = kn.ExactLinear().fit(linear_model(noise=None), (x, y))
    second = kn.load(first.save(tmp_path))
    _assert_same(first, second, x)
    assert torch.equal(second.predict(x).variance, first.predict(x).variance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_dtype_comes_back(dtype, tmp_path):
    first = diagonal_posterior(kn.Model(mlp().to(dtype), kn.Gaussian(0.1)))
    second = kn.load(first.save(tmp_path))
    assert {value.dtype for value in second.model.net.parameters()} == {dtype}
    assert second.model.dtype == first.model.dtype
    assert same_params(second.loc, first.loc)


def test_batch_norm_statistics_come_back(tmp_path):
    x, y = torch.randn(20, 2), torch.randn(20)
    first = kn.MAP(epochs=5).fit(kn.Model(batch_norm_net(), kn.Gaussian(0.1)), (x + 3.0, y))
    _assert_same(first, kn.load(first.save(tmp_path)), x)


# --- priors and likelihoods -----------------------------------------------------------------------------------------

PRIORS = {
    "normal": kn.Normal(0.7, loc=0.1),
    "laplace": kn.LaplacePrior(0.7),
    "student": kn.StudentTPrior(4.0, 0.5),
    "mixture": kn.ScaleMixture(0.3, 1.5, 0.1),
    "log-uniform": kn.LogUniform(),
    "horseshoe": kn.Horseshoe(0.5),
    "flat": kn.Flat(),
    "learned": kn.EmpiricalBayes(kn.Normal(0.7)),
    "learned under a hyperprior": kn.EmpiricalBayes(kn.StudentTPrior(4.0), hyperprior=kn.Normal(0.5), per="parameter"),
    "by name": {"*.bias": kn.Flat(), "likelihood.*": kn.LaplacePrior(2.0), "*": kn.Normal(3.0)},
    "learned by name": {"0.*": kn.EmpiricalBayes(kn.LaplacePrior(0.7)), "*": kn.Normal(3.0)},
}


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_every_prior_comes_back(prior, tmp_path):
    first = diagonal_posterior(kn.Model(mlp(), kn.Gaussian(), prior))
    second = kn.load(first.save(tmp_path))
    _assert_same(first, second, torch.randn(6, 2))
    assert repr(second.model.prior) == repr(first.model.prior)


@pytest.mark.parametrize("prior", PRIORS.values(), ids=PRIORS)
def test_a_prior_is_described_in_json_and_built_again(prior):
    for each in prior.values() if isinstance(prior, dict) else [prior]:
        assert build_object(json.loads(json.dumps(describe_object(each))), Prior) == each


LIKELIHOODS = [
    kn.Gaussian(), kn.Gaussian(0.3), kn.Gaussian(outputs=2), kn.Gaussian((0.1, 0.2)), kn.HeteroscedasticGaussian(),
    kn.StudentT(), kn.StudentT(5.0, 0.3), kn.Categorical(), kn.Bernoulli(), kn.Poisson(),
]  # fmt: skip


@pytest.mark.parametrize("likelihood", LIKELIHOODS, ids=repr)
def test_every_likelihood_comes_back(likelihood, tmp_path):
    assert build_object(json.loads(json.dumps(describe_object(likelihood))), Likelihood) == likelihood
    first = diagonal_posterior(kn.Model(mlp(outputs=2), likelihood))
    second = kn.load(first.save(tmp_path))
    x = torch.randn(6, 2)
    assert torch.equal(second.predict(x, 5).total, first.predict(x, 5).total)


@pytest.mark.parametrize("family", [diagonal_posterior, full_posterior])
@pytest.mark.parametrize("settings", [{}, {"random": "last_layer"}])
def test_a_posterior_whose_prior_is_a_posterior_comes_back(family, settings, tmp_path):
    net = mlp()
    before = family(kn.Model(net, kn.Gaussian(), **settings))
    first = diagonal_posterior(kn.Model(net, kn.Gaussian(), prior=before))
    second = kn.load(first.save(tmp_path))
    _assert_same(first, second, torch.randn(6, 2))


def test_a_correlated_prior_conditioned_on_frozen_values_comes_back(tmp_path):
    net = nn.Linear(2, 1).to(DTYPE)
    before = full_posterior(linear_model())
    first = diagonal_posterior(kn.Model(net, kn.Gaussian(0.1), prior=before, frozen="bias"))
    _assert_same(first, kn.load(first.save(tmp_path)), torch.randn(6, 2, dtype=DTYPE))


def test_posteriors_upon_posteriors_come_back_and_go_on(tmp_path):
    # three data sets one after the other with a save and a load between: the posterior of all of them
    x, y = linear_data(30)
    model = linear_model()
    everything = kn.ExactLinear().fit(model, (x, y))
    posterior = kn.ExactLinear().fit(model, (x[:10], y[:10]))
    for k in (1, 2):
        posterior = kn.load(posterior.save(tmp_path / str(k)))
        rows = slice(10 * k, 10 * k + 10)
        posterior = kn.ExactLinear().fit(kn.Model(model.net, kn.Gaussian(0.1), prior=posterior), (x[rows], y[rows]))
    again = kn.load(posterior.save(tmp_path / "last"))
    torch.testing.assert_close(again.loc, everything.loc, rtol=1e-7, atol=1e-9)
    torch.testing.assert_close(again.covariance, everything.covariance, rtol=1e-6, atol=1e-10)


# --- networks -------------------------------------------------------------------------------------------------------


class Own(nn.Module):
    def __init__(self, width: int = 3):
        super().__init__()
        self.first, self.second = nn.Linear(2, width), nn.Linear(width, 1)

    def forward(self, x):
        return self.second(torch.relu(self.first(x)))


@pytest.mark.parametrize("make", [Own, Tied])
def test_a_network_of_ones_own_is_asked_for_and_then_used(make, tmp_path):
    net = make()
    first = diagonal_posterior(kn.Model(net, kn.Gaussian(0.1)))
    first.save(tmp_path)
    with pytest.raises(
        kn.InvalidArgument, match=rf"network \({make.__name__}\) is not made of plain.*load\(path, net="
    ):
        kn.load(tmp_path)
    _assert_same(first, kn.load(tmp_path, net=make()), torch.randn(5, 2))


def _shared_activation() -> nn.Module:
    activation = nn.Tanh()
    return nn.Sequential(nn.Linear(2, 4), activation, nn.Linear(4, 4), activation, nn.Linear(4, 1))


def _layer_twice() -> nn.Module:
    layer = nn.Linear(2, 2)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(2, 1))


def test_a_network_that_uses_an_activation_twice_predicts_the_same(tmp_path):
    first = diagonal_posterior(kn.Model(_shared_activation(), kn.Gaussian(0.1)))
    _assert_same(first, kn.load(first.save(tmp_path)), torch.randn(5, 2))


def test_a_network_that_uses_weights_twice_is_asked_for(tmp_path):
    first = diagonal_posterior(kn.Model(_layer_twice(), kn.Gaussian(0.1)))
    first.save(tmp_path)
    with pytest.raises(kn.InvalidArgument, match=r"each used once: pass it.*net="):
        kn.load(tmp_path)
    _assert_same(first, kn.load(tmp_path, net=_layer_twice()), torch.randn(5, 2))


WRONG = {
    "other names": (lambda: nn.Sequential(Own()), r"'first\.weight'|'0\.first\.weight'"),
    "other shapes": (lambda: Own(4), r"'first\.weight'.*\(4, 2\).*\(3, 2\)"),
    "fewer parameters": (lambda: nn.Linear(2, 1), "first|weight"),
}


@pytest.mark.parametrize(("make", "wanted"), WRONG.values(), ids=WRONG)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_another_network_is_refused_with_what_differs(make, wanted, family, tmp_path):
    family(kn.Model(Own(), kn.Gaussian(0.1))).save(tmp_path)
    with pytest.raises(kn.InvalidArgument, match=wanted):
        kn.load(tmp_path, net=make())


def test_a_network_with_more_parameters_is_refused(tmp_path):
    diagonal_posterior(kn.Model(nn.Sequential(nn.Linear(2, 2)), kn.Gaussian(0.1))).save(tmp_path)
    with pytest.raises(kn.InvalidArgument, match=r"1\.weight"):
        kn.load(tmp_path, net=nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))


def test_a_network_of_another_dtype_is_refused(tmp_path):
    diagonal_posterior(kn.Model(Own(), kn.Gaussian(0.1))).save(tmp_path)
    with pytest.raises(kn.InvalidArgument, match=r"float64.*float32"):
        kn.load(tmp_path, net=Own().double())


def test_a_network_with_the_same_weights_and_other_layers_is_refused(tmp_path):
    diagonal_posterior(kn.Model(mlp(), kn.Gaussian(0.1))).save(tmp_path)
    other = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 1))
    with pytest.raises(kn.InvalidArgument, match="other layers"):
        kn.load(tmp_path, net=other)


def test_what_is_not_a_network_is_refused(tmp_path):
    posterior = diagonal_posterior(linear_model())
    posterior.save(tmp_path)
    with pytest.raises(kn.InvalidType, match=r"net must be a torch\.nn\.Module, got Model"):
        kn.load(tmp_path, net=posterior.model)


@pytest.mark.parametrize("mode", [True, False])
def test_the_network_passed_to_load_is_not_changed(mode, tmp_path):
    first = diagonal_posterior(kn.Model(batch_norm_net(), kn.Gaussian(0.1), frozen="0.*"))
    first.save(tmp_path)
    net = batch_norm_net().train(mode)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    second = kn.load(tmp_path, net)
    second.predict(torch.randn(3, 2))
    assert same_params(dict(net.state_dict()), before)
    assert net.training is mode


def test_frozen_weights_come_back_even_if_the_network_passed_has_others(tmp_path):
    first = diagonal_posterior(kn.Model(mlp(), kn.Gaussian(0.1), frozen="0.*"))
    first.save(tmp_path)
    x = torch.randn(5, 2)
    for net in (None, mlp()):
        assert torch.equal(kn.load(tmp_path, net).predict(x, 5).samples, first.predict(x, 5).samples)


@pytest.mark.parametrize("random", ["*", "last_layer"])
@pytest.mark.parametrize("frozen", ["argument", "requires_grad"])
def test_frozen_weights_may_be_saved_by_reference(random, frozen, tmp_path):
    net = mlp(2, 1, width=200)
    net[0].requires_grad_(frozen == "argument")
    model = kn.Model(net, kn.Gaussian(0.1), random=random, frozen="0.*" if frozen == "argument" else ())
    first = atoms(model, 3)
    first.save(tmp_path, frozen="reference")
    second = kn.load(tmp_path, net)
    _assert_same(first, second, torch.randn(4, 2))
    assert second.model.frozen_params()["0.weight"].data_ptr() == net[0].weight.data_ptr()
    assert not any(name.startswith("frozen.") for name in _names_in(tmp_path))
    assert all(value.requires_grad for value in net[2].parameters())


def test_frozen_weights_are_stored_once(tmp_path):
    model = kn.Model(mlp(2, 1, width=500), kn.Gaussian(0.1), frozen="0.*")
    for members in (2, 20):
        atoms(model, members).save(tmp_path / str(members))
    names = [_names_in(tmp_path / str(members)) for members in (2, 20)]
    assert names[0] == names[1]
    assert [name for name in names[0] if "0." in name] == ["frozen.0.bias", "frozen.0.weight"]


def test_loading_shares_the_memory_of_the_network_passed(tmp_path):
    net = mlp()
    diagonal_posterior(kn.Model(net, kn.Gaussian(0.1), frozen="0.*")).save(tmp_path)
    with torch.no_grad():
        net[0].bias.add_(1.0)
    loaded = kn.load(tmp_path, net.requires_grad_(False)).model
    assert dict(loaded.net.named_parameters())["2.weight"].data_ptr() == net[2].weight.data_ptr()
    assert not torch.equal(loaded.frozen_params()["0.bias"], net[0].bias)


def test_other_frozen_weights_than_those_referred_to_are_refused_by_name(tmp_path):
    net = mlp()
    diagonal_posterior(kn.Model(net, kn.Gaussian(0.1), frozen="0.*")).save(tmp_path, frozen="reference")
    with pytest.raises(kn.InvalidArgument, match=r"without its 2 frozen parameters .* load\(path, net\)"):
        kn.load(tmp_path)
    with torch.no_grad():
        net[0].bias[-1] += 1e-6
    with pytest.raises(kn.InvalidArgument, match=r"0\.bias of its 2 frozen parameters, .* has other values"):
        kn.load(tmp_path, net)
    with pytest.raises(kn.InvalidArgument, match=r"frozen must be .*'reference'"):
        diagonal_posterior(kn.Model(net, kn.Gaussian(0.1))).save(tmp_path / "b", frozen="hash")


def test_loading_leaves_the_global_random_state_alone(tmp_path):
    diagonal_posterior(kn.Model(mlp(), kn.Gaussian(0.1))).save(tmp_path)
    state = torch.get_rng_state()
    kn.load(tmp_path)
    assert torch.equal(torch.get_rng_state(), state)


# --- what is refused ------------------------------------------------------------------------------------------------


def _rewrite(folder, change) -> None:
    """Change the content and make the hash fit again."""
    body = json.loads((folder / "manifest.json").read_text())["body"]
    change(body["content"])
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    document = {"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": body}
    (folder / "manifest.json").write_text(json.dumps(document))


CHANGES = {
    "an unknown family": lambda content: content.update(family="other"),
    "an unknown prior": lambda content: content["prior"]["globs"].update({"*": {"name": "Other"}}),
    "an unknown likelihood": lambda content: content.update(likelihood={"name": "system"}),
    "a class that is no likelihood": lambda content: content.update(likelihood={"name": "Normal", "scale": 1.0}),
    "no random parameters": lambda content: content.pop("random"),
    "no network": lambda content: content.pop("network"),
    "an unknown layer": lambda content: content["network"]["structure"].update(layer="Other"),
    "a dtype that is none": lambda content: content.update(dtype="load"),
    "diagnostics with other fields": lambda content: content["diagnostics"].update(colour="red"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_content_of_another_version_is_refused_and_not_guessed_at(change, tmp_path):
    diagonal_posterior(linear_model()).save(tmp_path)
    _rewrite(tmp_path, change)
    with pytest.raises(kn.DamagedArtifact):
        kn.load(tmp_path)


def test_only_likelihoods_and_priors_are_ever_built():
    with pytest.raises(kn.DamagedArtifact):
        build_object({"name": "Model"}, Likelihood)
    with pytest.raises(kn.DamagedArtifact):
        build_object({"name": "Gaussian"}, Prior)


def test_a_checkpoint_is_not_a_posterior(tmp_path):
    kn.MAP(epochs=2).fit(linear_model(), linear_data(), checkpoint=tmp_path)
    with pytest.raises(kn.DamagedArtifact, match="holds a checkpoint, not a posterior"):
        kn.load(tmp_path)


def test_a_folder_can_be_loaded_again_and_again(tmp_path):
    first = diagonal_posterior(linear_model())
    second = kn.load(kn.load(first.save(tmp_path / "a")).save(tmp_path / "b"))
    _assert_same(first, second, torch.randn(4, 2, dtype=DTYPE))
