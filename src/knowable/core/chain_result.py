"""What a run of chains leaves behind, and when its chains count as mixed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from knowable.core.kernel import State

FEW = 100  # draws of a chain: where the user asks for fewer, nothing is said of mixing


@dataclass(frozen=True)
class Mixing:
    """When chains count as mixed, and how long they may try.

    Attributes:
        rhat: Largest R-hat allowed.
        ess: Least bulk and tail effective sample size, over all chains.
        first: Draws of each chain before the first look; the next looks are at twice as many each time.
        most: Draws of each chain after which it gives up.
    """

    rhat: float = 1.01
    ess: float = 400.0
    first: int = 250
    most: int = 8000

    def reached(self, found: dict[str, float], draws: int | None) -> bool | None:
        """Whether this is what was ``found``; None if there are too few draws to tell.

        Where so many ``draws`` were asked for, only what is clearly wrong is said.
        """
        if found["rhat"] != found["rhat"] or (draws or FEW) < FEW:
            return None
        enough = min(found["ess_bulk"], found["ess_tail"])
        if draws is not None:
            return found["rhat"] <= max(self.rhat, 1.05) and enough >= min(self.ess, 100.0)
        return found["rhat"] <= self.rhat and enough >= self.ess


@dataclass(frozen=True)
class ChainResult:
    """What a run of chains leaves behind.

    Attributes:
        draws: ``(chains, draws, D)``.
        monitored: The watched quantities of every transition that was to be kept, ``(chains, n, M)``.
        values: Log densities of the draws, ``(chains, draws)``.
        info: What the kernel said of them, ``(chains, draws)``.
        terms: Numbers for the report.
        state: The kernel's last state.
        converged: Whether the chains have mixed; None where there are too few draws to tell.
        out_of_time: Whether a limit of time ended the run.
    """

    draws: Tensor
    monitored: Tensor
    values: Tensor
    info: dict[str, Tensor]
    terms: dict[str, float]
    state: State
    converged: bool | None
    interrupted: bool
    message: str
    seconds: float
    out_of_time: bool = False


def info_terms(info: dict[str, Tensor]) -> dict[str, float]:
    """Numbers for the report, of what the kernel said of each draw ``(chains, draws)``."""
    terms = {}
    if "acceptance" in info:
        terms["acceptance"] = info["acceptance"].double().mean().item()
    if "diverging" in info:
        terms["divergences"] = info["diverging"].double().sum().item()
    if "steps" in info:
        terms["steps"] = info["steps"].double().mean().item()
    if "energy" in info and info["energy"].shape[1] > 1:
        energy = info["energy"].double()  # E-BFMI (Betancourt, 2016): below 0.3 momenta explore the energies poorly
        terms["ebfmi"] = (energy.diff(dim=1).square().mean(1) / energy.var(1).clamp_min(1e-300)).min().item()
    return terms
