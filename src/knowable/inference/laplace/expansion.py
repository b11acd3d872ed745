"""The place in weight space around which a posterior is expanded, and the data seen from there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice

import torch
from torch import Tensor
from torch.func import grad, vmap

from knowable.core.model.data import Data
from knowable.core.model.kronecker import unpack
from knowable.core.model.likelihood import LIKELIHOOD_PREFIX
from knowable.core.model.model import Model
from knowable.core.model.output_information import DiagonalInformation, EmpiricalInformation, OutputInformation
from knowable.core.network.params import Buffers, Layout, Params
from knowable.core.posterior.predicting import bytes_per_row
from knowable.core.support.randomness import generator_for
from knowable.errors import Unsupported
from knowable.inference.laplace.layers import Anatomy
from knowable.inference.laplace.tangents import differentiable
from knowable.inference.laplace.weight_uses import Recording, Use

# --- Gradients of each row's outputs in the network's parameters, in some directions of the outputs ------------------
#
# For layers they stay factored (gradients and activations at every position); for other parameters they are computed
# row
# by row. A Jacobian for all outputs is never held: whoever needs many directions asks for some at a time.


class Rows:
    """Some rows in the network at given parameters.

    Args:
        model: The model.
        anatomy: What the network's parameters are.
        params: Values of all parameters.
        x: The rows.
        buffers: The network's buffers.
    """

    def __init__(self, model: Model, anatomy: Anatomy, params: Params, x: Tensor, buffers: Buffers):
        self.model, self.anatomy, self.params, self.x, self.buffers = model, anatomy, params, x, buffers
        self.recording = Recording(model, anatomy.names, params, x, buffers, cut=False)

    @property
    def output(self) -> Tensor:
        """The network's output."""
        return self.recording.output.detach()

    @cached_property
    def activations(self) -> list[Tensor]:
        """For each layer what its matrix is multiplied with, ``(rows, positions, in)``."""
        return [self.anatomy.activations(self.recording, layer, len(self.x)) for layer in self.anatomy.layers]

    def head(self, number: int, information: OutputInformation) -> Use | None:
        """The use of a layer whose output is the network's, if that has independent positions in it.

        Then what targets say about the layer is known without following any direction back. None for other layers.
        """
        layer = self.anatomy.layers[number]
        use = self.recording.uses[layer.uses[0]]
        direct = self.anatomy.is_head(self.recording, layer) and information.couples_only(use.feature_dim)
        return use if direct else None

    def in_place(self, number: int, values: Tensor) -> Tensor:
        """Values at the outputs of a layer's only use, ``(..., out)``, as ``(rows, positions, out)``."""
        return self.anatomy.axes[self.anatomy.layers[number].uses[0]].rows_first(values, len(self.x))

    def gradients(self, directions: Tensor) -> list[Tensor]:
        """For each layer the gradients at its outputs of the outputs times each of K ``directions``.

        ``(K, rows, positions, out)``, for directions ``(K, *output)``.
        """
        found = self.recording.gradients(directions)
        return [self.anatomy.gradients(found, layer, len(self.x)) for layer in self.anatomy.layers]

    def others(self, directions: Tensor) -> Params:
        """For each other parameter the gradients of every row's outputs times ``directions``, ``(K, rows, *shape)``."""
        if not self.anatomy.others:
            return {}
        network = self.model.network_params(self.params)
        asked = {name: network[name].detach() for name in self.anatomy.others}

        def of_one_row(values: Params, row: Tensor, direction: Tensor) -> Tensor:
            output = self.model.network({**network, **values}, row.unsqueeze(0), buffers=self.buffers)
            return (output[0] * direction).sum()

        found = [self._row_by_row(grad(of_one_row), asked, direction) for direction in directions]
        return {name: torch.stack([each[name] for each in found]) for name in asked}

    def _row_by_row(self, gradient: Callable[..., Params], asked: Params, direction: Tensor) -> Params:
        with differentiable():
            try:
                return vmap(gradient, in_dims=(None, 0, 0))(asked, self.x, direction)
            except (RuntimeError, NotImplementedError):  # an operation that cannot be batched
                each = [gradient(asked, row, way) for row, way in zip(self.x, direction, strict=True)]
                return {name: torch.stack([found[name] for found in each]) for name in asked}

    def slope(self, y: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """Σ log p(y | x, θ) of the rows and its gradient ``(D,)``, in double precision."""
        with torch.enable_grad():
            output = self.output.requires_grad_()
            value = self.model.score(output, y, self.params).double().sum()
            (direction,) = torch.autograd.grad(value, output)
        return value.detach(), layout.flatten(self.recording.in_parameters(direction)).double()

    def flat(self, directions: Tensor, layout: Layout) -> Tensor:
        """Gradients of every row's outputs times ``directions`` in all parameters, ``(K, rows, D)``."""
        found = self.others(directions)
        for layer, a, g in zip(self.anatomy.layers, self.activations, self.gradients(directions), strict=True):
            matrix = g.mT @ a  # (K, rows, out, in): summed over positions
            found |= unpack(matrix, layer.names, layer.shapes)
        return layout.flatten(found)


# --- The place in weight space around which a posterior is expanded, and the data seen from there --------------------

CURVATURES = ("ggn", "empirical_fisher", "hessian")
Visit = Callable[[Rows, Tensor, int], None]
_BATCH_BYTES = 64 * 2**20  # working memory of one batch


@dataclass(frozen=True)
class Expansion:
    """A model at given weights, with its data.

    Attributes:
        model: The model.
        data: All rows.
        params: Values of all parameters: the weights, the likelihood's, the prior's.
        buffers: The network's buffers.
        kind: Which curvature: one of ``CURVATURES``.
        most_columns: Directions of the outputs followed one by one; beyond, as many random ones.
        seed: Fixes the random ones.
    """

    model: Model
    data: Data
    params: Params
    buffers: Buffers
    kind: str
    most_columns: int
    seed: int

    def at(self, params: Params) -> Expansion:
        """The same data seen from other weights."""
        return replace(self, params={**self.params, **params})

    @cached_property
    def layout(self) -> Layout:
        """The random weights, in their order."""
        names = random_weights(self.model)
        return Layout.of({name: self.params[name] for name in names})

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
        """How many noises there are, each with a part of the curvature that is proportional to 1 / noise²."""
        return 1 if self.noise_name is None or self.kind != "ggn" else self.params[self.noise_name].numel()

    @cached_property
    def some_rows(self) -> Tensor:
        """A few inputs, to look at what the network does with them."""
        return next(iter(self.data))[0][:8]

    @cached_property
    def anatomy(self) -> Anatomy:
        """What the random weights are in the network."""
        return Anatomy.of(self.model, self.layout.names, self.params, self.some_rows, self.buffers)

    def rows(self, x: Tensor) -> Rows:
        """Some rows, at these weights."""
        return Rows(self.model, self.anatomy, self.params, x, self.buffers)

    def batches(self, extra: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """All rows once, in batches whose working memory is bounded; ``extra`` bytes a row are added to what is known.

        What is known are the activations, their gradients, and the patches that convolutions see.
        """
        known = 3 * bytes_per_row(self.model, self.some_rows, self.buffers) + self._activation_bytes()
        count = max(1, _BATCH_BYTES // (known + extra))
        for x, y in self.data:
            yield from zip(x.split(count), y.split(count), strict=True)

    def _activation_bytes(self) -> int:
        sizes = [layer.positions * (layer.width + layer.out) for layer in self.anatomy.layers]
        return 2 * sum(sizes) * self.model.dtype.itemsize

    def informations(self, output: Tensor, y: Tensor) -> list[OutputInformation]:
        """What each row's target says about its outputs, one for each noise."""
        own = self.model.likelihood_params(self.params)
        if self.kind == "empirical_fisher":
            with torch.enable_grad():
                output = output.detach().requires_grad_()
                total = self.model.likelihood.log_prob(output, y, own).sum()
                return [EmpiricalInformation(torch.autograd.grad(total, output)[0])]
        information = self.model.likelihood.information(output, own)
        if self.groups == 1:
            return [information]
        assert isinstance(information, DiagonalInformation)  # a noise for each output means that they are independent
        return [information.of_group(group, self.groups) for group in range(self.groups)]

    def columns(self, information: OutputInformation, batch: int, extra: int = 0) -> Iterator[Tensor]:
        """Directions of the outputs that make up ``information`` of the batch of that number, some at a time.

        ``(K, *output)``, with K so that their gradients fit in memory; ``extra`` bytes for each row and direction are
        added to what the gradients at the layers take.
        """
        generator = generator_for(self.seed, "columns", batch, device=self.model.device)
        sizes = [layer.positions * layer.out for layer in self.anatomy.layers]
        each = information.shape[0] * (3 * sum(sizes) * self.model.dtype.itemsize + extra)
        found = information.columns(self.most_columns, generator)
        most = 1 if self.anatomy.one_by_one else max(1, _BATCH_BYTES // max(1, each))
        while some := list(islice(found, most)):
            yield torch.stack(some)

    def sweep(self, add: Visit, extra: int = 0) -> None:
        """Hand all rows once, with their targets and the batch's number, to ``add``; then :attr:`slope` is known too.

        No batch is kept while the next one is computed.
        """
        value, gradient = self._nothing()
        for number, (x, y) in enumerate(self.batches(extra)):
            part, slope = self._visited(add, x, y, number)
            value, gradient = value + part, gradient + slope
        self.__dict__["slope"] = value, gradient

    def _visited(self, add: Visit, x: Tensor, y: Tensor, number: int) -> tuple[Tensor, Tensor]:
        rows = self.rows(x)
        add(rows, y, number)
        return rows.slope(y, self.layout)

    @cached_property
    def slope(self) -> tuple[Tensor, Tensor]:
        """Log p(D | θ) and its gradient in the random weights, ``(D,)``, in double precision."""
        self.sweep(lambda rows, y, number: None)
        return self.__dict__["slope"]

    def _nothing(self) -> tuple[Tensor, Tensor]:
        like = {"dtype": torch.float64, "device": self.model.device}
        return torch.zeros((), **like), torch.zeros(self.layout.size, **like)

    @cached_property
    def probes(self) -> bool:
        """Whether the outputs are so many that random directions stand for them."""
        outputs = self.model.network.probe(self.some_rows, self.model.network_params(self.params), self.buffers)[
            0
        ].numel()
        return self.kind == "ggn" and outputs > self.most_columns


def random_weights(model: Model) -> tuple[str, ...]:
    """Names of the network's parameters that are random; the likelihood's own are points here."""
    names = tuple(name for name in model.random_names if not name.startswith(LIKELIHOOD_PREFIX))
    if not names:
        raise Unsupported("Laplace needs random weights in the network, but only the likelihood's parameters are.")
    return names
