"""The list of planted bugs fits the code, so that ``make mutants`` can plant every one; picked tests judge as all tests do."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutants.__main__ import caught_before, main, plant
from tests.mutants.bugs import PIECES, ROOT, WITHOUT_BEHAVIOUR, Mutant, part, read_mutants, uncovered
from tests.mutants.copies import BrokenTests
from tests.mutants.picks import Record, changed_lines, pick
from tests.mutants.swap import NotSwappable, functions_of, swap

SHOP = """\
RATE = 2


def price(number):
    return number * RATE


def label(number):
    # a comment
    if number == 1:
        return "one piece"
    else:
        return (
            f"{number} "
            "pieces"
        )


def quiet():
    return 0


def first():
    return 1


def elsewhere():
    return 5
"""
TESTS = """\
import subprocess
import sys

import pytest
import shop

done = []


@pytest.fixture(scope="module")
def labels():
    return [shop.label(1), shop.label(2)]


def test_one(labels):
    assert labels[0] == "one piece"


def test_two(labels):
    assert labels[1] == "2 pieces"


def test_price():
    assert shop.price(2) == 4


def test_quiet():
    shop.quiet()
    shop.elsewhere()
    done.append(1)


def test_after_quiet():
    assert shop.first() in done


def test_elsewhere():
    assert subprocess.check_output([sys.executable, "-c", "import shop; print(shop.elsewhere())"]) == b"5\\n"
"""
CONFTEST = """\
import re
from pathlib import Path

def pytest_runtest_setup(item):
    bug = re.search("# bug ([a-z]+)", Path("shop.py").read_text())
    with open({ran!r}, "a") as file:
        file.write(f"{{bug[1] if bug else 'none'}} {{item.name}}\\n")
"""
BUGS = {
    "picked": ("return number * RATE", "return number + RATE + 1"),
    "fixture": ('"pieces"\n        )', '"parts"\n        )'),
    "constant": ("RATE = 2", "RATE = 3"),
    "survivor": ("return 0", "return 1"),
    "process": ("return 5", "return 6"),
    "order": ("return 1\n", "return 0 + 1\n"),
    "unreadable": ("return 5", "return ("),
}
"""Names of bugs of `SHOP`, and the text that each replaces by another."""


def shop_bug(name: str) -> Mutant:
    old, new = BUGS[name]
    return Mutant("shop.py", old, f"{new.rstrip()}  # bug {name}\n", ("tests/test_shop.py",))


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A project with tests of their own kinds, and a file with the tests that ran for each bug."""
    folder = tmp_path_factory.mktemp("shop")
    (folder / "project" / "tests").mkdir(parents=True)
    (folder / "project" / "shop.py").write_text(SHOP)
    (folder / "project" / "tests" / "test_shop.py").write_text(TESTS)
    (folder / "project" / "conftest.py").write_text(CONFTEST.format(ran=str(folder / "ran")))
    (folder / "project" / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return folder


@pytest.fixture(scope="module")
def survivors(shop: Path) -> list[Mutant]:
    bugs = [shop_bug(name) for name in BUGS]
    return plant(bugs, workers=2, results=shop / "results", root=shop / "project", libraries=())


def ran(shop: Path, bug: str) -> list[str]:
    """Return the tests that ran with a bug, in their order."""
    return [line.partition(" ")[2] for line in (shop / "ran").read_text().splitlines() if line.startswith(f"{bug} ")]


def test_only_tests_that_execute_a_changed_line_are_run(shop: Path, survivors: list[Mutant]) -> None:
    assert ran(shop, "picked") == ["test_price"]
    assert shop_bug("picked") not in survivors


def test_lines_of_a_shared_fixture_are_those_of_every_test_that_has_it(shop: Path, survivors: list[Mutant]) -> None:
    assert ran(shop, "fixture")[-1] == "test_two"
    assert set(ran(shop, "fixture")) <= {"test_one", "test_two"}
    assert shop_bug("fixture") not in survivors


def test_a_bug_in_a_line_of_the_module_meets_every_test_of_its_group(shop: Path, survivors: list[Mutant]) -> None:
    assert ran(shop, "constant")[-1] == "test_price"
    assert shop_bug("constant") not in survivors


def test_survivors_are_tried_again_with_the_whole_group(shop: Path, survivors: list[Mutant]) -> None:
    group = re.findall(r"def (test_\w+)", TESTS)
    assert ran(shop, "survivor") == ["test_quiet", *group]
    assert survivors == [shop_bug("survivor"), shop_bug("order")]


def test_a_bug_that_only_another_process_executes_is_noticed(shop: Path, survivors: list[Mutant]) -> None:
    assert ran(shop, "process")[0] == "test_quiet"
    assert ran(shop, "process")[-1] == "test_elsewhere"


def test_a_picked_test_that_fails_without_the_bug_too_catches_nothing(shop: Path, survivors: list[Mutant]) -> None:
    assert ran(shop, "order") == ["test_after_quiet", *re.findall(r"def (test_\w+)", TESTS)]


def test_results_are_lines_of_json_and_caught_bugs_are_skipped(shop: Path, survivors: list[Mutant]) -> None:
    results = [json.loads(line) for line in (shop / "results").read_text().splitlines()]
    assert sorted(result["id"] for result in results) == sorted(str(shop_bug(name)) for name in BUGS)
    assert {result["id"] for result in results if result["outcome"] == "failed"} == {str(bug) for bug in survivors}
    assert all(result["seconds"] > 0 for result in results)
    assert caught_before(shop / "results") == {str(shop_bug(name)) for name in BUGS.keys() - {"survivor", "order"}}
    assert caught_before(shop / "none") == set()


def test_tests_that_fail_without_a_bug_are_named(shop: Path, tmp_path: Path) -> None:
    bug = Mutant("shop.py", "return 0", "return 1", ("tests/test_shop.py",))
    (tmp_path / "tests").mkdir()
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "tests" / "test_shop.py").write_text("def test_it():\n    assert False\n")
    with pytest.raises(BrokenTests, match=r"^tests/test_shop\.py::test_it$"):
        plant([bug], workers=1, results=None, root=tmp_path, libraries=())


