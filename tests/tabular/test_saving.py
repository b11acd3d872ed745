"""Tests of estimators on disk."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

import knowable as kn
from knowable.core.storage.folder import FORMAT_VERSION
from knowable.tabular import read_table
from tests.core.artifacts import rewrite
from tests.tabular.cases import QUICK, mixed_frame, small_network


class Own(nn.Module):
    """A network that is not made of plain layers."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.layer = nn.Linear(inputs, outputs).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.layer(x))


@pytest.fixture(scope="module")
def regressor() -> kn.BayesianRegressor:
    frame, y = mixed_frame()
    model = kn.BayesianRegressor(
        QUICK["laplace"], network=small_network, prior={"*.bias": kn.Normal(3.0), "*": kn.Normal(1.0)}, random_state=3,
        kinds={"colour": "categorical"}, samples=9,
    )  # fmt: skip
    return model.fit(frame, y)


@pytest.mark.parametrize("method", QUICK)
def test_a_regressor_predicts_the_same_after_the_disk(method: str, tmp_path: Path):
    frame, y = mixed_frame()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", kn.KnowableWarning)
        model = kn.BayesianRegressor(QUICK[method], network=small_network, random_state=0, samples=8).fit(frame, y)
    model.save(tmp_path / "model")
    back = kn.BayesianRegressor.load(tmp_path / "model")
    for first, second in zip(model.predict(frame, return_std=True), back.predict(frame, return_std=True), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-12)
    assert back.schema_ == model.schema_
    assert back.method_ == model.method_ == back.method


def test_settings_come_back(regressor: kn.BayesianRegressor, tmp_path: Path):
    back = kn.BayesianRegressor.load(regressor.save(tmp_path / "model"))
    before, after = regressor.get_params(), back.get_params()
    assert after.pop("network") is None and before.pop("network") is small_network
    assert after == before
    assert back.choice_ == regressor.choice_
    assert back.feature_names_in_.tolist() == regressor.feature_names_in_.tolist()


def test_a_classifier_comes_back_with_its_labels(tmp_path: Path):
    frame, y = mixed_frame()
    model = kn.BayesianClassifier(QUICK["map"], network=small_network, random_state=0).fit(frame, y > np.median(y))
    back = kn.BayesianClassifier.load(model.save(tmp_path / "model"))
    assert back.classes_.tolist() == [False, True]
    np.testing.assert_allclose(back.predict_proba(frame), model.predict_proba(frame), rtol=1e-12)
    with pytest.raises(kn.InvalidArgument, match=r"holds a BayesianClassifier: write BayesianClassifier.load"):
        kn.BayesianRegressor.load(tmp_path / "model")


def test_the_default_network_with_embeddings_comes_back(tmp_path: Path):
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"city": rng.choice(list("abcdefghij"), 60), "x": rng.normal(size=60)})
    model = kn.BayesianRegressor(kn.MAP(epochs=3), random_state=0).fit(frame, frame["x"])
    assert type(model.model_.net).__name__ == "ResidualMLP"
    back = kn.BayesianRegressor.load(model.save(tmp_path / "model"))
    np.testing.assert_allclose(back.predict(frame), model.predict(frame), rtol=1e-12)


def test_a_network_of_the_users_own_is_passed_to_load(tmp_path: Path):
    X, y = np.random.default_rng(0).normal(size=(20, 2)), np.arange(20.0)
    model = kn.BayesianRegressor(kn.MAP(epochs=3), network=Own(2, 1)).fit(X, y)
    model.save(tmp_path / "model")
    with pytest.raises(kn.InvalidArgument, match="not made of plain"):
        kn.BayesianRegressor.load(tmp_path / "model")
    back = kn.BayesianRegressor.load(tmp_path / "model", network=Own(2, 1))
    np.testing.assert_allclose(back.predict(X), model.predict(X), rtol=1e-12)


