"""The command refuses wrong requests, prints what it found, and ends with the right code; the viewer answers the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.cli.main import main
from agentrl.core.errors import ConfigError
from agentrl.core.types import Task
from agentrl.doctor.verdicts import CAUSES
from agentrl.viewer import collect
from agentrl.viewer.collect import write_page
from agentrl.viewer.questions import QUESTIONS, Words
from agentrl.viewer.runs import RunCollection
from tests.unit.doctor.made import Answer, PlantedRun

PAGE = Path(__file__).parents[3] / "docs" / "doctor.md"


@pytest.fixture
def flat(tmp_path: Path) -> Path:
    """A run in which no episode earns anything."""
    run = PlantedRun(tmp_path / "run")
    for _ in range(6):
        for number in range(4):
            run.group(Task(f"Question {number}", id=str(number)), [Answer(text=f"no {index}") for index in range(4)])
        run.step(entropy=1.0)
    run.made.close()
    return run.folder


def test_a_request_for_a_run_and_for_machines_is_refused(flat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(flat), "--ray-address", "auto"]) == 2
    assert "--ray-address = 'auto': examines machines, and a run is named too" in capsys.readouterr().err


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(tmp_path)]) == 2
    assert "holds no run" in capsys.readouterr().err


def test_the_report_names_the_cause_the_remedy_and_commands(flat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(flat)]) == 1
    text = capsys.readouterr().out
    assert text.startswith("causes found: 1 cause in 6 steps, 24 groups, 96 recorded episodes read\n")
    assert "The reward is 0 in the first third of the groups and in the last." in text
    assert f"1. error too-hard: {CAUSES['too-hard'].title}" in text
    assert "95 % interval 76% to 100%" in text
    assert f"agentrl inspect {flat} 12-0-0" in text
    assert "not tested: no-effect: 0 steps with a gradient, at least 4 are needed" in text


def test_a_form_and_a_flag_are_shown_once_and_as_they_are_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unmet, cut = PlantedRun(tmp_path / "unmet"), PlantedRun(tmp_path / "cut")
    for number in range(8):
        task = Task(f"Write \\boxed{{}} around {number}.", id=str(number), label=str(number))
        unmet.group(task, [Answer(text=f"a\nb {index}") for index in range(4)])
        cut.group(task, [Answer(text="and so", cut=True) for _ in range(4)])
    for run in (unmet, cut):
        run.step(entropy=1.0)
        run.made.close()
    assert main(["doctor", str(unmet.folder), "--no-replay"]) == 1
    assert r"none of 32 answers holds '\boxed{', which the prompt asks for; one is 'a\nb 0'" in capsys.readouterr().out
    assert main(["doctor", str(cut.folder), "--no-replay"]) == 1
    text = capsys.readouterr().out
    (seen,) = [line for line in text.splitlines() if line.startswith("   seen") and " cut 16 of" in line]
    assert seen.count("--max-new-tokens") == 1


def test_the_viewer_answers_with_the_same_causes(flat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", str(flat), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    collection = RunCollection(flat)
    answer = QUESTIONS["api/run/{run}/doctor"](collection, {"run": "run"}, Words({}))
    assert answer.pop("trend_text").startswith("The reward is ")
    assert json.loads(json.dumps(answer)) == report
    assert [verdict["id"] for verdict in report["verdicts"]] == ["too-hard"]
    write_page(collection, tmp_path / "page.html")
    assert CAUSES["too-hard"].title in (tmp_path / "page.html").read_text()


def test_a_run_too_large_for_one_file_is_named(flat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "MAX_BYTES", 1000)
    with pytest.raises(ConfigError, match=r"RUN = 'run': its page would be larger than .* --step N"):
        write_page(RunCollection(flat), tmp_path / "page.html")


def test_a_run_under_way_is_examined_as_far_as_it_is(flat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (flat / "trajectories.jsonl").open("a") as file:
        file.write('{"trajectory_id": "half a li')
    assert main(["doctor", str(flat)]) == 1


def test_a_run_without_records_is_judged_by_its_groups(flat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in flat.glob("trajectories*"):
        path.unlink()
    assert main(["doctor", str(flat), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["verdicts"][0]["id"] == "too-hard"
    assert "--record" in report["untested"]["label-type"]


def test_the_page_lists_every_cause_in_order() -> None:
    rows = [line.split("`")[1] for line in PAGE.read_text().split("## Causes")[1].split("## ")[0].splitlines() if line.startswith("| `")]
    assert rows == list(CAUSES)
