"""Low-rank adapters on a frozen base: every method fits them, draws share the base, members begin at the base."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.inference.point.point import fresh_start

RUNS: list[int] = []


class Base(nn.Linear):
    """A frozen layer that counts its runs."""

    def forward(self, x):
        RUNS.append(len(x))
        return super().forward(x)


class Adapted(nn.Module):
    """W x + B A x, as in LoRA: A at random, B at zero."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2):
        super().__init__()
        self.base_layer = Base(inputs, outputs).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)
        nn.init.zeros_(self.lora_B.weight)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def made(random="*lora_*"):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8).requires_grad_(False), nn.Tanh(), Adapted(8, 8), nn.Tanh(), Adapted(8, 2))
    x = torch.randn(60, 4)
    return net, kn.Model(net, kn.Categorical(), kn.Normal(0.3), random=random), x, (x[:, 0] > 0).long()


METHODS = [
    kn.Laplace(epochs=20), kn.MeanFieldVI(epochs=20), kn.NaturalVI(epochs=20), kn.SWAG(epochs=10),
    kn.DeepEnsemble(3, epochs=20), kn.SGLD(draws=10, warmup=5, chains=2, start="network", step_size=1e-4),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
@pytest.mark.parametrize(
    ("method", "random"),
    [(each, "*lora_*") for each in METHODS] + [(each, f"*lora_{one}*") for each in METHODS[:3] for one in "AB"],
    ids=repr,
)
def test_adapters_are_fitted_and_the_base_stays(method, random):
    net, model, x, y = made(random)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    posterior = method.fit(model, (x, y))
    assert all("lora_" in name for name in posterior.mean())
    assert any(not torch.equal(value, before[name]) for name, value in posterior.mean().items())
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    posterior.predict(x[:2], samples=16)
    RUNS.clear()
    probabilities = posterior.predict(x, samples=16).probs
    assert RUNS.count(60) <= 1 + 16  # the first base once, the second for each draw at most
    assert probabilities.isfinite().all()


def test_members_of_an_ensemble_begin_at_the_base():
    model = made()[1]
    starts = [fresh_start(model, 0, member)[0] for member in (1, 2)]
    for start in starts:
        assert all(not value.any() for name, value in start.items() if "lora_B" in name)
    assert not torch.equal(starts[0]["2.lora_A.weight"], starts[1]["2.lora_A.weight"])
