"""What stored results say of this library beside others: a row for every comparison, wins and losses alike.

A function for each study takes its JSON as :mod:`benchmarks.run` wrote it and yields rows. Nothing is measured here,
and nothing is left out: who is compared with is decided by the studies.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks import fidelity, gaussian_processes, uci_chains, uci_published

Run = Mapping[str, Any]
TIE = 1.1
"""Times and rates within this factor are a tie: it is what a repetition changes."""
PLAIN = "plain PyTorch"


@dataclass(frozen=True)
class Row:
    """One comparison.

    Attributes:
        study: Whose results.
        what: What was measured, on what.
        peer: Who it is compared with.
        ours: Our figure.
        theirs: Their figure.
        verdict: How the two compare, in words.
        gap: How far we are ahead, where 1 is just beyond a tie: the logarithm of a ratio over that of ``TIE``, or
            standard errors; infinite where one of us failed.
    """

    study: str
    what: str
    peer: str
    ours: str
    theirs: str
    verdict: str
    gap: float

    @property
    def outcome(self) -> str:
        """``"ahead"``, ``"tie"`` or ``"behind"``."""
        return "tie" if -1.0 <= self.gap <= 1.0 else "ahead" if self.gap > 0 else "behind"


def number(value: float) -> str:
    """Three significant digits, without exponents."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def timed(study: str, what: str, peer: str, ours: float, theirs: float, unit: str, ratio: float | None = None) -> Row:
    """A row of times, where less is better; ``ratio`` is theirs over ours if it was measured round by round."""
    ratio = theirs / ours if ratio is None else ratio
    words = f"{number(ratio)} times as fast" if ratio >= 1 else f"{number(1 / ratio)} times as slow"
    return Row(
        study, what, peer, f"{number(ours)} {unit}", f"{number(theirs)} {unit}", words, math.log(ratio) / math.log(TIE)
    )


def scored(
    study: str,
    what: str,
    peer: str,
    ours: tuple[float, float],
    theirs: tuple[float, float],
    sign: float,
    unit: str = "",
) -> Row:
    """A row of scores with standard errors (nan or 0 where there is none); ``sign`` is 1 where more is better."""
    errors = [error for _, error in (ours, theirs) if error and not math.isnan(error)]
    together = math.hypot(*errors) if errors else abs(theirs[0]) * 0.01
    gap = sign * (ours[0] - theirs[0]) / together
    by = f"{abs(ours[0] - theirs[0]):.3g}{unit}"
    words = f"{'better' if gap > 0 else 'worse'} by {by}" + (f", {abs(gap):.1f} standard errors" if errors else "")
    return Row(study, what, peer, _score(ours), _score(theirs), words, gap)


def _score(value: tuple[float, float]) -> str:
    mean, error = value
    return f"{mean:.4g}" + (f" ± {error:.2g}" if error and not math.isnan(error) else "")


def _splits(found: Mapping[str, Any]) -> str:
    return f"{found['splits']} split{'s' * (found['splits'] != 1)}"


def _failed(study: str, what: str, peer: str, ours: str, error: str) -> Row:
    return Row(study, what, peer, ours, f"failed: {error[:90]}", "the other one failed", math.inf)


# --- speed -----------------------------------------------------------------------------------------------------------


def timed_cases(run: Run, ours: str, peers: Callable[[str], str | None], per: str = "") -> Iterator[Row]:
    """Tables of the harness: ``ours`` beside every contender to which ``peers`` gives a name."""
    for case in run["cases"]:
        mine = case["contenders"].get(ours)
        if mine is None or mine["error"] is not None:
            continue
        for name, other in case["contenders"].items():
            label = peers(name)
            if label is None:
                continue
            if other["error"] is not None:
                yield _failed(
                    run["benchmark"], case["title"], label, f"{number(mine['time']['median'])} ms", other["error"]
                )
                continue
            share = 50.0 if name.endswith("for 20 of them") else 1.0  # the others predict 1,000 rows
            ratio = share * other["ratio"]["median"] / mine["ratio"]["median"]
            what = case["title"] + per
            yield timed(
                run["benchmark"], what, label, mine["time"]["median"], share * other["time"]["median"], "ms", ratio
            )


