"""Tests of the Kronecker factors: Jacobians by torch.func of each layer's outputs are the oracle."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.model.structured_normal import KroneckerFactored
from knowable.inference.laplace.curvature import PriorPrecision, prior_precision
from knowable.inference.laplace.curvature_kron import KroneckerCurvature, LayerFactors, VectorFactors
from knowable.inference.laplace.expansion import ExpansionPoint
from knowable.inference.laplace.posteriors import LaplacePosterior
from tests.inference.laplace.oracle import case_expansion, dense_ggn, expansion_of, informations, slow_factors
from tests.integration.networks import Conv1D

ONE = torch.ones(1, dtype=torch.float64)


def layers(expansion: ExpansionPoint) -> dict[str, LayerFactors]:
    factors = KroneckerCurvature.of(expansion).factors
    return {each.names[0]: each for each in factors if isinstance(each, LayerFactors)}


def assert_factors(found: LayerFactors, expected: tuple[Tensor, Tensor]) -> None:
    for one, other in ((found.inputs, expected[0]), (found.outputs[0], expected[1])):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-9 * other.abs().max().item())


@pytest.mark.parametrize(
    ("name", "modules"),
    [
        ("mlp", ["0", "2"]),
        ("batchnorm_cnn", ["0", "4", "8", "10"]),
        ("shared", ["0", "2", "6"]),
        ("transformer", ["embed", "encoder.layers.0.linear1", "encoder.layers.0.linear2", "head"]),
        ("lstm", ["head"]),
    ],
)
def test_factors_are_the_slow_ones(name, modules):
    expansion = case_expansion(name)
    net, found = expansion.model.net.eval(), layers(expansion)
    for module in modules:
        assert_factors(found[f"{module}.weight"], slow_factors(expansion, net, module))


def test_convolutions_without_bias_have_the_slow_factors():
    expansion = case_expansion("residual")
    found = layers(expansion)["1.body.0.weight"]
    assert_factors(found, slow_factors(expansion, expansion.model.net.eval(), "1.body.0", bias=False))


class Cells(nn.Module):
    """The LSTM of the suite with its two matrices as linear layers."""

    def __init__(self, other: nn.Module):
        super().__init__()
        lstm, self.head = other.lstm, other.head
        self.inner, self.outer = nn.Linear(2, 16).double(), nn.Linear(4, 16).double()
        self.inner.weight, self.inner.bias = lstm.weight_ih_l0, lstm.bias_ih_l0
        self.outer.weight, self.outer.bias = lstm.weight_hh_l0, lstm.bias_hh_l0

    def forward(self, x: Tensor) -> Tensor:
        hidden = cell = x.new_zeros(len(x), 4)
        for step in x.unbind(1):
            i, f, g, o = (self.inner(step) + self.outer(hidden)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
        return self.head(hidden)


def test_an_lstm_has_the_factors_of_its_cells():
    expansion = case_expansion("lstm")
    cells, found = Cells(expansion.model.net), layers(expansion)
    x, _ = expansion.data.tensors
    torch.testing.assert_close(cells(x), expansion.model.net(x))
    assert_factors(found["lstm.weight_ih_l0"], slow_factors(expansion, cells, "inner"))
    assert_factors(found["lstm.weight_hh_l0"], slow_factors(expansion, cells, "outer"))


class Attention(nn.Module):
    """Self-attention with its projections as linear layers, or as one of torch's."""

    def __init__(self, whole: nn.MultiheadAttention | None = None):
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True) if whole is None else None
        self.head = nn.Linear(4, 2)
        if whole is not None:
            self.into, self.out = nn.Linear(4, 12), nn.Linear(4, 4)
            self.into.weight, self.into.bias = whole.in_proj_weight, whole.in_proj_bias
            self.out.weight, self.out.bias = whole.out_proj.weight, whole.out_proj.bias

    def forward(self, x: Tensor) -> Tensor:
        if self.attention is not None:
            return self.head(self.attention(x, x, x, need_weights=False)[0].sum(1))
        q, k, v = (each.unflatten(-1, (2, 2)).transpose(1, 2) for each in self.into(x).chunk(3, -1))
        mixed = ((q @ k.mT) / 2**0.5).softmax(-1) @ v
        return self.head(self.out(mixed.transpose(1, 2).flatten(2)).sum(1))


def test_attention_has_the_factors_of_its_projections():
    net = Attention().double()
    apart = Attention(net.attention)
    apart.head = net.head
    x, y = torch.randn(5, 3, 4, dtype=torch.float64), torch.randint(0, 2, (5,))
    torch.testing.assert_close(apart(x), net(x))
    expansion = expansion_of(kn.Model(net, kn.Categorical()), (x, y))
    found = layers(expansion)
    assert_factors(found["attention.in_proj_weight"], slow_factors(expansion, apart, "into"))
    assert_factors(found["attention.out_proj.weight"], slow_factors(expansion, apart, "out"))


