"""What an engine costs: the same fits here, and on Ray with one and with two workers.

Contenders take turns in one process, and Ray and its workers are warm. Each case ends with the same tensors in every
contender. The last two cases are about this process alone: members in groups, which can be apart, beside one group of
all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

import knowable as kn
from benchmarks.harness import Case, Plan, Step
from knowable.core.chains import target

_PLAN = Plan(rounds=7, inner=1, warmup=1)


def cases(*, quick: bool) -> list[Case]:
    """Fits and a comparison on every engine; groups of members beside one."""
    epochs = 2 if quick else 300
    wide = (20, 60) if quick else (20, 100)
    return [
        _engines("nothing", "A task that does nothing", _nothing),
        _engines("ensemble", f"A deep ensemble of 8, each member {epochs} epochs by itself", _ensemble(epochs)),
        _engines("nuts", "NUTS, 4 chains, which are one piece of work", _chains(quick)),
        _engines("compare", "A comparison of 2 methods on 4 folds", _comparison(epochs)),
        _groups("groups", wide, 200 if quick else 1000, epochs),
        _groups("small groups", (8, 50), 200 if quick else 1000, epochs),
    ]


Work = Callable[[Any], object]
"""Does the work of a case with an engine."""


def _engines(name: str, title: str, work: Work) -> Case:
    engines: Mapping[str, Any] = {
        "knowable, here": None,
        "knowable, Ray, 1 worker": kn.engines.Ray(num_workers=1),
        "knowable, Ray, 2 workers": kn.engines.Ray(num_workers=2),
    }

    def factory(engine: Any) -> Callable[[], Step]:
        return lambda: lambda: work(engine)

    contenders = {each: factory(engine) for each, engine in engines.items()}
    return Case(name, title, contenders, reference="knowable, here", plan=_PLAN, packages=("ray",))


def _nothing(engine: Any) -> None:
    asked = kn.Engine(workers=engine)
    list(asked.run(_same, None, [1]))


def _same(shared: None, task: int) -> int:
    return task


def _problem(rows: int, inputs: int, hidden: int) -> tuple[kn.Model, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(rows, inputs)
    net = torch.nn.Sequential(
        torch.nn.Linear(inputs, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, hidden), torch.nn.Tanh(),
        torch.nn.Linear(hidden, 1),
    )  # fmt: skip
    return kn.Model(net, kn.Gaussian(0.3)), (x, x.sum(1, keepdim=True).sin() + 0.3 * torch.randn(rows, 1))


def _ensemble(epochs: int) -> Work:
    model, data = _problem(1000, 8, 50)
    method = kn.DeepEnsemble(8, epochs=epochs, vectorise=False)
    return lambda engine: method.fit(model, data, engine=engine)


def _chains(quick: bool) -> Work:
    model, data = _problem(200, 4, 8)
    method = kn.NUTS(chains=4, draws=5 if quick else 100, warmup=5 if quick else 100)

    def fit(engine: Any) -> object:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # so few draws have not converged
            return method.fit(model, data, engine=engine)

    return fit


def _comparison(epochs: int) -> Work:
    model, data = _problem(500, 8, 50)
    methods = {"MAP": kn.MAP(epochs=epochs), "ensemble": kn.DeepEnsemble(3, epochs=epochs)}
    return lambda engine: kn.compare(model, data, methods=methods, cv=4, engine=engine, progress=False)


def _groups(name: str, widths: tuple[int, int], rows: int, epochs: int) -> Case:
    model, data = _problem(rows, *widths)
    method = kn.DeepEnsemble(8, epochs=max(2, epochs // 4))
    together = replace(method, vectorise=True)
    of = target.worthwhile_group(8, rows * _forward(model, data[0]))
    title = f"8 members, {rows} rows, inputs and width {widths}: in groups of {of}, as by default, or in one"
    contenders: Mapping[str, Callable[[], Step]] = {
        "knowable, one group": lambda: lambda: together.fit(model, data),
        "knowable, as by default": lambda: lambda: method.fit(model, data),
    }
    return Case(name, title, contenders, reference="knowable, one group", plan=_PLAN)


def _forward(model: kn.Model, x: torch.Tensor) -> float:
    from knowable.core.posterior.monte_carlo import flops_per_row

    return flops_per_row(model, x)