def _step_time(run: Run) -> Iterator[Row]:
    def named(name: str) -> str | None:
        return None if name.startswith("knowable") else PLAIN if name == "plain" else name

    yield from timed_cases(run, "knowable, auto", named)


def _laplace(run: Run) -> Iterator[Row]:
    def named(name: str) -> str | None:
        return None if name == "knowable" else name.removesuffix(" for 20 of them")

    yield from timed_cases(run, "knowable", named)


def _stochastic_gradient(run: Run) -> Iterator[Row]:
    for method in ("SGLD", "SGHMC"):
        names = {f"posteriors, {method}": f"posteriors, {method}"}
        yield from timed_cases(run, f"knowable, {method}", names.get)


def _epoch(run: Run) -> Iterator[Row]:
    yield from timed_cases(run, "knowable", {"DataLoader": f"{PLAIN}, DataLoader"}.get)


def _ensembles(run: Run) -> Iterator[Row]:
    names = {"plain, in turn": f"{PLAIN}, one by one", "plain, vmap": f"{PLAIN}, torch.func by hand"}
    yield from timed_cases(run, "knowable, together", names.get)


def _prediction(run: Run) -> Iterator[Row]:
    names = {"loop that draws": f"{PLAIN}, a loop", "loop over kept draws": f"{PLAIN}, a loop over kept draws"}
    yield from timed_cases(run, "knowable", names.get)


def _sizes(run: Run) -> Iterator[Row]:
    networks = {"mlp": "MLP of 10,000,000 weights", "resnet18": "ResNet-18", "vit_tiny": "ViT-tiny"}
    beside = {"bayesian-torch, reparameterisation": "MeanFieldVI", "ivon-opt": "NaturalVI"}
    for row in [each for each in run["rows"] if each["kind"] == "steps" and each["error"] is None]:
        found = row["contenders"]
        for peer, method in beside.items():
            if {peer, method} <= found.keys():
                what = f"a training step, {networks[row['size']['network']]}, {method}"
                mine, other = found[method], found[peer]
                ratio = other["ratio"] / mine["ratio"]
                yield timed("sizes", what, peer, mine["milliseconds"], other["milliseconds"], "ms", ratio)


def _gradients(run: Run) -> Iterator[Row]:
    for case in run["cases"]:
        mine, other = case["contenders"]["knowable, compiled"], case["contenders"]["JAX"]
        if mine["error"] is None and other["error"] is None:
            ratio = mine["times"]["median"]
            gap = math.log(ratio) / math.log(TIE)
            words = f"{number(ratio)} times as many" if ratio >= 1 else f"{number(1 / ratio)} times fewer"
            what = f"gradients a second, {case['chains']} chains, {case['network']}"
            rates = [f"{each['rate']['median']:,.0f}/s" for each in (mine, other)]
            yield Row("gradients", what, "JAX", rates[0], rates[1], words, gap)


def _effective_samples(run: Run) -> Iterator[Row]:
    titles = {"diabetes": "diabetes, 10-16-16-1", "toy": "a sine with a gap, 1-20-1"}
    for name, found in run["targets"].items():
        good = {who: each for who, each in found.items() if each["error"] is None and each.get("ess_per_second")}
        for who, each in good.items():
            if who.startswith("knowable"):
                continue
            kind = who.split(" ")[-1]
            mine = f"knowable {kind}"  # NUTS beside NUTS, MCLMC beside MCLMC, and the best exact one beside all exact
            best = max(
                (m for m in good if m.startswith("knowable") and good[m]["exact"]),
                key=lambda m: good[m]["ess_per_second"],
            )
            for own in dict.fromkeys([mine] + [best] * bool(each["exact"])):
                rates = good[own]["ess_per_second"], each["ess_per_second"]
                ratio = rates[0] / rates[1]
                words = f"{number(ratio)} times as many" if ratio >= 1 else f"{number(1 / ratio)} times fewer"
                what = f"effective samples a second, {titles.get(name, name)}: {own.removeprefix('knowable ')}"
                shown = [f"{number(rate)}/s" for rate in rates]
                yield Row("effective_samples", what, who, shown[0], shown[1], words, math.log(ratio) / math.log(TIE))


