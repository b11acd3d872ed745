"""Networks that return several things: which tensor is meant, what is refused, and what is saved."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.errors import NeedsClasses


@dataclass
class Plain:
    loss: None
    logits: torch.Tensor


class Pair(NamedTuple):
    logits: torch.Tensor
    hidden: torch.Tensor


class ModelOutput(OrderedDict):
    """Keys that are attributes too, as in Hugging Face's."""

    def __getattr__(self, name: str):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class Returns(nn.Module):
    def __init__(self, wrap) -> None:
        super().__init__()
        self.linear, self.wrap = nn.Linear(2, 3), wrap

    def forward(self, x: torch.Tensor):
        return self.wrap(self.linear(x))


X, Y = torch.randn(12, 2, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3
KINDS = {
    "dict": (lambda out: {"logits": out, "hidden": 2 * out}, "logits"),
    "ModelOutput": (lambda out: ModelOutput(logits=out, hidden=2 * out), "logits"),
    "dataclass": (lambda out: Plain(None, out), "logits"),
    "named tuple": (lambda out: Pair(out, 2 * out), "logits"),
    "tuple": (lambda out: (out, 2 * out), 0),
    "tuple from the end": (lambda out: (2 * out, out), -1),
    "function": (lambda out: {"a": [out]}, lambda found: found["a"][0]),
}


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
@pytest.mark.parametrize("method", [kn.MAP(epochs=2), kn.Laplace(epochs=2), kn.DeepEnsemble(2, epochs=2)], ids=repr)
@pytest.mark.parametrize("kind", KINDS)
def test_a_picked_output_gives_the_fit_of_a_network_that_returns_it_alone(kind, method):
    wrap, output = KINDS[kind]
    torch.manual_seed(0)
    net, alone = Returns(wrap), Returns(lambda out: out)
    alone.load_state_dict(net.state_dict())
    found = method.fit(kn.Model(net, kn.Categorical(), output=output), (X, Y), progress=False)
    expected = method.fit(kn.Model(alone, kn.Categorical()), (X, Y), progress=False)
    assert torch.equal(found.predict(X, samples=4).probs, expected.predict(X, samples=4).probs)


@pytest.mark.parametrize(
    ("kind", "output", "error", "wanted"),
    [
        ("dict", None, kn.InvalidType, "got dict with 'logits', 'hidden'. Say which: Model(..., output='logits')"),
        ("ModelOutput", None, kn.InvalidType, "got ModelOutput with 'logits', 'hidden'. Say which"),
        ("dataclass", None, kn.InvalidType, "got Plain with 'loss', 'logits'. Say which"),
        ("tuple", None, kn.InvalidType, "got tuple with 0, 1. Say which: Model(..., output=0)"),
        ("dict", "logit", kn.InvalidArgument, "output='logit' is not there: the network returns dict with 'logits', "),
        ("dataclass", "logit", kn.InvalidArgument, "output='logit' is not there: the network returns Plain with"),
        ("tuple", 2, kn.InvalidArgument, "output=2 is not there: the network returns tuple with 0, 1"),
        ("dataclass", "loss", kn.InvalidType, "must return one tensor, got NoneType"),
        ("dict", 1.5, kn.InvalidType, "output must be a name, a place or a function"),
    ],
)
def test_an_output_that_is_not_one_tensor_is_refused_with_what_there_is(kind, output, error, wanted):
    with pytest.raises(error) as caught:
        kn.MAP(epochs=1).fit(kn.Model(Returns(KINDS[kind][0]), kn.Categorical(), output=output), (X, Y))
    assert wanted in str(caught.value)


def test_a_tensor_has_no_output_to_pick():
    with pytest.raises(kn.InvalidArgument, match="output='logits' is not there: the network returns one tensor"):
        kn.MAP(epochs=1).fit(kn.Model(nn.Linear(2, 3), kn.Categorical(), output="logits"), (X, Y))


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_a_name_and_a_place_are_saved(kind, tmp_path):
    wrap, output = KINDS[kind]
    posterior = kn.MAP(epochs=1).fit(kn.Model(Returns(wrap), kn.Categorical(), output=output), (X, Y), progress=False)
    posterior.save(tmp_path / "saved")
    loaded = kn.load(tmp_path / "saved", Returns(wrap))
    assert torch.equal(loaded.predict(X).probs, posterior.predict(X).probs)
    with pytest.raises(kn.InvalidArgument, match="output is for models whose output is a function"):
        kn.load(tmp_path / "saved", Returns(wrap), output=lambda found: found)


def test_a_function_is_asked_for_when_loading(tmp_path):
    wrap, output = KINDS["function"]
    posterior = kn.MAP(epochs=1).fit(kn.Model(Returns(wrap), kn.Categorical(), output=output), (X, Y), progress=False)
    with pytest.warns(NeedsClasses, match=r"knowable.load\(path, net, output=function\)"):
        posterior.save(tmp_path / "saved")
    with pytest.raises(kn.InvalidArgument, match=r"pass it as load\(path, net, output=...\)"):
        kn.load(tmp_path / "saved", Returns(wrap))
    loaded = kn.load(tmp_path / "saved", Returns(wrap), output=output)
    assert torch.equal(loaded.predict(X).probs, posterior.predict(X).probs)


def test_compression_says_that_it_takes_one_tensor():
    wrap, output = KINDS["dict"]
    posterior = kn.MAP(epochs=1).fit(kn.Model(Returns(wrap), kn.Categorical(), output=output), (X, Y), progress=False)
    with pytest.raises(kn.Unsupported, match="networks that return one tensor"):
        kn.compress(posterior, data=(X, Y))
