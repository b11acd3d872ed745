r"""How libraries fit mean-field normals by their own documentation, on linear models whose posterior is known.

The model is :math:`y = \sum_l w_l^T x_l + \epsilon`: linear layers in parallel, each with inputs of its own. With
orthogonal columns the posterior of every weight is a normal of its own, of precision 1 + N/σ², whatever the number of
layers and their width. So any other standard deviation is the recipe's doing.

The likelihood term of all recipes is the mean over a batch of the negative log density, as in the examples of each
library (cross-entropy and mean squared error are such means); what differs is how the KL is summed and weighed.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers import torchvision_stand_in

SIZES = ((1, 4), (1, 16), (1, 64), (2, 16), (4, 16), (8, 16))
"""Layers and inputs of each."""


@dataclass(frozen=True)
class Setting:
    """Data and training.

    Attributes:
        layers: Linear layers in parallel.
        width: Inputs of each.
        rows: Rows of data, N.
        batch: Rows of a batch.
        noise: Known standard deviation of the noise.
        epochs: Passes over the data.
        learning_rate: Of Adam, falling to a hundredth of it by the end.
    """

    layers: int = 1
    width: int = 16
    rows: int = 512
    batch: int = 64
    noise: float = 1.0
    epochs: int = 400
    learning_rate: float = 0.03

    @property
    def right_sd(self) -> float:
        """Standard deviation of every weight under the posterior."""
        return (1.0 + self.rows / self.noise**2) ** -0.5


class Parallel(nn.Module):
    """The sum of layers, each on a part of the columns."""

    def __init__(self, setting: Setting, layer: Callable[[int, int], nn.Module]):
        super().__init__()
        self.width = setting.width
        self.layers = nn.ModuleList(layer(setting.width, 1) for _ in range(setting.layers))

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split(self.width, dim=1)
        return torch.stack([layer(part) for layer, part in zip(self.layers, parts, strict=True)]).sum(0)


def plain_linear(inputs: int, outputs: int) -> nn.Module:
    """A linear layer without a bias."""
    return nn.Linear(inputs, outputs, bias=False)


def data(setting: Setting) -> tuple[Tensor, Tensor]:
    """Inputs with orthogonal columns of squared length N, and targets."""
    generator = torch.Generator().manual_seed(0)
    columns = setting.layers * setting.width
    x = torch.linalg.qr(torch.randn(setting.rows, columns, generator=generator))[0] * math.sqrt(setting.rows)
    weights = torch.randn(columns, 1, generator=generator)
    return x, x @ weights + setting.noise * torch.randn(setting.rows, 1, generator=generator)


def mean_nll(setting: Setting) -> Callable[[Tensor, Tensor], Tensor]:
    """The likelihood term: a mean over the batch."""
    return lambda output, target: F.gaussian_nll_loss(output, target, torch.full_like(target, setting.noise**2))


def train(parameters, loss: Callable[[Tensor, Tensor], Tensor], setting: Setting) -> None:
    """Adam over shuffled batches."""
    x, y = data(setting)
    optimizer = torch.optim.Adam(parameters, lr=setting.learning_rate)
    steps = setting.epochs * (setting.rows // setting.batch)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.01 ** (1 / max(steps, 1)))
    generator = torch.Generator().manual_seed(1)
    for _ in range(setting.epochs):
        for batch in torch.randperm(setting.rows, generator=generator).split(setting.batch):
            optimizer.zero_grad()
            loss(x[batch], y[batch]).backward()
            optimizer.step()
            decay.step()


def ratio(recipe: Callable[[Setting], Tensor], setting: Setting) -> float:
    """Geometric mean over the weights of the standard deviation that a recipe ends with over the right one."""
    torch.manual_seed(0)
    return (recipe(setting).detach().double().flatten().log().mean() - math.log(setting.right_sd)).exp().item()


# --- the recipes -----------------------------------------------------------------------------------------------------


def knowable(setting: Setting) -> Tensor:
    """``MeanFieldVI``: no weight to choose."""
    import knowable as kn

    model = kn.Model(Parallel(setting, plain_linear), kn.Gaussian(noise=setting.noise), kn.Normal(1.0))
    method = kn.MeanFieldVI(epochs=setting.epochs, batch_size=setting.batch)
    return torch.cat([each.flatten() for each in method.fit(model, data(setting), progress=False).std().values()])


def bayesian_torch(setting: Setting) -> Tensor:
    """README: ``loss = ce_loss + kl / args.batch_size`` with ``kl = get_kl_loss(model)``."""
    from bayesian_torch.models.dnn_to_bnn import dnn_to_bnn, get_kl_loss

    net = Parallel(setting, plain_linear)
    settings = {
        "prior_mu": 0.0,
        "prior_sigma": 1.0,
        "posterior_mu_init": 0.0,
        "posterior_rho_init": -3.0,
        "type": "Reparameterization",
        "moped_enable": False,
        "moped_delta": 0.5,
    }
    dnn_to_bnn(net, settings)
    nll = mean_nll(setting)
    train(net.parameters(), lambda x, y: nll(net(x), y) + get_kl_loss(net) / len(x), setting)
    return torch.cat([F.softplus(layer.rho_weight).flatten() for layer in net.layers])  # type: ignore[arg-type]


def torchbnn(setting: Setting) -> Tensor:
    """The demos: ``cost = loss + 0.01 * BKLLoss(reduction="mean", last_layer_only=False)(model)``."""
    from torchbnn import BayesLinear, BKLLoss

    net = Parallel(setting, lambda inputs, outputs: BayesLinear(0.0, 1.0, inputs, outputs, bias=False))
    for layer in net.layers:
        nn.init.constant_(layer.weight_log_sigma, -3.0)  # type: ignore[arg-type]
    nll, kl = mean_nll(setting), BKLLoss(reduction="mean", last_layer_only=False)
    train(net.parameters(), lambda x, y: nll(net(x), y) + 0.01 * kl(net).sum(), setting)
    return torch.cat([layer.weight_log_sigma.exp().flatten() for layer in net.layers])  # type: ignore[operator]


def blitz(setting: Setting) -> Tensor:
    """README: ``sample_elbo(..., sample_nbr=3, complexity_cost_weight=1 / X_train.shape[0])``."""
    from blitz.modules import BayesianLinear
    from blitz.utils import variational_estimator

    @variational_estimator
    class Estimator(Parallel):
        pass

    def layer(inputs: int, outputs: int) -> nn.Module:
        return BayesianLinear(inputs, outputs, bias=False, prior_sigma_1=1.0, prior_pi=1, posterior_rho_init=-3.0)

    net, nll = Estimator(setting, layer), mean_nll(setting)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return net.sample_elbo(  # type: ignore[operator]
            inputs=x, labels=y, criterion=nll, sample_nbr=3, complexity_cost_weight=1 / setting.rows
        )

    train(net.parameters(), loss, setting)
    return torch.cat([F.softplus(layer.weight_rho).flatten() for layer in net.layers])  # type: ignore[arg-type]


def torch_uncertainty(setting: Setting) -> Tensor:
    """The tutorials: ``ELBOLoss(model, inner_loss, kl_weight, num_samples=3)``, whose KL is a mean over layers."""
    importlib.import_module("lightning.pytorch")
    importlib.import_module("torchmetrics")
    with torchvision_stand_in():
        from torch_uncertainty.layers.bayesian import BayesLinear
        from torch_uncertainty.losses import ELBOLoss

    def layer(inputs: int, outputs: int) -> nn.Module:
        return BayesLinear(inputs, outputs, bias=False, prior_sigma_1=1.0, prior_pi=1)

    net, nll = Parallel(setting, layer), mean_nll(setting)

    class Criterion(nn.Module):
        def forward(self, output: Tensor, target: Tensor) -> Tensor:
            return nll(output, target)

    loss = ELBOLoss(net, Criterion(), kl_weight=1 / setting.rows, num_samples=3)
    train(net.parameters(), loss, setting)
    return torch.cat([F.softplus(layer.weight_sigma).flatten() for layer in net.layers])  # type: ignore[arg-type]


def pyro_autonormal(setting: Setting) -> Tensor:
    """The tutorials: ``PyroModule``, ``AutoNormal``, ``Trace_ELBO``, and a plate that knows N."""
    import pyro
    import pyro.distributions as dist
    from pyro.infer import SVI, Trace_ELBO
    from pyro.infer.autoguide import AutoNormal
    from pyro.nn.module import PyroSample, to_pyro_module_
    from pyro.optim import ClippedAdam

    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    net = Parallel(setting, plain_linear)
    to_pyro_module_(net)
    for layer in net.layers:
        layer.weight = PyroSample(dist.Normal(0.0, 1.0).expand([1, setting.width]).to_event(2))  # type: ignore

    def model(x: Tensor, y: Tensor) -> None:
        mean = net(x)
        with pyro.plate("data", setting.rows, subsample_size=len(x), dim=-2):
            pyro.sample("y", dist.Normal(mean, setting.noise), obs=y)

    guide = AutoNormal(model, init_scale=0.05)
    x, y = data(setting)
    steps = setting.epochs * (setting.rows // setting.batch)
    optimizer = ClippedAdam({"lr": setting.learning_rate, "lrd": 0.01 ** (1 / max(steps, 1))})
    svi = SVI(model, guide, optimizer, loss=Trace_ELBO())
    generator = torch.Generator().manual_seed(1)
    for _ in range(setting.epochs):
        for batch in torch.randperm(setting.rows, generator=generator).split(setting.batch):
            svi.step(x[batch], y[batch])
    scales = [value for name, value in pyro.get_param_store().items() if ".scales." in name]
    return torch.cat([each.flatten() for each in scales])


def ivon(setting: Setting) -> Tensor:
    """README: ``IVON(model.parameters(), lr=0.1, ess=len(train_dataset))``; the prior's precision over N as decay."""
    from ivon import IVON

    net, nll = Parallel(setting, plain_linear), mean_nll(setting)
    optimizer = IVON(net.parameters(), lr=0.1, ess=setting.rows, weight_decay=1 / setting.rows, beta2=0.999)
    x, y = data(setting)
    steps = setting.epochs * (setting.rows // setting.batch)
    decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.01 ** (1 / max(steps, 1)))
    generator = torch.Generator().manual_seed(1)
    for _ in range(setting.epochs):
        for batch in torch.randperm(setting.rows, generator=generator).split(setting.batch):
            with optimizer.sampled_params(train=True):
                optimizer.zero_grad()
                nll(net(x[batch]), y[batch]).backward()
            optimizer.step()
            decay.step()
    (group,) = optimizer.param_groups
    return (group["ess"] * (group["hess"] + group["weight_decay"])).rsqrt()


RECIPES: dict[str, Callable[[Setting], Tensor]] = {
    "knowable": knowable,
    "pyro, AutoNormal": pyro_autonormal,
    "ivon-opt": ivon,
    "blitz": blitz,
    "torch-uncertainty": torch_uncertainty,
    "bayesian-torch": bayesian_torch,
    "torchbnn": torchbnn,
}