def test_other_parameters_have_their_own_matrices_and_that_is_said():
    expansion = case_expansion("transformer")
    curvature, whole = KroneckerCurvature.of(expansion), dense_ggn(expansion)
    places = expansion.layout.views(torch.arange(expansion.layout.size))
    vectors = [each for each in curvature.factors if isinstance(each, VectorFactors)]
    assert len(vectors) == 4
    for each in vectors:
        index = places[each.names[0]].flatten()
        torch.testing.assert_close(each.curvature[0], whole[index][:, index])
    assert "norm1.weight" in curvature.notes[0] and "full matrices" in curvature.notes[0]


def test_large_other_parameters_have_a_diagonal_and_that_is_said(monkeypatch):
    monkeypatch.setattr("knowable.inference.laplace.curvature_kron._LARGEST_MATRIX", 10)
    expansion = case_expansion("tied")
    curvature = KroneckerCurvature.of(expansion)
    (vector,) = (each for each in curvature.factors if isinstance(each, VectorFactors))
    places = expansion.layout.views(torch.arange(expansion.layout.size))["embed.weight"].flatten()
    torch.testing.assert_close(vector.curvature[0], dense_ggn(expansion).diagonal()[places])
    assert curvature.notes == ("No Kronecker factors for embed.weight: a diagonal instead.",)


def test_one_layer_of_one_row_is_exact():
    # with a single row the Kronecker product of the moments is the moment of the product
    net = nn.Linear(3, 2).double()
    x, y = torch.randn(1, 3, dtype=torch.float64), torch.tensor([1])
    expansion = expansion_of(kn.Model(net, kn.Categorical()), (x, y))
    prior = prior_precision(expansion)
    (block,) = KroneckerCurvature.of(expansion).blocks(prior, ONE)
    index = block.matrix(expansion.layout.views(torch.arange(8))).flatten()
    expected = dense_ggn(expansion) + torch.eye(8, dtype=torch.float64)
    torch.testing.assert_close(block.dense(), expected[index][:, index])


def dense_block(factors: LayerFactors) -> Tensor:
    return torch.kron(factors.outputs[0], factors.inputs)


def test_a_prior_of_one_scale_is_added_exactly():
    expansion = case_expansion("mlp")
    factors = layers(expansion)["0.weight"]
    block = factors.block(prior_precision(expansion), 2 * ONE)
    expected = 2 * dense_block(factors) + torch.eye(32, dtype=torch.float64)
    torch.testing.assert_close(block.dense(), expected)


def _with_prior(expansion: ExpansionPoint, weight: Tensor, bias: Tensor) -> PriorPrecision:
    plain = prior_precision(expansion)
    return PriorPrecision(plain.layout, {**plain.by_name, "0.weight": weight, "0.bias": bias})


