"""Several inputs: what networks take, how rows are cut, and that a fit is the same as with one tensor."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils.data import DataLoader, Dataset, TensorDataset

import knowable as kn
from knowable.core.compiling.recorder import Recorded
from knowable.core.network.inputs import Inputs, as_rows


class Joined(nn.Module):
    """Takes two parts of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(2, 5), nn.Linear(3, 5), nn.Linear(5, 1)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(left) + self.right(right)))


class Whole(nn.Module):
    """The same network of one tensor."""

    def __init__(self, net: Joined) -> None:
        super().__init__()
        self.left, self.right, self.head = net.left, net.right, net.head

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.left(x[:, :2].contiguous()) + self.right(x[:, 2:].contiguous())))


class Nested(Joined):
    def forward(self, parts: dict[str, tuple[Tensor, ...]]) -> Tensor:
        return super().forward(parts["left"][0], parts["right"][0])


def problem(rows: int = 24) -> tuple[Joined, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(rows, 5)
        return Joined(), x, x.sum(1, keepdim=True).sin()


def cut(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[:, :2].contiguous(), x[:, 2:].contiguous()


def named(x: Tensor) -> dict[str, Tensor]:
    return dict(zip(("left", "right"), cut(x), strict=True))


class Rows(Dataset):
    def __init__(self, x: Tensor, y: Tensor, kind: str):
        self.x, self.y, self.kind = x, y, kind

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int):
        left, right = self.x[row, :2], self.x[row, 2:]
        if self.kind == "tuple":
            return (left, right), self.y[row]
        return {"left": left, "right": right, "labels": self.y[row]}


# --- the class --------------------------------------------------------------------------------------------------------


def test_inputs_are_cut_and_joined_as_each_of_their_tensors():
    x = torch.arange(12.0).view(6, 2)
    ids = torch.arange(6)
    both = as_rows({"a": x, "b": (ids,)})
    assert len(both) == both.shape[0] == 6
    index = torch.tensor([4, 1])
    for cut_one, cut_both in [
        (lambda v: v[1:4], both[1:4]),
        (lambda v: v[index], both[index]),
        (lambda v: v.index_select(0, index), both.index_select(0, index)),
        (lambda v: v.split(4)[1], both.split(4)[1]),
        (lambda v: v.tensor_split(4)[0], both.tensor_split(4)[0]),
        (lambda v: torch.cat([v[:2], v[5:]]), torch.cat([both[:2], both[5:]])),
        (lambda v: v[0].unsqueeze(0), both[0].unsqueeze(0)),
    ]:
        assert isinstance(cut_both, Inputs)
        assert torch.equal(cut_both.tree["a"], cut_one(x))
        assert torch.equal(cut_both.tree["b"][0], cut_one(ids))


def test_only_floating_point_follows_a_change_of_dtype():
    both = as_rows({"a": torch.ones(2, 2), "b": torch.arange(2)}).to(torch.float64)
    assert [each.dtype for each in both.leaves] == [torch.float64, torch.int64]


def test_vmap_passes_inputs_through_or_maps_over_their_rows():
    both = as_rows(cut(torch.arange(20.0).view(4, 5)))
    scale = torch.tensor([1.0, 2.0])
    found = vmap(lambda s, x: s * x.tree[1].sum(), in_dims=(0, None))(scale, both)
    assert torch.equal(found, scale * both.tree[1].sum())
    assert torch.equal(vmap(lambda x: x.tree[0].sum())(both), both.tree[0].sum(1))


@pytest.mark.parametrize("mode", ["eager", "traced"])
def test_a_recorded_graph_takes_the_tensors_of_inputs(mode):
    graph = Recorded(lambda w, x: w * x.tree["a"] + x.tree["b"], mode)
    for rows in (2, 3, 2):
        x = as_rows({"a": torch.randn(rows), "b": torch.randn(rows)})
        assert torch.equal(graph(torch.tensor(2.0), x), 2 * x.tree["a"] + x.tree["b"])


@pytest.mark.parametrize("use", [lambda x: x.amin(0), lambda x: x - torch.ones(2), lambda x: torch.cdist(x, x)])
def test_what_only_one_tensor_can_do_is_refused(use):
    with pytest.raises(kn.Unsupported, match=r"one tensor of numbers.*several inputs.*0 \(2, 1\) float32"):
        use(as_rows((torch.ones(2, 1), torch.ones(2))))


# --- fits are the same as with one tensor ----------------------------------------------------------------------------

METHODS = [
    kn.MAP(epochs=3, batch_size=7),
    kn.MeanFieldVI(epochs=3, batch_size=7),
    kn.NaturalVI(epochs=3),
    kn.Laplace(epochs=3),
    kn.Laplace(epochs=3, structure="full"),
    kn.SWAG(epochs=2, snapshots=3, rank=2),
    kn.MCDropout(epochs=3),
    kn.DeepEnsemble(3, epochs=3),
    kn.SGLD(draws=4, warmup=4, chains=2, steps=2, step_size=1e-4, start="network"),
]


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
@pytest.mark.parametrize("method", METHODS, ids=lambda m: type(m).__name__)
def test_a_fit_with_several_inputs_is_bit_for_bit_that_with_one(method):
    net, x, y = problem()
    one = method.fit(kn.Model(Whole(net), kn.Gaussian(0.3)), (x, y), progress=False)
    by_name = method.fit(kn.Model(net, kn.Gaussian(0.3)), (named(x), y), progress=False)
    expected, found = one.predict(x, samples=4), by_name.predict(named(x), samples=4)
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.std, expected.std)
    blocks = torch.cat([each.mean for each in by_name.predict_stream(named(x), samples=4, max_memory="4KB")])
    torch.testing.assert_close(blocks, expected.mean)  # blocks of other sizes round differently


