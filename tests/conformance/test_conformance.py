"""Every registered method passes the conformance suite."""

from __future__ import annotations

import pytest

import knowable as kn
from knowable.registry import METHODS
from knowable.testing import CHECKS, NETWORKS, Check, Subject
from knowable.testing.checks.networks import check_network
from knowable.testing.checks.resuming import check_interrupted_fit_resumes_exactly, check_killed_fit_resumes_exactly

QUICK = {"epochs": 2, "batch_size": 8}
NORMALISED = {"batchnorm_mlp", "batchnorm_cnn", "residual"}
SMALL_NOISE = kn.InputNoise(0.1)
SEVERAL = ("tagger", "two_inputs", "nested_inputs")  # inputs
NONLINEAR = frozenset(NETWORKS) - {"linear", "frozen_backbone"}
NO_LIMIT = frozenset(NETWORKS) - {"linear", "mlp", "frozen_backbone"}
NO_NUMBERS = frozenset({"tied", "tagger", "two_inputs", "nested_inputs"})  # as inputs, in one tensor
NO_MOMENTS = frozenset(NETWORKS) - {"linear", "mlp", "frozen_backbone", "last_layer"}

CHAINS = {"chains": 2, "draws": 3, "warmup": 4, "start": "network"}
LONG_CHAINS = {**CHAINS, "draws": 60, "warmup": 60}
TREES = {"max_depth": 2, "mass": "diagonal"}  # a dense one is found by a search for the mode, which takes long
LEAPS = {"steps": 2, "mass": "diagonal"}
STEPS = {"step_size": 0.1, "length": 0.2}
BATCHES = {"batch_size": 8, "steps": 2}
SNAPSHOTS = {"snapshots": 3, "rank": 2}

# settings other than a method's own are tried on these; on all networks in the slow run
THREE = ("mlp", "residual", "transformer")
ALIKE = [pytest.param(name, marks=() if name in THREE else pytest.mark.slow) for name in NETWORKS]

