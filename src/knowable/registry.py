"""Every method by name: for strings, the command line, citations and the conformance suite.

A new method adds one entry here.
"""

from __future__ import annotations

import difflib
import importlib
from dataclasses import dataclass

from knowable.core.method import Method
from knowable.errors import InvalidArgument
from knowable.references import BIBTEX


@dataclass(frozen=True)
class MethodEntry:
    """What is known of a method without importing it.

    Attributes:
        name: Snake-case name, as on the command line.
        cls_name: Name of its class, found in ``module``.
        family: Which kind of inference it is.
        summary: One line.
        references: Keys into the bibliography.
        aliases: Shorter names.
    """

    name: str
    cls_name: str
    module: str
    family: str
    summary: str
    references: tuple[str, ...]
    aliases: tuple[str, ...] = ()

    @property
    def cls(self) -> type[Method]:
        """The method's class."""
        return getattr(importlib.import_module(self.module), self.cls_name)

    @property
    def bibtex(self) -> tuple[str, ...]:
        """The papers to cite."""
        return tuple(BIBTEX[key] for key in self.references)


_ENTRIES = (
    MethodEntry(
        "maximum_likelihood", "MaximumLikelihood", "knowable.inference.point", "point",
        "ordinary training without a prior: the baseline", ("mackay1992",), ("ml", "mle"),
    ),
    MethodEntry(
        "map", "MAP", "knowable.inference.point", "point",
        "the most probable weights: ordinary training with the prior as regulariser", ("mackay1992",),
    ),
    MethodEntry(
        "exact_linear", "ExactLinear", "knowable.inference.exact", "exact",
        "closed-form posterior, prediction and evidence where the network is linear in its weights",
        ("mackay1992", "bishop2006"), ("exact", "blr"),
    ),
    MethodEntry(
        "laplace", "Laplace", "knowable.inference.laplace", "laplace",
        "a normal around the most probable weights, as wide as the curvature there says",
        ("mackay1992", "ritter2018", "immer2021", "daxberger2021", "eschenhagen2023"),
    ),
    MethodEntry(
        "mean_field_vi", "MeanFieldVI", "knowable.inference.variational", "variational",
        "an independent normal for every weight, by maximising the evidence lower bound",
        ("graves2011", "blundell2015", "kingma2015", "ranganath2014", "kool2019"), ("mfvi", "bbb"),
    ),
    MethodEntry(
        "discrete_vi", "DiscreteVI", "knowable.inference.variational", "variational",
        "gates and other parameters that are 0 or 1, by the score function, with normals for the weights",
        ("williams1992", "mnih2016", "kool2019", "titsias2015"),
    ),
    MethodEntry(
        "low_rank_vi", "LowRankVI", "knowable.inference.variational", "variational",
        "one normal whose covariance is a diagonal and a few directions", ("ong2018",), ("lrvi",),
    ),
    MethodEntry(
        "full_rank_vi", "FullRankVI", "knowable.inference.variational", "variational",
        "one normal with all correlations between the weights",
        ("opper2009", "titsias2014", "kucukelbir2017", "roeder2017"), ("frvi",),
    ),
    MethodEntry(
        "matrix_normal_vi", "MatrixNormalVI", "knowable.inference.variational", "variational",
        "a matrix normal for every weight matrix: correlated rows, correlated columns", ("louizos2016",), ("mnvi",),
    ),
    MethodEntry(
        "flow_vi", "FlowVI", "knowable.inference.variational", "variational",
        "a normal bent by invertible maps, for posteriors of any shape",
        ("rezende2015", "dinh2017", "roeder2017"), ("flow",),
    ),
    MethodEntry(
        "mixture_vi", "MixtureVI", "knowable.inference.variational", "variational",
        "several mean-field normals, each around its own mode, trained together",
        ("jaakkola1998", "bishop1998", "gershman2012"), ("mixture",),
    ),
    MethodEntry(
        "natural_vi", "NaturalVI", "knowable.inference.variational", "variational",
        "the same independent normals along the natural gradient: Newton steps at the cost of Adam",
        ("shen2024", "lin2020", "khan2018"), ("ivon", "nvi"),
    ),
    MethodEntry(
        "moment_vi", "MomentVI", "knowable.inference.variational", "variational",
        "the same independent normals without sampling: moments go through the layers",
        ("wu2019", "lobato2015", "clark1961", "knowles2011"), ("dvi",),
    ),
    MethodEntry(
        "function_space_vi", "FunctionSpaceVI", "knowable.inference.variational", "variational",
        "an independent normal for every weight, held to a prior over functions",
        ("rudner2022", "sun2019", "burt2020"), ("fsvi",),
    ),
    MethodEntry(
        "information_bottleneck", "InformationBottleneck", "knowable.inference.variational", "variational",
        "a random code in the network that keeps of the input only what helps to predict",
        ("alemi2017", "alemi2018", "chechik2005"), ("vib",),
    ),
    MethodEntry(
        "mc_dropout", "MCDropout", "knowable.inference.dropout", "dropout",
        "dropout in training and prediction: weights whose columns are dropped at random",
        ("gal2016", "ghahramani2016", "hinton2012", "tompson2015"), ("dropout", "mcdropout"),
    ),
    MethodEntry(
        "concrete_dropout", "ConcreteDropout", "knowable.inference.dropout", "dropout",
        "dropout with a rate for every layer, learned with the weights", ("gal2017", "maddison2017", "williams1992"),
    ),
    MethodEntry(
        "gaussian_dropout", "GaussianDropout", "knowable.inference.dropout", "dropout",
        "weights multiplied by Gaussian noise of a set strength, in training and prediction",
        ("wang2013", "kingma2015", "neklyudov2018"),
    ),
    MethodEntry(
        "variational_dropout", "VariationalDropout", "knowable.inference.dropout", "dropout",
        "Gaussian dropout whose strength is learned, by layer, neuron or weight", ("kingma2015", "molchanov2017"),
        ("vdo",),
    ),
    MethodEntry(
        "sparse_variational_dropout", "SparseVariationalDropout", "knowable.inference.dropout", "dropout",
        "noise of its own for every weight under a log-uniform prior, in which most weights drown",
        ("molchanov2017", "kingma2015", "lobacheva2017"), ("svdo", "sparse_vd"),
    ),
    MethodEntry(
        "monte_carlo_batch_norm", "MonteCarloBatchNorm", "knowable.inference.dropout", "dropout",
        "a MAP fit whose batch normalisation sees random training batches in prediction", ("teye2018",), ("mcbn",),
    ),
    MethodEntry(
        "test_time_augmentation", "TestTimeAugmentation", "knowable.inference.dropout", "dropout",
        "any method, with inputs that change a little from draw to draw", ("ayhan2018", "wang2019"), ("tta",),
    ),
    MethodEntry(
        "importance_sampling", "ImportanceSampling", "knowable.inference.sampling", "sampling",
        "weighted draws from the prior or an approximation, with a warning where the weights are worthless",
        ("vehtari2024",), ("importance", "psis"),
    ),
    MethodEntry(
        "metropolis", "Metropolis", "knowable.inference.sampling", "sampling",
        "random-walk chains that need no gradient", ("metropolis1953",),
    ),
    MethodEntry(
        "hmc", "HMC", "knowable.inference.sampling", "sampling",
        "Hamiltonian trajectories of a length that tunes itself, all chains in step",
        ("duane1987", "neal2011", "hoffman2021"),
    ),
    MethodEntry(
        "nuts", "NUTS", "knowable.inference.sampling", "sampling",
        "Hamiltonian trajectories that stop where they turn back: the reference for small networks",
        ("hoffman2014", "betancourt2017"),
    ),
    MethodEntry(
        "mclmc", "MCLMC", "knowable.inference.sampling", "sampling",
        "microcanonical chains from a deep ensemble: the most draws for a gradient",
        ("robnik2023", "robnik2025", "sommer2025"), ("mile",),
    ),
    MethodEntry(
        "simulated_annealing", "SimulatedAnnealing", "knowable.inference.sampling", "sampling",
        "chains that cool down from a hot start; also finds the mode", ("kirkpatrick1983",), ("annealing",),
    ),
    MethodEntry(
        "tempered_chains", "TemperedChains", "knowable.inference.sampling", "sampling",
        "chains at several temperatures that swap places: for posteriors with separate modes",
        ("geyer1991",), ("parallel_tempering",),
    ),
    MethodEntry(
        "sgld", "SGLD", "knowable.inference.sampling", "sampling",
        "mini-batch gradient steps with noise that makes them draws", ("welling2011", "li2016"),
    ),
    MethodEntry(
        "sghmc", "SGHMC", "knowable.inference.sampling", "sampling",
        "the same with momentum and friction", ("chen2014",),
    ),
    MethodEntry(
        "cyclical_sgmcmc", "CyclicalSGMCMC", "knowable.inference.sampling", "sampling",
        "mini-batch chains whose step rises again and again, to visit several modes",
        ("zhang2020",), ("csgmcmc",),
    ),
    MethodEntry(
        "svgd", "SVGD", "knowable.inference.sampling", "sampling",
        "particles that follow the gradient and repel each other", ("liu2016",),
    ),
    MethodEntry(
        "deep_ensemble", "DeepEnsemble", "knowable.inference.ensembles", "ensembles",
        "several networks from their own random starts, trained in one step where they are small",
        ("lakshminarayanan2017", "fort2019"), ("ensemble",),
    ),
    MethodEntry(
        "snapshot_ensemble", "SnapshotEnsemble", "knowable.inference.ensembles", "ensembles",
        "one network, kept each time its learning rate has fallen", ("huang2017",), ("snapshot",),
    ),
    MethodEntry(
        "bayesian_bootstrap", "BayesianBootstrap", "knowable.inference.ensembles", "ensembles",
        "networks trained with random weights on the rows", ("rubin1981", "newton1994"), ("bootstrap",),
    ),
    MethodEntry(
        "ensemble_of", "EnsembleOf", "knowable.inference.ensembles", "ensembles",
        "a mixture of any method's posteriors, each from its own start", ("wilson2020", "yao2018"),
    ),
    MethodEntry(
        "swag", "SWAG", "knowable.inference.ensembles", "ensembles",
        "a normal with the moments of the weights that SGD visits around a mode", ("maddox2019", "mandt2017"),
    ),
    MethodEntry(
        "multi_swag", "MultiSWAG", "knowable.inference.ensembles", "ensembles",
        "a mixture of SWAG posteriors around several modes", ("wilson2020", "maddox2019"),
    ),
)  # fmt: skip

METHODS: dict[str, MethodEntry] = {entry.name: entry for entry in _ENTRIES}


def find_method(name: str) -> MethodEntry:
    """The entry for a name, an alias or a class name."""
    wanted = str(name).strip().lower().replace("-", "_")
    for entry in _ENTRIES:
        if wanted in (entry.name, entry.cls_name.lower(), *entry.aliases):
            return entry
    known = [each for entry in _ENTRIES for each in (entry.name, *entry.aliases)]
    near = difflib.get_close_matches(wanted, known, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise InvalidArgument(f"method {name!r} is not known.{hint} The methods are: {', '.join(METHODS)}.")


def cite(*names: str) -> str:
    """BibTeX for one or several methods, each paper once.

    >>> "blundell2015" in cite("mfvi")
    True
    """
    keys = dict.fromkeys(key for name in names for key in find_method(name).references)
    return "\n\n".join(BIBTEX[key] for key in keys)
