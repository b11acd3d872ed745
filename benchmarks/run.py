"""The command line: ``python -m benchmarks.run [name ...] [--quick] [--out DIR]``.

A benchmark is a module of this package with a function ``cases(*, quick) -> list[Case]``, whose contenders take turns,
or a study, which works through rows of its own (see the study module) and goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import Environment
from benchmarks.harness import QUICK, Case, Plan, measure
from benchmarks.memory import peak_memory
from benchmarks.report import describe_case, describe_run, to_markdown, with_earlier_cases, write
from benchmarks.study import Rows, write_study

BENCHMARKS = (
    "step_time",
    "variational_steps",
    "prediction",
    "frozen_backbone",
    "epoch",
    "stochastic_gradient",
    "ensembles",
    "laplace",
    "linear_models",
    "engines",
)
STUDIES = (
    "gradients",
    "effective_samples",
    "uci_chains",
    "uci_methods",
    "uci_tables",
    "uci_default",
    "gaussian_processes",
    "image_methods",
    "segmentation",
    "super_resolution",
    "chain_memory",
    "laplace_limits",
    "compare_concrete",
    "variational_families",
    "variational_optimum",
    "fidelity",
    "in_between",
    "infinite_width",
    "matched_prior",
    "empirical_bayes",
    "trained_networks",
    "sizes",
    "adapters",
    "adversarial",
    "guarantees",
    "bayesian_optimisation",
    "continual",
    "serving",
    "parquet",
    "scaling_out",
    "active_learning",
    "distillation",
    "compression.lenets",
    "compression.random_labels",
    "compression.vgg_width",
    "compression.recurrent",
    "compression.rewriting",
    "compression.variance_networks",
)
_NAMES = ", ".join((*BENCHMARKS, *STUDIES))
RESULTS = Path(__file__).resolve().parent / "results"


def run_benchmark(
    module: str,
    *,
    quick: bool = False,
    memory: bool = False,
    rounds: int | None = None,
    only: str = "*",
) -> dict[str, Any]:
    """Run all cases of a benchmark module.

    Args:
        module: Full name of the module.
        quick: A smoke run of seconds instead of a measurement.
        memory: Measure peak memory too, each contender in a process of its own.
        rounds: Rounds, if not those of the case's plan.
        only: Glob of case names to run.

    Returns:
        The run as plain values, see the report module.
    """
    cases = [case for case in importlib.import_module(module).cases(quick=quick) if fnmatch(case.name, only)]
    environment = Environment.now(package for case in cases for package in case.packages)
    described = [_run_case(module, case, quick=quick, memory=memory, rounds=rounds) for case in cases]
    return describe_run(module.rpartition(".")[2], described, environment, quick=quick)


def _run_case(module: str, case: Case, *, quick: bool, memory: bool, rounds: int | None) -> dict[str, Any]:
    plan: Plan = QUICK if quick else case.plan
    plan = replace(plan, rounds=rounds) if rounds else plan
    outcomes = measure(case.contenders, plan)
    if memory:
        for name, outcome in outcomes.items():
            if outcome.error is None:
                outcome.memory = peak_memory(module, case.name, name, quick=quick)
    return describe_case(case, plan, outcomes)


def run_study(name: str, *, quick: bool, only: str, folder: Path | None) -> None:
    """Run a study, print its tables and write them into ``folder``; rows of a stopped run are found there."""
    module = importlib.import_module(f"benchmarks.{name}")
    rows = Rows(None if folder is None else folder / f"{name.replace('.', '_')}.jsonl")
    run = module.run(quick=quick, only=only, rows=rows)
    text = module.to_markdown(run)
    print(text, flush=True)
    if folder is not None:
        print("written:", ", ".join(path.name for path in write_study(run, text, folder)), file=sys.stderr)
        rows.forget()


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse, run, print and write; 1 if a reference itself failed, so that a table has no ratios."""
    options = _parser().parse_args(arguments)
    if options.threads:
        torch.set_num_threads(options.threads)
    partial = options.quick or options.case != "*"
    folder = options.out or (None if partial else RESULTS)
    memory = not options.quick if options.memory is None else options.memory
    whole = True
    for name in options.names or (*BENCHMARKS, *STUDIES):
        if name in STUDIES:
            run_study(name, quick=options.quick, only=options.case, folder=folder)
            continue
        run = run_benchmark(
            f"benchmarks.{name}",
            quick=options.quick,
            memory=memory,
            rounds=options.rounds,
            only=options.case,
        )
        print(to_markdown(run), flush=True)
        if folder is not None:
            kept = with_earlier_cases(run, folder) if options.case != "*" else run
            print("written:", ", ".join(path.name for path in write(kept, folder)), file=sys.stderr)
        whole &= all(case["contenders"][case["reference"]]["error"] is None for case in run["cases"])
    return 0 if whole else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description="Time knowable and its peers.")
    # choices= would reject the empty list that means all, hence the type
    parser.add_argument("names", nargs="*", type=_benchmark, help=f"which of {_NAMES} (default: all)")
    parser.add_argument("--quick", action="store_true", help="smoke run of seconds; written only with --out")
    parser.add_argument("--out", type=Path, default=None, help="folder for JSON and Markdown (default: results/)")
    parser.add_argument(
        "--case",
        default="*",
        help="glob of cases to run, such as mlp; written only with --out, beside those of earlier runs",
    )
    parser.add_argument("--rounds", type=int, default=None, help="rounds of timing (default: the case's own)")
    parser.add_argument("--threads", type=int, default=None, help="torch's threads (default: torch's own choice)")
    parser.add_argument(
        "--memory",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="measure peak memory, a process per contender (default: only in full runs)",
    )
    return parser


def _benchmark(name: str) -> str:
    if name not in (*BENCHMARKS, *STUDIES):
        raise argparse.ArgumentTypeError(f"no benchmark {name!r}; there are {_NAMES}")
    return name


if __name__ == "__main__":
    sys.exit(main())
