"""``eval --run`` and ``sample --run``: what the run has read is compared with what is read now."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentrl.api.evaluation import measured_tasks
from agentrl.api.sampling import sampled_tasks
from agentrl.core.errors import ConfigError, DataError
from agentrl.core.types import Task
from agentrl.inspect.directory import RunDirectory
from agentrl.inspect.replay import open_replayer
from agentrl.resolve.commands import load_eval, load_sample, read_train
from agentrl.resolve.inputs import of_questions, read_inputs
from agentrl.resolve.parts import environment, inputs_of_run
from agentrl.resolve.plan import RunPlan
from tests.unit.resolve.test_inputs import ROWS, folder, touch_weights, write_rows

__all__ = ["folder"]

MORE = [{"prompt": f"{number} more?", "label": str(number)} for number in range(30)]


def run_in(folder: Path, *words: str) -> Path:
    """The files of a run that bear on its inputs."""
    given = ["--agent", str(folder / "env.py"), "--prompts", str(folder / "rows.jsonl"), "--model", str(folder / "model")]
    rest = ["--chat-template", str(folder / "template.jinja"), "--runtime", "local", "--engine", "transformers", "--skip-checks", "env"]
    plan = RunPlan.of(read_train([*given, *rest, *(words or ("--eval-size", "4", "--eval-every", "1"))]), named=False)
    tasks, questions = plan.tasks()
    run = folder / "run"
    (run / "model").mkdir(parents=True)
    (run / "model" / "config.json").write_text("{}")
    (run / "inputs.json").write_text(json.dumps(read_inputs(plan.inputs, tasks, of_questions(questions, tasks)).to_json()))
    (run / "config.json").write_text(plan.to_json())
    return run


def evaluated(run: Path, *words: str) -> tuple[list[str], str]:
    """Prompts that ``eval --run`` plays, and the code that it says has changed."""
    config = load_eval(["--run", str(run), *words])
    agent = environment(config)
    before, code = inputs_of_run(config, agent)
    return prompts(measured_tasks(config, agent, before)), code


def sampled(run: Path, *words: str) -> list[str]:
    config = load_sample(["--run", str(run), *words])
    agent = environment(config)
    return prompts(sampled_tasks(config, agent, inputs_of_run(config, agent)[0]))


def prompts(tasks: list[Task]) -> list[str]:
    return [str(task.prompt) for task in tasks]


def test_an_evaluation_asks_what_the_run_held_out_though_rows_were_added(folder: Path) -> None:
    run = run_in(folder)
    held, code = evaluated(run)
    assert (len(held), code) == (4, "")
    trained = set(sampled(run))
    assert len(trained) == 8
    assert not trained & set(held)
    write_rows(folder / "rows.jsonl", [*ROWS, *MORE])
    assert evaluated(run)[0] == held
    assert set(sampled(run)) == trained | {row["prompt"] for row in MORE}  # each of them once, and none that was held out
    assert len(sampled(run)) == 38
    assert evaluated(run, "--accept-changed-inputs")[0] != held


def test_an_evaluation_of_other_tasks_is_one_of_its_own(folder: Path) -> None:
    run = run_in(folder)
    write_rows(folder / "rows.jsonl", [*ROWS[2:], *MORE])
    assert len(evaluated(run, "--eval-size", "6")[0]) == 6
    write_rows(folder / "questions.jsonl", MORE)
    assert evaluated(run, "--eval-prompts", str(folder / "questions.jsonl"), "--eval-size", "0")[0] == [row["prompt"] for row in MORE]


@pytest.mark.parametrize(
    ("rows", "problem"), [(ROWS[:-1], "1 of 12 tasks .* are gone: 11"), ([{**ROWS[0], "label": "9"}, *ROWS[1:]], "1 of 12 .* changed: 0")]
)
def test_changed_rows_are_refused_unless_they_are_accepted(folder: Path, rows: list[dict[str, str]], problem: str) -> None:
    run = run_in(folder)
    write_rows(folder / "rows.jsonl", rows)
    for play in (evaluated, sampled):
        with pytest.raises(DataError, match=problem):
            play(run)
        assert play(run, "--accept-changed-inputs")


def test_questions_of_their_own_are_compared_too(folder: Path) -> None:
    run = run_in(folder, "--eval-prompts", str(folder / "questions.jsonl"), "--eval-every", "1")
    write_rows(folder / "questions.jsonl", [*ROWS, *MORE])
    assert evaluated(run)[0] == [row["prompt"] for row in ROWS]
    write_rows(folder / "questions.jsonl", ROWS[:-1])
    with pytest.raises(DataError, match="1 of 12 tasks with which the run began are gone: 11"):
        evaluated(run)


def test_the_model_a_run_began_with_is_compared_where_it_is_played(folder: Path) -> None:
    run = run_in(folder)
    touch_weights(folder / "model")
    evaluated(run)
    for words in (("--baseline", "start"), ("--model", str(folder / "model"))):
        with pytest.raises(ConfigError, match=r"--run = '.*run': reads other files than the run began with: --model: weights"):
            evaluated(run, *words)
        evaluated(run, *words, "--accept-changed-inputs")


def test_a_changed_template_is_refused_and_another_one_is_not(folder: Path) -> None:
    run = run_in(folder)
    (folder / "template.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigError, match=r"reads other files than the run began with: --chat-template \(template.jinja\)"):
        evaluated(run)


def test_changed_code_is_named(folder: Path) -> None:
    run = run_in(folder)
    with (folder / "env.py").open("a") as file:
        file.write("\nNEW = 1\n")
    assert evaluated(run)[1] == "env.py (+2 -0 lines)"


def test_a_replay_names_changed_code(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = run_in(folder)
    open_replayer(RunDirectory(run))
    assert not caplog.text
    with (folder / "helper.py").open("a") as file:
        file.write("\nNEW = 1\n")
    open_replayer(RunDirectory(run))
    assert "the code is not what the run ended with: helper.py (+2 -0 lines)" in caplog.text


def test_a_run_of_an_earlier_release_is_not_compared(folder: Path) -> None:
    run = run_in(folder)
    (run / "inputs.json").unlink()
    write_rows(folder / "rows.jsonl", MORE)
    touch_weights(folder / "model")
    assert evaluated(run, "--baseline", "start")[1] == ""
