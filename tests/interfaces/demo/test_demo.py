"""The demonstration as a whole: it writes its report and nothing else."""

import pytest
import torch

from knowable.errors import InvalidArgument, InvalidType
from knowable.interfaces.demo import demo as run
from knowable.interfaces.demo import run_demo
from knowable.report import Report

FEW = {"Maximum likelihood", "MAP", "Laplace", "Deep ensemble"}


@pytest.fixture
def tiny(monkeypatch):
    """Make both sizes and the lists of methods so small that they take a second or two."""
    for problem in (run.motorcycle, run.digits):
        few = {name: each for name, each in problem.methods(2).items() if name in FEW}
        monkeypatch.setattr(problem, "methods", lambda epochs, few=few: few)
    monkeypatch.setattr(run, "FULL", run.Size(folds=2, motorcycle_epochs=3, digits_epochs=2))
    monkeypatch.setattr(run, "QUICK", run.Size(folds=2, motorcycle_epochs=2, digits_epochs=2))


@pytest.fixture
def no_fitting(monkeypatch):
    """Skip the fits."""
    monkeypatch.setattr(run, "make_report", lambda **_: Report("t", "l"))


@pytest.mark.usefixtures("tiny")
def test_the_report_has_both_problems_what_to_do_the_reading_and_the_citations():
    report = run.make_report(seed=0, size=run.FULL, quiet=True)
    assert [section.tables[0].title for section in report.sections[:-1]] == [
        "Motorcycle, 40 measurements to learn from, 93 held out, in units of g",
        "Digits, 100 to learn from, 1,078 held out",
    ]
    assert report.sections[-1].title == "What to do now"
    assert "knowable fit data.csv --target COLUMN" in report.sections[-1].findings[-1]
    assert {"Aleatoric uncertainty", "Epistemic uncertainty"} <= {term for term, _ in report.reading}
    names = [citation.name for citation in report.citations]
    assert names[-2:] == ["The motorcycle data", "The digits data"]
    assert len({citation.bibtex for citation in report.citations}) == len(names)
    assert not any(notice.source == "Quick run" for notice in report.notices)


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_a_quick_run_says_that_it_is_rough_and_is_silent_when_asked(tmp_path, capsys):
    threads = torch.get_num_threads()
    path = run_demo(tmp_path / "out", seed=1, quick=True, quiet=True)
    assert path == tmp_path / "out" / "report.html"
    assert "Training was cut short" in path.read_text(encoding="utf-8")
    assert [each.name for each in path.parent.iterdir()] == ["report.html"]
    assert capsys.readouterr() == ("", "")
    assert torch.get_num_threads() == threads


@pytest.mark.usefixtures("no_fitting")
def test_an_earlier_report_is_replaced_and_other_files_stay(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    first = run_demo(tmp_path, quiet=True)
    first.write_text(first.read_text(encoding="utf-8") + "<!-- old -->", encoding="utf-8")
    assert "<!-- old -->" not in run_demo(tmp_path, quiet=True).read_text(encoding="utf-8")
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.usefixtures("no_fitting")
def test_a_report_of_somebody_else_is_not_overwritten(tmp_path):
    (tmp_path / "report.html").write_text("<html>the year's accounts</html>")
    with pytest.raises(InvalidArgument, match="not written by knowable"):
        run_demo(tmp_path, quiet=True)
    assert "accounts" in (tmp_path / "report.html").read_text()


@pytest.mark.usefixtures("no_fitting")
def test_a_file_in_place_of_the_folder_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidArgument, match="is a file"):
        run_demo(tmp_path / "file", quiet=True)


@pytest.mark.usefixtures("no_fitting")
@pytest.mark.parametrize(("number", "error"), [(-1, InvalidArgument), (0.5, InvalidType)])
def test_an_impossible_seed_is_refused_before_any_work(number, error, tmp_path):
    with pytest.raises(error, match="seed"):
        run_demo(tmp_path, seed=number)
    assert list(tmp_path.iterdir()) == []
