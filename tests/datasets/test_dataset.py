"""Data sets split, fold and standardise without losing or repeating a row."""

import pytest
import torch

from knowable.datasets import Dataset, linear
from knowable.errors import InvalidArgument, InvalidData


def numbered(n: int) -> Dataset:
    """Rows that carry their own number."""
    count = torch.arange(float(n))
    return Dataset(name="numbered", x=count.unsqueeze(1), y=count.clone(), x_names=("row",), y_name="row")


@pytest.mark.parametrize(("n", "test", "held_out"), [(10, 0.2, 2), (133, 0.2, 27), (2, 0.01, 1), (3, 0.99, 2)])
def test_split_is_disjoint_complete_and_of_the_asked_size(n, test, held_out, seed):
    train, held = numbered(n).split(seed, test=test)
    assert len(held) == held_out
    assert sorted([*train.y.tolist(), *held.y.tolist()]) == list(range(n))
    assert torch.equal(train.x[:, 0], train.y) and torch.equal(held.x[:, 0], held.y)


def test_split_repeats_on_the_same_seed_and_changes_with_it(seed):
    data = numbered(50)
    assert torch.equal(data.split(seed)[1].y, data.split(seed)[1].y)
    assert not torch.equal(data.split(seed)[1].y, data.split(seed + 1)[1].y)


def test_splitting_leaves_the_global_generator_alone(seed):
    before = torch.get_rng_state()
    numbered(20).split(seed)
    assert torch.equal(torch.get_rng_state(), before)


def test_folds_hold_out_every_row_once_in_even_parts(seed):
    folds = numbered(23).folds(5, seed=seed)
    assert sorted(row for _, held in folds for row in held.y.tolist()) == list(range(23))
    assert sorted(len(held) for _, held in folds) == [4, 4, 5, 5, 5]
    for train, held in folds:
        assert set(train.y.tolist()).isdisjoint(held.y.tolist())
        assert len(train) + len(held) == 23


def test_a_dataset_unpacks_into_inputs_and_outcomes():
    data = numbered(4)
    x, y = data
    assert x is data.x and y is data.y


def test_standardised_data_have_mean_zero_and_deviation_one(seed):
    data, _ = linear(n=500, d=3, seed=seed).standardised()
    torch.testing.assert_close(data.x.mean(0), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(data.x.std(0, correction=0), torch.ones(3), atol=1e-5, rtol=0)
    assert abs(data.y.mean().item()) < 1e-5 and abs(data.y.std(correction=0).item() - 1) < 1e-5
    assert data.truth is None


@pytest.mark.parametrize("test", [0.0, 1.0, -0.1])
def test_an_impossible_share_is_refused(test):
    with pytest.raises(InvalidArgument, match="test"):
        numbered(10).split(0, test=test)


def test_one_row_cannot_be_split():
    with pytest.raises(InvalidData, match="at least 2 rows"):
        numbered(1).split()


def test_more_folds_than_rows_are_refused():
    with pytest.raises(InvalidArgument, match="k must be"):
        numbered(3).folds(4)


@pytest.mark.parametrize(
    ("x", "y", "extra", "message"),
    [
        (torch.zeros(3), torch.zeros(3), {}, "x must be"),
        (torch.zeros(3, 1), torch.zeros(3, 1), {}, "y must have shape"),
        (torch.zeros(3, 1), torch.zeros(3), {"classes": ("a", "b")}, "index classes"),
        (torch.zeros(3, 1), torch.zeros(3), {"x_units": ("m", "s")}, "x_units"),
    ],
)
def test_shapes_that_do_not_belong_together_are_refused(x, y, extra, message):
    with pytest.raises(ValueError, match=message):
        Dataset(name="bad", x=x, y=y, x_names=("x",), y_name="y", **extra)
