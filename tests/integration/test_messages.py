"""What a new user gets wrong, and what the error says: a sentence that names the argument and the way out."""

from __future__ import annotations

import re

import numpy as np
import pytest
import scipy.sparse
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import knowable as kn

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
Y = X.sum(1, keepdim=True)
NET = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
MODEL = kn.Model(NET, kn.Gaussian())
NORMALISED = kn.Model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)), kn.Gaussian())


class Words(nn.Module):
    """Embeddings of whole numbers, ten of them."""

    def __init__(self, columns: slice | int = slice(None)):
        super().__init__()
        self.columns, self.table, self.head = columns, nn.Embedding(10, 4), nn.Linear(4, 1)

    def forward(self, x):
        found = self.table(x[:, self.columns].long())
        return self.head(found if found.dim() == 2 else found.mean(1))


def words(row: int, column: int, value: int) -> torch.Tensor:
    found = torch.arange(60).reshape(20, 3) % 10
    found[row, column] = value
    return found


@pytest.fixture(scope="module")
def posterior():
    return kn.MAP(epochs=2).fit(MODEL, (X, Y))


FITTING = {
    "lr": (lambda: kn.MeanFieldVI(lr=1e-3), "MeanFieldVI has no setting 'lr'. Did you mean 'learning_rate'?"),
    "n_samples": (lambda: kn.MeanFieldVI(n_samples=3), "Draws of a prediction: posterior.predict(x, samples=...)."),
    "x and y apart": (lambda: kn.MAP().fit(MODEL, X, Y), "Pass inputs and targets as a pair: fit(model, (X, Y))."),
    "x alone": (lambda: kn.MAP().fit(MODEL, X), "Put inputs and targets in parentheses: (x, y)."),
    "epochs": (lambda: kn.MAP().fit(MODEL, (X, Y), epochs=3), "It is a setting of the method: MAP(epochs=...)."),
    "lr in fit": (lambda: kn.MAP().fit(MODEL, (X, Y), lr=0.1), "It is a setting of the method: MAP(learning_rate=...)"),
    "a network": (lambda: kn.MAP().fit(NET, (X, Y)), "got Sequential. Write kn.Model(net, kn.Gaussian())"),
    "no likelihood": (lambda: kn.Model(NET), "Choose one of kn.Bernoulli(), kn.Categorical(), kn.Gaussian()"),
    "text": (lambda: kn.Model(NET, "gaussian"), "got the text 'gaussian'. Did you mean kn.Gaussian()?"),
    "a loss": (lambda: kn.Model(NET, nn.MSELoss()), "got torch's MSELoss, a loss. Did you mean kn.Gaussian()?"),
    "cross entropy": (
        lambda: kn.Model(NET, nn.CrossEntropyLoss(weight=torch.ones(3))),
        "Did you mean kn.Categorical()? Weights of classes go with the data: kn.Data((x, y), class_weights=[...]).",
    ),
    "something else": (lambda: kn.Model(NET, 3), "likelihood must be one of knowable's, got 3. Choose one of kn.Bern"),
    "sparse x": (
        lambda: kn.MAP().fit(MODEL, (X.to_sparse(), Y)),
        "got a sparse one (torch.sparse_coo). Pass x.to_dens",
    ),
    "sparse y": (lambda: kn.MAP().fit(MODEL, (X, Y.to_sparse())), "y must be a dense tensor, got a sparse one"),
    "sparse matrix": (
        lambda: kn.MAP().fit(MODEL, (scipy.sparse.csr_matrix(X.numpy()), Y)),
        "x must be dense, got a sparse csr_matrix. Pass x.toarray().",
    ),
    "batches of one": (
        lambda: kn.MAP(epochs=1, batch_size=1).fit(NORMALISED, (X, Y)),
        "Batch normalisation needs at least 2 rows in every batch of training, and got one of 1 row",
    ),
    "one row to train on": (
        lambda: kn.MeanFieldVI(epochs=1).fit(NORMALISED, (X[:1], Y[:1])),
        "Use a larger batch_size, with a loader drop_last=True, or more rows.",
    ),
    "an unknown word": (
        lambda: kn.MAP(epochs=1).fit(kn.Model(Words(), kn.Gaussian()), (words(17, 2, 12), Y)),
        "Embedding 'table' has 10 embeddings, for the indices 0 to 9, and x asks for 12 in row 17, column 2",
    ),
    "an unknown word among numbers": (
        lambda: kn.MAP(epochs=1).fit(kn.Model(Words(1), kn.Gaussian()), (words(13, 1, -4).float(), Y)),
        "for the indices 0 to 9, and x asks for -4 in row 13, column 1 (counting from 0)",
    ),
    "an embedding of numbers": (
        lambda: kn.MAP().fit(kn.Model(nn.Sequential(nn.Embedding(10, 4), nn.Flatten()), kn.Gaussian()), (X, Y)),
        "Embedding '0' takes whole numbers, got torch.float32. Call .long() on them in the network's forward.",
    ),
    "one row of words": (
        lambda: kn.MAP(epochs=1).fit(
            kn.Model(nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 1)), kn.Gaussian()),
            (torch.arange(3), Y[:3]),
        ),
        "dtype torch.int64: It looks like one row. Write x[None], of shape (1, 3); or X[:1] and not X[0].",
    ),
    "complex x": (
        lambda: kn.MAP().fit(MODEL, (torch.complex(X, X), Y)),
        "x must be of real numbers, got torch.complex64.",
    ),
    "a single number": (
        lambda: kn.Data((torch.tensor(1.0), Y)),
        "x must have rows (a first dimension)",
    ),
    "columns of a density": (
        lambda: MODEL.log_joint(MODEL.params(), torch.ones(20, 6), Y, 20),
        "Linear '0' expects 3 features, got 6",
    ),
    "a kernel of missing values": (
        lambda: kn.empirical_ntk(nn.Linear(3, 1), torch.full((2, 3), torch.nan)),
        "x has 6 missing or infinite values",
    ),
    "a kernel of other columns": (
        lambda: kn.empirical_ntk(nn.Linear(3, 1), torch.ones(2, 4)),
        "expects 3 features, got 4",
    ),
    "features of a number": (lambda: kn.features.Polynomial(2)(torch.tensor(1.0)), "Reshape x to (rows, 1)."),
    "R-hat of text": (
        lambda: kn.metrics.rhat(np.array([["a", "b"]])),
        "draws must be a tensor, an array",
    ),
    "dates as a target": (
        lambda: kn.BayesianRegressor(kn.MAP(epochs=1)).fit(X.numpy(), np.arange(20).astype("datetime64[D]")),
        "y holds dates (datetime64[D]), not numbers.",
    ),
    "labels as a target": (
        lambda: kn.BayesianRegressor(kn.MAP(epochs=1)).fit(X.numpy(), np.array(["a", "b"] * 10)),
        "y holds text, not numbers. Labels are for BayesianClassifier.",
    ),
    "rows of different lengths": (
        lambda: kn.BayesianRegressor(kn.MAP(epochs=1)).fit([[1.0, 2.0], [3.0]], [1.0, 2.0]),
        "X must be a table, but its rows have different lengths.",
    ),
    "too many columns": (
        lambda: kn.MAP().fit(MODEL, (torch.cat([X, X], 1), Y)),
        "Linear '0' expects 3 features, got 6",
    ),
    "too many channels": (
        lambda: kn.MAP().fit(
            kn.Model(nn.Sequential(nn.Conv2d(1, 2, 3)), kn.Gaussian()), (torch.ones(2, 3, 4, 4), Y[:2])
        ),
        "Conv2d '0' expects 1 channel, got 3.",
    ),
    "one column": (
        lambda: kn.MAP().fit(kn.Model(nn.Linear(1, 1), kn.Gaussian()), (X[:, 0], Y)),
        "It looks like a single column. Write x.unsqueeze(1), of shape (20, 1).",
    ),
    "triples": (
        lambda: kn.MAP().fit(MODEL, DataLoader(TensorDataset(X, Y, Y))),
        "Each batch of the data must be a pair (x, y), got 3 items.",
    ),
    "size of an iterable": (
        lambda: kn.Data(iter([(X, Y)])),
        "size must be given: the number of rows of a list_iterator",
    ),
}


