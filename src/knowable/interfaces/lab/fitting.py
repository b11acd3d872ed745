"""A worker's life: fit what it is given, tell how far it is, stop when it is told, answer questions of a posterior."""

from __future__ import annotations

import contextlib
import signal
import time
import traceback
import warnings
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

import knowable as kn
from knowable.core.support.randomness import own_randomness
from knowable.errors import Interrupted, KnowableError, KnowableWarning
from knowable.interfaces.lab.actions import ACTIONS
from knowable.interfaces.lab.methods import offer_of
from knowable.interfaces.lab.picture import Terms, as_line, convergence, picture
from knowable.interfaces.lab.problem import Problem

LONGEST = 600.0  # seconds of a fit, after which it ends with what it has
_BETWEEN, _SHARE = 0.08, 3.0  # seconds between two pictures at least, and how often their own time that is
_CONVERGENCE_EVERY = 0.6  # seconds


@dataclass(frozen=True)
class Fit:
    """One method on one problem."""

    problem: Problem
    method: str
    judge: bool = False
    folder: str = ""  # where the posterior is saved


@dataclass(frozen=True)
class Question:
    """What is asked of a posterior that was fitted: the name of an action and what it needs."""

    action: str
    fit: Fit
    given: dict[str, Any]
    reference: str = ""  # folder of the judge's posterior


class Stopped(Exception):
    """The work is no longer wanted."""


class Watcher:
    """What a fit tells: makes pictures, not too many, and sends them."""

    def __init__(self, connection: Connection, fit: Fit):
        self._connection, self._problem = connection, fit.problem
        self._terms = Terms(len(fit.problem.points))
        self._begun, self._cpu = time.monotonic(), time.process_time()
        self._next = self._next_convergence = 0.0
        self._mixing: dict[str, float] | None = None
        self.path: list[list[float]] = []  # draws, R-hat, effective sample size

    def __call__(self, progress: kn.Progress) -> None:
        """Take note of the progress; raise if the fit is to stop."""
        if self._connection.poll():
            self._connection.recv()
            raise Stopped
        self._terms.add(progress)
        now = time.monotonic()
        if now - self._begun > LONGEST:
            raise KeyboardInterrupt
        if now < self._next:
            return
        posterior = progress.posterior()
        if posterior is not None:
            content = self.content(posterior, text=progress.text, label=progress.label)
            content["share"] = round(min(1.0, progress.done / max(1.0, progress.total)), 4)
            self._connection.send(("picture", as_line(content)))
        after = time.monotonic()
        self._next = after + max(_BETWEEN, _SHARE * (after - now))

    def content(self, posterior: kn.Posterior, *, last: bool = False, **more: Any) -> dict[str, Any]:
        """Everything that the page shows of a posterior."""
        found = {"seconds": round(time.process_time() - self._cpu, 3), **picture(self._problem, posterior), **more}
        if isinstance(posterior, kn.ChainPosterior):
            self._look_at_mixing(posterior, last)
            found["chains"] |= {"mixing": self._mixing, "history": self.path[-150:]}
        terms = self._terms.content()
        return found if terms is None else {**found, "terms": terms}

    def _look_at_mixing(self, posterior: kn.ChainPosterior, last: bool) -> None:
        now = time.monotonic()
        if now < self._next_convergence and not last:
            return
        self._next_convergence = now + _CONVERGENCE_EVERY
        found = convergence(self._problem, posterior)
        if found is not None:
            self._mixing = {name: float(f"{value:.4g}") for name, value in found.items()}
            draws = len(posterior) // posterior.chains
            self.path.append([draws, self._mixing["rhat"], self._mixing["ess"]])


