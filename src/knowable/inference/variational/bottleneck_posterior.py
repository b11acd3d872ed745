"""One set of weights and a random code: the posterior of the information bottleneck."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from knowable.core.data import as_input
from knowable.core.model import Model
from knowable.core.network import no_hidden_loops
from knowable.core.params import expand_params, index_params, number_of_draws
from knowable.core.posterior import Posterior
from knowable.core.randomness import generator_for
from knowable.core.types import Params
from knowable.inference.variational.bottleneck_code import CodePlace, rate_of, tapped


class RandomCode(Posterior):
    r"""Weights that do not vary, and a code inside the network that does: :math:`z = \mu(x) + \sigma(x)\,\epsilon`.

    What differs from draw to draw is ε, which all inputs of a prediction share, so that a draw is one function of the
    input and does not depend on which rows come along. At each input z has the distribution that it was trained with.

    Args:
        model: The model.
        loc: The weights that the model calls random.
        code: Parameters of the code.
        place: Where in the network it is.
        shape: Shape of one row's code.
        common: See :class:`~knowable.core.posterior.Posterior`.
    """

    family = "random_code"

    def __init__(self, model: Model, loc: Params, code: Params, *, place: CodePlace, shape: torch.Size, **common: Any):
        model, self._tap = tapped(model, place)
        super().__init__(model, **common)
        self.loc = {name: loc[name].detach().clone() for name in model.random_names if name in loc}
        self.code = {name: value.detach().clone() for name, value in code.items()}
        self.place, self.shape = place, torch.Size(shape)
        self._vectorises = True  # until a module refuses vmap

    # --- the code ----------------------------------------------------------------------------------------------------

    def encode(self, x: Any) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation of the code at inputs ``x``, each ``(rows, ...)``."""
        mean, log_variance = self._moments(x)
        return mean, torch.exp(0.5 * log_variance)

    def rate(self, x: Any) -> Tensor:
        """KL from the code at each input to the marginal, in nats, ``(rows,)``.

        How much the code says of that input; unlike inputs of the training data often have a high one (Alemi et al.,
        2018).
        """
        return rate_of(*self._moments(x), self.code)

    def _moments(self, x: Any) -> tuple[Tensor, Tensor]:
        x = as_input(x, self.model)
        with torch.no_grad(), self._tap.drawing(self.code, None):
            self.model.forward(self.mean(), x, buffers=self.buffers)
            assert self._tap.moments is not None
            return self._tap.moments

    # --- draws -------------------------------------------------------------------------------------------------------

    def _sample_random(self, n: int, generator: torch.Generator | None) -> Params:
        return expand_params(self.loc, n)

    def _mean_random(self) -> Params:
        return {name: value.clone() for name, value in self.loc.items()}

    def _std_random(self) -> Params:
        return {name: torch.zeros_like(value) for name, value in self.loc.items()}

    def draw_block(self, start: int, stop: int, samples: int, seed: int) -> Params:
        """The same weights for every draw, without copying them."""
        return self._ordered(expand_params({**self.loc, **self.points}, stop - start))

    def run_draws(self, stack: Params, x: Tensor, *, first: int, seed: int, vectorise: bool) -> Tensor:
        """Outputs for one code after the other; what comes before the code is computed once where that can be."""
        params, count = index_params(stack, 0), number_of_draws(stack)
        noise = torch.stack([self._noise(seed, first + k) for k in range(count)])

        def outputs(one: Tensor) -> Tensor:
            with self._tap.drawing(self.code, lambda mean: one):
                return self.model.network(params, x, buffers=self.buffers)

        if vectorise and self._vectorises:
            try:
                with no_hidden_loops():
                    return vmap(outputs)(noise)
            except RuntimeError:
                self._vectorises = False
        return torch.stack([outputs(one) for one in noise])

    def _noise(self, seed: int, draw: int) -> Tensor:
        generator = generator_for(seed, "code", draw, device=self.model.device)
        return torch.randn(self.shape, generator=generator, dtype=self.model.dtype, device=self.model.device)

    # --- on disk -----------------------------------------------------------------------------------------------------

    def _tensors(self) -> dict[str, Tensor]:
        weights = {f"loc.{name}": value for name, value in self.loc.items()}
        return {**weights, **{f"code.{name}": value for name, value in self.code.items()}}

    def _settings(self) -> dict[str, Any]:
        place = {"layer": self.place.layer, "entrance": self.place.entrance, "scale": self.place.scale}
        return {"place": place, "shape": list(self.shape)}

    @classmethod
    def _from_tensors(
        cls, model: Model, tensors: dict[str, Tensor], *, place: dict[str, Any], shape: list[int], **common: Any
    ) -> RandomCode:
        loc, code = (
            {name.removeprefix(part): value for name, value in tensors.items() if name.startswith(part)}
            for part in ("loc.", "code.")
        )
        return cls(model, loc, code, place=CodePlace(**place), shape=torch.Size(shape), **common)