@pytest.mark.parametrize("name", FITTING)
def test_a_fit_says_what_is_wrong(name):
    action, wanted = FITTING[name]
    with pytest.raises(kn.KnowableError) as caught:
        action()
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)


PREDICTING = {
    "n_samples": (
        lambda p: p.predict(X, n_samples=10),
        "predict() has no argument 'n_samples'. Did you mean 'samples'?",
    ),
    "another name": (lambda p: p.predict(X, foo=1), "Its arguments are x, samples, generator, max_memory."),
    "in a stream": (
        lambda p: p.predict_stream(X, draws=1),
        "predict_stream() has no argument 'draws'. Did you mean 'sa",
    ),
    "one row": (
        lambda p: p.predict(X[0]),
        "If x of shape (3,) is one row, write x[None]; or X[:1] and not X[0].",
    ),
    "columns": (
        lambda p: p.predict(X[:, :2]),
        "x of shape (20, 2) and dtype torch.float32: Linear '0' expects 3 features",
    ),
    "missing values": (
        lambda p: p.predict(X.masked_fill(X[4, 1] == X, torch.nan)),
        "in row 4, column 1 (counting from 0",
    ),
    "a pair": (lambda p: p.predict((X, Y)), "x must be the inputs alone, got a pair. Pass the x of (x, y)."),
}


