from __future__ import annotations

import functools
import math
import warnings

import pytest
import torch
from scipy.stats import binom
from torch import nn

import knowable as kn
from knowable.evaluation import conformal


@functools.cache
def numbers(score: int = 0) -> tuple[kn.Posterior, torch.Tensor, torch.Tensor]:
    """A posterior over a line with noise that grows, and rows that it has not seen."""
    generator = torch.Generator().manual_seed(score)
    x = torch.rand(1600, 1, generator=generator) * 2 - 1
    y = x + (0.1 + 0.4 * (x + 1)) * torch.randn(1600, 1, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)
        posterior = kn.MeanFieldVI(epochs=150).fit(
            kn.Model(nn.Linear(1, 2), kn.HeteroscedasticGaussian()), (x[:200], y[:200])
        )
    return posterior, x[200:], y[200:]


@functools.cache
def classes() -> tuple[kn.Posterior, torch.Tensor, torch.Tensor]:
    """A posterior over three classes along a line, and rows that it has not seen."""
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(1600, 1, generator=generator) * 6
    y = (x[:, 0] + 0.4 * torch.randn(1600, generator=generator)).div(2).floor().clamp(0, 2).long()
    net = nn.Sequential(nn.Linear(1, 12), nn.Tanh(), nn.Linear(12, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)
        posterior = kn.DeepEnsemble(3, epochs=150).fit(kn.Model(net, kn.Categorical()), (x[:200], y[:200]))
    return posterior, x[200:], y[200:]


def test_the_sets_of_classes_are_those_of_the_conformal_functions():
    posterior, x, y = classes()
    certificate = kn.certify(posterior, (x[:500], y[:500]), alpha=0.1, delta=0.05)
    found = certificate.predict(x[500:])
    held, new = posterior.predict(x[:500]), posterior.predict(x[500:])
    assert torch.equal(found.set, conformal.prediction_sets(held, y[:500], new, 0.1))
    assert torch.equal(found.p_value, conformal.p_values(held.total, new.total))
    assert torch.equal(found.accept, new.total.double() <= certificate.rejection.threshold)
    assert found.interval is None
    assert found.set.shape == (900, 3)
    assert len(found) == 900


@pytest.mark.parametrize("score", ["split", "normalised", "cqr"])
def test_the_intervals_of_numbers_use_a_threshold_of_half_of_the_rows(score: str):
    posterior, x, y = numbers()
    certificate = kn.certify(posterior, (x[:400], y[:400]), alpha=0.2, score=score)
    scores = conformal.number_scores(posterior.predict(x[:400]), y[:400], score, 0.2)[:, 0]
    q = certificate.thresholds[""]
    assert (scores == q).sum() == 1
    assert certificate.guarantees[0].n == 200
    low, high = certificate.predict(x[400:]).interval
    expected = conformal.number_interval(posterior.predict(x[400:]), q, score, 0.2)
    assert torch.allclose(low.double(), expected[0], atol=1e-6)
    assert torch.allclose(high.double(), expected[1], atol=1e-6)
    assert low.shape == high.shape == (1000, 1)


def test_automatic_scores_are_those_that_fit():
    posterior, x, y = classes()
    assert kn.certify(posterior, (x[:200], y[:200])).score == "lac"
    posterior, x, y = numbers()
    certificate = kn.certify(posterior, (x[:200], y[:200]))
    assert (certificate.score, certificate.novelty) == ("normalised", "epistemic")
    point = kn.MaximumLikelihood(epochs=20).fit(kn.Model(nn.Linear(1, 1), kn.StudentT()), (x[200:250], y[200:250]))
    certificate = kn.certify(point, (x[:200], y[:200]))
    assert certificate.novelty == "total"
    assert "only rows above it are ever strange" in certificate.summary()


def test_guarantees_hold_over_resplits(seed: int):
    """Coverage, the risk of what is accepted, and false alarms, of the whole certificate."""
    for posterior, x, y in (numbers(), classes()):
        covered, alarms, wrong_rule, resplits, held = [], [], 0, 60, 300
        generator = torch.Generator().manual_seed(seed)
        for number in range(resplits):
            order = torch.randperm(len(x), generator=generator)
            rows, new = order[:held], order[held:]
            certificate = kn.certify(posterior, (x[rows], y[rows]), alpha=0.2, delta=0.1, samples=8, seed=number)
            found = certificate.predict(x)
            if found.set is not None:
                inside, bad = found.set.gather(1, y[:, None])[:, 0], found.prediction.labels != y
            else:
                low, high = found.interval
                inside = ((y >= low) & (y <= high))[:, 0]
                bad = ~inside
            covered.append(inside[new].double().mean())
            alarms.append((found.p_value[new] <= 0.2).double().mean())
            rule = certificate.rejection
            risk = bad[found.accept].double().mean().item() if found.accept.any() else 0.0
            wrong_rule += risk > (rule.bound if rule.alpha is None else rule.alpha)
        used = held if found.set is not None else held // 2
        for found_shares, n, inside in ((covered, used, math.ceil((used + 1) * 0.8)), (alarms, held, int(301 * 0.2))):
            mean, new_rows = inside / (n + 1), len(x) - held
            spread = (mean * (1 - mean) * (n + 1 + new_rows) / (new_rows * (n + 2)) / resplits) ** 0.5
            assert abs(torch.stack(found_shares).mean().item() - mean) < 4 * spread
        assert wrong_rule <= binom.ppf(0.9999, resplits, 0.1)


def test_risk_of_numbers_may_be_asked_for():
    posterior, x, y = numbers()
    certificate = kn.certify(posterior, (x[:800], y[:800]), alpha=0.1, score="split", risk=0.1)
    assert certificate.rejection.certified
    assert certificate.rejection.bound <= 0.1
    found = certificate.predict(x[800:])
    assert 0.1 < found.accept.double().mean() < 0.95  # the noisiest rows are rejected
    assert x[800:][found.accept].mean() < x[800:][~found.accept].mean()


def test_a_loss_of_ones_own_is_bounded():
    posterior, x, y = numbers()
    far = kn.certify(
        posterior, (x[:800], y[:800]), risk=0.2, loss=lambda prediction, y: ((prediction.mean - y).abs() > 0.8)[:, 0]
    )
    found = far.predict(x[800:])
    assert ((found.prediction.mean - y[800:]).abs() > 0.8)[found.accept].double().mean() < 0.25
    assert "mean loss of accepted rows is at most 0.2" in far.summary()
    with pytest.raises(kn.InvalidData, match=r"loss must return one number for each of 800 rows"):
        kn.certify(posterior, (x[:800], y[:800]), loss=lambda prediction, y: (prediction.mean - y).abs())
    with pytest.raises(kn.InvalidData, match="between 0 and 1"):
        kn.certify(posterior, (x[:800], y[:800]), loss=lambda prediction, y: 9 * (prediction.mean - y).abs()[:, 0])


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
def test_a_row_gets_the_same_answer_in_any_batch(score: str):
    posterior, x, y = classes()
    certificate = kn.certify(posterior, (x[:300], y[:300]), score=score)
    whole, some = certificate.predict(x[300:]), certificate.predict(x[350:360])
    assert torch.equal(whole.set[50:60], some.set)
    assert torch.equal(whole.accept[50:60], some.accept)
    assert torch.allclose(whole.p_value[50:60], some.p_value)
    again = kn.certify(posterior, (x[:300], y[:300]), score=score)
    assert again.thresholds == certificate.thresholds
    assert again.rejection == certificate.rejection


def test_groups_have_thresholds_of_their_own():
    posterior, x, y = numbers()
    groups = ["noisy" if each > 0 else "calm" for each in x[:, 0]]
    certificate = kn.certify(posterior, (x[:600], y[:600]), score="split", groups=groups[:600])
    assert certificate.thresholds["noisy"] > 1.5 * certificate.thresholds["calm"]
    low, high = certificate.predict(x[600:], groups=groups[600:]).interval
    for name in ("noisy", "calm"):
        rows = torch.tensor([each == name for each in groups[600:]])
        inside = ((y[600:] >= low) & (y[600:] <= high))[rows].double().mean().item()
        assert abs(inside - 0.9) < 4 * (0.09 * (1 / 120 + 1 / 380)) ** 0.5
    with pytest.raises(kn.InvalidArgument, match="groups must be given"):
        certificate.predict(x[600:])
    posterior, x, y = classes()
    certificate = kn.certify(posterior, (x[:600], y[:600]), groups="label")
    assert list(certificate.thresholds) == [0, 1, 2]
    with pytest.raises(kn.InvalidArgument, match="groups must be left out"):
        certificate.predict(x[600:], groups=[0] * 600)


def test_strange_rows_are_rejected_and_have_small_p_values():
    posterior, x, y = numbers()
    certificate = kn.certify(posterior, (x[:500], y[:500]))
    strange = certificate.predict(torch.full((5, 1), 40.0))
    assert not strange.accept.any()
    assert torch.equal(strange.p_value, torch.full((5,), 1 / 501, dtype=torch.float64))


def test_several_outputs_and_pixels_share_a_certificate(generator: torch.Generator):
    x = torch.randn(300, 2, generator=generator)
    y = torch.stack([x[:, 0], x[:, 1] + 0.5 * torch.randn(300, generator=generator), x.sum(1)], 1)
    y = y + 0.1 * torch.randn(300, 3, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)
        posterior = kn.MeanFieldVI(epochs=100).fit(kn.Model(nn.Linear(2, 3), kn.Gaussian()), (x[:100], y[:100]))
        found = kn.certify(posterior, (x[100:], y[100:]), alpha=0.2)
        low, high = found.predict(x[100:]).interval
        assert low.shape == (200, 3)
        assert 0.7 < ((y[100:] >= low) & (y[100:] <= high)).double().mean() < 0.92
        assert "share 0.8 of the outcomes" in found.summary()
        pixels = torch.rand(120, 1, 4, 4, generator=generator)
        labels = (pixels[:, 0] + 0.2 * torch.randn(120, 4, 4, generator=generator) > 0.5).long()
        net = nn.Conv2d(1, 2, 1)
        dense = kn.MAP(epochs=60).fit(kn.Model(net, kn.Categorical()), (pixels[:40], labels[:40]))
        certificate = kn.certify(dense, (pixels[40:], labels[40:]), alpha=0.25, score="aps")
    found = certificate.predict(pixels[40:])
    assert found.set.shape == (80, 2, 4, 4)
    assert found.accept.shape == found.p_value.shape == (80,)
    covered = found.set.gather(1, labels[40:, None]).double().mean().item()
    assert 0.7 < covered < 0.85
    with pytest.raises(kn.InvalidArgument, match="one label a row"):
        kn.certify(dense, (pixels[40:], labels[40:]), groups="label")


def test_binary_labels_have_sets_of_two():
    _, x, y = classes()
    net = nn.Linear(1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)
        point = kn.MAP(epochs=100).fit(kn.Model(net, kn.Bernoulli()), (x[:200] - 3, (y[:200] > 0).float()))
    found = kn.certify(point, (x[200:600] - 3, (y[200:600] > 0).float())).predict(x[600:] - 3)
    assert found.set.shape == (800, 2)
    covered = found.set.gather(1, (y[600:] > 0).long()[:, None]).double().mean().item()
    assert abs(covered - 0.9) < 4 * (0.09 * (1 / 400 + 1 / 800)) ** 0.5


def test_training_rows_are_refused():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(100, 1, generator=generator)
    y = x + torch.randn(100, 1, generator=generator)
    posterior = kn.MaximumLikelihood(epochs=20).fit(kn.Model(nn.Linear(1, 1), kn.Gaussian(0.5)), (x, y))
    with pytest.raises(kn.InvalidData, match="100 rows of held_out are rows that the posterior was fitted to"):
        kn.certify(posterior, (x, y))


def test_rows_that_recalibrated_a_posterior_are_refused_too():
    posterior, x, y = classes()
    again = posterior.recalibrated((x[:300], y[:300]))
    with pytest.raises(kn.InvalidData, match="300 rows of held_out are rows that the posterior was fitted to"):
        kn.certify(again, (x[:300], y[:300]))
    found = kn.certify(again, (x[300:900], y[300:900])).predict(x[900:])
    covered = found.set.gather(1, y[900:, None]).double().mean().item()
    assert abs(covered - 0.9) < 4 * (0.09 * (1 / 600 + 1 / 500)) ** 0.5


def test_held_out_rows_that_prove_nothing_are_refused():
    posterior, x, y = classes()
    with pytest.raises(kn.InvalidData, match="at least 9 held-out rows, got 8"):
        kn.certify(posterior, (x[:8], y[:8]))
    with pytest.raises(kn.InvalidData, match="at least 29 held-out rows, got 28"):
        kn.certify(posterior, (x[:28], y[:28]))
    kn.certify(posterior, (x[:29], y[:29]))
    with pytest.raises(kn.InvalidData, match="single class, 2"):
        kn.certify(posterior, (x[y == 2], y[y == 2]))
    with pytest.raises(kn.InvalidData, match="empty"):
        kn.certify(posterior, (x[:0], y[:0]))
    with pytest.raises(kn.InvalidData, match="expects 1 feature, got 2"):
        kn.certify(posterior, (x.repeat(1, 2), y))
    with pytest.raises(kn.InvalidData, match="row 3"):
        kn.certify(posterior, (torch.where(torch.arange(len(x))[:, None] == 3, torch.nan, x), y))
    with pytest.raises(kn.InvalidArgument, match="no weights"):
        kn.certify(posterior, kn.Data((x, y), weights=torch.ones(len(x))))
    posterior, x, y = numbers()
    with pytest.raises(kn.InvalidData, match=r"at least 58 held-out rows of numbers"):
        kn.certify(posterior, (x[:50], y[:50]), risk=0.1)
    nine = kn.certify(posterior, (x[:9], y[:9]))
    assert "as no row was left" in nine.summary()
    assert nine.rejection.bound == 1


@pytest.mark.parametrize("name", ["alpha", "delta", "risk"])
@pytest.mark.parametrize("value", [0.0, 1.0, 1.5, math.nan])
def test_levels_outside_zero_and_one_are_refused(name: str, value: float):
    posterior, x, y = classes()
    with pytest.raises(kn.InvalidArgument, match=name):
        kn.certify(posterior, (x[:100], y[:100]), **{name: value})


def test_arguments_of_another_kind_are_refused():
    posterior, x, y = classes()
    held = x[:100], y[:100]
    with pytest.raises(kn.InvalidType, match="posterior must be a posterior"):
        kn.certify(posterior.model, held)
    with pytest.raises(kn.InvalidArgument, match="'lac', 'aps', 'raps'"):
        kn.certify(posterior, held, score="cqr")
    with pytest.raises(kn.InvalidArgument, match="novelty"):
        kn.certify(posterior, held, novelty="density")
    with pytest.raises(kn.InvalidData, match="groups must have one entry"):
        kn.certify(posterior, held, groups=[0, 1])
    with pytest.raises(kn.InvalidData, match="expects 1 feature"):
        kn.certify(posterior, held).predict(torch.zeros(3, 2))
    with pytest.raises(kn.InvalidArgument, match="is for classes"):
        kn.certify(numbers()[0], numbers()[1:], groups="label")


def test_what_it_says_names_its_numbers():
    posterior, x, y = classes()
    certificate = kn.certify(posterior, (x[:500], y[:500]), alpha=0.1, delta=0.05)
    text = certificate.summary()
    for part in (
        "500 held-out rows",
        "probability at least 0.9",
        "With probability 0.95",
        "at most 10.00% of accepted",
    ):
        assert part in text
    assert [each.name for each in certificate.guarantees] == ["set", "rejection", "alarm"]
    assert [each.delta for each in certificate.guarantees] == [None, 0.05, None]
    assert "held-out rows=500" in repr(certificate)
    assert "mean set size=" in repr(certificate.predict(x[500:]))
    assert "mean width=" in repr(kn.certify(*numbers()[:1], numbers()[1:]).predict(x))
    # with probability 95%, the coverage of these thresholds is at least the one that is stated
    assert 1 - certificate.guarantees[0].bound == pytest.approx(_conditional(500, 0.1, 0.05))


def _conditional(n: int, alpha: float, delta: float) -> float:
    """The delta-quantile of the coverage, from draws: the k-th smallest of n uniform numbers."""
    from scipy.stats import beta

    inside = math.ceil((n + 1) * (1 - alpha))
    return beta.ppf(delta, inside, n + 1 - inside)


def test_figures_have_three_panels():
    for posterior, x, y in (numbers(), classes()):
        figure = kn.certify(posterior, (x[:300], y[:300])).plot()
        assert [len(axes.lines) > 0 for axes in figure.axes] == [True] * 3
