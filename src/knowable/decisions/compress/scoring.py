"""How good one network is on data, by the model's likelihood."""

from __future__ import annotations

import torch
from torch import nn

from knowable.core.data import Data
from knowable.core.posterior import Posterior
from knowable.core.prediction import ClassPrediction, Prediction
from knowable.evaluation.scores import accuracy, nll, rmse


def score(net: nn.Module, posterior: Posterior, data: Data) -> dict[str, float]:
    """``accuracy`` (labels) or ``rmse`` (numbers), and ``nll``, of a single network in place of the posterior's draws.

    The likelihood's own parameters are at their posterior means.
    """
    prediction = _predict(net, posterior, data)
    y = torch.cat([batch[1] for batch in data])
    found = {"nll": nll(prediction, y)}
    if isinstance(prediction, ClassPrediction):
        return {"accuracy": accuracy(prediction, y), **found}
    return {"rmse": rmse(prediction, y), **found}


@torch.no_grad()
def _predict(net: nn.Module, posterior: Posterior, data: Data) -> Prediction:
    model = posterior.model
    outputs = torch.cat([net(batch[0]) for batch in data]).unsqueeze(0)  # one draw
    own = {name: value.unsqueeze(0) for name, value in model.likelihood_params(posterior.mean()).items()}
    return model.likelihood.predict(outputs, own, outputs.new_zeros(1))