def test_tuples_nested_inputs_arrays_and_other_mappings_are_the_same():
    net, x, y = problem()
    inner = Nested()
    inner.load_state_dict(net.state_dict())
    method, left_right = kn.MAP(epochs=2), cut(x)
    expected = method.fit(kn.Model(net, kn.Gaussian(0.3)), (named(x), y), progress=False).mean()
    for module, given in [
        (net, left_right),
        (net, {k: v.numpy() for k, v in named(x).items()}),
        (net, collections.UserDict(named(x))),
        (inner, ({"left": left_right[:1], "right": left_right[1:]},)),
        (inner, {"parts": {"left": left_right[:1], "right": left_right[1:]}}),
    ]:
        found = method.fit(kn.Model(module, kn.Gaussian(0.3)), (given, y), progress=False).mean()
        assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("kind", ["tuple", "dict"])
def test_loaders_give_several_inputs(kind):
    net, x, y = problem()
    model, method = kn.Model(net, kn.Gaussian(0.3)), kn.MAP(epochs=2)
    reference = kn.Model(Whole(net), kn.Gaussian(0.3))
    loader = DataLoader(Rows(x, y, kind), batch_size=8)
    data = loader if kind == "tuple" else kn.Data(loader, target="labels")
    assert kind == "tuple" or data.size == len(x)
    found = method.fit(model, data, progress=False)
    expected = method.fit(reference, DataLoader(TensorDataset(x, y), batch_size=8), progress=False)
    assert all(torch.equal(found.mean()[name], value) for name, value in expected.mean().items())
    assert torch.equal(found.predict(data).mean, expected.predict(x).mean)


def test_a_dict_in_memory_and_a_dataset_of_dicts_have_a_named_target():
    net, x, y = problem()
    model = kn.Model(net, kn.Gaussian(0.3))
    memory = kn.Data({**named(x), "labels": y}, target="labels")
    assert repr(memory) == "Data(x=Inputs(left (24, 2) float32, right (24, 3) float32), y=(24, 1))"
    found = kn.MAP(epochs=2).fit(model, memory, progress=False).mean()
    expected = kn.MAP(epochs=2).fit(model, (named(x), y), progress=False).mean()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
    dataset = kn.Data(Rows(x, y, "dict"), target="labels")
    assert kn.MAP(epochs=2).fit(model, dataset, progress=False).predict(dataset).mean.shape == (24, 1)


def test_own_loops_log_likelihoods_and_exports_take_several_inputs():
    net, x, y = problem()
    model, reference = kn.Model(net, kn.Gaussian(0.3)), kn.Model(Whole(net), kn.Gaussian(0.3))
    params = model.params()
    assert torch.equal(model.log_likelihood(params, named(x), y), reference.log_likelihood(params, x, y))
    losses = []
    for own, given in ((model, cut(x)), (reference, x)):
        torch.manual_seed(0)
        losses.append(kn.MeanFieldVI().objective(own, given, 24)(given, y)[0])
    assert torch.equal(*losses)
    draws = model.prior_predict(named(x), samples=3, generator=torch.Generator().manual_seed(0))
    assert draws.mean.shape == (24, 1)
    posterior = kn.MAP(epochs=1).fit(model, (named(x), y), progress=False)
    pytest.importorskip("arviz_base")
    tree = posterior.to_arviz(named(x), y)
    assert tree["log_likelihood"]["y"].shape[-2:] == (24, 1) or tree["log_likelihood"]["y"].shape[-1] == 24


def test_methods_are_compared_on_several_inputs():
    net, x, y = problem()
    by_row = []
    for model, given in ((kn.Model(net, kn.Gaussian(0.3)), named(x)), (kn.Model(Whole(net), kn.Gaussian(0.3)), x)):
        found = kn.compare(model, (given, y), methods={"map": kn.MAP(epochs=2)}, cv=2, progress=False)
        by_row.append(found.by_row("map"))
    assert by_row[0] == by_row[1]


# --- what is wrong is said --------------------------------------------------------------------------------------------

NET, X, Y = problem()


