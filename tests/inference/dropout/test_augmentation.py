from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.inference.dropout.augmentation import augmentation_from
from tests.core.cases import atoms, diagonal_posterior, linear_data, linear_model
from tests.inference.dropout.networks import Residual, perceptron

ALL = [kn.InputNoise(0.3), kn.Shift(2), kn.Shift(1, dims=(-1,)), kn.Flip(), kn.Flip((-2, -1))]


@pytest.mark.parametrize("augment", ALL, ids=repr)
def test_one_change_is_made_to_all_rows(augment, generator):
    x = torch.randn((1, 2, 5, 6), generator=generator, dtype=torch.float64)
    for _ in range(5):
        state = generator.get_state()
        one = augment(x, generator)
        generator.set_state(state)
        many = augment(x.expand(4, -1, -1, -1), generator)
        assert torch.equal(many, one.expand(4, -1, -1, -1)) and many.dtype == x.dtype


@pytest.mark.parametrize("augment", ALL, ids=repr)
def test_an_augmentation_survives_json(augment):
    assert augmentation_from(json.loads(json.dumps(augment.to_json()))) == augment


@pytest.mark.parametrize("augment", ALL, ids=repr)
def test_inputs_are_not_written_to(augment, generator):
    x = torch.randn((3, 2, 5, 6), generator=generator)
    before = x.clone()
    for _ in range(5):
        augment(x, generator)
    assert torch.equal(x, before)


def test_noise_has_its_scale(generator):
    noise = kn.InputNoise(0.3)(torch.zeros(1, 20_000), generator)
    assert abs(noise.std() - 0.3) < 5 * 0.3 / math.sqrt(2 * 20_000)
    assert abs(noise.mean()) < 5 * 0.3 / math.sqrt(20_000)


def test_noise_on_whole_numbers_is_refused(generator):
    with pytest.raises(kn.Unsupported, match="floating-point"):
        kn.InputNoise()(torch.zeros(2, 3, dtype=torch.long), generator)


def test_images_move_by_up_to_so_many_pixels_and_zeros_come_in(generator):
    x = torch.arange(1.0, 26.0).view(1, 1, 5, 5)
    seen = set()
    for _ in range(300):
        moved = kn.Shift(1)(x, generator)
        found = []
        for down in (-1, 0, 1):
            for right in (-1, 0, 1):
                padded = torch.nn.functional.pad(x, (1, 1, 1, 1))
                expected = padded[..., 1 - down : 6 - down, 1 - right : 6 - right]
                found += [(down, right)] if torch.equal(moved, expected) else []
        assert len(found) == 1
        seen.add(found[0])
    assert len(seen) == 9


def test_a_move_further_than_the_image_leaves_nothing(generator):
    x = torch.ones(1, 1, 2, 2)
    found = {kn.Shift(3, dims=(-1,))(x, generator).sum().item() for _ in range(100)}
    assert found == {0.0, 2.0, 4.0}


def test_images_are_mirrored_every_other_time(generator):
    x = torch.arange(6.0).view(1, 1, 2, 3)
    flipped = [torch.equal(kn.Flip()(x, generator), x.flip(-1)) for _ in range(400)]
    assert abs(sum(flipped) - 200) < 5 * math.sqrt(100)


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: kn.InputNoise(0.0), "scale"),
        (lambda: kn.Shift(0), "pixels"),
        (lambda: kn.Shift(1, dims=(0,)), "dims"),
        (lambda: kn.Shift(1, dims=-1), "dims"),
        (lambda: kn.Flip(()), "dims"),
    ],
)
def test_augmentations_that_make_no_sense_are_refused(make, named):
    with pytest.raises(kn.KnowableError, match=named):
        make()


# --- augmented --------------------------------------------------------------------------------------------------------


def point(generator: torch.Generator) -> kn.Particles:
    return atoms(linear_model(), 1, generator)