@pytest.mark.parametrize("name", PREDICTING)
def test_a_prediction_says_what_is_wrong(name, posterior):
    action, wanted = PREDICTING[name]
    with pytest.raises(kn.KnowableError) as caught:
        action(posterior)
    assert wanted in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numbers_of_another_kind_just_work(posterior):
    expected = posterior.predict(X).mean
    assert torch.equal(posterior.predict(X.double().numpy()).mean, expected)
    assert torch.equal(
        posterior.predict(np.ones((2, 3), dtype=np.int64)).mean, posterior.predict(torch.ones(2, 3)).mean
    )
    kn.MAP(epochs=1).fit(MODEL, (X.double().numpy(), Y.double().numpy()))


def test_the_names_of_arguments_stay_visible():
    """For help() and editors."""
    import inspect

    assert list(inspect.signature(kn.MAP.fit).parameters)[:3] == ["self", "model", "data"]
    assert "Fit the posterior" in (kn.MAP.fit.__doc__ or "")


# --- loaders ---------------------------------------------------------------------------------------------------------


class Inputs(Dataset):
    """Inputs without targets, row by row."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index]


@pytest.mark.parametrize(
    "given",
    [
        DataLoader(TensorDataset(X, Y), batch_size=7),
        DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True, drop_last=True),
        DataLoader(TensorDataset(X), batch_size=7),
        DataLoader(Inputs(), batch_size=7, shuffle=True),
        Inputs(),
        TensorDataset(X, Y),
        kn.Data((X, Y)),
        kn.Data(DataLoader(TensorDataset(X, Y), batch_size=7)),
    ],
    ids=["pairs", "shuffled", "one tensor", "inputs", "dataset", "tensor dataset", "data", "data of a loader"],
)
def test_a_loader_is_predicted_as_its_tensor(given, posterior):
    assert torch.equal(posterior.predict(given).samples, posterior.predict(X).samples)
    parts = list(posterior.predict_stream(given))
    assert sum(map(len, parts)) == 20


def test_a_loader_is_scored_as_its_tensor(posterior):
    loader = DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True)
    expected = kn.evaluate(posterior.predict(X), Y)
    assert kn.evaluate(posterior.predict(loader), loader).to_dict() == expected.to_dict()
    with pytest.raises(kn.InvalidData, match="The batches have no y"):
        kn.evaluate(posterior.predict(X), DataLoader(Inputs()))


# --- numbers that are very large or very small -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The targets are:knowable.errors.ModelWarning")
@pytest.mark.parametrize("size", [1e12, 1e-12])
def test_large_and_small_numbers_are_printed_to_be_read(size):
    model = kn.Model(nn.Linear(3, 1).double(), kn.Gaussian(0.1 * size), kn.Normal(size))
    posterior = kn.ExactLinear().fit(model, (X.double(), Y.double() * size))
    prediction = posterior.predict(X.double())
    scores = kn.evaluate(prediction, Y.double() * size)
    power = f"e{'+' if size > 1 else '-'}1"
    assert power in repr(prediction) and power in repr(scores)
    for text in (repr(posterior), repr(posterior.diagnostics), repr(prediction), repr(scores)):
        assert not re.findall(r"\b\d{8,}|\b0\.0000\b", text)
