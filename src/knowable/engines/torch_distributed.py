"""One fit in many processes that ``torchrun`` started: each has a share of the rows, and gradients are averaged."""

from __future__ import annotations

import atexit
import os
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property

import torch
from torch import distributed as dist

from knowable.core.compiling.engine import Engine
from knowable.core.support.checks import check_number
from knowable.core.support.processes import Processes
from knowable.errors import InvalidArgument


@dataclass(frozen=True, kw_only=True)
class TorchDistributed(Engine):
    r"""One fit in W processes, each with a share of the rows of every step.

    Every process runs the same program, as ``torchrun --nproc-per-node=2 fit.py`` starts it. The loss of a step is a
    mean over the rows of all processes, to which the prior or the KL is added once:

    .. math:: \nabla L = \sum_r \frac{m_r}{M} \nabla L_r, \qquad M = \sum_r m_r

    with L_r the loss of the m_r rows of process r. A batch of ``batch_size`` rows is divided among the processes, so
    that steps, learning rate and epochs mean what they mean in one process, and all end with the same posterior. Noise
    that belongs to rows is each process's own; with one draw of the weights a step, W processes make W draws. HMC,
    NUTS, MCLMC and the other samplers add up log likelihoods and gradients, and draw the same noise everywhere: the
    draws of HMC, NUTS and SGLD are those of one process up to rounding. What is neither, such as the curvature of
    ``Laplace``, every process
    computes for itself on all rows.

    The first process alone looks at validation data, shows progress and writes checkpoints. With ``checkpoint=`` a run
    that ``torchrun --max-restarts`` starts again goes on from the last one. Communication is by NCCL for networks on a
    GPU (each process has that of its ``LOCAL_RANK``) and by gloo on the CPU.

    Args:
        precision: See :class:`~knowable.core.compiling.engine.Engine`.
        mode: See :class:`~knowable.core.compiling.engine.Engine`.
        cache_features: See :class:`~knowable.core.compiling.engine.Engine`.
        shards: Whether the rows that each process passes to ``fit`` are its own, and no other has them. False: all pass
            the same rows. Shares of a :meth:`~knowable.core.model.data.Data.parquet` are taken either way without
            reading the others.
        fully_shard: Whether weights, gradients and the optimiser's state are divided among the processes too, by FSDP2:
            for networks that are too large for one device. For ``MAP`` and ``MaximumLikelihood``, normal or flat
            priors, and likelihoods without parameters of their own; without checkpoints. The posterior has all weights,
            in every process, on the CPU.
        timeout: Seconds after which a process that waits for another one gives up with an error.

    Example:
        .. code-block:: python

            # torchrun --nproc-per-node=2 fit.py
            posterior = kn.MeanFieldVI().fit(model, (x, y), engine=kn.engines.TorchDistributed())
    """

    shards: bool = False  # type: ignore[misc]
    fully_shard: bool = False  # type: ignore[misc]
    timeout: float = 600.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("timeout", self.timeout, above=0)

    @cached_property
    def processes(self) -> Processes:
        """The processes of the fit; the first use connects them."""
        if not dist.is_initialized():
            lacking = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
            if lacking:
                raise InvalidArgument(
                    f"engine=TorchDistributed() is for a program that torchrun started, and {', '.join(lacking)} "
                    f"{'is' if len(lacking) == 1 else 'are'} not set. Write torchrun --nproc-per-node=2 fit.py, or "
                    f"leave engine= out."
                )
            if torch.cuda.is_available():
                torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
            backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
            dist.init_process_group(backend, timeout=timedelta(seconds=self.timeout))
            atexit.register(_leave)
        return Processes(dist.get_rank(), dist.get_world_size())


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
