"""What the kill test of comparisons runs in processes of its own: a comparison that resumes."""

from __future__ import annotations

import torch
import torch._dynamo  # the first optimiser of a process loads it: here once for all of them
from torch import nn

import knowable as kn

METHODS = {
    "point": kn.MAP(epochs=150),
    "mean field": kn.MeanFieldVI(epochs=150),
    "chains": kn.NUTS(chains=2, warmup=20, draws=20, start="network", max_depth=5),
}
FOLDS = 3


def compare(out: str | None = None) -> kn.Comparison:
    """Three methods on three folds, the chains as the reference; the same in every process."""
    torch.set_num_threads(1)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        x = torch.randn(45, 2)
        y = torch.sin(x[:, 0]) + 0.1 * torch.randn(45)
    model = kn.Model(net, kn.Gaussian())
    return kn.compare(
        model, (x, y), methods=METHODS, cv=FOLDS, seed=5, out=out, outside=x + 9.0, samples=32, progress=False
    )


def compare_and_export(out: str, table: str) -> None:
    """Compare, resuming what is there, and write the table at the very end."""
    compare(out).to_json(table)
