"""A fit as it is shown: pictures with the numbers of the library, terms, chains, and answers to questions."""

import base64
import json
import math
import warnings

import pytest
import torch

import knowable as kn
from knowable.interfaces.lab import fitting
from knowable.interfaces.lab.actions import ACTIONS
from knowable.interfaces.lab.fitting import Fit, Question, Stopped, answer, fit_and_tell, fit_of
from knowable.interfaces.lab.methods import Offer
from knowable.interfaces.lab.picture import CURVE, MAP, Terms, grid_of, picture, rounded
from tests.interfaces.lab.cases import Silent, labels, numbers


def quick(monkeypatch, method):
    """Let every method be this one."""
    monkeypatch.setattr(fitting, "offer_of", lambda name, problem, judge=False: Offer("quick", lambda p: method))


def test_a_picture_has_the_numbers_of_the_prediction():
    problem = numbers()
    posterior = fit_of(Fit(problem, "infinite_width"))
    found, grid = picture(problem, posterior), grid_of(problem)
    prediction = posterior.predict(grid, samples=200)
    assert found["mean"] == rounded(prediction.mean.flatten())
    assert found["epistemic"] == rounded(prediction.epistemic.sqrt().flatten())
    assert found["aleatoric"] == rounded(prediction.aleatoric.sqrt().flatten())
    assert len(found["draws"]) == 12 and all(len(draw) == CURVE for draw in found["draws"])
    assert "weights" not in found  # it is a distribution over functions
    spread = torch.tensor(found["draws"]).std(0)  # 12 draws: the ratio is within 4 standard errors of 1
    ratio = (spread.square().mean() / prediction.epistemic.mean()).item()
    assert abs(math.log(ratio)) < 4 * (2 / 11) ** 0.5


@pytest.mark.parametrize("classes", [2, 3])
def test_a_map_has_probabilities_and_a_border_for_each_draw(classes):
    problem = labels(classes=classes)
    posterior = kn.DeepEnsemble(3, epochs=60).fit(problem.model(), problem.data, progress=False)
    found = picture(problem, posterior)
    prediction = posterior.predict(grid_of(problem), samples=200)
    shown = [torch.tensor(list(base64.b64decode(each))) / 255 for each in found["probs"]]
    assert len(shown) == classes and all(len(each) == MAP * MAP for each in shown)
    assert (torch.stack(shown, 1) - prediction.probs).abs().max() < 0.5 / 255 + 1e-6
    epistemic = torch.tensor(list(base64.b64decode(found["epistemic"]))) / 255 * math.log(classes)
    assert (epistemic - prediction.epistemic).abs().max() < 0.5 / 255 * math.log(classes) + 1e-6
    assert [len(draw) for draw in found["draws"]] == [1 if classes == 2 else 3] * 3
    for draw, own in zip(found["draws"], prediction.draw_log_probs.exp(), strict=True):
        border = torch.tensor(list(base64.b64decode(draw[-1])))
        clear = (own.max(1).values - 1 / classes) > 0.1
        assert ((border > 127)[clear] == (own.argmax(1) == classes - 1)[clear]).double().mean() > 0.98


def test_a_fit_sends_pictures_and_ends_with_its_posterior(monkeypatch, tmp_path):
    quick(monkeypatch, kn.MeanFieldVI(epochs=300))
    monkeypatch.setattr(fitting, "_BETWEEN", 0.0)
    connection, fit = Silent(), Fit(numbers(), "mean_field_vi", folder=str(tmp_path / "it"))
    last = json.loads(fit_and_tell(connection, fit))
    sent = [json.loads(line) for kind, line in connection.sent if kind == "picture"]
    assert sent and all(len(each["mean"]) == CURVE for each in sent)
    assert last["share"] == 1.0 and last["evidence"][1] == "bound"
    assert last["terms"]["names"] == ["expected_log_likelihood", "kl"]
    for _, likelihood, kl, elbo in last["terms"]["rows"]:
        assert elbo == pytest.approx(likelihood - kl, rel=1e-3, abs=1e-2)
    assert [layer["count"] for layer in last["weights"]["layers"]] == [4, 4, 4, 1]
    saved = kn.load(tmp_path / "it", net=fit.problem.network())
    assert rounded(saved.predict(grid_of(fit.problem), samples=200).mean.flatten()) == last["mean"]


def test_looking_on_does_not_change_the_fit():
    problem = numbers()
    fit = Fit(problem, "laplace")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shown = json.loads(fit_and_tell(Silent(), fit))
        alone = fit_of(fit)
    assert shown["mean"] == rounded(alone.predict(grid_of(problem), samples=200).mean.flatten())


def test_a_fit_that_is_not_wanted_any_more_stops_at_the_next_report(monkeypatch):
    quick(monkeypatch, kn.MeanFieldVI(epochs=100_000))
    connection = Silent()
    connection.poll, connection.recv = lambda: True, lambda: None
    with pytest.raises(Stopped):
        fit_and_tell(connection, Fit(numbers(), "mean_field_vi"))