def test_noise_on_the_input_of_a_linear_network_has_its_variance_in_closed_form(generator):
    inner, n = point(generator), 6000
    posterior = kn.AugmentedPosterior(inner, kn.InputNoise(0.2))
    x, _ = linear_data(5, generator=generator)
    prediction = posterior.predict(x, samples=n)
    weight = inner.mean()["weight"]
    expected = 0.04 * weight.square().sum()  # the same at every input
    assert ((prediction.mean - inner.predict(x).mean).abs() < 5 * (expected / n).sqrt()).all()
    assert ((prediction.epistemic / expected - 1).abs() < 5 * math.sqrt(2 / n)).all()
    assert torch.allclose(prediction.aleatoric, inner.predict(x).aleatoric)


def test_variances_of_weights_and_of_inputs_add_up(generator):
    inner, n = diagonal_posterior(linear_model(), generator), 6000
    x, _ = linear_data(5, generator=generator)
    prediction = kn.AugmentedPosterior(inner, kn.InputNoise(0.2)).predict(x, samples=n)
    weights, biases = inner.scale["weight"].square(), inner.scale["bias"].square()
    noise = 0.04 * (inner.loc["weight"].square() + weights).sum()
    expected = x.square() @ weights.T + biases + noise
    # a product of normals: heavier tails than a normal's, so the error is taken from the draws
    squares = (prediction.samples - prediction.mean).square()
    assert ((prediction.epistemic - expected).abs() < 5 * squares.std(0) / math.sqrt(n)).all()


def test_few_atoms_are_each_changed_several_times_and_keep_their_weights(generator):
    inner = atoms(linear_model(), 3, generator)
    posterior = kn.AugmentedPosterior(inner, kn.InputNoise(0.2))
    count, log_weights = posterior.draws_for_prediction(20, 0)
    assert count == 18
    assert torch.allclose(log_weights.exp().view(6, 3), (inner.weights / 6).expand(6, 3))
    block = posterior.draw_block(0, 18, 20, 0)
    assert torch.equal(block["weight"].view(6, 3, 1, 2), inner.stack["weight"].expand(6, 3, 1, 2))
    part = posterior.draw_block(2, 8, 20, 0)  # blocks of any size are the same draws
    assert torch.equal(part["weight"], block["weight"][2:8])


def test_more_atoms_than_samples_are_the_inner_posteriors_choice(generator):
    inner = atoms(linear_model(), 30, generator)
    posterior = kn.AugmentedPosterior(inner, lambda x, generator: x)
    x, _ = linear_data(5, generator=generator)
    assert torch.allclose(posterior.predict(x, samples=10).samples, inner.predict(x, samples=10).samples)


def test_no_change_is_no_difference(generator):
    x, _ = linear_data(5, generator=generator)
    for inner in (point(generator), diagonal_posterior(linear_model(), generator)):
        same = kn.AugmentedPosterior(inner, lambda x, generator: x).predict(x, samples=8)
        assert torch.allclose(same.mean, inner.predict(x, samples=8).mean)
        assert torch.allclose(same.total, inner.predict(x, samples=8).total)


def test_predictions_do_not_depend_on_the_rows_they_are_made_with(generator):
    posterior = kn.AugmentedPosterior(diagonal_posterior(linear_model(), generator), kn.InputNoise(0.2))
    x, _ = linear_data(8, generator=generator)
    whole = posterior.predict(x, samples=7).samples
    assert torch.allclose(posterior.predict(x[3:5], samples=7).samples, whole[:, 3:5])
    assert torch.allclose(posterior.predict(x, samples=7, max_memory=2 * whole.numel() * 8 + 500).samples, whole)


def test_noise_of_the_inner_network_stays(generator):
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    inner = kn.MCDropout(epochs=2).fit(kn.Model(Residual(), kn.Gaussian(0.1)), (x, y))
    same = kn.AugmentedPosterior(inner, lambda x, generator: x).predict(x, samples=6).samples
    assert torch.allclose(same, inner.predict(x, samples=6).samples, atol=1e-6)