# One line for each method: quick settings, and what it declares of itself.
SUBJECTS = {
    "maximum_likelihood": Subject(kn.MaximumLikelihood(**QUICK)),
    "map": Subject(kn.MAP(**QUICK)),
    "exact_linear": Subject(kn.ExactLinear(), refuses=NONLINEAR, seeded=False, iterates=False),
    "infinite_width": Subject(kn.InfiniteWidth(scales="prior"), refuses=NO_LIMIT, seeded=False, iterates=False),
    "gaussian_process": Subject(kn.GaussianProcess(), refuses=NO_NUMBERS, seeded=False, iterates=False),
    # the network has no part in the next two, and so cannot stop a fit: test_sparse_and_deep.py does
    "sparse_gaussian_process": Subject(
        kn.SparseGaussianProcess(**QUICK, inducing=6), refuses=NO_NUMBERS, iterates=False
    ),
    "deep_gaussian_process": Subject(kn.DeepGaussianProcess(**QUICK, inducing=6), refuses=NO_NUMBERS, iterates=False),
    "deep_kernel": Subject(kn.DeepKernel(**QUICK, inducing=6)),
    "laplace": Subject(kn.Laplace(**QUICK)),
    "mean_field_vi": Subject(kn.MeanFieldVI(**QUICK)),
    "low_rank_vi": Subject(kn.LowRankVI(2, **QUICK)),
    "full_rank_vi": Subject(kn.FullRankVI(**QUICK)),
    "matrix_normal_vi": Subject(kn.MatrixNormalVI(**QUICK)),
    "flow_vi": Subject(kn.FlowVI(**QUICK)),
    "mixture_vi": Subject(kn.MixtureVI(2, **QUICK)),
    "natural_vi": Subject(kn.NaturalVI(**QUICK)),
    "moment_vi": Subject(kn.MomentVI(**QUICK), refuses=NO_MOMENTS),
    "function_space_vi": Subject(kn.FunctionSpaceVI(**QUICK, prior=kn.NetworkPrior(20), context_points=4)),
    "information_bottleneck": Subject(kn.InformationBottleneck(**QUICK)),
    "discrete_vi": Subject(kn.DiscreteVI(**QUICK)),
    "training_free_bayes": Subject(kn.TrainingFreeBayes(), iterates=False, trains=False),
    "mc_dropout": Subject(kn.MCDropout(**QUICK)),
    "concrete_dropout": Subject(kn.ConcreteDropout(**QUICK)),
    "gaussian_dropout": Subject(kn.GaussianDropout(**QUICK)),
    "variational_dropout": Subject(kn.VariationalDropout(**QUICK)),
    "sparse_variational_dropout": Subject(kn.SparseVariationalDropout(**QUICK)),
    "structured_dropout": Subject(kn.StructuredDropout(**QUICK)),
    "monte_carlo_batch_norm": Subject(
        kn.MonteCarloBatchNorm(**QUICK, draws=6), refuses=frozenset(NETWORKS) - NORMALISED
    ),
    "test_time_augmentation": Subject(
        kn.TestTimeAugmentation(kn.MAP(**QUICK), SMALL_NOISE),
        refuses={"tied", *SEVERAL},
        longer=kn.TestTimeAugmentation(kn.MAP(epochs=130, batch_size=8), SMALL_NOISE),
    ),
    "importance_sampling": Subject(
        kn.ImportanceSampling(draws=20, max_parameters=10), refuses=NONLINEAR - {"last_layer"}, iterates=False
    ),
    "annealed_importance": Subject(
        kn.AnnealedImportance(draws=8, temperatures=2, steps=1, mass="diagonal"), iterates=False
    ),
    # it takes no gradients, which the suite counts to stop a fit: tests/inference/sampling/test_resuming.py does
    "metropolis": Subject(kn.Metropolis(**CHAINS, steps=2), iterates=False),
    "hmc": Subject(kn.HMC(**CHAINS, **LEAPS), longer=kn.HMC(**LONG_CHAINS, **LEAPS)),
    "nuts": Subject(kn.NUTS(**CHAINS, **TREES), longer=kn.NUTS(**LONG_CHAINS, **TREES)),
    "mclmc": Subject(kn.MCLMC(**CHAINS, **STEPS), longer=kn.MCLMC(**LONG_CHAINS, **STEPS)),
    "simulated_annealing": Subject(
        kn.SimulatedAnnealing(**{**CHAINS, "draws": 10}, steps=2), longer=kn.SimulatedAnnealing(**LONG_CHAINS, steps=2)
    ),
    "tempered_chains": Subject(
        kn.TemperedChains(**CHAINS, rungs=2, steps=2), longer=kn.TemperedChains(**LONG_CHAINS, rungs=2, steps=2)
    ),
    "sgld": Subject(kn.SGLD(**CHAINS, **BATCHES), longer=kn.SGLD(**LONG_CHAINS, **BATCHES)),
    "sghmc": Subject(kn.SGHMC(**CHAINS, **BATCHES), longer=kn.SGHMC(**LONG_CHAINS, **BATCHES)),
    "cyclical_sgmcmc": Subject(
        kn.CyclicalSGMCMC(**CHAINS, batch_size=8, cycle_steps=12),
        longer=kn.CyclicalSGMCMC(**LONG_CHAINS, cycle_steps=12),
    ),
    "svgd": Subject(kn.SVGD(chains=3, warmup=3, batch_size=8), longer=kn.SVGD(chains=2, warmup=150)),
    "deep_ensemble": Subject(kn.DeepEnsemble(2, **QUICK)),
    "snapshot_ensemble": Subject(kn.SnapshotEnsemble(**QUICK, cycles=2)),
    # it reads loaders into memory, and is resumed at every hundredth step
    "bayesian_bootstrap": Subject(
        kn.BayesianBootstrap(2, **QUICK), longer=kn.BayesianBootstrap(2, epochs=130, batch_size=8)
    ),
    "ensemble_of": Subject(
        kn.EnsembleOf(kn.MeanFieldVI(**QUICK), 2), longer=kn.EnsembleOf(kn.MeanFieldVI(epochs=65, batch_size=8), 2)
    ),
    "swag": Subject(kn.SWAG(**QUICK, **SNAPSHOTS)),
    "multi_swag": Subject(kn.MultiSWAG(2, **QUICK, **SNAPSHOTS)),
}


@pytest.fixture(autouse=True)
def _short_training_before_chains(monkeypatch):
    """Parameters that are points are trained before the chains begin: a few steps will do here."""
    monkeypatch.setattr("knowable.inference.sampling.initial_positions._STEPS", 20)


@pytest.fixture(autouse=True)
def _few_passes_for_the_bound(monkeypatch):
    """The bound at the end of a variational fit is averaged over some ten draws of the weights, not hundreds."""
    monkeypatch.setattr("knowable.inference.variational.method._ELBO_ROWS", 400)


