"""Tests of what networks of other libraries do, and small networks in tests seldom."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import knowable as kn
from knowable.core.network.network import Network
from knowable.inference.point.point import fresh_start, nearby_start, warn_of_replaced_weights
from tests.core.cases import mlp
from tests.integration.networks import Conv1D, LoRALinear, TinyGPT

# --- adapters on a frozen base ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [kn.MAP(epochs=20), kn.MeanFieldVI(epochs=20), kn.Laplace(epochs=20)], ids=repr)
def test_a_glob_of_adapters_leaves_the_base_frozen(method):
    net = nn.Sequential(LoRALinear(3, 4), nn.Tanh(), LoRALinear(4, 1))
    base = {name: value.clone() for name, value in net.named_parameters() if "base" in name}
    model = kn.Model(net, kn.Gaussian(0.1), random="*lora*")
    assert sorted(model.random_names) == sorted(name for name, _ in net.named_parameters() if "lora" in name)
    assert model.point_names == [] and base.keys() <= model.frozen_names
    x = torch.randn(30, 3)
    posterior = method.fit(model, (x, x.sum(1)))
    assert all(torch.equal(value, net.get_parameter(name)) for name, value in base.items())
    assert not base.keys() & posterior.sample(1).keys()
    assert posterior.mean()["0.lora_B.default.weight"].abs().max() > 0


# --- ensembles of networks that are trained or that cannot reset themselves ------------------------------------------


def test_the_second_factor_of_an_adapter_stays_zero_in_a_fresh_start():
    net = nn.Sequential(LoRALinear(3, 40), nn.Tanh(), LoRALinear(40, 1))
    start = fresh_start(kn.Model(net, kn.Gaussian(0.1)), 0, 1)[0]
    assert not start["0.lora_B.default.weight"].any() and not start["2.lora_B.default.weight"].any()
    assert not torch.equal(start["0.lora_A.default.weight"], net[0].lora_A["default"].weight)
    x = torch.randn(5, 3)
    torch.testing.assert_close(kn.Model(net, kn.Gaussian(0.1)).forward(start, x, buffers={}), net(x))


def test_weights_that_no_module_resets_begin_anew_with_the_spread_they_had():
    net = nn.Sequential(Conv1D(50, 40), nn.Tanh(), Conv1D(1, 50))
    start = fresh_start(kn.Model(net, kn.Gaussian(0.1)), 0, 1)[0]
    weight = start["0.weight"]
    error = 0.02 / (2 * weight.numel()) ** 0.5  # standard error of a standard deviation
    spread = net[0].weight.std().item()
    assert abs(weight.std().item() - spread) < 5 * error and abs(weight.mean().item()) < 10 * error
    assert abs(torch.corrcoef(torch.stack([weight.flatten(), net[0].weight.detach().flatten()]))[0, 1]) < 5 / 2000**0.5
    assert not start["0.bias"].any()


def test_a_network_of_constants_begins_with_noise():
    net = nn.Linear(3, 2)
    nn.init.zeros_(net.weight)
    nn.init.zeros_(net.bias)
    start = fresh_start(kn.Model(net, kn.Gaussian(0.1)), 0, 1)[0]
    assert start["weight"].all() and start["bias"].all()


@pytest.mark.parametrize("method", [kn.DeepEnsemble(2, epochs=1), kn.EnsembleOf(kn.MAP(epochs=1), 2)], ids=repr)
def test_an_ensemble_that_replaces_trained_weights_warns(method):
    net, x = nn.Sequential(mlp(outputs=64, width=64), nn.Tanh(), nn.Linear(64, 1)), torch.randn(60, 2)
    model, data = kn.Model(net, kn.Gaussian(0.1)), (x, x.prod(1))
    method.fit(model, data)  # new weights, and no warning
    trained = kn.MAP(epochs=200).fit(model, data).mean()
    with torch.no_grad():
        for name, value in net.named_parameters():
            value.copy_(trained[name])
    with pytest.warns(kn.ModelWarning, match=r"not like those with which the layers begin.*start='network'"):
        method.fit(kn.Model(net, kn.Gaussian(0.1)), data)


def test_an_ensemble_of_a_network_with_weights_as_in_gpt_warns():
    model = kn.Model(TinyGPT(), kn.Categorical())
    with pytest.warns(kn.ModelWarning, match=r"wte\.weight"):
        warn_of_replaced_weights(model, 0, "")


def test_new_networks_are_rarely_taken_for_trained_ones(seed):
    """By chance once in a million parameters."""
    nets = [mlp(width=50), nn.LSTM(3, 8), nn.Conv2d(3, 8, 3), nn.BatchNorm1d(40), nn.Embedding(30, 4), nn.LayerNorm(40)]
    nets.append(nn.TransformerEncoderLayer(16, 2, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for net in nets:
            warn_of_replaced_weights(kn.Model(net, kn.Gaussian(0.1)), seed, "")


def test_members_of_a_trained_network_begin_near_it_and_stay_there():
    net, x = mlp(width=40), torch.randn(60, 2)
    with torch.no_grad():
        for value in net.parameters():
            value.mul_(3.0)  # as training might
    model, data = kn.Model(net, kn.Gaussian(0.1)), (x, x.prod(1))
    posterior = kn.DeepEnsemble(3, epochs=1, learning_rate=1e-6, batch_size=16, start="network").fit(model, data)
    for name, value in net.named_parameters():
        away = (posterior.stack[name] - value.detach()).flatten(1)
        assert away[0].abs().max() < 1e-4  # the first is the network
        if value.numel() > 1:
            noise = away[1:] / value.detach().std(correction=0)
            # a root mean square of n numbers has the relative standard error 1 / √(2n)
            assert abs(noise.square().mean().sqrt().item() - 0.01) < 0.01 * (5 / (2 * noise.numel()) ** 0.5 + 0.1)
    assert "in turn" in posterior.diagnostics.message
    assert not nearby_start(kn.Model(LoRALinear(3, 4), kn.Gaussian(0.1)), 0, 1)[0]["lora_B.default.weight"].any()


# --- compiled modules ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_module_is_fitted_as_the_module_it_was_made_from(whole):
    plain = mlp()
    compiled = torch.compile(plain, backend="eager") if whole else nn.Sequential(torch.compile(plain, backend="eager"))
    x = torch.randn(20, 2)
    method, data = kn.MeanFieldVI(epochs=5), (x, x.sum(1))
    wanted, found = (method.fit(kn.Model(net, kn.Gaussian(0.3)), data) for net in (plain, compiled))
    for mine, own in zip(found.loc.values(), wanted.loc.values(), strict=True):
        assert torch.equal(mine, own)  # also the same estimator of the gradient, and so the same noise


# --- buffers that the network's code assigns -------------------------------------------------------------------------


class Centred(nn.Module):
    """Keeps a moving average of its inputs by assignment, uses it, and lets gradients flow past the new value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)
        self.register_buffer("m", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        output = self.linear(x * (1 + self.m))
        if self.training:
            self.m = 0.9 * self.m + 0.1 * x.mean(0) + 0.0 * output.mean()
        return output


@pytest.mark.parametrize(
    "method",
    [
        kn.MAP(epochs=30),
        kn.MeanFieldVI(epochs=30),
        kn.MeanFieldVI(epochs=30, estimator="weight"),
        kn.DeepEnsemble(2, epochs=30),
        kn.MCDropout(epochs=30),
        kn.SWAG(epochs=20, snapshots=10, batch_size=1000),
    ],
    ids=repr,
)
def test_buffers_that_forward_assigns_are_updated_in_a_fit(method):
    net, x = Centred(), torch.randn(20, 2) + 3
    posterior = method.fit(kn.Model(net, kn.Gaussian(0.1)), (x, x.sum(1)))
    expected = (1 - 0.9**30) * x.mean(0)  # after 30 steps on all rows
    torch.testing.assert_close(posterior.buffers["m"], expected)
    assert not net.m.any()
    before = posterior.buffers["m"].clone()
    posterior.predict(x)
    assert torch.equal(posterior.buffers["m"], before)


def test_assigned_buffers_are_those_of_the_modules_own_training():
    net, x = Centred(), torch.randn(20, 2)
    network = Network(net)
    buffers = network.buffers()
    for rows in x.split(5):
        network(network.params(), rows, buffers=buffers, training=True).sum()
        net(rows)
    torch.testing.assert_close(buffers["m"], net.m.detach())


# --- networks that work in place on their input ----------------------------------------------------------------------


class Doubled(nn.Module):
    """Doubles its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.mul_(2))


IN_PLACE = {
    "operation": Doubled,
    "activation": lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(2, 1)),
    "dropout": lambda: nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Linear(2, 1)),  # in training alone
}


@pytest.mark.parametrize("method", [kn.MAP(epochs=3), kn.MeanFieldVI(epochs=3), kn.Laplace(epochs=3)], ids=repr)
@pytest.mark.parametrize("kind", IN_PLACE)
def test_inputs_are_not_changed_by_networks_that_work_in_place(kind, method):
    x = torch.randn(20, 2)
    before, y = x.clone(), x.sum(1)
    posterior = method.fit(kn.Model(IN_PLACE[kind](), kn.Gaussian(0.3)), (x, y), validation=(x, y))
    first, again = (posterior.predict(x, generator=torch.Generator().manual_seed(0)).mean for _ in range(2))
    assert torch.equal(x, before) and torch.equal(first, again)


# --- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "method", [kn.MeanFieldVI(epochs=5), kn.Laplace(epochs=5), kn.SGLD(draws=3, warmup=3, start="network")], ids=repr
)
@pytest.mark.filterwarnings("ignore::knowable.errors.ConvergenceWarning")
def test_padding_is_the_networks_own_vector_in_every_draw(method):
    """The sum over tokens relies on it that padding is zero; nothing in the data says what it is."""
    net = nn.Sequential(nn.Embedding(6, 3, padding_idx=0), Summed(), nn.Linear(3, 1))
    ids = torch.randint(1, 6, (20, 4))
    posterior = method.fit(kn.Model(net, kn.Gaussian(0.3)), (ids, ids.sum(1).float() / 6))
    padded = torch.cat([ids, torch.zeros(20, 7, dtype=torch.long)], 1)
    short, long = (posterior.predict(x, generator=torch.Generator().manual_seed(0)).samples for x in (ids, padded))
    torch.testing.assert_close(long, short)


class Summed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1)


# --- sparse gradients, tensors kept from earlier calls, dtypes -------------------------------------------------------


def _sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 3, sparse=True), Summed(), nn.Linear(3, 1))


def _dense() -> nn.Module:
    return nn.Sequential(nn.Embedding(6, 3), Summed(), nn.Linear(3, 1))


def _kept() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
    net[0].register_forward_hook(_keep)
    net(torch.randn(2, 4))
    return net


def _keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
    module.kept = {"output": output}  # type: ignore[assignment]


def _weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 1))


def _parametrised() -> nn.Module:
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), nn.Tanh(), nn.Linear(3, 1))


PAIRS = {"sparse": (_sparse, _dense), "weight_norm": (_weight_norm, _parametrised)}


@pytest.mark.parametrize("method", [kn.MAP(epochs=4), kn.MeanFieldVI(epochs=4), kn.Laplace(epochs=4)], ids=repr)
@pytest.mark.parametrize("kind", PAIRS)
def test_older_forms_are_fitted_as_the_newer_ones(kind, method):
    older, newer = (make() for make in PAIRS[kind])
    for mine, own in zip(older.parameters(), newer.parameters(), strict=True):
        mine.data = own.data.clone()
    x = torch.randint(0, 6, (20, 4)) if kind == "sparse" else torch.randn(20, 4)
    data = (x, x.sum(1).float() / 4)
    found, wanted = (
        method.fit(kn.Model(net, kn.Gaussian(0.3)), data).predict(x, generator=torch.Generator().manual_seed(0)).mean
        for net in (older, newer)
    )
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_a_network_that_keeps_tensors_of_an_earlier_call_is_fitted():
    net, x = _kept(), torch.randn(20, 4)
    before = net[0].kept["output"]
    posterior = kn.DeepEnsemble(2, epochs=200).fit(kn.Model(net, kn.Gaussian(0.1)), (x, x[:, 0]))
    assert (posterior.predict(x).mean.flatten() - x[:, 0]).square().mean() < 0.1
    assert net[0].kept["output"] is before and before.grad_fn is not None


class MixedPrecision(nn.Module):
    """A backbone in bfloat16 with a head in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = nn.Linear(3, 8).bfloat16(), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x.bfloat16()).float().tanh())


