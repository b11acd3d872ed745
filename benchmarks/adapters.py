"""LoRA adapters on a small pretrained transformer, made Bayesian: accuracy, calibration, and another domain.

A GPT-2 of a million weights is pretrained on the docstrings of installed packages (the next word), and kept. Then its
adapters (peft, rank 8 on the attention) and its head are fitted to another task: which package a docstring is from,
eight classes, 60 docstrings each, of modules that the pretraining did not read. Everything begins at the same
pretrained weights; the backbone is frozen. Scored on other docstrings of these modules, and by how well the predictive
entropy tells them from those of Python's standard library.

All methods have the same adapters and number of epochs, and the default prior, Normal(1.0), unless the row says another
one. Nothing is chosen on test rows: "held-out" methods choose their one scale on 80 further docstrings. Needs ``peft``
and ``transformers``.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import ast
import copy
import sysconfig
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from functools import cache, cached_property
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import one_line
from benchmarks.memory import peak_of
from benchmarks.study import Rows, describe, page, say, table
from benchmarks.uci_data import mean_and_error

if TYPE_CHECKING:
    from knowable.core.model.model import Model
    from knowable.core.posterior.posterior import Posterior

PACKAGES = ("numpy", "scipy", "torch", "sklearn", "pandas", "sympy", "matplotlib", "networkx")
FOLDER = Path(__file__).resolve().parent / "results" / "fits" / "adapters"
_HEADER = ("method", "accuracy", "NLL", "ECE", "AUROC, another domain", "seeds", "CPU seconds", "peak MB")
_NOTE = (
    "Means ± standard errors over up to {seeds} seeds of training docstrings and adapters; {test} test docstrings. "
    "ECE: 15 bins. AUROC: the probability that a docstring of the standard library has the higher predictive entropy. "
    "Seconds: of CPU, in one thread, of fit and {draws} draws on all test docstrings; a start is not counted. "
    "Peak: memory of the process beyond that before the fit."
)


@dataclass(frozen=True)
class Recipe:
    """Sizes of everything.

    Attributes:
        width: Of the transformer.
        layers: Of the transformer.
        words: In its vocabulary.
        length: Tokens of a docstring that are read, at most.
        steps: Of pretraining, 32 docstrings each.
        rows: Labelled docstrings of each class.
        held_out: More of them, on which some methods choose a scale.
        test: Test docstrings, and docstrings of the other domain.
        epochs: Of every fit.
        samples: Draws in a prediction.
    """

    width: int = 128
    layers: int = 4
    words: int = 2048
    length: int = 48
    steps: int = 1500
    rows: int = 60
    held_out: int = 10
    test: int = 320
    epochs: int = 12
    samples: int = 10


RECIPE = Recipe()
_QUICK = Recipe(width=16, layers=1, words=300, length=8, steps=2, rows=4, held_out=2, test=20, epochs=2, samples=3)
SEEDS = 3
PLAIN = "LoRA, plain PyTorch"
_FEWEST, _MOST = 12, 60  # words of a docstring: fewer say too little, more are not read


# --- text ------------------------------------------------------------------------------------------------------------


def docstrings(package: str) -> list[tuple[str, str]]:
    """First words of a package's docstrings with the module each is from; each text once."""
    if package == "stdlib":
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    else:
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        files = sorted(Path(spec.origin).parent.rglob("*.py"))
    found: dict[str, str] = {}
    for file in files:
        for text in _docstrings(file):
            words = text.split()
            if len(words) >= _FEWEST:
                found.setdefault(" ".join(words[:_MOST]), file.name)
    return list(found.items())