def _serving(run: Run) -> Iterator[Row]:
    services = run["parts"]["throughput"]["services"]
    for clients in services["knowable"]:
        for peer in [name for name in services if name.startswith("LitServe")]:
            pairs = list(zip(services["knowable"][clients], services[peer][clients], strict=True))
            ratio = statistics.median(a["per_second"] / max(b["per_second"], 1e-9) for a, b in pairs)
            rates = [statistics.median(each["per_second"] for each in side) for side in zip(*pairs, strict=True)]
            words = f"{number(ratio)} times as many" if ratio >= 1 else f"{number(1 / ratio)} times fewer"
            what = f"requests a second, {clients} client{'s' * (clients != '1')}"
            shown = [f"{number(rate)}/s" for rate in rates]
            yield Row("serving", what, peer, shown[0], shown[1], words, math.log(ratio) / math.log(TIE))


def _laplace_limits(run: Run) -> Iterator[Row]:
    titles = {
        "classes": "fit a last layer of 1,000 classes in 4 GiB",
        "segmentation": "fit and predict 64 x 64 pixels in 4 GiB",
    }
    for task, found in run["tasks"].items():
        for name, each in found.items():
            if not name.startswith("laplace-torch"):
                continue
            mine = found[f"knowable {name.split()[1]}"]
            seconds = mine["fit"]["seconds"] + mine["prediction"]["seconds"]
            errors = (
                [each["error"]] if "error" in each else [part["error"] for part in each.values() if "error" in part]
            )
            if errors:
                yield _failed("laplace_limits", titles[task], name, f"{number(seconds)} s", errors[0])
            else:
                theirs = each["fit"]["seconds"] + each["prediction"]["seconds"]
                yield timed("laplace_limits", titles[task], name, seconds, theirs, "s")


# --- quality ---------------------------------------------------------------------------------------------------------


def _uci_methods(run: Run) -> Iterator[Row]:
    for data, methods in run["data"].items():
        for method, found in methods.items():
            published, source = uci_published.PUBLISHED[method].get(data), uci_published.SOURCES[method]
            if published is None or not found["splits"]:
                continue
            kind = (
                "the published " + method if source.same_method else f"its nearest published relative ({source.label})"
            )
            title = f"{data}, {method}"
            yield scored(
                "uci_methods",
                f"log likelihood, {title}",
                kind,
                tuple(found["log_likelihood"]),
                published.log_likelihood,
                1.0,
            )
            yield scored("uci_methods", f"RMSE, {title}", kind, tuple(found["rmse"]), published.rmse, -1.0)


def _uci_tables(run: Run) -> Iterator[Row]:
    for data, found in run["data"].items():
        for peer, each in found.items():
            if peer != "knowable, auto" and each["splits"] and found["knowable, auto"]["splits"]:
                what = f"negative log likelihood, {data}: BayesianRegressor, {_splits(found['knowable, auto'])}"
                yield scored("uci_tables", what, peer, tuple(found["knowable, auto"]["nll"]), tuple(each["nll"]), -1.0)


def _uci_chains(run: Run) -> Iterator[Row]:
    for data, found in run["data"].items():
        if found["splits"]:
            published = uci_chains.PUBLISHED[data]
            what = f"log likelihood, {data}: MCLMC"
            yield scored("uci_chains", what, "published deep ensemble", tuple(found["log_likelihood"]), published, 1.0)


def _uci_default(run: Run) -> Iterator[Row]:
    for data, found in run["data"].items():
        if found["splits"]:
            best = run["published"][data][0]
            what = f"log likelihood, {data}: the default method, {_splits(found)}"
            theirs = (best["log_likelihood"], best["error"])
            yield scored(
                "uci_default", what, f"{best['method']}, best published", tuple(found["log_likelihood"]), theirs, 1.0
            )