def test_every_registered_method_is_here():
    assert set(SUBJECTS) == set(METHODS)
    assert all(type(SUBJECTS[name].method) is entry.cls for name, entry in METHODS.items())


# Methods that look at the layers of a network in a way of their own are fitted to all networks, the others to three.
LOOK_AT_LAYERS = {
    "DeepEnsemble", "DeepKernel", "ExactLinear", "FunctionSpaceVI", "GaussianProcess", "InfiniteWidth",
    "InformationBottleneck", "Laplace", "MCDropout", "MeanFieldVI", "MomentVI", "MonteCarloBatchNorm",
    "StructuredDropout",
}  # fmt: skip
SEVERAL_INPUTS = {(name, "tagger") for name in ("MAP", "NaturalVI", "SWAG", "SGLD")}
# One method for each way of reading data, saving and resuming; the others share its code, and do these checks only in
# the slow run.
LEAD = {
    "DeepEnsemble", "DeepKernel", "ExactLinear", "GaussianProcess", "ImportanceSampling", "InfiniteWidth", "Laplace",
    "MAP", "MCDropout", "MCLMC", "MeanFieldVI", "MomentVI", "MonteCarloBatchNorm", "NUTS", "SGLD", "SWAG",
    "SnapshotEnsemble",
    "TestTimeAugmentation",
}  # fmt: skip
SHARED = {
    "arrays_and_tensor_datasets_are_tensors", "checkpoint_changes_nothing", "checkpoint_of_another_fit_is_refused",
    "data_is_left_alone", "datasets_and_loaders_are_read", "dtype_is_kept", "global_state_is_left_alone",
    "interrupted_fit_on_a_dataset_resumes_exactly", "interrupted_fit_resumes_exactly",
    "killed_fit_resumes_exactly", "loading_with_the_network_given",
    "memory_cap_changes_nothing", "model_can_be_fitted_again", "network_is_left_alone",
    "network_that_cannot_be_rebuilt_is_asked_for", "row_weights_count", "streamed_prediction_is_the_prediction",
}  # fmt: skip


# A fit that is interrupted goes on in the code of one that is killed; a data set is read in the code of arrays, but for
# methods that look at some of its rows after training.
SELDOM = {"interrupted_fit_on_a_dataset_resumes_exactly", "interrupted_fit_resumes_exactly"}
SOON = {"MAP", "MeanFieldVI", "MCLMC", "MonteCarloBatchNorm", "SWAG"}


RESUMING = [
    pytest.param(check_interrupted_fit_resumes_exactly, marks=pytest.mark.slow, id="interrupted"),
    pytest.param(check_killed_fit_resumes_exactly, id="killed"),
]


def subject_and_check(subject: Subject, check: Check):
    network = check.name.removesuffix("_is_fitted_or_refused")
    if network in NETWORKS:
        slow = subject.name not in LOOK_AT_LAYERS and network not in THREE
        slow = slow and (subject.name, network) not in SEVERAL_INPUTS
    else:
        slow = check.name in SHARED and subject.name not in (SOON if check.name in SELDOM else LEAD)
    marks = [pytest.mark.slow] if slow else []
    if subject.name == "AnnealedImportance":  # two temperatures are too few for an estimate, and it says so
        marks.append(pytest.mark.filterwarnings("ignore:log evidence:knowable.errors.ConvergenceWarning"))
    return pytest.param(subject, check, id=f"{subject.name}-{check.name}", marks=marks)


@pytest.mark.parametrize(
    ("subject", "check"), [subject_and_check(subject, check) for subject in SUBJECTS.values() for check in CHECKS]
)
def test_method_conforms(subject: Subject, check: Check):
    check(subject)


@pytest.mark.parametrize("network", ALIKE)
@pytest.mark.parametrize("estimator", ["local", "weight", "flipout", "score", "local_score"])  # "auto" is above
def test_every_gradient_estimator_fits_every_network(estimator, network):
    check_network(Subject(kn.MeanFieldVI(**QUICK, estimator=estimator, draws=2)), network)


@pytest.mark.parametrize("network", ALIKE)
@pytest.mark.parametrize(
    "method",
    [
        kn.MeanFieldVI(**QUICK, families={"*weight*": kn.families.MatrixNormal(full_up_to=5)}),
        kn.LowRankVI(2, **QUICK, families={"*bias*": kn.families.FullRank()}, kl_gradient="path"),
    ],
    ids=["mean field beside matrix normals", "low rank beside full rank"],
)
def test_families_by_group_fit_every_network(method, network):
    check_network(Subject(method), network)


