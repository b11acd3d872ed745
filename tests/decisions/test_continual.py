"""Tests of continual learning: exact where inference is, resumable, and clear about what cannot be done."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.decisions.continual import TaskScore


def linear_tasks(seed, tasks=3, rows=20):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tasks * rows, 3, generator=generator)
    y = x @ torch.tensor([1.0, -2.0, 0.5]) + 0.3 * torch.randn(tasks * rows, generator=generator)
    return [(x[k::tasks], y[k::tasks]) for k in range(tasks)], (x, y)


def linear_model():
    return kn.Model(nn.Linear(3, 1).double(), kn.Gaussian(noise=0.3), kn.Normal(1.0))


def class_tasks(seed, tasks=2, rows=60):
    generator = torch.Generator().manual_seed(seed)
    found = []
    for k in range(tasks):
        x = torch.randn(rows, 4, generator=generator)
        found.append((x, (x[:, k] > 0).long()))
    return found


class TwoHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Linear(4, 8), nn.ModuleList([nn.Linear(8, 2), nn.Linear(8, 2)])

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return [head(hidden) for head in self.heads]


def quick(**changes):
    return kn.MeanFieldVI(epochs=3, batch_size=20, **changes)


def test_streaming_on_a_linear_model_is_the_batch_posterior(seed):
    tasks, everything = linear_tasks(seed)
    learner = kn.ContinualLearner(linear_model(), kn.ExactLinear())
    for task in tasks:
        learner.learn(task)
    batch = kn.ExactLinear().fit(linear_model(), everything)
    assert torch.allclose(learner.posterior.covariance, batch.covariance, rtol=0, atol=1e-12)
    for name, value in batch.mean().items():
        assert torch.allclose(learner.posterior.mean()[name], value, rtol=0, atol=1e-12)


def test_a_coreset_counts_every_row_once(seed):
    tasks, everything = linear_tasks(seed)
    learner = kn.ContinualLearner(linear_model(), kn.ExactLinear(), kn.Coreset(5, choose="k_centre"))
    for task in tasks:
        learner.learn(task)
    batch = kn.ExactLinear().fit(linear_model(), everything)
    assert torch.allclose(learner.posterior.covariance, batch.covariance, rtol=0, atol=1e-12)
    assert not torch.allclose(learner.propagated.covariance, batch.covariance, rtol=0, atol=1e-6)


def test_update_is_the_batch_posterior_and_evidences_add_up(seed):
    tasks, everything = linear_tasks(seed, tasks=2)
    first = kn.ExactLinear().fit(linear_model(), tasks[0])
    second = first.update(tasks[1])
    batch = kn.ExactLinear().fit(linear_model(), everything)
    assert torch.allclose(second.covariance, batch.covariance, rtol=0, atol=1e-12)
    assert math.isclose(first.log_evidence + second.log_evidence, batch.log_evidence, abs_tol=1e-9)


def test_update_remembers_the_rows_of_both_fits():
    tasks, _ = linear_tasks(0, tasks=2)
    second = kn.ExactLinear().fit(linear_model(), tasks[0]).update(tasks[1])
    for task in tasks:
        with pytest.raises(kn.InvalidData, match="rows that the posterior was fitted to"):
            kn.certify(second, task, alpha=0.2, delta=0.2)


def test_update_of_a_loaded_posterior_asks_for_a_method(tmp_path):
    tasks, _ = linear_tasks(0, tasks=2)
    posterior = kn.ExactLinear().fit(linear_model(), tasks[0])
    posterior.save(tmp_path / "run")
    loaded = kn.load(tmp_path / "run")
    with pytest.raises(kn.InvalidArgument, match=r"method=kn\.MeanFieldVI"):
        loaded.update(tasks[1])
    again = loaded.update(tasks[1], method=kn.ExactLinear())
    assert torch.equal(again.covariance, posterior.update(tasks[1]).covariance)


def test_update_twice_keeps_point_estimates_and_frozen_weights_where_they_are():
    tasks = class_tasks(0, tasks=3)
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2))
    model = kn.Model(net, kn.Categorical(), random="last_layer", frozen="0.*")
    first = kn.Laplace(structure="diag", epochs=20).fit(model, tasks[0])
    body = first.points["2.weight"]
    last = first.update(tasks[1]).update(tasks[2])
    assert torch.equal(last.model.frozen_params()["2.weight"], body)
    assert torch.equal(last.model.frozen_params()["0.weight"], net[0].weight)
    assert set(last.mean()) == {"4.weight", "4.bias"}
    x = tasks[0][0][:4]
    by_hand = nn.functional.linear(torch.tanh(net[0](x)), body, last.model.frozen_params()["2.bias"])
    weights = last.mean()
    logits = nn.functional.linear(torch.tanh(by_hand), weights["4.weight"], weights["4.bias"])
    assert torch.allclose(last.model.forward(weights, x), logits, atol=1e-6)


def test_laplace_around_a_trained_network_trains_on_later_data():
    tasks = class_tasks(0)
    net = nn.Linear(4, 2)
    first = kn.Laplace(structure="full", start="network").fit(kn.Model(net, kn.Categorical(), kn.Normal(1.0)), tasks[0])
    second = first.update(tasks[1])
    assert torch.equal(first.mean()["weight"], net.weight)
    assert not torch.allclose(second.mean()["weight"], net.weight, atol=1e-2)


def test_transfer_and_forgetting_are_those_of_their_definitions():
    learner = kn.ContinualLearner(linear_model(), kn.ExactLinear())
    for _ in range(3):
        learner.learn(linear_tasks(0)[0][0])
    rows, before, untrained = [[0.9], [0.8, 0.7], [0.6, 0.75, 0.5]], [0.1, 0.3, 0.4], [0.1, 0.2, 0.2]
    for task, row, ahead, blank in zip(learner.tasks, rows, before, untrained, strict=True):
        task.scores = [TaskScore(value) for value in row]
        task.before, task.untrained = TaskScore(ahead), TaskScore(blank)
    assert learner.accuracies == rows
    assert math.isclose(learner.average_accuracy, (0.6 + 0.75 + 0.5) / 3)
    assert math.isclose(learner.forgetting, (0.3 + 0.0) / 2)
    assert math.isclose(learner.backward_transfer, (-0.3 + 0.05) / 2)
    assert math.isclose(learner.forward_transfer, (0.1 + 0.2) / 2)


def test_heads_of_their_own_are_learned_and_told_apart(tmp_path):
    tasks = class_tasks(1)
    model = kn.Model(TwoHeads(), kn.Categorical(), output=0)
    learner = kn.ContinualLearner(model, kn.Laplace(structure="full"), 10, checkpoint=tmp_path)
    for k, task in enumerate(tasks):
        learner.learn(task, output=k)
    assert all(score > 0.8 for score in learner.accuracies[-1])
    with pytest.raises(kn.InvalidArgument, match="task must be given"):
        learner.predict(tasks[0][0])
    guessed = learner.task_of(tasks[0][0])
    surest = [learner.predict(tasks[0][0], task=k).total for k in range(2)]
    assert torch.equal(guessed, torch.stack(surest).argmin(0))
    right = learner.predict(tasks[1][0], task=1).labels == tasks[1][1]
    assert math.isclose(right.double().mean().item(), learner.accuracies[-1][1], abs_tol=1e-6)


@pytest.mark.parametrize("coreset", [None, 5])
def test_a_run_taken_up_again_is_the_run_that_was_not_stopped(tmp_path, coreset):
    tasks = class_tasks(2, tasks=3)

    def learner(folder):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        return kn.ContinualLearner(kn.Model(net, kn.Categorical()), quick(), coreset, seed=3, checkpoint=folder)

    whole, first, second = learner(None), learner(tmp_path), learner(tmp_path)
    for task in tasks:
        whole.learn(task)
    for task in tasks[:2]:
        first.learn(task)
    for task in tasks:
        second.learn(task)
    assert second.accuracies == whole.accuracies
    assert second.log_likelihoods == whole.log_likelihoods
    for name, value in whole.posterior.std().items():
        assert torch.equal(second.posterior.std()[name], value)


def test_another_task_in_a_checkpoint_is_refused(tmp_path):
    tasks, _ = linear_tasks(0)
    kn.ContinualLearner(linear_model(), kn.ExactLinear(), checkpoint=tmp_path).learn(tasks[0])
    with pytest.raises(kn.InvalidArgument, match="holds another task 0: data, test differ"):
        kn.ContinualLearner(linear_model(), kn.ExactLinear(), checkpoint=tmp_path).learn(tasks[1])


def test_what_cannot_be_learned_is_refused_and_nothing_is_lost():
    tasks = class_tasks(0)
    model = kn.Model(nn.Linear(4, 2), kn.Categorical())
    learner = kn.ContinualLearner(model, quick())
    with pytest.raises(kn.InvalidArgument, match="Nothing was learned yet"):
        learner.predict(tasks[0][0])
    learner.learn(tasks[0])
    before = learner.posterior.mean()["weight"]
    with pytest.raises(kn.InvalidData):
        learner.learn((tasks[1][0][:, :3], tasks[1][1]))
    with pytest.raises(kn.InvalidData, match="from 0 to 1"):
        learner.learn((tasks[1][0], tasks[1][1] + 1))
    assert len(learner.tasks) == 1 and torch.equal(learner.posterior.mean()["weight"], before)
    with pytest.raises(kn.Unsupported, match="has no density"):
        kn.ContinualLearner(model, kn.DeepEnsemble(2, epochs=1)).learn(tasks[0])
    with pytest.raises(kn.InvalidType, match="method"):
        kn.ContinualLearner(model, "vcl")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*tasks[0]), batch_size=20)
    with pytest.raises(kn.Unsupported, match="coreset needs data in memory"):
        kn.ContinualLearner(model, quick(), 5).learn(loader)


def test_numbers_have_log_likelihoods_and_no_accuracies():
    tasks, _ = linear_tasks(0)
    learner = kn.ContinualLearner(linear_model(), kn.ExactLinear())
    learner.learn(tasks[0])
    with pytest.raises(kn.Unsupported, match="log_likelihoods"):
        _ = learner.accuracies
    x, y = tasks[0]
    expected = learner.posterior.predict(x).log_prob(y).mean().item()
    assert math.isclose(learner.log_likelihoods[0][0], expected, abs_tol=1e-9)
    assert "scored on training rows" in repr(learner)


def test_the_plot_has_a_line_for_each_task_and_one_for_the_average():
    learner = kn.ContinualLearner(kn.Model(nn.Linear(4, 2), kn.Categorical()), quick())
    for task in class_tasks(0):
        learner.learn(task, test=task)
    assert len(learner.plot().axes[0].lines) == 3
