"""Several outcomes of each row, each with a likelihood of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from knowable.core.model.likelihood import Likelihood, OutputInformation, no_likelihood
from knowable.core.model.prior import Prior
from knowable.core.network.inputs import Inputs, as_rows
from knowable.core.network.outputs import Heads, Output, split_columns
from knowable.core.network.params import Params, index_params, without_prefix
from knowable.core.prediction.components import NormalOutputs
from knowable.core.prediction.joint import JointDraws, JointPrediction, Named
from knowable.core.prediction.prediction import Prediction
from knowable.errors import InvalidArgument, InvalidData, InvalidType


@dataclass(frozen=True)
class Joint(Likelihood):
    r"""Several heads of one network, each with a likelihood: outcomes are independent given the weights.

    .. math:: \log p(y \mid f) = \sum_h \log p_h(y_h \mid f_h)

    The network returns a dict (or an object with attributes) that has a tensor for each head; ``Model(output=...)``
    says where they are otherwise. Further tensors may be there. Targets are a dict with the same names, and predictions
    are taken by name: ``posterior.predict(x)["price"].mean``.

    Args:
        heads: A likelihood for each name.

    Example:
        >>> from knowable import Bernoulli, Gaussian
        >>> Joint({"price": Gaussian(), "sold": Bernoulli()}).params()
        {'price.log_noise': tensor(0.)}
    """

    copies: ClassVar[int] = 4

    heads: Mapping[str, Likelihood]
    _network: Heads = field(init=False, repr=False, compare=False)  # knows the shapes of the outputs
    _targets: dict[str, torch.Size] = field(init=False, repr=False, compare=False)  # shapes of a row's targets

    def __post_init__(self) -> None:
        given = (
            dict(cast(Any, self.heads)) if isinstance(self.heads, Mapping | tuple) else {}
        )  # pairs, where it is loaded
        if not given:
            raise InvalidType(
                f'heads must be a dict of likelihoods, as {{"price": kn.Gaussian()}}; got {self.heads!r}.'
            )
        for name, each in given.items():
            if not isinstance(name, str) or not name or "." in name:
                raise InvalidArgument(f"heads must have names without a dot, got {name!r}.")
            if isinstance(each, Joint) or not isinstance(each, Likelihood):
                raise InvalidType(f"heads[{name!r}]: {no_likelihood(each)}")
        object.__setattr__(self, "heads", tuple(given.items()))
        object.__setattr__(self, "_network", Heads(list(given)))
        object.__setattr__(self, "_targets", {})

    @property
    def by_name(self) -> dict[str, Likelihood]:
        """The likelihoods of the heads."""
        return dict(cast(Any, self.heads))

    def __repr__(self) -> str:
        return f"Joint({{{', '.join(f'{name!r}: {each!r}' for name, each in self.by_name.items())}}})"

    def for_network(self, output: Any) -> tuple[Joint, Output]:
        """A copy that knows the shapes of one network's outputs, and the heads as one tensor of the network."""
        own = Joint(self.by_name)
        object.__setattr__(own, "_network", Heads(list(self.by_name), output))
        return own, own._network

    def params(self) -> Params:
        return _by_head({name: each.params() for name, each in self.by_name.items()})

    def priors(self) -> dict[str, Prior]:
        return _by_head({name: each.priors() for name, each in self.by_name.items()})

    # --- targets: a dict by name outside, the columns of one tensor inside -------------------------------------------

    def rows_of(self, y: Any, name: str = "y") -> Tensor:
        named = y.tree if isinstance(y, Inputs) else y
        if hasattr(y, "columns"):  # a data frame
            named = {str(key): y[key] for key in y.columns}
        if not isinstance(named, Tensor | Mapping):
            raise InvalidType(f"{name} must be a dict with targets for {self._listed()}, got {type(y).__name__}.")
        found = named if isinstance(named, Tensor) else as_rows(named, name)
        if isinstance(found, Inputs):
            self._check_names(list(found.tree), name)
        return found

    def _check_names(self, names: list[str], name: str) -> None:
        missing = [each for each in self.by_name if each not in names]
        strange = [each for each in names if each not in self.by_name]
        if missing or strange:
            what = [f"lacks {', '.join(map(repr, missing))}"] * bool(missing)
            what += [f"has {', '.join(map(repr, strange))}, for which there is no head"] * bool(strange)
            raise InvalidData(f"{name} must have targets for {self._listed()}: it {' and '.join(what)}.")

    def _listed(self) -> str:
        return ", ".join(map(repr, self.by_name))

    def check_target(self, y: Tensor, output: Tensor, *, name: str = "y") -> Tensor:
        return self._packed(y, output, lambda head, own, out, key: head.check_target(own, out, name=f"{name}[{key!r}]"))

    def align(self, y: Tensor, output: Tensor) -> Tensor:
        if isinstance(y, Tensor):
            return self._as_columns(y, output)
        return self._packed(y, output, lambda head, own, out, key: head.align(own.to(out.device), out))

    def _packed(self, y: Tensor, output: Tensor, checked: Callable[..., Tensor]) -> Tensor:
        outputs = self._network.split(output)
        given = split_columns(self._as_columns(y, output), self._targets) if isinstance(y, Tensor) else y.tree
        found = {name: checked(head, given[name], outputs[name], name) for name, head in self.by_name.items()}
        self._targets.clear()
        self._targets.update({name: each.shape[1:] for name, each in found.items()})
        columns = [each.reshape(len(each), -1) for each in found.values()]
        packed = torch.cat([each.to(output.dtype) for each in columns], 1)
        for (name, exact), column in zip(
            found.items(), packed.split([each.shape[1] for each in columns], 1), strict=True
        ):
            if not exact.is_floating_point() and not torch.equal(column.to(exact.dtype), exact.reshape(column.shape)):
                raise InvalidData(f"The labels of {name!r} are too large for {output.dtype}, in which they are kept.")
        return packed

    def _as_columns(self, y: Tensor, output: Tensor) -> Tensor:
        """Targets that are already one tensor, with the columns of all heads in order."""
        width = sum(shape.numel() for shape in self._targets.values())
        if not self._targets or y.dim() != 2 or y.shape[1] != width:
            raise InvalidData(f"y must be a dict with targets for {self._listed()}, got shape {tuple(y.shape)}.")
        return y.to(output.dtype)

    def named(self, y: Any, output: Tensor) -> Named:
        """Targets by name, each as its likelihood takes it, from what a user passes."""
        return self._named(self.check_target(self.rows_of(y).to(output.device), output), output)

    def _named(self, y: Tensor, output: Tensor) -> Named:
        """Targets by name from the columns of one tensor, each in the dtype that its likelihood takes."""
        outputs, columns = self._network.split(output), split_columns(y, self._targets)
        return {name: head.align(columns[name], outputs[name]) for name, head in self.by_name.items()}

    def counted(self, y: Tensor) -> Tensor | None:
        columns = split_columns(y, self._targets)
        found = {name: head.counted(columns[name]) for name, head in self.by_name.items()}
        if all(each is None for each in found.values()):
            return None
        masks = [torch.ones_like(columns[k], dtype=torch.bool) if v is None else v for k, v in found.items()]
        return torch.cat([each.reshape(len(y), -1) for each in masks], 1)

    def doubts(self, y: Tensor, output: Tensor, last_operation: str) -> list[str]:
        outputs, targets = self._network.split(output), split_columns(y, self._targets)
        said = []
        for name, head in self.by_name.items():
            own = head.align(targets[name], outputs[name][:1].expand(len(y), *outputs[name].shape[1:]))
            said += [f"{name}: {each}" for each in head.doubts(own, outputs[name], "")]
        return said

    # --- the distribution --------------------------------------------------------------------------------------------

    def log_prob(self, output: Tensor, y: Tensor, params: Params) -> Tensor:
        targets, outputs = self._named(y, output), self._network.split(output)
        each = [head.log_prob(outputs[k], targets[k], _own(params, k)) for k, head in self.by_name.items()]
        return torch.stack(each).sum(0)

    def identified(self, outputs: Tensor) -> Tensor:
        each = self._network.split(outputs)
        return torch.cat([_flat(head.identified(each[name]), 2) for name, head in self.by_name.items()], 2)

    def predict(self, outputs: Tensor, params: Params, log_weights: Tensor) -> JointPrediction:
        each = self._network.split(outputs)
        heads = {k: head.predict(each[k], _own(params, k), log_weights) for k, head in self.by_name.items()}
        return JointPrediction(heads, [_Draws(self, outputs, params)], log_weights)

    def predict_normal(self, outputs: NormalOutputs, params: Params) -> JointPrediction:
        """Each head's own closed form, where it has one; all together by Monte Carlo."""
        stack = {name: value.expand(len(outputs.draws), *value.shape) for name, value in params.items()}
        heads: dict[str, Prediction] = {}
        parts = [self._network.split(each) for each in (outputs.mean, outputs.variance, outputs.draws)]
        first = 0
        for name, head in self.by_name.items():
            last = first + parts[0][name][0].numel()
            whole = outputs.covariance
            covariance = None if whole is None else whole[:, first:last, first:last]
            mean, variance, draws = (each[name] for each in parts)
            heads[name] = head.predict_normal(NormalOutputs(mean, variance, covariance, draws), _own(params, name))
            first = last
        return JointPrediction(heads, [_Draws(self, outputs.draws, stack)], outputs.log_weights)

    def information(self, output: Tensor, params: Params) -> JointInformation:
        each = self._network.split(output)
        parts = {name: head.information(each[name], _own(params, name)) for name, head in self.by_name.items()}
        return JointInformation(parts, output.shape, dict(self._targets))


