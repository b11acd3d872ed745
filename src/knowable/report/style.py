"""One colour scheme for all figures, safe for colour-blind readers (Okabe and Ito, 2008), and the fonts' sizes."""

from __future__ import annotations

INK = "#1a1a1a"
MUTED = "#595959"
GRID = "#d9d9d9"
ALEATORIC = "#56b4e9"  # sky blue: noise in the data
EPISTEMIC = "#d55e00"  # vermilion: doubt of the model
ALEATORIC_BAND = "#c1e2f7"  # the same, paler, behind lines and points
EPISTEMIC_BAND = "#f0a878"
MEAN = "#0b3d62"
DATA = "#333333"

SERIES = (
    # colour, line style, marker: told apart without colour too
    ("#0072b2", "-", "o"),
    ("#d55e00", "--", "s"),
    ("#009e73", "-.", "^"),
    ("#cc79a7", ":", "D"),
    ("#8a6d00", "-", "v"),
    ("#333333", "--", "P"),
)

RC = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "axes.labelsize": 10,
    "axes.titlesize": 10,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "svg.fonttype": "path",
    "svg.hashsalt": "knowable",
    "figure.facecolor": "white",
    "text.parse_math": False,  # a "$" in a label is a "$"
}
