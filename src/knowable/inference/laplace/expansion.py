"""The weights around which a Laplace approximation is expanded, with the data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor

from knowable.core.model.data import Batch, Data
from knowable.core.model.joint_normal import JointNormal
from knowable.core.model.likelihood import (
    LIKELIHOOD_PREFIX,
    DiagonalInformation,
    EmpiricalInformation,
    OutputInformation,
)
from knowable.core.model.model import Model
from knowable.core.network.jacobian import BatchJacobian
from knowable.core.network.layers import Layer, NetworkLayers
from knowable.core.network.params import Buffers, Layout, Params
from knowable.core.network.weight_uses import WeightUse
from knowable.core.posterior.monte_carlo import bytes_per_row
from knowable.core.support.randomness import generator_for
from knowable.errors import Unsupported

CURVATURES = ("ggn", "empirical_fisher", "hessian")
Visit = Callable[..., None]  # (jacobian, number of the batch, y, and the rows' weights if they have any)
_BATCH_BYTES = 64 * 2**20  # working memory of one batch
_DRAWS = 64  # over which a curvature is averaged, at least, where there are as many rows


@dataclass(eq=False)
class ExpansionPoint:
    """A model at given weights, with its data."""

    model: Model
    data: Data
    params: Params  # of all parameters: the weights, the likelihood's, the prior's
    buffers: Buffers
    kind: str  # one of CURVATURES
    most_columns: int  # output directions that are differentiated one by one; beyond, as many random ones
    seed: int  # fixes the random directions
    around: JointNormal | None = None  # draws of the weights over which the curvature is averaged; None: at the weights
    _likelihood: tuple[Tensor, Tensor] | None = field(default=None, init=False, repr=False)

    def at(self, params: Params) -> ExpansionPoint:
        """The same data at other parameters."""
        return replace(self, params={**self.params, **params})

    @cached_property
    def layout(self) -> Layout:
        """The random weights, in their order."""
        return Layout.of({name: self.params[name] for name in random_weights(self.model)})

    @property
    def weights(self) -> Params:
        """The random weights."""
        return {name: self.params[name] for name in self.layout.names}

    @cached_property
    def noise_name(self) -> str | None:
        """The likelihood's noise, if it is a parameter that may change."""
        short = self.model.likelihood.noise_name
        name = None if short is None else LIKELIHOOD_PREFIX + short
        return name if name in self.params else None

    @property
    def groups(self) -> int:
        """Number of noise scales, each with a part of the curvature that is proportional to 1 / noise²."""
        return 1 if self.noise_name is None or self.kind != "ggn" else self.params[self.noise_name].numel()

    @cached_property
    def some_rows(self) -> Tensor:
        """A few inputs, on which the network is traced."""
        return self.data.first[0][:8]

    @cached_property
    def layers(self) -> NetworkLayers:
        """What the random weights are in the network."""
        params = self.model.network_params(self.params)
        return NetworkLayers.of(self.model.network, self.layout.names, params, self.some_rows, self.buffers)

    @cached_property
    def has_random_columns(self) -> bool:
        """Whether the outputs are so many that random directions stand for them."""
        params = self.model.network_params(self.params)
        outputs = self.model.network.probe(self.some_rows, params, self.buffers)[0].numel()
        return self.kind == "ggn" and outputs > self.most_columns

    @cached_property
    def is_head(self) -> bool:
        """Whether the one random layer is the output layer, so that no direction of the outputs is differentiated."""
        layer = self.layers.only
        if layer is None or self.kind != "ggn":
            return False
        with torch.no_grad():
            rows = self.jacobian(self.some_rows)
            information = self.model.likelihood.information(rows.output, self.model.likelihood_params(self.params))
        return head_use(rows, layer, information) is not None

    # --- passes over the data ----------------------------------------------------------------------------------------

    def jacobian(self, x: Tensor, weights: Params | None = None) -> BatchJacobian:
        """The Jacobian of some rows, at these weights or others."""
        params = self.model.network_params({**self.params, **(weights or {})})
        return BatchJacobian(self.model.network, self.layers, params, x, self.buffers)

    def batches(self, extra: int = 0) -> Iterator[Batch]:
        """All rows once, in batches of bounded working memory; ``extra`` bytes per row are added to what is known.

        What is known are the activations, their gradients, and the patches of convolutions.
        """
        sizes = [layer.positions * (layer.width + layer.out) for layer in self.layers]
        activations = 2 * sum(sizes) * self.model.dtype.itemsize
        known = 3 * bytes_per_row(self.model, self.some_rows, self.buffers) + activations
        count = max(1, _BATCH_BYTES // (known + extra))
        if self.around is not None:
            count = max(1, min(count, self.data.size // _DRAWS))
        for batch in self.data:
            yield from zip(*(each.split(count) for each in batch), strict=True)

    def sweep(self, visit: Visit, extra: int = 0) -> None:
        """Call ``visit(jacobian, number, y, *weights)`` for each of :meth:`batches`, and sum up :meth:`log_likelihood`.

        No batch is kept while the next one is computed. Where the curvature is averaged over draws, each batch has a
        draw of its own, and there is no log likelihood.
        """
        if self.around is not None:
            for number, (x, *rest) in enumerate(self.batches(extra)):
                generator = generator_for(self.seed, "around", number, device=self.model.device)
                drawn = {name: value[0] for name, value in self.around.sample(1, generator).items()}
                visit(self.jacobian(x, drawn), number, *rest)
            return
        like = {"dtype": torch.float64, "device": self.model.device}
        total, gradient = torch.zeros((), **like), torch.zeros(self.layout.size, **like)
        for number, batch in enumerate(self.batches(extra)):
            part, slope = self._visited(visit, number, *batch)
            total, gradient = total + part, gradient + slope
        self._likelihood = total, gradient

    def _visited(self, visit: Visit, number: int, x: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
        jacobian = self.jacobian(x)
        visit(jacobian, number, *rest)
        with torch.enable_grad():
            output = jacobian.output.requires_grad_()
            value = self.model.score(output, rest[0], self.params, *rest[1:]).double().sum()
            (direction,) = torch.autograd.grad(value, output)
        gradient = self.layout.flatten(jacobian.trace.in_parameters(direction)).double()
        return value.detach(), gradient

    def log_likelihood(self) -> tuple[Tensor, Tensor]:
        """The log likelihood log p(D | θ) and its gradient in the random weights, ``(D,)``, in double precision."""
        if self._likelihood is None:
            self.sweep(lambda *_: None)
        assert self._likelihood is not None
        return self._likelihood

    # --- the Fisher information in the outputs -----------------------------------------------------------------------

    def informations(self, output: Tensor, y: Tensor, weights: Tensor | None = None) -> list[OutputInformation]:
        """The Fisher information of each row's outputs (times its weight), one for each noise scale."""
        found = self._informations(output, y)
        return found if weights is None else [each.weighted(weights) for each in found]

    def _informations(self, output: Tensor, y: Tensor) -> list[OutputInformation]:
        own = self.model.likelihood_params(self.params)
        if self.kind == "empirical_fisher":
            with torch.enable_grad():
                output = output.detach().requires_grad_()
                total = self.model.likelihood.log_prob(output, y, own).sum()
                return [EmpiricalInformation(torch.autograd.grad(total, output)[0])]
        information = self.model.likelihood.information(output, own)
        counted = self.model.likelihood.counted(y)
        information = information if counted is None else information.only(counted)
        if self.groups == 1:
            return [information]
        assert isinstance(information, DiagonalInformation)  # a noise for each output means that they are independent
        return [information.of_group(group, self.groups) for group in range(self.groups)]

    def columns(self, information: OutputInformation, batch: int, extra: int = 0) -> Iterator[Tensor]:
        """Columns of a root of ``information`` for the batch of that number, some at a time.

        ``(K, *output)``, with K so that their gradients fit in memory; ``extra`` bytes for each row and direction are
        added to what the gradients at the layers take.
        """
        generator = generator_for(self.seed, "columns", batch, device=self.model.device)
        sizes = [layer.positions * layer.out for layer in self.layers]
        each = information.shape[0] * (3 * sum(sizes) * self.model.dtype.itemsize + extra)
        found = information.columns(self.most_columns, generator)
        most = 1 if self.layers.convolves else max(1, _BATCH_BYTES // max(1, each))
        while some := list(islice(found, most)):
            yield torch.stack(some)


def head_use(jacobian: BatchJacobian, layer: Layer, information: OutputInformation) -> WeightUse | None:
    """The use of a layer whose output is the network's, if ``information`` couples no two positions of it.

    Then the layer's curvature follows from ``information`` without a backward pass. None for other layers.
    """
    use = jacobian.trace.uses[layer.uses[0]]
    return use if jacobian.is_head(layer) and information.couples_only(use.feature_dim) else None


def random_weights(model: Model) -> tuple[str, ...]:
    """Names of the network's parameters that are random; the likelihood's own are point estimates here."""
    names = tuple(name for name in model.random_names if not name.startswith(LIKELIHOOD_PREFIX))
    if not names:
        raise Unsupported(
            "Laplace needs random weights in the network, but only the likelihood's parameters are random. Choose "
            "weights with Model(..., random=...)."
        )
    return names
