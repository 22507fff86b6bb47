"""Evaluations as the viewer shows them: those of a training, and the directory of `agentrl eval`."""

from __future__ import annotations

import json

import pytest

from agentrl.inspect.directory import RunDirectory
from agentrl.inspect.episode import episode_answer, group_answer
from agentrl.inspect.listing import episode_list, run_answer
from agentrl.inspect.reader import RunReader
from agentrl.inspect.search import search
from agentrl.inspect.tasks import evaluation_answer, one_task, task_list
from agentrl.track.index import IndexWriter, index_path
from agentrl.track.jsonl import JsonLines, encode
from agentrl.track.sinks import EVAL_TRAJECTORIES
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


def evaluated_run(folder, *, indexed=True):
    """A run with the episodes of two evaluations, of which each task has one recorded."""
    path = small_run(folder)
    rows = list(read(path / "trajectories.jsonl"))[:2]
    with (path / "evaluations.jsonl").open("w") as file:
        for step, reward in ((0, 0.0), (3, 1.0)):
            by_task = {f"task-{number}": {"reward": reward, "score": None, "episodes": 1, "failures": 0} for number in range(2)}
            file.write(json.dumps({"step": step, "overall": {}, "by_task": by_task}) + "\n")
    lines, index = JsonLines(path / EVAL_TRAJECTORIES), IndexWriter(path / EVAL_TRAJECTORIES)
    for step in (0, 3):
        for number, row in enumerate(rows):
            name = f"eval-{step}-{number}-0-0"
            task = {**row["task"], "id": f"task-{number}"}
            about = {"group_id": number, "task": task, "version": step, "eval_sampling": {"name": f"eval-{step}", "seed": 1}}
            line = encode({**row, "trajectory_id": name, "episode_id": name, **about, "error": f"said at step {step}"})
            lines.write(line)
            index.add(json.loads(line), len(line))
    lines.close()
    index.close()
    if not indexed:
        index_path(path / EVAL_TRAJECTORIES).unlink()
    return path


@pytest.mark.parametrize("indexed", [True, False])
def test_episodes_of_evaluations_are_in_a_file_of_their_own_and_read_like_the_others(tmp_path, indexed):
    run = RunReader(evaluated_run(tmp_path / "run", indexed=indexed)).open()
    while not run.store.advance():
        pass
    assert run_answer(run, "run")["sources"] == ["train", "eval-0", "eval-3"]
    assert [row["episode"] for row in episode_list(run, {"source": "eval-3"})["rows"]] == ["eval-3-1-0-0", "eval-3-0-0-0"]
    episode = episode_answer(run, "eval-3-1-0-0")
    assert (episode["source"], episode["error"], episode["task"]["id"]) == ("eval-3", "said at step 3", "task-1")
    assert {view["tokens"]["mask"] for view in episode["turns"]} == {"evaluation"}
    assert len(episode["turns"][0]["tokens"]["ids"]) == 8
    found = search(run, "said at step 0", limit=10)
    assert [match["episode"] for match in found["matches"]] == ["eval-0-0-0-0", "eval-0-1-0-0"]
    assert len(task_list(run)["rows"]) == 5  # those of the training


def test_a_task_is_read_before_and_after(tmp_path):
    run = RunReader(evaluated_run(tmp_path / "run")).open()
    tasks = {row["task"]: row for row in evaluation_answer(run)["by_task"]}
    assert [(value["step"], value["group"]) for value in tasks["task-1"]["values"]] == [(0, 1), (3, 1)]
    members = [group_answer(run, 1, source=f"eval-{step}")["members"] for step in (0, 3)]
    assert [[member["episode"] for member in found] for found in members] == [["eval-0-1-0-0"], ["eval-3-1-0-0"]]


def test_the_directory_finds_an_episode_of_an_evaluation_by_its_name(tmp_path):
    directory = RunDirectory(evaluated_run(tmp_path / "run"))
    [[record]] = directory.episodes("eval-3-1-0-0")
    assert record["error"] == "said at step 3"
    assert len(list(directory.episodes("0-0-0"))) == 1
    assert len(list(directory.records())) == 36  # what is exported and trained on


def test_new_episodes_of_evaluations_are_seen_and_a_file_that_was_cut_is_read_again(tmp_path):
    path = evaluated_run(tmp_path / "run")
    whole = (path / EVAL_TRAJECTORIES).read_bytes()
    index_path(path / EVAL_TRAJECTORIES).unlink()
    half = whole[: whole.index(b"\n") + 1]
    (path / EVAL_TRAJECTORIES).write_bytes(half)
    run = RunReader(path).open()

    def count(source):
        while not run.store.advance():
            pass
        return run.store.one("SELECT count(*) FROM episodes WHERE source LIKE ?", (source,))

    assert (count("eval%"), count("train")) == (1, 36)
    with (path / EVAL_TRAJECTORIES).open("ab") as file:
        file.write(whole[len(half) :])
    assert (count("eval%"), count("train")) == (4, 36)
    (path / EVAL_TRAJECTORIES).write_bytes(half)
    assert (count("eval%"), count("train")) == (1, 36)
