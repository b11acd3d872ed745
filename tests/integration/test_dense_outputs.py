"""One outcome for each pixel: bad masks are refused by name, and what is done in blocks is what is done at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import knowable as kn
from knowable.errors import InvalidArgument, InvalidData

X, Y = torch.randn(4, 1, 8, 6, generator=torch.Generator().manual_seed(0)), torch.arange(4 * 48).view(4, 8, 6) % 3
MAP = kn.MAP(epochs=1)


def classes(**settings) -> kn.Model:
    return kn.Model(nn.Conv2d(1, 3, 3, padding=1), kn.Categorical(**settings))


def numbers(likelihood) -> kn.Model:
    class LastChannels(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(1, 2, 3, padding=1)

        def forward(self, x):
            return self.layer(x).movedim(1, -1)

    return kn.Model(LastChannels(), likelihood)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (Y[:, :6], r"y has shape \(4, 6, 6\).*has shape \(4, 8, 6\)"),
        (nn.functional.one_hot(Y).movedim(-1, 1), r"pass y\.argmax\(1\)"),
        (Y[:3], "same number of rows"),
        (Y + 1, r"from 0 to 2 .*got 3 in row 0, position \(0, 2\).*Number the classes from 0"),
        (Y.where(Y > 0, -100), r"Categorical\(ignore_index=-100\)"),
        (Y.where(Y > 0, 255), r"Categorical\(ignore_index=255\)"),
        (Y / 2, r"got 0.5 in row 0, position \(0, 1\)"),
        (Y.float().where(Y > 0, torch.nan), "missing or infinite values in row 0, 1, 2, 3"),
    ],
)
def test_bad_masks_are_refused(mask, message):
    with pytest.raises(InvalidData, match=message):
        MAP.fit(classes(), (X, mask))


@pytest.mark.parametrize(
    ("mask", "message"),
    [(255 * (Y > 0), r"got 255 in row 0.*pass y > 0"), (torch.rand(4, 8, 6), "y must be 0 or 1")],
)
def test_bad_masks_of_yes_and_no_are_refused(mask, message):
    with pytest.raises(InvalidData, match=message):
        MAP.fit(kn.Model(nn.Conv2d(1, 1, 3, padding=1), kn.Bernoulli()), (X, mask))


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
def test_masks_without_a_label_that_counts_are_refused():
    nothing = torch.full_like(Y, -100)
    with pytest.raises(InvalidData, match="No target of data counts"):
        MAP.fit(classes(ignore_index=-100), (X, nothing))
    some = torch.cat([nothing[:1], Y[1:]])
    prediction = MAP.fit(classes(ignore_index=-100), (X, some)).predict(X)
    with pytest.raises(InvalidData, match="No outcome in y counts"):
        kn.evaluate(prediction, nothing)
    assert kn.evaluate(prediction, some)["accuracy"] == (prediction.labels[1:] == Y[1:]).double().mean().item()


@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
def test_whole_floats_and_booleans_are_labels():
    model = classes()
    again = [MAP.fit(model, (X, mask)).predict(X).probs for mask in (Y, Y.float(), Y.unsqueeze(1))]
    assert torch.equal(again[0], again[1]) and torch.equal(again[0], again[2])
    binary = kn.Model(nn.Conv2d(1, 1, 3, padding=1), kn.Bernoulli())
    assert MAP.fit(binary, (X, Y > 0)).predict(X).probs.shape == Y.shape


@pytest.mark.parametrize("likelihood", [kn.HeteroscedasticGaussian(), kn.HeteroscedasticStudentT()])
@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
def test_numbers_for_pixels_have_their_noise_in_the_last_dimension(likelihood):
    with pytest.raises(InvalidData, match=r"return output\.movedim\(1, -1\)"):
        MAP.fit(kn.Model(nn.Conv2d(1, 2, 3, padding=1), likelihood), (X, X[:, 0]))
    posterior = MAP.fit(numbers(likelihood), (X, X[:, 0]))
    prediction = posterior.predict(X)
    assert prediction.mean.shape == prediction.std.shape == (4, 8, 6)
    centre, log_scale = posterior.model.forward(posterior.mean(), X).chunk(2, dim=-1)
    torch.testing.assert_close(prediction.mean, centre[..., 0])
    df = 2 + posterior.mean()["likelihood.log_df"].exp() if "likelihood.log_df" in posterior.mean() else torch.inf
    expected = log_scale[..., 0].exp() * (1.0 if df == torch.inf else (df / (df - 2)).sqrt())
    torch.testing.assert_close(prediction.std, expected)


@pytest.mark.parametrize("method", [kn.MeanFieldVI(epochs=2), kn.Laplace(epochs=2), kn.MCDropout(0.3, epochs=2)])
@pytest.mark.filterwarnings("ignore::knowable.KnowableWarning")
def test_predictions_under_a_cap_are_those_without(method):
    net = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, 1))
    random = "last_layer" if isinstance(method, kn.Laplace) else "*"
    posterior = method.fit(kn.Model(net, kn.Categorical(), random=random), (X, Y))
    many = torch.randn(40, 1, 24, 24)
    whole = posterior.predict(many, samples=8)
    result = 8 * whole.probs.numel() * 4  # bytes of the draws, of which there are copies
    for cap in (4 * result + 2**20, 6 * result):
        torch.testing.assert_close(posterior.predict(many, samples=8, max_memory=cap).probs, whole.probs)
    with pytest.raises(InvalidArgument, match="predict_stream"):
        posterior.predict(many, samples=8, max_memory=result)
    blocks = list(posterior.predict_stream(many, samples=8, max_memory=result))
    assert len(blocks) > 1
    torch.testing.assert_close(torch.cat([block.epistemic for block in blocks]), whole.epistemic)
