"""One epoch of a loader is one pass through it: how often each method reads a stream, and what it keeps of it."""

from __future__ import annotations

import math
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import knowable as kn
from knowable.core.model import stream
from knowable.core.model.data import Data, as_data

ROWS, BATCH = 640, 32

pytestmark = pytest.mark.filterwarnings(
    "ignore::knowable.errors.ConvergenceWarning", "ignore::knowable.errors.WorseThanNetwork"
)


class Counted(IterableDataset):
    """Rows without a length; it counts those that were read, and the iterators opened."""

    def __init__(self) -> None:
        self.rows = self.opened = 0
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(ROWS, 2, generator=generator)
        self.y = self.x.sum(1, keepdim=True) + 0.1 * torch.randn(ROWS, 1, generator=generator)

    def __iter__(self):
        self.opened += 1
        for row in zip(self.x, self.y, strict=True):
            self.rows += 1
            yield row


def model() -> kn.Model:
    torch.manual_seed(0)
    return kn.Model(nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)), kn.Gaussian(0.3))


METHODS = [
    (kn.MAP(epochs=2), 2),
    (kn.DeepEnsemble(2, epochs=2), 2),
    (kn.DeepEnsemble(2, epochs=2, vectorise=False), 4),
    (kn.MeanFieldVI(epochs=2), 2),
    (kn.NaturalVI(epochs=2), 2),
    (kn.MixtureVI(components=2, epochs=2), 2),
    (kn.MCDropout(epochs=2), 2),
    (kn.Laplace(epochs=2), 3),  # once more for the curvature
    (kn.SWAG(epochs=2, snapshots=3), 5),
    (kn.SGLD(draws=3, warmup=3, start="network", batch_size=4), 1),
]


@pytest.mark.parametrize(("method", "passes"), METHODS, ids=[repr(method) for method, _ in METHODS])
def test_a_method_reads_a_stream_once_an_epoch(method, passes):
    source = Counted()
    method.fit(model(), kn.Data(DataLoader(source, batch_size=BATCH), size=ROWS))
    assert (source.rows / ROWS, source.opened) == (passes, passes)


def test_the_first_epoch_goes_on_from_the_batch_that_was_looked_at():
    source = Counted()
    rows = as_data(kn.Data(DataLoader(source, batch_size=BATCH), size=ROWS), model())
    assert torch.equal(rows.first[0], source.x[:BATCH]) and source.rows == BATCH
    for epoch in range(2):
        assert torch.equal(torch.cat([x for x, _ in rows.batches(1, epoch=epoch)]), source.x)
    assert (source.rows, source.opened) == (2 * ROWS, 2)
    assert torch.equal(rows.first[0], source.x[:BATCH]) and source.opened == 2


def test_a_resumed_fit_sees_the_epochs_that_an_uninterrupted_one_does():
    # the iterator that waits is for the first epoch alone: another begins with one of its own
    loader = DataLoader(TensorDataset(Counted().x, Counted().y), batch_size=BATCH, shuffle=True)
    whole, resumed = as_data(loader, model()), as_data(loader, model())
    first = [next(rows.batches(1, epoch=0))[0] for rows in (whole, whole) if torch.manual_seed(1)]
    assert torch.equal(*first)
    assert not torch.equal(resumed.first[0], first[0])  # its iterator waits, in another order
    torch.manual_seed(1)
    assert torch.equal(next(resumed.batches(1, epoch=1))[0], first[0])


def test_rows_kept_of_a_later_epoch_are_those_of_the_first_in_the_same_order():
    # a fit that is resumed after the first epoch keeps those of another, and goes on as if it had not been stopped
    source = Counted()
    for rows_of_batch in (BATCH, ROWS):
        loader = DataLoader(TensorDataset(source.x, source.y), batch_size=rows_of_batch, shuffle=True)
        found = []
        for epoch in (0, 1):
            rows = as_data(loader, model())
            passed = torch.cat([x for x, _ in rows.batches(1, epoch=epoch)])
            assert not torch.equal(passed, source.x) and rows.kept is not None
            x, y = rows.kept.tensors
            assert torch.equal(x[:, 0].sort().values, source.x[:, 0].sort().values)
            found.append(torch.cat([x, y], 1))
        assert torch.equal(*found)


@pytest.fixture
def little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LIMIT", 100 * 3 * 4)  # 100 rows of three numbers


def sample(seed: int = 0) -> tuple[Counted, Data]:
    source = Counted()
    rows = as_data(kn.Data(DataLoader(source, batch_size=BATCH), size=ROWS), model())
    for _ in rows.batches(1, seed=seed):
        pass
    return source, rows


def test_no_more_rows_are_kept_than_the_limit_and_each_as_likely_as_the_others(little, seed):
    counts = torch.zeros(ROWS)
    for number in range(20):
        source, rows = sample(seed + number)
        kept = rows.kept
        assert kept is not None
        x, y = kept.tensors
        assert 50 <= len(x) <= 100
        places = (x[:, None, 0] == source.x[:, 0]).nonzero()[:, 1]
        assert len(places.unique()) == len(x) and torch.equal(source.y[places], y)
        counts[places] += 1
    share = counts.sum() / 20 / ROWS
    for part in counts.view(4, -1):  # a quarter of an ordered stream: 20 draws of 160 rows, within 5 standard errors
        assert abs(part.mean() / 20 - share) < 5 * (share * (1 - share) / (20 * 160)).sqrt()


