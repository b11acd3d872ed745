"""The training steps of other libraries: Gaussian mean-field weights on the same networks, one draw a step.

Each factory builds the network the way its library documents and returns a step that minimises

    cross-entropy (mean over the batch) + KL(q || p) / N,        p = Normal(0, 1) on every weight,

with the same fused Adam. Where a library averages its KL over weights or layers, the average is turned back into the
sum, so that all train on the same objective. Batch normalisation keeps point estimates, except in IVON, which treats
all parameters alike. Nothing of a peer is imported before its factory is called.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import enum
import importlib
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import Factory, Step
from benchmarks.networks import TRAIN_SIZE, Layers, Network

PACKAGES = ("bayesian-torch", "blitz-bayesian-pytorch", "torchbnn", "torch-uncertainty", "pyro-ppl", "ivon-opt")


def peer_factories(network: Network) -> dict[str, Factory]:
    """A factory for every peer, by the name it has in the tables."""
    return {
        "ivon-opt": partial(ivon, network),
        "torchbnn": partial(torchbnn, network),
        "bayesian-torch, reparameterisation": partial(bayesian_torch, network, "Reparameterization"),
        "bayesian-torch, flipout": partial(bayesian_torch, network, "Flipout"),
        "blitz": partial(blitz, network),
        "pyro, AutoNormal": partial(pyro_autonormal, network),
        "torch-uncertainty": partial(torch_uncertainty, network),
    }


def adam(parameters: Iterable[Tensor]) -> torch.optim.Adam:
    """The optimiser of every contender that can choose."""
    return torch.optim.Adam(parameters, lr=1e-3, fused=True)


def training_step(parameters: Iterable[Tensor], loss: Callable[[], Tensor]) -> Step:
    """Zero the gradients, evaluate ``loss``, go backward, take an Adam step; return the loss."""
    optimizer = adam(parameters)

    def step() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        optimizer.step()
        return value.detach()

    return step


def ivon(network: Network) -> Step:
    """IVON (Shen et al., 2024), an optimiser: ``ess`` is N and ``weight_decay`` the prior's precision over N."""
    from ivon import IVON

    net = network.make()
    x, y = network.data()
    optimizer = IVON(net.parameters(), lr=0.1, ess=TRAIN_SIZE, weight_decay=1.0 / TRAIN_SIZE, mc_samples=1)

    def step() -> Tensor:
        with optimizer.sampled_params(train=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(net(x), y)
            loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def torchbnn(network: Network) -> Step:
    """Layers of torchbnn, with its KL summed."""
    from torchbnn import BayesConv2d, BayesLinear, BKLLoss

    def linear(inputs: int, outputs: int) -> nn.Module:
        return BayesLinear(0.0, 1.0, inputs, outputs)

    def convolution(inputs: int, outputs: int, kernel: int, *, stride=1, padding=0, bias=True) -> nn.Module:
        return BayesConv2d(0.0, 1.0, inputs, outputs, kernel, stride=stride, padding=padding, bias=bias)

    net = network.make(Layers(linear, convolution))
    x, y = network.data()
    kl = BKLLoss(reduction="sum", last_layer_only=False)
    return training_step(net.parameters(), lambda: F.cross_entropy(net(x), y) + kl(net) / TRAIN_SIZE)


def bayesian_torch(network: Network, kind: str) -> Step:
    """Layers of the given kind by ``dnn_to_bnn``, the converter of bayesian-torch.

    Its KL is a mean over each tensor; every layer's ``kl_div`` is multiplied by the tensor's size to give the sum.
    """
    from bayesian_torch.layers.base_variational_layer import BaseVariationalLayer_
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    net = network.make()
    settings = {
        "prior_mu": 0.0,
        "prior_sigma": 1.0,
        "posterior_mu_init": 0.0,
        "posterior_rho_init": -3.0,
        "type": kind,
        "moped_enable": False,
        "moped_delta": 0.5,
    }
    dnn_to_bnn(net, settings)
    for layer in net.modules():
        if isinstance(layer, BaseVariationalLayer_):
            _sum_kl(layer)
    x, y = network.data()
    return training_step(net.parameters(), lambda: F.cross_entropy(net(x), y) + get_kl_loss(net) / TRAIN_SIZE)


def _sum_kl(layer: Any) -> None:
    """Shadow the layer's method ``kl_div``, a mean over a tensor, by the sum."""
    mean_kl = layer.kl_div
    layer.kl_div = lambda means, *rest: mean_kl(means, *rest) * means.numel()


def blitz(network: Network) -> Step:
    """BLiTZ's layers and its ``sample_elbo``; with ``prior_pi=1`` its mixture prior is one normal distribution."""
    from blitz.modules import BayesianConv2d, BayesianLinear
    from blitz.utils import variational_estimator

    def linear(inputs: int, outputs: int) -> nn.Module:
        return BayesianLinear(inputs, outputs, prior_sigma_1=1.0, prior_pi=1)

    def convolution(inputs: int, outputs: int, kernel: int, *, stride=1, padding=0, bias=True) -> nn.Module:
        size = (kernel, kernel)
        return BayesianConv2d(
            inputs, outputs, size, stride=stride, padding=padding, bias=bias, prior_sigma_1=1.0, prior_pi=1
        )

    @variational_estimator
    class Estimator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network.make(Layers(linear, convolution))

        def forward(self, inputs: Tensor) -> Tensor:
            return self.net(inputs)

    net = Estimator()
    x, y = network.data()
    elbo = partial(
        net.sample_elbo,  # type: ignore[operator]
        inputs=x,
        labels=y,
        criterion=nn.CrossEntropyLoss(),
        sample_nbr=1,
        complexity_cost_weight=1.0 / TRAIN_SIZE,
    )
    return training_step(net.parameters(), elbo)


def torch_uncertainty(network: Network) -> Step:
    """Layers of torch-uncertainty and its ELBOLoss, whose KL is a mean over layers: weighed by their number over N."""
    importlib.import_module("lightning.pytorch")  # before the stand-in below, which is meant for one package only
    importlib.import_module("torchmetrics")
    with torchvision_stand_in():
        from torch_uncertainty.layers.bayesian import BayesConv2d, BayesLinear, bayesian_modules
        from torch_uncertainty.losses import ELBOLoss

    def linear(inputs: int, outputs: int) -> nn.Module:
        return BayesLinear(inputs, outputs, prior_sigma_1=1.0, prior_pi=1)

    def convolution(inputs: int, outputs: int, kernel: int, *, stride=1, padding=0, bias=True) -> nn.Module:
        return BayesConv2d(
            inputs, outputs, kernel, stride=stride, padding=padding, bias=bias, prior_sigma_1=1.0, prior_pi=1
        )

    net = network.make(Layers(linear, convolution))
    x, y = network.data()
    num_layers = sum(isinstance(module, bayesian_modules) for module in net.modules())
    loss = ELBOLoss(net, nn.CrossEntropyLoss(), kl_weight=num_layers / TRAIN_SIZE, num_samples=1)
    return training_step(net.parameters(), lambda: loss(x, y))


def pyro_autonormal(network: Network) -> Step:
    """Pyro's module conversion, AutoNormal guide and SVI.

    Its ELBO is on the full-data scale (the plate multiplies by N over the batch); Adam does not mind the factor N.
    """
    import pyro
    import pyro.distributions as dist
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoNormal
    from pyro.nn.module import PyroSample, to_pyro_module_
    from pyro.optim import Adam

    pyro.clear_param_store()
    pyro.enable_validation(False)
    net = network.make()
    to_pyro_module_(net)
    for module in net.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            for name, value in list(module.named_parameters(recurse=False)):
                prior = dist.Normal(0.0, 1.0).expand(value.shape).to_event(value.dim())
                setattr(module, name, PyroSample(prior))
    x, y = network.data()

    def model(inputs: Tensor, labels: Tensor) -> None:
        logits = net(inputs)
        with pyro.plate("data", TRAIN_SIZE, subsample_size=len(inputs)):
            pyro.sample("labels", dist.Categorical(logits=logits), obs=labels)

    svi = SVI(model, AutoNormal(model, init_scale=0.05), Adam({"lr": 1e-3, "fused": True}), loss=Trace_ELBO())
    return lambda: svi.step(x, y) / TRAIN_SIZE


@contextmanager
def torchvision_stand_in() -> Iterator[None]:
    """Let torch-uncertainty be imported where torchvision is not installed.

    Its package imports two names of torchvision for plotting and image transforms, which no layer or loss uses; common
    wheels of torchvision need a CUDA build of torch. A torchvision that works is used.
    """
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        names = _stand_in_modules()
    else:
        names = {}
    sys.modules.update(names)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]


def _stand_in_modules() -> dict[str, ModuleType]:
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
    modules["torchvision.transforms"].InterpolationMode = enum.Enum("InterpolationMode", "NEAREST")  # type: ignore
    return modules
