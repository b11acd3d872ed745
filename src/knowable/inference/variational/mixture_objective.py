r"""The average bound of several mean-field normals, whose components are trained in the same steps.

.. math:: \frac1K \sum_k \Big(E_{q_k}[\log p(D \mid \theta)] - \beta\, \mathrm{KL}(q_k \,\|\, p)\Big)

Its gradient in one component is that component's own: components meet only in what they share, the point estimates.
Where the network allows it, all of them go through it in one batched call (:class:`ComponentsTogether`); elsewhere one
after the other (:class:`ComponentsInTurn`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap

from knowable.core.compiling.recorder import Recorded, unchecked_distributions
from knowable.core.network.batched import batched, no_hidden_loops
from knowable.core.network.params import Layout, Params
from knowable.core.support.randomness import fast_randn
from knowable.core.training.objective import Objective
from knowable.inference.variational.divergence import entropy_of_normals, other_divergence
from knowable.inference.variational.gaussian_weight import GaussianWeight, plain_local_rule
from knowable.inference.variational.mean_field import MeanFieldObjective


class ComponentsInTurn(Objective):
    """The average loss of components that go through the network one after the other, in training mode.

    It suits every network. Each component has buffers (running statistics) of its own.

    Args:
        components: The components, built for the same model with starts of their own; the point estimates of the first
            are made those of all.

    Attributes:
        components: As they are now.
    """

    def __init__(self, components: Sequence[MeanFieldObjective]):
        super().__init__(components[0].model, components[0].size)
        self.components = nn.ModuleList(components)
        for each in components[1:]:
            each.points = components[0].points
        for each in components[0].points:  # they learn by the mean of the losses, a component by its own
            each.register_hook(lambda gradient: gradient / len(components))

    @property
    def settles_from(self) -> float:
        """The end of the KL's warm-up."""
        return self.components[0].settles_from  # type: ignore[return-value]

    @property
    def dimension(self) -> int:
        """How many numbers one component trains."""
        return self.components[0].dimension  # type: ignore[return-value]

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss of a batch and the means of its terms."""
        losses, terms = [], []
        for each in self.components:
            each.epoch = self.epoch  # type: ignore[assignment]
            loss, own = each(x, y)
            losses.append(loss)
            terms.append(own)
        means = {name: torch.stack([own[name] for own in terms]).mean() for name in terms[0]}
        total = torch.stack(losses).sum()  # whose gradient is every component's own
        return total + (total / len(losses) - total).detach(), means

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log density of held-out rows under the mixture."""
        return _mixed_log_likelihood(list(self.components), x, y)  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor]:
        """All components' parameters and buffers."""
        found: dict[str, Tensor] = {f"parameter.{name}": value for name, value in self.named_parameters()}
        for k, each in enumerate(self.components):
            found |= {f"buffer.{k}.{name}": value for name, value in each.net_buffers.items()}  # type: ignore[union-attr]
        return found

    def clip_gradient(self, most: float) -> None:
        """Shorten the gradient of each component by itself, and that of the point estimates."""
        if len(self.components) == 1:
            super().clip_gradient(most)
            return
        for own in (*([each.q] for each in self.components), list(self.components[0].points)):  # type: ignore[arg-type]
            nn.utils.clip_grad_norm_(own, most)  # type: ignore[arg-type]