def _docstrings(file: Path) -> list[str]:
    try:
        tree = ast.parse(file.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
    return [text for node in ast.walk(tree) if isinstance(node, kinds) and (text := ast.get_docstring(node))]


class Text:
    """The docstrings of all packages as numbers, half of the modules for pretraining and half for the task.

    Args:
        recipe: Sizes.
        packages: The classes.
    """

    def __init__(self, recipe: Recipe, packages: tuple[str, ...] = PACKAGES):
        self.recipe, self.packages = recipe, packages
        self._halves: dict[bool, list[tuple[str, int]]] = {True: [], False: []}
        for label, package in enumerate(packages):
            for text, name in docstrings(package):
                self._halves[sum(name.encode()) % 2 == 0].append((text, label))

    @cached_property
    def tokenizer(self) -> Any:
        """Byte-pair encoding, learned on the docstrings for pretraining."""
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        made = Tokenizer(models.BPE(unk_token="[UNK]"))
        made.pre_tokenizer = pre_tokenizers.ByteLevel()  # type: ignore[assignment]
        made.decoder = decoders.ByteLevel()  # type: ignore[assignment]
        special = ["[PAD]", "[UNK]", "[CLS]", "[MASK]"]
        trainer = trainers.BpeTrainer(vocab_size=self.recipe.words, special_tokens=special, show_progress=False)
        made.train_from_iterator([text for text, _ in self._halves[True]], trainer)
        return made

    def encode(self, texts: list[str]) -> dict[str, Tensor]:
        """``input_ids`` and ``attention_mask`` (rows, length)."""
        length = self.recipe.length
        found = [[2, *each.ids][:length] for each in self.tokenizer.encode_batch(texts)]
        ids = torch.tensor([each + [0] * (length - len(each)) for each in found])
        return {"input_ids": ids, "attention_mask": (ids != 0).long()}

    def pretraining(self) -> dict[str, Tensor]:
        """All docstrings of the first half."""
        return self.encode([text for text, _ in self._halves[True]])

    def task(self, seed: int) -> list[tuple[dict[str, Tensor], Tensor]]:
        """Training, held-out and test rows of the second half: the same number of each class."""
        generator = torch.Generator().manual_seed(seed)
        rows = self._halves[False]
        order = [rows[i] for i in torch.randperm(len(rows), generator=generator).tolist()]
        classes = [[row for row in order if row[1] == label] for label in range(len(self.packages))]
        sizes = (self.recipe.rows, self.recipe.held_out, self.recipe.test // len(classes))
        ends = [sum(sizes[:number]) for number in range(4)]
        return [self._labelled([row for rows in classes for row in rows[first:last]]) for first, last in pairwise(ends)]

    @cached_property
    def other_domain(self) -> dict[str, Tensor]:
        """Docstrings of the standard library."""
        texts = [text for text, _ in docstrings("stdlib")]
        keep = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0))[: self.recipe.test]
        return self.encode([texts[i] for i in keep.tolist()])

    def _labelled(self, rows: list[tuple[str, int]]) -> tuple[dict[str, Tensor], Tensor]:
        return self.encode([text for text, _ in rows]), torch.tensor([label for _, label in rows])


# --- the transformer -------------------------------------------------------------------------------------------------


def config(recipe: Recipe, classes: int) -> Any:
    """A small GPT-2's."""
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=recipe.words, n_embd=recipe.width, n_layer=recipe.layers, n_head=4, n_positions=64,
        num_labels=classes, pad_token_id=0, bos_token_id=2, eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0,
    )  # fmt: skip


def pretrained(text: Text) -> dict[str, Tensor]:
    """Weights of the transformer after predicting next words; trained once and kept in a file."""
    from safetensors.torch import load_file, save_file

    file = FOLDER / f"transformer_{hash_of(text.recipe)}.safetensors"
    if file.exists():
        return load_file(file)
    from transformers import GPT2LMHeadModel

    torch.manual_seed(0)
    net = GPT2LMHeadModel(config(text.recipe, len(text.packages)))
    rows = text.pretraining()
    optimiser = torch.optim.AdamW(net.parameters(), lr=2e-3, weight_decay=0.01)
    rate = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=max(text.recipe.steps, 2), pct_start=0.1)
    begun, average = time.perf_counter(), 0.0
    for step in range(text.recipe.steps):
        loss = _next_word_loss(net, rows)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        rate.step()
        average += 0.02 * (loss.item() - average) if step else loss.item()
        if step % 250 == 249:
            say(f"pretraining, step {step + 1}: loss {average:.3f}, {time.perf_counter() - begun:.0f} s")
    weights = {name: value.contiguous() for name, value in net.transformer.state_dict().items()}
    FOLDER.mkdir(parents=True, exist_ok=True)
    save_file(weights, file)
    return weights


def _next_word_loss(net: Any, rows: Mapping[str, Tensor]) -> Tensor:
    chosen = torch.randint(len(rows["input_ids"]), (32,))
    ids, mask = rows["input_ids"][chosen], rows["attention_mask"][chosen]
    counted = mask[:, 1:].bool()
    found = net.transformer(input_ids=ids, attention_mask=mask).last_hidden_state[:, :-1][counted]
    return F.cross_entropy(net.lm_head(found), ids[:, 1:][counted])


