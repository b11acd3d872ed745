"""Files as people have them: what each value is read as, and what the user is told."""

from __future__ import annotations

import gzip
import io
import re

import numpy as np
import pytest

import knowable as kn
from knowable.tabular import read_table
from knowable.tabular.schema import Schema
from tests.interfaces.cli.calling import call
from tests.interfaces.cli.tables import number_rows, read_csv, write_csv

FAST = ("--method", "map", "--budget", "quick", "--samples", "8", "--out", "run", "-q")


def table(text: str, encoding: str = "utf-8"):
    return read_table(io.BytesIO(text.encode(encoding)))


def column(*values: str, delimiter: str = ";"):
    return table(f"a{delimiter}b\n" + "".join(f'"{value}"{delimiter}x\n' for value in values))


READ = {
    "percent": (["12%", "3.5 %"], [12.0, 3.5], "has percent signs: '12%' is read as 12"),
    "percent with a decimal comma": (["12,5%", "3%"], [12.5, 3.0], "percent"),
    "dollars": (["$1,200.50", "-$3.00", "($4.00)"], [1200.5, -3.0, -4.0], r"currency \(\$\)"),
    "euros": (["1.234,50 €", "2,00 €"], [1234.5, 2.0], "currency \\(€\\)"),
    "a currency by its code": (["USD 5", "7"], [5.0, 7.0], r"currency \(USD\)"),
    "thousands": (["1,234,567", "12"], [1234567.0, 12.0], None),
    "thousands with spaces": (["1 234,5", "12,0"], [1234.5, 12.0], None),
    "thousands with apostrophes": (["1'234.5", "12.0"], [1234.5, 12.0], None),
    "decimal commas": (["0,5", "1,25"], [0.5, 1.25], None),
    "three digits behind every mark": (["1,234", "2,345"], [1.234, 2.345], "is ambiguous: '1,234' is read as 1.234"),
}


@pytest.mark.parametrize(("texts", "numbers", "told"), READ.values(), ids=READ)
def test_numbers_are_read_as_what_they_are(texts, numbers, told):
    found = column(*texts)
    assert found.column("a").tolist() == numbers
    if told is None:
        assert found.notes == ()
    else:
        (note,) = found.notes
        assert note.startswith("column 'a'")
        assert re.search(told, note)


@pytest.mark.parametrize("texts", [["10%", "5"], ["$5", "€5"], ["1,23,4", "5"], ["12.34.56", "1"]])
def test_what_is_not_one_kind_of_number_stays_text(texts):
    assert column(*texts).column("a").tolist() == texts


def test_other_columns_of_the_file_decide_what_a_comma_is():
    assert table("a;b\n1.234;0,5\n2.345;1,5\n").column("a").tolist() == [1234, 2345]
    assert table("a;b\n1.234;0.5\n2.345;1.5\n").column("a").tolist() == [1.234, 2.345]


def seconds(text: str) -> float:
    return float((np.datetime64(text) - np.datetime64("1970-01-01")) / np.timedelta64(1, "s"))


DATES = {
    "day first, told by the column": (["03/04/2021", "25/12/2021"], "2021-04-03", "day first, told from line 3"),
    "month first, told by the column": (["03/04/2021", "12/25/2021"], "2021-03-04", "month first, told from line 3"),
    "ambiguous": (["03/04/2021", "05/06/2021"], "2021-04-03", "none that tells day from month"),
    "dots and two digits": (["03.04.21", "25.12.21"], "2021-04-03", "day first"),
}


@pytest.mark.parametrize(("texts", "first", "told"), DATES.values(), ids=DATES)
def test_the_whole_column_decides_which_of_day_and_month_is_first(texts, first, told):
    found = column(*texts)
    schema = Schema.learn(found.without(["b"]), None)
    (date,) = schema.columns
    assert date.kind == "date"
    assert any(told in note for note in schema.notes), schema.notes
    # centred and scaled seconds: two dates are 1 and -1 scales from their mean
    low, high = sorted(map(seconds, (first, "2021-06-05" if told.startswith("none") else "2021-12-25")))
    assert (date.centre, date.scale) == ((low + high) / 2, (high - low) / 2)
    again = Schema.from_json(schema.to_json())  # the decision holds for new rows that do not tell
    assert again.columns[0].encode(column("03/04/2021"))[0, 0] == schema.columns[0].encode(found)[0, 0]