@pytest.mark.parametrize("check", RESUMING)
def test_families_by_group_resume_exactly(check):
    check(Subject(kn.MeanFieldVI(**QUICK, families={"*2.*": kn.families.FullRank()})))


@pytest.mark.parametrize("network", ALIKE)
@pytest.mark.parametrize(
    "method",
    [
        kn.FunctionSpaceVI(**QUICK, prior=kn.RBFKernel(), context="data", context_points=4),
        kn.InformationBottleneck(**QUICK, marginal="learned", draws=2, beta=1.0),
    ],
    ids=repr,
)
def test_kernels_and_learned_marginals_fit_every_network(method, network):
    kernel = isinstance(method, kn.FunctionSpaceVI)  # of inputs that are one tensor
    check_network(Subject(method, refuses=frozenset(SEVERAL if kernel else ())), network)


@pytest.mark.parametrize("network", ALIKE)
@pytest.mark.parametrize("structure", ["full", "diag", "lowrank"])  # "kron" is above
def test_every_structure_of_the_curvature_fits_every_network(structure, network):
    check_network(Subject(kn.Laplace(**QUICK, structure=structure, polish=0)), network)


@pytest.mark.parametrize("network", ALIKE)
@pytest.mark.parametrize("kind", ["radial", "real_nvp"])  # "planar" is above
def test_every_kind_of_flow_fits_every_network(kind, network):
    check_network(Subject(kn.FlowVI(**QUICK, kind=kind)), network)


@pytest.mark.parametrize("network", ALIKE)
def test_components_in_turn_fit_every_network(network):
    check_network(Subject(kn.MixtureVI(2, **QUICK, vectorise=False)), network)


@pytest.mark.parametrize("check", RESUMING)
def test_components_in_turn_resume_exactly(check):
    check(Subject(kn.MixtureVI(2, **QUICK, vectorise=False)))


def test_start_from_the_mode_conforms():
    check_network(Subject(kn.MeanFieldVI(**QUICK, start="map")), "batchnorm_cnn")


@pytest.mark.parametrize("network", ALIKE)
def test_ensembles_of_points_fit_every_network(network):
    check_network(Subject(kn.EnsembleOf(kn.MAP(**QUICK), 2)), network)


@pytest.mark.parametrize("network", ALIKE)
def test_adversarial_training_fits_every_network_whose_inputs_can_be_moved(network):
    if network != "tied":  # its inputs are words
        check_network(Subject(kn.DeepEnsemble(2, **QUICK, adversarial=0.01), refuses=frozenset(SEVERAL)), network)


@pytest.mark.parametrize("check", RESUMING)
def test_members_trained_in_turn_resume_exactly(check):
    check(Subject(kn.DeepEnsemble(2, **QUICK, vectorise=False)))


@pytest.mark.parametrize("network", ALIKE)
@pytest.mark.parametrize(
    "method",
    [
        kn.MCDropout(0.3, **QUICK, way="weights", where="*"),
        kn.MCDropout(**QUICK, prediction="weight_scaling"),
        kn.ConcreteDropout(**QUICK, estimator="score"),
        kn.ConcreteDropout(**QUICK, way="weights"),
        kn.StructuredDropout("horseshoe", **QUICK),
        kn.StructuredDropout(**QUICK, where="*", draws=2, start="map"),
    ],
    ids=repr,
)
def test_every_kind_of_dropout_fits_every_network(method, network):
    check_network(Subject(method), network)


@pytest.mark.parametrize("network", ALIKE)
def test_features_trained_by_the_evidence_fit_every_network(network):
    if network not in ("tied", "tagger"):  # labels, as in others, are fitted by the bound
        check_network(Subject(kn.DeepKernel(epochs=2)), network)


@pytest.mark.parametrize("check", RESUMING)
def test_features_trained_by_the_evidence_resume_exactly(check):
    check(Subject(kn.DeepKernel(epochs=2), longer=kn.DeepKernel(epochs=250)))


@pytest.mark.slow
@pytest.mark.parametrize("check", RESUMING)
def test_the_horseshoe_on_units_resumes_exactly(check):
    check(Subject(kn.StructuredDropout("horseshoe", **QUICK)))