@pytest.mark.parametrize("method", [kn.MAP(epochs=50), kn.MeanFieldVI(epochs=50), kn.Laplace(epochs=50)], ids=repr)
def test_the_models_dtype_is_that_of_the_parameters_which_are_not_frozen(method):
    net, x = MixedPrecision(), torch.randn(40, 3)
    net.backbone.requires_grad_(False)
    model = kn.Model(net, kn.Gaussian())
    assert model.dtype == torch.float32 and model.frozen_params()["backbone.weight"].dtype == torch.bfloat16
    features = net.backbone(x.bfloat16()).float().tanh().detach()
    head = nn.Linear(8, 1)
    head.load_state_dict(net.head.state_dict())
    y = features.sum(1)
    found = method.fit(model, (x, y)).predict(x, generator=torch.Generator().manual_seed(0)).mean
    alone = method.fit(kn.Model(head, kn.Gaussian()), (features, y))
    wanted = alone.predict(features, generator=torch.Generator().manual_seed(0)).mean
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


# --- sequences that are packed, and rows that are sent to different experts ------------------------------------------


class Sequences(nn.Module):
    """A recurrent layer over sequences of different lengths, packed or padded; the last output counts."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], *, packed: bool) -> None:
        super().__init__()
        self.layer, self.head, self.packed = kind(2, 3, batch_first=True), nn.Linear(3, 1), packed

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if self.packed:
            packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
            output = pad_packed_sequence(self.layer(packed)[0], batch_first=True, total_length=x.shape[1])[0]
        else:
            output = self.layer(x)[0]
        return self.head(output[torch.arange(len(x)), lengths - 1])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("structure", ["full", "diag"])
def test_packed_sequences_have_the_curvature_of_padded_ones(kind, structure):
    torch.manual_seed(0)
    net, x, lengths = Sequences(kind, packed=True).double(), torch.randn(10, 4, 2).double(), torch.randint(1, 5, (10,))
    padded = Sequences(kind, packed=False).double()
    padded.load_state_dict(net.state_dict())
    method = kn.Laplace(epochs=3, structure=structure, tune="never", polish=0)
    data = ((x, lengths), x[:, 0].sum(1))
    found, wanted = (method.fit(kn.Model(each, kn.Gaussian(0.5)), data) for each in (net, padded))
    for name, value in wanted.std().items():
        torch.testing.assert_close(found.std()[name], value, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(found.predict((x, lengths)).std, wanted.predict((x, lengths)).std)


class Experts(nn.Module):
    """Each row goes to one of two linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(3, 2), nn.ModuleList(nn.Linear(3, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(1)
        chosen, output = shares.argmax(1), x.new_zeros(len(x), 1)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero().flatten()
            if len(rows):
                output = output.index_add(0, rows, expert(x[rows]) * shares[rows, k : k + 1])
        return output


@pytest.mark.parametrize("first", [[0, 1, 0], [0, 0, 0], [1, 1, 1]])
@pytest.mark.parametrize("structure", ["kron", "diag", "full"])
def test_experts_that_see_some_rows_are_refused_by_laplace_with_the_reason(structure, first):
    """Whatever the experts of the first rows, on which layers are looked for."""
    net, x = Experts(), torch.randn(60, 3)
    chosen = net.gate(x).argmax(1)
    order = [int((chosen == k).nonzero()[place]) for place, k in enumerate(first)]
    x = torch.cat([x[order], x])
    y = x.sum(1)
    with pytest.raises(kn.Unsupported, match=r"act on every row, but experts\.[01]\.weight.*mixture of experts"):
        kn.Laplace(epochs=1, structure=structure).fit(kn.Model(net, kn.Gaussian(0.5)), (x, y))
    gate = kn.Laplace(epochs=1, structure=structure).fit(kn.Model(net, kn.Gaussian(0.5), random="gate*"), (x, y))
    assert gate.predict(x).epistemic.gt(0).all()
    for method in (kn.MeanFieldVI(epochs=2), kn.SWAG(epochs=2, snapshots=3), kn.DeepEnsemble(2, epochs=2)):
        assert method.fit(kn.Model(net, kn.Gaussian(0.5)), (x, y)).predict(x).mean.isfinite().all()
