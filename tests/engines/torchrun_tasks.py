"""What the processes of the tests of ``TorchDistributed`` do: each returns what the parent compares."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist
from torch import multiprocessing

import knowable as kn
from knowable.core.support.randomness import own_randomness
from knowable.core.training.loop import TrainingRun
from knowable.core.training.settings import TrainingSettings
from knowable.core.training.shares import Shares

N, CUT = 301, 100  # rows, and of those the ones of process 0 where each has its own
SAMPLERS: dict[str, Callable[[], Any]] = {
    "HMC": lambda: kn.HMC(chains=2, warmup=30, draws=20),
    "NUTS": lambda: kn.NUTS(chains=2, warmup=10, draws=5, max_depth=4),
    "SGLD": lambda: kn.SGLD(chains=2, warmup=20, draws=20, batch_size=64),
}


def in_processes(
    task: Callable[..., Any], folder: Path, *arguments: Any, count: int = 2, timeout: float = 120.0
) -> Any:
    """What ``task(rank, *arguments)`` returns in each of several processes joined by gloo; errors as their text."""
    context = multiprocessing.get_context("spawn")
    store = str(folder / f"store-{task.__name__}-{time.monotonic_ns()}")
    running = [
        context.Process(target=_task, args=(rank, count, store, timeout, task, arguments)) for rank in range(count)
    ]
    for each in running:
        each.start()
    for each in running:
        each.join(timeout + 150)
        if each.is_alive():
            each.kill()
    files = [Path(f"{store}.{rank}") for rank in range(count)]
    return [torch.load(each, weights_only=False) if each.exists() else "ended without a result" for each in files]


def _task(rank: int, count: int, store: str, timeout: float, task: Callable[..., Any], arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=timeout)
        )
        found = task(rank, *arguments)
    except BaseException:
        found = traceback.format_exc()
    torch.save(found, f"{store}.{rank}")
    os._exit(0)  # without waiting for a process that hangs


def problem(dtype: torch.dtype = torch.float64) -> tuple[kn.Model, tuple[torch.Tensor, torch.Tensor]]:
    """A small regression."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=generator, dtype=dtype)
    y = torch.sin(x.sum(1)) + 0.1 * torch.randn(N, generator=generator, dtype=dtype)
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1)).to(dtype)
    return kn.Model(net, kn.Gaussian(noise=0.3)), (x, y)


def own_rows(rank: int, rows: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """A hundred rows of process 0, and those of process 1."""
    return tuple(each[:CUT] if rank == 0 else each[CUT:] for each in rows)


def gradient(rank: int, shards: bool) -> dict[str, Any]:
    """The gradient of one step of mean-field VI, of all rows and of one batch, at one draw of the weights."""
    Shares.noise = lambda self, step, batch: own_randomness(7)  # type: ignore[method-assign]
    model, rows = problem()
    engine = kn.engines.TorchDistributed(shards=shards)
    job = kn.MeanFieldVI(estimator="weight")
    from knowable.core.method import FitJob

    fit = FitJob.of(job, model, own_rows(rank, rows) if shards else rows, engine=engine)
    found: dict[str, Any] = {"size": fit.rows.size}
    for name, batch_size in (("all", N), ("batch", 64)):
        objective = job.objective(model, rows[0], fit.rows.size)
        run = TrainingRun(objective, fit.rows, TrainingSettings(batch_size=batch_size), None, 0, engine)
        batches = list(fit.rows.batches(run.rows, seed=0, epoch=0))
        (step,) = [next(iter(run.shares.groups(batches, 1, len(batches))))]
        terms = run.shares.gradient(run._loss_of, step, run.params, 0)
        assert terms is not None
        found[name] = {"gradient": objective.q.grad.clone(), "loss": terms["loss"].item(), "kl": terms["kl"].item()}
        found[name] |= {"rows": step[0][0][:2] if step[0][1] else None}
        found["batches"] = [len(each[0]) for each in batches]
    return found


def alone(rows: tuple[torch.Tensor, ...]) -> dict[str, Any]:
    """The same gradient of these rows in one process."""
    model, whole = problem()
    objective = kn.MeanFieldVI(estimator="weight").objective(model, whole[0], N)
    with own_randomness(7):
        loss, terms = objective(*rows)
    loss.backward()
    return {"gradient": objective.q.grad, "loss": loss.item(), "kl": terms["kl"].item()}


def draws(rank: int | None, name: str, shards: bool) -> torch.Tensor:
    """The draws of a sampler, in one process where there is no rank."""
    model, rows = problem()
    engine = None if rank is None else kn.engines.TorchDistributed(shards=shards)
    rows = own_rows(rank, rows) if shards and rank is not None else rows
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.ConvergenceWarning)  # so few draws
        posterior = SAMPLERS[name]().fit(model, rows, engine=engine, seed=3)
    return torch.cat([each.flatten(1) for each in posterior.stack.values()], dim=1)