def test_chains_have_paths_and_their_convergence(monkeypatch):
    quick(monkeypatch, kn.HMC(chains=2, draws=30, warmup=20, steps=3, start="prior"))
    last = json.loads(fit_and_tell(Silent(), Fit(numbers(), "hmc")))
    chains = last["chains"]
    assert chains["draws"] == 30 and [len(path) for path in chains["paths"]] == [30, 30]
    assert set(chains["mixing"]) == {"rhat", "ess"} and chains["history"][-1][0] == 30


def test_terms_of_a_long_fit_are_thinned_and_end_with_the_last():
    terms = Terms(10)
    for step in range(1, 1001):
        record = {"expected_log_likelihood": 1.0, "kl": 2.0, "loss": 0.1}
        terms.add(kn.Progress("VI", step, 1000, "", record))
    rows = terms.content()["rows"]
    assert len(rows) <= 161 and rows[0] == [1, 1.0, 2.0, -1.0] and rows[-1][0] == 1000


# --- questions -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fitted(tmp_path_factory):
    """Fits of numbers and of labels by Laplace, saved."""
    root = tmp_path_factory.mktemp("fits")
    found = {}
    for name, problem in (("numbers", numbers()), ("labels", labels(80))):
        found[name] = Fit(problem, "laplace", folder=str(root / name))
        fit_and_tell(Silent(), found[name])
    return found


def ask(fit, action, **given):
    return json.loads(answer(Question(action, fit, given)))


def test_the_next_label_is_where_it_tells_most(fitted):
    fit = fitted["numbers"]
    x = ask(fit, "label")["point"][0]
    grid = grid_of(fit.problem)
    posterior = kn.load(fit.folder, net=fit.problem.network())
    spread = posterior.predict(grid, samples=200).epistemic.flatten()
    near = spread[(grid.flatten() - x).abs().argmin()]
    inside = spread[(grid.abs() < 2.7).flatten()]
    assert near > 0.9 * inside.max()  # the noise is the same everywhere: the information grows with the variance


def test_one_network_is_not_asked_for_a_label():
    problem = numbers()
    posterior = kn.MAP(epochs=20).fit(problem.model(), problem.data, progress=False)
    with pytest.raises(kn.Unsupported, match="no epistemic"):
        ACTIONS["label"](problem, posterior, method=kn.MAP())


def test_two_weights_of_a_linear_model_are_shown():
    problem = numbers()
    shown = picture(problem, fit_of(Fit(problem, "exact_linear")))["weights"]
    assert shown["slice"] == [("1.weight", 0), ("1.weight", 1)]
    first, second = torch.tensor(shown["cloud"]).T
    assert not torch.equal(first, second)


def test_the_next_evaluation_is_the_largest_upper_bound(fitted):
    fit = fitted["numbers"]
    found, grid = ask(fit, "evaluate", beta=2.0), grid_of(fit.problem)
    prediction = kn.load(fit.folder, net=fit.problem.network()).predict(grid, samples=200)
    bound = (prediction.mean + 2 * prediction.epistemic.sqrt()).flatten()
    assert found["curve"] == rounded(bound)
    assert found["point"] == rounded(torch.stack([grid[bound.argmax(), 0], bound.max()]))
    with pytest.raises(kn.Unsupported, match="classes"):
        ask(fitted["labels"], "evaluate")


def test_an_attack_stays_in_its_ball_and_lowers_the_probability(fitted):
    found = ask(fitted["labels"], "attack", point=3, epsilon=0.5)
    moved = torch.tensor(found["to"]) - torch.tensor(found["from"])
    assert 0 < moved.norm() <= 0.5 + 1e-3
    before, after = (float(word) for word in found["text"].split("probability ")[1].split(". ")[0].split(", then "))
    assert after < before
    with pytest.raises(kn.InvalidArgument, match="point"):
        ask(fitted["labels"], "attack", point=400)


def test_rejection_says_what_is_accepted_or_how_many_points_it_needs(fitted):
    with pytest.raises(kn.InvalidArgument, match="too few"):
        ask(fitted["numbers"], "reject", risk=0.1)
    found = ask(fitted["labels"], "reject", risk=0.3)
    assert set(found["accept"]) <= {"0", "1"} and len(found["accept"]) == MAP * MAP and len(found["held"]) == 40
    assert "accepted labels are wrong" in found["text"] or "every row is rejected" in found["text"]


def test_a_posterior_is_at_no_distance_from_itself(fitted):
    fit = fitted["numbers"]
    found = json.loads(answer(Question("judged", fit, {}, fit.folder)))
    assert found["sd_ratio"] == pytest.approx([1.0, 1.0], abs=1e-3) and set(ACTIONS) >= {"judged"}
