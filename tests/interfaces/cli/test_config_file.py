"""A file in place of flags."""

import json

import pytest

from knowable.errors import InvalidArgument
from knowable.interfaces.cli.options import Option, read_options
from tests.interfaces.cli.calling import call

KNOWN = [
    *(Option(name, name) for name in ("data", "target", "seed", "lenient")),
    *(Option(name, name, many=True) for name in ("kind", "drop")),
    Option("as_json", "json"),
]


def file(tmp_path, text, name="options.toml"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_toml_and_json_say_the_same(tmp_path):
    wanted = {"target": "y", "seed": 3, "drop": ["a", "b"], "lenient": True}
    toml = file(tmp_path, 'target = "y"\nseed = 3\ndrop = ["a", "b"]\nlenient = true\n')
    plain = file(tmp_path, json.dumps(wanted), "options.json")
    assert read_options(toml, KNOWN) == read_options(plain, KNOWN) == wanted


def test_options_go_by_their_flags_and_tables_become_pairs(tmp_path):
    path = file(tmp_path, 'json = true\n[kind]\nzip = "categorical"\nsize = "small<large"\n')
    assert read_options(path, KNOWN) == {"as_json": True, "kind": ["zip=categorical", "size=small<large"]}


def test_one_value_will_do_where_several_are_allowed(tmp_path):
    assert read_options(file(tmp_path, 'drop = "a"'), KNOWN) == {"drop": ["a"]}


def test_what_a_run_says_of_how_it_was_made_is_no_option(tmp_path):
    path = file(tmp_path, json.dumps({"seed": 1, "target": None, "made": {"knowable": "1"}}), "config.json")
    assert read_options(path, KNOWN) == {"seed": 1}


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "sed = 1", "Did you mean 'seed'"),
        ("a.toml", "qqqqq = 1", "The options are data, drop"),
        ("a.toml", "config = 'b.toml'", "no option"),
        ("a.toml", "seed = ", "not TOML"),
        ("a.json", "{", "not JSON"),
        ("a.json", "[1]", "names of options"),
        ("a.toml", "drop = [[1]]", "a value or a list"),
        ("a.toml", "seed = [1, 2]", "takes one value"),
    ],
)
def test_a_file_that_cannot_be_used_says_why(tmp_path, name, text, message):
    with pytest.raises(InvalidArgument, match=message):
        read_options(file(tmp_path, text, name), KNOWN)


def test_a_file_that_is_not_there_or_not_text_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="cannot be read"):
        read_options(tmp_path / "nothing.toml", KNOWN)
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match="UTF-8"):
        read_options(tmp_path / "bytes.toml", KNOWN)


def test_a_command_takes_its_options_from_the_file_and_flags_go_before_it(tmp_path, monkeypatch):
    from knowable.interfaces import demo

    seen = []
    monkeypatch.setattr(demo, "run_demo", lambda out, **options: seen.append((str(out), options)))
    path = file(tmp_path, 'seed = 5\nquick = true\nout = "there"\n')
    assert call("demo", "--config", path).exit_code == 0
    assert call("demo", "--seed", "7", "--config", path).exit_code == 0
    assert seen[0] == ("there", {"seed": 5, "quick": True, "quiet": False})
    assert seen[1] == ("there", {"seed": 7, "quick": True, "quiet": False})


def test_a_wrong_file_on_the_command_line_is_one_line_and_code_2(tmp_path):
    result = call("demo", "--config", file(tmp_path, "sed = 1"))
    assert result.exit_code == 2 and result.stdout == ""
    assert "Did you mean 'seed'?" in result.stderr and result.stderr.count("\n") == 1


def test_a_value_of_the_wrong_type_is_code_2(tmp_path):
    result = call("demo", "--config", file(tmp_path, 'seed = "many"'))
    assert result.exit_code == 2 and "seed" in result.stderr
