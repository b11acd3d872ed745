"""Fixtures shared by all tests."""

from __future__ import annotations

import os
import signal

import pytest
import torch

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell that starts the tests in the background has made them deaf to Ctrl-C, which some of them press
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run seeded tests on one seed, or on those asked for: ``KNOWABLE_SEEDS=0-4 pytest``."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", _seeds(os.environ.get("KNOWABLE_SEEDS", "42")))


def _seeds(text: str) -> list[int]:
    first, _, last = text.partition("-")
    return list(range(int(first), int(last or first) + 1))


def pytest_collectstart() -> None:
    """Give the networks that a file of tests makes as it is read the same weights in every run."""
    torch.manual_seed(_seeds(os.environ.get("KNOWABLE_SEEDS", "42"))[0])


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    """A generator on the test's seed."""
    return torch.Generator().manual_seed(seed)


@pytest.fixture(autouse=True)
def _global_seed(request: pytest.FixtureRequest) -> None:
    """Networks are initialised from the global generator: give each test its seed."""
    seed = request.node.callspec.params.get("seed", 42) if hasattr(request.node, "callspec") else 42
    torch.default_generator.manual_seed(seed)  # a millisecond quicker than torch.manual_seed, for thousands of tests