def test_days_and_months_in_turns_are_refused_with_both_lines():
    with pytest.raises(kn.InvalidData, match=r"line 2, column 'a': '25/12/2021' has the day first, and .*line 3"):
        Schema.learn(column("25/12/2021", "12/25/2021"), None)


ENCODED = {
    "latin-1": ("latin-1", "is read as Latin-1 (line 3 has 'Zürich')"),
    "utf-16": ("utf-16", None),
    "a byte order mark": ("utf-8-sig", None),
}


@pytest.mark.parametrize(("encoding", "told"), ENCODED.values(), ids=ENCODED)
def test_other_encodings_are_read(encoding, told):
    found = table("a,b\n1,x\n2,Zürich\n\n\n", encoding)
    assert found.names == ("a", "b") and found.column("b").tolist() == ["x", "Zürich"]
    assert (found.notes == ()) if told is None else (told in found.notes[0])


def test_compressed_files_are_read_and_damaged_ones_refused(tmp_path):
    path = tmp_path / "data.csv.gz"
    path.write_bytes(gzip.compress(b"a,b\n1,x\n2,y\n"))
    assert read_table(path).column("a").tolist() == [1, 2]
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(kn.InvalidData, match="damaged gzip"):
        read_table(path)


def test_an_excel_file_is_read_or_the_extra_is_named(tmp_path):
    path = tmp_path / "data.xlsx"
    try:
        import openpyxl
    except ImportError:
        path.write_bytes(b"PK\x03\x04" + bytes(50))
        with pytest.raises(kn.MissingExtra, match=r"pip install 'knowable\[excel\]'"):
            read_table(path)
        return
    book = openpyxl.Workbook()
    for row in (["a", "b"], [1.5, "x"], [None, None], [2.5, "y"]):
        book.active.append(row)
    book.create_sheet("more")
    book.save(path)
    found = read_table(path)
    assert found.column("a").tolist() == [1.5, 2.5] and found.lines == [2, 4]
    assert "only the first sheet" in found.notes[0]
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(kn.InvalidData, match="not a readable Excel workbook"):
        read_table(path)


def test_codes_and_identifiers_are_asked_about_with_the_option_that_changes_it():
    rows = 30
    text = "".join(f"{i + 1},{-999 if i % 10 == 3 else i * 7 % 40},{i % 11},x\n" for i in range(rows))
    schema = Schema.learn(table("id,age,n,same\n" + text), None)
    said = "\n".join(schema.notes)
    assert "'age' has -999 in lines 5, 15, 25" in said and "--missing -999" in said
    assert "--id id" in said and "'same' is left out: it is the same in every row" in said and "'n'" not in said
    cleaned = table("id,age,n,same\n" + text).with_missing(["-999"])
    assert cleaned.column("age").isna().sum() == 3
    assert "-999" not in "\n".join(Schema.learn(cleaned, None).notes)


