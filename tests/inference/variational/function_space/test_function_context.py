from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn
from knowable.core.model.data import as_data
from knowable.inference.variational.function_space.function_space import (
    POOL,
    box,
    check_context,
    context_pool,
    some_rows,
)


def model(inputs: int = 2) -> kn.Model:
    return kn.Model(nn.Linear(inputs, 1), kn.Gaussian(0.1))


def data(x: Tensor) -> kn.Data:
    return as_data((x, torch.zeros(len(x), 1)), model(x.shape[1]))


def pool(context, x: Tensor, *, margin: float = 0.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return context_pool(context, data(x), model(x.shape[1]), margin=margin, generator=generator)


def test_box_is_filled_evenly_and_no_wider_than_its_margin(seed):
    x = torch.tensor([[0.0, -1.0], [2.0, 3.0], [1.0, 0.0]])
    points = pool("box", x, margin=0.25, seed=seed)
    low, high = torch.tensor([-0.5, -2.0]), torch.tensor([2.5, 4.0])
    assert points.shape == (POOL, 2)
    assert (points >= low).all() and (points <= high).all()
    # a mean of P uniform numbers has the standard error width / sqrt(12 P)
    error = (high - low) / (12 * POOL) ** 0.5
    assert ((points.mean(0) - (low + high) / 2).abs() < 5 * error).all()


def test_input_that_never_changes_stays_as_it_is():
    points = pool("box", torch.tensor([[0.0, 1.0], [2.0, 1.0]]), margin=0.5)
    assert (points[:, 1] == 1).all()


@pytest.mark.parametrize("as_loader", [False, True], ids=["tensors", "loader"])
def test_ends_and_rows_are_those_of_all_data(as_loader, seed, generator):
    x = torch.randn(50, 3)
    rows = data(x)
    if as_loader:
        rows = as_data(DataLoader(TensorDataset(x, torch.zeros(50, 1)), batch_size=8, shuffle=True), model(3))
    low, high = box(rows)
    assert torch.equal(low, x.amin(0)) and torch.equal(high, x.amax(0))
    some = some_rows(rows, 20, generator)
    assert some.shape == (20, 3)
    where = [(x == row).all(1).nonzero().item() for row in some]
    assert len(set(where)) == 20  # rows of the data, none twice
    assert torch.equal(some_rows(rows, 100, generator).sort(0).values, x.sort(0).values)


def test_every_row_is_as_likely_to_be_chosen(seed, generator):
    x = torch.arange(10.0).unsqueeze(1)
    rows = as_data(DataLoader(TensorDataset(x, torch.zeros(10, 1)), batch_size=3), model(1))
    trials = 600
    counts = torch.zeros(10)
    for _ in range(trials):
        counts[some_rows(rows, 4, generator).flatten().long()] += 1
    error = (trials * 0.4 * 0.6) ** 0.5  # binomial
    assert ((counts - 0.4 * trials).abs() < 5 * error).all()


def test_default_is_a_box_for_few_numbers_and_data_for_everything_else():
    few, many = torch.randn(12, 3), torch.randn(12, 17)
    assert len(pool("auto", few)) == POOL
    assert torch.equal(pool("auto", many).sort(0).values, many.sort(0).values)


def test_points_of_one_s_own_are_taken_whole_in_the_model_s_type():
    given = torch.randn(POOL + 5, 2, dtype=torch.float64)
    assert torch.equal(pool(given, torch.randn(4, 2)), given.float())


def test_function_of_one_s_own_is_asked_for_a_pool_with_the_generator():
    asked = []

    def draw(count, generator):
        asked.append(count)
        return torch.rand(count, 2, generator=generator)

    first, second = (pool(draw, torch.randn(4, 2), seed=3) for _ in range(2))
    assert asked == [POOL, POOL] and torch.equal(first, second)


@pytest.mark.parametrize("context", ["grid", 3, torch.zeros(0, 2), torch.tensor(1.0), torch.Tensor, None])
def test_what_is_no_context_is_refused_by_name(context):
    with pytest.raises(kn.KnowableError, match="context"):
        check_context(context)


def test_points_that_the_network_cannot_take_are_refused():
    with pytest.raises(kn.InvalidData):
        pool(torch.randn(5, 3), torch.randn(4, 2))
    with pytest.raises(kn.InvalidData, match="context"):
        pool(torch.full((5, 2), torch.nan), torch.randn(4, 2))
    with pytest.raises(kn.InvalidData, match="context"):
        pool(lambda count, generator: None, torch.randn(4, 2))


def test_words_have_no_box():
    words = kn.Model(nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(6, 1)), kn.Gaussian(0.1))
    x = torch.randint(0, 5, (8, 3))
    rows = as_data((x, torch.zeros(8, 1)), words)
    with pytest.raises(kn.Unsupported, match="context='data'"):
        context_pool("box", rows, words, margin=0.5, generator=torch.Generator())
    points = context_pool("auto", rows, words, margin=0.5, generator=torch.Generator())
    assert points.dtype == torch.int64 and len(points) == 8
