"""Tests of data at the door: every source, its size, its order."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

import knowable as kn
from knowable.core.model.data import Data, as_data, as_input
from tests.core.cases import batch_norm_net, linear_model, mlp

X = torch.arange(20.0).view(10, 2)
Y = torch.arange(10.0)


class _Rows(Dataset):
    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int):
        return X[index], Y[index]


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


def _model() -> kn.Model:
    return kn.Model(nn.Linear(2, 1), kn.Gaussian(0.1))


def _frame():
    import pandas as pd

    return pd.DataFrame(X.numpy(), columns=["height", "width"]), pd.Series(Y.numpy(), name="target")


def _read_only(array: np.ndarray) -> np.ndarray:
    array = array.copy()
    array.setflags(write=False)
    return array


SOURCES = {
    "tensors": lambda: (X, Y),
    "a list": lambda: [X, Y],
    "a column": lambda: (X, Y.unsqueeze(1)),
    "double": lambda: (X.double(), Y.double()),
    "arrays": lambda: (X.numpy(), Y.numpy()),
    "nested lists": lambda: (X.tolist(), Y.tolist()),
    "an array with strides": lambda: (X.numpy()[::-1][::-1], Y.numpy()[::-1][::-1]),
    "a read-only array": lambda: (_read_only(X.numpy()), _read_only(Y.numpy())),
    "a tensor with gradient": lambda: (X.clone().requires_grad_(), Y),
    "a data frame": _frame,
    "whole-number targets": lambda: (X, Y.long()),
    "a tensor dataset": lambda: TensorDataset(X, Y),
    "a dataset": _Rows,
    "one of knowable's": lambda: kn.datasets.Dataset("rows", X, Y, ("a", "b"), "y"),
    "a subset": lambda: Subset(_Rows(), range(10)),
    "a loader": lambda: DataLoader(_Rows(), batch_size=4),
    "Data": lambda: Data((X, Y), 10),
    "Data of a loader": lambda: Data(DataLoader(_Stream(), batch_size=3), size=10),
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_every_kind_of_source_gives_the_same_rows_and_size(source):
    data = as_data(source(), _model())
    x, y = data.tensors
    order = y.flatten().argsort()  # a dataset is shuffled
    assert data.size == 10
    assert torch.equal(x[order], X)
    assert torch.equal(y[order], Y.unsqueeze(1))
    assert (x.dtype, y.dtype) == (torch.float32, torch.float32)
    assert not x.requires_grad


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_an_epoch_has_every_row_once_and_as_many_batches_as_it_says(source):
    data = as_data(source(), _model(), batch_size=4)
    batches = list(data.batches(4))
    assert len(batches) == data.batches_per_epoch(4)
    assert sorted(torch.cat([y for _, y in batches]).flatten().tolist()) == Y.tolist()
    assert all(torch.equal(x[:, 0] / 2, y.flatten()) for x, y in batches)


def test_the_order_depends_only_on_the_seed_and_the_epoch():
    data = as_data((X, Y))
    torch.manual_seed(1)
    first = [y.tolist() for _, y in data.batches(3, seed=5, epoch=2)]
    torch.manual_seed(2)
    torch.rand(10)
    assert [y.tolist() for _, y in data.batches(3, seed=5, epoch=2)] == first
    assert [y.tolist() for _, y in data.batches(3, seed=6, epoch=2)] != first
    assert [y.tolist() for _, y in data.batches(3, seed=5, epoch=3)] != first


def test_batching_leaves_the_global_random_state_alone():
    state = torch.get_rng_state()
    list(as_data((X, Y)).batches(3, seed=5))
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("skip", [0, 1, 3, 4])
@pytest.mark.parametrize("source", ["tensors", "a loader"])
def test_skipping_goes_on_where_an_epoch_was_left(source, skip):
    data = as_data(SOURCES[source](), _model())
    size = 3 if data.in_memory else 4
    all_of_it = [y.tolist() for _, y in data.batches(size, seed=1, epoch=1)]
    assert [y.tolist() for _, y in data.batches(size, seed=1, epoch=1, skip=skip)] == all_of_it[skip:]


def test_a_batch_as_large_as_the_data_is_the_data_in_order():
    data = as_data((X, Y))
    ((x, y),) = data.batches(10, seed=3)
    assert torch.equal(x, X)
    assert torch.equal(y, Y)
    assert list(data.batches(10, skip=1)) == []
    assert data.batches_per_epoch(10) == 1


def test_no_batch_of_one_row_is_left_over_that_batch_norm_could_not_take():
    # 9 = 4 + 4 + 1: statistics of a single row do not exist
    model = kn.Model(batch_norm_net(), kn.Gaussian(0.1))
    posterior = kn.MAP(epochs=2, batch_size=4).fit(model, (torch.randn(9, 2), torch.randn(9)))
    assert all(torch.isfinite(value).all() for value in posterior.mean().values())


SAMPLED = {
    "a subset at random": lambda rows: DataLoader(_Rows(), batch_size=2, sampler=SubsetRandomSampler(rows)),
    "batches of a sampler": lambda rows: DataLoader(
        _Rows(), batch_sampler=BatchSampler(SubsetRandomSampler(rows), batch_size=2, drop_last=False)
    ),
}


@pytest.mark.parametrize("make", SAMPLED.values(), ids=SAMPLED)
def test_a_sampler_decides_which_rows_there_are(make):
    data = as_data(make([1, 4, 5, 8]), _model())
    assert data.size == 4
    assert data.batches_per_epoch(2) == 2
    for rows in (data, data.batches(2)):
        assert sorted(torch.cat([y for _, y in rows]).flatten().tolist()) == [1.0, 4.0, 5.0, 8.0]


@pytest.mark.parametrize("make", SAMPLED.values(), ids=SAMPLED)
def test_rows_outside_the_sampler_are_never_seen(make):
    # exact inference sums over all rows it is given: on the subset, and on its loader
    chosen = [1, 4, 5, 8]
    model = _model()
    expected = kn.ExactLinear().fit(model, (X[chosen], Y[chosen]))
    torch.testing.assert_close(kn.ExactLinear().fit(model, make(chosen)).loc, expected.loc)


def test_a_loader_that_drops_its_last_batch_and_shuffles_is_read_whole_and_in_order_where_every_row_counts():
    data = as_data(DataLoader(_Rows(), batch_size=4, shuffle=True, drop_last=True), _model())
    assert data.size == 10
    assert data.batches_per_epoch(4) == 2
    assert torch.equal(data.tensors[1].flatten(), Y)


def test_rows_in_order_come_in_chunks_that_cover_all():
    x = torch.arange(10_000.0).view(-1, 1)
    chunks = list(as_data((x, x)))
    assert len(chunks) > 1
    assert torch.equal(torch.cat([part for part, _ in chunks]), x)


def test_parts_of_the_rows_stand_for_all_of_them(seed):
    # the sum over all rows, estimated by 16 parts of 640 rows each: within 5 standard errors
    x = torch.randn(4000, 1, generator=torch.Generator().manual_seed(seed)).exp()
    found = torch.tensor([scale * batch[0].sum().item() for scale, batch in Data((x, x), 4000).parts(2.56, seed=seed)])
    assert len(found) == 16
    error = found.std() / 4
    assert abs(found.mean() - x.sum()) < 5 * error
    rows = [len(batch[0]) for _, batch in Data((x, x), 4000).parts(2.56, seed=seed)]
    assert sum(rows) == 640 * 16  # 2.56 times the rows


def test_parts_are_all_rows_of_small_data_whether_in_memory_or_from_a_loader():
    x = torch.arange(20.0).unsqueeze(1)
    assert all(scale == 1.0 and batch[0] is x for scale, batch in Data((x, x), 20).parts(0.1, seed=0))
    loader = DataLoader(TensorDataset(x, x), batch_size=5)
    parts, same = Data(loader, 20).parts(1.0, seed=0), Data((x, x), 20, at_once=5).parts(1.0, seed=0)
    for (scale, batch), (other, rows) in zip(parts, same, strict=True):
        assert scale == other == 4.0 and torch.equal(batch[0], rows[0])


def test_whole_number_inputs_stay_whole_for_embeddings():
    model = kn.Model(nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 1)), kn.Gaussian(0.1))
    x, _ = as_data((torch.randint(5, (10, 2)).numpy(), Y), model).tensors
    assert x.dtype == torch.int64
    assert as_input([[1, 2]], model).dtype == torch.int64


def test_whole_numbers_become_real_ones_where_the_network_takes_only_those():
    x, _ = as_data((np.arange(20).reshape(10, 2), Y), _model()).tensors
    assert torch.equal(x, X)
    assert as_input([[1, 2]], _model()).dtype == torch.float32


def test_inputs_take_the_models_dtype():
    assert as_input(X.numpy(), linear_model()).dtype == torch.float64
    assert as_input(X.double(), _model()).dtype == torch.float32


def test_data_prints_its_shapes():
    assert repr(as_data((X, Y))) == "Data(x=(10, 2), y=(10,))"
    assert repr(Data(DataLoader(_Rows()), 10)) == "Data(DataLoader, size=10)"


def test_a_frame_of_booleans_and_numbers_is_numbers():
    import pandas as pd

    frame = pd.DataFrame({"height": X[:, 0].numpy(), "tall": X[:, 0].numpy() > 8})
    x, _ = as_data((frame, Y), _model()).tensors
    assert torch.equal(x, torch.stack([X[:, 0], (X[:, 0] > 8).float()], 1))


def test_a_frame_with_missing_whole_numbers_says_where():
    import pandas as pd

    frame = pd.DataFrame({"height": X[:, 0].numpy(), "floors": pd.array([1, 2, None, *range(7)], dtype="Int64")})
    with pytest.raises(kn.InvalidData, match=r"row 2, column 1|row 2.*floors"):
        as_data((frame, Y), _model())


# --- what is refused ------------------------------------------------------------------------------------------------


def _with(value: float, row: int, column: int) -> torch.Tensor:
    x = X.clone()
    x[row, column] = value
    return x


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_value_that_is_not_finite_is_refused_with_row_and_column(bad):
    with pytest.raises(
        kn.InvalidData, match=r"x has 1 missing or infinite value, .* row 7, column 1 \(counting from 0"
    ):
        as_data((_with(bad, 7, 1), Y), _model())
    with pytest.raises(kn.InvalidData, match=r"x has 1 missing or infinite value, .* row 7, column 1"):
        as_input(_with(bad, 7, 1).numpy(), _model())


def test_infinities_of_both_signs_do_not_cancel():
    x = _with(torch.inf, 3, 0)
    x[5, 1] = -torch.inf
    with pytest.raises(kn.InvalidData, match="2 missing or infinite values, the first in row 3, column 0"):
        as_data((x, Y), _model())


def test_values_so_large_that_their_sum_overflows_are_not_mistaken_for_infinite():
    x = torch.full((10, 2), 3e38)
    assert torch.equal(as_data((x, Y)).tensors[0], x)


def test_a_missing_pixel_is_found_by_its_place_behind_the_row():
    x = torch.zeros(4, 3, 2, 2)
    x[2, 1, 0, 1] = torch.nan
    with pytest.raises(kn.InvalidData, match=r"row 2, column \(1, 0, 1\)"):
        as_data((x, torch.zeros(4)))


@pytest.mark.parametrize(
    ("source", "error", "wanted"),
    [
        ((X, Y[:4]), kn.InvalidData, r"same number of rows, got x \(10, 2\) and y \(4,\)"),
        ((X[:0], Y[:0]), kn.InvalidData, r"x is empty: shape \(0, 2\) has no rows"),
        ((torch.tensor(3.0), Y), kn.InvalidData, "x must have rows"),
        ((3.0, 2.0), kn.InvalidData, "x must have rows"),
        ((X, 2.0), kn.InvalidData, r"same number of rows, got x \(10, 2\) and y \(\)"),
        ((X,), kn.InvalidType, r"data must be a pair \(x, y\), a Dataset or a DataLoader; got 1 items"),
        ((X, Y, Y), kn.InvalidType, r"data must be a pair .*; got 3 items"),
        (X, kn.InvalidType, r"data must be a pair .*; got Tensor"),
        ("rows.csv", kn.InvalidType, r"data must be a pair .*; got str"),
        (None, kn.InvalidType, r"data must be a pair .*; got NoneType"),
        ((["a"] * 10, Y), kn.InvalidType, r"x must be a tensor, an array or a data frame of numbers, got list"),
        ((np.array([[1, None]] * 10), Y), kn.InvalidType, r"x must be .* got ndarray: it holds Python objects"),
        ((X, ["yes"] * 10), kn.InvalidType, r"y must be .* of numbers, got list"),
        ((X[:, :1], Y), kn.InvalidData, r"cannot take x of shape \(10, 1\)"),
        ((X, torch.zeros(10, 3)), kn.InvalidData, r"y has shape \(10, 3\).*output .* has shape \(10, 1\)"),
        ((X, torch.full((10,), torch.nan)), kn.InvalidData, r"y has missing .* in row 0, 1, 2, 3, 4 and"),
        (Data((X, Y), 11), kn.InvalidArgument, "data.size is 11, but its tensors have 10 rows"),
        (_Stream(), kn.InvalidArgument, r"IterableDataset, whose number of rows is unknown.* Pass Data\(DataLoader"),
        (DataLoader(_Stream()), kn.InvalidArgument, r"number of rows is unknown.* Pass Data\(loader, size=N\)"),
        (Subset(_Rows(), []), kn.InvalidData, "data is empty"),
        (DataLoader(TensorDataset(X)), kn.InvalidData, r"Each batch of the data must be a pair \(x, y\)"),
        (DataLoader(_Rows(), batch_size=32, drop_last=True), kn.InvalidData, "batch"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_used_is_refused(source, error, wanted):
    with pytest.raises(error, match=wanted):
        list(as_data(source, _model()))


def test_a_text_column_is_refused_by_its_name():
    import pandas as pd

    frame = pd.DataFrame({"height": [1.0, 2.0], "city": ["Ulm", "Bonn"]})
    with pytest.raises(kn.InvalidType, match=r"x column 'city' holds \w+, not numbers\. Encode it first or drop it"):
        as_data((frame, [1.0, 2.0]))
    with pytest.raises(kn.InvalidType, match=r"y column 'city' holds"):
        as_data((frame[["height"]], frame["city"]))


def test_a_masked_array_is_not_taken_for_complete():
    masked = np.ma.masked_array(X.numpy(), mask=np.zeros(X.shape, dtype=bool))
    masked.mask[4, 1] = True
    with pytest.raises(kn.KnowableError, match=r"mask|row 4, column 1"):
        as_data((masked, Y))


@pytest.mark.parametrize("size", [0, -3, 2.5])
def test_the_size_of_data_is_checked(size):
    with pytest.raises(kn.KnowableError, match="size must be a whole number"):
        Data((X, Y), size)


def test_the_size_of_data_is_found():
    assert Data((X, Y)).size == Data((X.numpy(), Y.tolist())).size == Data(TensorDataset(X, Y)).size == 10
    assert Data(DataLoader(TensorDataset(X, Y), batch_size=3)).size == 10


def test_the_second_batch_of_a_loader_is_checked_too():
    loader = DataLoader(TensorDataset(_with(torch.nan, 7, 0), Y), batch_size=5)
    with pytest.raises(kn.InvalidData, match=r"x has 1 missing .* row 2, column 0"):
        list(as_data(loader, _model()))


def test_a_problem_in_the_validation_data_says_so():
    with pytest.raises(kn.InvalidData, match="validation"):
        as_data((_with(torch.nan, 7, 0), Y), kn.Model(mlp(), kn.Gaussian(0.1)), name="validation")


# --- weights on rows ------------------------------------------------------------------------------------------------

W = torch.arange(10.0) + 1


def test_weights_stay_with_their_rows_through_every_batch():
    data = as_data(Data((X, Y), 10, W), _model())
    for batches in (data.batches(4, seed=3), iter(data), [data.tensors]):
        seen = {}
        for x, y, w in batches:
            assert x.shape[0] == y.shape[0] == w.shape[0]
            seen |= dict(zip(y.flatten().tolist(), w.tolist(), strict=True))
        assert seen == dict(zip(Y.tolist(), W.tolist(), strict=True))


def test_weights_do_not_change_the_order_of_the_rows():
    plain, weighted = as_data((X, Y), _model()), as_data(Data((X, Y), 10, W), _model())
    for left, right in zip(plain.batches(4, seed=3, epoch=2), weighted.batches(4, seed=3, epoch=2), strict=True):
        assert torch.equal(left[0], right[0])


def test_weights_take_the_dtype_of_the_model_whatever_holds_them():
    for weights in (W, W.double(), W.numpy(), W.tolist()):
        data = as_data(Data((X, Y), 10, weights), _model())
        assert data.weights.dtype == torch.float32 and torch.equal(data.weights, W)
    assert "weighted" in repr(data)


def test_each_of_several_networks_may_have_its_own_weights():
    data = as_data(Data((X, Y), 10, torch.stack([W, W + 1], 1)), _model())
    assert [batch[2].shape for batch in data.batches(4)] == [(4, 2), (4, 2), (2, 2)]


@pytest.mark.parametrize(
    ("weights", "wanted"),
    [
        (W[:5], r"weights must have a number for each of 10 rows, got shape \(5,\)"),
        (torch.ones(10, 2, 2), "weights must have a number for each of 10 rows"),
        (-W, "weights must be 0 or above and not all 0"),
        (torch.zeros(10), "weights must be 0 or above and not all 0"),
        (W * torch.nan, "weights has 10 missing or infinite values"),
    ],
)
def test_weights_that_make_no_sense_are_refused(weights, wanted):
    with pytest.raises(kn.KnowableError, match=wanted):
        Data((X, Y), 10, weights)


def test_weights_of_a_loader_are_refused():
    with pytest.raises(kn.InvalidArgument, match="weights go with rows in memory"):
        Data(DataLoader(TensorDataset(X, Y)), 10, W)


def test_some_rows_are_a_sample_without_replacement_or_the_first_of_a_loader():
    x, y = torch.randn(50, 2), torch.arange(50.0)
    chosen, targets = as_data((x, y)).some(20, seed=3)
    assert chosen.shape == (20, 2) and len(targets.unique()) == 20
    assert torch.equal(x[targets.flatten().long()], chosen)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=7)
    assert torch.equal(as_data(loader).some(20, seed=3)[0], x[:20])


# --- streams without a length, and without an end --------------------------------------------------------------------


class _Endless(IterableDataset):
    """Rows 0, 1, 2, ... without an end; it notes how many were asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def __iter__(self):
        for number in itertools.count():
            self.asked += 1
            if self.asked > 100_000:
                raise AssertionError("the stream is read without an end")
            yield torch.tensor([number, 1.0]), torch.tensor([2.0 * number])