def several_draws(rank: int, names: list[str], shards: bool) -> dict[str, torch.Tensor]:
    """The draws of several samplers."""
    return {name: draws(rank, name, shards) for name in names}


def vi_fit(rank: int | None, shards: bool) -> dict[str, Any]:
    """A whole fit by mean-field VI of a linear network, whose optimum is one."""
    _, rows = problem()
    torch.manual_seed(0)
    model = kn.Model(torch.nn.Linear(3, 1).double(), kn.Gaussian(noise=0.7))
    engine = None if rank is None else "torch_distributed"
    if shards and rank is not None:
        rows, engine = own_rows(rank, rows), kn.engines.TorchDistributed(shards=True)
    posterior = kn.MeanFieldVI(epochs=300, batch_size=64, estimator="weight").fit(model, rows, engine=engine, seed=0)
    evidence = posterior.log_evidence
    return {
        "mean": posterior.mean(), "std": {name: value.std(0) for name, value in posterior.sample(4000).items()},
        "elbo": (float(evidence), evidence.standard_error),
        "history": len(posterior.diagnostics.history),
    }  # fmt: skip


def misuse(rank: int) -> dict[str, str]:
    """What is refused when processes are given different things."""
    model, rows = problem()
    engine = kn.engines.TorchDistributed()
    said = {}
    torch.manual_seed(rank)
    other = kn.Model(torch.nn.Linear(3, 1).double(), kn.Gaussian(noise=0.3))
    for name, call in {
        "weights": lambda: kn.MAP(epochs=1).fit(other, rows, engine=engine),
        "rows": lambda: kn.MAP(epochs=1).fit(model, own_rows(rank, rows), engine=engine),
        "seed": lambda: kn.MAP(epochs=1).fit(model, rows, engine=engine, seed=rank),
    }.items():
        try:
            call()
        except kn.InvalidArgument as error:
            said[name] = str(error)
    return said


def hang(rank: int) -> tuple[str, float]:
    """One process stops answering in the middle of a fit."""
    model, rows = problem()
    begun = time.monotonic()
    try:
        if rank == 1:
            Shares.noise = lambda self, step, batch: time.sleep(40)  # type: ignore[method-assign,assignment]
        kn.MAP(epochs=50, batch_size=64).fit(model, rows, engine=kn.engines.TorchDistributed())
    except kn.ProcessLost as error:
        return str(error), time.monotonic() - begun
    return "", 0.0


class Transformer(torch.nn.Module):
    """Two small blocks on sequences of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(11, 8)
        self.blocks = torch.nn.ModuleList(
            [torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True) for _ in range(2)]
        )
        self.head = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Sequences ``(batch, words)`` to three classes."""
        found = self.words(x)
        for block in self.blocks:
            found = block(found)
        return self.head(found.mean(1))


def fully_sharded(rank: int | None) -> tuple[dict[str, torch.Tensor], float]:
    """The most probable weights of a small transformer, in parts or in one process, and the last loss."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 11, (45, 5), generator=generator)
    torch.manual_seed(0)
    model = kn.Model(Transformer().double(), kn.Categorical(), kn.Normal(1.0))
    engine = None if rank is None else kn.engines.TorchDistributed(fully_shard=True)
    training = kn.Training(optimiser=torch.optim.SGD)
    rows, held_out = (x, x[:, 0] % 3), (x[:10], x[:10, 0] % 3)
    posterior = kn.MAP(epochs=60, batch_size=16, learning_rate=0.05, training=training).fit(
        model, rows, validation=held_out, engine=engine
    )
    return posterior.mean(), posterior.diagnostics.terms["loss"]


def refused(rank: int) -> list[str]:
    """What does not go with weights that are divided."""
    model, rows = problem()
    torch.manual_seed(0)
    learned = kn.Model(torch.nn.Linear(3, 1).double(), kn.Gaussian())
    engine, said = kn.engines.TorchDistributed(fully_shard=True), []
    for method, each, options in (
        (kn.MeanFieldVI(epochs=1), model, {}),
        (kn.MAP(epochs=1), model, {"checkpoint": "state"}),
        (kn.MAP(epochs=1, training=kn.Training(clip=1.0)), model, {}),
        (kn.MAP(epochs=1), learned, {}),
        (kn.MAP(epochs=1, training=kn.Training(optimiser="sgd")), model, {}),
    ):
        try:
            method.fit(each, rows, engine=engine, **options)
        except kn.Unsupported as error:
            said.append(str(error))
    return said
