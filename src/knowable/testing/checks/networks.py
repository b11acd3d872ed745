"""Every kind of network is fitted, or refused in words."""

from __future__ import annotations

import copy

import torch

from knowable.core.model.model import Model
from knowable.core.posterior.functions import FunctionPosterior
from knowable.core.posterior.posterior import Posterior
from knowable.errors import Unsupported
from knowable.testing.networks import NetworkCase, network_case
from knowable.testing.subject import Subject, expect, expect_error, some_draws


def check_network(subject: Subject, name: str) -> None:
    """The named network is fitted and predicts, or is refused with ``Unsupported`` if that was declared."""
    if name in subject.refuses:
        case = network_case(name)
        expect_error(Unsupported, lambda: subject.fit(case), f"Fitting {name!r}, which the method says it cannot do,")
        return
    _expect_a_good_fit(subject, *subject.fitted(name))


def check_case(subject: Subject, case: NetworkCase) -> None:
    """A network with its data is fitted and predicts."""
    _expect_a_good_fit(subject, case, subject.fit(case))


def _expect_a_good_fit(subject: Subject, case: NetworkCase, posterior: Posterior) -> None:
    _expect_a_posterior(posterior, case)
    if isinstance(posterior, FunctionPosterior):
        pass  # there are no weights that could have moved
    elif subject.trains:
        _expect_learning(posterior, posterior.model)
    else:
        _expect_spread(posterior)
    _expect_a_prediction(posterior, case)


def _expect_a_posterior(posterior: Posterior, case: NetworkCase) -> None:
    if isinstance(posterior, FunctionPosterior):
        functions = some_draws(posterior, case.x, 3, seed=0)["functions"]
        expect(functions.shape[:2] == (3, len(case.y)), f"sample_functions(x, 3) has shape {tuple(functions.shape)}.")
        expect(torch.isfinite(functions).all(), "sample_functions(x, 3) is not finite.")
    else:
        _expect_weights(posterior)
    expect(all(torch.isfinite(v).all() for v in posterior.buffers.values()), "The posterior's buffers are not finite.")
    expect(isinstance(posterior.diagnostics.message, str), "diagnostics.message should say how the fit ended.")
    terms = posterior.diagnostics.terms
    expect(all(isinstance(value, float) for value in terms.values()), f"diagnostics must be numbers, got {terms}.")


def _expect_weights(posterior: Posterior) -> None:
    start = posterior.model.params()
    for what, params in (("mean()", posterior.mean()), ("std()", posterior.std())):
        expect(list(params) == list(start), f"{what} has parameters {list(params)}, the model {list(start)}.")
        for name, value in params.items():
            expect(value.shape == start[name].shape, f"{what}[{name!r}] has shape {tuple(value.shape)}.")
            expect(value.dtype == start[name].dtype, f"{what}[{name!r}] has dtype {value.dtype}.")
            expect(torch.isfinite(value).all(), f"{what}[{name!r}] is not finite.")
    draws = posterior.sample(3, torch.Generator().manual_seed(0))
    expect(list(draws) == list(start), f"sample() has parameters {list(draws)}, the model {list(start)}.")
    for name, value in draws.items():
        expect(value.shape == (3, *start[name].shape), f"sample(3)[{name!r}] has shape {tuple(value.shape)}.")
        expect(torch.isfinite(value).all(), f"sample(3)[{name!r}] is not finite.")


def _expect_learning(posterior: Posterior, model: Model) -> None:
    """Every parameter that is not frozen has moved: none was left out of the fit."""
    mean, start = posterior.mean(), model.params()
    still = [name for name in start if torch.equal(mean[name], start[name])]
    expect(not still, f"The fit left {', '.join(still)} at the start value.")


def _expect_spread(posterior: Posterior) -> None:
    std = posterior.std()
    still = [name for name in posterior.model.random_names if not (std[name] > 0).all()]
    expect(not still, f"The fit gave {', '.join(still)} no spread.")


def _expect_a_prediction(posterior: Posterior, case: NetworkCase) -> None:
    prediction = posterior.predict(case.x, samples=4)
    expect(len(prediction) == len(case.y), f"{len(prediction)} predictions for {len(case.y)} rows.")
    for name in ("total", "aleatoric", "epistemic"):
        value = getattr(prediction, name)
        expect(torch.isfinite(value).all() and (value >= 0).all(), f"prediction.{name} must be finite and at least 0.")
    log_prob = prediction.log_prob(case.y)
    expect(log_prob.shape == (len(case.y),), f"log_prob(y) has shape {tuple(log_prob.shape)}.")
    expect(torch.isfinite(log_prob).all(), "log_prob(y) of the training data is not finite.")


def check_last_batch_of_one_row_is_no_trouble(subject: Subject) -> None:
    """17 rows in batches of 8: batch normalisation has no variance over the one that is left."""
    if "batchnorm_cnn" not in subject.refuses:
        case = network_case("batchnorm_cnn", rows=17)
        _expect_a_prediction(subject.fit(case), case)


def check_frozen_parameters_stay(subject: Subject) -> None:
    """Frozen parameters and their running statistics are those of the network, before and after."""
    if "frozen_backbone" in subject.refuses:
        return
    case, posterior = subject.fitted("frozen_backbone")
    for name, value in case.net.named_buffers():
        expect(torch.equal(posterior.buffers[name], value), f"The statistics {name} of a frozen layer changed.")
    if isinstance(posterior, FunctionPosterior):
        return
    expect(not any(k.startswith(("0.", "1.")) for k in posterior.mean()), "Frozen parameters appear in mean().")
    draw = {name: value[0] for name, value in posterior.sample(1, torch.Generator().manual_seed(0)).items()}
    features = copy.deepcopy(case.net[:3]).eval()(case.x)  # type: ignore[index]
    expected = features @ draw["3.weight"].T + draw["3.bias"]
    actual = posterior.model.forward(draw, case.x, buffers=posterior.buffers)
    expect(torch.allclose(actual, expected, atol=1e-5), "The frozen backbone does not give the network's own features.")


def check_point_parameters_do_not_vary(subject: Subject) -> None:
    """With ``random="last_layer"`` the other layers are the same in every draw."""
    if "last_layer" in subject.refuses:
        return
    case, posterior = subject.fitted("last_layer")
    chosen = set(case.model().random_names)
    expect(chosen == {"2.weight", "2.bias"}, f"random='last_layer' chose {sorted(chosen)}.")
    if isinstance(posterior, FunctionPosterior):
        return
    random = set(posterior.model.random_names)  # a method may take some of them as points
    expect("2.weight" in random and random <= chosen, f"Of random='last_layer' the fit made {sorted(random)}.")
    draws, std = posterior.sample(4, torch.Generator().manual_seed(0)), posterior.std()
    for name in posterior.model.point_names:
        expect((draws[name] == draws[name][:1]).all(), f"The point estimate {name} differs from draw to draw.")
        expect((std[name] == 0).all(), f"The point estimate {name} has a standard deviation.")
