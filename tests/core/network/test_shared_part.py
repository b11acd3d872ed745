"""Tests of running once what draws have in common: the same outputs, and fewer runs."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

import knowable as kn
from knowable.core.network.jacobian import jacobian_vector_products
from knowable.core.network.network import Network
from knowable.core.network.shared_part import SharedPart

DRAWS = 5


RUNS: list[int] = []


class Counted(nn.Module):
    """Frozen layers that count their runs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        RUNS.append(len(x))
        return self.dropout(self.norm(self.first(x).relu_()))


class Built(nn.Module):
    """Frozen layers, a random head, and a ``forward`` of any kind."""

    def __init__(self, forward, **more):
        super().__init__()
        self.backbone = Counted()
        self.head = nn.Linear(8, 3)
        self.own = forward
        for name, module in more.items():
            self.add_module(name, module)

    def forward(self, x):
        return self.own(self, x)


def in_place_on_features(net, x):
    features = net.backbone(x)
    features += 1.0
    return net.head(features)


def read_before_a_later_layer_changes_it(net, x):
    features = net.backbone(x)
    used = net.head(features)
    return used + net.change(features).sum(1, keepdim=True)


def head_first(net, x):
    return net.later(net.head(net.backbone(x)))


def head_written_into_a_shared_tensor(net, x):
    features = net.later(x)
    features[:, 0] = net.head(net.backbone(x))[:, 0]
    return net.last(features)


def routed_by_the_head(net, x):
    scores = net.head(net.backbone(x))
    return scores + net.table(scores.argmax(1))


def branch_on_the_head(net, x):
    scores = net.head(net.backbone(x))
    return net.later(x) if scores.sum() > 0 else -net.later(x)


def through_numpy(net, x):
    scores = net.head(net.backbone(x)).detach().numpy()
    return net.last(torch.from_numpy(scores.copy()))


def detached(net, x):
    return net.last(net.head(net.backbone(x)).detach())


def one_layer_before_and_after(net, x):
    return net.head(net.twice(net.head(net.twice(net.backbone(x))) @ torch.ones(3, 8)))


def same_tensor_kept(net, x):
    features = net.identity(net.backbone(x))
    return net.head(features) + features.shape[1]


def weights_of_the_head_read_elsewhere(net, x):
    return net.head(net.backbone(x)) + net.later(x) * net.head.weight.sum()


