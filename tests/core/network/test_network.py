"""Tests of the network as a pure function."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from knowable.core.network.network import Network
from knowable.core.network.params import index_params, stack_params
from knowable.errors import InvalidArgument, InvalidData, InvalidType, Unsupported
from tests.core.cases import Tied, batch_norm_net, mlp, same_params


def _draws(network: Network, count: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    start = network.params()
    return stack_params(
        [{name: torch.randn(value.shape, generator=generator) for name, value in start.items()} for _ in range(count)]
    )


def test_the_call_with_the_modules_own_parameters_is_the_module():
    net = mlp()
    network, x = Network(net), torch.randn(5, 2)
    assert torch.equal(network(network.params(), x), net(x))


def test_the_call_with_other_parameters_is_a_module_that_holds_them(generator):
    net, other, x = mlp(), mlp(), torch.randn(5, 2)
    params = {name: value.detach() for name, value in other.named_parameters()}
    assert torch.equal(Network(net)(params, x), other(x))


def test_the_structural_copies_share_every_tensor_with_the_users_module():
    net = batch_norm_net()
    network = Network(net)
    own = {value.data_ptr() for value in [*net.parameters(), *net.buffers()]}
    for copy in (network._training.module, network._evaluating.module):
        assert {value.data_ptr() for value in [*copy.parameters(), *copy.buffers()]} == own
        assert copy is not net


@pytest.mark.parametrize("mode", [True, False])
def test_the_users_module_keeps_its_values_and_its_mode(mode):
    net = batch_norm_net().train(mode)
    net[1].train(not mode)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    network, x = Network(net), torch.randn(6, 2)
    buffers = network.buffers()
    network(network.params(), x, buffers=buffers, training=True)
    network(network.params(), x, buffers=buffers)
    assert same_params(dict(net.state_dict()), before)
    assert (net.training, net[1].training, net[0].training) == (mode, not mode, mode)


def test_training_updates_the_buffers_it_is_handed_as_the_module_would_its_own():
    net, x = batch_norm_net(), torch.randn(6, 2)
    network = Network(net)
    buffers = network.buffers()
    output = network(network.params(), x, buffers=buffers, training=True)
    expected = net.train()(x)
    assert torch.equal(output, expected)
    assert same_params(buffers, dict(net.named_buffers()))
    assert buffers["1.num_batches_tracked"] == 1


def test_evaluation_uses_the_buffers_it_is_handed_and_leaves_them_alone():
    network, x = Network(batch_norm_net()), torch.randn(6, 2)
    buffers = network.buffers()
    plain = network(network.params(), x, buffers=buffers)
    moved = {**buffers, "1.running_mean": buffers["1.running_mean"] + 1.0}
    before = {name: value.clone() for name, value in moved.items()}
    assert not torch.allclose(network(network.params(), x, buffers=moved), plain)
    assert same_params(moved, before)


def test_batch_norm_over_draws_in_one_call_is_the_loop_over_draws(generator):
    network, x = Network(batch_norm_net()), torch.randn(6, 2)
    stack = _draws(network, 3, generator)
    buffers = {name: value + 1 for name, value in network.buffers().items()}
    together = network.over_draws(stack, x, buffers=buffers, vectorise=True)
    each = torch.stack([network(index_params(stack, k), x, buffers=buffers) for k in range(3)])
    torch.testing.assert_close(together, each)
    assert torch.equal(network.over_draws(stack, x, buffers=buffers, vectorise=False), each)


class _Branching(nn.Module):
    """Looks at a value, which vmap refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.linear(x)
        return output if output.sum().item() > 0 else -output


def test_a_module_that_vmap_refuses_is_looped_over(generator):
    network, x = Network(_Branching()), torch.randn(4, 2)
    stack = _draws(network, 3, generator)
    each = torch.stack([network(index_params(stack, k), x) for k in range(3)])
    assert torch.equal(network.over_draws(stack, x, vectorise=True), each)


def test_an_error_of_the_module_itself_is_raised_and_does_not_end_batching(generator):
    network = Network(mlp())
    stack = _draws(network, 2, generator)
    with pytest.raises(RuntimeError, match="shapes"):
        network.over_draws(stack, torch.randn(3, 5), vectorise=True)
    assert not network._all_draws.refused


def test_the_switch_for_hidden_loops_is_put_back(generator):
    network = Network(mlp())
    before = torch._C._functorch._is_vmap_fallback_enabled()
    network.over_draws(_draws(network, 2, generator), torch.randn(3, 2), vectorise=True)
    assert torch._C._functorch._is_vmap_fallback_enabled() == before


def test_tied_weights_are_one_parameter_and_both_uses_follow_it():
    net, x = Tied(), torch.randn(3, 2)
    network = Network(net)
    assert list(network.params()) == ["encoder.weight", "encoder.bias"]
    params = {name: value + 1.0 for name, value in network.params().items()}
    weight, bias = params["encoder.weight"], params["encoder.bias"]
    torch.testing.assert_close(network(params, x), torch.tanh(x @ weight.T + bias) @ weight.T)