def _by_head(each: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the heads have, under names that begin with the head's."""
    return {f"{head}.{name}": value for head, own in each.items() for name, value in own.items()}


def _own(params: Params, name: str) -> Params:
    """The parameters of one head."""
    return without_prefix(f"{name}.", params)


def _flat(values: Tensor, first: int) -> Tensor:
    """All dimensions from ``first`` on as one."""
    return values.flatten(first) if values.dim() > first else values.unsqueeze(first)


@dataclass(frozen=True)
class _Draws(JointDraws):
    likelihood: Joint
    outputs: Tensor  # of the network, (K, batch, values)
    params: Params  # of the likelihood, with a leading dimension K

    @property
    def count(self) -> int:  # type: ignore[override]
        return len(self.outputs)

    def named(self, y: Any) -> Named:
        rows = self.likelihood.rows_of(y)
        if len(rows) != self.outputs.shape[1]:
            raise InvalidData(f"y must have {self.outputs.shape[1]} rows, one for each prediction; got {len(rows)}.")
        return self.likelihood.named(rows, self.outputs[0])

    def log_probs(self, y: Named) -> Tensor:
        packed = torch.cat([_flat(each, 1).to(self.outputs.dtype) for each in y.values()], 1)
        each = enumerate(self.outputs)
        return torch.stack([self.likelihood.log_prob(f, packed, index_params(self.params, k)) for k, f in each])

    def prediction(self, draw: int) -> dict[str, Prediction]:
        one = slice(draw, draw + 1)
        alone = self.likelihood.predict(self.outputs[one], index_params(self.params, one), self.outputs.new_zeros(1))
        return alone.heads


@dataclass(frozen=True)
class JointInformation(OutputInformation):
    """Heads are independent of each other: a block for each."""

    parts: dict[str, OutputInformation]
    output_shape: torch.Size  # of the batch of outputs, (batch, values)
    targets: dict[str, torch.Size]  # shapes of a row's targets

    @property
    def shape(self) -> torch.Size:
        return self.output_shape

    def root(self, values: Tensor) -> Tensor:
        return self._each(lambda part, own: part.root(own), values)

    def times(self, values: Tensor) -> Tensor:
        return self._each(lambda part, own: part.times(own), values)

    def diagonal(self) -> Tensor:
        return torch.cat([_flat(each.diagonal(), 1) for each in self.parts.values()], 1)

    def weighted(self, weights: Tensor) -> JointInformation:
        parts = {name: each.weighted(weights) for name, each in self.parts.items()}
        return JointInformation(parts, self.output_shape, self.targets)

    def only(self, counted: Tensor) -> JointInformation:
        masks = split_columns(counted, self.targets)
        parts = {name: each.only(masks[name]) for name, each in self.parts.items()}
        return JointInformation(parts, self.output_shape, self.targets)

    def columns(self, most: int, generator: torch.Generator) -> Iterator[Tensor]:
        """Those of each head, with zeros for the others."""
        if self.shape[1:].numel() > most:
            yield from super().columns(most, generator)
            return
        zeros = {name: torch.zeros(each.shape, **_like(each)).flatten(1) for name, each in self.parts.items()}
        for name, each in self.parts.items():
            for column in each.columns(most, generator):
                yield torch.cat([_flat(column, 1) if key == name else zero for key, zero in zeros.items()], 1)

    def _each(self, function: Callable[[OutputInformation, Tensor], Tensor], values: Tensor) -> Tensor:
        shapes = {name: each.shape[1:] for name, each in self.parts.items()}
        found = [function(self.parts[name], each) for name, each in split_columns(values, shapes).items()]
        return torch.cat([_flat(each, 1) for each in found], 1)


def _like(information: OutputInformation) -> dict[str, Any]:
    example = information.diagonal()
    return {"dtype": example.dtype, "device": example.device}
