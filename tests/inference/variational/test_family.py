from __future__ import annotations

import torch
from torch import nn

from knowable.core.network.params import Layout
from knowable.inference.variational.family import FamilyModule

LAYOUT = Layout(("w",), (torch.Size([3]),))


class Shifted(FamilyModule):
    """A family that knows nothing in closed form: a logistic distribution."""

    def __init__(self):
        super().__init__(LAYOUT)
        self.loc = nn.Parameter(torch.zeros(3))

    def draw(self, count):
        noise = torch.rand(count, 3)
        standard = torch.logit(noise)
        return self.loc + standard, (-standard - 2 * nn.functional.softplus(-standard)).sum(1)

    def posterior(self, model, **common):
        raise NotImplementedError


def test_family_without_closed_forms_needs_only_draws_and_their_densities():
    family = Shifted()
    drawn = family.draw_with_terms(4)
    assert drawn.values.shape == (4, 3) and drawn.log_density.shape == (4,)
    assert drawn.entropy is None and drawn.moments is None
    assert family.held_log_density(drawn.values) is None
    assert not family.prefers_path and not family.normal_marginals
    assert family.layout is LAYOUT
