"""One run of one sampler on one posterior, in a process of its own: ours and the peers.

Called as ``python -m benchmarks.effective_samples_peers``; prints a line of JSON and leaves the function values of all
draws in a file. The clock starts when everything is imported and the data is in memory, and stops with the last draw:
compiling, finding the start, warm-up and sampling are in it. Every library runs in float32 on two threads; its chains
begin at draws from the prior.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.targets import TARGETS, Array, Regression, smaller

THREADS = 2
_MCLACHLAN = 2  # gradients in a step of the integrator


@dataclass(frozen=True)
class Settings:
    """How long a sampler runs.

    Attributes:
        chains: Chains side by side.
        warmup: Transitions before the first draw. BlackJAX's MCLMC derives it from the number of steps instead.
        draws: Draws kept of each chain.
        thin: Transitions for each of them.
    """

    chains: int
    warmup: int
    draws: int
    thin: int = 1

    @property
    def label(self) -> str:
        """For the table."""
        return f"{self.chains} x ({self.warmup} + {self.draws}{f' x {self.thin}' if self.thin > 1 else ''})"


@dataclass(frozen=True)
class Finished:
    """What a sampler gives back.

    Attributes:
        seconds: From start to last draw.
        gradients: Gradients taken by all chains, warm-up included.
        functions: Function values, ``(chains, draws, M)``.
    """

    seconds: float
    gradients: int
    functions: Array


def knowable(
    target: Regression, settings: Settings, seed: int, *, method: str, mode: str, start: str, **options: Any
) -> Finished:
    """A sampler of ours by the name of its class, through ``fit`` as anybody would."""
    import torch
    import torch._inductor.compile_fx
    from torch import nn

    import knowable as kn
    from knowable.inference import sampling

    torch.set_num_threads(THREADS)
    x, y = torch.from_numpy(target.x), torch.from_numpy(target.y).unsqueeze(-1)
    layers: list[nn.Module] = []
    for inputs, outputs in zip(target.widths[:-1], target.widths[1:], strict=True):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    model = kn.Model(nn.Sequential(*layers[:-1]), kn.Gaussian(noise=target.noise), kn.Normal(1.0))
    counts = asdict(settings)
    storage = kn.ChainStorage(thin=counts.pop("thin"))
    sampler = getattr(sampling, method)(**counts, storage=storage, start=start, **options)
    begun = time.perf_counter()
    posterior = sampler.fit(model, (x, y), seed=seed, engine=kn.Engine(mode=mode), progress=False)
    seconds = time.perf_counter() - begun
    functions = posterior.function_draws(torch.from_numpy(target.at)).squeeze(-1).numpy()
    return Finished(seconds, int(posterior.diagnostics["gradients"]), functions)


def numpyro_nuts(target: Regression, settings: Settings, seed: int) -> Finished:
    """NumPyro's NUTS kernel with its defaults; all chains in one vectorised loop, compiled once."""
    import jax
    from numpyro.infer import NUTS

    log_density = jax_log_density(target)
    starts, keys = target.starts(settings.chains, seed), jax.random.split(jax.random.key(seed), settings.chains)
    begun = time.perf_counter()
    kernel = NUTS(potential_fn=lambda flat: -log_density(flat))

    def sample(starts: Any, keys: Any) -> Any:
        def transition(state: Any, _: Any) -> Any:
            state = kernel.sample(state, (), {})
            return state, (state.z, state.num_steps)

        state = kernel.init(keys, settings.warmup, init_params=starts)
        state, (_, warm) = jax.lax.scan(transition, state, length=settings.warmup)
        _, (positions, steps) = jax.lax.scan(transition, state, length=settings.draws)
        return positions.swapaxes(0, 1), warm.sum() + steps.sum()

    positions, gradients = jax.block_until_ready(jax.jit(sample)(starts, keys))
    return _finished(target, begun, positions, int(gradients))


def blackjax_nuts(target: Regression, settings: Settings, seed: int) -> Finished:
    """BlackJAX's NUTS with its window adaptation, each chain adapted by itself, vectorised over chains."""
    import blackjax
    import jax
    from blackjax.adaptation.base import get_filter_adapt_info_fn

    log_density = jax_log_density(target)
    starts, keys = target.starts(settings.chains, seed), jax.random.split(jax.random.key(seed), settings.chains)
    begun = time.perf_counter()
    kept = get_filter_adapt_info_fn(info_keys={"num_integration_steps"})
    warmup = blackjax.window_adaptation(blackjax.nuts, log_density, adaptation_info_fn=kept)

    def chain(start: Any, key: Any) -> Any:
        warm_key, key = jax.random.split(key)
        (state, tuned), warm = warmup.run(warm_key, start, settings.warmup)
        step = blackjax.nuts(log_density, **tuned).step

        def transition(state: Any, key: Any) -> Any:
            state, info = step(key, state)
            return state, (state.position, info.num_integration_steps)

        _, (positions, steps) = jax.lax.scan(transition, state, jax.random.split(key, settings.draws))
        return positions, steps.sum() + warm.info.num_integration_steps.sum()

    positions, gradients = jax.block_until_ready(jax.jit(jax.vmap(chain))(starts, keys))
    return _finished(target, begun, positions, int(gradients.sum()))


