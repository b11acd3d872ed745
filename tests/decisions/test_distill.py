"""Tests of distillation: the student's split is the teacher's, it is saved and exported, and errors are clear."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import spearmanr
from torch import nn

import knowable as kn
from knowable.decisions.distill import _rank_correlation, matching_concentration, mutual_information
from knowable.decisions.student_likelihoods import DirichletPrediction, dirichlet_information

QUICK = kn.MaximumLikelihood(epochs=300, batch_size=64, learning_rate=1e-2)


def net(inputs, outputs, width=24):
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs))


@pytest.fixture(scope="module")
def classes():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(120, 2, generator=generator)
    y = (x.sum(1) > 0).long() + (x[:, 0] > 1).long()
    torch.manual_seed(0)
    teacher = kn.DeepEnsemble(4, epochs=150).fit(kn.Model(net(2, 3), kn.Categorical()), (x, y))
    grid = 6 * torch.rand(500, 2, generator=generator) - 3
    torch.manual_seed(1)
    return teacher, kn.distill(teacher, net(2, 3, 48), grid, method=QUICK), grid, (x, y)


@pytest.fixture(scope="module")
def numbers():
    x = torch.linspace(-1, 1, 60, dtype=torch.float64).unsqueeze(1)
    generator = torch.Generator().manual_seed(0)
    y = torch.sin(3 * x[:, 0]) + 0.2 * torch.randn(60, generator=generator, dtype=torch.float64)
    features = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1)).double()
    model = kn.Model(features, kn.Gaussian(noise=0.2), random="last_layer", frozen="0.*")
    teacher = kn.ExactLinear().fit(model, (x, y))
    grid = torch.linspace(-4, 4, 300, dtype=torch.float64).unsqueeze(1)
    torch.manual_seed(0)
    return teacher, kn.distill(teacher, net(1, 1, 48).double(), grid, method=QUICK), grid, (x, y)


def test_a_student_of_classes_agrees_with_its_teacher(classes):
    teacher, student, grid, _ = classes
    known, found = teacher.predict(grid), student.predict(grid)
    assert (known.probs - found.probs).abs().mean() < 0.03
    assert (known.labels == found.labels).double().mean() > 0.95
    assert spearmanr(mutual_information(known), found.epistemic).statistic > 0.9
    assert torch.allclose(found.total, found.aleatoric + found.epistemic)


def test_a_student_of_numbers_agrees_with_its_teacher(numbers):
    teacher, student, grid, (_, y) = numbers
    known, found = teacher.predict(grid), student.predict(grid)
    assert found.mean.shape == known.mean.shape
    assert (known.mean - found.mean).abs().mean() < 0.2 * y.std()
    assert torch.allclose(found.aleatoric.log(), known.aleatoric.log(), atol=0.2)
    assert spearmanr(known.epistemic, found.epistemic).statistic > 0.9


def test_a_distilled_network_is_saved_and_loaded(classes, tmp_path):
    _, student, grid, _ = classes
    student.save(tmp_path / "student")
    again = kn.load(tmp_path / "student")
    assert type(again) is kn.Distilled
    assert torch.equal(again.predict(grid).probs, student.predict(grid).probs)
    assert torch.equal(again.predict(grid).epistemic, student.predict(grid).epistemic)


def test_the_network_alone_gives_the_prediction(classes, tmp_path):
    _, student, grid, _ = classes
    with torch.no_grad():
        output = student.net(grid)
    assert torch.allclose(DirichletPrediction(output).probs, student.predict(grid).probs)
    program = torch.export.load(student.export(tmp_path / "student.pt2", grid))
    assert torch.allclose(program.module()(grid[:7]), output[:7], atol=1e-6)


@pytest.mark.slow
def test_onnx_computes_the_same(classes, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    _, student, grid, _ = classes
    session = onnxruntime.InferenceSession(str(student.export(tmp_path / "student.onnx", grid)))
    (found,) = session.run(None, {"x": grid[:9].numpy()})
    with torch.no_grad():
        assert torch.allclose(torch.from_numpy(found), student.net(grid[:9]), atol=1e-5)


def test_fidelity_has_the_scores_and_correlations_of_predictions(classes):
    teacher, student, _, test = classes
    alone = kn.MaximumLikelihood(epochs=30).fit(kn.Model(net(2, 3), kn.Categorical()), test)
    report = student.fidelity(teacher, test, outside=test[0] + 4, alone=alone)
    scores = kn.evaluate(student.predict(test[0]), test[1])
    assert report.table["student"]["nll"] == scores["nll"]
    assert report.table["student"]["auroc"] == kn.metrics.auroc(student.predict(test[0]), student.predict(test[0] + 4))
    known = spearmanr(teacher.predict(test[0]).total, student.predict(test[0]).total).statistic
    assert report.correlations["total"] == pytest.approx(known, abs=1e-12)
    assert report.speedup > 0 and "alone" in repr(report)


def test_rank_correlation_is_spearmans_with_ties():
    first, second = torch.tensor([1.0, 2.0, 2.0, 5.0, 4.0]), torch.tensor([2.0, 1.0, 3.0, 3.0, 3.0])
    assert _rank_correlation(first, second) == pytest.approx(spearmanr(first, second).statistic, abs=1e-12)
    assert math.isnan(_rank_correlation(first, torch.ones(5)))


def test_the_matching_concentration_has_the_information_it_was_asked_for():
    probs = torch.tensor([[0.9, 0.06, 0.04], [0.4, 0.3, 0.3]], dtype=torch.float64)
    wanted = torch.tensor([1e-6, 0.3], dtype=torch.float64)
    log_s = matching_concentration(probs, wanted)
    assert torch.allclose(dirichlet_information(probs.log(), log_s), wanted, rtol=1e-6)


def test_mutual_information_is_total_less_expected_entropy(classes):
    teacher, _, grid, _ = classes
    prediction = teacher.predict(grid)
    assert torch.allclose(mutual_information(prediction).float(), prediction.epistemic, atol=2e-6)


def test_augmented_copies_are_more_inputs(classes):
    teacher, _, grid, _ = classes
    seen = []

    def shifted(x):
        seen.append(len(x))
        return x + 0.1 * torch.randn_like(x)

    method = kn.MaximumLikelihood(epochs=2)
    first, again = (
        kn.distill(teacher, net(2, 3), grid, method=method, augment=shifted, copies=3).mean()["0.weight"].shape
        for _ in range(2)
    )
    assert seen == [500] * 6 and first == again


def test_pairs_loaders_and_inputs_alone_are_the_same_data(classes):
    teacher, _, grid, _ = classes
    torch.manual_seed(0)
    student, method = net(2, 3), kn.MaximumLikelihood(epochs=2)
    pair = kn.distill(teacher, student, (grid, torch.zeros(500)), method=method)
    alone = kn.distill(teacher, student, grid, method=method)
    assert torch.equal(pair.mean()["0.weight"], alone.mean()["0.weight"])


def test_what_cannot_be_distilled_is_refused(classes, numbers):
    teacher, _, grid, (x, _) = classes
    with pytest.raises(kn.InvalidData, match=r"shape \(4,\) for a row, but this teacher needs \(3,\)"):
        kn.distill(teacher, net(2, 4), grid)
    with pytest.raises(kn.InvalidData, match=r"needs \(3,\) \(means, log aleatoric"):
        kn.distill(numbers[0], net(1, 5).double(), numbers[2])
    with pytest.raises(kn.InvalidArgument, match="one with a single set of weights"):
        kn.distill(teacher, net(2, 3), grid, method=kn.DeepEnsemble(2, epochs=1))
    with pytest.raises(kn.InvalidArgument, match="without augment"):
        kn.distill(teacher, net(2, 3), grid, copies=2)
    with pytest.raises(kn.InvalidType, match="student"):
        kn.distill(teacher, "small", grid)
    counts = kn.MAP(epochs=2).fit(kn.Model(net(2, 1), kn.Poisson()), (x, torch.ones(120)))
    with pytest.raises(kn.Unsupported, match="predictions of classes"):
        kn.distill(counts, net(2, 1), grid)
