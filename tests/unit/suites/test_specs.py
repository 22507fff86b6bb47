"""What specifications of suites have in common."""

import logging
import sys
from pathlib import Path

import pytest

from agentrl.core.errors import EnvLoadError
from agentrl.suites.load import load_agent
from agentrl.suites.specs import check_known, import_suite, refused, split_spec, take_count


def test_options_are_literals_or_text() -> None:
    assert split_spec("x:a:b?n=3&size=(6, 6)&name=big map&flag=False&empty=") == (
        "a:b",
        {"n": 3, "size": (6, 6), "name": "big map", "flag": False, "empty": ""},
    )
    assert split_spec("x:") == ("", {})


@pytest.mark.parametrize("value", [0, -1, 1.5, "many", True])
def test_a_count_is_a_whole_number_from_1(value: object) -> None:
    with pytest.raises(EnvLoadError, match="num_tasks"):
        take_count("x:y", {"num_tasks": value}, "num_tasks")


@pytest.mark.parametrize(
    ("spec", "module", "extra"),
    [("reasoning-gym:x", "reasoning_gym", "reasoning-gym"), ("textarena:x", "textarena", "textarena"), ("gem:x", "gem", "gem")],
)
def test_a_missing_package_is_named_with_its_extra(spec: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == module]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(EnvLoadError) as caught:
        load_agent(spec)
    assert f"pip install 'agentrl[{extra}]'" in caught.value.remedy
    assert module in caught.value.problem


def test_a_package_does_not_set_up_logging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "talkative.py").write_text("import logging\nlogging.basicConfig(level=1, force=True)")
    monkeypatch.syspath_prepend(tmp_path)
    root = logging.getLogger()
    before = list(root.handlers), root.level
    import_suite("x:y", "talkative", "x")
    assert (list(root.handlers), root.level) == before


@pytest.mark.parametrize(("name", "hint"), [("Sudok-v0", "Sudoku-v0"), ("hanoi", "TowerOfHanoi-v0"), ("zzz", "Sudoku-v0")])
def test_an_unknown_name_is_answered_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(EnvLoadError, match=f"Did you mean .*{hint}") as caught:
        check_known("x:y", "Suite", name, ["Sudoku-v0", "TowerOfHanoi-v0"])
    assert repr(name) in caught.value.problem


def test_a_long_exception_is_cut_and_a_missing_word_list_has_a_command() -> None:
    assert len(str(refused("x:y", "it", ValueError("a\n" * 5000), "Try."))) < 500
    assert "python -m nltk.downloader words" in str(refused("x:y", "it", LookupError("***\n >>> nltk.download('words')\n***"), "Try."))
