from __future__ import annotations

import torch

from knowable.core.chains.target import ModelTarget
from knowable.core.model.data import as_data
from knowable.inference.sampling.mini_batches import MiniBatches, batch_seed, rows_per_step
from knowable.testing.targets import LinearGaussian


def _target(problem):
    model = problem.model()
    return ModelTarget(model, as_data(problem.data, model), points={}, buffers={})


def test_small_data_come_whole_and_large_data_in_batches():
    assert (rows_per_step(None, 1024), rows_per_step(None, 1025)) == (1024, 128)
    assert (rows_per_step(50, 1024), rows_per_step(5000, 300)) == (50, 300)


def test_batch_of_a_step_depends_on_the_seed_and_the_step_alone():
    target = _target(LinearGaussian.make(60, 3))
    in_order = MiniBatches(target, 7, seed=5)
    batches = [in_order.batch(step) for step in range(25)]
    for step in (24, 3, 9, 10, 0):  # another object, out of order, as a resumed run would ask
        x, y = MiniBatches(target, 7, seed=5).batch(step)
        assert torch.equal(x, batches[step][0]) and torch.equal(y, batches[step][1])
    other = MiniBatches(target, 7, seed=6).batch(0)[0]
    assert not torch.equal(other, batches[0][0])


def test_gradient_of_batches_is_unbiased(seed):
    # the mean over 2,000 independent batches against the exact gradient; 5 standard errors of 4 coordinates
    problem = LinearGaussian.make(60, 3, seed=seed)
    target, position = _target(problem), torch.randn(1, 4, dtype=torch.float64)
    batches = MiniBatches(target, 7, seed=seed)
    found = torch.cat([batches.gradient(position, step)[1] for step in range(2000)])
    error = found.std(0) / 2000**0.5
    assert ((found.mean(0) - target.value_and_grad(position)[1][0]).abs() < 5 * error).all()
    assert (error > 0).all()


def test_all_rows_in_one_batch_give_the_exact_gradient():
    problem = LinearGaussian.make(60, 3)
    target, position = _target(problem), torch.zeros(2, 4, dtype=torch.float64)
    batches = MiniBatches(target, None, seed=0)
    assert batches.exact
    torch.testing.assert_close(batches.gradient(position, 3), target.value_and_grad(position))


def test_every_run_has_a_seed_of_its_own(generator):
    assert batch_seed(generator) != batch_seed(generator)