@pytest.mark.parametrize("elementwise", [False, True])
def test_other_priors_are_added_along_the_basis(elementwise):
    expansion = case_expansion("mlp")
    weight, bias = torch.tensor(2.0, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    if elementwise:
        weight, bias = (torch.rand(shape, dtype=torch.float64) for shape in ((8, 3), (8,)))
    factors = layers(expansion)["0.weight"]
    block = factors.block(_with_prior(expansion, weight, bias), ONE)
    diagonal = torch.cat([weight.expand(8, 3), bias.expand(8).unsqueeze(1)], 1).flatten().diag()
    basis = torch.kron(block.out_basis, block.in_basis)
    expected = (basis.T @ (dense_block(factors) + diagonal) @ basis).diagonal().view(8, 4)
    torch.testing.assert_close(block.precision, expected)


def test_each_noise_has_its_own_part():
    net = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    x, y = torch.randn(6, 2, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    model = kn.Model(net, kn.Gaussian(outputs=2))
    params = {**model.params(), "likelihood.log_noise": torch.tensor([-1.0, 0.5], dtype=torch.float64)}
    expansion = expansion_of(model, (x, y), params=params)
    curvature = KroneckerCurvature.of(expansion)
    other = {**params, "likelihood.log_noise": torch.tensor([0.2, -0.3], dtype=torch.float64)}
    weights = torch.exp(2 * (params["likelihood.log_noise"] - other["likelihood.log_noise"])).requires_grad_()
    moved = KroneckerCurvature.of(expansion_of(model, (x, y), params=other))
    prior, one = prior_precision(expansion), torch.ones(2, dtype=torch.float64)
    value = curvature.log_det(prior, weights)
    torch.testing.assert_close(value, moved.log_det(prior, one))
    assert torch.autograd.gradcheck(lambda w: curvature.log_det(prior, w), weights)


def test_the_head_is_exact_without_following_outputs_back():
    # as many backward passes as there are classes, or none: the same factors
    net = nn.Linear(3, 4).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(0, 4, (6,))
    model = kn.Model(nn.Sequential(net), kn.Categorical())
    expansion = expansion_of(model, (x, y), most=1)  # columns would be random
    found = layers(expansion)["0.weight"]
    torch.testing.assert_close(found.outputs[0], informations(expansion).sum(0) / 6)


def test_the_posterior_before_is_added_along_the_basis():
    x, y = torch.randn(10, 3, dtype=torch.float64), torch.randn(10, 1, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    model = kn.Model(net, kn.Gaussian(0.5))
    first = expansion_of(model, (x[:5], y[:5]))
    posterior = LaplacePosterior(first.model, KroneckerCurvature.of(first).normal(first, prior_precision(first), ONE))
    second = expansion_of(kn.Model(net, kn.Gaussian(0.5), prior=posterior), (x[5:], y[5:]))
    prior = prior_precision(second)
    assert isinstance(prior.joint, KroneckerFactored)
    for factors, old in zip(KroneckerCurvature.of(second).factors, posterior.blocks, strict=True):
        block = factors.block(prior, ONE)
        whole = dense_block(factors) + old.dense()
        basis = torch.kron(block.out_basis, block.in_basis)
        torch.testing.assert_close(block.precision.flatten(), (basis.T @ whole @ basis).diagonal())
        torch.testing.assert_close(block.precision.sum(), whole.trace())


def test_solutions_are_those_of_the_dense_precision():
    expansion = case_expansion("batchnorm_cnn")
    curvature, prior = KroneckerCurvature.of(expansion), prior_precision(expansion)
    posterior = LaplacePosterior(expansion.model, curvature.normal(expansion, prior, ONE))
    dense = posterior.as_prior().joint_normal(expansion.layout)[1]
    vector = torch.randn(expansion.layout.size, dtype=torch.float64)
    torch.testing.assert_close(curvature.solve(prior, ONE, vector), torch.linalg.solve(dense, vector))
    torch.testing.assert_close(curvature.log_det(prior, ONE), torch.logdet(dense))


class Tokens(nn.Module):
    """Tokens, of which 0 is padding, averaged over those that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 3, padding_idx=0).requires_grad_(False)
        self.first, self.second, self.head = nn.Linear(3, 5), nn.Linear(5, 4, bias=False), nn.Linear(4, 2)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.second(torch.tanh(self.first(self.embedding(ids)))).tanh()
        mask = (ids != 0).to(hidden).unsqueeze(-1)
        return self.head((hidden * mask).sum(1) / mask.sum(1))


@pytest.mark.parametrize("weighted", [False, True])
def test_padding_that_the_network_masks_does_not_count(weighted):
    net, ids = Tokens().double(), torch.randint(1, 9, (12, 3))
    y = torch.randint(0, 2, (12,))
    weights = torch.rand(12, dtype=torch.float64) if weighted else None
    found = []
    for x in (ids, torch.cat([ids, torch.zeros_like(ids)], 1)):
        data = (x, y) if weights is None else kn.Data((x, y), weights=weights)
        found.append(layers(expansion_of(kn.Model(net, kn.Categorical()), data)))
    for name, plain in found[0].items():
        assert_factors(found[1][name], (plain.inputs, plain.outputs[0]))


# --- weights held as (in, out) ---------------------------------------------------------------------------------------


class RightProduct(nn.Module):
    """A linear layer by ``x @ weight``, with the weights of another one."""

    def __init__(self, like: nn.Linear) -> None:
        super().__init__()
        self.weight = nn.Parameter(like.weight.detach().T.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def gpt_layer(like: nn.Linear) -> Conv1D:
    """GPT-2's linear layer, with the weights of another one."""
    found = Conv1D(like.out_features, like.in_features).double()
    found.load_state_dict({"weight": like.weight.detach().T, "bias": like.bias.detach()})
    return found


def two_forms() -> list[nn.Sequential]:
    """A network over sequences, by ``nn.Linear`` and by weights ``(in, out)``; two of them are square."""
    plain = nn.Sequential(
        nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Flatten(), nn.Linear(8, 8, bias=False), nn.Tanh(),
        nn.Linear(8, 3),
    ).double()  # fmt: skip
    a, b, c, d = plain[0], plain[2], plain[5], plain[7]
    other = nn.Sequential(
        gpt_layer(a), nn.Tanh(), gpt_layer(b), nn.Tanh(), nn.Flatten(), RightProduct(c), nn.Tanh(), gpt_layer(d)
    )
    return [plain, other]


def as_linear(params: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.mT if name.endswith("weight") else value for name, value in params.items()}


@pytest.mark.parametrize("random", ["*", "7.*"])
@pytest.mark.parametrize("structure", ["kron", "diag", "full", "lowrank"])
def test_weights_held_transposed_have_the_posterior_of_linear_layers(structure, random, tmp_path):
    x, y = torch.randn(20, 2, 3, dtype=torch.float64), torch.arange(20) % 3
    method = kn.Laplace(epochs=30, batch_size=20, structure=structure, polish=0, rank=3)
    plain, other = (method.fit(kn.Model(net, kn.Categorical(), random=random), (x, y)) for net in two_forms())
    torch.testing.assert_close(as_linear(other.std()), plain.std(), rtol=1e-6, atol=1e-9)
    assert float(other.log_evidence) == pytest.approx(float(plain.log_evidence), rel=1e-8)
    torch.testing.assert_close(other.predict(x).probs, plain.predict(x).probs, rtol=1e-6, atol=1e-9)
    if structure == "kron":
        assert not any("No Kronecker factors" in note for note in other.diagnostics.notes)
    other.save(tmp_path / "posterior.knowable")
    loaded = kn.load(tmp_path / "posterior.knowable", two_forms()[1])
    torch.testing.assert_close(loaded.std(), other.std())
    torch.testing.assert_close(loaded.predict(x).probs, other.predict(x).probs)


def test_priors_of_weights_held_transposed_are_added_as_in_linear_layers():
    x, y = torch.randn(20, 2, 3, dtype=torch.float64), torch.arange(20) % 3
    forms, precisions = two_forms(), {}
    found: list[list[KroneckerFactored]] = [[], []]
    for form, net in enumerate(forms):
        expansion = expansion_of(kn.Model(net, kn.Categorical()), (x[:10], y[:10]))
        if form == 0:  # another precision for each element
            precisions = {name: 0.5 + torch.rand_like(value) for name, value in expansion.weights.items()}
        prior = PriorPrecision(expansion.layout, precisions if form == 0 else as_linear(precisions))
        first = KroneckerCurvature.of(expansion).normal(expansion, prior, ONE)
        model = kn.Model(net, kn.Categorical(), prior=LaplacePosterior(expansion.model, first))
        later = expansion_of(model, (x[10:], y[10:]))
        found[form] = [first, KroneckerCurvature.of(later).normal(later, prior_precision(later), ONE)]
    for plain, other in zip(*found, strict=True):
        torch.testing.assert_close(as_linear(other.std()), plain.std())
        torch.testing.assert_close(as_linear(other.precision_diagonal()), plain.precision_diagonal())
        torch.testing.assert_close(other.log_det_precision(), plain.log_det_precision())
        moved = {name: value + torch.randn_like(value) for name, value in plain.means.items()}
        torch.testing.assert_close(other.quadratic(as_linear(moved)), plain.quadratic(moved))


class Factored(nn.Module):
    """A weight that is a product of two, neither of which is multiplied with rows."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(2, 4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(x @ (self.a @ self.b)))


def test_a_product_of_two_weights_is_no_layer():
    x = torch.randn(8, 3, dtype=torch.float64)
    expansion = expansion_of(kn.Model(Factored().double(), kn.Gaussian(0.5)), (x, x.sum(1, keepdim=True)))
    assert [layer.names for layer in expansion.layers] == [("head.weight", "head.bias")]
    assert expansion.layers.others == ("a", "b")
    vectors = {each.names[0]: each for each in KroneckerCurvature.of(expansion).factors}
    dense, views = dense_ggn(expansion), expansion.layout.views(torch.arange(expansion.layout.size))
    for name in ("a", "b"):
        own = views[name].flatten()
        torch.testing.assert_close(vectors[name].curvature[0], dense[own.unsqueeze(1), own])


def test_a_weight_that_is_used_both_ways_is_no_layer():
    class BothWays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 3))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(torch.tanh(x @ self.weight), self.weight)

    x = torch.randn(8, 3, dtype=torch.float64)
    expansion = expansion_of(kn.Model(BothWays().double(), kn.Gaussian(0.5)), (x, x))
    assert expansion.layers.layers == () and expansion.layers.others == ("weight",)


def test_the_linear_layer_of_transformers_is_a_layer():
    layer = pytest.importorskip("transformers.pytorch_utils").Conv1D(4, 3).double()
    x = torch.randn(8, 2, 3, dtype=torch.float64)
    (found,) = expansion_of(kn.Model(layer, kn.Gaussian(0.5)), (x, x.sum(-1, keepdim=True).expand(8, 2, 4))).layers
    assert found.names == ("weight", "bias") and found.transposed and (found.out, found.width) == (4, 4)
