"""Evaluations as the viewer shows them: those of a training, and the directory of `agentrl eval`."""

from __future__ import annotations

import json

from agentrl.inspect.episode import group_answer
from agentrl.inspect.listing import run_answer
from agentrl.inspect.reader import RunReader
from agentrl.inspect.tasks import evaluation_answer, one_task, task_list
from tests.run_files import read, small_run


def test_evaluations_say_what_became_of_each_task(tmp_path):
    path = small_run(tmp_path / "run")
    with (path / "evaluations.jsonl").open("w") as file:
        for step, reward in ((0, 0.25), (3, 0.75)):
            by_task = {"a": {"kind": "k", "reward": reward, "score": None, "episodes": 2, "failures": 0}}
            file.write(json.dumps({"step": step, "overall": {"reward": {"value": reward}}, "by_task": by_task}) + "\n")
    answer = evaluation_answer(RunReader(path).open())
    assert [row["figures"]["reward"]["value"] for row in answer["rows"]] == [0.25, 0.75]
    assert [(row["task"], row["kind"], row["change"], len(row["values"])) for row in answer["by_task"]] == [("a", "k", 0.5, 2)]


def test_the_directory_of_an_evaluation_shows_the_baseline_before_the_model(tmp_path):
    path = small_run(tmp_path / "run")
    for name in ("metrics", "groups", "steps", "annotations", "launches", "trajectories.index"):
        (path / f"{name}.jsonl").unlink()
    rows = [record | {"eval_sampling": {"name": "eval", "seed": 1}} for record in read(path / "trajectories.jsonl")]
    (path / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def figures(reward):
        by_task = {"task-0": {"kind": "", "failed": 1, "reward": reward, "score": reward}}
        return {"path": "", "overall": {"reward": {"value": reward, "low": 0.0, "high": 1.0}}, "by_task": by_task}

    comparison = {"overall": {"reward": {"difference": {"value": 0.5, "low": 0.25, "high": 0.75}}}}
    (path / "eval.json").write_text(json.dumps({"model": figures(0.75), "baseline": figures(0.25), "comparison": comparison}))
    run = RunReader(path).open()
    card, answer = run_answer(run, "run"), evaluation_answer(run)
    assert (card["kind"], card["reward"]["last"], card["tags"], card["num_steps"]) == ("evaluation", 0.75, [], None)
    assert card["status"] == "finished"
    assert [row["label"] for row in answer["rows"]] == ["baseline: the bundled tiny model", "model: the bundled tiny model"]
    [task] = answer["by_task"]
    assert (task["change"], [value["failures"] for value in task["values"]]) == (0.5, [1, 1])
    assert answer["differences"] == {"reward": {"value": 0.5, "low": 0.25, "high": 0.75}}
    assert [row["source"] for row in answer["rows"]] == [None, "eval"]
    assert answer["episodes"]["eval"] == len(rows)
    assert (one_task(run, "task-0")["source"], len(task_list(run)["rows"])) == ("eval", 5)
    assert group_answer(run, 0, source="eval")["members"][0]["recorded"]
