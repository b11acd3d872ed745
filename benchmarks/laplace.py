"""Time and memory of Laplace approximations, over those of laplace-torch.

Both sides begin at the same weights of the same network, with the same prior, and see the same rows: a fit goes through
all of them once. A prediction linearises the network in its weights and averages class probabilities by the probit
approximation. Where laplace-torch has several backends, all that can do the job are shown.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.harness import Case, Factory, Plan, Step
from benchmarks.networks import NETWORKS, SMALL_MLP, Network

if TYPE_CHECKING:
    import knowable as kn

PACKAGES = ("laplace-torch", "curvlinops-for-pytorch", "backpack-for-pytorch", "asdfghjkl")
PRIOR_SCALE = 1.0
_FEW = 200  # rows fitted to before predictions are timed: their time does not depend on it


@dataclass(frozen=True)
class Job:
    """What is to be approximated.

    Attributes:
        network: The network and the shape of its inputs.
        structure: What of the curvature is kept: ``"kron"``, ``"diag"`` or ``"full"``.
        last_layer: Whether only the last layer's weights are random.
        rows: Rows of a fit.
        inputs: Rows of a prediction.
        share: How many of the inputs laplace-torch predicts, where all of them would take it minutes.
    """

    network: Network
    structure: str
    last_layer: bool
    rows: int = 10_000
    inputs: int = 1_000
    share: int = 1_000

    @property
    def title(self) -> str:
        """For the tables."""
        weights = "last layer" if self.last_layer else "all weights"
        return f"{self.network.title}, {self.structure}, {weights}"


@dataclass(frozen=True)
class Peer:
    """A way to use laplace-torch.

    Attributes:
        backend: What computes its curvature and its Jacobians.
        batch: Rows at a time.
    """

    backend: str
    batch: int

    def __str__(self) -> str:
        return f"laplace-torch, {self.backend}"


# The first is the reference: for kron of all weights the quickest of three. The others, and all batches, are guesses.
FIT_PEERS = {
    ("kron", False): (Peer("BackPackGGN", 500), Peer("CurvlinopsGGN", 500), Peer("AsdlGGN", 500)),
    ("diag", False): (Peer("BackPackGGN", 100), Peer("AsdlGGN", 100)),
    ("kron", True): (Peer("BackPackGGN", 500), Peer("CurvlinopsGGN", 500), Peer("AsdlGGN", 500)),
    ("full", True): (Peer("BackPackGGN", 500), Peer("CurvlinopsGGN", 500)),
}
PREDICT_PEERS = {
    ("kron", False): (Peer("CurvlinopsGGN", 10),),
    ("diag", False): (Peer("CurvlinopsGGN", 10),),
    ("kron", True): (Peer("CurvlinopsGGN", 100),),
    ("full", True): (Peer("CurvlinopsGGN", 1_000),),
}


def cases(*, quick: bool) -> list[Case]:
    """Two tables, of fits and of predictions, for each network and structure."""
    networks = {"mlp": SMALL_MLP} if quick else {name: NETWORKS[name] for name in ("mlp", "lenet")}
    found = []
    for name, network in networks.items():
        for structure, last_layer in FIT_PEERS:
            job = Job(network, structure, last_layer, share=1_000 if last_layer else 20)
            job = replace(job, rows=60, inputs=8, share=4) if quick else job
            stem = f"{name}_{'last_' * last_layer}{structure}"
            found += [_fit_case(f"{stem}_fit", job), _predict_case(f"{stem}_predict", job)]
    return found


def _fit_case(name: str, job: Job) -> Case:
    peers = FIT_PEERS[job.structure, job.last_layer]
    contenders: dict[str, Factory] = {str(peer): partial(their_fit, job, peer) for peer in peers}
    return Case(
        name=name,
        title=f"{job.title}: fit to {job.rows:,} rows",
        contenders={**contenders, "knowable": partial(our_fit, job)},
        reference=str(peers[0]),
        plan=Plan(rounds=5, inner=1, warmup=1),
        packages=PACKAGES,
        note="What a fit takes beyond the data and the network is peak less built.",
    )


def _predict_case(name: str, job: Job) -> Case:
    peers = PREDICT_PEERS[job.structure, job.last_layer]
    share = f" for {job.share:,} of them" if job.share < job.inputs else ""
    contenders: dict[str, Factory] = {f"{peer}{share}": partial(their_prediction, job, peer) for peer in peers}
    return Case(
        name=name,
        title=f"{job.title}: linearised prediction for {job.inputs:,} inputs",
        contenders={**contenders, "knowable": partial(our_prediction, job)},
        reference=f"{peers[0]}{share}",
        plan=Plan(rounds=5, inner=1, warmup=1),
        packages=PACKAGES,
        note=f"Fitted to {_FEW} rows before." + f" laplace-torch predicts {share[5:]}." * bool(share),
    )


# --- knowable --------------------------------------------------------------------------------------------------------


def our_fit(job: Job) -> Step:
    """``Laplace.fit`` around the network's weights; with the evidence, which comes with it."""
    net, data = job.network.make(), job.network.data(job.rows)

    def step() -> float:
        evidence = our_posterior(job, net, *data).log_evidence
        assert evidence is not None
        return float(evidence)

    return step


