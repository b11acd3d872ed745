"""How the posteriors on disk were fitted: one of every family, with every likelihood and prior among them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import knowable as kn
from tests.integration.written_before.reading import (
    CHAINS,
    classes,
    counts,
    gated,
    images,
    mlp,
    numbers,
    pictures,
    recurrent,
    with_batch_norm,
    yes_or_no,
)

QUICK: dict[str, Any] = {"epochs": 6, "batch_size": 10}
SNAPSHOTS: dict[str, Any] = {"snapshots": 3, "rank": 2}


def regression(prior: Any = None, likelihood: Any = None, **which: Any) -> kn.Model:
    return kn.Model(mlp(), likelihood or kn.Gaussian(), prior, **which)


def classification(prior: Any = None, **which: Any) -> kn.Model:
    return kn.Model(mlp(3), kn.Categorical(), prior, **which)


@dataclass(frozen=True)
class Saved:
    """A posterior on disk: how it is fitted.

    Attributes:
        model: The model.
        method: The method.
        data: The data, which also give the rows that are predicted.
        before: The method of an earlier fit to the same data, whose posterior is the prior of this one.
    """

    model: Callable[..., kn.Model]
    method: Any
    data: Callable[[], tuple[Tensor, Tensor]] = numbers
    before: Any = None

    def fit(self) -> kn.Posterior:
        torch.manual_seed(0)
        if self.before is None:
            return self.method.fit(self.model(), self.data(), seed=3)
        earlier = self.before.fit(self.model(), self.data(), seed=2)
        torch.manual_seed(0)
        return self.method.fit(self.model(prior=earlier), self.data(), seed=3)

    def rows(self) -> Tensor:
        return self.data()[0][:4]


def _with_points(prior: Any = None) -> kn.Model:
    """The last layer is random, all else a point estimate; or, after an earlier fit, all else is fixed."""
    return regression(prior, random="last_layer") if prior is None else regression(prior)


def _frozen_afterwards(prior: Any = None) -> kn.Model:
    return regression(prior, kn.Gaussian(0.2), frozen=() if prior is None else "0.bias")


def _globs() -> kn.Model:
    prior = {"0.weight": kn.ScaleMixture(0.3, 2.0, 0.05), "*.bias": kn.Normal(2.0, loc=0.1), "*": kn.Horseshoe(0.5)}
    return regression(prior, kn.StudentT(5.0, 0.3))


def _gates() -> kn.Model:
    return kn.Model(gated(), kn.Gaussian(0.2), {"*.gate": kn.BernoulliPrior(0.3), "*": kn.Normal(1.0)})


def _mixed() -> kn.Model:
    return kn.Model(nn.Linear(2, 1).double(), kn.Bernoulli(), kn.Normal(1.5))


def posteriors() -> dict[str, Saved]:
    """All of them by name."""
    return {**_by_method(), **_by_prior()}


def _by_method() -> dict[str, Saved]:
    return {
        # points and atoms
        "map": Saved(regression, kn.MAP(**QUICK)),
        "maximum_likelihood": Saved(
            lambda: kn.Model(mlp(2), kn.HeteroscedasticGaussian(), kn.Flat()), kn.MaximumLikelihood(**QUICK)
        ),
        "deep_ensemble": Saved(classification, kn.DeepEnsemble(3, **QUICK), classes),
        "snapshot_ensemble": Saved(regression, kn.SnapshotEnsemble(epochs=6, cycles=2)),
        "bayesian_bootstrap": Saved(regression, kn.BayesianBootstrap(3, **QUICK)),
        "batch_norm_ensemble": Saved(lambda: kn.Model(with_batch_norm(), kn.Gaussian()), kn.DeepEnsemble(2, **QUICK)),
        "importance_sampling": Saved(_mixed, kn.ImportanceSampling(draws=12), yes_or_no),
        "svgd": Saved(regression, kn.SVGD(chains=3, warmup=5)),
        # normal distributions
        "exact_linear": Saved(lambda: kn.Model(nn.Linear(2, 1).double(), kn.Gaussian(0.3)), kn.ExactLinear()),
        "exact_linear_noises": Saved(
            lambda: kn.Model(nn.Linear(2, 2).double(), kn.Gaussian((0.3, 0.1))), kn.ExactLinear(), lambda: numbers(2)
        ),
        "mean_field_vi": Saved(regression, kn.MeanFieldVI(**QUICK)),
        "mean_field_vi_images": Saved(lambda: kn.Model(images(), kn.Categorical()), kn.MeanFieldVI(**QUICK), pictures),
        "mean_field_vi_recurrent": Saved(lambda: kn.Model(recurrent(), kn.Gaussian(0.2)), kn.MeanFieldVI(**QUICK)),
        "mean_field_vi_single": Saved(
            lambda: kn.Model(mlp().float(), kn.Gaussian()),
            kn.MeanFieldVI(**QUICK),
            lambda: tuple(each.float() for each in numbers()),  # type: ignore[return-value]
        ),
        "mean_field_vi_of_the_last_layer": Saved(_with_points, kn.MeanFieldVI(**QUICK)),
        "natural_vi": Saved(lambda: kn.Model(mlp(), kn.Poisson()), kn.NaturalVI(**QUICK), counts),
        "moment_vi": Saved(regression, kn.MomentVI(**QUICK)),
        "moment_vi_classes": Saved(classification, kn.MomentVI(**QUICK, prediction="sampling"), classes),
        "function_space_vi": Saved(regression, kn.FunctionSpaceVI(**QUICK, prior=kn.RBFKernel(), context_points=4)),
        "full_rank_vi": Saved(lambda: kn.Model(mlp(), kn.Bernoulli()), kn.FullRankVI(**QUICK), yes_or_no),
        "low_rank_vi": Saved(
            lambda: kn.Model(mlp(2), kn.Gaussian(outputs=2)), kn.LowRankVI(2, **QUICK), lambda: numbers(2)
        ),
        "matrix_normal_vi": Saved(regression, kn.MatrixNormalVI(**QUICK)),
        "swag": Saved(regression, kn.SWAG(**QUICK, **SNAPSHOTS)),
        "swag_diagonal": Saved(classification, kn.SWAG(**QUICK, snapshots=3, rank=0), classes),
        # Laplace approximations
        "laplace_full": Saved(regression, kn.Laplace(**QUICK, structure="full", polish=0)),
        "laplace_full_hessian": Saved(_mixed, kn.Laplace(**QUICK, structure="full", curvature="hessian"), yes_or_no),
        "laplace_diagonal": Saved(classification, kn.Laplace(**QUICK, structure="diag"), classes),
        "laplace_diagonal_drawn": Saved(regression, kn.Laplace(**QUICK, structure="diag", prediction="sampling")),
        "laplace_kronecker": Saved(
            lambda: regression(kn.EmpiricalBayes(kn.Normal(1.0), per="layer")), kn.Laplace(**QUICK)
        ),
        "laplace_kronecker_images": Saved(lambda: kn.Model(images(), kn.Categorical()), kn.Laplace(**QUICK), pictures),
        "laplace_kronecker_last_layer": Saved(
            lambda: classification(random="last_layer"), kn.Laplace(**QUICK), classes
        ),
        "laplace_low_rank": Saved(regression, kn.Laplace(**QUICK, structure="lowrank", rank=3)),
        # other densities
        "product": Saved(
            regression,
            kn.MeanFieldVI(**QUICK, families={"0.*": kn.families.FullRank(), "2.weight": kn.families.LowRank(1)}),
        ),
        "product_with_flow": Saved(
            regression, kn.MatrixNormalVI(**QUICK, families={"2.*": kn.families.Flow("radial")})
        ),
        "flow_planar": Saved(regression, kn.FlowVI(**QUICK, layers=2)),
        "flow_radial": Saved(classification, kn.FlowVI(**QUICK, layers=2, kind="radial"), classes),
        "flow_real_nvp": Saved(regression, kn.FlowVI(**QUICK, layers=2, kind="real_nvp", hidden=3)),
        "mixture_vi": Saved(regression, kn.MixtureVI(2, **QUICK)),
        "ensemble_of_laplace": Saved(regression, kn.EnsembleOf(kn.Laplace(**QUICK), 2, weights="evidence")),
        "ensemble_of_products": Saved(
            regression, kn.EnsembleOf(kn.MeanFieldVI(**QUICK, families={"0.*": kn.families.FullRank()}), 2)
        ),
        "multi_swag": Saved(regression, kn.MultiSWAG(2, **QUICK, **SNAPSHOTS)),
        "discrete_vi": Saved(_gates, kn.DiscreteVI(**QUICK)),
        "information_bottleneck": Saved(classification, kn.InformationBottleneck(**QUICK), classes),
        "information_bottleneck_learned": Saved(
            regression, kn.InformationBottleneck(layer="0", **QUICK, marginal="learned")
        ),
        # dropout and its kin
        "mc_dropout": Saved(lambda: kn.Model(with_batch_norm(), kn.Gaussian()), kn.MCDropout(**QUICK)),
        "mc_dropout_of_weights": Saved(classification, kn.MCDropout(0.3, **QUICK, way="weights", where="*"), classes),
        "mc_dropout_scaled": Saved(regression, kn.MCDropout(0.3, **QUICK, prediction="weight_scaling")),
        "concrete_dropout": Saved(regression, kn.ConcreteDropout(**QUICK)),
        "gaussian_dropout": Saved(regression, kn.GaussianDropout(**QUICK)),
        "gaussian_dropout_without_mean": Saved(regression, kn.GaussianDropout(**QUICK, zero_mean="0.weight")),
        "variational_dropout": Saved(classification, kn.VariationalDropout(**QUICK, share="neuron"), classes),
        "sparse_variational_dropout": Saved(regression, kn.SparseVariationalDropout(**QUICK, watch="0.weight")),
        "structured_dropout": Saved(regression, kn.StructuredDropout(**QUICK)),
        "structured_dropout_horseshoe": Saved(classification, kn.StructuredDropout("horseshoe", **QUICK), classes),
        "monte_carlo_batch_norm": Saved(
            lambda: kn.Model(with_batch_norm(), kn.Gaussian()), kn.MonteCarloBatchNorm(**QUICK, draws=6)
        ),
        "augmented_noise": Saved(regression, kn.TestTimeAugmentation(kn.MeanFieldVI(**QUICK), kn.InputNoise(0.2))),
        "augmented_shift": Saved(
            lambda: kn.Model(images(), kn.Categorical()),
            kn.TestTimeAugmentation(kn.MAP(**QUICK), kn.Shift(1)),
            pictures,
        ),
        "augmented_flip": Saved(
            lambda: kn.Model(images(), kn.Categorical()),
            kn.TestTimeAugmentation(kn.MCDropout(0.2, **QUICK), kn.Flip((-2,))),
            pictures,
        ),
        "augmented_mixture": Saved(
            regression, kn.TestTimeAugmentation(kn.EnsembleOf(kn.MAP(**QUICK), 2), kn.InputNoise(0.1))
        ),
        # chains
        "metropolis": Saved(regression, kn.Metropolis(**CHAINS, steps=2)),
        "hmc": Saved(classification, kn.HMC(**CHAINS, steps=2), classes),
        "nuts": Saved(regression, kn.NUTS(**CHAINS, max_depth=2)),
        "nuts_stored_short": Saved(regression, kn.NUTS(**CHAINS, max_depth=2, store="bfloat16")),
        "mclmc": Saved(regression, kn.MCLMC(**CHAINS, step_size=0.1, length=0.2)),
        "simulated_annealing": Saved(regression, kn.SimulatedAnnealing(**{**CHAINS, "draws": 10}, steps=2)),
        "tempered_chains": Saved(regression, kn.TemperedChains(**CHAINS, rungs=2, steps=2)),
        "sgld": Saved(regression, kn.SGLD(**CHAINS, batch_size=8, steps=2)),
        "sghmc": Saved(classification, kn.SGHMC(**CHAINS, batch_size=8, steps=2), classes),
        "cyclical_sgmcmc": Saved(regression, kn.CyclicalSGMCMC(**CHAINS, batch_size=8, cycle_steps=12)),
    }


def _by_prior() -> dict[str, Saved]:
    return {
        "prior_laplace": Saved(lambda: regression(kn.LaplacePrior(0.7)), kn.MAP(**QUICK)),
        "prior_student_t": Saved(lambda: regression(kn.StudentTPrior(4.0, 0.6)), kn.MeanFieldVI(**QUICK)),
        "prior_log_uniform": Saved(lambda: regression(kn.LogUniform()), kn.MeanFieldVI(**QUICK)),
        "prior_globs": Saved(_globs, kn.MeanFieldVI(**QUICK)),
        "prior_learned": Saved(
            lambda: regression(kn.EmpiricalBayes(kn.LaplacePrior(0.5), kn.Normal(0.8))), kn.MeanFieldVI(**QUICK)
        ),
        "prior_learned_by_globs": Saved(
            lambda: classification(
                {
                    "0.*": kn.EmpiricalBayes(kn.Normal(0.5), per="weight"),
                    "*": kn.EmpiricalBayes(kn.StudentTPrior(), per="parameter"),
                }
            ),
            kn.MeanFieldVI(**QUICK),
            classes,
        ),
        # a posterior of each kind
        "prior_diagonal": Saved(regression, kn.MeanFieldVI(**QUICK), before=kn.MeanFieldVI(**QUICK)),
        "prior_full": Saved(regression, kn.FullRankVI(**QUICK), before=kn.FullRankVI(**QUICK)),
        "prior_full_given_frozen": Saved(_frozen_afterwards, kn.MeanFieldVI(**QUICK), before=kn.FullRankVI(**QUICK)),
        "prior_low_rank": Saved(classification, kn.MAP(**QUICK), classes, before=kn.LowRankVI(2, **QUICK)),
        "prior_kronecker": Saved(regression, kn.MeanFieldVI(**QUICK), before=kn.MatrixNormalVI(**QUICK)),
        "prior_product": Saved(
            regression,
            kn.MeanFieldVI(**QUICK),
            before=kn.MeanFieldVI(
                **QUICK, families={"0.*": kn.families.FullRank(), "2.weight": kn.families.LowRank(1)}
            ),
        ),
        "prior_of_the_last_layer": Saved(_with_points, kn.MeanFieldVI(**QUICK), before=kn.MeanFieldVI(**QUICK)),
        "prior_laplace_full": Saved(
            regression, kn.MeanFieldVI(**QUICK), before=kn.Laplace(**QUICK, structure="full", polish=0)
        ),
        "prior_laplace_diagonal": Saved(
            regression, kn.MeanFieldVI(**QUICK), before=kn.Laplace(**QUICK, structure="diag")
        ),
        "prior_laplace_kronecker": Saved(classification, kn.MeanFieldVI(**QUICK), classes, before=kn.Laplace(**QUICK)),
        "prior_laplace_low_rank": Saved(
            regression, kn.MeanFieldVI(**QUICK), before=kn.Laplace(**QUICK, structure="lowrank", rank=3)
        ),
        "prior_swag": Saved(regression, kn.MeanFieldVI(**QUICK), before=kn.SWAG(**QUICK, **SNAPSHOTS)),
    }
