"""Many networks trained side by side: one batched step for all of them.

A small network leaves most of a step to overhead. So the members of an ensemble are rows of one buffer ``(K, D)``,
their losses and gradients come from one recorded graph, and one fused update moves all of them. With a compiler even
the update is part of the graph.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad, grad_and_value, vmap

from knowable.core.chains.target import CHAINS_PER_BLOCK, NormalDensity, equal_blocks
from knowable.core.compiling.recorder import Recorded, unchecked_distributions
from knowable.core.model.model import Model
from knowable.core.network.batched import batched
from knowable.core.network.params import Buffers, Layout, Params, expand_params, index_params
from knowable.core.posterior.monte_carlo import bytes_per_row
from knowable.core.posterior.particles import Particles
from knowable.core.training.objective import Objective, loss_with_gradients


class EnsembleObjective(Objective):
    r"""-log p(D, θ_k) / N of K members, each of which learns at its own pace.

    The loss is the mean over members; its gradient is each member's own, as if it were trained alone. The network is
    in evaluation mode, which for a network without batch statistics and dropout is the same as training mode.

    Args:
        model: The model.
        size: Number of training examples N.
        positions: Where the members begin, ``(K, D)``: the random parameters in the order of ``layout``.
        points: Values of the parameters that are not random.
        buffers: The network's buffers.
        attack: Size of adversarial perturbations, see :class:`~knowable.inference.point.point.PointObjective`.
        mode: ``"eager"``, ``"traced"`` or ``"compiled"``, see :class:`~knowable.core.compiling.recorder.Recorded`.
    """

    def __init__(
        self, model: Model, size: int, positions: Tensor, *, points: Params | None = None,
        buffers: Buffers | None = None, attack: Tensor | None = None, mode: str = "traced",
    ):  # fmt: skip
        super().__init__(model, size)
        start = model.params()
        self.layout = Layout.of({name: start[name] for name in model.random_names})
        self.points, self.attack, self.mode = points or {}, attack, mode
        self.net_buffers = self.net_buffers if buffers is None else buffers
        self.positions = nn.Parameter(positions)
        prior = NormalDensity.of(model, self.layout)
        self._prior = None if prior is None else prior.scaled(-1.0 / size)
        recorded = Recorded(self._all_losses, "eager" if mode == "eager" else "traced")
        self._losses = batched(recorded, self._one_by_one)
        self._steps = Recorded(self._adam_step, mode)
        self._row_bytes: int | None = None

    @property
    def dimension(self) -> int:
        """The number of parameters of one member."""
        return self.layout.size

    def stack(self) -> Params:
        """The members' random parameters, each ``(K, ...)``."""
        return self.layout.views(self.positions.detach())

    def present_posterior(self) -> Particles:
        """The members as they are."""
        stack = {name: value.clone() for name, value in self.stack().items()}
        return Particles(self.model, stack, points=self.points, buffers=self.net_buffers)

    # --- the loop's side ---------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss of the members on a batch, and its terms; ``weights`` are ``(batch,)`` or ``(batch, K)``."""
        losses, gradient, log_likelihood = self.losses_and_gradient(self.positions.detach(), x, y, weights)
        loss, terms = self._summary(losses.mean(), log_likelihood.mean())
        return loss_with_gradients(loss, [self.positions], [gradient]), terms

    def whole_step(self, optimiser: torch.optim.Optimizer, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A step of all members without autograd; of Adam as one compiled graph where that was asked for."""
        x, y, *weights = batch
        in_one_piece = not self._losses.refused and self._block_size(x) == len(self.positions)
        if self.mode == "compiled" and _is_plain_adam(optimiser) and in_one_piece:
            return self._compiled_step(optimiser, x, y, *self._per_member(*weights))
        losses, gradient, log_likelihood = self.losses_and_gradient(self.positions.detach(), x, y, *weights)
        self.positions.grad = gradient
        optimiser.step()
        return self._summary(losses.mean(), log_likelihood.mean())

    def _compiled_step(self, optimiser: torch.optim.Optimizer, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        state = _adam_state(optimiser, self.positions)
        numbers = _adam_numbers(optimiser.param_groups[0], state["step"].item() + 1, like=self.positions)
        found = self._steps(self.positions.detach(), state["exp_avg"], state["exp_avg_sq"], numbers, *batch)
        self.positions.data, state["exp_avg"], state["exp_avg_sq"], loss, log_likelihood, log_prior = found
        state["step"] += 1
        return loss, {"log_likelihood": log_likelihood, "log_prior": log_prior}

    def clip_gradient(self, most: float) -> None:
        """Shorten the gradient of each member by itself."""
        gradient = self.positions.grad
        assert gradient is not None
        norm = gradient.norm(dim=-1, keepdim=True)
        gradient.mul_((most / (norm + 1e-6)).clamp_max(1.0))

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log density of held-out rows under the mixture of all members."""
        model, count = self.model, len(self.positions)
        stack = {**expand_params(self.points, count), **self.stack()}
        outputs = model.network.over_draws(model.network_params(stack), x, buffers=self.net_buffers, vectorise=True)
        each = [model.score(output, y, index_params(stack, k)) for k, output in enumerate(outputs)]
        return torch.stack(each).logsumexp(0) - math.log(count)

    def _summary(self, loss: Tensor, log_likelihood: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and its terms on the full-data scale: what is not likelihood is prior."""
        log_likelihood = log_likelihood * self.size
        log_prior = torch.add(log_likelihood, loss, alpha=self.size).neg()
        return loss, {"log_likelihood": log_likelihood, "log_prior": log_prior}

    # --- losses and gradients ----------------------------------------------------------------------------------------

    def losses_and_gradient(
        self, positions: Tensor, x: Tensor, y: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The members' losses ``(K,)``, gradients ``(K, D)`` and mean log likelihoods ``(K,)`` on a batch."""
        own, size = self._per_member(weights), self._block_size(x)
        if size == len(positions):
            return self._losses(positions, x, y, *own)
        found = [
            self._losses(block, x, y, *(each[:, first : first + size] for each in own))
            for first, block in zip(range(0, len(positions), size), positions.split(size), strict=True)
        ]
        losses, gradient, log_likelihood = (torch.cat(each) for each in zip(*found, strict=True))
        return losses, gradient, log_likelihood

    def vectorises(self, x: Tensor, y: Tensor, weights: Tensor | None = None) -> bool:
        """Whether ``vmap`` takes the network: tried on two rows."""
        own = self._per_member(None if weights is None else weights[:2])
        trial = batched(self._all_losses, self._one_by_one)
        trial(self.positions.detach(), x[:2], y[:2], *own)
        self._losses.refused = trial.refused
        return not trial.refused

    def _per_member(self, weights: Tensor | None = None) -> tuple[Tensor, ...]:
        """Weights on rows as ``(batch, K)``, if there are any."""
        if weights is None:
            return ()
        return (weights.unsqueeze(1).expand(-1, len(self.positions)) if weights.dim() == 1 else weights,)

    def _block_size(self, x: Tensor) -> int:
        if len(self.positions) <= CHAINS_PER_BLOCK:
            return len(self.positions)
        if self._row_bytes is None:
            self._row_bytes = 3 * bytes_per_row(self.model, x, self.net_buffers)
        return equal_blocks(len(self.positions), self._row_bytes * len(x))

    def _all_losses(self, positions: Tensor, x: Tensor, y: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What is recorded; ``weights`` is nothing or one tensor ``(batch, K)``."""
        with unchecked_distributions():
            moved = () if self.attack is None else (self._moved(positions, x, y, *weights),)
            gradient, (_, (losses, log_likelihood)) = grad_and_value(self._total_loss, has_aux=True)(
                positions, moved, x, y, *weights
            )
            if self._prior is not None:
                losses, gradient = self._prior.added(positions, losses, gradient)
        return losses, gradient, log_likelihood

    def _total_loss(
        self, positions: Tensor, moved: tuple[Tensor, ...], x: Tensor, y: Tensor, *weights: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Sum over members, and each one's loss and log likelihood; normal priors are added in closed form later."""
        columns = [1] * len(weights)
        log_likelihood = vmap(self._mean_score, in_dims=(0, None, None, *columns))(positions, x, y, *weights)
        if moved:
            worse = vmap(self._mean_score, in_dims=(0, 0, None, *columns))(positions, moved[0], y, *weights)
            log_likelihood = 0.5 * (log_likelihood + worse)
        losses = -log_likelihood
        if self._prior is None:
            losses = losses - vmap(self._log_prior)(positions) / self.size
        return losses.sum(), (losses, log_likelihood)

    def _moved(self, positions: Tensor, x: Tensor, y: Tensor, *weights: Tensor) -> Tensor:
        """The rows of ``x`` where each member likes them less, ``(K, batch, ...)``."""
        columns = [1] * len(weights)
        slope = vmap(grad(self._mean_score, argnums=1), in_dims=(0, None, None, *columns))(positions, x, y, *weights)
        return x - self.attack * slope.sign()

    def _mean_score(self, flat: Tensor, x: Tensor, y: Tensor, *weights: Tensor) -> Tensor:
        """Mean over the rows of (weight times) log p(y | x, θ), for one member."""
        params = self._params(flat)
        return self.model.score(self.model.forward(params, x, buffers=self.net_buffers), y, params, *weights).mean()

    def _log_prior(self, flat: Tensor) -> Tensor:
        return self.model.log_prior(self._params(flat))

    def _params(self, flat: Tensor) -> Params:
        return {**self.points, **self.layout.views(flat)}

    def _one_by_one(self, positions: Tensor, x: Tensor, y: Tensor, *weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The same for networks that ``vmap`` cannot take, with ordinary autograd."""
        found = []
        for k, each in enumerate(positions):
            own = [column[:, k] for column in weights]
            with torch.enable_grad():
                flat = each.detach().clone().requires_grad_()
                log_likelihood = self._mean_score(flat, x, y, *own)
                if self.attack is not None:
                    inputs = x.detach().clone().requires_grad_()
                    (slope,) = torch.autograd.grad(self._mean_score(flat, inputs, y, *own), inputs)
                    worse = self._mean_score(flat, x - self.attack * slope.sign(), y, *own)
                    log_likelihood = 0.5 * (log_likelihood + worse)
                loss = -log_likelihood - self._log_prior(flat) / self.size
                (gradient,) = torch.autograd.grad(loss, flat)
            found.append((loss.detach(), gradient, log_likelihood.detach()))
        losses, gradients, log_likelihoods = (torch.stack(each) for each in zip(*found, strict=True))
        return losses, gradients, log_likelihoods

    # --- the whole step ----------------------------------------------------------------------------------------------

    def _adam_step(
        self, positions: Tensor, first: Tensor, second: Tensor, numbers: Tensor, *batch: Tensor
    ) -> tuple[Tensor, ...]:
        """Adam (Kingma and Ba, 2015): new positions and moments, the mean loss and its terms."""
        losses, gradient, log_likelihood = self._all_losses(positions, *batch)
        rate, root, keep_first, keep_second, epsilon = numbers.unbind()
        first = keep_first * first + (1 - keep_first) * gradient
        second = keep_second * second + (1 - keep_second) * gradient * gradient
        positions = positions - rate * first / (root * second.sqrt() + epsilon)
        loss, terms = self._summary(losses.mean(), log_likelihood.mean())
        return positions, first, second, loss, *terms.values()


def _is_plain_adam(optimiser: torch.optim.Optimizer) -> bool:
    """Whether a step is Adam's, without any of its options."""
    options = ("amsgrad", "maximize", "weight_decay")
    return type(optimiser) is torch.optim.Adam and not any(optimiser.defaults[name] for name in options)


def _adam_state(optimiser: torch.optim.Optimizer, param: nn.Parameter) -> dict[str, Tensor]:
    """The optimiser's own state of a parameter, made as it would make it where there is none yet."""
    state = optimiser.state[param]
    if not state:
        state["step"] = torch.zeros((), dtype=torch.float32, device=param.device)
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(param), torch.zeros_like(param)
    return state


def _adam_numbers(group: dict[str, Any], step: float, *, like: Tensor) -> Tensor:
    """The numbers of step t: α / (1 - β₁ᵗ), 1 / √(1 - β₂ᵗ), β₁, β₂ and ε."""
    first, second = group["betas"]
    rate, root = group["lr"] / (1 - first**step), (1 - second**step) ** -0.5
    return torch.tensor([rate, root, first, second, group["eps"]], dtype=like.dtype, device=like.device)