class _Batches:
    """The same as batches, from an iterable that is no DataLoader."""

    def __iter__(self):
        return iter(DataLoader(_Endless(), batch_size=8))


@pytest.mark.parametrize("kind", ["loader", "iterable"])
def test_an_epoch_of_an_endless_stream_is_as_many_rows_as_its_size(kind):
    stream = DataLoader(_Endless(), batch_size=8) if kind == "loader" else _Batches()
    data = as_data(Data(stream, size=20), linear_model())
    assert data.batches_per_epoch(99) == 3
    for batches in (data.batches(99), iter(data)):
        found = list(batches)
        assert [len(x) for x, _ in found] == [8, 8, 4]
        assert torch.equal(torch.cat([x for x, _ in found])[:, 0], torch.arange(20.0, dtype=torch.float64))
    assert len(list(data.batches(99, skip=2))) == 1
    assert data.tensors[1].flatten().tolist() == [2.0 * k for k in range(20)]


def test_no_more_of_a_stream_is_read_than_asked_for():
    stream = _Endless()
    data = Data(DataLoader(stream, batch_size=5), size=10)
    assert data.batches_per_epoch(1) == 2 and stream.asked == 0
    assert len(list(data.batches(1))) == 2 and stream.asked == 10


@pytest.mark.parametrize(
    "method",
    [
        kn.MAP(epochs=4),
        kn.MeanFieldVI(epochs=4),
        kn.Laplace(epochs=4),
        kn.SWAG(epochs=4, snapshots=3),
        kn.SGLD(draws=3, warmup=3, start="network", batch_size=4),
    ],
    ids=repr,
)
@pytest.mark.filterwarnings("ignore::knowable.errors.ConvergenceWarning", "ignore::knowable.errors.WorseThanNetwork")
def test_methods_end_on_an_endless_stream(method):
    data = Data(DataLoader(_Endless(), batch_size=8), size=20)
    posterior = method.fit(linear_model(), data)
    assert posterior.predict(data, samples=3).mean.shape == (20, 1)


def test_a_finite_iterable_that_is_shorter_than_its_size_is_read_to_its_end():
    data = Data(DataLoader(_Stream(), batch_size=2), size=100)
    count = len(list(_Stream()))
    assert sum(len(y) for _, y in data.batches(1)) == count < 100
