"""What a likelihood must be able to do.

A likelihood turns the network's output into a distribution over the target. Its own parameters (a noise scale) are
parameters of the model like any other: they are passed in, they have priors, and they get a posterior.
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from inspect import isabstract
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from knowable.core.model.prior import Prior
from knowable.core.network.outputs import Output
from knowable.core.network.params import Params
from knowable.core.prediction.components import NormalOutputs, root_of
from knowable.core.prediction.prediction import Prediction, align_target
from knowable.core.support.tensors import to_tensor
from knowable.errors import Unsupported

LIKELIHOOD_PREFIX = "likelihood."


class Likelihood(ABC):
    """p(y | output, own parameters): what every likelihood can do, and what one of your own has to.

    For a distribution that ``torch.distributions`` has, or that can be written as one,
    :class:`~knowable.likelihoods.distribution.DistributionLikelihood` does all of it. A subclass of this class defines

    - :meth:`check_target`, :meth:`log_prob` and :meth:`predict`: enough for every method but those below;
    - :meth:`params` and :meth:`priors`, if it has parameters of its own, such as a noise scale. They are parameters of
      the model called ``likelihood.<name>``: any real numbers (so a logarithm of a scale), learned with the weights;
    - :meth:`information`, for ``Laplace`` with its default curvature;
    - :meth:`align`, if targets do not have the shape of the outputs.

    :meth:`log_prob` must do without branches on values, since samplers and ensembles run it under ``torch.func.vmap``.
    Rows are independent: each has its own log probability. Concrete likelihoods are frozen dataclasses whose fields are
    plain numbers, so that they can be saved; ``knowable.load(path, classes=[...])`` finds those that are yours.
    ``MomentVI`` and ``ExactLinear`` know some likelihoods only, and say so.

    Attributes:
        noise_name: The own parameter, if there is one, that is the logarithm of the outputs' noise: their information
            is proportional to exp(-2 of it). One number, or one for each entry of the last dimension.
        labels: Whether targets are labels, counted from 0, and not numbers: classes may then have weights.
        copies: How many tensors of the size of the outputs :meth:`predict` holds at once, the outputs among them, for
            the memory limit of predictions.
    """

    copies: ClassVar[int] = 3
    noise_name: ClassVar[str | None] = None
    labels: ClassVar[bool] = False

    def params(self) -> Params:
        """Initial values of the likelihood's own parameters, by short name (none by default)."""
        return {}

    def priors(self) -> dict[str, Prior]:
        """Default priors of its own parameters, by the same short names."""
        return {}

    def for_network(self, output: Any) -> tuple[Self, Output | None]:
        """This likelihood in one model, and which tensor it takes of what the network returns."""
        return self, output

    def rows_of(self, y: Any, name: str = "y") -> Tensor:
        """Targets as a user passes them, with the rows first; nothing else is checked."""
        return to_tensor(y, name)

    def align(self, y: Tensor, output: Tensor) -> Tensor:
        """Give ``y`` the shape that :meth:`log_prob` wants, and whole numbers its dtype; values are not checked."""
        return align_target(y if y.is_floating_point() else y.to(output.dtype), output.shape[1:])

    @abstractmethod
    def check_target(self, y: Tensor, output: Tensor, *, name: str = "y") -> Tensor:
        """Return ``y`` cast and shaped to be scored against outputs like ``output``, or raise InvalidData saying where.

        ``output`` is the network's output on a row or two of the data: only its trailing shape, dtype and device
        matter.
        """

    def counted(self, y: Tensor) -> Tensor | None:
        """Which of the targets ``y`` count, in their shape; None where all do. The others add nothing to log_prob."""
        return None

    def doubts(self, y: Tensor, output: Tensor, last_operation: str) -> list[str]:
        """Sentences about targets and outputs that are allowed but probably not meant.

        Args:
            y: All targets, checked.
            output: The network's output on some rows.
            last_operation: Name of the operation that made it (``"Softmax"``), as autograd knows it.
        """
        return []

    @abstractmethod
    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        """Log likelihood per example, ``(batch,)``, for one draw of parameters; extra output dimensions are summed."""

    @abstractmethod
    def predict(self, outputs: Tensor, params: Params, log_weights: Tensor) -> Prediction:
        """The predictive distribution from K draws.

        Args:
            outputs: Network outputs, ``(K, batch, ...)``.
            params: The likelihood's own parameters by short name, each with a leading dimension K.
            log_weights: Normalised log weights of the draws, ``(K,)``.
        """

    def identified(self, outputs: Tensor) -> Tensor:
        """What data can identify of outputs ``(K, batch, ...)``: probabilities of labels, otherwise outputs themselves.

        R-hat is taken of this: a shift common to all logits changes no probability, and chains need not agree on it.
        """
        return outputs

    def predict_normal(self, outputs: NormalOutputs, params: Params) -> Prediction:
        """The predictive distribution where outputs are normal: in closed form if there is one, else from the draws.

        Args:
            outputs: Normal distributions over the outputs of each row.
            params: The likelihood's own parameters by short name, one value each.
        """
        stack = {name: value.expand(len(outputs.draws), *value.shape) for name, value in params.items()}
        return self.predict(outputs.draws, stack, outputs.log_weights)

    def information(self, output: Tensor, params: Params) -> OutputInformation:
        """The Fisher information of each row's target in its outputs ``(batch, ...)``."""
        raise Unsupported(
            f"{type(self).__name__} does not implement information(), the Fisher information in the network's outputs, "
            f"which curvature='ggn' needs. Define it, or use curvature='empirical_fisher' or 'hessian'."
        )


