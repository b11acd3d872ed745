"""A loop that is killed at random moments and begun again: ``python -m tests.integration.killed_loops NAME FOLDER``.

A process runs the loop once without a stop. Then children of it, which are killed, run it with a checkpoint, each going
on from where the last was killed. A loop that comes to its end is compared and begun anew. Prints what
happened as JSON.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import knowable as kn
from knowable.core.storage.folder import Checkpoint

KILLS = 20


def optimizer(folder: Path | None) -> list[Any]:
    """Bayesian optimisation of two dimensions."""
    made = kn.Optimizer([(0.0, 1.0), (-1.0, 2.0)], acquisition="ucb", noise=0.0, initial=4, checkpoint=folder)
    made.run(lambda point: -((point[0] - 0.3) ** 2) - (point[1] - 0.5) ** 2, 9)
    return [made.points, made.values]


def active_learner(folder: Path | None) -> list[Any]:
    """Active learning of three classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(80, 2, generator=generator)
    y = (x[:, 0] + x[:, 1] > 0).long() + (x[:, 0] > 1).long()
    method = kn.DeepEnsemble(3, epochs=150, batch_size=10)
    made = kn.ActiveLearner(
        kn.Model(_net(2, 3), kn.Categorical()), method, x, "batch_bald", test=(x, y), checkpoint=folder
    )
    made.label(range(6), y[:6]) if not made.indices else None
    posterior = made.run(y, budget=18, batch=3)
    return [made.indices, [each.score for each in made.history], _numbers(posterior)]


def continual_learner(folder: Path | None) -> list[Any]:
    """Three tasks, with a few rows kept of each."""
    model = kn.Model(_net(4, 2), kn.Categorical())
    made = kn.ContinualLearner(model, kn.MeanFieldVI(epochs=40, batch_size=20), 5, seed=3, checkpoint=folder)
    for k in range(3):
        x = torch.randn(60, 4, generator=torch.Generator().manual_seed(k))
        made.learn((x, (x[:, k] > 0).long()), progress=False)
    return [made.accuracies, made.log_likelihoods, _numbers(made.posterior)]


def distill(folder: Path | None) -> list[Any]:
    """A student of an ensemble."""
    x = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    model = kn.Model(_net(2, 2), kn.Categorical())
    teacher = kn.DeepEnsemble(3, epochs=20).fit(model, (x, (x[:, 0] > 0).long()), progress=False)
    method = kn.MaximumLikelihood(epochs=300, batch_size=20)
    return [_numbers(kn.distill(teacher, _net(2, 2), x, method=method, progress=False, checkpoint=folder))]


LOOPS = {each.__name__: each for each in (optimizer, active_learner, continual_learner, distill)}


def _net(inputs: int, outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs))


def _numbers(posterior: Any) -> list[Any]:
    return [
        value.double().flatten().tolist() for value in posterior.sample(2, torch.Generator().manual_seed(0)).values()
    ]


def result_of(loop: Callable[[Path | None], list[Any]], folder: Path | None) -> str:
    """All of the result, to the last bit, as text."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return json.dumps(loop(folder))


def in_a_child(loop: Callable[[Path | None], list[Any]], folder: Path, delay: float | None) -> str | None:
    """The result, by a process of its own; None if it was killed after ``delay`` seconds."""
    answer = folder.parent / "answer"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            answer.with_suffix(".new").write_text(result_of(loop, folder), encoding="utf-8")
            os.replace(answer.with_suffix(".new"), answer)
            code = 0
        finally:
            os._exit(code)
    deadline = float("inf") if delay is None else time.monotonic() + delay
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            if status != 0:
                raise SystemExit(f"the loop failed after it was taken up, with status {status}")
            return answer.read_text(encoding="utf-8")
        if time.monotonic() >= deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return None
        time.sleep(0.002)


def main(name: str, folder: Path, seed: int) -> dict[str, Any]:
    """Kill, resume and compare until there were :data:`KILLS` kills and the last run came to its end."""
    torch.set_num_threads(1)
    Checkpoint.due = property(lambda self: True)  # type: ignore[assignment,method-assign]  # save whenever it may
    loop, chance = LOOPS[name], random.Random(seed)
    expected = result_of(loop, None)
    begin = time.monotonic()
    assert result_of(loop, None) == expected
    whole = time.monotonic() - begin  # without what is imported and compiled at first
    kills = ends = same = 0
    while kills < KILLS or (folder / "run").exists():
        found = in_a_child(loop, folder / "run", chance.uniform(0.0, 0.5 * whole) if kills < KILLS else None)
        kills += found is None
        if found is not None:
            ends, same = ends + 1, same + (found == expected)
            shutil.rmtree(folder / "run")
    return {"kills": kills, "ends": ends, "same": same, "seconds": round(whole, 2)}


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))))
