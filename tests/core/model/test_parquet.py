"""Tests of Parquet and Arrow files as data: every row once, in bounded memory, and errors that say where."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest
import torch

import knowable as kn
from knowable.core.support.processes import Processes

ROWS = 1000


def table(seed: int = 0, rows: int = ROWS) -> pa.Table:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    y = x @ torch.tensor([1.0, -2.0], dtype=torch.float64) + 0.1 * torch.randn(rows, generator=generator).double()
    return pa.table({"a": x[:, 0].numpy(), "b": x[:, 1].numpy(), "id": list(range(rows)), "y": y.numpy()})


@pytest.fixture
def file(tmp_path):
    pq.write_table(table(), tmp_path / "rows.parquet", row_group_size=90)
    return tmp_path / "rows.parquet"


def epoch(data: kn.Data, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(seed)
    batches = list(data.source)
    assert len(batches) == len(data.source)
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)


def test_an_epoch_has_every_row_once_in_an_order_that_follows_from_the_seed(file):
    data = kn.Data.parquet(file, target="y", batch_size=64)
    assert data.size == ROWS
    data.source.buffer = 200  # of several row groups
    x, y = epoch(data)
    whole = torch.tensor(table().to_pandas()[["a", "b", "id"]].to_numpy(), dtype=torch.float32)
    order = x[:, 2].long()
    assert order.sort().values.equal(torch.arange(ROWS)) and not order.equal(torch.arange(ROWS))
    assert x.equal(whole[order]) and y.equal(torch.tensor(table()["y"].to_numpy(), dtype=torch.float32)[order])
    assert epoch(data)[0].equal(x) and not epoch(data, seed=1)[0].equal(x)
    groups = (order[:128] // 90).unique()  # a batch has rows of several row groups
    assert len(groups) > 1
    assert torch.cat([each for each, _ in data.source.in_order()])[:, 2].equal(torch.arange(ROWS).float())


def test_columns_are_chosen_by_name_and_whole_numbers_stay_whole(file):
    data = kn.Data.parquet(str(file), target="id", features=["b", "a"], batch_size=1000, shuffle=False)
    ((x, y),) = list(data.source)
    assert x.shape == (ROWS, 2) and x[:, 1].equal(torch.tensor(table()["a"].to_numpy()).float())
    assert y.dtype == torch.int64 and y.equal(torch.arange(ROWS))
    two = kn.Data.parquet(file, target=["a", "b"], features=["id"], shuffle=False)
    assert next(iter(two.source))[1].shape == (1000, 2)


def test_arrow_files_and_folders_of_several_are_read_too(tmp_path):
    (tmp_path / "inside").mkdir()
    pyarrow.feather.write_feather(table(), tmp_path / "1.feather", compression="uncompressed", chunksize=300)
    pq.write_table(table(1, 50), tmp_path / "inside" / "2.parquet")
    data = kn.Data.parquet(tmp_path, target="y", features=["a", "b"])
    assert data.size == ROWS + 50 and len(data.source.blocks) == 5
    assert sum(len(y) for _, y in data.source) == ROWS + 50


def test_a_fit_is_that_of_the_same_rows_in_memory(file):
    """The tolerance is a fifth of the posterior's scale, 0.003: batches keep the optimiser at a distance."""
    settings = {"epochs": 200, "learning_rate": 0.02}
    prior = kn.Normal(1.0)
    files = kn.Data.parquet(file, target="y", features=["a", "b"], batch_size=250)
    found = kn.MAP(**settings).fit(kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(noise=0.1), prior), files)
    rows = table().to_pandas()
    memory = (torch.tensor(rows[["a", "b"]].to_numpy()), torch.tensor(rows["y"].to_numpy()))
    exact = kn.ExactLinear().fit(kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(noise=0.1), prior), memory)
    for name, value in exact.mean().items():
        torch.testing.assert_close(found.mean()[name], value, atol=6e-4, rtol=0)


def test_the_share_of_a_process_is_row_groups_of_its_own(file):
    source = kn.Data.parquet(file, target="y", batch_size=64).source
    shares = [source.share(Processes(rank, 3)) for rank in range(3)]
    assert sum(each.size for each in shares) == ROWS and all(each.size > 0 for each in shares)
    numbers = torch.cat([x[:, 2] for each in shares for x, _ in each.in_order()])
    assert numbers.sort().values.equal(torch.arange(ROWS).float())
    assert source.share(Processes(0, 13)) is None  # more processes than row groups: each takes its part of batches


def test_a_missing_value_is_named_by_column_file_and_row_group(tmp_path):
    values = [1.0] * 95 + [None] + [1.0] * 4
    pq.write_table(pa.table({"a": values, "y": [0.0] * 100}), tmp_path / "gap.parquet", row_group_size=30)
    data = kn.Data.parquet(tmp_path / "gap.parquet", target="y")
    with pytest.raises(kn.InvalidData, match=r"Column 'a' has 1 missing values in row group 3 of .*gap\.parquet"):
        list(data.source)
    values = [1.0] * 95 + [float("nan")] + [1.0] * 4
    pq.write_table(pa.table({"a": values, "y": [0.0] * 100}), tmp_path / "nan.parquet", row_group_size=30)
    with pytest.raises(kn.InvalidData, match=r"Column 'a' has 1 values that are NaN or infinite in row group 3"):
        list(kn.Data.parquet(tmp_path / "nan.parquet", target="y").source)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"target": "z"}, kn.InvalidData, r"rows\.parquet has no column 'z'. It has a, b, id, y"),
        ({"target": "y", "features": ["a", "no"]}, kn.InvalidData, "has no column 'no'"),
        ({"target": "y", "features": "a"}, kn.InvalidType, "features must be names in a list"),
        ({"target": "y", "batch_size": 0}, kn.InvalidArgument, "batch_size must be"),
    ],
)
def test_columns_that_are_not_there_are_refused_before_anything_is_read(file, change, error, said):
    with pytest.raises(error, match=said):
        kn.Data.parquet(file, **change)


def test_files_that_are_not_there_damaged_or_of_words_are_refused(tmp_path):
    with pytest.raises(kn.InvalidData, match="There is no file"):
        kn.Data.parquet(tmp_path / "none.parquet", target="y")
    with pytest.raises(kn.InvalidData, match="has no file that ends in"):
        kn.Data.parquet(tmp_path, target="y")
    (tmp_path / "rows.csv").write_text("a,y\n1,2\n")
    with pytest.raises(kn.InvalidArgument, match="does not end in"):
        kn.Data.parquet(tmp_path / "rows.csv", target="y")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(kn.InvalidData, match=r"bad\.parquet cannot be read"):
        kn.Data.parquet(tmp_path / "bad.parquet", target="y")
    pq.write_table(pa.table({"a": ["red", "blue"], "y": [0.0, 1.0]}), tmp_path / "words.parquet")
    with pytest.raises(kn.InvalidData, match=r"Column 'a' of .*words\.parquet has string and no numbers"):
        kn.Data.parquet(tmp_path / "words.parquet", target="y")
    pq.write_table(pa.table({"a": pa.array([], pa.float64()), "y": pa.array([], pa.float64())}), tmp_path / "e.parquet")
    with pytest.raises(kn.InvalidData, match="has no rows"):
        kn.Data.parquet(tmp_path / "e.parquet", target="y")
