from __future__ import annotations

import torch
from torch import nn

import knowable as kn
from knowable.inference.dropout.sparse_variational_dropout import SparseObjective, with_log_uniform


def build(**settings: object) -> SparseObjective:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    target = with_log_uniform(kn.Model(net, kn.Gaussian(0.1)), ["0.weight", "2.weight"])
    return SparseObjective(target, torch.randn(5, 3, dtype=torch.float64), 5, **settings)  # type: ignore[arg-type]


def test_loss_is_the_likelihood_the_divergence_and_the_prior_of_points(seed):
    objective = build(initial_scale=0.2)
    x, y = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 1, dtype=torch.float64)
    torch.manual_seed(seed)
    loss, terms = objective(x, y)
    loc, scale = objective.loc_and_scale()
    kl = sum(kn.LogUniform().kl_from_normal(loc[name], scale[name]) for name in loc)
    points = sum(kn.Normal(1.0).log_prob(value).sum() for value in objective.point_params().values())
    torch.testing.assert_close(terms["kl"], kl.detach())
    torch.testing.assert_close(loss, (kl - points - terms["expected_log_likelihood"]) / 5)


def test_records_say_which_share_is_drowned_in_noise():
    objective = build(initial_scale=1.0)
    with torch.no_grad():
        objective.layout.views(objective.q[0])["0.weight"].copy_(torch.full((4, 3), 1e-3))
        objective.layout.views(objective.q[0])["2.weight"].copy_(torch.tensor([[1.0, 0.0, 1.0, 0.5]]))
    assert objective.summary() == {"sparsity.0.weight": 1.0, "sparsity.2.weight": 0.25}


def test_frames_are_kept_of_one_weight_alone():
    objective = build(watch="2.weight")
    objective.end_of_epoch()
    frames = objective.frames()
    assert frames is not None and frames.shape == (1, 2, 1, 4)
    unwatched = build()
    unwatched.end_of_epoch()
    assert unwatched.snapshots == [] and unwatched.frames() is None