def fit_and_tell(connection: Connection, fit: Fit) -> bytes:
    """Fit, sending pictures; the last one is returned, and the posterior is saved."""
    offer = offer_of(fit.method, fit.problem, judge=fit.judge)
    watcher = Watcher(connection, fit)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        posterior = fit_of(fit, progress=watcher)
    notes = [str(each.message) for each in said if issubclass(each.category, KnowableWarning)]
    if any(issubclass(each.category, Interrupted) for each in said):
        notes = [f"The lab stops fits after {LONGEST:g} s: this is what there was by then."]
    if connection.poll():
        connection.recv()
        raise Stopped
    if fit.folder:
        posterior.save(fit.folder, overwrite=True)
    evidence = posterior.log_evidence
    found = watcher.content(
        posterior, last=True, share=1.0, text=posterior.diagnostics.message, label=offer.label,
        notes=list(dict.fromkeys(notes))[:4], noise=_noise(posterior),
        evidence=None if evidence is None else [round(float(evidence), 2), evidence.kind],
    )  # fmt: skip
    return as_line({**found, "converged": posterior.diagnostics.converged})


def fit_of(fit: Fit, progress: Any = False) -> kn.Posterior:
    """The posterior of a fit."""
    offer, problem = offer_of(fit.method, fit.problem, judge=fit.judge), fit.problem
    return offer.make(problem).fit(
        problem.model(linear=offer.linear), problem.data, seed=problem.seed, progress=progress
    )


def _noise(posterior: kn.Posterior) -> float | None:
    """The standard deviation of the noise that was learned, or that was given."""
    likelihood = posterior.model.likelihood
    if not isinstance(likelihood, kn.Gaussian):
        return None
    values = posterior.predict(torch.zeros(1, 1), samples=50).aleatoric
    return float(f"{values.mean().sqrt().item():.4g}")


def answer(question: Question) -> bytes:
    """The answer to a question."""
    fit = question.fit
    offer = offer_of(fit.method, fit.problem, judge=fit.judge)

    def load(folder: str) -> kn.Posterior:
        net = fit.problem.features() if offer.linear and folder == fit.folder else fit.problem.network()
        return kn.load(folder, net=net)

    def again(part: Problem) -> kn.Posterior:
        return fit_of(replace(fit, problem=part, folder=""))

    posterior = load(fit.folder)
    given = dict(question.given)
    if question.reference:
        given["reference"] = load(question.reference)
    return as_line(
        ACTIONS[question.action](fit.problem, posterior, method=offer.make(fit.problem), again=again, **given)
    )


# --- the process -----------------------------------------------------------------------------------------------------


def work(connection: Connection) -> None:
    """Work until nobody asks any more."""
    for each in (signal.SIGINT, signal.SIGTERM):  # which are for the lab; it closes the connection
        signal.signal(each, signal.SIG_IGN)
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        _warm()
        connection.send(("ready", b""))
        while True:
            task = connection.recv()
            if task is not None:  # None stops what has ended in the meantime
                connection.send(_done(connection, task))


def _done(connection: Connection, task: Fit | Question) -> tuple[str, bytes]:
    try:
        with own_randomness(0):
            found = fit_and_tell(connection, task) if isinstance(task, Fit) else answer(task)
        return "done", found
    except Stopped:
        return "stopped", b""
    except (KnowableError, MemoryError) as error:
        return "failed", as_line({"error": str(error) or "There is not enough memory."})
    except (EOFError, OSError):
        raise
    except Exception as error:
        traceback.print_exc()
        return "failed", as_line({"error": f"The fit failed: {type(error).__name__}: {error}"})


def _warm() -> None:
    """Do small fits once, so that the first one that counts does not wait for what PyTorch loads late."""
    points = tuple((0.1 * each, 0.2 * each) for each in range(6))
    problem = Problem(points=points, width=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = problem.model()
        for method in (kn.Laplace(structure="full", epochs=3), kn.MeanFieldVI(epochs=2), kn.InfiniteWidth()):
            picture(problem, method.fit(model, problem.data, progress=False))


def folder_of(root: Path, key: str) -> str:
    """Where the posterior of a fit is saved."""
    return str(root / key[:32])
