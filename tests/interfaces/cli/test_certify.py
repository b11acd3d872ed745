"""``knowable certify``: a certificate in the run, which the service answers with."""

import json

import knowable as kn
from tests.interfaces.cli.calling import call
from tests.interfaces.cli.tables import class_rows, number_rows, write_csv


def test_a_run_is_certified_on_rows_it_has_not_seen(runs):
    for name, rows in (("numbers", number_rows(100, seed=7)), ("classes", class_rows(100, seed=7))):
        file = write_csv(runs / "held.csv", rows)
        result = call("certify", runs / name, file, "--alpha", "0.2", "--json")
        assert result.exit_code == 0, result.stderr
        found = json.loads(result.stdout)
        estimator = kn.BayesianRegressor if name == "numbers" else kn.BayesianClassifier
        certificate = kn.load(runs / name / "certificate", estimator.load(runs / name).model_.net)
        assert [each["statement"] for each in found["guarantees"]] == [g.statement for g in certificate.guarantees]
        assert certificate.n == 100 and certificate.alpha == 0.2 and certificate.samples == 16
        again = call("certify", runs / name, file)
        assert again.exit_code == 2 and "already" in again.stderr
        printed = call("certify", runs / name, file, "--force")
        assert "alpha=0.1" in printed.stdout


def test_the_intervals_are_about_outcomes_in_their_unit(runs):
    """Of many rows drawn alike, a share of about 1 - alpha is inside, in the units of the file."""
    from knowable.interfaces.serve.rows import Ask, columns_of
    from knowable.interfaces.serve.served import Served, Source

    call("certify", runs / "numbers", write_csv(runs / "held.csv", number_rows(300, seed=8)), "-q")
    served = Served.load(Source(runs / "numbers"))
    new = number_rows(400, seed=9)
    rows = [{**row, "dose": float(row["dose"]) if row["dose"] else None} for row in new]
    (answer,) = served.answer([Ask("predict", columns_of(rows, served.about), len(rows))])
    inside = [
        low <= float(row["response"]) <= high
        for row, (low, high) in zip(new, (p["certified_interval"] for p in answer["predictions"]), strict=True)
    ]
    spread = (0.09 / 150 + 0.09 / 400) ** 0.5  # half of the held-out rows make the intervals
    assert abs(sum(inside) / 400 - 0.9) < 5 * spread


def test_rows_of_the_training_are_refused(runs):
    result = call("certify", runs / "numbers", runs / "numbers.csv")
    assert result.exit_code == 2 and "train" in result.stderr, result.stderr
    assert not (runs / "numbers" / "certificate").exists()