def said(error, call) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def fit(x, y=Y, net=NET):
    return kn.MAP(epochs=1).fit(kn.Model(net, kn.Gaussian(0.3)), (x, y), progress=False)


WRONG = {
    "an unknown name": (
        lambda: fit({**named(X), "labels": Y}),
        kn.InvalidData,
        "forward of Joined takes (left, right), but x has 'labels', which it does not take",
    ),
    "a missing name": (
        lambda: fit({"left": X[:, :2]}),
        kn.InvalidData,
        "but x has 'left': missing",
    ),
    "too many": (lambda: fit((*cut(X), X)), kn.InvalidData, "takes (left, right), but x is a tuple of 3 inputs"),
    "rows that differ": (
        lambda: fit({"left": X[:5, :2], "right": X[:, 2:]}),
        kn.InvalidData,
        "same number of rows, got x['left'] with 5, x['right'] with 24",
    ),
    "another number of targets": (lambda: fit(named(X), Y[:3]), kn.InvalidData, "got x (24,) and y (3, 1)"),
    "missing values": (
        lambda: fit({"left": X[:, :2], "right": torch.full((24, 3), torch.nan)}),
        kn.InvalidData,
        "x['right'] has 72 missing or infinite values, the first in row 0, column 0",
    ),
    "another shape": (
        lambda: fit({"left": X[:, :2], "right": X[:, 3:]}),
        kn.InvalidData,
        "x with left (24, 2) float32, right (24, 2) float32: Linear 'right' expects 3 features, got 2",
    ),
    "no inputs": (lambda: fit({}), kn.InvalidData, "x has no inputs"),
    "text": (lambda: fit({"left": X[:, :2], "right": "a"}), kn.InvalidType, "x['right'] must be a tensor"),
    "a dict without a target": (
        lambda: kn.MAP().fit(kn.Model(NET, kn.Gaussian()), {**named(X), "labels": Y}),
        kn.InvalidType,
        "kn.Data(..., target=...)",
    ),
    "batches without a target": (
        lambda: kn.MAP().fit(kn.Model(NET, kn.Gaussian()), DataLoader(Rows(X, Y, "dict"))),
        kn.InvalidData,
        "is a dict with 'left', 'right', 'labels': say which is the target",
    ),
    "a target that is not there": (
        lambda: kn.Data({**named(X), "labels": Y}, target="label"),
        kn.InvalidData,
        "target='label' is not there: data has 'left', 'right', 'labels'",
    ),
    "a target of pairs": (
        lambda: kn.MAP().fit(kn.Model(NET, kn.Gaussian()), kn.Data(DataLoader(Rows(X, Y, "tuple")), target="y")),
        kn.InvalidData,
        "target='y' is for batches that are dicts, got list",
    ),
    "three tensors": (
        lambda: kn.MAP().fit(kn.Model(NET, kn.Gaussian()), TensorDataset(*cut(X), Y)),
        kn.InvalidType,
        "Several inputs go in a tuple or a dict: ((a, b), y)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_inputs_are_refused_by_name(case):
    call, error, wanted = WRONG[case]
    assert wanted in said(error, call)


def test_a_misspelt_name_is_refused_where_forward_takes_any():
    class Anything(Joined):
        def forward(self, left: Tensor, right: Tensor, mask: Tensor | None = None, **kwargs: Tensor) -> Tensor:
            return super().forward(left, right)

    wanted = "forward of Anything takes (left, right, mask, kwargs), but x has 'masks', which it does not take: did you"
    assert wanted in said(kn.InvalidData, lambda: fit({**named(X), "masks": X}, net=Anything()))
    fit({**named(X), "something_else": X}, net=Anything())


def test_masks_of_another_shape_are_named_with_their_shapes():
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            return self.head((self.embed(input_ids) * attention_mask.unsqueeze(-1)).mean(1))

    ids = torch.randint(9, (6, 5))
    model, y = kn.Model(Masked(), kn.Categorical()), torch.arange(6) % 2
    x = {"input_ids": ids, "attention_mask": torch.ones(6, 4, dtype=torch.long)}
    wanted = "input_ids (6, 5) int64, attention_mask (6, 4) int64"
    assert wanted in said(kn.InvalidData, lambda: kn.MAP().fit(model, (x, y)))
    x = {"input_ids": ids.where(ids != ids[4, 2], 12), "attention_mask": torch.ones(6, 5, dtype=torch.long)}
    assert "has 9 embeddings" in said(kn.InvalidData, lambda: kn.MAP().fit(model, (x, y)))


def test_whole_numbers_become_floats_only_where_the_network_needs_them():
    net, x, y = problem()
    whole = {"left": np.arange(48).reshape(24, 2) % 3, "right": x[:, 2:]}
    posterior = fit(whole, y, net)
    expected = fit({"left": torch.as_tensor(whole["left"]).float(), "right": x[:, 2:]}, y, net)
    assert torch.equal(posterior.mean()["head.weight"], expected.mean()["head.weight"])
