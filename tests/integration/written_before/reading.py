"""What whoever wrote the folders and whoever reads them share: networks, data, fits to go on with, what is looked at.

Only public names are used, so that this file is the same for the version that wrote the folders and for those that read
them. Networks and data of the fits that are taken up again are made by plain arithmetic and not by a random generator:
a checkpoint knows them by their bits.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

import knowable as kn

HERE = Path(__file__).parent
FINISHED = 3  # fits in the journal that is cut off, of six
TIMED = ("seconds", "predict_seconds", "memory_mb")
RUNS = {
    "numbers": ("--target", "response", "--drop", "outcome", "--method", "mean_field_vi"),
    "classes": ("--target", "outcome", "--drop", "response", "--method", "deep_ensemble"),
}
COMPARED = ("--target", "outcome", "--drop", "response", "--methods", "map,laplace", "--cv", "2", "--budget", "8")
CHAINS: dict[str, Any] = {"chains": 2, "draws": 4, "warmup": 4, "start": "network"}

# --- networks and data -----------------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """A network that cannot be described by a list of layers: it has to be given to ``load``."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(1, 2, batch_first=True)
        self.head = nn.Linear(2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.cell(x.unsqueeze(2))[0][:, -1])


def mlp(outputs: int = 1, *, hidden: int = 3) -> nn.Module:
    return nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, outputs)).double()


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Tanh(), nn.Dropout(0.2), nn.Linear(3, 1)).double()


def images() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 3)
    ).double()


def recurrent() -> nn.Module:
    return Recurrent().double()


def gated() -> nn.Module:
    return kn.gated(mlp(), "0")


NETWORKS: Mapping[str, Callable[[], nn.Module]] = {"mean_field_vi_recurrent": recurrent, "discrete_vi": gated}
"""Networks that ``load`` has to be given, by the posterior."""


def even(*shape: int, step: int = 37, most: int = 101) -> Tensor:
    """Numbers between -1 and 1 spread about evenly, the same bits everywhere."""
    size = int(torch.tensor(shape).prod())
    return (2.0 * ((torch.arange(size) * step + 11) % most).double() / (most - 1) - 1.0).reshape(shape)


def numbers(outputs: int = 1) -> tuple[Tensor, Tensor]:
    x = even(20, 2)
    y = torch.stack([x[:, 0] * x[:, 1] + (k + 1) * x[:, 0] / 2 for k in range(outputs)], 1)
    return x, y + 0.1 * even(20, outputs, step=53)


def counts() -> tuple[Tensor, Tensor]:
    return even(20, 2), (torch.arange(20) * 7 % 4).double().unsqueeze(1)


def classes(number: int = 3) -> tuple[Tensor, Tensor]:
    return even(20, 2), torch.arange(20) * 5 % 7 % number


def yes_or_no() -> tuple[Tensor, Tensor]:
    x, y = classes(2)
    return x, y.double().unsqueeze(1)


def pictures() -> tuple[Tensor, Tensor]:
    return even(12, 1, 4, 4), torch.arange(12) % 3


# --- what is looked at -----------------------------------------------------------------------------------------------


def looked_at(posterior: kn.Posterior, x: Tensor) -> dict[str, Tensor]:
    """The numbers of a posterior that are kept: prediction, draws, moments, densities under it and under its prior."""
    prediction: Any = posterior.predict(x, samples=8, generator=torch.Generator().manual_seed(0))
    draws = posterior.sample(2, generator=torch.Generator().manual_seed(0))
    first = {name: value[0] for name, value in draws.items()}
    found = {
        "x": x,
        "prediction": prediction.probs if isinstance(prediction, kn.ClassPrediction) else prediction.mean,
        "uncertainty": prediction.total if isinstance(prediction, kn.ClassPrediction) else prediction.std,
        "epistemic": prediction.epistemic,
        "own_prediction": posterior.predict(x, samples=8).samples,  # by the posterior's own seed
        "sample": flat(draws),
        "mean": flat(posterior.mean()),
        "std": flat(posterior.std()),
        "log_prior": posterior.model.log_prior(first),
    }
    if posterior.log_evidence is not None:
        found["log_evidence"] = torch.tensor(float(posterior.log_evidence), dtype=torch.float64)
    with contextlib.suppress(kn.Unsupported):
        found["log_prob"] = posterior.log_prob(draws)
    if isinstance(posterior, kn.ChainPosterior):
        found |= {f"info.{name}": value for name, value in posterior.info.items()}
    if getattr(posterior, "frames", None) is not None:
        found["frames"] = posterior.frames  # type: ignore[attr-defined]
    return {name: value.detach().clone().contiguous() for name, value in found.items()}


def flat(params: dict[str, Tensor]) -> Tensor:
    """All parameters in one vector, in the order of the model."""
    return torch.cat([value.flatten() for value in params.values()])


def estimates(estimator: Any, rows: pd.DataFrame) -> dict[str, Tensor]:
    """The numbers of an estimator that are kept."""
    if isinstance(estimator, kn.BayesianClassifier):
        return {"probs": torch.from_numpy(estimator.predict_proba(rows))}
    mean, std = estimator.predict(rows, return_std=True)
    return {"mean": torch.from_numpy(mean), "std": torch.from_numpy(std)}


def scores_of(comparison: kn.Comparison) -> dict[str, Tensor]:
    """Scores of every method, fold by fold, but for times."""
    return {
        f"{method}.{kind.name}": torch.tensor(list(comparison.by_fold(method, kind.name).values()), dtype=torch.float64)
        for method in comparison.methods
        for kind in comparison.scores
        if kind.name not in TIMED and comparison.by_fold(method, kind.name)
    }