def test_statistics_of_batches_stay_with_their_draws(generator):
    x, y = torch.randn(40, 3), torch.randn(40, 1)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))
    inner = kn.MonteCarloBatchNorm(epochs=2, draws=5).fit(kn.Model(net, kn.Gaussian(0.1)), (x, y))
    same = kn.AugmentedPosterior(inner, lambda x, generator: x).predict(x, samples=10).samples
    assert torch.allclose(same, inner.predict(x, samples=10).samples.repeat(2, 1, 1), atol=1e-6)


# --- the method ------------------------------------------------------------------------------------------------------


def test_the_fit_is_that_of_the_method(seed):
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    model = kn.Model(perceptron(None), kn.Gaussian(0.1))
    method = kn.TestTimeAugmentation(kn.MAP(epochs=5), kn.InputNoise(0.2))
    posterior, inner = method.fit(model, (x, y), seed=seed), kn.MAP(epochs=5).fit(model, (x, y), seed=seed)
    assert all(torch.equal(posterior.mean()[name], value) for name, value in inner.mean().items())
    assert posterior.diagnostics.method == repr(method)
    assert posterior.diagnostics.terms == inner.diagnostics.terms


def test_a_function_is_an_augmentation_but_cannot_be_saved(seed, tmp_path):
    def halved(x: Tensor, generator: torch.Generator) -> Tensor:
        return x * torch.rand((), generator=generator)

    x, y = torch.randn(20, 3), torch.randn(20, 1)
    model = kn.Model(perceptron(None), kn.Gaussian(0.1))
    posterior = kn.TestTimeAugmentation(kn.MAP(epochs=5), halved).fit(model, (x, y), seed=seed)
    assert posterior.predict(x, samples=8).epistemic.max() > 0
    with pytest.raises(kn.Unsupported, match=r"posterior\.inner"):
        posterior.save(tmp_path / "it")
    again = kn.AugmentedPosterior(kn.load(posterior.inner.save(tmp_path / "inner")), halved)
    assert torch.equal(again.predict(x, samples=8).samples, posterior.predict(x, samples=8).samples)


@pytest.mark.parametrize("inner", [kn.MAP(epochs=2), kn.MCDropout(epochs=2), kn.MeanFieldVI(epochs=2)], ids=repr)
def test_what_was_saved_predicts_the_same(inner, tmp_path):
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    model = kn.Model(perceptron(0.2), kn.Gaussian(0.1))
    posterior = kn.TestTimeAugmentation(inner, kn.InputNoise(0.2)).fit(model, (x, y))
    loaded = kn.load(posterior.save(tmp_path / "it"))
    assert isinstance(loaded, kn.AugmentedPosterior) and loaded.augment == kn.InputNoise(0.2)
    assert type(loaded.inner) is type(posterior.inner)
    assert torch.equal(loaded.predict(x, samples=6).samples, posterior.predict(x, samples=6).samples)


def test_what_has_a_density_is_still_a_prior(generator):
    inner = diagonal_posterior(linear_model(), generator)
    prior = kn.AugmentedPosterior(inner, kn.InputNoise(0.2)).as_prior()
    assert torch.equal(prior.normal.loc["weight"], inner.loc["weight"])


@pytest.mark.parametrize("augment", [lambda x, generator: x[:1], lambda x, generator: None], ids=["rows", "nothing"])
def test_an_augmentation_that_loses_rows_is_refused_before_the_fit(augment):
    x, y = torch.randn(20, 3), torch.randn(20, 1)
    with pytest.raises(kn.InvalidData, match="augment must return"):
        kn.TestTimeAugmentation(kn.MAP(epochs=2), augment).fit(kn.Model(perceptron(), kn.Gaussian()), (x, y))


@pytest.mark.parametrize(
    ("settings", "named"),
    [({"method": kn.MAP}, "method"), ({"augment": 0.1}, "augment"), ({"augment": kn.Flip}, "augment")],
)
def test_settings_that_make_no_sense_are_refused(settings, named):
    with pytest.raises(kn.InvalidType, match=named):
        kn.TestTimeAugmentation(**{"method": kn.MAP(), "augment": kn.Flip(), **settings})
