"""Functions and classes of a user's file: how they are found, and what is said if they are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.core.errors import ConfigError
from agentrl.core.plugins import copy_plugins, is_plugin, load_plugin, plugin_copies, resolve_plugin

FLAG = "--policy-loss"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text("from neighbour import LIMIT\n\ndef first():\n    return LIMIT\n\ndef second():\n    return first\n")
    (tmp_path / "neighbour.py").write_text("LIMIT = 7\n")
    return path


def refusal(spec: str) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_plugin(FLAG, spec)
    assert caught.value.field == FLAG
    assert caught.value.value == spec
    return caught.value


def test_a_name_with_a_file_is_a_plugin() -> None:
    assert is_plugin("own.py:loss")
    assert is_plugin("own.py")
    assert not is_plugin("group_norm")


def test_two_names_of_a_file_share_its_module(file: Path) -> None:
    first = load_plugin(FLAG, f"{file}:first")
    assert first() == 7
    assert load_plugin("--advantage-estimator", f"{file}:second")() is first


def test_a_changed_file_is_imported_again(file: Path) -> None:
    load_plugin(FLAG, f"{file}:first")
    file.write_text("def first():\n    return 8\n")
    assert load_plugin(FLAG, f"{file}:first")() == 8


def test_the_resolved_form_has_an_absolute_path(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(file.parent)
    assert resolve_plugin(FLAG, "own.py:first") == f"{file.resolve()}:first"


def test_a_missing_file_is_named_with_a_similar_one(file: Path) -> None:
    error = refusal(f"{file.parent}/owm.py:first")
    assert error.problem == "there is no such file"
    assert error.remedy == "Did you mean own.py?"


def test_a_missing_file_without_a_similar_one_says_where_it_was_looked_for(tmp_path: Path) -> None:
    assert refusal(f"{tmp_path}/zzz.py:first").remedy == f"Looked for {tmp_path}/zzz.py."


def test_a_missing_name_is_named_with_a_similar_one(file: Path) -> None:
    error = refusal(f"{file}:frist")
    assert error.problem == f"there is no 'frist' in {file.resolve()}"
    assert error.remedy == "Did you mean first?"


@pytest.mark.parametrize("value", ["own.py", "own:first", "own.py:", "own.py:a b"])
def test_another_form_is_refused(value: str) -> None:
    assert refusal(value).problem == "is not of the form file.py:name"


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        ("x = 1\nraise ValueError('no weights')\n", "ValueError: no weights (", "Correct the file."),
        ("import nowhere_to_be_found\n", "ModuleNotFoundError", "Install the package that provides 'nowhere_to_be_found'."),
        ("def f(:\n", "line 1", "Correct the file."),
    ],
)
def test_an_error_in_the_file_names_its_place(tmp_path: Path, text: str, problem: str, remedy: str) -> None:
    path = tmp_path / "broken.py"
    path.write_text(text)
    error = refusal(f"{path}:f")
    assert problem in error.problem
    assert str(path) in error.problem
    assert error.remedy == remedy


def test_each_file_is_copied_once_into_the_run_directory(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "own.py"
    other.parent.mkdir()
    other.write_text("def f(): ...\n")
    specs = [f"{file}:first", f"{file}:second", f"{other}:f"]
    copy_plugins(specs, tmp_path / "run")
    copies = plugin_copies(specs, tmp_path / "run")
    assert {source: copy.read_text() for source, copy in copies.items()} == {file: file.read_text(), other: other.read_text()}
    assert len(list((tmp_path / "run" / "plugins").iterdir())) == 2


def test_the_copy_is_of_the_last_beginning_of_the_run(file: Path, tmp_path: Path) -> None:
    copy_plugins([f"{file}:first"], tmp_path / "run")
    file.write_text("changed = True\n")
    copy_plugins([f"{file}:first"], tmp_path / "run")
    assert (tmp_path / "run" / "plugins" / "own.py").read_text() == "changed = True\n"
