"""Networks of few digits, of several dtypes, and under autocast: posteriors in single precision that agree."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.errors import InvalidArgument


class TwoLayers(nn.Module):
    """Two layers, each of which may have a dtype of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.tanh(self.body(x.to(self.body.weight.dtype)))
        return self.head(seen.to(self.head.weight.dtype))


def networks() -> dict[str, tuple[nn.Module, torch.dtype | None]]:
    """The same network in several ways, the first one in single precision; its weights have few digits."""
    torch.manual_seed(3)
    plain = TwoLayers()
    with torch.no_grad():
        for value in plain.parameters():
            value.copy_(value.bfloat16().half())
    made = {name: copy.deepcopy(plain) for name in ("mixed", "bfloat16", "float16")}
    made["mixed"].body.bfloat16()
    made["bfloat16"].bfloat16()
    made["float16"].half()
    return {"plain": (plain, None), "autocast": (plain, torch.bfloat16), **{k: (v, None) for k, v in made.items()}}


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(40, 3, generator=generator)
    return x, x.sum(1).sin()


QUICK = {"epochs": 12, "batch_size": 20}
METHODS = [
    kn.MAP(**QUICK),
    kn.MeanFieldVI(**QUICK, estimator="weight"),
    kn.MeanFieldVI(**QUICK),
    kn.MeanFieldVI(**QUICK, estimator="flipout"),
    kn.NaturalVI(**QUICK),
    kn.Laplace(**QUICK),
    kn.Laplace(**QUICK, structure="full", polish=0),
    kn.Laplace(**QUICK, structure="diag", curvature="empirical_fisher"),
    kn.SWAG(epochs=12, snapshots=4),
    kn.MCDropout(**QUICK),
    kn.DeepEnsemble(2, **QUICK),
    kn.SGLD(chains=2, draws=3, warmup=4, start="network", steps=2, batch_size=20),
]


KINDS = ["autocast", "mixed", "bfloat16", "float16"]
PAIRS = [(kind, method) for method in METHODS for kind in KINDS]
PAIRS.remove(("autocast", kn.MeanFieldVI(**QUICK)))  # local reparameterisation draws other noise under autocast


@pytest.mark.parametrize(("kind", "method"), PAIRS, ids=repr)
def test_a_network_with_few_digits_has_the_posterior_of_one_with_many(method, kind, tmp_path):
    x, y = data()
    nets = networks()
    found = []
    for name in ("plain", kind):
        net, autocast = nets[name]
        model = kn.Model(net, kn.Gaussian(0.3), kn.Normal(1.0), autocast=autocast)
        posterior = method.fit(model, (x, y))
        assert all(value.dtype == torch.float32 for value in posterior.mean().values())
        prediction = posterior.predict(x, samples=16)
        assert prediction.mean.dtype == torch.float32
        found.append(prediction)
    # rounding of every product to 8 bits: 1/256 of about 1, in some dozen steps of a learning rate of 0.01
    torch.testing.assert_close(found[1].mean, found[0].mean, rtol=0.02, atol=0.02)
    torch.testing.assert_close(found[1].std, found[0].std, rtol=0.02, atol=0.02)
    assert not torch.equal(found[1].mean, found[0].mean)  # it did compute with fewer digits
    again = kn.load(posterior.save(tmp_path / "saved"), nets[kind][0])
    assert torch.equal(again.predict(x, samples=16).mean, prediction.mean)


def test_the_network_sees_weights_of_its_own_dtype_and_is_not_changed():
    seen = []

    class Watching(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((self.weight.dtype, x.dtype))
            return super().forward(x)

    net = Watching(3, 1).bfloat16()
    before = net.weight.clone()
    x, y = data()
    kn.MAP(epochs=3).fit(kn.Model(net, kn.Gaussian()), (x, y)).predict(x)
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)} and torch.equal(net.weight, before)


def test_small_steps_are_not_lost_in_a_network_of_few_digits():
    """A weight of 1 in bfloat16 has the neighbour 1 - 2⁻⁸: steps of a thousandth would never leave it."""
    net = nn.Linear(1, 1, bias=False).bfloat16()
    nn.init.ones_(net.weight)
    x = torch.randn(50, 1)
    model = kn.Model(net, kn.Gaussian(0.1), kn.Normal(10.0))
    posterior = kn.MAP(epochs=300, learning_rate=1e-3).fit(model, (x, 0.9 * x[:, 0]))
    assert abs(posterior.mean()["weight"].item() - 0.9) < 0.01


def test_layers_of_several_dtypes_are_built_again_when_a_posterior_is_loaded(tmp_path):
    net = nn.Sequential(nn.Linear(3, 1), nn.Tanh()).bfloat16()
    x, y = data()
    posterior = kn.MAP(epochs=2).fit(kn.Model(net, kn.Gaussian()), (x, y))
    again = kn.load(posterior.save(tmp_path / "one"))
    assert again.model.net[0].weight.dtype == torch.bfloat16
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)
    net[0].bias.data = net[0].bias.data.float()
    mixed = kn.Model(net, kn.Gaussian(), frozen="0.bias", autocast=torch.bfloat16)
    posterior = kn.MAP(epochs=2).fit(mixed, (x, y))
    again = kn.load(posterior.save(tmp_path / "two"))
    assert (again.model.net[0].weight.dtype, again.model.net[0].bias.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(again.predict(x).mean, posterior.predict(x).mean)


def test_dtypes_that_cannot_be_are_refused_by_name():
    net = nn.Linear(3, 1)
    with pytest.raises(InvalidArgument, match=r"autocast must be torch.bfloat16, torch.float16 or None, got 'bf16'"):
        kn.Model(net, kn.Gaussian(), autocast="bf16")  # type: ignore[arg-type]
    net.filter = nn.Parameter(torch.randn(3, dtype=torch.cfloat))
    with pytest.raises(InvalidArgument, match=r"complex64 in 'filter'.*view_as_complex"):
        kn.Model(net, kn.Gaussian())
