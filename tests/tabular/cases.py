"""Methods and networks that are quick enough to be fitted a hundred times."""

from __future__ import annotations

import numpy as np
import pandas as pd
from torch import nn

import knowable as kn


def small_network(inputs: int, outputs: int) -> nn.Module:
    """Eight hidden units in double precision."""
    return nn.Sequential(nn.Linear(inputs, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def linear_network(inputs: int, outputs: int) -> nn.Module:
    return nn.Linear(inputs, outputs).double()


QUICK = {
    "map": kn.MAP(epochs=80, learning_rate=0.05),
    "laplace": kn.Laplace(structure="kron", epochs=80, learning_rate=0.05),
    "mean_field_vi": kn.MeanFieldVI(epochs=120, learning_rate=0.05),
    "mc_dropout": kn.MCDropout(0.05, epochs=100, learning_rate=0.05),
    "deep_ensemble": kn.DeepEnsemble(members=2, epochs=80, learning_rate=0.05),
    "swag": kn.SWAG(epochs=80, learning_rate=0.05, snapshots=5, rate=1e-4),
    "nuts": kn.NUTS(chains=2, draws=5, warmup=15, start="map", max_depth=3),
}


def mixed_frame(rows: int = 80, seed: int = 0) -> tuple[pd.DataFrame, np.ndarray]:
    """Numbers, categories, dates, yes and no, and gaps; the target depends on the first two."""
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {
            "size": rng.normal(100, 20, rows),
            "colour": rng.choice(["red", "blue", "green"], rows),
            "member": rng.choice([True, False], rows),
            "joined": pd.date_range("2021-01-01", periods=rows, freq="11D"),
        }
    )
    y = 0.1 * frame["size"].to_numpy() + 3.0 * (frame["colour"] == "red").to_numpy() + 0.1 * rng.normal(size=rows)
    frame.loc[::7, "size"] = np.nan
    frame.loc[::9, "colour"] = None
    return frame, y
