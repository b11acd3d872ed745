"""Draws and predictions: repeatable, new when asked, the same under any cap on memory."""

from __future__ import annotations

import torch

from knowable.core.posterior.functions import FunctionPosterior
from knowable.core.posterior.particles import Particles
from knowable.core.posterior.posterior import Posterior
from knowable.errors import InvalidArgument, InvalidData, InvalidType
from knowable.testing.subject import Subject, expect, expect_error, expect_same_posterior, moments, some_draws


def check_prediction_repeats_itself(subject: Subject) -> None:
    """Without a generator the same prediction every time; with one, a new prediction where there is spread."""
    case, posterior = subject.fitted()
    first = posterior.predict(case.x, samples=5).samples
    posterior.predict(case.x, samples=7)
    expect(torch.equal(first, posterior.predict(case.x, samples=5).samples), "Two predictions differ.")
    generator = torch.Generator().manual_seed(1)
    second = posterior.predict(case.x, samples=5, generator=generator).samples
    third = posterior.predict(case.x, samples=5, generator=generator).samples
    again = posterior.predict(case.x, samples=5, generator=torch.Generator().manual_seed(1)).samples
    expect(torch.equal(second, again), "Two predictions with equal generators differ.")
    if _has_spread(posterior) and len(first) == 5:  # a posterior of fewer atoms always uses all of them
        different = not torch.equal(first, second) and not torch.equal(second, third)
        expect(different, "A generator does not make the prediction's draws new.")


def check_draws_are_new_where_there_is_spread(subject: Subject) -> None:
    """``sample`` follows its generator, and draws differ where the posterior has spread."""
    case, posterior = subject.fitted()
    one, two = (some_draws(posterior, case.x, 6, seed) for seed in (1, 2))
    if _has_spread(posterior):
        expect(any(not torch.equal(one[name], two[name]) for name in one), "sample() ignores its generator.")
        expect(any((value != value[:1]).any() for value in one.values()), "All draws are the same.")
    expect_error((InvalidArgument, InvalidType), lambda: some_draws(posterior, case.x, 0, 0), "sample(0)")


