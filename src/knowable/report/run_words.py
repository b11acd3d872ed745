"""How to read the report of a run."""

READING = (
    (
        "Aleatoric uncertainty",
        "Noise in what is measured. More rows of the same kind would not remove it. In the figures it is blue.",
    ),
    (
        "Epistemic uncertainty",
        "The model's doubt about itself: several functions fit the rows it has seen, and here they disagree. More rows "
        "would remove it. In the figures it is orange. A single network has none, because it never considers that it "
        "may be wrong.",
    ),
    (
        "A 90% interval",
        "A range that should hold the outcome nine times in ten. Coverage counts how often it did on rows the fit has "
        "not seen.",
    ),
    (
        "A nat",
        "The unit of surprise. A row that was given twice the probability costs 0.69 nats less.",
    ),
    (
        "± one standard error",
        "Scores are averages over the held-out rows and would differ on others. A difference of less than two standard "
        "errors may be chance.",
    ),
)

ROWS_LEAD = (
    "Look here first when you decide what to trust. The most certain rows should be right; what the least certain ones "
    "have in common says which data would help."
)

INPUTS_LEAD = (
    "One input is changed at a time while the others stay as they are, for the inputs that matter most. Where the "
    "doubt rises there were few rows like these to learn from. Combinations that never occur are averaged over too, so "
    "read these curves with care where inputs move together."
)
