"""Tests of what a process makes of the data it is given; what needs others is in tests/engines."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

import knowable as kn
from knowable.core.model.data import as_data
from knowable.core.model.divided import divided
from knowable.core.model.row_source import OwnRows
from knowable.core.support.processes import ALONE, Processes

X, Y = torch.arange(20.0).unsqueeze(1), torch.arange(20.0)


def test_data_that_all_have_stay_as_they_are():
    rows = as_data((X, Y))
    assert divided(rows, ALONE, own=True) is rows
    assert divided(rows, Processes(1, 2), own=False) is rows
    assert not rows.divided


def test_a_loader_that_divides_rows_itself_is_refused_unless_it_is_said():
    data = TensorDataset(X, Y)
    loader = DataLoader(data, batch_size=5, sampler=DistributedSampler(data, 2, 0))
    with pytest.raises(kn.InvalidArgument, match=r"TorchDistributed\(shards=True\)"):
        divided(as_data(loader), Processes(0, 2), own=False)


def test_row_weights_are_not_for_rows_of_one_process():
    with pytest.raises(kn.Unsupported, match="shards=False"):
        divided(kn.Data((X, Y), weights=torch.ones(20)), Processes(0, 2), own=True)


def test_own_rows_come_once_an_epoch_in_as_many_batches_as_asked_for():
    rows = OwnRows((X, Y), at_once=8)
    rows.steps = 3
    torch.manual_seed(0)
    x, y = (torch.cat(each) for each in zip(*rows, strict=True))
    assert sorted(len(each) for each, _ in rows) == [6, 7, 7]
    assert y.sort().values.equal(Y) and x.squeeze(1).equal(y)
    assert torch.cat([each for _, each in rows.in_order()]).equal(Y)
    torch.manual_seed(0)
    assert torch.cat([each for _, each in rows]).equal(y)  # the order follows from the generator