class Attention(nn.Module):
    """An embedding with padding and fused attention, frozen, before a head."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 8, padding_idx=0)
        self.attention = Fused()
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.attention(self.words(x))).mean(1)


class Fused(nn.Module):
    def __init__(self):
        super().__init__()
        self.project = nn.Linear(8, 8)

    def forward(self, x):
        RUNS.append(len(x))
        heads = self.project(x).unflatten(-1, (2, 4)).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)


NETWORKS = {
    "plain": Built(lambda net, x: net.head(net.backbone(x))),
    "functions between": Built(lambda net, x: net.head(F.gelu(net.backbone(x).flatten(1) * 2.0))),
    "in place on features": Built(in_place_on_features),
    "changed after it was read": Built(read_before_a_later_layer_changes_it, change=nn.ReLU(inplace=True)),
    "frozen layer after the head": Built(head_first, later=nn.Linear(3, 3)),
    "head written into a shared tensor": Built(
        head_written_into_a_shared_tensor, later=nn.Linear(4, 5), last=nn.Linear(5, 2)
    ),
    "routed": Built(routed_by_the_head, table=nn.Embedding(3, 3)),
    "branch": Built(branch_on_the_head, later=nn.Linear(4, 3)),
    "numpy": Built(through_numpy, last=nn.Linear(3, 3)),
    "detached": Built(detached, last=nn.Linear(3, 3)),
    "a layer used before and after": Built(one_layer_before_and_after, twice=nn.Linear(8, 8)),
    "identity": Built(same_tensor_kept, identity=nn.Identity()),
    "weights read elsewhere": Built(weights_of_the_head_read_elsewhere, later=nn.Linear(4, 3)),
}


def stack_for(net, names):
    """Draws of the parameters of these names; the others expanded, as point estimates are."""
    own = {name: value.detach().expand(DRAWS, *value.shape) for name, value in net.named_parameters()}
    return own | {name: own[name] + torch.randn(own[name].shape) for name in names}


def outputs_of(net, stack, x):
    return torch.stack([functional_call(net.eval(), {k: v[d] for k, v in stack.items()}, x) for d in range(DRAWS)])


@pytest.mark.parametrize("vectorise", [True, False])
@pytest.mark.parametrize("kind", NETWORKS)
def test_outputs_are_those_of_the_network_at_each_draw(kind, vectorise, seed):
    torch.manual_seed(seed)
    net = copy.deepcopy(NETWORKS[kind]).eval()
    net.backbone.norm.running_mean.normal_()
    stack, x = stack_for(net, ["head.weight", "head.bias"]), torch.randn(6, 4)
    expected = outputs_of(net, stack, x)
    network = Network(net)
    with torch.no_grad():
        for _ in range(2):
            found = network.over_draws(stack, x, buffers=network.buffers(), vectorise=vectorise, at_once=2)
            torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("kind", [kind for kind in NETWORKS if kind not in ("branch",)])
def test_what_comes_before_the_head_runs_once(kind):
    net = copy.deepcopy(NETWORKS[kind])
    network, stack, x = Network(net), stack_for(net, ["head.weight", "head.bias"]), torch.randn(6, 4)
    RUNS.clear()
    with torch.no_grad():
        network.over_draws(stack, x, buffers=network.buffers(), vectorise=False)
    assert RUNS == [6]


@pytest.mark.parametrize("vectorise", [True, False])
@pytest.mark.parametrize("names", [["head.weight"], ["attention.project.weight"]])
def test_fused_attention_is_shared_before_random_weights_and_batched_after_them(names, vectorise):
    net, x = Attention().eval(), torch.randint(10, (6, 5))
    network, stack = Network(net), stack_for(net, names)
    RUNS.clear()
    with torch.no_grad():
        found = network.over_draws(stack, x, buffers={}, vectorise=vectorise, at_once=2)
    assert not network._all_draws.refused
    assert len(RUNS) == (1 if names == ["head.weight"] else 4 if vectorise else 1 + DRAWS)
    torch.testing.assert_close(found, outputs_of(net, stack, x))


def test_code_that_asks_for_the_value_of_a_draw_shares_nothing():
    net = copy.deepcopy(NETWORKS["branch"])
    network, stack, x = Network(net), stack_for(net, ["head.weight", "head.bias"]), torch.randn(6, 4)
    RUNS.clear()
    with torch.no_grad():
        network.over_draws(stack, x, buffers=network.buffers(), vectorise=False)
    assert RUNS == [6] * (1 + DRAWS)


def test_random_numbers_of_the_network_differ_from_draw_to_draw():
    net = Built(lambda net, x: net.head(F.dropout(net.backbone(x), 0.5, training=True)))
    network, x = Network(net), torch.randn(6, 4)
    stack = stack_for(net, ["head.weight"])
    stack["head.weight"] = stack["head.weight"][:1].repeat(DRAWS, 1, 1)
    with torch.no_grad():
        found = network.over_draws(stack, x, buffers=network.buffers(), vectorise=False)
    assert all(not torch.equal(found[0], other) for other in found[1:])


def test_buffers_that_differ_from_draw_to_draw_are_not_shared():
    net = copy.deepcopy(NETWORKS["plain"]).eval()
    network, x = Network(net), torch.randn(6, 4)
    stack = stack_for(net, ["head.weight"]) | {"backbone.norm.running_mean": torch.randn(DRAWS, 8)}
    expected = outputs_of(net, stack, x)
    with torch.no_grad():
        found = network.over_draws(stack, x, buffers=network.buffers(), vectorise=False)
    torch.testing.assert_close(found, expected)


def test_a_hook_inside_the_frozen_part_runs_for_every_draw():
    net = nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Linear(8, 3))
    seen = []
    net[0][1].register_forward_hook(lambda module, args, output: seen.append(1))
    network, x = Network(net), torch.randn(6, 4)
    with torch.no_grad():
        network.over_draws(stack_for(net, ["1.weight"]), x, buffers={}, vectorise=False)
    assert len(seen) == 1 + DRAWS


def test_derivatives_are_those_of_the_whole_network():
    net = copy.deepcopy(NETWORKS["in place on features"]).eval()
    network, x = Network(net), torch.randn(6, 4)
    params = {name: value.detach() for name, value in net.named_parameters()}
    at = {name: params[name] for name in ("head.weight", "head.bias")}
    directions = {name: torch.randn(DRAWS, *value.shape) for name, value in at.items()}
    with torch.no_grad():
        shared = network.given(params, at, x, network.buffers())
    for vectorise in (True, False):
        found = jacobian_vector_products(shared, at, directions, vectorise=vectorise, at_once=2)
        whole = functional_call(net, {**params, **{name: at[name] + directions[name][0] for name in at}}, x)
        torch.testing.assert_close(found[0], whole - functional_call(net, params, x))  # it is linear in its head


METHODS = [
    kn.MeanFieldVI(epochs=2), kn.NaturalVI(epochs=2), kn.Laplace(epochs=2), kn.SWAG(epochs=2),
    kn.Laplace(epochs=2, prediction="linearised_sampling"), kn.Laplace(epochs=2, prediction="sampling"),
    kn.DeepEnsemble(3, epochs=2), kn.SGLD(draws=20, warmup=10, chains=2, step_size=1e-4, start="network"),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.parametrize("frozen", [True, False])
def test_predictions_share_the_part_that_is_not_random(method, frozen, monkeypatch):
    net = copy.deepcopy(NETWORKS["plain"])
    net.backbone.requires_grad_(not frozen)
    x, y = torch.randn(40, 4), torch.randint(3, (40,))
    posterior = method.fit(kn.Model(net, kn.Categorical(), random="last_layer"), (x, y))
    posterior.predict(x[:2], samples=16)  # draws are made and kept
    RUNS.clear()
    found = posterior.predict(x, samples=16)
    whole = RUNS.count(40)
    monkeypatch.setattr(SharedPart, "features", lambda *args: None)
    torch.testing.assert_close(found.probs, posterior.predict(x, samples=16).probs)
    differing = isinstance(method, kn.DeepEnsemble | kn.SGLD) and not frozen
    assert whole == 1 or differing