def hash_of(recipe: Recipe) -> int:
    """A number that changes with what pretraining depends on."""
    kept = (recipe.width, recipe.layers, recipe.words, recipe.length, recipe.steps)
    return sum(value * 31**place for place, value in enumerate(kept))


def with_adapters(text: Text, seed: int) -> nn.Module:
    """The pretrained network with a fresh head and fresh LoRA adapters; only these require a gradient."""
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2ForSequenceClassification

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = GPT2ForSequenceClassification(config(text.recipe, len(text.packages)))
        net.transformer.load_state_dict(pretrained(text))
        lora = LoraConfig(r=8, lora_alpha=16, target_modules=["c_attn"], fan_in_fan_out=True, modules_to_save=["score"])
        return get_peft_model(net, lora).eval()  # type: ignore[arg-type]


# --- the contenders --------------------------------------------------------------------------------------------------


class Fits:
    """The fits of one seed; MAP is trained once, for the methods that begin at it.

    Args:
        text: The data.
        seed: Of training rows, adapters and fits.
    """

    def __init__(self, text: Text, seed: int):
        self.recipe, self.seed = text.recipe, seed
        self.data, self.held_out, self.test = text.task(seed)
        self.net = with_adapters(text, seed)

    def model(self, prior: float | None = None) -> Model:
        """Adapters and head random, the rest frozen."""
        import knowable as kn

        chosen: dict[str, Any] = {} if prior is None else {"prior": kn.Normal(prior)}
        return kn.Model(self.net, kn.Categorical(), output="logits", **chosen)

    @cached_property
    def mode(self) -> Posterior:
        """The adapters by MAP."""
        import knowable as kn

        return kn.MAP(**self.training).fit(self.model(), self.data, seed=self.seed, progress=False)

    @property
    def training(self) -> dict[str, Any]:
        """Of every fit."""
        return {"epochs": self.recipe.epochs, "batch_size": 64, "learning_rate": 1e-2}


def plain(fits: Fits) -> Posterior:
    """LoRA as it is usually trained: cross-entropy and Adam."""
    import knowable as kn

    net, (x, y) = copy.deepcopy(fits.net), fits.data
    torch.manual_seed(fits.seed)
    free = {name: value for name, value in net.named_parameters() if value.requires_grad}
    optimiser = torch.optim.Adam(free.values(), fits.training["learning_rate"])
    for _ in range(fits.recipe.epochs):
        for rows in torch.randperm(len(y)).split(64):
            optimiser.zero_grad()
            F.cross_entropy(net(**{name: value[rows] for name, value in x.items()}).logits, y[rows]).backward()
            optimiser.step()
    values = {name: value.detach().unsqueeze(0) for name, value in free.items()}
    return kn.Particles(fits.model(), values, buffers=fits.model().buffers())


def _fit(
    make: Callable[[Fits], Any], *, start: bool = False, held_out: bool = False, prior: float | None = None
) -> Callable[[Fits], Posterior]:
    def fitted(fits: Fits) -> Posterior:
        more: dict[str, Any] = {"start": fits.mode} if start else {}
        more |= {"validation": fits.held_out} if held_out else {}
        return make(fits).fit(fits.model(prior), fits.data, seed=fits.seed, progress=False, **more)

    return fitted


def contenders() -> dict[str, Callable[[Fits], Posterior]]:
    """By their titles."""
    import knowable as kn

    laplace, free = _made(kn.Laplace, structure="kron"), _made(kn.TrainingFreeBayes)
    return {
        PLAIN: plain,
        "MAP": lambda fits: fits.mode,
        "MAP, Normal(0.1)": _fit(lambda fits: kn.MAP(**fits.training), prior=0.1),
        "Laplace, kron": _fit(laplace, start=True),
        "Laplace, kron, held-out": _fit(laplace, start=True, held_out=True),
        "TrainingFreeBayes": _fit(free, start=True),
        "TrainingFreeBayes, held-out": _fit(free, start=True, held_out=True),
        "SWAG": _fit(lambda fits: kn.SWAG(batch_size=64, snapshots=fits.recipe.epochs), start=True),
        "MeanFieldVI": _fit(lambda fits: kn.MeanFieldVI(**fits.training)),
        "MeanFieldVI, Normal(0.1)": _fit(lambda fits: kn.MeanFieldVI(**fits.training), prior=0.1),
        "NaturalVI": _fit(lambda fits: kn.NaturalVI(epochs=fits.recipe.epochs, batch_size=64)),
        "NaturalVI, Normal(0.1)": _fit(lambda fits: kn.NaturalVI(epochs=fits.recipe.epochs, batch_size=64), prior=0.1),
        "DeepEnsemble(3)": _fit(lambda fits: kn.DeepEnsemble(3, **fits.training)),
    }


