"""The parts of the tests that `.ci/run` takes in turn, and the record of results with which `make test-all` goes on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import suites
from tests.results import MARKED_FILES, Result, read, suite_of, table
from tests.suites import FORGOTTEN, ROOT, TURNS, files, files_of, needs_of, parts, turn_of

pytest_plugins = ["pytester"]

MIXED = """
import pytest
def test_passes(): pass
def test_fails(): assert False
def test_skips(): pytest.skip("no podman")
@pytest.mark.slow
def test_ends_badly(broken): pass
@pytest.fixture
def broken():
    yield
    raise OSError
"""


@pytest.fixture
def with_plugin(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    pytester.makeconftest("pytest_plugins = ['tests.results']")
    pytester.makeini("[pytest]\nmarkers = slow: takes long")
    return pytester


@pytest.mark.parametrize("number", [0, 5])
def test_eight_turns_in_a_row_have_every_file_once(number: int) -> None:
    turns = [files_of(turn_of(number + later, 3)) for later in range(TURNS)]
    assert sorted(name for turn in turns for name in turn) == sorted(files())
    assert all(turns)
    for folder in ("tests/browser/", "tests/clients/"):
        assert sum(any(name.startswith(folder) for name in turn) for turn in turns) == 1


def test_a_turn_that_nobody_raises_changes_after_a_number_of_commits() -> None:
    assert [turn_of(3, commits) for commits in (0, FORGOTTEN - 1, FORGOTTEN, 5 * FORGOTTEN)] == [3, 3, 4, 0]


def test_every_file_with_a_marked_test_belongs_to_a_part(request: pytest.FixtureRequest) -> None:
    """Of the files that this session has collected: all of them in `make test`."""
    assert request.config.stash[MARKED_FILES] <= files().keys()


def test_parts_take_as_long_as_one_another_and_a_new_file_moves_no_other() -> None:
    seconds = {f"tests/test_{number}.py": float(2 + number % 7) for number in range(60)} | {"tests/test_long.py": 30.0}
    before = parts(seconds, seconds)
    loads = [sum(size for name, size in seconds.items() if before[name] == part) for part in range(TURNS)]
    assert max(loads) - min(loads) <= 3.0
    after = parts([*seconds, "tests/test_new.py"], seconds)
    assert after.pop("tests/test_new.py") in range(TURNS)
    assert after == before
    del seconds["tests/test_0.py"]
    assert parts(seconds, seconds | {"tests/test_0.py": 2.0}).items() <= before.items()


def test_a_part_installs_what_its_files_need_and_no_more() -> None:
    assert needs_of(["tests/clients/test_clients.py"]) == {"clients"}
    assert needs_of(["tests/browser/test_pages.py"]) == {"browser"}
    assert needs_of(["tests/faults/test_sandboxes.py"]) == {"containers"}
    assert needs_of(["tests/e2e/test_real_model.py"]) == {"real_model"}
    assert needs_of(["tests/e2e/test_demo.py"]) == set()


def test_needs_that_this_machine_has_are_not_installed_again(tmp_path: Path) -> None:
    done = subprocess.run([".ci/packages", "clients"], cwd=ROOT, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_results_are_recorded_and_what_passed_is_not_run_again(with_plugin: pytest.Pytester) -> None:
    with_plugin.makepyfile(MIXED)
    record = with_plugin.path / "results.jsonl"
    with_plugin.runpytest_subprocess("--results", str(record)).assert_outcomes(passed=2, failed=1, skipped=1, errors=1)
    found = {name.partition("::")[2]: (result.suite, result.outcome, result.reason) for name, result in read(record).items()}
    assert found == {
        "test_passes": ("test", "passed", ""),
        "test_fails": ("test", "failed", ""),
        "test_skips": ("test", "skipped", "Skipped: no podman"),
        "test_ends_badly": ("slow", "failed", ""),
    }
    with record.open("a") as file:
        file.write('{"id": "half of a li')
    with_plugin.makepyfile(MIXED.replace("assert False", "pass"))
    with_plugin.runpytest_subprocess("--results", str(record)).assert_outcomes(passed=2, errors=1, deselected=2)
    assert [result.outcome for result in read(record).values()].count("failed") == 1


def test_workers_that_share_the_tests_record_each_once(with_plugin: pytest.Pytester) -> None:
    with_plugin.makepyfile(MIXED)
    record = with_plugin.path / "results.jsonl"
    for _ in range(2):
        with_plugin.runpytest_subprocess("-n", "2", "--results", str(record))
    names = [line.partition("::")[2].partition('"')[0] for line in record.read_text().splitlines()]
    assert sorted(names) == sorted(["test_passes", "test_skips", *2 * ["test_fails", "test_ends_badly"]])


def test_a_suite_has_a_limit_of_time_and_a_test_may_have_its_own(with_plugin: pytest.Pytester) -> None:
    with_plugin.makepyfile(
        """
        import pytest
        def limit(request): return [mark.args[0] for mark in request.node.iter_markers("timeout")]
        @pytest.mark.slow
        def test_slow(request): assert limit(request) == [1200]
        @pytest.mark.slow
        @pytest.mark.timeout(7)
        def test_own(request): assert limit(request) == [7]
        def test_usual(request): assert limit(request) == []
        """
    )
    with_plugin.runpytest_subprocess().assert_outcomes(passed=3)


def test_a_test_belongs_to_the_first_of_its_suites() -> None:
    assert [suite_of(marks) for marks in (["anyio"], ["slow", "faults"], ["slow"])] == ["test", "faults", "slow"]


def test_the_table_counts_every_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Result("a", "test", "passed", 30.0), Result("b", "slow", "failed", 90.0), Result("c", "slow", "skipped", 0.0, "Skipped: why")]
    lines = [line.split() for line in table(rows)]
    assert ["slow", "0", "1", "1", "1.5"] in lines
    assert lines[-1] == ["all", "1", "1", "1", "2.0"]
    path = tmp_path / "results.jsonl"
    path.write_text("".join(f'{{"id": "{row.id}", "suite": "{row.suite}", "outcome": "{row.outcome}", "seconds": 1}}\n' for row in rows))
    assert suites.main(["table", str(path)]) == 1
    assert capsys.readouterr().out.splitlines()[-2:] == ["FAILED b", "1 passed, 1 failed, 1 skipped"]


def test_the_next_turns_are_printed() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.suites", "simulate"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == f"{len(files())} of {len(files())} files"
