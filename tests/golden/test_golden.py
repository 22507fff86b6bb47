"""What the objects of a run receive is what they received when the golden files were recorded; see `tests.golden.compare`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.golden.cases import Case, all_cases
from tests.golden.compare import Added, Moved, Removed, compare, is_dropped, listed
from tests.golden.record import Recorder
from tests.golden.storage import Fields, read
from tests.golden.values import flat

pytestmark = [pytest.mark.linux, pytest.mark.vllm]

CASES = {case.name: case for case in all_cases() if not is_dropped(case.name)}
SAMPLE = (
    *(
        "plain cpu",
        "plain gpu1",
        "plain gpu8",
        "async bare",
        "local cpu",
        "local gpu8",
        "front ends of 16 cores",
        "front ends of a cluster",
    ),
    *("engine own", "engine black box", "engine quantised", "vision", "model 0.5b gpu1-16", "model 7b gpu1", "colocate gpu8"),
    *("weights disk gpu2", "weights adapter cpu", "learner muon gpu2", "learner zero 0 gpu2", "estimator own", "estimator remax"),
    *(
        "flow branches by entropy",
        "flow quorum",
        "partner past",
        "reward models weighed",
        "teacher engine",
        "sandbox limits",
        "evaluations apart",
    ),
    *(
        "cluster plug-ins",
        "recipe 72b",
        "file toml and flags",
        "resume elsewhere",
        "dying once gpu1",
        "eval two engines",
        "sample",
        "play",
    ),
    *("serve", "loop gpu1", "check", "plan shared", "refused zero 1 gpu1", "drawn 001", "drawn 100", "drawn 200", "refused-drawn 050"),
)
"""Cases that are recorded each time; the others are slow."""


@pytest.fixture(scope="module")
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    before = surroundings()  # imports set variables
    yield recorder
    recorder.close()
    assert surroundings() == before


def surroundings() -> tuple[str, dict[str, str]]:
    return os.getcwd(), {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}


@pytest.fixture(scope="module")
def golden() -> dict[str, Fields]:
    return dict(read())


@pytest.mark.parametrize("name", [name for name in SAMPLE if name in CASES])
def test_a_case_receives_what_it_received(name: str, recorder: Recorder, golden: dict[str, Fields]) -> None:
    differences = compare(golden[name], flat(recorder.record(CASES[name])))
    assert not differences, listed(name, differences)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_every_case_receives_what_it_received(recorder: Recorder, golden: dict[str, Fields]) -> None:
    assert [name for name in CASES if name not in golden] == []
    found = {name: compare(golden[name], flat(recorder.record(case))) for name, case in CASES.items()}
    assert not any(found.values()), "\n".join(listed(name, differences) for name, differences in found.items() if differences)


def test_the_sample_is_of_every_kind() -> None:
    assert set(SAMPLE) - CASES.keys() == set()
    kinds = {command: [name for name in SAMPLE if CASES[name].words[0] == command] for command in ("train", "eval", "sample", "loop")}
    assert all(kinds.values())


def test_a_changed_field_is_a_difference_and_a_moved_one_is_none() -> None:
    golden = {"engine/first/seed": 3, "engine/last/seed": 4, "learner/rank": 0}
    assert compare(golden, golden) == []
    assert compare(golden, {**golden, "learner/rank": 1}) == ["learner/rank: was 0, now 1"]
    moves = (Moved("engine/*/seed", "plans/*/engine/seed"), Removed("learner/*", "nobody asks for it"))
    assert compare(golden, {"plans/first/engine/seed": 3, "plans/last/engine/seed": 4}, moves) == []
    missing = "plans/last/engine/seed (before engine/last/seed): was 4, now missing"
    assert compare(golden, {"plans/first/engine/seed": 3}, moves) == [missing]


def test_fields_that_have_become_one_have_one_value() -> None:
    golden, moves = {"worker/model": "a", "learner/model": "a", "learner/rank": 0}, (Moved("*/model", "plan/model"),)
    assert compare(golden, {"plan/model": "a", "plan/seed": 1}, moves, named_only=True) == []
    assert compare({**golden, "learner/model": "b"}, {"plan/model": "a"}, moves, named_only=True) == [
        "plan/model (before learner/model): was 'b', now 'a'"
    ]


def test_a_new_field_is_a_difference_unless_it_is_said_to_be_new() -> None:
    assert compare({}, {"host/cores": 2}) == ["host/cores: new, 2"]
    assert compare({}, {"host/cores": 2}, (Added("host/*", "asked once"),)) == []


def test_a_value_of_another_kind_is_a_difference() -> None:
    assert compare({"gpus": 1}, {"gpus": 1.0}) == ["gpus: was 1, now 1.0"]
    assert compare({"gpus": 1}, {"gpus": 1.0}, (Moved("gpus", "gpus", float),)) == []


def test_names_of_cases_are_unique_and_their_files_are_not_left_behind(recorder: Recorder) -> None:
    case = Case(name="a file", words=("train", "--config", "settings/some.toml"), files={"settings/some.toml": "seed = 1\n"})
    assert recorder.record(case)["code"] == 2
    assert not (recorder.work / "settings" / "some.toml").exists()