def test_a_new_category_is_never_narrower_than_the_known_ones_on_average():
    # law of total variance, exact for the shares of the 16 quantiles: shares of 1/2 and 1/4 are
    frame = {"city": ["a", "b", "b", "c"] * 10, "x": [float(i % 7) for i in range(40)]}
    y = np.array([{"a": 0.0, "b": 1.0, "c": 5.0}[city] for city in frame["city"]]) + np.arange(40) % 3
    model = kn.BayesianRegressor(kn.Laplace(epochs=200), random_state=0).fit(frame, y)
    with pytest.warns(kn.UnseenCategory, match=r"'z' \(1 row: row 0\)"):
        new = model.predict_dist({"city": ["z", "a"], "x": [2.0, 2.0]})
    known = model.predict_dist({"city": ["a", "b", "c", "a"], "x": [2.0] * 4})
    share = np.array([0.25, 0.5, 0.25])
    mean, variance = (each.flatten().numpy()[:3] for each in (known.mean, known.variance))
    assert float(new.mean[0]) == pytest.approx(share @ mean, rel=1e-5)
    assert float(new.variance[0]) == pytest.approx(share @ (variance + mean**2) - (share @ mean) ** 2, rel=1e-5)
    assert float(new.std[0]) > float(known.std.mean())
    assert float(new.mean[1]) == pytest.approx(float(known.mean[0]), rel=1e-6)  # a known one beside it is as before
    assert float(new.std[1]) == pytest.approx(float(known.std[0]), rel=1e-6)


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"id": f"P{i}", "clinic": f"c{i % 8}", **row} for i, row in enumerate(number_rows(60))]
    return write_csv(tmp_path / "data.csv", rows)


def test_identifiers_are_carried_into_predictions_and_codes_stay_missing(here):
    rows = read_csv(here)
    rows[4]["dose"] = "-999"
    write_csv(here, rows)
    result = call("fit", here, "-t", "response", "--id", "id", "--missing", "-999", *FAST)
    assert result.exit_code in (0, 3), result.stderr
    assert "id" not in [column["name"] for column in kn.BayesianRegressor.load("run").schema_.to_json()["columns"]]
    assert call("predict", "run", here, "--out", "out.csv", "-q").exit_code == 0
    found = read_csv(here.parent / "out.csv")
    assert [row["id"] for row in found] == [row["id"] for row in rows] and list(found[0])[:2] == ["line", "id"]
    rows[4]["dose"] = ""
    write_csv(here, rows)
    assert call("predict", "run", here, "--out", "same.csv", "-q").exit_code == 0
    assert read_csv(here.parent / "same.csv") == found


@pytest.mark.slow
def test_the_model_in_the_run_has_seen_all_rows_and_the_report_says_so(here):
    arguments = ("fit", here, "-t", "response", "--drop", "id", "--method", "map", "--budget", "quick")
    result = call(*arguments, "--out", "run")
    assert "a second fit, to all 60 rows (--no-refit" in result.stderr
    assert "the run has the same model fitted to all 60 rows" in result.stdout
    assert "refitted to all 60 rows" in (here.parent / "run" / "report.html").read_text()
    assert kn.BayesianRegressor.load("run").schema_.rows == 60
    call(*arguments, "--out", "once", "--no-refit")
    assert kn.BayesianRegressor.load("once").schema_.rows == 48
    scores = [(here.parent / name / "scores.json").read_text() for name in ("run", "once")]
    assert scores[0] == scores[1]  # of the same model


def test_whole_groups_and_the_latest_rows_are_held_out(here):
    from knowable.interfaces.cli.training_table import divide, folds_of, read_training

    table = read_training(str(here), "response", drop=["id"], group="clinic")
    assert "clinic" not in table.inputs.columns
    groups = np.array([row["clinic"] for row in read_csv(here)])
    splits = [divide(table.outcomes, 0.25, classes=False, seed=0, groups=table.groups), *folds_of(table, 4, seed=0)]
    for training, held in splits:
        assert not set(groups[training]) & set(groups[held]) and len(training) + len(held) == 60
    assert sorted(np.concatenate([held for _, held in splits[1:]])) == list(range(60))
    timed = read_training(str(here), "response", drop=["id"], time="day")
    days = np.array([row["day"] for row in read_csv(here)], dtype="datetime64[D]")
    training, held = divide(timed.outcomes, 0.25, classes=False, seed=0, times=timed.times)
    assert days[training].max() < days[held].min() and len(held) == pytest.approx(15, abs=2)
    for training, held in folds_of(timed, 3, seed=0):
        assert days[training].max() < days[held].min()
