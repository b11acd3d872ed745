"""Tests of activation checkpointing in networks that run with other tensors than their own."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import knowable as kn
from knowable.core.network.network import Network

EITHER = pytest.mark.parametrize("reentrant", [False, True])


class Blocks(nn.Module):
    """Two blocks, one inside the other; ``reentrant=None`` does not checkpoint them."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 1)
        self.outer, self.inner = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reentrant, self.calls = reentrant, 0

    def run(self, block, x: Tensor) -> Tensor:
        return block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)

    def inside(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.inner(x).tanh()

    def block(self, x: Tensor) -> Tensor:
        return self.run(self.inside, self.outer(x).tanh())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self.block, self.first(x).tanh()))


def _pair(reentrant: bool) -> tuple[Blocks, Blocks]:
    plain, checkpointed = Blocks(None), Blocks(reentrant)
    checkpointed.load_state_dict(plain.state_dict())
    return plain, checkpointed


def _gradients(network: Network, params: dict[str, Tensor], x: Tensor, **options: bool) -> tuple[Tensor, ...]:
    leaves = {name: value.detach().requires_grad_() for name, value in params.items()}
    # two calls before the backward pass: each must be run again with tensors of its own
    twice = {name: 2 * value for name, value in leaves.items()}
    loss = network(leaves, x, **options).square().sum() + network(twice, x, **options).sum()
    return torch.autograd.grad(loss, list(leaves.values()))


@EITHER
@pytest.mark.parametrize("training", [False, True])
def test_gradients_are_those_of_the_same_network_without_checkpoints(reentrant, training):
    plain, checkpointed = (Network(net) for net in _pair(reentrant))
    params = {name: torch.randn_like(value) for name, value in plain.params().items()}
    x = torch.randn(5, 2)
    expected = _gradients(plain, params, x, training=training)
    for found, wanted in zip(_gradients(checkpointed, params, x, training=training), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    assert all(value.abs().max() > 0 for value in expected)


@EITHER
def test_the_block_is_run_again_in_the_backward_pass(reentrant):
    network = Network(_pair(reentrant)[1])
    params = {name: value.requires_grad_() for name, value in network.params().items()}
    output = network(params, torch.randn(5, 2), training=True)
    module = network.modules(training=True)[""]
    assert module.calls == 1
    output.sum().backward()
    assert module.calls > 1
    own = dict(module.named_parameters())
    assert all(own[name] is not value and own[name].grad is None for name, value in params.items())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch's own, of blocks in blocks
@EITHER
def test_outside_of_a_network_checkpoints_are_those_of_torch(reentrant):
    plain, checkpointed = _pair(reentrant)
    Network(checkpointed)
    x = torch.randn(5, 2)
    for net in (plain, checkpointed):
        net(x).sum().backward()
    assert checkpointed.calls > 1
    for mine, wanted in zip(checkpointed.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, wanted.grad)


METHODS = [
    kn.MAP(epochs=3),
    kn.MeanFieldVI(epochs=3),
    kn.MeanFieldVI(epochs=3, estimator="weight"),
    kn.MeanFieldVI(epochs=3, estimator="flipout"),
    kn.NaturalVI(epochs=3),
    kn.Laplace(epochs=3),
    kn.Laplace(epochs=3, structure="full"),
    kn.SWAG(epochs=3, snapshots=3),
    kn.MCDropout(epochs=3),
    kn.DeepEnsemble(2, epochs=3),
    kn.DeepEnsemble(2, epochs=3, vectorise=False),
    kn.SGLD(draws=3, warmup=3, chains=2, start="prior"),
]


@pytest.mark.filterwarnings("ignore::knowable.errors.ConvergenceWarning")
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_every_kind_of_method_fits_as_without_checkpoints(method):
    x = torch.randn(12, 2)
    y = x.prod(1)
    plain, found = (method.fit(kn.Model(net, kn.Gaussian(0.3)), (x, y)) for net in _pair(False))
    for name, value in plain.sample(2, generator=torch.Generator().manual_seed(0)).items():
        other = found.sample(2, generator=torch.Generator().manual_seed(0))[name]
        torch.testing.assert_close(other, value, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.predict(x).mean, plain.predict(x).mean, rtol=1e-3, atol=1e-4)