class ComponentsTogether(Objective):
    """The average loss of components that go through the network in one batched call, in evaluation mode.

    It is for networks without batch statistics and dropout, which are the same in both modes. Linear layers whose
    weights act once per example are sampled locally, as in :class:`MeanFieldObjective`. Losses and gradients come from
    one recorded graph.

    Args:
        components: See :class:`ComponentsInTurn`; their buffers are all taken to be the first one's.
        mode: ``"eager"``, ``"traced"`` or ``"compiled"``, see :class:`~knowable.core.compiling.recorder.Recorded`.

    Attributes:
        q: Means and log scales of all components, ``(K, 2, D)``, laid out as one component's.
        points: The point estimates, flat; None if there are none.
    """

    def __init__(self, components: Sequence[MeanFieldObjective], *, mode: str = "traced"):
        first = components[0]
        super().__init__(first.model, first.size)
        self._components = tuple(components)  # a tuple: their parameters are not this module's
        self.net_buffers = first.net_buffers
        self.q = nn.Parameter(torch.stack([each.q.detach() for each in components]))
        points = {name: value.detach() for name, value in first.point_params().items()}
        self.point_layout = Layout.of(points)
        self.points = nn.Parameter(self.point_layout.flatten(points)) if points else None
        self._bounds = Recorded(self.losses_and_gradients, mode)

    @property
    def settles_from(self) -> float:
        """The end of the KL's warm-up."""
        return self._components[0].settles_from

    @property
    def dimension(self) -> int:
        """How many numbers one component trains."""
        return self._components[0].dimension

    @property
    def components(self) -> tuple[MeanFieldObjective, ...]:
        """The components as they are now."""
        with torch.no_grad():
            for each, q in zip(self._components, self.q, strict=True):
                each.q.copy_(q)
                each.net_buffers = self.net_buffers
                if self.points is not None:
                    now = self.point_layout.views(self.points)
                    for name, value in each.point_params().items():
                        value.copy_(now[name])
        return self._components

    # --- the loop's side ---------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Mean loss of a batch and the means of its terms."""
        by_q, by_points, loss, terms = self._evaluate(x, y)
        known = (self.q * by_q).sum()
        if self.points is not None:
            known = known + (self.points * by_points).sum()
        return loss + (known - known.detach()), terms

    def whole_step(self, optimiser: torch.optim.Optimizer, *batch: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """A step of all components without autograd."""
        self.q.grad, by_points, loss, terms = self._evaluate(*batch)
        if self.points is not None:
            self.points.grad = by_points
        optimiser.step()
        return loss, terms

    def clip_gradient(self, most: float) -> None:
        """Shorten the gradient of each component by itself, and that of the point estimates."""
        if self.points is not None:
            nn.utils.clip_grad_norm_([self.points], most)
        gradient = self.q.grad
        assert gradient is not None
        norm = gradient.flatten(1).norm(dim=1)
        gradient.mul_((most / (norm + 1e-6)).clamp_max(1.0).view(-1, 1, 1))

    def predictive_log_likelihood(self, x: Tensor, y: Tensor) -> Tensor:
        """Log density of held-out rows under the mixture."""
        return _mixed_log_likelihood(self.components, x, y)

    def vectorises(self, x: Tensor, y: Tensor) -> bool:
        """Whether ``vmap`` takes the network and its priors: tried on two rows."""
        trial = batched(self.losses_and_gradients, lambda *_: None)  # an error of the network's own comes again in turn
        trial(*self._inputs(x[:2], y[:2]))
        return not trial.refused

    # --- losses and gradients ----------------------------------------------------------------------------------------

    def _evaluate(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Gradients of the components' own losses and, of the mean loss, in the points; the mean loss and its terms."""
        by_q, by_points, losses, fit, kl, log_prior = self._bounds(*self._inputs(x, y))
        terms = {"expected_log_likelihood": fit.mean() * self.size, "kl": kl.mean()}
        if self.points is not None:
            terms["log_prior_of_points"] = log_prior
        return by_q.contiguous(), by_points / len(self.q), losses.mean() - log_prior / self.size, terms

    def _inputs(self, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first, count = self._components[0], len(self.q)
        first.epoch = self.epoch
        shape = count, first.draws, first.drawn.size
        noise = fast_randn(count * first.draws, first.drawn.size, like=self.q).view(shape)
        weight = torch.full((), first.beta * first.warmth() / self.size, dtype=self.q.dtype, device=self.q.device)
        points = self.q.new_zeros(0) if self.points is None else self.points.detach()
        return self.q.detach(), points, noise, weight, x, y

    def losses_and_gradients(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """What is recorded.

        Args:
            inputs: Means and log scales ``(K, 2, D)``; the points; standard normal noise for the drawn weights,
                ``(K, draws, drawn weights)``; the KL's factor over N; inputs and targets of the batch.

        Returns:
            The gradients of the sum of all losses in the means and log scales, ``(K, 2, D)``, and in the points; the
            components' losses without the points' prior, expected log likelihoods per example and KLs, each ``(K,)``;
            and the log prior of the points.
        """
        with no_hidden_loops(), unchecked_distributions():
            slopes, (_, terms) = grad_and_value(self._total, argnums=(0, 1), has_aux=True)(*inputs)
        return *slopes, *terms

    def _total(
        self, q: Tensor, points: Tensor, noise: Tensor, weight: Tensor, x: Tensor, y: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor, Tensor]]:
        one = vmap(self._one, in_dims=(0, None, 0, None, None), randomness="different")
        fit, kl, entropy = one(q, points, noise, x, y)
        temperature = self._components[0].temperature
        penalty = kl if temperature == 1.0 else kl - (temperature - 1.0) * entropy
        losses, log_prior = weight * penalty - fit, q.new_zeros(())
        if self.points is not None:
            log_prior = self._components[0].log_prior_of_points(self.point_layout.views(points))
        return losses.sum() - (len(q) / self.size) * log_prior, (losses, fit, kl, log_prior)

    def _one(self, q: Tensor, points: Tensor, noise: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Expected log likelihood per example, KL and entropy of one component."""
        first = self._components[0]
        loc, log_scale = q[0], q[1]
        scale = log_scale.exp()
        fixed = self.point_layout.views(points)
        kl = torch.stack([stretch.value(loc, log_scale, scale) for stretch in first.plan.stretches]).sum()
        if first.others:
            views = first.layout.views
            kl = kl + other_divergence(self.model, first.others, views(loc), views(scale), fixed, first.draws)
        cut = first.drawn.size
        fits = []
        for each in noise.unbind(0):
            drawn = first.drawn.views(loc[:cut] + scale[:cut] * each)
            local = self._local_weights(first.local, loc[cut:], scale[cut:].square())
            fits.append(self._mean_score({**fixed, **drawn, **local}, x, y))
        return torch.stack(fits).mean(), kl, entropy_of_normals(log_scale)

    @staticmethod
    def _local_weights(layout: Layout, loc: Tensor, variance: Tensor) -> Params:
        means, variances = layout.views(loc), layout.views(variance)
        return {name: GaussianWeight(means[name], variances[name], plain_local_rule) for name in means}

    def _mean_score(self, params: Params, x: Tensor, y: Tensor) -> Tensor:
        return self.model.score(self.model.forward(params, x, buffers=self.net_buffers), y, params).mean()


def _mixed_log_likelihood(components: Sequence[MeanFieldObjective], x: Tensor, y: Tensor) -> Tensor:
    each = torch.stack([component.predictive_log_likelihood(x, y) for component in components])
    return each.logsumexp(0) - math.log(len(components))
