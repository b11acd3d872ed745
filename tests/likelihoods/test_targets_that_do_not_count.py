"""Labels that are ignored and numbers that are missing: they add nothing to a fit, and scores leave them out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import knowable as kn
from knowable.core.prediction.components import NormalComponents
from knowable.core.prediction.prediction import RegressionPrediction

IGNORED = -100


class Tagger(nn.Module):
    """Logits ``(batch, classes, steps)`` of each word."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x))).transpose(1, 2)


@pytest.fixture
def words() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randint(7, (12, 4))
        y = (x % 3).where(torch.rand(12, 4) < 0.6, IGNORED)
        y[3] = IGNORED  # a whole row
        return Tagger(), x, y


@pytest.fixture
def table() -> tuple[nn.Module, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        x = torch.randn(20, 2)
        y = torch.stack([x.sum(1), x[:, 0] - x[:, 1], x[:, 1]], 1) + 0.1 * torch.randn(20, 3)
        y[torch.rand(20, 3) < 0.3] = torch.nan
        y[5] = torch.nan
        return nn.Linear(2, 3), x, y


# --- the log likelihood ----------------------------------------------------------------------------------------------


def test_ignored_labels_add_nothing(words):
    net, x, y = words
    model = kn.Model(net, kn.Categorical(ignore_index=IGNORED))
    found = model.log_likelihood(model.params(), x, y)
    log_probs = net(x).log_softmax(1)
    for row in range(12):
        known = [log_probs[row, y[row, t], t] for t in range(4) if y[row, t] != IGNORED]
        torch.testing.assert_close(found[row], sum(known, torch.zeros(())))
    assert found[3] == 0


@pytest.mark.parametrize("noise", [0.3, None, (0.2, 0.3, 0.4)])
def test_missing_numbers_add_nothing(table, noise):
    net, x, y = table
    likelihood = kn.Gaussian(noise, missing=True)
    model = kn.Model(net, likelihood)
    found = model.log_likelihood(model.params(), x, y)
    scale = torch.as_tensor(1.0 if noise is None else noise).expand(3)
    for row in range(20):
        own = torch.distributions.Normal(net(x[row]), scale)
        expected = sum((own.log_prob(y[row].nan_to_num())[j] for j in range(3) if not y[row, j].isnan()), 0.0)
        torch.testing.assert_close(found[row], torch.as_tensor(expected), rtol=1e-5, atol=1e-5)


def test_complete_targets_are_scored_as_without_the_setting(table):
    net, x, y = table
    y = y.nan_to_num()
    for noise in (0.3, None, (0.2, 0.3, 0.4)):
        plain, missing = (kn.Model(net, kn.Gaussian(noise, missing=each)) for each in (False, True))
        expected = plain.log_likelihood(plain.params(), x, y)
        torch.testing.assert_close(missing.log_likelihood(missing.params(), x, y), expected)


# --- fits ------------------------------------------------------------------------------------------------------------


def curvature(posterior) -> Tensor:
    return torch.cat([value.flatten() for value in posterior.std().values()])


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
@pytest.mark.parametrize("structure", ["diag", "kron", "full"])
def test_the_curvature_is_that_of_the_labels_that_count(words, structure):
    """With one position a row, ignored rows can be left out instead."""
    y = words[2]
    model = kn.Model(nn.Sequential(nn.Linear(2, 3)), kn.Categorical(ignore_index=IGNORED), kn.Normal(1.0))
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(0))
    y = y[:, 0]
    known = y != IGNORED
    start = kn.MAP(epochs=200).fit(model, (x[known], y[known]), progress=False)
    method = kn.Laplace(start=start, structure=structure)
    found = method.fit(model, (x, y), progress=False)
    expected = method.fit(model, (x[known], y[known]), progress=False)
    torch.testing.assert_close(curvature(found), curvature(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
def test_the_curvature_of_tokens_is_the_hessian_of_what_counts(words):
    net, x, y = words
    model = kn.Model(net, kn.Categorical(ignore_index=IGNORED), kn.Normal(1.0), frozen="embed.*")
    start = kn.MAP(epochs=300).fit(model, (x, y), progress=False)
    found = kn.Laplace(start=start, structure="full").fit(model, (x, y), progress=False)
    flat = {name: value.double() for name, value in start.mean().items()}
    features = torch.tanh(net.embed(x)).detach().double()  # (batch, steps, 3)
    hidden = torch.cat([features, torch.ones(12, 4, 1).double()], -1)
    logits = features @ flat["head.weight"].T + flat["head.bias"]
    probs = logits.softmax(-1)
    each = torch.diag_embed(probs) - probs.unsqueeze(-1) * probs.unsqueeze(-2)  # (batch, steps, 3, 3)
    precision = torch.einsum("nt,ntab,nti,ntj->aibj", (y != IGNORED).double(), each, hidden, hidden).reshape(12, 12)
    covariance = torch.linalg.inv(precision + torch.eye(12).double()).diagonal().reshape(3, 4)
    torch.testing.assert_close(found.std()["head.weight"].double(), covariance[:, :3].sqrt(), rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
def test_a_linear_model_with_missing_numbers_has_the_posterior_of_each_output_alone(table):
    net, x, y = table
    model = kn.Model(net, kn.Gaussian(0.3, missing=True), kn.Normal(1.0))
    start = kn.MAP(epochs=1500, learning_rate=0.05).fit(model, (x, y), progress=False)
    found = kn.Laplace(start=start, structure="full").fit(model, (x, y), progress=False)
    inputs = torch.cat([x, torch.ones(20, 1)], 1).double()
    for j in range(3):
        known = ~y[:, j].isnan()
        precision = inputs[known].T @ inputs[known] / 0.09 + torch.eye(3)
        covariance = torch.linalg.inv(precision)
        mean = covariance @ inputs[known].T @ y[known, j].double() / 0.09
        own_std = torch.cat([found.std()["weight"][j], found.std()["bias"][j : j + 1]])
        own_mean = torch.cat([found.mean()["weight"][j], found.mean()["bias"][j : j + 1]])
        torch.testing.assert_close(own_std.double(), covariance.diagonal().sqrt(), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(own_mean.double(), mean, rtol=5e-3, atol=5e-3)


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
@pytest.mark.parametrize(
    "method",
    [
        kn.MAP(epochs=2, batch_size=5),
        kn.MeanFieldVI(epochs=2),
        kn.DeepEnsemble(2, epochs=2),
        kn.SGLD(draws=2, warmup=2, steps=2, chains=2, step_size=1e-4, start="network"),
    ],
    ids=lambda m: type(m).__name__,
)
def test_fits_do_not_depend_on_what_stands_in_the_place_of_ignored_labels(words, method):
    net, x, y = words
    one = method.fit(kn.Model(net, kn.Categorical(ignore_index=IGNORED)), (x, y), progress=False)
    other = kn.Model(net, kn.Categorical(ignore_index=2**20))
    two = method.fit(other, (x, y.where(y != IGNORED, 2**20)), progress=False)
    assert all(torch.equal(value, two.mean()[name]) for name, value in one.mean().items())


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
def test_class_weights_leave_ignored_rows_out():
    x = torch.randn(10, 2, generator=torch.Generator().manual_seed(0))
    y = torch.tensor([0, 1, 1, 1, IGNORED, 0, 1, IGNORED, 1, 1])
    model = kn.Model(nn.Linear(2, 2), kn.Categorical(ignore_index=IGNORED))
    from knowable.core.model.data import as_data

    found = as_data(kn.Data((x, y), class_weights="balanced"), model).weights
    assert found is not None
    assert torch.equal(found[y == 0], torch.full((2,), 2.0))  # 8 rows / (2 classes x 2 rows)
    torch.testing.assert_close(found[y == 1], torch.full((6,), 8 / 12))


# --- scores ----------------------------------------------------------------------------------------------------------


def test_scores_of_labels_leave_ignored_ones_out(words):
    net, x, y = words
    posterior = kn.DeepEnsemble(3, epochs=20).fit(
        kn.Model(net, kn.Categorical(ignore_index=IGNORED)), (x, y), progress=False
    )
    prediction = posterior.predict(x)
    found = kn.evaluate(prediction, y)
    probs, right, squares, nll = prediction.probs.double(), [], [], []
    for row in range(12):
        known = [t for t in range(4) if y[row, t] != IGNORED]
        if not known:
            continue
        right.append(sum((probs[row, :, t].argmax() == y[row, t]).item() for t in known) / len(known))
        truth = torch.eye(3).double()
        squares.append(sum((probs[row, :, t] - truth[y[row, t]]).square().sum().item() for t in known) / len(known))
        joint = prediction.log_probs[:, row]  # (K, classes, steps)
        each = sum(joint[:, y[row, t], t] for t in known)
        nll.append(-(each + prediction.log_weights).logsumexp(0).item())
    assert found["accuracy"] == pytest.approx(sum(right) / len(right))
    assert found["brier"] == pytest.approx(sum(squares) / len(squares), rel=1e-5)
    assert found["nll"] == pytest.approx(sum(nll) / len(nll), rel=1e-5)
    assert len(found.per_row["nll"]) == len(found.per_row["entropy"]) == len(nll) < 12
    confidence = probs.amax(1)[y != IGNORED]
    hits = (probs.argmax(1) == y)[y != IGNORED]
    bins = torch.bucketize(confidence, torch.linspace(0, 1, 16).double()[1:-1])
    gaps = [abs((hits[bins == b].double() - confidence[bins == b]).sum().item()) for b in range(15)]
    assert found["ece"] == pytest.approx(sum(gaps) / len(confidence))
    assert len(kn.metrics.risk_coverage(prediction, y).coverage) == (y != IGNORED).sum()


def test_scores_of_numbers_leave_missing_ones_out(table):
    _, _, y = table
    generator = torch.Generator().manual_seed(1)
    loc = torch.randn(4, 20, 3, generator=generator)
    weights = torch.zeros(4).log_softmax(0)
    prediction = RegressionPrediction(NormalComponents(loc, torch.full((3,), 0.5)), weights, missing=True)
    found = kn.evaluate(prediction, y)
    columns = {"squared_error": [], "crps": [], "coverage_90": [], "nll": []}
    for row in range(20):
        known = ~y[row].isnan()
        if known.any():
            own = RegressionPrediction(NormalComponents(loc[:, row : row + 1, known], torch.tensor(0.5)), weights)
            each = kn.evaluate(own, y[row : row + 1, known])
            for name, values in columns.items():
                values.append(each.per_row[name].item())
    for name, values in columns.items():
        torch.testing.assert_close(found.per_row[name], torch.tensor(values).double(), rtol=1e-5, atol=1e-6)
    assert len(found.per_row["std"]) == len(columns["nll"]) == 19


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
def test_a_fitted_prediction_takes_missing_numbers_and_is_saved_with_them(table, tmp_path):
    net, x, y = table
    posterior = kn.Laplace(epochs=3).fit(kn.Model(net, kn.Gaussian(0.3, missing=True)), (x, y), progress=False)
    prediction = posterior.predict(x)
    assert prediction.log_prob(y)[5] == 0
    posterior.save(tmp_path / "saved")
    assert torch.equal(kn.load(tmp_path / "saved").predict(x).log_prob(y), prediction.log_prob(y))
    prediction.plot(y=y)


# --- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fit", "error", "wanted"),
    [
        (
            lambda: kn.MAP().fit(
                kn.Model(nn.Linear(2, 3), kn.Categorical(ignore_index=-1)),
                (torch.zeros(4, 2), -torch.ones(4, dtype=torch.long)),
            ),
            kn.InvalidData,
            r"No target of data counts: all are missing or ignored \(Categorical\(ignore_index=-1\)\)",
        ),
        (
            lambda: kn.MAP().fit(
                kn.Model(nn.Linear(2, 1), kn.Gaussian(missing=True)), (torch.zeros(4, 2), torch.full((4,), torch.nan))
            ),
            kn.InvalidData,
            "No target of data counts",
        ),
        (
            lambda: kn.MAP().fit(
                kn.Model(nn.Linear(2, 3), kn.Categorical()), (torch.zeros(2, 2), torch.tensor([-100, 1]))
            ),
            kn.InvalidData,
            r"got -100 in row 0 .* say so: Categorical\(ignore_index=-100\)",
        ),
        (
            lambda: kn.MAP().fit(
                kn.Model(nn.Linear(2, 3), kn.Categorical(ignore_index=-1)), (torch.zeros(2, 2), torch.tensor([-100, 1]))
            ),
            kn.InvalidData,
            r"from 0 to 2 \(the network has 3 classes\) or -1, which is ignored, got -100 in row 0",
        ),
        (
            lambda: kn.MAP().fit(
                kn.Model(nn.Linear(2, 1), kn.Gaussian(missing=True)), (torch.zeros(2, 2), torch.tensor([torch.inf, 1]))
            ),
            kn.InvalidData,
            "y has missing or infinite values in row 0",
        ),
        (
            lambda: kn.ExactLinear().fit(
                kn.Model(nn.Linear(2, 1), kn.Gaussian(missing=True)), (torch.zeros(2, 2), torch.tensor([torch.nan, 1]))
            ),
            kn.Unsupported,
            "ExactLinear does not take missing targets",
        ),
        (
            lambda: kn.MomentVI(epochs=1).fit(
                kn.Model(nn.Linear(2, 3), kn.Categorical(ignore_index=-1)), (torch.zeros(2, 2), torch.tensor([-1, 1]))
            ),
            kn.Unsupported,
            "MomentVI needs all targets",
        ),
        (lambda: kn.Categorical(ignore_index=0.5), kn.InvalidType, "ignore_index"),
        (lambda: kn.Gaussian(missing="yes"), kn.InvalidType, "missing must be True or False"),
    ],
)
@pytest.mark.filterwarnings("ignore::knowable.ModelWarning")
def test_what_cannot_be_meant_is_refused(fit, error, wanted):
    with pytest.raises(error, match=wanted):
        fit()
