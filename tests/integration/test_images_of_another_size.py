"""Networks of convolutions that learned from crops predict whole images."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import knowable as kn


@pytest.mark.parametrize("likelihood", [kn.Bernoulli(), kn.Gaussian(0.5)], ids=["labels", "numbers"])
@pytest.mark.parametrize("loader", [True, False])
def test_predictions_have_the_size_of_the_image(likelihood, loader):
    x = torch.randn(6, 1, 8, 8)
    y = (x[:, 0] > 0).float()
    data = DataLoader(TensorDataset(x, y), batch_size=3) if loader else (x, y)
    model = kn.Model(nn.Conv2d(1, 1, 3, padding=1), likelihood)
    prediction = kn.DeepEnsemble(3, epochs=2).fit(model, data).predict(torch.randn(4, 1, 16, 16))
    assert prediction.samples.shape == (3, 4, 16, 16)
    assert prediction.log_prob(torch.zeros(4, 16, 16)).shape == (4,)
