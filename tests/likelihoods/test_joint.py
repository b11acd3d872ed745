"""Tests of several outcomes, each with a likelihood of its own."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import knowable as kn
from knowable.errors import InvalidArgument, InvalidData, InvalidType


class TwoHeads(nn.Module):
    """A number and one of three classes."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.body, self.size, self.kind = nn.Linear(2, width), nn.Linear(width, 1), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        seen = torch.tanh(self.body(x))
        return {"hidden": seen, "size": self.size(seen), "kind": self.kind(seen)}


class OneTensor(nn.Module):
    """The same as one tensor."""

    def __init__(self, net: TwoHeads) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        found = self.net(x)
        return torch.cat([found["size"], found["kind"]], 1)


LIKELIHOOD = kn.Joint({"size": kn.Gaussian(), "kind": kn.Categorical()})


def case(rows: int = 30) -> tuple[kn.Model, Tensor, dict[str, Tensor]]:
    torch.manual_seed(1)
    x = torch.randn(rows, 2)
    y = {"size": x.sum(1), "kind": (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()}
    return kn.Model(TwoHeads(), LIKELIHOOD, kn.Normal(1.0)), x, y


def test_the_log_likelihood_is_the_sum_of_those_of_the_heads():
    model, x, y = case()
    params = {**model.params(), "likelihood.size.log_noise": torch.tensor(-0.3)}
    with torch.no_grad():
        found = model.net(x)
        size = torch.distributions.Normal(found["size"][:, 0], torch.tensor(-0.3).exp()).log_prob(y["size"])
        kind = -nn.functional.cross_entropy(found["kind"], y["kind"], reduction="none")
    torch.testing.assert_close(model.log_likelihood(params, x, y), size + kind)
    shuffled = {"kind": y["kind"], "size": y["size"].unsqueeze(1).numpy()}  # order and shape do not matter
    torch.testing.assert_close(model.log_likelihood(params, x, shuffled), size + kind)


def test_heads_are_the_same_where_they_come_in_a_tuple_or_with_attributes():
    model, x, y = case()

    @dataclass
    class Found:
        size: Tensor
        kind: Tensor

    class Wrapped(nn.Module):
        def __init__(self, made) -> None:
            super().__init__()
            self.net, self.made = model.net, made

        def forward(self, x: Tensor):
            found = self.net(x)
            return self.made(found["size"], found["kind"])

    wanted = model.log_likelihood(model.params(), x, y)
    for made, output in (
        (Found, None),
        (lambda a, b: (b, a), {"size": 1, "kind": 0}),
        (lambda a, b: {"s": a, "k": b}, {"size": "s", "kind": lambda found: found["k"]}),
        (lambda a, b: {"s": a, "k": b}, lambda found: {"size": found["s"], "kind": found["k"]}),
    ):
        other = kn.Model(Wrapped(made), LIKELIHOOD, kn.Normal(1.0), output=output)
        torch.testing.assert_close(other.log_likelihood(other.params(), x, y), wanted)


METHODS = [
    kn.MAP(epochs=2),
    kn.MeanFieldVI(epochs=2),
    kn.NaturalVI(epochs=2),
    kn.Laplace(epochs=2),
    kn.Laplace(epochs=2, structure="full", prediction="sampling"),
    kn.SWAG(epochs=2, snapshots=3),
    kn.MCDropout(epochs=2),
    kn.DeepEnsemble(2, epochs=2),
    kn.SGLD(chains=2, draws=3, warmup=4, start="network", steps=2, batch_size=8),
]


@pytest.mark.parametrize("method", METHODS, ids=repr)
@pytest.mark.filterwarnings("ignore::knowable.errors.ConvergenceWarning")
def test_every_method_predicts_by_name_and_is_saved(method, tmp_path):
    model, x, y = case()
    posterior = method.fit(model, (x, y))
    prediction = posterior.predict(x, samples=8)
    assert prediction["size"].mean.shape == (30,) and prediction["kind"].probs.shape == (30, 3)
    assert prediction.epistemic.keys() == {"size", "kind"}
    assert prediction.samples.shape[1:] == (30, 4)
    again = kn.load(posterior.save(tmp_path / "saved"), model.net)
    assert again.model.likelihood == LIKELIHOOD
    assert torch.equal(again.predict(x, samples=8)["size"].mean, prediction["size"].mean)
    torch.testing.assert_close(again.predict(x, samples=8).log_prob(y), prediction.log_prob(y))
    scores = kn.evaluate(prediction, y)
    assert scores["size.rmse"] == pytest.approx((prediction["size"].mean - y["size"]).square().mean().sqrt().item())
    assert scores["kind.accuracy"] == (prediction["kind"].labels == y["kind"]).double().mean().item()
    assert scores["nll"] == pytest.approx(-prediction.log_prob(y).mean().item(), rel=1e-5)
    drawn = prediction.draw(5)
    assert drawn["size"].shape == drawn["kind"].shape == (5, 30)
    assert "size" in repr(prediction) and "kind.accuracy" in repr(scores)


def test_the_log_density_of_a_prediction_mixes_over_draws_of_all_heads():
    """Two draws, each sure of another pair of outcomes: outcomes are then not independent."""
    model, x, _ = case(rows=1)
    outputs = torch.tensor([[[0.0, 9.0, 0.0, 0.0]], [[5.0, 0.0, 9.0, 0.0]]])
    likelihood = kn.Model(TwoHeads(), kn.Joint({"size": kn.Gaussian(0.1), "kind": kn.Categorical()})).likelihood
    likelihood._network(model.net(x))  # the shapes of the heads
    weights = torch.tensor([0.25, 0.75]).log()
    prediction = likelihood.predict(outputs, {}, weights)
    normal = torch.distributions.Normal(torch.tensor([0.0, 5.0]), 0.1)
    for size, kind in ((0.0, 0), (5.0, 1), (0.0, 1)):
        each = normal.log_prob(torch.tensor(size)) + outputs[:, 0, 1:].log_softmax(1)[:, kind]
        found = prediction.log_prob({"size": torch.tensor([size]), "kind": torch.tensor([kind])})
        torch.testing.assert_close(found, torch.logsumexp(each + weights, 0).unsqueeze(0))
    drawn = prediction.draw(200, generator=torch.Generator().manual_seed(0))
    right = (drawn["size"].flatten() > 2.5) == (drawn["kind"].flatten() == 1)
    assert right.float().mean() > 0.98  # a softmax of 9 against 0 is right in 0.9998
    share = (drawn["size"] > 2.5).float().mean().item()
    assert abs(share - 0.75) < 5 * (0.75 * 0.25 / 200) ** 0.5


def test_the_curvature_of_several_heads_is_the_exact_generalised_gauss_newton():
    model, x, y = case(rows=6)
    model = kn.Model(TwoHeads(2).double(), kn.Joint({"size": kn.Gaussian(0.5), "kind": kn.Categorical()}))
    x = x.double()
    posterior = kn.Laplace(epochs=1, structure="full", tune="never").fit(model, (x, y))
    params = posterior.mean()
    names, sizes = list(params), [value.numel() for value in params.values()]

    def flat(vector: Tensor) -> Tensor:
        values = {k: p.view(params[k].shape) for k, p in zip(names, vector.split(sizes), strict=True)}
        found = torch.func.functional_call(model.net, values, (x,))
        return torch.cat([found["size"], found["kind"]], 1)

    mean = torch.cat([value.flatten() for value in params.values()])
    jacobian = torch.autograd.functional.jacobian(flat, mean)  # (rows, 4, parameters)
    probs = flat(mean)[:, 1:].softmax(1)
    total = torch.eye(len(mean), dtype=torch.float64)  # the prior's precision
    for row in range(len(x)):
        block = torch.zeros(4, 4, dtype=torch.float64)
        block[0, 0] = 1 / 0.5**2
        block[1:, 1:] = probs[row].diag() - probs[row].outer(probs[row])
        total += jacobian[row].T @ block @ jacobian[row]
    torch.testing.assert_close(posterior.std()["body.weight"].flatten(), total.inverse().diagonal().sqrt()[:4])


def test_one_head_alone_is_what_its_likelihood_is():
    torch.manual_seed(0)
    net, x = nn.Linear(2, 1), torch.randn(40, 2)

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"y": self.net(x)}

    y = x.sum(1) + 0.1 * torch.randn(40)
    alone = kn.Laplace(epochs=200, tune="never").fit(kn.Model(net, kn.Gaussian(0.1)), (x, y)).predict(x)
    named = kn.Laplace(epochs=200, tune="never").fit(
        kn.Model(Named(), kn.Joint({"y": kn.Gaussian(0.1)})), (x, {"y": y})
    )
    torch.testing.assert_close(named.predict(x)["y"].mean, alone.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(named.predict(x)["y"].std, alone.std, rtol=1e-3, atol=1e-4)


def test_labels_to_ignore_in_one_head_leave_the_other_as_it_is():
    _, x, y = case()
    some = kn.Joint({"size": kn.Gaussian(missing=True), "kind": kn.Categorical(ignore_index=-100)})
    model = kn.Model(TwoHeads(), some, kn.Normal(1.0))
    known = torch.arange(30) < 24
    y = {"size": y["size"].where(~known, torch.nan), "kind": y["kind"].where(known, -100)}
    posterior = kn.Laplace(epochs=2).fit(model, (x, y))
    params = posterior.mean()
    each = model.log_likelihood(params, x, y)
    with torch.no_grad():
        output = model.forward(params, x)
        noise = {"log_noise": params["likelihood.size.log_noise"]}
        size = kn.Gaussian().log_prob(output[:, :1], y["size"].unsqueeze(1), noise)
        kind = -nn.functional.cross_entropy(output[:, 1:], y["kind"], reduction="none", ignore_index=-100)
    torch.testing.assert_close(each, torch.where(known, kind, size.nan_to_num()))
    right = posterior.predict(x)["kind"].labels == y["kind"]
    assert kn.evaluate(posterior.predict(x), y)["kind.accuracy"] == right[known].double().mean().item()


def test_targets_come_from_frames_and_loaders():
    pandas = pytest.importorskip("pandas")
    model, x, y = case()
    method = kn.MAP(epochs=3)
    wanted = method.fit(model, (x, y)).mean()
    frame = pandas.DataFrame({name: each.numpy() for name, each in y.items()})
    assert torch.equal(method.fit(model, (x, frame)).mean()["size.weight"], wanted["size.weight"])
    rows = [{"x": x[n], **{name: each[n] for name, each in y.items()}} for n in range(30)]
    loader = kn.Data(DataLoader(rows, batch_size=30), target=["size", "kind"])
    torch.testing.assert_close(method.fit(model, loader).mean()["size.weight"], wanted["size.weight"])
    pairs = [(x[n], {name: each[n] for name, each in y.items()}) for n in range(30)]
    fitted = method.fit(model, DataLoader(pairs, batch_size=30))
    torch.testing.assert_close(fitted.mean()["size.weight"], wanted["size.weight"])
    kn.evaluate(fitted.predict(loader), loader)
    kn.evaluate(fitted.predict(x), frame)


def test_rows_of_an_own_loop_are_scored_as_in_a_fit():
    model, x, y = case()
    objective = kn.MeanFieldVI(initial_scale=1e-6, kl_warmup=0).objective(model, x, size=30)
    _, terms = objective(x, y)
    expected = model.log_likelihood(model.params(), x, y).sum()
    torch.testing.assert_close(terms["expected_log_likelihood"], expected, rtol=1e-4, atol=1e-4)


def test_compare_scores_all_heads_together():
    model, x, y = case()
    found = kn.compare(model, (x, y), methods=[kn.MAP(epochs=2)], cv=2, progress=False)
    assert "nll" in str(found)


def test_draws_of_several_heads_are_exported_by_name():
    pytest.importorskip("arviz_base")
    model, x, y = case()
    tree = kn.MeanFieldVI(epochs=2).fit(model, (x, y)).to_arviz(x, y, samples=7)
    assert tree["posterior_predictive"]["kind"].shape == tree["posterior_predictive"]["size"].shape == (1, 7, 30)
    assert tree["observed_data"]["kind"].values.tolist() == y["kind"].tolist()


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        (lambda y: {"size": y["size"]}, InvalidData, r"lacks 'kind'"),
        (lambda y: {**y, "colour": y["size"]}, InvalidData, r"has 'colour', for which there is no head"),
        (lambda y: {**y, "size": y["size"][:7]}, InvalidData, r"same number of rows"),
        (lambda y: {name: each[:7] for name, each in y.items()}, InvalidData, r"x and y must have the same number"),
        (lambda y: {**y, "kind": y["kind"] + 7}, InvalidData, r"y\['kind'\] must be a whole number from 0 to 2"),
        (lambda y: y["size"], InvalidData, r"must be a dict with targets for 'size', 'kind', got shape"),
        (lambda y: (y["size"], y["kind"]), InvalidType, r"must be a dict with targets for 'size', 'kind', got tuple"),
    ],
)  # fmt: skip
def test_wrong_targets_are_refused_by_name(change, error, says):
    model, x, y = case()
    with pytest.raises(error, match=says):
        kn.MAP(epochs=1).fit(model, (x, change(y)))


