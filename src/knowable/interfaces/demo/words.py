"""What the report of the demonstration says around its numbers."""

TITLE = "Do you know what you don't know?"

LEAD = (
    "Several ways to fit the same networks to real data, and what each says about its own certainty. Every score is "
    "on data the fit has not seen."
)

READING = (
    (
        "Aleatoric uncertainty",
        "Noise in what is measured. More data of the same kind would not remove it. In the figures it is blue.",
    ),
    (
        "Epistemic uncertainty",
        "The model's doubt about itself: many networks fit the data, and here they disagree. More data would remove "
        "it. In the figures it is orange. A single network (maximum likelihood, MAP) has none, because it never "
        "considers that it may be wrong.",
    ),
    (
        "A 90% interval",
        "A range that should hold the outcome nine times in ten. Coverage counts how often it did. An honest method "
        "keeps its promise at every level, which is a curve along the diagonal.",
    ),
    (
        "Standard errors and ties",
        "Scores are averages over few rows and would differ on others. A difference smaller than the standard "
        "errors is no difference.",
    ),
    (
        "The methods",
        "Maximum likelihood takes the weights that fit best. MAP does the same but holds them near the prior. "
        "Mean-field variational inference keeps a distribution over every weight and averages over it. Exact linear "
        "regression has a closed form and needs no approximation, but only a linear model.",
    ),
    (
        "What this is not",
        "Two small problems, so that all of it runs in a minute or two. It shows how to look at uncertainty, not which "
        "method is best for you.",
    ),
)
