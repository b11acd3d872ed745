"""The digits are scikit-learn's, scaled to shares of full ink."""

import hashlib
import subprocess
import sys

import torch

from knowable.datasets import digits


def test_digits_are_1797_images_of_64_pixels_between_paper_and_full_ink():
    data = digits()
    assert data.x.shape == (1797, 64) and data.y.shape == (1797,)
    assert data.x.dtype == torch.get_default_dtype() and data.y.dtype == torch.long
    assert (data.x.min().item(), data.x.max().item()) == (0.0, 1.0)
    assert data.classes == tuple("0123456789")
    assert torch.bincount(data.y).tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_digits_have_the_known_checksum():
    data = digits()
    content = bytes((data.x * 16).round().to(torch.uint8).flatten().tolist()) + bytes(data.y.tolist())
    assert hashlib.sha256(content).hexdigest() == "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def test_importing_the_datasets_does_not_import_scikit_learn():
    code = "import sys, knowable.datasets; sys.exit('sklearn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
