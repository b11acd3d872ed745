"""A posterior for other runtimes: K networks and what is predicted from them, as one program without Python."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from knowable.core.model.data import as_input
from knowable.core.network.params import index_params
from knowable.core.posterior.posterior import Posterior
from knowable.core.prediction.prediction import ClassPrediction, RegressionPrediction
from knowable.core.support.checks import check_count, check_type
from knowable.decisions.compress.compression import network_at
from knowable.decisions.compress.saving import export_onnx, export_program
from knowable.errors import Unsupported

NUMBERS = ("mean", "variance", "aleatoric", "epistemic")
CLASSES = ("probs", "total", "aleatoric", "epistemic")
_CLOSE = 1e-4  # of the largest value, by which the program may differ from the prediction


@torch.no_grad()
def export(posterior: Posterior, path: str | os.PathLike[str], example: Any, *, samples: int = 64) -> Path:
    """Write a posterior's prediction as a ``torch.export`` program (``.pt2``) or an ONNX file (``.onnx``).

    The file holds the network once for each draw, and takes as long as ``posterior.predict`` with so many. A point
    estimate is one network. For one pass that knows what many draws do, see :func:`knowable.distill`.

    Inputs are rows as the network takes them, in batches of any size. Outputs, in this order: for numbers ``mean``,
    ``variance``, ``aleatoric`` and ``epistemic`` variance; for classes ``probs``, and in nats ``total``, ``aleatoric``
    and ``epistemic``.

    Args:
        posterior: A fitted posterior.
        path: The file, whose ending says which.
        example: Some inputs. What the program predicts for them is compared with the posterior before it is written.
        samples: Number of draws; those of ``posterior.predict``.

    Raises:
        Unsupported: If the posterior predicts otherwise than by its network's outputs under draws of the weights.
        MissingExtra: If onnx or onnxscript is not installed.

    Example:
        >>> import knowable as kn
        >>> x = torch.randn(50, 2)
        >>> model = kn.Model(torch.nn.Linear(2, 1), kn.Gaussian(0.1))
        >>> posterior = kn.MeanFieldVI(epochs=20).fit(model, (x, x.sum(1)))
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     file = kn.export(posterior, f"{folder}/model.pt2", x, samples=8)
        ...     mean, variance, aleatoric, epistemic = torch.export.load(file).module()(x)
        >>> torch.allclose(mean, posterior.predict(x, samples=8).mean, atol=1e-5)
        True
    """
    check_type("posterior", posterior, Posterior, "a fitted posterior")
    x = as_input(example, posterior.model)
    if not isinstance(x, Tensor):
        raise Unsupported("export is for networks of one input.")
    program = _Program(posterior, x, check_count("samples", samples)).eval()
    if str(path).endswith(".onnx"):
        return export_onnx(program, x, path, outputs=program.names)
    return export_program(program, x, path)


class _Program(nn.Module):
    """The networks of all draws, and what the likelihood makes of their outputs."""

    def __init__(self, posterior: Posterior, x: Tensor, samples: int):
        super().__init__()
        seed, model = posterior.seed, posterior.model
        count, log_weights = posterior.draws_for_prediction(samples, seed)
        draws = posterior.draw_block(0, count, samples, seed)
        buffers = posterior.buffer_block(0, count, samples, seed)
        nets = [
            network_at(model, index_params(draws, k), {**posterior.buffers, **index_params(buffers, k)})
            for k in range(count)
        ]
        self.nets = nn.ModuleList(nets)
        self.noise = nn.ParameterDict(model.likelihood_params(draws)).requires_grad_(False)
        self.log_weights = nn.Parameter(log_weights, requires_grad=False)
        self._likelihood, self._target_shape = model.likelihood, posterior.target_shape
        expected = posterior.predict(x, samples=samples)
        if not isinstance(expected, ClassPrediction | RegressionPrediction):
            raise Unsupported(f"export is for predictions of numbers or classes, not a {type(expected).__name__}.")
        self.names = CLASSES if isinstance(expected, ClassPrediction) else NUMBERS
        for name, value in zip(self.names, self(x), strict=True):
            true = getattr(expected, name)
            size = (true if name in ("mean", "probs") else expected.total).abs().max()
            if value.shape != true.shape or not (value - true).abs().max() <= _CLOSE * size:
                raise Unsupported(
                    f"{type(posterior).__name__} does not predict by its network's outputs under draws of the weights, "
                    f"which is all that can be exported: {name} would be another. Distil it, and export the student."
                )

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """What is predicted, in the order of the names."""
        outputs = torch.stack([net(x) for net in self.nets])
        found = self._likelihood.predict(outputs, dict(self.noise.items()), self.log_weights)
        found = found.shaped(self._target_shape)
        return tuple(getattr(found, name) for name in self.names)