def test_parts_of_the_rows_kept_stand_for_all_of_them(little, seed):
    source, rows = sample(seed)
    assert rows.kept is not None
    parts = list(rows.parts(1.0, seed=seed))
    x = torch.cat([batch[0] for _, batch in parts])
    assert len(parts) == 16 and len(x.unique(dim=0)) == len(x) == rows.kept.size // 16 * 16
    assert all(scale == ROWS / len(batch[0]) for scale, batch in parts)
    found = torch.tensor([scale * batch[1].square().sum().item() for scale, batch in parts])
    y = torch.cat([batch[1] for _, batch in parts])
    torch.testing.assert_close(found.mean(), ROWS * y.square().mean())  # exactly that of the rows kept
    # all rows, within 6 standard errors: 5 of a normal, and of one that is itself estimated from 16 parts
    assert abs(found.mean() - source.y.square().sum()) < 6 * found.std() / 4
    assert source.opened == 1


def test_an_elbo_from_the_rows_kept_is_that_of_all_rows_and_says_so(little):
    source, method = Counted(), kn.MeanFieldVI(epochs=6)
    few = method.fit(model(), kn.Data(DataLoader(source, batch_size=BATCH), size=ROWS))
    assert source.opened == 6
    assert any("of 640 rows" in note for note in few.diagnostics.notes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream, "LIMIT", 2**20)
        every = method.fit(model(), kn.Data(DataLoader(source, batch_size=BATCH), size=ROWS))
    assert not any("rows" in note for note in every.diagnostics.notes)
    assert torch.equal(few.mean()["0.weight"], every.mean()["0.weight"])  # the same fit
    error = math.hypot(few.log_evidence.standard_error, every.log_evidence.standard_error)
    assert abs(float(few.log_evidence) - float(every.log_evidence)) < 6 * error
    assert few.log_evidence.standard_error > every.log_evidence.standard_error


def test_an_ensemble_keeps_no_more_of_a_stream_than_the_limit(little):
    # rows that are alive when the last of them is read: kept ones, the first batch, and those on their way
    class Watched(Counted):
        def __init__(self) -> None:
            super().__init__()
            self.alive, self.most = weakref.WeakSet(), 0

    source = Watched()

    class Loader:
        def __iter__(self):
            for batch in DataLoader(source, batch_size=BATCH):
                source.alive.update(batch)
                source.most = max(source.most, len(source.alive))
                yield batch

    kn.DeepEnsemble(2, epochs=2).fit(model(), kn.Data(Loader(), size=ROWS))
    assert source.most <= 8  # two tensors of each batch, of 20 in an epoch


def test_batches_of_different_lengths_are_kept_as_they_are():
    class Loader:
        def __iter__(self):
            for length in (3, 5, 4):
                yield torch.ones(10, length, 2), torch.ones(10, length, 1)

    rows = kn.Data(Loader(), size=60)
    parts = list(rows.parts(1.0, seed=0))
    assert [(scale, batch[0].shape[1]) for scale, batch in parts] == [(6.0, 3), (6.0, 5), (6.0, 4)]


@pytest.mark.parametrize("persistent", [False, True])
def test_a_loader_with_workers_is_opened_once_an_epoch_and_gives_the_same(persistent):
    data = TensorDataset(Counted().x, Counted().y)

    class Loader:
        def __init__(self, **settings):
            self.loader, self.opened = DataLoader(data, batch_size=BATCH, **settings), 0

        def __iter__(self):
            self.opened += 1
            return iter(self.loader)

    plain, workers = Loader(), Loader(num_workers=1, persistent_workers=persistent)
    one, two = (kn.MAP(epochs=2).fit(model(), kn.Data(each, size=ROWS)) for each in (plain, workers))
    assert plain.opened == workers.opened == 2
    assert torch.equal(one.mean()["0.weight"], two.mean()["0.weight"])


@pytest.mark.parametrize("likelihood", [kn.Gaussian(noise=0.5), kn.Bernoulli()], ids=["numbers", "yes or no"])
@pytest.mark.parametrize("shape", [(), (1,)], ids=["one number", "a column"])
def test_outcomes_have_the_shape_of_the_targets_that_a_loader_gave(likelihood, shape):
    x = torch.randn(12, 3)
    y = (x.sum(1) > 0).float().reshape(12, *shape)
    model, method = kn.Model(torch.nn.Linear(3, 1), likelihood), kn.MAP(epochs=2)
    plain, loaded = (method.fit(model, data).predict(x) for data in ((x, y), DataLoader(TensorDataset(x, y), 5)))
    assert loaded.total.shape == plain.total.shape == y.shape


def test_images_of_yes_or_no_have_the_shape_that_a_loader_gave():
    x = torch.randn(6, 1, 4, 4)
    y = (x[:, 0] > 0).float()
    model = kn.Model(torch.nn.Conv2d(1, 1, 3, padding=1), kn.Bernoulli())
    for data in ((x, y), DataLoader(TensorDataset(x, y), 2)):
        prediction = kn.MAP(epochs=1).fit(model, data).predict(x)
        assert prediction.labels.shape == prediction.total.shape == y.shape