def _gaussian_processes(run: Run) -> Iterator[Row]:
    for data, methods in run["data"].items():
        for method, found in methods.items():
            published = gaussian_processes.PUBLISHED[method].get(data)
            if published is not None and found["splits"]:
                what = f"log likelihood, {data}: {method}, {_splits(found)}"
                theirs = (published.log_likelihood, published.error)
                yield scored(
                    "gaussian_processes",
                    what,
                    "published (sparse or deep)",
                    tuple(found["log_likelihood"]),
                    theirs,
                    1.0,
                )


def _tables(run: Any) -> Iterator[Row]:
    for row in run:
        if row["method"] in ("knowable", "guess") or "error" in row:
            continue
        mine = next(each for each in run if (each["table"], each["method"]) == (row["table"], "knowable"))
        gap = row["ahead"] / max(row["ahead_error"], 1e-9)
        words = f"{'better' if gap > 0 else 'worse'} by {abs(row['ahead']):.3g}, {abs(gap):.1f} standard errors"
        what = f"negative log likelihood, {row['table']} ({row['rows']:,} rows)"
        yield Row("tables", what, row["method"], f"{mine['nll']:.3f}", f"{row['nll']:.3f}", words, gap)


def _trained_networks(run: Run) -> Iterator[Row]:
    titles = {"digits": "convolutions on digits", "concrete": "concrete", "mnist": "LeNet-5 on MNIST"}
    for network, methods in run["networks"].items():
        for name, fits in methods.items():
            mine = methods.get(name.replace("laplace-torch", "Laplace"))
            if not name.startswith("laplace-torch") or mine is None:
                continue
            pairs = [
                (mine[seed]["nll"], fits[seed]["nll"])
                for seed in fits
                if "nll" in fits[seed] and "nll" in mine.get(seed, {})
            ]
            if len(pairs) < 2:
                continue
            differences = [ours - theirs for ours, theirs in pairs]
            error = statistics.stdev(differences) / math.sqrt(len(differences))
            means = [statistics.fmean(side) for side in zip(*pairs, strict=True)]
            what = f"NLL of a posterior around a trained network, {titles[network]}"
            yield scored("trained_networks", what, name, (means[0], math.nan), (means[1], error), -1.0)


def _image_methods(run: Run) -> Iterator[Row]:
    published = {"MAP": ("a deterministic LeNet-5", 0.037), "DeepEnsemble": ("an ensemble of 10 LeNet-5", 0.016)}
    for method, (who, nll) in published.items():
        found = run["rows"].get(f"MNIST: {method}")
        if found and found["error"] is None:
            what = f"NLL on MNIST, {method} of LeNet-5"
            yield scored(
                "image_methods",
                what,
                f"published: {who} (uncertainty-baselines)",
                tuple(found["nll"]),
                (nll, 0.0),
                -1.0,
            )


def _compression_lenets(run: Run) -> Iterator[Row]:
    for name, found in run["networks"].items():
        if found["error"] is not None or "held out" in name:
            continue
        published = run["published"][found["network"]]
        other = "published sparse variational dropout"
        ours, theirs = found["compression"], published["compression"]
        words = f"{number(ours / theirs)} times as small"
        gap = math.log(ours / theirs) / math.log(TIE)
        yield Row("compression.lenets", f"compression, {name}", other, number(ours), number(theirs), words, gap)
        error = math.sqrt(published["error"] / 100 / 10_000) * 100  # binomial, on 10,000 test images
        yield scored(
            "compression.lenets",
            f"test error %, {name}",
            other,
            (found["test_error"], error),
            (published["error"], error),
            -1.0,
        )


def _infinite_width(run: Run) -> Iterator[Row]:
    found = (run.get("mnist") or {}).get("nngp")
    if found and "accuracy" in found:
        error = math.sqrt(0.09 * 0.91 / 10_000)
        what = "accuracy, NNGP on MNIST with 1,000 training images"
        yield scored(
            "infinite_width", what, "published code (erees1/NNGP)", (found["accuracy"], error), (0.910, error), 1.0
        )