def our_prediction(job: Job) -> Step:
    """``posterior.predict`` called again and again, as a service would."""
    posterior = our_posterior(job, job.network.make(), *job.network.data(min(_FEW, job.rows)))
    x, _ = job.network.data(job.inputs, seed=2)
    return lambda: posterior.predict(x).probs


def our_posterior(job: Job, net: nn.Module, x: Tensor, y: Tensor) -> kn.Posterior:
    import knowable as kn

    random = "last_layer" if job.last_layer else "*"
    model = kn.Model(net, kn.Categorical(), kn.Normal(PRIOR_SCALE), random=random)
    return kn.Laplace(structure=job.structure, tune="never").fit(model, (x, y), start="network")


# --- laplace-torch ---------------------------------------------------------------------------------------------------


def their_fit(job: Job, peer: Peer) -> Step:
    """``la.fit`` around the network's weights. What it computes at the first prediction only is not in it."""
    net, data = job.network.make(), job.network.data(job.rows)
    return lambda: float(their_posterior(job, peer, net, *data).loss)


def their_prediction(job: Job, peer: Peer) -> Step:
    """``la(x)`` on batches of inputs, called again and again."""
    net, data = job.network.make(), job.network.data(min(_FEW, job.rows))
    posterior = their_posterior(job, replace(peer, batch=20), net, *data)
    x, _ = job.network.data(job.inputs, seed=2)
    return lambda: their_probs(posterior, x[: job.share], peer.batch)


def their_posterior(job: Job, peer: Peer, net: nn.Module, x: Tensor, y: Tensor) -> Any:
    laplace = _laplace_torch()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = laplace.Laplace(
            net,
            "classification",
            subset_of_weights="last_layer" if job.last_layer else "all",
            hessian_structure=job.structure,
            prior_precision=PRIOR_SCALE**-2,
            backend=getattr(laplace.curvature, peer.backend),
        )
        made.fit(Batches(x, y, peer.batch))
    return made


def their_probs(posterior: Any, x: Tensor, batch: int) -> Tensor:
    """Class probabilities, a batch of inputs at a time."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.cat([posterior(part, link_approx="probit").detach() for part in x.split(batch)])


class Batches:
    """What laplace-torch asks of a DataLoader, at no cost: slices of tensors in memory."""

    def __init__(self, x: Tensor, y: Tensor, batch_size: int):
        self.dataset, self.batch_size = TensorDataset(x, y), batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return zip(*(each.split(self.batch_size) for each in self.dataset.tensors), strict=True)

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.batch_size)


def _laplace_torch() -> Any:
    """The package; what it warns of while it is imported is not our concern."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module("laplace.curvature")
        return importlib.import_module("laplace")
