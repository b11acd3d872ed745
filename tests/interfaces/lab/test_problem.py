"""What comes from the page is checked, and becomes the model that it describes."""

import math

import pytest
import torch

import knowable as kn
from knowable.interfaces.lab.methods import JUDGES, OFFERS, offer_of
from knowable.interfaces.lab.presets import presets
from knowable.interfaces.lab.problem import MOST_POINTS, Problem, bumps
from tests.interfaces.lab.cases import POINTS, labels, numbers


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"points": []}, "no points yet"),
        ({"points": [[0, 0]]}, "one point"),
        ({"points": [[0.0, 0.0]] * (MOST_POINTS + 1)}, f"{MOST_POINTS} at most"),
        ({"points": [[0, "a"], [1, 1]]}, r"points\[0\] must be \[x, y\]"),
        ({"points": [[0, 0], [math.nan, 1]]}, r"points\[1\] must be between"),
        ({"points": [[0, 0], [1e9, 1]]}, r"points\[1\] must be between"),
        ({"points": "abc"}, "must be a list"),
        ({"task": "classes", "points": [[0, 0, 0], [1, 1, 0]]}, "one class"),
        ({"task": "classes", "points": [[0, 0, 0], [1, 1, 7]]}, "Classes are 0 to 2"),
        ({"task": "both"}, "task must be"),
        ({"width": 0}, "width"),
        ({"width": 1000}, "width"),
        ({"depth": 9}, "depth"),
        ({"prior": -1}, "prior"),
        ({"noise": 0}, "noise"),
        ({"beta": math.inf}, "beta"),
        ({"view": [1, 0, 0, 1]}, "view must be"),
        ({"view": [0, 1, 2]}, "view must be"),
        ({"by_width": 1}, "by_width must be"),
        ({"colour": "red"}, "no field 'colour'"),
    ],
)
def test_what_is_wrong_is_said_by_name(given, said):
    with pytest.raises(kn.KnowableError, match=said):
        Problem.read({"points": POINTS, **given})
    with pytest.raises(kn.InvalidType, match="must be an object"):
        Problem.read([1, 2])


def test_the_model_is_the_one_that_is_described():
    described = {"width": 5, "depth": 2, "activation": "relu", "prior": 0.7}
    model = numbers(**described).model()
    assert [tuple(value.shape) for value in model.net.parameters()] == [(5, 1), (5,), (5, 5), (5,), (1, 5), (1,)]
    expected = sum(torch.distributions.Normal(0, 0.7).log_prob(value).sum() for value in model.net.parameters())
    torch.testing.assert_close(model.log_prior(model.params()), expected)
    assert "likelihood.log_noise" not in model.params()
    assert "likelihood.log_noise" in numbers(**described, noise=None).model().params()  # learned
    assert labels(classes=3).model().net[-1].out_features == 3


def test_a_prior_by_width_divides_by_the_root_of_the_inputs():
    scales = numbers(width=9, depth=2, prior=1.5, by_width=True).priors()
    assert scales == {"0.weight": 1.5, "2.weight": 0.5, "4.weight": 0.5, "*.bias": 1.5}


def test_bumps_cover_the_view():
    centres, spacing = bumps((-3.0, 3.0, 0.0, 1.0), 4)
    assert centres.flatten().tolist() == [-3.0, -1.0, 1.0, 3.0] and spacing == 2.0


def test_every_method_is_one_of_the_library_and_names_its_settings():
    problem = numbers(beta=0.5, rate=0.3)
    for name, offer in {**OFFERS, **JUDGES}.items():
        made = offer.make(problem)
        assert kn.METHODS[name].cls_name == type(made).__name__
        assert {"beta": 0.5, "rate": 0.3}.items() >= {each: getattr(made, each) for each in offer.uses}.items()
    with pytest.raises(kn.Unsupported, match="for numbers"):
        offer_of("exact_linear", labels())
    with pytest.raises(kn.InvalidArgument, match="method"):
        offer_of("magic", problem)


def test_every_example_can_be_fitted():
    fields = Problem.__dataclass_fields__
    found = presets()
    assert len({each["name"] for each in found}) == len(found) >= 8
    for each in found:
        state = each["state"]
        problem = Problem.read({name: value for name, value in state.items() if name in fields})
        for method in state["methods"]:
            offer_of(method, problem)
        if state["judge"]:
            offer_of(state["judge"], problem, judge=True)
        left, right, bottom, top = problem.view
        outside = [p for p in problem.points if not (left <= p[0] <= right and bottom <= p[1] <= top)]
        assert len(outside) <= 0.02 * len(problem.points), each["name"]