def _bayesian_optimisation(run: Run) -> Iterator[Row]:
    for problem, methods in run["problems"].items():
        peer = [max(fit["values"]) for fit in methods.get("BoTorch GP, logei", {}).values() if "values" in fit]
        for name in ("random features, ucb", "random features, logei", "random features, thompson"):
            mine = [max(fit["values"]) for fit in methods.get(name, {}).values() if "values" in fit]
            if mine and peer:
                what = f"best value of {problem} ({len(mine)} seeds): {name}"
                both = [
                    (
                        statistics.fmean(side),
                        statistics.stdev(side) / math.sqrt(len(side)) if len(side) > 1 else math.nan,
                    )
                    for side in (mine, peer)
                ]
                yield scored(
                    "bayesian_optimisation", what, f"BoTorch GP, logei ({len(peer)} seeds)", both[0], both[1], 1.0
                )


def _continual(run: Run) -> Iterator[Row]:
    published = {"permuted": ("VCL with 200 points, 10 tasks", 0.935), "split": ("FROMP, 5 tasks", 0.993)}
    for kind, found in run["kinds"].items():
        for name, row in found.items():
            if row["error"] is None and row.get("accuracies") and name.startswith("Laplace"):
                mean = statistics.fmean(row["accuracies"][-1])
                error = math.sqrt(mean * (1 - mean) / 10_000)
                who, value = published[kind]
                yield scored(
                    "continual",
                    f"average accuracy, {kind} MNIST: {name.replace('|', ', points kept: ')}",
                    f"published: {who}",
                    (mean, error),
                    (value, error),
                    1.0,
                )


def _active_learning(run: Run) -> Iterator[Row]:
    published = {"MNIST": 240, "RepeatedMNIST": 270}
    for data, methods in run["sets"].items():
        reached = [
            row["reached"][1] for row in methods.get("batch_bald", []) if row["error"] is None and row["reached"][1]
        ]
        if reached:
            labels = statistics.median(reached)
            ratio = published[data] / labels
            what = f"labels to 95% of {data}, BatchBALD on an ensemble ({len(reached)} run{'s' * (len(reached) > 1)})"
            yield Row(
                "active_learning",
                what,
                "published BatchBALD on dropout",
                number(labels),
                number(published[data]),
                f"{number(ratio)} times fewer",
                math.log(ratio) / math.log(TIE),
            )


def _fidelity(run: Run) -> Iterator[Row]:
    recipes = run["recipes"]
    for name, found in recipes.items():
        if name == "knowable":
            continue
        for size, row in found.items():
            mine = recipes["knowable"][size]
            if row["error"] or mine["error"]:
                continue
            off = [abs(math.log(each["ratio"])) for each in (mine, row)]
            words = f"{row['ratio']:.2f} of the right width; ours {mine['ratio']:.2f}"
            layers, width = size.split(" x ")
            what = f"posterior sd over the right one, {layers} layer{'s' * (layers != '1')} of {width} inputs"
            yield Row(
                "fidelity",
                what,
                f"{name}, as documented",
                f"{mine['ratio']:.2f}",
                f"{row['ratio']:.2f}",
                words,
                (off[1] - off[0]) / math.log(TIE),
            )


SPEED: dict[str, Callable[[Any], Iterator[Row]]] = {
    "step_time": _step_time,
    "sizes": _sizes,
    "laplace": _laplace,
    "laplace_limits": _laplace_limits,
    "gradients": _gradients,
    "effective_samples": _effective_samples,
    "stochastic_gradient": _stochastic_gradient,
    "ensembles": _ensembles,
    "epoch": _epoch,
    "prediction": _prediction,
    "serving": _serving,
}
QUALITY: dict[str, Callable[[Any], Iterator[Row]]] = {
    "uci_default": _uci_default,
    "uci_methods": _uci_methods,
    "uci_tables": _uci_tables,
    "uci_chains": _uci_chains,
    "gaussian_processes": _gaussian_processes,
    "tables": _tables,
    "trained_networks": _trained_networks,
    "image_methods": _image_methods,
    "infinite_width": _infinite_width,
    "compression.lenets": _compression_lenets,
    "continual": _continual,
    "active_learning": _active_learning,
    "bayesian_optimisation": _bayesian_optimisation,
    "fidelity": _fidelity,
}


def tables_of_fidelity(run: Run) -> list[str]:
    """The two tables of that study."""
    return [fidelity.distances_table(run), fidelity.ratios_table(run)]
