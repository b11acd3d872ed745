"""Time of an epoch: over data in memory, and whole fits of one epoch from a loader with workers.

In memory: knowable's batches and torch's DataLoader feed the same training step. The network is small, so that the
feeding shows: 60,000 rows in batches of 128 into one hidden layer of 32 units. From a loader: a million rows of 50
numbers, two workers; a fit has all that comes before and after its steps, and the plain loop has only its steps.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.harness import Case, Plan, Step
from benchmarks.networks import NUM_CLASSES, TRAIN_SIZE, classification_data
from benchmarks.peers import adam

Epoch = Callable[[], Iterable[tuple[Tensor, Tensor]]]
Feed = Callable[[Tensor, Tensor], Epoch]

BATCH_SIZE = 128
_QUICK_ROWS = 400
_WIDTHS = {"wide": 784, "narrow": 8}
_STREAMED_WIDTH = 50


def cases(*, quick: bool) -> list[Case]:
    """A table for wide rows (images) and one for narrow ones (tables)."""
    rows = _QUICK_ROWS if quick else TRAIN_SIZE
    return [*(_case(name, rows, width) for name, width in _WIDTHS.items()), _streamed(2_000 if quick else 1_000_000)]


def loader_feed(x: Tensor, y: Tensor) -> Epoch:
    """``DataLoader(TensorDataset)``, shuffled: an epoch is one pass over it."""
    loader = DataLoader(TensorDataset(x, y), batch_size=BATCH_SIZE, shuffle=True)
    return lambda: loader


def knowable_feed(x: Tensor, y: Tensor) -> Epoch:
    """The batches that knowable makes of data in memory, in a new order each epoch."""
    from knowable.core.model.data import as_data

    data = as_data((x, y))
    epochs = iter(range(10**9))
    return lambda: data.batches(BATCH_SIZE, seed=0, epoch=next(epochs))


def training_epoch(feed: Feed, rows: int, width: int) -> Step:
    """An epoch of fused Adam on a small network, fed by ``feed``; returns the last batch's loss."""
    x, y = _data(rows, width)
    epoch = feed(x, y)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(width, 32), nn.ReLU(), nn.Linear(32, NUM_CLASSES))
    optimizer = adam(net.parameters())

    def step() -> Tensor:
        loss = torch.tensor(float("nan"))
        for inputs, labels in epoch():
            optimizer.zero_grad()
            loss = F.cross_entropy(net(inputs), labels)
            loss.backward()
            optimizer.step()
        return loss.detach()

    return step


def feeding_only(feed: Feed, rows: int, width: int) -> Step:
    """An epoch of batches that nobody uses."""
    x, y = _data(rows, width)
    epoch = feed(x, y)

    def step() -> int:
        return sum(len(labels) for _, labels in epoch())

    return step


@lru_cache(maxsize=1)
def _data(rows: int, width: int) -> tuple[Tensor, Tensor]:
    """Shared by the contenders of a case: at full width it takes 188 MB."""
    return classification_data(rows, (width,))


def _case(name: str, rows: int, width: int) -> Case:
    def contenders(work: Callable[[Feed, int, int], Step], label: str) -> Iterator[tuple[str, Callable[[], Step]]]:
        yield f"DataLoader{label}", partial(work, loader_feed, rows, width)
        yield f"knowable{label}", partial(work, knowable_feed, rows, width)

    return Case(
        name=name,
        title=f"An epoch of {rows:,} x {width} through {width}-32-10, batch {BATCH_SIZE}",
        contenders=dict([*contenders(training_epoch, ""), *contenders(feeding_only, ", feeding only")]),
        reference="DataLoader",
        plan=Plan(rounds=9, inner=1, warmup=1),
        note="Memory is what feeding and training add to the data itself.",
    )


def _streamed(rows: int) -> Case:
    return Case(
        name="streamed",
        title=f"One epoch of {rows:,} x {_STREAMED_WIDTH} from a DataLoader with two workers, batch 256",
        contenders={
            "plain PyTorch": partial(_plain_fit, rows),
            "knowable MAP": partial(_knowable_fit, "MAP", rows),
            "knowable MeanFieldVI": partial(_knowable_fit, "MeanFieldVI", rows),
        },
        reference="plain PyTorch",
        plan=Plan(rounds=3, inner=1, warmup=1),
        note="A step is a whole fit of one epoch through 50-64-1.",
    )


def _streamed_loader(rows: int) -> DataLoader:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, _STREAMED_WIDTH, generator=generator)
    y = x[:, :5].sin().sum(1, keepdim=True) + 0.1 * torch.randn(rows, 1, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=256, shuffle=True, num_workers=2)


def _streamed_net() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(_STREAMED_WIDTH, 64), nn.ReLU(), nn.Linear(64, 1))


def _plain_fit(rows: int) -> Step:
    loader = _streamed_loader(rows)

    def step() -> Tensor:
        net, loss = _streamed_net(), torch.tensor(float("nan"))
        optimizer = adam(net.parameters())
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = F.mse_loss(net(inputs), targets)
            loss.backward()
            optimizer.step()
        return loss.detach()

    return step


def _knowable_fit(method: str, rows: int) -> Step:
    import knowable as kn

    loader = _streamed_loader(rows)

    def step() -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # one epoch has not converged
            model = kn.Model(_streamed_net(), kn.Gaussian(noise=0.1))
            return getattr(kn, method)(epochs=1).fit(model, loader, progress=False)

    return step