def _made(method: Callable[..., Any], **settings: Any) -> Callable[[Fits], Any]:
    return lambda fits: method(**settings)


def score(posterior: Posterior, fits: Fits, outside: dict[str, Tensor]) -> dict[str, float]:
    """On test rows and on the other domain."""
    import knowable as kn

    samples = fits.recipe.samples
    inside = posterior.predict(fits.test[0], samples=samples)
    found = kn.evaluate(inside, fits.test[1])
    other = posterior.predict(outside, samples=samples)
    return {
        "accuracy": found["accuracy"],
        "nll": found["nll"],
        "ece": found["ece"],
        "auroc": kn.metrics.auroc(inside, other),
    }


# --- the study -------------------------------------------------------------------------------------------------------


@cache
def _text(recipe: Recipe, packages: tuple[str, ...]) -> Text:
    return Text(recipe, packages)


def run(*, quick: bool, only: str, rows: Rows) -> dict[str, Any]:
    """Every contender on every seed; what is finished is not run again."""
    recipe = _QUICK if quick else RECIPE
    packages = ("networkx", "safetensors") if quick else PACKAGES
    titles = [title for title in contenders() if fnmatch(title, only)]
    found: dict[str, dict[str, Any]] = {title: {} for title in titles}
    for seed in range(1 if quick else SEEDS):
        fits: Fits | None = None
        for title in titles:
            key = f"{title} {seed} {recipe}"
            row = rows.get(key)
            if row is None:
                fits = fits or Fits(_text(recipe, packages), seed)
                row = rows.add(key, _tried(title, fits, _text(recipe, packages).other_domain))
            say(f"{title}, seed {seed}: {row.get('error') or {k: round(v, 4) for k, v in row.items()}}")
            found[title][str(seed)] = row
    packages = ("knowable", "transformers", "peft")
    return describe("adapters", quick=quick, packages=packages, recipe=asdict(recipe), methods=found)


def _tried(title: str, fits: Fits, outside: dict[str, Tensor]) -> dict[str, Any]:
    if title not in (PLAIN, "MAP"):
        _ = fits.mode  # where a fit begins is not counted
    begun = time.process_time()
    found: dict[str, Any] = {}

    def fit() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the number of epochs is fixed, whether the loss has settled or not
            found["posterior"] = contenders()[title](fits)

    try:
        peak = peak_of(fit)
        scores = score(found["posterior"], fits, outside)
    except Exception as error:
        return {"error": one_line(error)}
    return {**scores, "seconds": time.process_time() - begun, "peak": peak}


def to_markdown(run: Mapping[str, Any]) -> str:
    """One table."""
    lines = [[title, *_cells(fits)] for title, fits in run["methods"].items()]
    recipe = run["recipe"]
    seeds = max((len(fits) for fits in run["methods"].values()), default=0)
    note = _NOTE.format(seeds=seeds, test=recipe["test"], draws=recipe["samples"])
    return page(run, table("LoRA adapters of a small GPT-2: which package is a docstring from?", _HEADER, lines, note))


def _cells(fits: Mapping[str, Mapping[str, Any]]) -> list[str]:
    good = [row for row in fits.values() if "error" not in row]
    if not good:
        return [f"failed: {next(iter(fits.values()))['error']}"] if fits else []
    means = [mean_and_error([row[name] for row in good]) for name in ("accuracy", "nll", "ece", "auroc")]
    seconds, peak = (sum(row[name] for row in good) / len(good) for name in ("seconds", "peak"))
    shown = [f"{mean:.3f}" if len(good) == 1 else f"{mean:.3f} ± {error:.3f}" for mean, error in means]
    return [*shown, f"{len(good)}", f"{seconds:.0f}", f"{peak:.0f}"]
