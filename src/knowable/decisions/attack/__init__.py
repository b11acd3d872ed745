"""Adversarial examples: attacks on a posterior's prediction, and what they do to its uncertainty (``kn.attack``)."""

from knowable.decisions.attack.attacks import fgsm, pgd, random_search
from knowable.decisions.attack.masking import MaskingReport, check_masking
from knowable.decisions.attack.robustness import Robustness, evaluate

__all__ = ["MaskingReport", "Robustness", "check_masking", "evaluate", "fgsm", "pgd", "random_search"]
