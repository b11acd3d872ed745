from __future__ import annotations

import re
from importlib import metadata

import torch
from benchmarks.environment import Environment


def test_environment_names_machine_threads_and_versions():
    environment = Environment.now(["numpy", "no-such-package-anywhere"])
    assert environment.versions["torch"] == torch.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+\S*", environment.versions["knowable"])
    assert environment.versions["numpy"] == metadata.version("numpy")
    assert environment.versions["no-such-package-anywhere"] == "not installed"
    assert environment.threads == torch.get_num_threads()
    assert environment.cores >= 1 and environment.cpu
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", environment.date)