def test_modules_whose_parameters_are_all_frozen_stay_in_evaluation_mode():
    network = Network(batch_norm_net(), frozen={"1.weight", "1.bias"})
    assert not network._training.module[1].training
    assert network._training.module[0].training
    buffers = network.buffers()
    network(network.params(), torch.randn(6, 2), buffers=buffers, training=True)
    assert same_params(buffers, network.buffers())


def test_a_module_with_one_parameter_left_to_fit_is_in_training_mode():
    assert Network(batch_norm_net(), frozen={"1.weight"})._training.module[1].training


def test_everything_below_a_frozen_module_stays_in_evaluation_mode():
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)), nn.Dropout(0.5), nn.Linear(3, 1))
    training = Network(net, frozen={"0.0.weight", "0.0.bias"})._training.module
    assert [training[0][1].training, training[1].training] == [False, True]


def test_params_and_buffers_are_copies():
    net = batch_norm_net()
    network = Network(net)
    network.params()["0.weight"].zero_()
    network.buffers()["1.running_var"].zero_()
    assert net[0].weight.abs().sum() > 0
    assert net[1].running_var.sum() == 4


def test_gradients_reach_the_parameters_that_were_passed():
    network = Network(mlp())
    params = {name: value.requires_grad_() for name, value in network.params().items()}
    network(params, torch.randn(4, 2), training=True).sum().backward()
    assert all(value.grad is not None for value in params.values())
    assert all(value.grad is None for value in network.net.parameters())


# --- what is refused ------------------------------------------------------------------------------------------------


def test_what_is_not_a_module_is_refused():
    with pytest.raises(InvalidType, match=r"net must be a torch\.nn\.Module, got list"):
        Network([nn.Linear(1, 1)])  # type: ignore[arg-type]


def test_lazy_parameters_are_refused():
    with pytest.raises(InvalidArgument, match=r"lazy parameters without a shape yet \(weight\).*Run it once"):
        Network(nn.LazyLinear(2))


def test_complex_parameters_are_refused():
    with pytest.raises(InvalidArgument, match=r"must be real floating point, got torch.complex64"):
        Network(nn.Linear(2, 1, dtype=torch.complex64))


def test_parameters_that_are_not_finite_are_refused_by_name():
    net = mlp()
    with torch.no_grad():
        net[2].weight[0, 1] = torch.nan
    with pytest.raises(InvalidArgument, match=r"net parameter '2\.weight' has missing or infinite values"):
        Network(net)


def test_a_module_that_cannot_be_copied_is_refused():
    net = mlp()
    net.lock = threading.Lock()
    with pytest.raises(InvalidArgument, match=r"net cannot be copied.*locks"):
        Network(net)


class _Returns(nn.Module):
    def __init__(self, what) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(2, 2), what

    def forward(self, x: torch.Tensor):
        return self.what(self.linear(x))


@pytest.mark.parametrize(
    ("what", "error", "wanted"),
    [
        (lambda out: (out, out), InvalidType, "must return one tensor, got tuple"),
        (lambda out: {"logits": out}, InvalidType, "must return one tensor, got dict"),
        (lambda out: out.sum(), InvalidData, r"one row per row of x: when tried on \d rows it had shape \(\)"),
        (lambda out: out[:, :1].T, InvalidData, r"tried on (\d) rows it had shape \(1, \1\).*batch_first"),
        (lambda out: out.T, InvalidData, "one row per row of x"),
    ],
)
def test_outputs_that_are_not_one_tensor_with_a_row_for_each_input_are_refused(what, error, wanted):
    network = Network(_Returns(what))
    with pytest.raises(error, match=wanted):
        network.probe(torch.randn(7, 2), network.params())


def test_inputs_that_do_not_fit_are_refused_with_their_whole_shape():
    network = Network(mlp())
    with pytest.raises(InvalidData, match=r"cannot take x of shape \(7, 3\) and dtype torch\.float32"):
        network.probe(torch.randn(7, 3), network.params())


def test_the_probe_passes_on_what_a_part_of_ours_inside_the_network_says():
    network = Network(nn.Linear(3, 1))

    def refuse(module, args):
        raise Unsupported("This layer has no code. Name another.")

    network.modules(training=False)[""].register_forward_pre_hook(refuse)
    with pytest.raises(Unsupported, match="has no code"):
        network.probe(torch.randn(7, 3), network.params())


def test_the_probe_gives_the_output_of_the_first_rows():
    network, x = Network(mlp()), torch.randn(7, 2)
    output = network.probe(x, network.params())
    torch.testing.assert_close(output, network(network.params(), x)[: len(output)].detach())
    assert network.probe(x[:1], network.params()).shape == (1, 1)


# --- buffers that differ from draw to draw ---------------------------------------------------------------------------


@pytest.mark.parametrize("vectorise", [True, False])
def test_draws_may_have_buffers_of_their_own(vectorise, generator):
    network, x = Network(batch_norm_net()), torch.randn(5, 2, generator=generator)
    stack, shared = _draws(network, 3, generator), network.buffers()
    own = {"1.running_mean": torch.randn(3, 4, generator=generator), "1.running_var": torch.rand(3, 4) + 0.5}
    found = network.over_draws({**stack, **own}, x, buffers=shared, vectorise=vectorise)
    for k in range(3):
        buffers = {**shared, **index_params(own, k)}
        torch.testing.assert_close(found[k], network(index_params(stack, k), x, buffers=buffers))


