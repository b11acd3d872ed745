from __future__ import annotations

import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from benchmarks.laplace import (
    FIT_PEERS,
    Job,
    Peer,
    cases,
    our_posterior,
    their_posterior,
    their_probs,
)
from benchmarks.networks import SMALL_MLP, Layers, plain_convolution
from torch import nn


@pytest.mark.parametrize("case", cases(quick=True), ids=lambda case: case.name)
def test_our_contenders_give_finite_numbers(case):
    result = case.contenders["knowable"]()()
    assert torch.isfinite(torch.as_tensor(result)).all()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("structure", "last_layer"), FIT_PEERS)
@pytest.mark.parametrize("backend", ["CurvlinopsGGN", "BackPackGGN"])
def test_both_sides_give_the_same_probabilities(structure, last_layer, backend):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("laplace", reason="laplace-torch is not installed")
    # laplace-torch separates biases from their weights in Kronecker factors: there, networks without biases
    layers = Layers(partial(nn.Linear, bias=structure != "kron"), plain_convolution)
    job = Job(replace(SMALL_MLP, build=lambda _: SMALL_MLP.build(layers)), structure, last_layer)
    net, (x, y) = job.network.make(), job.network.data(60)
    # one batch: in several, laplace-torch weighs the Kronecker factors of the batches otherwise
    theirs = their_probs(their_posterior(job, Peer(backend, 60), net, x, y), x[:10], 5)
    ours = our_posterior(job, net, x, y).predict(x[:10]).probs
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
