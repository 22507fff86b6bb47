"""The list of planted bugs fits the code, so that ``make mutants`` can plant every one."""

from __future__ import annotations

from tests.mutants import ROOT, WITHOUT_BEHAVIOUR, read_mutants, uncovered


def test_every_bug_can_be_planted_and_its_tests_exist() -> None:
    mutants = read_mutants()
    assert len({str(mutant) for mutant in mutants}) == len(mutants) >= 450
    for mutant in mutants:
        text = (ROOT / mutant.file).read_text(encoding="utf-8")
        assert mutant.planted(text) != text
        assert all((ROOT / path.partition("::")[0]).is_file() for path in mutant.tests), mutant


def test_no_file_that_decides_what_is_learned_is_without_a_bug() -> None:
    mutants = read_mutants()
    assert uncovered(mutants) == []
    assert "agentrl/algo/kl.py" in uncovered([mutant for mutant in mutants if mutant.file != "agentrl/algo/kl.py"])


def test_files_without_behaviour_hold_neither_functions_nor_classes() -> None:
    for name in WITHOUT_BEHAVIOUR:
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        assert not [line for line in lines if line.lstrip().startswith(("def ", "class ", "async def "))], name
