"""Ten million rows of twenty columns in a Parquet file: memory and time of an epoch, beside the same loop in PyTorch.

The file is generated, in row groups of 100,000 rows (about 840 MB of numbers). Two processes read it: a MAP fit of one
epoch on ``Data.parquet``, and a plain loop over pyarrow, which shuffles in blocks of as many rows, with the same
network, optimiser and batches. Of each the highest resident memory is taken, everything included, and the CPU time of
the epoch without imports.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.chain_memory import peak_memory
from benchmarks.study import Rows, describe, own_process, page, say, table

LIMIT = 2**30
COLUMNS, GROUP, BATCH = 20, 100_000, 4096
ROWS = {False: 10_000_000, True: 20_000}
BLOCK = 32 * 2**20 // (4 * (COLUMNS + 1))  # rows that are shuffled together
_HEADER = ("run", "peak MiB", "CPU seconds of the epoch", "rows a CPU second")


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """Both processes, one after the other."""
    count, found = ROWS[quick], {}
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        file = Path(folder) / "rows.parquet"
        for name in ("knowable", "PyTorch"):
            key = f"{name} {count}"
            if rows.get(key) is None:
                if not file.exists():
                    generate(file, count)
                rows.add(key, own_process("benchmarks.parquet", [name, str(file)], timeout=1500))
            found[name] = rows.get(key)
            say(f"{name}: {found[name]}")
    return describe("parquet", quick=quick, packages=("pyarrow",), rows=count, runs=found)


def generate(file: Path, rows: int) -> None:
    """A regression on normal columns, written a row group at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(COLUMNS, generator=generator)
    names = [f"x{number}" for number in range(COLUMNS)]
    schema = pa.schema([(name, pa.float32()) for name in (*names, "y")])
    with pq.ParquetWriter(file, schema, compression="none", use_dictionary=False) as writer:
        for first in range(0, rows, GROUP):
            x = torch.randn(min(GROUP, rows - first), COLUMNS, generator=generator)
            y = torch.tanh(x @ weight) + 0.1 * torch.randn(len(x), generator=generator)
            columns = {name: x[:, number].contiguous().numpy() for number, name in enumerate(names)}
            writer.write_table(pa.table({**columns, "y": y.numpy()}, schema=schema))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(COLUMNS, 32), nn.Tanh(), nn.Linear(32, 1))


def by_knowable(file: str) -> float:
    """One epoch of a MAP fit; its mean loss."""
    import knowable as kn

    data = kn.Data.parquet(file, target="y", batch_size=BATCH)
    model = kn.Model(network(), kn.Gaussian(noise=0.1))
    posterior = kn.MAP(epochs=1, learning_rate=0.003).fit(model, data, progress=False)
    return posterior.diagnostics.terms["loss"]


def by_pytorch(file: str) -> float:
    """The same steps without the library."""
    net = network()
    optimiser = torch.optim.Adam(net.parameters(), lr=0.003, fused=True)
    losses: list[float] = []
    for x, y in plain_batches(file):
        optimiser.zero_grad(set_to_none=True)
        prior = sum(0.5 * value.square().sum() for value in net.parameters())
        loss = (
            50.0 * (net(x).squeeze(1) - y).square().mean()
            + math.log(0.1 * math.sqrt(2 * math.pi))
            + prior / ROWS[False]
        )
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return sum(losses) / len(losses)


def plain_batches(file: str) -> Any:
    """Row groups in random order, and shuffled batches of blocks of them."""
    import pyarrow.parquet as pq

    with pq.ParquetFile(file) as opened:
        order, held, count = torch.randperm(opened.num_row_groups).tolist(), [], 0
        for number in order:
            read = opened.read_row_group(number, use_threads=False)
            part = torch.empty(len(read), COLUMNS + 1)
            for place, column in enumerate(read.columns):
                part[:, place] = torch.from_numpy(column.to_numpy())
            held.append(part)
            count += len(part)
            if count >= BLOCK or number == order[-1]:
                yield from _shuffled(torch.cat(held))
                held, count = [], 0


def _shuffled(rows: Tensor) -> Any:
    for chosen in torch.randperm(len(rows)).split(BATCH):
        batch = rows[chosen]
        yield batch[:, :-1], batch[:, -1]


def main() -> None:
    parser = argparse.ArgumentParser(description="One epoch, as a line of JSON.")
    parser.add_argument("name", choices=("knowable", "PyTorch"))
    parser.add_argument("file")
    given = parser.parse_args()
    torch.set_num_threads(1)
    import pyarrow.parquet

    import knowable

    work = by_knowable if given.name == "knowable" else by_pytorch
    rows = pyarrow.parquet.read_metadata(given.file).num_rows
    before, imported = peak_memory(), knowable.__version__
    begun = time.process_time()
    loss = work(given.file)
    seconds = time.process_time() - begun
    peak = max(peak_memory(), 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    found = {"peak": peak, "imports": before, "cpu_seconds": seconds, "rows": rows, "loss": loss, "version": imported}
    print(json.dumps(found))
    sys.stdout.flush()


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table."""
    title = f"One epoch of {run['rows']:,} rows x {COLUMNS} columns, batches of {BATCH:,}, one thread"
    lines = [_cells(name, each) for name, each in run["runs"].items()]
    return page(run, table(title, _HEADER, lines, _conclusion(run["runs"])))


def _cells(name: str, row: Mapping[str, Any]) -> list[str]:
    if "error" in row:
        return [name, f"failed: {row['error']}"]
    speed = row["rows"] / row["cpu_seconds"]
    return [
        name, f"{row['peak'] / 2**20:,.0f}", f"{row['cpu_seconds']:.1f}", f"{speed:,.0f}",
    ]  # fmt: skip


def _conclusion(runs: Mapping[str, Mapping[str, Any]]) -> str:
    if any("error" in each for each in runs.values()):
        return "Failed."
    ours, plain = runs["knowable"], runs["PyTorch"]
    within = "within" if ours["peak"] < LIMIT else "NOT within"
    return (
        f"The fit stayed {within} 1 GiB, of which {ours['imports'] / 2**20:,.0f} MiB are imports, and took "
        f"{ours['cpu_seconds'] / plain['cpu_seconds']:.2f} times the CPU time of the plain loop."
    )


if __name__ == "__main__":
    main()