def check_memory_cap_changes_nothing(subject: Subject) -> None:
    """A prediction cut into blocks to fit in memory is the same prediction."""
    case, posterior = subject.fitted(rows=64)
    whole = posterior.predict(case.x, samples=20)
    size = whole.samples.numel() * whole.samples.element_size()
    for cap in (2 * size + size // 5, 40 * size):  # the first leaves no room to keep the draws of a network
        capped = posterior.predict(case.x, samples=20, max_memory=cap)
        expect(_close(whole.samples, capped.samples), f"max_memory={cap} changes the prediction's draws.")
        expect(_close(whole.total, capped.total), f"max_memory={cap} changes the prediction's uncertainty.")
    expect_error(InvalidArgument, lambda: posterior.predict(case.x, samples=20, max_memory=1), "max_memory=1")


def check_streamed_prediction_is_the_prediction(subject: Subject) -> None:
    """Predictions for blocks of rows, joined, are the prediction for all of them."""
    case, posterior = subject.fitted(rows=64)
    whole = posterior.predict(case.x, samples=6)
    size = whole.samples.numel() * whole.samples.element_size()
    parts = list(posterior.predict_stream(case.x, samples=6, max_memory=size))
    expect(len(parts) > 1, "predict_stream gave one block although only half of the rows fit.")
    for name in ("total", "aleatoric", "epistemic"):
        joined = torch.cat([getattr(part, name) for part in parts])
        expect(_close(getattr(whole, name), joined), f"predict_stream and predict give different {name} uncertainty.")
    expect(_close(whole.samples, torch.cat([part.samples for part in parts], 1)), "predict_stream gives other draws.")
    log_prob = torch.cat([p.log_prob(y) for p, y in zip(parts, case.y.split([len(p) for p in parts]), strict=True)])
    expect(_close(whole.log_prob(case.y), log_prob), "predict_stream gives another log density.")


def check_inputs_of_a_prediction(subject: Subject) -> None:
    """Arrays are taken as inputs; missing values, wrong shapes and no draws are refused."""
    case, posterior = subject.fitted()
    expected = posterior.predict(case.x, samples=3).samples
    expect(torch.equal(expected, posterior.predict(case.x.numpy(), samples=3).samples), "Arrays change a prediction.")
    missing = case.x.clone()
    missing[2] = float("nan")
    expect_error(InvalidData, lambda: posterior.predict(missing), "Predicting at a missing value")
    expect_error(InvalidData, lambda: posterior.predict(case.x[:, :2]), "Predicting with a column missing")
    expect_error(InvalidData, lambda: posterior.predict(case.x[:0]), "Predicting at no rows")
    expect_error((InvalidArgument, InvalidType), lambda: posterior.predict(case.x, samples=0), "samples=0")


def check_density_is_that_of_the_draws(subject: Subject) -> None:
    """Where ``log_prob`` exists it takes one draw or a stack, and draws are likelier than far-off values."""
    _, posterior = subject.fitted()
    if type(posterior).log_prob in (Posterior.log_prob, FunctionPosterior.log_prob):
        return
    draws = posterior.sample(8, torch.Generator().manual_seed(0))
    values = posterior.log_prob(draws)
    single = posterior.log_prob({name: value[0] for name, value in draws.items()})
    expect(
        values.shape == (8,) and single.shape == (), f"log_prob gives {tuple(values.shape)} and {tuple(single.shape)}."
    )
    expect(torch.allclose(values[0], single, rtol=1e-4, atol=1e-3), "log_prob of a stack differs from that of a draw.")
    far = posterior.log_prob({name: value + 1e3 for name, value in draws.items()})
    expect((values > far).all(), "log_prob prefers values far away to the posterior's own draws.")


def _has_spread(posterior: Posterior) -> bool:
    if isinstance(posterior, FunctionPosterior):
        return True
    if isinstance(posterior, Particles) and posterior.weights.square().sum() > 0.5:
        return False  # weighted draws of which one has nearly all the weight
    return any((value > 0).any() for value in posterior.std().values())


def _close(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.shape == second.shape and torch.allclose(first, second, rtol=1e-4, atol=1e-6)


# --- The network's floating-point type is kept, whatever the data comes in -------------------------------------------

_OTHER = {torch.float32: torch.float64, torch.float64: torch.float32}


def check_dtype_is_kept(subject: Subject) -> None:
    """A float32 network gives float32 and a float64 network float64, also when the data is of the other kind."""
    for dtype in _OTHER:
        case = subject.case(dtype=dtype)
        for kind in (dtype, _OTHER[dtype]):
            posterior = subject.fit(case, data=(case.x.to(kind), case.y.to(kind)))
            _expect_dtype(moments(posterior, case.x), dtype, "mean()")
            _expect_dtype(some_draws(posterior, case.x, 2, seed=0), dtype, "sample()")
            prediction = posterior.predict(case.x.to(kind), samples=3)
            values = {
                "samples": prediction.samples,
                "total": prediction.total,
                "log_prob": prediction.log_prob(case.y),
            }
            _expect_dtype(values, dtype, "prediction")


def _expect_dtype(tensors: dict[str, torch.Tensor], dtype: torch.dtype, what: str) -> None:
    for name, value in tensors.items():
        expect(value.dtype == dtype, f"{what}[{name!r}] is {value.dtype} for a {dtype} network.")


# --- The seed fixes everything, and nothing else does ----------------------------------------------------------------


def check_same_seed_gives_the_same_bits(subject: Subject) -> None:
    """Two fits with one seed agree exactly, whatever was drawn from the global generator in between."""
    case = subject.case()
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = subject.fit(case, seed=3)
        torch.manual_seed(2)
        second = subject.fit(case, seed=3)
    expect_same_posterior(first, second, case.x, "Two fits with the same seed")


def check_seed_matters_if_and_only_if_declared(subject: Subject) -> None:
    """Fits with two seeds differ, or agree exactly where the method says that it uses no randomness."""
    case, first = subject.fitted()
    second = subject.fit(case, seed=1)
    if subject.seeded:
        expect(_differ(first, second, case.x), "Fits with different seeds gave the same posterior: is the seed used?")
    else:
        expect(
            not _differ(first, second, case.x),
            "The method is declared without randomness, but the seed changes its fit.",
        )


def _differ(first: Posterior, second: Posterior, x: torch.Tensor) -> bool:
    one, two = moments(first, x), moments(second, x)
    return any(not torch.equal(value, two[name]) for name, value in one.items())