_LOSSES = {  # of torch, and the likelihood whose negative logarithm each is, up to constants
    "MSELoss": "Gaussian()",
    "L1Loss": "StudentT()",
    "SmoothL1Loss": "StudentT()",
    "HuberLoss": "StudentT()",
    "CrossEntropyLoss": "Categorical()",
    "NLLLoss": "Categorical()",
    "BCEWithLogitsLoss": "Bernoulli()",
    "BCELoss": "Bernoulli(), with a network that ends before the sigmoid",
    "PoissonNLLLoss": "Poisson()",
    "GaussianNLLLoss": "HeteroscedasticGaussian()",
}


def no_likelihood(given: object) -> str:
    """What to say about a thing that is not a likelihood."""
    if isinstance(given, type) and issubclass(given, Likelihood):
        return f"likelihood must be an instance: write {given.__name__}() with parentheses."
    ours = [each for each in Likelihood.__subclasses__() if each.__module__.startswith("knowable.likelihoods.")]
    names = sorted(each.__name__ for each in ours if not isabstract(each))
    if given is None:
        return (
            f"likelihood is missing: it says what the network's output means. Choose one of "
            f"{', '.join(f'kn.{name}()' for name in names)}: Gaussian for numbers, Categorical for classes."
        )
    says = "likelihood must be one of knowable's, got"
    loss = given if isinstance(given, type) else type(given)
    if loss.__module__.startswith("torch") and loss.__name__ in _LOSSES:
        weighs = getattr(given, "weight", None) is not None and loss.__name__ == "CrossEntropyLoss"
        classes = " Weights of classes go with the data: kn.Data((x, y), class_weights=[...])." if weighs else ""
        return f"{says} torch's {loss.__name__}, a loss. Did you mean kn.{_LOSSES[loss.__name__]}?{classes}"
    if isinstance(given, str):
        plain = {name.lower(): name for name in names}
        near = difflib.get_close_matches(given.lower().replace("_", "").replace(" ", ""), plain, n=1)
        if near:
            return f"{says} the text {given!r}. Did you mean kn.{plain[near[0]]}()?"
    return f"{says} {given!r}. Choose one of {', '.join(f'kn.{name}()' for name in names)}."


