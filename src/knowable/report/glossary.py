"""Terms that every report explains."""

GLOSSARY = (
    ("Aleatoric uncertainty", "Noise in what is measured. More rows of the same kind would not remove it. In the "
     "figures it is blue."),
    ("Epistemic uncertainty", "Uncertainty about the model: several functions fit the training rows, and here they "
     "disagree. More rows would remove it. In the figures it is orange. A single network (maximum likelihood, MAP) has "
     "none, because it never considers that it may be wrong."),
    ("90% interval and coverage", "A range that should contain the outcome nine times in ten. Coverage is how often it "
     "did, on rows the fit has not seen. A calibrated method has the nominal coverage at every level: its calibration "
     "curve follows the diagonal."),
    ("NLL and nats", "The negative log predictive density (NLL) measures surprise, in nats. A row that was given twice "
     "the probability costs 0.69 nats less."),
    ("± one standard error", "Scores are averages over held-out rows and would differ on others. A difference of less "
     "than two standard errors may be chance."),
)  # fmt: skip
"""Pairs of a term and its explanation."""