def read_table() -> pd.DataFrame:
    """The table, all of it as text but for the numbers."""
    return pd.read_csv(HERE / "table.csv")


def knowable(*arguments: object) -> str:
    """What a command prints; it is run in this folder."""
    command = [sys.executable, "-m", "knowable", *map(str, arguments)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=300)
    if done.returncode not in (0, 3):  # 3: the fit had not converged
        raise RuntimeError(done.stderr)
    return done.stdout


# --- fits that are stopped midway ------------------------------------------------------------------------------------


class Stopped(Exception):
    """Stands for a crash."""


class Fuse:
    """Counts, and raises at a given count; copies of a network share it."""

    def __init__(self) -> None:
        self.count, self.blows_at, self.error = 0, -1, Stopped

    def __deepcopy__(self, memo: dict[int, Any]) -> Fuse:
        return self

    def tick(self) -> None:
        self.count += 1
        if self.count == self.blows_at:
            raise self.error("stopped on purpose")


class Stoppable(nn.Module):
    """A network that counts how often it is run for a gradient, and can be stopped there."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.fuse = net, Fuse()
        with torch.no_grad():
            for value in net.parameters():
                value.copy_(even(*value.shape) / 2)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.fuse.tick()
        return self.net(x)


@dataclass(frozen=True)
class Unfinished:
    """A fit that was stopped before its end.

    Attributes:
        method: Makes the method.
        net: Makes the network.
        learned: Whether the scale of the prior is learned.
        share: Share of the steps before the stop.
        error: What stopped it: a crash, or the keyboard.
    """

    method: Callable[[], Any]
    net: Callable[[], nn.Module] = mlp
    learned: bool = False
    share: float = 0.7
    error: type[BaseException] = Stopped

    def fit(self, checkpoint: Any = None, *, stop_at: int = -1) -> tuple[kn.Posterior, int]:
        """The posterior, and how often the network was run for a gradient."""
        net = Stoppable(self.net())
        net.fuse.blows_at, net.fuse.error = stop_at, self.error
        model = kn.Model(net, kn.Gaussian(0.2), kn.EmpiricalBayes(kn.Normal(1.0)) if self.learned else kn.Normal(1.0))
        place = None if checkpoint is None else kn.Checkpoint(checkpoint, seconds=0)
        posterior = self.method().fit(
            model, numbers(), seed=5, progress=False, checkpoint=place, engine=kn.Engine(mode="eager")
        )
        return posterior, net.fuse.count


LONG: dict[str, Any] = {"epochs": 150, "batch_size": 10}
LONG_CHAINS: dict[str, Any] = {"chains": 2, "draws": 60, "warmup": 60, "start": "network"}

UNFINISHED: dict[str, Unfinished] = {
    "map": Unfinished(lambda: kn.MAP(**LONG), with_batch_norm, error=KeyboardInterrupt),
    "mean_field_vi": Unfinished(lambda: kn.MeanFieldVI(**LONG)),
    "mean_field_vi_interrupted": Unfinished(lambda: kn.MeanFieldVI(**LONG), learned=True, error=KeyboardInterrupt),
    "families": Unfinished(lambda: kn.MeanFieldVI(**LONG, families={"net.0.*": kn.families.FullRank()})),
    "matrix_normal_vi": Unfinished(lambda: kn.MatrixNormalVI(**LONG)),
    "flow_vi": Unfinished(lambda: kn.FlowVI(**LONG, layers=2)),
    "mixture_vi": Unfinished(lambda: kn.MixtureVI(components=2, **LONG)),
    "natural_vi": Unfinished(lambda: kn.NaturalVI(**LONG)),
    "laplace": Unfinished(lambda: kn.Laplace(**LONG)),
    "laplace_tuned": Unfinished(lambda: kn.Laplace(**LONG), learned=True),
    "deep_ensemble": Unfinished(lambda: kn.DeepEnsemble(members=2, **LONG)),
    "deep_ensemble_in_turn": Unfinished(
        lambda: kn.DeepEnsemble(members=2, **LONG, vectorise=False), error=KeyboardInterrupt
    ),
    "ensemble_of": Unfinished(lambda: kn.EnsembleOf(kn.MeanFieldVI(**LONG), members=2)),
    "swag": Unfinished(lambda: kn.SWAG(**LONG, snapshots=100, rank=2), share=0.9),
    "concrete_dropout": Unfinished(lambda: kn.ConcreteDropout(**LONG)),
    "structured_dropout": Unfinished(lambda: kn.StructuredDropout(**LONG)),
    "nuts": Unfinished(lambda: kn.NUTS(chains=2, draws=60, warmup=60, max_depth=3), share=0.9),
    "nuts_warming_up": Unfinished(lambda: kn.NUTS(**LONG_CHAINS, max_depth=3), share=0.48, error=KeyboardInterrupt),
    "sghmc": Unfinished(lambda: kn.SGHMC(**LONG_CHAINS, batch_size=8, steps=2)),
}


# --- a comparison ----------------------------------------------------------------------------------------------------


def compare(out: Any) -> kn.Comparison:
    """Three methods on two folds, the chains as the reference."""
    methods = {"point": kn.MAP(epochs=20), "mean field": kn.MeanFieldVI(epochs=20), "chains": kn.NUTS(**CHAINS)}
    model = kn.Model(Stoppable(mlp()).net, kn.Gaussian(0.2))
    x, y = numbers()
    return kn.compare(model, (x, y), methods=methods, cv=2, seed=5, out=out, outside=x + 9, samples=8, progress=False)