class OutputInformation(ABC):
    r"""The Fisher information of each row of a batch in its outputs f: what a generalised Gauss-Newton matrix needs.

    .. math:: \Lambda = E[\nabla_f \log p(y \mid f)\, \nabla_f \log p(y \mid f)^\top] = S S^\top

    The matrices are never formed. All values have the shape of the outputs, ``(batch, ...)``.
    """

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """Shape of the batch of outputs."""

    @abstractmethod
    def root(self, values: Tensor) -> Tensor:
        """S times ``values``, row by row."""

    @abstractmethod
    def times(self, values: Tensor) -> Tensor:
        """Λ times ``values``, row by row."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonals of the matrices, in the shape of the outputs."""

    def couples_only(self, dim: int) -> bool:
        """Whether only outputs that differ in dimension ``dim`` alone (the features of a layer) are coupled."""
        return False

    def total(self, dim: int) -> Tensor:
        """The sum of all blocks, ``(features, features)``, where :meth:`couples_only` holds of ``dim``."""
        raise NotImplementedError(f"{type(self).__name__} couples outputs across positions: there are no blocks.")

    def weighted(self, weights: Tensor) -> OutputInformation:
        """That of rows that count ``weights`` ``(batch,)`` times each."""
        raise Unsupported(f"{type(self).__name__} has no weighted(), which rows with weights need. Define it.")

    def only(self, counted: Tensor) -> OutputInformation:
        """That of the targets that count alone: 1 or 0 for each target ``(batch, ...)``."""
        raise Unsupported(f"{type(self).__name__} has no only(), which targets that do not count need. Define it.")

    def columns(self, most: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Vectors v, each of the shape of the outputs, whose outer products row by row sum up to Λ.

        The columns of S, if there are at most ``most``; otherwise ``most`` random combinations of them, with which the
        sum is right in expectation.
        """
        like = self.diagonal()
        count = self.shape[1:].numel()
        if count > most:
            for _ in range(most):
                signs = torch.randint(0, 2, self.shape, generator=generator, device=generator.device)
                yield self.root((2.0 * signs - 1.0).to(like) / math.sqrt(most))
            return
        for number in range(count):
            unit = torch.zeros_like(like)
            unit.flatten(1)[:, number] = 1.0
            column = self.root(unit)
            if column.any():  # outputs without information have a zero column
                yield column


@dataclass(frozen=True)
class DiagonalInformation(OutputInformation):
    """Outputs that are independent of each other: the matrix of each row is diagonal."""

    values: Tensor  # the diagonals, (batch, ...)

    @property
    def shape(self) -> torch.Size:
        return self.values.shape

    def root(self, values: Tensor) -> Tensor:
        return self.values.sqrt() * values

    def times(self, values: Tensor) -> Tensor:
        return self.values * values

    def diagonal(self) -> Tensor:
        return self.values

    def couples_only(self, dim: int) -> bool:
        return True

    def total(self, dim: int) -> Tensor:
        return self.values.movedim(dim, -1).flatten(0, -2).sum(0).diag()

    def weighted(self, weights: Tensor) -> DiagonalInformation:
        return DiagonalInformation(_by_row(weights, self.values) * self.values)

    def only(self, counted: Tensor) -> DiagonalInformation:
        return DiagonalInformation(self.values * counted)

    def of_group(self, group: int, groups: int) -> DiagonalInformation:
        """The part of the outputs whose index in the last dimension is ``group`` (of ``groups``); the rest is zero."""
        mask = torch.arange(groups, device=self.values.device) == group
        return DiagonalInformation(self.values * mask)


@dataclass(frozen=True)
class SoftmaxInformation(OutputInformation):
    r"""Logits of classes in dimension 1: :math:`\Lambda = \mathrm{diag}(p) - p p^\top` at every position.

    Its root is :math:`S = \mathrm{diag}(\sqrt p) - p \sqrt{p}^\top`.
    """

    probs: Tensor  # probabilities, (batch, classes, ...)
    weights: Tensor | None = None  # of the rows, (batch,), or of their positions, (batch, ...): factors of the matrices

    @property
    def shape(self) -> torch.Size:
        return self.probs.shape

    def root(self, values: Tensor) -> Tensor:
        scaled = self.probs.sqrt() * values
        found = scaled - self.probs * scaled.sum(1, keepdim=True)
        return found if self.weights is None else _by_position(self.weights.sqrt(), found) * found

    def times(self, values: Tensor) -> Tensor:
        scaled = self.probs * values
        return self._counted(scaled - self.probs * scaled.sum(1, keepdim=True))

    def diagonal(self) -> Tensor:
        return self._counted(self.probs * (1.0 - self.probs))

    def weighted(self, weights: Tensor) -> SoftmaxInformation:
        both = weights if self.weights is None else _by_row(weights, self.weights) * self.weights
        return SoftmaxInformation(self.probs, both)

    def only(self, counted: Tensor) -> SoftmaxInformation:
        known = counted.to(self.probs.dtype)
        return SoftmaxInformation(self.probs, known if self.weights is None else _by_row(self.weights, known) * known)

    def _counted(self, values: Tensor) -> Tensor:
        return values if self.weights is None else _by_position(self.weights, values) * values

    def couples_only(self, dim: int) -> bool:
        return dim % self.probs.dim() == 1

    def columns(self, most: int, generator: torch.Generator) -> Iterator[Tensor]:
        r"""One column less than there are classes, at every position: the probabilities sum up to one.

        The columns of S H, with the reflection H that takes :math:`\sqrt p`, which S maps to zero, to the last
        class: :math:`S (e_j - e_C \sqrt{p_j} / (1 + \sqrt{p_C}))`.
        """
        if self.shape[1:].numel() > most:
            yield from super().columns(most, generator)
            return
        roots = self.probs.sqrt().reshape(*self.shape[:2], -1)  # (rows, classes, positions)
        for j in range(roots.shape[1] - 1):
            for place in range(roots.shape[2]):
                value = torch.zeros_like(roots)
                value[:, j, place] = 1.0
                value[:, -1, place] = -roots[:, j, place] / (1.0 + roots[:, -1, place])
                yield self.root(value.reshape(self.shape))

    def total(self, dim: int) -> Tensor:
        probs = self.probs.movedim(1, -1).flatten(0, -2)  # (rows and positions, classes)
        counted = self._counted(self.probs).movedim(1, -1).flatten(0, -2)
        return counted.sum(0).diag() - probs.T @ counted


@dataclass(frozen=True)
class DenseInformation(OutputInformation):
    """Outputs of a row that may all be coupled: a matrix for each row."""

    matrix: Tensor  # one for each row's flattened outputs, (batch, outputs, outputs), positive semi-definite
    output_shape: torch.Size  # of the batch of outputs

    @property
    def shape(self) -> torch.Size:
        return self.output_shape

    def root(self, values: Tensor) -> Tensor:
        return self._product(self._factor, values)

    def times(self, values: Tensor) -> Tensor:
        return self._product(self.matrix, values)

    def diagonal(self) -> Tensor:
        return self.matrix.diagonal(dim1=-2, dim2=-1).reshape(self.shape)

    def couples_only(self, dim: int) -> bool:
        return len(self.shape) == 2 and dim % 2 == 1

    def total(self, dim: int) -> Tensor:
        return self.matrix.sum(0)

    @cached_property
    def _factor(self) -> Tensor:
        return root_of(self.matrix)

    def _product(self, matrix: Tensor, values: Tensor) -> Tensor:
        return (matrix @ values.reshape(len(matrix), -1, 1)).reshape(self.shape)


@dataclass(frozen=True)
class EmpiricalInformation(OutputInformation):
    r"""The outer product of each row's own gradient: :math:`\Lambda = r r^\top`, the empirical Fisher information."""

    gradient: Tensor  # gradients r of the rows' log likelihoods in their outputs, (batch, ...)

    @property
    def shape(self) -> torch.Size:
        return self.gradient.shape

    def root(self, values: Tensor) -> Tensor:
        """The gradient r times the first entry of ``values``: S has one column."""
        return self.gradient * values.flatten(1)[:, 0].view(-1, *(1,) * (values.dim() - 1))

    def times(self, values: Tensor) -> Tensor:
        product = (self.gradient * values).flatten(1).sum(1)
        return self.gradient * product.view(-1, *(1,) * (values.dim() - 1))

    def diagonal(self) -> Tensor:
        return self.gradient.square()

    def weighted(self, weights: Tensor) -> EmpiricalInformation:
        return EmpiricalInformation(_by_row(weights.sqrt(), self.gradient) * self.gradient)

    def columns(self, most: int, generator: torch.Generator) -> Iterator[Tensor]:
        """One column: the gradients."""
        yield self.gradient


def _by_position(weights: Tensor, values: Tensor) -> Tensor:
    """``weights`` ``(batch,)`` or ``(batch, ...)`` so that they multiply ``values`` ``(batch, classes, ...)``."""
    return _by_row(weights, values) if weights.dim() == 1 else weights.unsqueeze(1)


def _by_row(weights: Tensor, values: Tensor) -> Tensor:
    """``weights`` ``(batch,)`` so that they multiply the rows of ``values``."""
    return weights.view(-1, *(1,) * (values.dim() - 1))
