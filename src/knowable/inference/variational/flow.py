"""Variational inference with normalising flows (Rezende and Mohamed, 2015; Dinh et al., 2017)."""

from __future__ import annotations

from dataclasses import dataclass

from knowable.inference.variational.flow_family import Flow
from knowable.inference.variational.structured import StructuredVI


@dataclass(frozen=True, repr=False)
class FlowVI(StructuredVI):
    r"""A normal distribution bent by invertible maps into any shape, fitted by maximising the evidence lower bound.

    .. math:: \theta = m + s \odot f_L(\cdots f_1(\epsilon)), \qquad \epsilon \sim \mathcal{N}(0, I)

    For posteriors that are no normal: curved, skewed, with heavy tails. It begins as a mean-field normal, and the
    expected log density of q has no closed form, so that its gradients are noisier than those of normals: a few
    ``draws`` a step are worth their time. Maps of all weights of a large network are coarse; a flow is best given to
    the weights that matter, ``MeanFieldVI(families={"last_layer": Flow()})``, or to a model in which only those are
    random.

    Args:
        epochs: This and the other fields of :class:`~knowable.core.training.Training` say how the bound is maximised.
        beta: This and the other fields of :class:`~knowable.inference.variational.structured.StructuredVI` and of what
            it builds on, :class:`~knowable.inference.variational.structured.FamiliesVI`,
            :class:`~knowable.core.variational_method.BoundMethod` and
            :class:`~knowable.core.variational_method.VariationalMethod`, say what is maximised, how
            and from where.
        kind: ``"planar"``, ``"radial"`` or ``"real_nvp"``, see
            :class:`~knowable.inference.variational.flow_family.Flow`.
        layers: How many maps; None is 8, and 4 of real NVP or for more than 10,000 weights.
        hidden: Width of real NVP's small networks; None is 32 for up to 128 weights and less for more.

    Example:
        >>> import torch
        >>> import knowable as kn
        >>> x = torch.linspace(-1, 1, 40).unsqueeze(1)
        >>> model = kn.Model(torch.nn.Linear(1, 1), kn.Gaussian(noise=0.1))
        >>> posterior = kn.FlowVI(epochs=300).fit(model, (x, 2 * x))
        >>> posterior.log_prob(posterior.sample(5)).shape
        torch.Size([5])
    """

    kind: str = Flow.kind
    layers: int | None = None
    hidden: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        Flow(self.kind, self.layers, self.hidden)  # which checks them

    @property
    def own_family(self) -> Flow:
        """A flow."""
        return Flow(self.kind, self.layers, self.hidden)