def test_the_schema_is_enforced_after_the_disk(regressor: kn.BayesianRegressor, tmp_path: Path):
    back = kn.BayesianRegressor.load(regressor.save(tmp_path / "model"))
    frame, _ = mixed_frame()
    with pytest.raises(kn.InvalidData, match="lacks the column size"):
        back.predict(read_table(frame.drop(columns="size")))


def test_a_loaded_estimator_can_be_updated(regressor: kn.BayesianRegressor, tmp_path: Path):
    back = kn.BayesianRegressor.load(regressor.save(tmp_path / "model"))
    frame, y = mixed_frame(seed=1)
    before = back.predict(frame)
    assert not np.array_equal(back.partial_fit(frame, y).predict(frame), before)


def test_saving_again_replaces_if_asked_and_other_folders_are_left_alone(
    regressor: kn.BayesianRegressor, tmp_path: Path
):
    regressor.save(tmp_path / "model")
    with pytest.raises(kn.InvalidArgument, match="overwrite=True"):
        regressor.save(tmp_path / "model")
    regressor.save(tmp_path / "model", overwrite=True)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").write_text("dear")
    with pytest.raises(kn.InvalidArgument, match=r"something else in it \(thesis.tex\)"):
        regressor.save(tmp_path / "other")
    with pytest.raises(kn.InvalidArgument, match="is a file"):
        regressor.save(tmp_path / "other" / "thesis.tex")


def test_damaged_and_newer_folders_are_told(regressor: kn.BayesianRegressor, tmp_path: Path):
    with pytest.raises(kn.DamagedArtifact, match="is not a saved estimator"):
        kn.BayesianRegressor.load(tmp_path)
    file = regressor.save(tmp_path / "model") / "estimator.json"
    rewrite(file, format=99)
    with pytest.raises(kn.DamagedArtifact, match="has format 99"):
        kn.BayesianRegressor.load(tmp_path / "model")
    content = json.loads(file.read_text())["body"]["content"]
    rewrite(file, format=FORMAT_VERSION, content={name: content[name] for name in content if name != "schema"})
    with pytest.raises(kn.DamagedArtifact, match="'schema'"):
        kn.BayesianRegressor.load(tmp_path / "model")
    file.write_text("{")
    with pytest.raises(kn.DamagedArtifact, match="not readable JSON"):
        kn.BayesianRegressor.load(tmp_path / "model")


def test_an_estimator_of_version_0_1_is_read_and_a_newer_one_is_not(regressor: kn.BayesianRegressor, tmp_path: Path):
    file = regressor.save(tmp_path / "model") / "estimator.json"
    content = json.loads(file.read_text())["body"]["content"]
    file.write_text(json.dumps({"format": 1, **content}))
    assert kn.BayesianRegressor.load(tmp_path / "model").seed_ == regressor.seed_
    file.write_text(json.dumps({"format": 2, **content}))
    with pytest.raises(kn.DamagedArtifact, match="has format 2"):
        kn.BayesianRegressor.load(tmp_path / "model")


def test_the_posterior_of_another_estimator_is_refused(regressor: kn.BayesianRegressor, tmp_path: Path):
    regressor.save(tmp_path / "model")
    regressor.posterior_.seed += 1
    regressor.posterior_.save(tmp_path / "model" / "posterior", overwrite=True)
    with pytest.raises(kn.DamagedArtifact, match="is not the posterior of this estimator"):
        kn.BayesianRegressor.load(tmp_path / "model")


def test_a_method_within_a_method_comes_back(tmp_path: Path):
    X, y = np.random.default_rng(0).normal(size=(20, 2)), np.arange(20.0)
    method = kn.EnsembleOf(kn.MAP(epochs=3), members=2)
    model = kn.BayesianRegressor(method, network=small_network, random_state=0).fit(X, y)
    assert kn.BayesianRegressor.load(model.save(tmp_path / "model")).method == method