def blackjax_mclmc(target: Regression, settings: Settings, seed: int) -> Finished:
    """BlackJAX's unadjusted MCLMC, step and length tuned by its own means in each chain, vectorised over chains."""
    import blackjax
    import jax

    log_density = jax_log_density(target)
    starts, keys = target.starts(settings.chains, seed), jax.random.split(jax.random.key(seed), settings.chains)
    total = settings.draws * settings.thin
    tuning_steps: list[int] = []
    begun = time.perf_counter()
    kernel = blackjax.mcmc.mclmc.build_kernel()

    def chain(start: Any, key: Any) -> Any:
        init_key, tune_key, key = jax.random.split(key, 3)
        state = blackjax.mcmc.mclmc.init(start, log_density, init_key)
        state, tuned, steps = blackjax.mclmc_find_L_and_step_size(
            kernel, num_steps=total, state=state, rng_key=tune_key, logdensity_fn=log_density
        )
        tuning_steps.append(int(steps))
        step = blackjax.mclmc(
            log_density, L=tuned.L, step_size=tuned.step_size, inverse_mass_matrix=tuned.inverse_mass_matrix
        ).step

        def transition(state: Any, key: Any) -> Any:
            return step(key, state)[0], None

        def draw(state: Any, key: Any) -> Any:
            state, _ = jax.lax.scan(transition, state, jax.random.split(key, settings.thin))
            return state, state.position

        return jax.lax.scan(draw, state, jax.random.split(key, settings.draws))[1]

    positions = jax.block_until_ready(jax.jit(jax.vmap(chain))(starts, keys))
    gradients = _MCLACHLAN * settings.chains * (total + tuning_steps[0])
    return _finished(target, begun, positions, gradients)


def pyro_nuts(target: Regression, settings: Settings, seed: int) -> Finished:
    """Pyro's NUTS on a plain potential function, which is quicker than on a model; a process for each chain."""
    import multiprocessing

    import pyro
    import torch
    from pyro.infer import MCMC, NUTS

    torch.set_num_threads(1)  # in each of the two processes
    pyro.set_rng_seed(seed)
    x, y = torch.from_numpy(target.x), torch.from_numpy(target.y)
    starts = {"flat": torch.from_numpy(target.starts(settings.chains, seed))}
    gradients = multiprocessing.Value("q", 0)

    def potential(params: dict[str, torch.Tensor]) -> torch.Tensor:
        with gradients.get_lock():
            gradients.value += 1
        hidden, pieces = x, target.pieces(params["flat"])
        for number in range(0, len(pieces), 2):
            hidden = torch.nn.functional.linear(hidden, pieces[number], pieces[number + 1])
            hidden = torch.tanh(hidden) if number < len(pieces) - 2 else hidden
        squares = (y - hidden[:, 0]).square().sum() / target.noise**2
        return 0.5 * (squares + params["flat"].square().sum())

    begun = time.perf_counter()
    run = MCMC(
        NUTS(potential_fn=potential), num_samples=settings.draws, warmup_steps=settings.warmup, initial_params=starts,
        num_chains=settings.chains, mp_context="fork", disable_progbar=True,
    )  # fmt: skip
    run.run()
    positions = run.get_samples(group_by_chain=True)["flat"].numpy()
    return _finished(target, begun, positions, gradients.value)


SAMPLERS: dict[str, Callable[..., Finished]] = {
    "knowable": knowable,
    "numpyro_nuts": numpyro_nuts,
    "blackjax_nuts": blackjax_nuts,
    "blackjax_mclmc": blackjax_mclmc,
    "pyro_nuts": pyro_nuts,
}


def jax_log_density(target: Regression) -> Callable[[Any], Any]:
    """The log joint of one flat position, in JAX."""
    import jax
    import jax.numpy as jnp

    jax.devices()  # start the backend before the clock
    x, y = jnp.asarray(target.x), jnp.asarray(target.y)

    def log_density(flat: Any) -> Any:
        hidden, pieces = x, target.pieces(flat)
        for number in range(0, len(pieces), 2):
            hidden = hidden @ pieces[number].T + pieces[number + 1]
            hidden = jnp.tanh(hidden) if number < len(pieces) - 2 else hidden
        return -0.5 * (((y - hidden[:, 0]) ** 2).sum() / target.noise**2 + (flat**2).sum())

    return log_density


def _finished(target: Regression, begun: float, positions: Any, gradients: int) -> Finished:
    positions = np.asarray(positions)
    return Finished(time.perf_counter() - begun, gradients, target.functions(positions))


def main() -> None:
    parser = argparse.ArgumentParser(description="One run of one sampler, as a line of JSON.")
    parser.add_argument("sampler", choices=SAMPLERS)
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("seed", type=int)
    parser.add_argument("settings", type=json.loads, help="chains, warmup, draws and thin as JSON")
    parser.add_argument("options", type=json.loads, help="what else the sampler takes, as JSON")
    parser.add_argument("out", type=Path, help="file for the function values")
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args()
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:THREADS])
    warnings.simplefilter("ignore")  # whether chains have mixed is judged by the caller, for all alike
    target = TARGETS[given.target]()
    target = smaller(target) if given.quick else target
    try:
        found = SAMPLERS[given.sampler](target, Settings(**given.settings), given.seed, **given.options)
    except Exception as error:  # a peer that is not installed, or that fails
        print(
            json.dumps({"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]})
        )
        return
    np.save(given.out, found.functions)
    print(json.dumps({"seconds": found.seconds, "gradients": found.gradients}))


if __name__ == "__main__":
    main()
