"""``knowable certify``: what held-out rows prove of a run."""

from __future__ import annotations

import json
from typing import Annotated

import torch
import typer

from knowable.decisions.certify import certify as make_certificate
from knowable.interfaces.cli.estimators import open_run, spoken_for_the_shell
from knowable.interfaces.cli.messages import plain_errors, standard_output
from knowable.interfaces.cli.options import AsJson, Config, DataFile, Force, Lenient, Quiet, RunArgument, Seed
from knowable.interfaces.cli.run_folder import CERTIFICATE
from knowable.report.html import finite
from knowable.tabular.targets import ClassTargets, NumberTargets


def certify(
    run: RunArgument,
    data: DataFile,
    alpha: Annotated[
        float, typer.Option(metavar="SHARE", help="Share of new rows for which a promise may fail.")
    ] = 0.1,
    delta: Annotated[
        float, typer.Option(metavar="SHARE", help="Probability that the rejection rule does not keep its risk.")
    ] = 0.05,
    risk: Annotated[
        float | None,
        typer.Option(metavar="SHARE", help="Share of accepted rows that may be wrong; else that of --alpha."),
    ] = None,
    seed: Seed = 0,
    lenient: Lenient = False,
    force: Force = False,
    quiet: Quiet = False,
    as_json: AsJson = False,
    config: Config = None,
) -> None:
    """Certify a run on a file of rows that it was not fitted to, and whose outcomes are known.

    The certificate is written into the run: sets or intervals that hold, a rule that says which rows to accept, and
    p-values for rows that are out of distribution. "knowable serve" answers with them.
    """
    with plain_errors():
        opened, estimator, table, _ = open_run(run, data, lenient=lenient, quiet=quiet)
        folder = opened.folder / CERTIFICATE
        with spoken_for_the_shell():
            table.find(str(opened.options["target"]))
            outcomes, targets = estimator.schema_.target_of(table), estimator.schema_.targets
            x = torch.from_numpy(estimator.schema_.encode(table))
            if isinstance(targets, ClassTargets):
                y = torch.from_numpy(targets.codes(outcomes))
            else:
                assert isinstance(targets, NumberTargets)
                y = torch.from_numpy(targets.scale(outcomes))
            made = make_certificate(
                estimator.posterior_, (x, y), alpha=alpha, delta=delta, risk=risk, samples=estimator.samples, seed=seed
            )
        made.save(folder, overwrite=force)
        if as_json:
            promises = [vars(each) for each in made.guarantees]
            typer.echo(json.dumps(finite({"certificate": str(folder), "guarantees": promises}), indent=1))
        elif not quiet:
            standard_output().print(made.summary(), markup=False, soft_wrap=True)