def test_wrong_heads_are_refused_by_name():
    _, x, y = case()
    lacking = kn.Model(TwoHeads(), kn.Joint({"size": kn.Gaussian(), "colour": kn.Categorical()}))
    with pytest.raises(InvalidArgument, match=r"'colour'.*'hidden', 'size', 'kind'"):
        kn.MAP(epochs=1).fit(lacking, (x, {"size": y["size"], "colour": y["kind"]}))
    with pytest.raises(InvalidArgument, match=r"where each of 'size', 'kind' is"):
        kn.Model(TwoHeads(), LIKELIHOOD, output="size")
    for heads in ({}, [kn.Gaussian()], None):
        with pytest.raises(InvalidType, match="dict of likelihoods"):
            kn.Joint(heads)
    with pytest.raises(InvalidType, match=r"heads\['a'\].*parentheses"):
        kn.Joint({"a": kn.Gaussian})
    with pytest.raises(InvalidArgument, match="without a dot"):
        kn.Joint({"a.b": kn.Gaussian()})
    posterior = kn.MAP(epochs=1).fit(case()[0], (x, y))
    with pytest.raises(InvalidArgument, match=r"no outcome 'price'.*'size', 'kind'"):
        posterior.predict(x)["price"]
    with pytest.raises(InvalidData, match="30 rows"):
        posterior.predict(x).log_prob({name: each[:3] for name, each in y.items()})
