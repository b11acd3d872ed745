"""What a network costs: parameters, multiply-adds, time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

_WARM_UP = 2


def count_parameters(net: nn.Module) -> int:
    """How many numbers the network's parameters are, tied ones once."""
    return sum(value.numel() for value in net.parameters())


@torch.no_grad()
def multiply_adds(net: nn.Module, example: Tensor) -> int:
    """Multiply-adds of one row of ``example``, in linear layers and convolutions (other layers are not counted)."""
    counted = [0]

    def count(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, nn.Linear):
            counted[0] += output.numel() * module.in_features
        elif isinstance(module, _ConvTransposeNd):
            counted[0] += inputs[0].numel() * module.out_channels // module.groups * prod(module.kernel_size)
        elif isinstance(module, _ConvNd):
            counted[0] += output.numel() * module.in_channels // module.groups * prod(module.kernel_size)

    hooks = [each.register_forward_hook(count) for each in net.modules() if isinstance(each, nn.Linear | _ConvNd)]
    try:
        net(example)
    finally:
        for hook in hooks:
            hook.remove()
    return counted[0] // len(example)


@torch.no_grad()
def latencies(nets: Sequence[nn.Module], example: Tensor, repeats: int) -> list[float]:
    """Median seconds of a forward pass of each network, on one thread; their runs take turns."""
    taken: list[list[float]] = [[] for _ in nets]
    with _one_thread():
        for turn in range(_WARM_UP + repeats):
            for net, times in zip(nets, taken, strict=True):
                started = time.perf_counter()
                net(example)
                _finish(example)
                if turn >= _WARM_UP:
                    times.append(time.perf_counter() - started)
    return [statistics.median(times) for times in taken]


def _finish(example: Tensor) -> None:
    if example.is_cuda:
        torch.cuda.synchronize(example.device)


@contextmanager
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
