"""Tests of how far members differ: against the formulas written out."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from tests.core.cases import DTYPE, atoms, diagonal_posterior, linear_data, linear_model

WEIGHTS = torch.tensor([0.2, 0.5, 0.3], dtype=DTYPE)


class _Logits(nn.Module):
    """Outputs that are its parameters, whatever the input."""

    def __init__(self, classes: int):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(4, classes, dtype=DTYPE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table[x.long().flatten()]


def test_numbers_differ_by_the_root_mean_square_distance_of_their_means(generator):
    x = linear_data(7, generator=generator)[0]
    model = linear_model()
    posterior = kn.Particles(model, atoms(model, 3, generator).stack, WEIGHTS.log())
    found = kn.diversity(posterior, x)
    means = [x @ posterior.stack["weight"][k].T + posterior.stack["bias"][k] for k in range(3)]
    for i in range(3):
        for j in range(3):
            expected = (means[i] - means[j]).square().mean().sqrt()
            torch.testing.assert_close(found.pairwise[i, j], expected)
    centre = sum(w * m for w, m in zip(WEIGHTS, means, strict=True))
    variance = sum(w * (m - centre) ** 2 for w, m in zip(WEIGHTS, means, strict=True)).mean().item()
    assert found.between == pytest.approx(variance)
    assert found.between == pytest.approx(posterior.predict(x).epistemic.mean().item())
    assert found.effective_members == pytest.approx(1 / (0.04 + 0.25 + 0.09))
    assert found.disagreement == pytest.approx((found.pairwise.sum() / 6).item())
    torch.testing.assert_close(found.weights, WEIGHTS)


@pytest.mark.parametrize("classes", [3, 1])
def test_labels_differ_by_the_share_of_rows_and_by_mutual_information(classes, generator):
    x = torch.arange(4, dtype=DTYPE).unsqueeze(1)
    model = kn.Model(_Logits(classes), kn.Categorical() if classes > 1 else kn.Bernoulli())
    stack = {"table": 2 * torch.randn(3, 4, classes, generator=generator, dtype=DTYPE)}
    posterior = kn.Particles(model, stack, WEIGHTS.log())
    found = kn.diversity(posterior, x)
    labels = stack["table"].argmax(-1) if classes > 1 else (stack["table"] > 0).squeeze(-1)
    for i in range(3):
        for j in range(3):
            assert found.pairwise[i, j] == (labels[i] != labels[j]).double().mean()
    assert found.between == pytest.approx(posterior.predict(x).epistemic.mean().item())


def test_members_of_a_mixture_are_compared_by_what_each_expects(generator):
    x = linear_data(7, generator=generator)[0]
    model = linear_model()
    members = [atoms(model, 1, generator), atoms(model, 4, generator)]
    found = kn.diversity(kn.Mixture(model, members), x)
    means = [member.predict(x).mean for member in members]
    torch.testing.assert_close(found.pairwise[0, 1], (means[0] - means[1]).square().mean().sqrt())
    assert found.between == pytest.approx((0.25 * (means[0] - means[1]) ** 2).mean().item())


def test_members_that_agree_do_not_differ():
    model, x = linear_model(), linear_data(7)[0]
    one = {name: value.expand(5, *value.shape[1:]) for name, value in atoms(model, 1).stack.items()}
    found = kn.diversity(kn.Particles(model, one), x)
    assert found.terms() == pytest.approx({"effective_members": 5.0, "disagreement": 0.0, "diversity": 0.0})
    alone = kn.diversity(atoms(model, 1), x)
    assert alone.terms() == {"effective_members": 1.0, "disagreement": 0.0, "diversity": 0.0}
    assert found.same and not alone.same


def test_a_fit_says_when_its_members_are_all_the_same_function(generator):
    data = linear_data(20, generator=generator)  # a linear model has one best fit, wherever it begins
    posterior = kn.DeepEnsemble(3, epochs=1000, learning_rate=0.1).fit(linear_model(), data)
    assert any("the same function" in note for note in posterior.diagnostics.notes)
    alone = kn.DeepEnsemble(1, epochs=10).fit(linear_model(), data)
    assert not any("the same function" in note for note in alone.diagnostics.notes)
    assert "note: all members ended as the same function" in str(posterior.diagnostics)


def test_a_posterior_without_members_is_refused():
    with pytest.raises(kn.InvalidType, match=r"posterior must be an ensemble .* got DiagonalNormal"):
        kn.diversity(diagonal_posterior(linear_model()), linear_data(3)[0])