def test_running_statistics_are_those_of_the_inputs_under_the_given_weights(generator):
    # one batch of at most 256 rows: its mean, and its variance with n - 1
    network, x = Network(batch_norm_net()), torch.randn(100, 2, generator=generator)
    params = index_params(_draws(network, 1, generator), 0)
    buffers = network.buffers()
    before = {name: value.clone() for name, value in buffers.items()}
    found = network.statistics(params, x, buffers)
    hidden = x @ params["0.weight"].T + params["0.bias"]
    torch.testing.assert_close(found["1.running_mean"], hidden.mean(0))
    torch.testing.assert_close(found["1.running_var"], hidden.var(0))
    assert same_params(buffers, before)


def test_running_statistics_of_many_rows_are_the_mean_over_batches(generator):
    network, x = Network(batch_norm_net()), torch.randn(600, 2, generator=generator)
    params = index_params(_draws(network, 1, generator), 0)
    found = network.statistics(params, x, network.buffers())
    hidden = x @ params["0.weight"].T + params["0.bias"]
    torch.testing.assert_close(found["1.running_mean"], hidden.mean(0))
    torch.testing.assert_close(found["1.running_var"], torch.stack([part.var(0) for part in hidden.split(200)]).mean(0))
    assert found["1.num_batches_tracked"] == 3


def test_statistics_of_frozen_layers_stay_and_dropout_is_off(generator):
    net = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3), nn.BatchNorm1d(3))
    network = Network(net, ["1.weight", "1.bias"])
    assert network.statistics_names == ["4.running_mean", "4.running_var", "4.num_batches_tracked"]
    x, params = torch.randn(50, 2, generator=generator), Network(net).params()
    first, second = (network.statistics(params, x, network.buffers()) for _ in range(2))
    assert same_params(first, second)
    assert (first["1.running_mean"] == 0).all()
    hidden = net.eval()[:4](x)
    torch.testing.assert_close(first["4.running_mean"], hidden.mean(0).detach())


def test_a_network_without_running_statistics_has_none():
    assert Network(mlp()).statistics_names == []


# --- training mode and evaluation mode -------------------------------------------------------------------------------


class _Functional(nn.Module):
    """Dropout that no module announces."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.linear(x), 0.2, self.training)


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(2, 1, 4, dropout=0.0, batch_first=True)


STEADY = {
    "an mlp": (mlp, (), True),
    "layer norm": (lambda: nn.Sequential(nn.Linear(2, 4), nn.LayerNorm(4), nn.Linear(4, 1)), (), True),
    "dropout of nothing": (lambda: nn.Sequential(nn.Linear(2, 1), nn.Dropout(0.0)), (), True),
    "batch norm": (batch_norm_net, (), False),
    "frozen batch norm": (batch_norm_net, ("1.weight", "1.bias"), True),
    "dropout": (lambda: nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.1), nn.Linear(4, 1)), (), False),
    "dropout in a function": (_Functional, (), False),
    "attention": (lambda: nn.Sequential(nn.Unflatten(1, (1, 2)), _encoder()), (), True),
}  # fmt: skip


@pytest.mark.parametrize(("make", "frozen", "expected"), STEADY.values(), ids=STEADY)
def test_a_network_knows_whether_training_mode_is_evaluation_mode(make, frozen, expected):
    network, x = Network(make(), frozen), torch.randn(40, 2)
    state = torch.get_rng_state()
    assert network.is_steady(network.params(), x, network.buffers()) is expected
    assert torch.equal(torch.get_rng_state(), state)
    if expected:
        assert network.is_steady(network.params(), x[:1], network.buffers())


def test_batch_statistics_of_a_single_row_are_not_steady():
    network = Network(batch_norm_net())
    assert not network.is_steady(network.params(), torch.randn(1, 2), network.buffers())


def test_a_copy_may_be_changed_and_the_network_is_not():
    net = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    network = Network(net, frozen={"2.weight", "2.bias"})
    copy, x = network.copy(), torch.randn(6, 2)
    copy.modules(training=True)["1"].p = 0.0
    assert network.modules(training=True)["1"].p == 0.5 and net[1].p == 0.5
    assert not network.modules(training=False)["1"].training and network.modules(training=True)["1"].training
    assert not copy.modules(training=True)["2"].training  # frozen, as in the network
    buffers = network.buffers()
    assert torch.equal(copy(copy.params(), x, buffers=buffers, training=True), net.eval()(x))


def test_a_copy_holds_what_the_network_holds():
    net, x = mlp(), torch.randn(5, 2)
    held = {"0.weight": torch.zeros_like(net[0].weight)}
    network = Network(net, held=held)
    assert torch.equal(network.copy()({}, x), network({}, x))
    assert not torch.equal(network({}, x), net(x))