def test_tests_that_cannot_be_collected_are_shown(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "shop.py").write_text(SHOP)
    (tmp_path / "tests" / "test_shop.py").write_text("import shop\n\nshop.none\n")
    with pytest.raises(RuntimeError, match=r"(?s)ended with 2.*ERROR tests/test_shop\.py - AttributeError"):
        plant([shop_bug("survivor")], workers=1, results=None, root=tmp_path, libraries=())


def test_nothing_is_planted_where_every_bug_has_been_caught(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [json.dumps({"id": str(mutant), "outcome": "passed", "seconds": 0.1}) for mutant in read_mutants()]
    (tmp_path / "results").write_text("\n".join(lines))
    assert main(["--skip", str(tmp_path / "results")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 mutants, 0 caught, 0 survived"


@pytest.mark.parametrize("words", ["0/3", "4/3", "1", "a/b"])
def test_a_part_that_is_none_is_refused(words: str) -> None:
    with pytest.raises(SystemExit):
        main(["--part", words])


@pytest.mark.parametrize(("count", "size"), [(1, 2000), (7, 2000), (20, 2000), (9, 5)])
def test_the_parts_together_have_every_bug_once(count: int, size: int) -> None:
    mutants = read_mutants()[:size]
    parts = [part(mutants, number, count) for number in range(1, count + 1)]
    assert sorted(str(mutant) for each in parts for mutant in each) == sorted(str(mutant) for mutant in mutants)
    assert max(map(len, parts)) - min(map(len, parts)) <= PIECES
    assert [part(mutants, number, count) for number in range(1, count + 1)] == parts


def test_parts_seldom_share_a_list_of_tests() -> None:
    mutants, count = read_mutants(), 20
    lists = [{mutant.tests for mutant in part(mutants, number, count)} for number in range(1, count + 1)]
    assert sum(map(len, lists)) <= len({mutant.tests for mutant in mutants}) + PIECES * count


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ("RATE = 2", "RATE = 3", {1}),
        ("number * RATE", "number", {5}),
        ("    # a comment\n", "", {8, 9}),
        ("if number == 1:", "if True:", {10}),
        ("    else:\n", "    elif True:\n", {10, 12}),
        ('"pieces"', '"parts"', {13, 14, 15, 16}),
        ("def quiet():\n    return 0\n", "def quiet():\n    return 1\n", {20}),
        ("return 1\n\n\ndef elsewhere():\n    return 5", "return 2\n\n\ndef elsewhere():\n    return 6", {24, 25, 26, 27, 28}),
    ],
)
def test_a_changed_statement_has_all_its_lines(old: str, new: str, lines: set[int]) -> None:
    assert changed_lines(SHOP, Mutant("shop.py", old, new, ())) == lines


def record() -> Record:
    """Two tests that execute line 5 of the shop, one of them with a fixture that takes long, and one that does not."""
    result = {
        "seconds": {"": 1.0, "tests/a.py::slow": 0.1, "tests/a.py::other": 0.0, "tests/b.py::fast[x]": 0.2, "fixture model": 2.0},
        "fixtures": {"tests/a.py::slow": ["fixture model"], "tests/a.py::other": [], "tests/b.py::fast[x]": []},
        "lines": {"shop.py": {5: ["fixture model", "tests/b.py::fast[x]"], 24: [""]}},
    }
    made = Record(imported={"shop.py": [1, 4]})
    made.add(result)
    return made


def test_tests_that_execute_a_changed_line_are_picked_the_fastest_first() -> None:
    bug = Mutant("shop.py", "number * RATE", "number", ("tests/a.py", "tests/b.py::fast"))
    picked = pick(bug, SHOP, record())
    assert list(picked.limits_s) == ["tests/b.py::fast[x]", "tests/a.py::slow"]
    assert picked.limits_s["tests/a.py::slow"] > picked.limits_s["tests/b.py::fast[x]"] > 2.0
    assert picked.in_memory
    alone = pick(Mutant("shop.py", "number * RATE", "number", ("tests/b.py::fast",)), SHOP, record())
    assert list(alone.limits_s) == ["tests/b.py::fast[x]"]


@pytest.mark.parametrize(("old", "at_import"), [("RATE = 2", True), ("return 1\n", False)])
def test_lines_that_no_test_executes_by_itself_have_the_whole_group(old: str, at_import: bool) -> None:
    picked = pick(Mutant("shop.py", old, "pass\n", ("tests/a.py",)), SHOP, record())
    assert list(picked.limits_s) == ["tests/a.py::other", "tests/a.py::slow"]
    assert picked.in_memory != at_import


FUNCTIONS = """\
def made(factor):
    def inner(value):
        return value * factor
    return inner

class Box:
    size = 1
    def area(self):
        return [self.size * side for side in (1, 2)]

two, three = (lambda value: value * 2), (lambda value: value * 2)
double = made(2)
"""


def swapped(path: Path, old: str, new: str) -> dict[str, object]:
    """Return the names of a module in whose memory a text of its file has been replaced."""
    names: dict[str, object] = {}
    exec(compile(FUNCTIONS, str(path), "exec", dont_inherit=True), names)
    changed = FUNCTIONS.replace(old, new, 1)
    assert changed != FUNCTIONS
    swap(functions_of({str(path)}), str(path), FUNCTIONS, changed)
    return names


def test_functions_in_memory_behave_as_changed(tmp_path: Path) -> None:
    assert swapped(tmp_path / "a.py", "value * factor", "value + factor")["double"](5) == 7  # type: ignore[operator]
    assert swapped(tmp_path / "b.py", "(1, 2)", "(3,)")["Box"]().area() == [3]  # type: ignore[operator]
    names = swapped(tmp_path / "c.py", "value * 2), (lambda value: value * 2)", "value * 2), (lambda value: value * 3)")
    assert (names["two"](5), names["three"](5)) == (10, 15)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("old", "new"),
    [("size = 1", "size = 2"), ("made(2)", "made(3)"), ("def inner(value)", "def inner(value, more=factor)"), ("(1, 2)", "(1")],
)
def test_other_changes_need_an_import(tmp_path: Path, old: str, new: str) -> None:
    with pytest.raises(NotSwappable):
        swapped(tmp_path / "a.py", old, new)


def test_every_bug_can_be_planted_and_its_tests_exist() -> None:
    mutants = read_mutants()
    assert len({str(mutant) for mutant in mutants}) == len(mutants) >= 450
    texts = {mutant.file: (ROOT / mutant.file).read_text(encoding="utf-8") for mutant in mutants}
    for mutant in mutants:
        planted = mutant.planted(texts[mutant.file])
        assert planted != texts[mutant.file]
        ast.parse(planted, mutant.file)  # what no Python reads says nothing about the tests
        assert all((ROOT / path.partition("::")[0]).is_file() for path in mutant.tests), mutant


def test_no_file_that_decides_what_is_learned_is_without_a_bug() -> None:
    mutants = read_mutants()
    assert uncovered(mutants) == []
    assert "agentrl/algo/kl.py" in uncovered([mutant for mutant in mutants if mutant.file != "agentrl/algo/kl.py"])


def test_files_without_behaviour_hold_neither_functions_nor_classes() -> None:
    for name in WITHOUT_BEHAVIOUR:
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        assert not [line for line in lines if line.lstrip().startswith(("def ", "class ", "async def "))], name
