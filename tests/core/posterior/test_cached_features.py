"""Tests of fits on cached features: the same results, and fewer runs of the frozen layers."""

from __future__ import annotations

import tempfile

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn

RUNS: list[int] = []


class Backbone(nn.Module):
    """Frozen layers that count the rows they see; its dropout and normalisation are in evaluation mode."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.ReLU(inplace=True))

    def forward(self, x):
        RUNS.append(len(x))
        return {"features": self.layers(x), "scale": torch.tensor(2.0, dtype=x.dtype), "unused": x}


class Net(nn.Module):
    """A frozen backbone, a second frozen layer, and a head that works in place and has dropout."""

    def __init__(self):
        super().__init__()
        self.backbone, self.middle = Backbone(), nn.Linear(16, 8)
        self.head = nn.Sequential(nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3))

    def forward(self, x):
        found = self.backbone(x)
        hidden = self.middle(found["features"])
        hidden += x.mean(1, keepdim=True)
        return self.head(hidden) * found["scale"]


def made(dtype=torch.float64):
    torch.manual_seed(0)
    net = Net().to(dtype)
    net.backbone.requires_grad_(False)
    net.middle.requires_grad_(False)
    net.backbone.layers[1].running_mean.normal_()
    x = torch.randn(90, 4, dtype=dtype)
    return kn.Model(net, kn.Categorical()), x, (x[:, 0] > 0).long() + (x[:, 1] > 1).long()


METHODS = [
    kn.MAP(epochs=3, batch_size=32), kn.MeanFieldVI(epochs=3, batch_size=32), kn.NaturalVI(epochs=2, batch_size=32),
    kn.Laplace(epochs=3, batch_size=32), kn.SWAG(epochs=2, batch_size=32), kn.DeepEnsemble(3, epochs=2, batch_size=32),
    kn.SGLD(draws=6, warmup=4, chains=2, start="network", step_size=1e-5, batch_size=32),
    kn.EnsembleOf(kn.Laplace(epochs=2), members=2),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
@pytest.mark.parametrize("method", METHODS, ids=repr)
def test_a_fit_on_features_is_the_fit(method):
    model, x, y = made()
    plain = method.fit(model, (x, y), validation=(x[:20], y[:20]))
    RUNS.clear()
    cached = method.fit(model, (x, y), validation=(x[:20], y[:20]), engine=kn.Engine(cache_features=True))
    assert sum(RUNS) < 3 * 110  # once for each row, and tries on a few
    assert type(cached) is type(plain)
    assert cached.model is model
    assert repr(cached) == repr(plain)
    torch.testing.assert_close(cached.mean(), plain.mean(), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(cached.predict(x, 6).probs, plain.predict(x, 6).probs, rtol=1e-6, atol=1e-8)


def test_features_beyond_the_limit_are_in_a_file_that_goes_away(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model, x, y = made()
    found = []

    class Watched(kn.MAP):
        def _fit(self, job):
            found.extend(path.stat().st_size for path in tmp_path.rglob("*.features"))
            return super()._fit(job)

    in_file = Watched(epochs=2).fit(model, (x, y), engine=kn.Engine(cache_features="1KB"))
    assert sum(found) == 90 * (4 + 8 + 8) * 8  # what is read: x, and the outputs of the middle and of tanh
    assert list(tmp_path.iterdir()) == []
    in_memory = Watched(epochs=2).fit(model, (x, y), engine=kn.Engine(cache_features="1MB"))
    torch.testing.assert_close(in_file.mean(), in_memory.mean(), rtol=0, atol=0)
    assert list(tmp_path.iterdir()) == []


class Coupled(nn.Module):
    """A frozen layer of which each row's output depends on the others."""

    def __init__(self, head: nn.Module):
        super().__init__()
        self.first, self.head = nn.Linear(4, 8), head

    def forward(self, x):
        return self.head(self.first(x - x.mean(0)))


class LeftBehind(nn.Module):
    """A head that takes what a frozen layer left in an attribute."""

    def __init__(self):
        super().__init__()
        self.first, self.head = Keeps(), nn.Linear(8, 3)

    def forward(self, x):
        self.first(x)
        return self.head(self.first.kept)


class Keeps(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 8), torch.zeros(1, 8)

    def forward(self, x):
        self.kept = self.layer(x)
        return self.kept


REFUSED = {
    "nothing is frozen": (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), (), "finds nothing to keep"),
    "dropout comes first": (nn.Sequential(nn.Dropout(), nn.Linear(4, 8), nn.Linear(8, 3)), "1.*", "nothing to keep"),
    "normalisation is trained": (
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)), "0.*", "normalisation that is trained",
    ),
    "normalisation without weights": (
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8, affine=False), nn.Linear(8, 3)), "0.*", "is trained",
    ),
    "rows depend on each other": (Coupled(nn.Linear(8, 3)), "first.*", "computes each row by itself"),
    "left in an attribute": (LeftBehind(), "first.*", "left behind"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_give_another_result_is_refused_with_a_reason(case):
    net, frozen, reason = REFUSED[case]
    x, y = torch.randn(30, 4), torch.randint(3, (30,))
    model = kn.Model(net, kn.Categorical(), frozen=frozen)
    with pytest.raises(kn.Unsupported, match=reason):
        kn.MAP(epochs=1).fit(model, (x, y), engine=kn.Engine(cache_features=True))


@pytest.mark.parametrize(
    "method",
    [
        kn.DeepEnsemble(2, epochs=1, adversarial=0.01), kn.FunctionSpaceVI(epochs=1), kn.MCDropout(epochs=1),
        kn.TestTimeAugmentation(kn.MAP(epochs=1), augment=kn.InputNoise(0.1)),
        kn.EnsembleOf(kn.FunctionSpaceVI(epochs=1), members=2),
    ],
    ids=repr,
)  # fmt: skip
def test_methods_that_change_the_network_or_its_inputs_are_refused(method):
    model, x, y = made()
    with pytest.raises(kn.Unsupported, match="cache_features=True is not for"):
        method.fit(model, (x, y), engine=kn.Engine(cache_features=True))


def test_rows_that_may_be_others_every_time_are_refused():
    model, x, y = made()
    loader = DataLoader(TensorDataset(x, y), batch_size=30, shuffle=True)
    with pytest.raises(kn.Unsupported, match="needs data in memory"):
        kn.MAP(epochs=1).fit(model, loader, engine=kn.Engine(cache_features=True))
    with pytest.raises(kn.InvalidArgument, match="cache_features must be bytes or text"):
        kn.Engine(cache_features="much")


def test_dropout_between_frozen_layers_ends_what_is_kept():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 8), nn.Linear(8, 3)).double()
    model, x, y = kn.Model(net, kn.Categorical(), frozen=["0.*", "3.*"]), torch.randn(64, 4).double(), None
    y = torch.randint(3, (64,))
    plain = kn.MAP(epochs=3, batch_size=16).fit(model, (x, y))
    cached = kn.MAP(epochs=3, batch_size=16).fit(model, (x, y), engine=kn.Engine(cache_features=True))
    torch.testing.assert_close(cached.mean(), plain.mean(), rtol=1e-6, atol=1e-8)
