"""Answers that the viewer's page is given, on runs whose every figure is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentrl.core.annotations import read_annotation
from agentrl.core.callbacks import GroupJudged
from agentrl.core.errors import ConfigError
from agentrl.core.summaries import summarize
from agentrl.core.types import Group, GroupRequest, Status, Task, Trajectory, floats, ints
from agentrl.inspect.episode import differs_at, episode_answer, find_records, group_answer, record_answer
from agentrl.inspect.listing import changes_answer, episode_list, run_answer
from agentrl.inspect.reader import RunReader, settings_differ
from agentrl.inspect.search import search
from agentrl.inspect.spikes import BY, token_answer
from agentrl.inspect.steps import step_answer
from agentrl.inspect.tasks import one_task, task_list
from agentrl.rollout.records import group_records
from tests.run_files import MadeRun, read, small_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return RunReader(small_run(tmp_path_factory.mktemp("runs") / "small")).open()


def records_of(run):
    return {record["trajectory_id"]: record for record in read(run.path / "trajectories.jsonl")}


def test_an_episode_has_the_figures_of_engine_and_learner(run):
    answer, record = episode_answer(run, "1-0-2"), records_of(run)["1-0-2"]
    assert (answer["step"], answer["verdict"], answer["status"], answer["group"]) == (1, "kept", "finished", 1)
    assert (answer["previous"], answer["next"]) == ("1-0-1", "1-0-3")
    for number, (view, turn) in enumerate(zip(answer["turns"], record["turns"], strict=True)):
        tokens = view["tokens"]
        assert (tokens["ids"], view["prompt"]["ids"], view["text"]) == (turn["token_ids"], turn["prompt_ids"], turn["text"])
        np.testing.assert_allclose(tokens["logprob"], turn["logprobs"], atol=1e-5)
        np.testing.assert_allclose(tokens["learner"], np.array(turn["logprobs"]) - 0.001, atol=1e-5)
        np.testing.assert_allclose(tokens["difference"], -0.001, atol=1e-6)
        assert tokens["entropy"] == list(range(8 * number, 8 * number + 8))  # the second turn goes on where the first ended
        assert (tokens["ratio"], tokens["advantage"], tokens["reference"]) == (1.0, 0.5, None)
        assert (tokens["version"], tokens["staleness"]) == (0, 0)  # the first step trains weights of version 0
        assert tokens["mask"] == [("trained", "off_policy")[place % 4 == 3] for place in range(8)]
    assert answer["masks"].keys() == {"not_action", "trained", "off_policy"}
    assert answer["ranges"]["entropy"] == [0.0, 15.0]
    assert [span["name"] for span in answer["spans"]] == ["reset", "generate", "step", "generate", "step"]
    assert answer["turns"][0]["prompt_messages"] == [{"role": "user", "text": "How much?"}]
    json.dumps(answer, allow_nan=False)


def test_a_run_says_how_many_of_its_steps_are_made_and_from_which_seed(run):
    card = run_answer(run, "small")
    assert (card["kind"], card["step"], card["num_steps"], card["seed"]) == ("run", 3, 3, 0)


def test_pieces_of_the_bundled_model_join_to_the_text(tmp_path):
    from tokenizers import Tokenizer

    from agentrl.assets import tiny_model_path
    from agentrl.inspect.pieces import TokenTexts

    tokenizer = Tokenizer.from_file(str(tiny_model_path() / "tokenizer.json"))
    run = RunReader(small_run(tmp_path / "run"))
    texts = TokenTexts(run.directory, run.config.model.model if run.config else None)
    for text in ("one two", "naïve 中文 🙂 end", '{"tool":"add","args":[4,4]}<|end|>', "  spaces\n\n"):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        pieces = texts.pieces(ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=False)
    assert len(texts.pieces([10**9, -1])) == 2  # numbers of no token


@pytest.mark.parametrize(
    ("change", "mask"),
    [
        ({"status": Status.ENV_ERROR}, "failed"),
        ({"verdict": "filtered", "reason": "all_same"}, "filtered"),
        ({"verdict": "dropped", "reason": "no_tokens"}, "dropped"),
        ({}, "pending"),
    ],
)
def test_every_token_says_why_it_was_not_trained(tmp_path, change, mask):
    made = MadeRun(tmp_path / "run")
    made.group(1, **change)
    run = RunReader(made.close()).open()
    answer = episode_answer(run, "0-0-0")
    assert {view["tokens"]["mask"] for view in answer["turns"]} == {mask}
    assert (answer["trajectories"][0]["mask"], answer["verdict_reason"]) == (mask, change.get("reason", ""))
    assert mask in answer["masks"]


def judged(made: MadeRun, trajectory: Trajectory, *, attempt: int = 0, verdict: str = "kept", group_id: int = 0) -> None:
    task = Task("q", id="t")
    group = Group(group_id=group_id, task=task, trajectories=(trajectory,))
    group_request = GroupRequest(group_id=group_id, task=task, n_samples_per_prompt=1, version=0, attempt=attempt, record=1)
    summary = summarize(group, seconds=0.5, records=group_records(group_request, group))
    made.judged(GroupJudged(group_id=group_id, attempt=attempt, task=task, verdict=verdict, reason="", summary=summary))


def test_a_masked_branch_its_reason_and_its_root(tmp_path):
    made = MadeRun(tmp_path / "run")
    whole = made._episode(0, 0, 1, 2, 4, Status.FINISHED, "")
    first, second = whole.turns
    context = [*first.prompt_ids.tolist(), *first.token_ids.tolist()]
    own = replace(second, prompt_ids=ints([*context, 7, 8]), fresh=True, masked="it was discarded", branch_reason="rewritten", number=2)
    judged(made, replace(whole, turns=(first, second, own)))
    made.step(1, [0])
    answer = episode_answer(RunReader(made.close()).open(), "0-0-0")
    assert [(b["reason"], b["masked"], b["turns"], b["parent"], b["from_turn"]) for b in answer["branches"]] == [
        ("", "", [0, 1], None, None),
        ("rewritten", "it was discarded", [2], 0, 0),
    ]
    assert [view["tokens"]["mask"] == "branch" for view in answer["turns"]] == [False, False, True]
    assert answer["masks"]["branch"] == "not trained: it was discarded"
    assert [b["trained"] for b in answer["branches"]] == [True, False]


def test_an_attempt_that_was_repeated_is_told_from_the_last(tmp_path):
    made = MadeRun(tmp_path / "run")
    judged(made, made._episode(0, 0, 1, 1, 3, Status.ENV_ERROR, "old"), verdict="retried")
    judged(made, made._episode(0, 0, 1, 1, 3, Status.FINISHED, "new"), attempt=1)
    made.step(1, [0], annotated=False)
    with (made.folder / "annotations.jsonl").open("a") as file:
        from tests.run_files import annotation_of

        file.write(annotation_of(list(read(made.folder / "trajectories.jsonl"))[1], 1).line() + "\n")
    run = RunReader(made.close()).open()
    assert (episode_answer(run, "0-0-0")["turns"][0]["text"], episode_answer(run, "0-0-0")["attempts"]) == ("new", [0, 1])
    old = episode_answer(run, "0-0-0", 0)
    assert (old["turns"][0]["text"], old["turns"][0]["tokens"]["mask"], old["turns"][0]["tokens"]["learner"]) == ("old", "failed", None)
    assert (group_answer(run, 0)["attempt"], group_answer(run, 0, 0)["verdict"]) == (1, "retried")


def test_the_last_of_doubled_annotations_counts(tmp_path):
    path = small_run(tmp_path / "run")
    lines = (path / "annotations.jsonl").read_text().splitlines(keepends=True)
    again = json.loads(lines[0])
    with (path / "annotations.jsonl").open("a") as file:
        file.write(json.dumps({**again, "advantage": 0.75}) + "\n" + lines[1][:30])
    run = RunReader(path).open()
    assert episode_answer(run, again["trajectory_id"])["turns"][0]["tokens"]["advantage"] == 0.75


def test_a_run_of_an_older_version_opens_without_the_newer_files(tmp_path):
    path = small_run(tmp_path / "run")
    for name in ("groups", "steps", "annotations", "launches", "trajectories.index"):
        (path / f"{name}.jsonl").unlink()
    run = RunReader(path).open()
    step = step_answer(run, 2)
    assert (step["exact"], [group["group"] for group in step["groups"]]) == (False, [3, 4, 5])
    assert len(step["rewards"]) == 12
    episode = episode_answer(run, "3-0-0")
    assert {view["tokens"]["mask"] for view in episode["turns"]} == {"unknown"}
    assert task_list(run)["source"] == "recorded"
    assert run_answer(run, "run")["has"] == {
        **dict.fromkeys(("annotations", "groups", "steps", "evaluations", "requests"), False),
        **dict.fromkeys(("trajectories", "tokenizer"), True),
    }


def test_a_step_has_its_groups_and_who_waited_for_whom(run):
    answer = step_answer(run, 2)
    assert [row["group"] for row in answer["groups"]] == [3, 4]
    assert {(row["verdict"], row["step"], row["staleness"]) for row in answer["groups"]} == {("kept", 2, 1)}
    assert answer["exact"]
    assert answer["previous"]["reward/mean"] == pytest.approx(0.1)
    spans = {(span["lane"], span["name"]): span for span in answer["lanes"]["spans"] if span["step"] == 2}
    train, wait = spans["learner", "train"], spans["train loop", "wait for groups"]
    assert train["end_s"] - train["start_s"] == pytest.approx(0.3, abs=1e-3)
    assert wait["end_s"] == train["start_s"]
    lanes = {span["lane"] for span in answer["lanes"]["spans"]}
    assert {"learner", "train loop", "publication", "groups", "engine", "environment"} <= lanes
    with pytest.raises(ConfigError, match="The run has 3 steps"):
        step_answer(run, 9)


def test_groups_that_ended_beside_a_step_are_those_it_did_not_train(tmp_path):
    made = MadeRun(tmp_path / "run")
    now = made._seconds
    kept, filtered = made.group(1), made.group(1, verdict="filtered", reason="all_same")
    made._seconds = now + 0.4  # the step began before both and trained after
    made.step(1, [kept])
    answer = step_answer(RunReader(made.close()).open(), 1)
    assert [(row["group"], row["verdict"], row["reason"]) for row in answer["others"]] == [(filtered, "filtered", "all_same")]


def test_what_keeps_a_step_from_teaching_is_said(tmp_path):
    made = MadeRun(tmp_path / "run")
    trajectory = made._episode(0, 0, 0, 1, 3, Status.FINISHED, "")
    for number in range(2):
        same = tuple(replace(trajectory, trajectory_id=f"{number}-0-{i}", episode_id=f"{number}-0-{i}", reward=0.0) for i in range(2))
        group = Group(group_id=number, task=Task("q", id="t"), trajectories=same)
        made.judged(
            GroupJudged(group_id=number, attempt=0, task=group.task, verdict="kept", reason="", summary=summarize(group, seconds=0.1))
        )
    made.step(
        1, [0, 1], metrics={"grad_norm": 0.0, "off_policy/masked": 1.0, "episode/truncated": 1.0, "skipped_updates": 2.0}, annotated=False
    )
    notes = " ".join(step_answer(RunReader(made.close()).open(), 1)["notes"])
    for words in (
        "Every member of every group has the reward 0",
        "gradient was exactly 0",
        "removed 100% of the tokens",
        "100% of the episodes",
        "2 updates",
    ):
        assert words in notes


def test_the_tokens_behind_a_figure_are_the_farthest_of_the_step(run):
    items = [read_annotation(row) for row in read(run.path / "annotations.jsonl") if row["step"] == 2]
    for by, best in {"loss": 1.0, "entropy": 15.0}.items():
        answer = token_answer(run, 2, by, 5)
        values = sorted((abs(value) for item in items for value in item.figures[by]), reverse=True)
        assert [abs(row["value"]) for row in answer["rows"]] == pytest.approx(values[:5])
        assert abs(answer["rows"][0]["value"]) == best
        assert (answer["episodes"], answer["tokens"]) == (8, 8 * 16)
    row = token_answer(run, 2, "entropy", 1)["rows"][0]
    assert (row["turn"], row["token"], row["mask"]) == (1, 7, "off_policy")
    assert row["before"] + row["text"]
    assert all(token_answer(run, 2, by)["rows"] for by in BY)
    of_the_weights = token_answer(run, 2, "mismatch", 100)["rows"]
    assert {row["staleness"] for row in of_the_weights} == {0}
    assert {row["staleness"] for row in token_answer(run, 2, "difference", 100)["rows"]} == {0, 1}


def test_members_side_by_side_begin_at_the_first_token_that_differs(tmp_path):
    made = MadeRun(tmp_path / "run")
    one = made._episode(0, 0, 1, 2, 6, Status.FINISHED, "")
    changed = one.turns[1].token_ids.copy()
    changed[4] += 1
    other = replace(one, trajectory_id="0-0-1", episode_id="0-0-1", turns=(one.turns[0], replace(one.turns[1], token_ids=ints(changed))))
    short = replace(one, trajectory_id="0-0-2", episode_id="0-0-2", turns=one.turns[:1])
    group = Group(group_id=0, task=Task("q", id="t"), trajectories=(one, other, short))
    group_request = GroupRequest(group_id=0, task=group.task, n_samples_per_prompt=3, version=0, record=3)
    summary = summarize(group, seconds=0.5, records=group_records(group_request, group))
    made.judged(GroupJudged(group_id=0, attempt=0, task=group.task, verdict="kept", reason="", summary=summary))
    answer = group_answer(RunReader(made.close()).open(), 0)
    assert answer["pairs"][0] == [None, {"turn": 1, "token": 4}, {"turn": 1, "token": 0}]
    assert answer["first_difference"] == {"turn": 1, "token": 0}
    assert differs_at([], []) is None


def test_members_that_are_not_recorded_are_listed_with_their_rewards(tmp_path):
    made = MadeRun(tmp_path / "run")
    played = tuple(made._episode(0, index, 1, 1, 3, Status.FINISHED, "") for index in range(3))
    group = Group(group_id=0, task=Task("q", id="t"), trajectories=played)
    group_request = GroupRequest(group_id=0, task=group.task, n_samples_per_prompt=3, version=0, record=1)
    summary = summarize(group, seconds=0.5, records=group_records(group_request, group))
    made.judged(GroupJudged(group_id=0, attempt=0, task=group.task, verdict="kept", reason="", summary=summary))
    answer = group_answer(RunReader(made.close()).open(), 0)
    assert [(member["episode"], member["recorded"], member["reward"]) for member in answer["members"]] == [
        (t.episode_id, index == 0, t.reward) for index, t in enumerate(played)
    ]


def test_lists_are_filtered_sorted_and_paged(run):
    rows = list(records_of(run).values())
    assert [row["episode"] for row in episode_list(run, {}, limit=3)["rows"]] == ["8-0-3", "8-0-2", "8-0-1"]
    page = episode_list(run, {}, sort="-reward", limit=100)["rows"]
    assert [row["reward"] for row in page] == sorted((record["reward"] for record in rows), reverse=True)
    for chosen, holds in (
        ({"group": 4}, lambda r: r["group_id"] == 4),
        ({"step": 2}, lambda r: r["group_id"] in (3, 4, 5)),
        ({"task": "task-3"}, lambda r: r["task"]["id"] == "task-3"),
        ({"min_reward": 0.5}, lambda r: r["reward"] >= 0.5),
        ({"max_reward": 0.5}, lambda r: r["reward"] <= 0.5),
        ({"status": "env_error,timeout"}, lambda r: False),
        ({"text": "TASK-1"}, lambda r: r["task"]["id"] == "task-1"),
        ({"source": "eval-1"}, lambda r: False),
    ):
        answer = episode_list(run, chosen, sort="time", limit=100)
        assert [row["episode"] for row in answer["rows"]] == [r["episode_id"] for r in rows if holds(r)], chosen
        assert answer["chosen"] == len(answer["rows"])
    assert {row["verdict"] for row in episode_list(run, {"group": 2})["rows"]} == {"filtered"}
    assert [row["annotated"] for row in episode_list(run, {"step": 3}, limit=1)["rows"]] == [False]
    with pytest.raises(ConfigError, match="is no order"):
        episode_list(run, {}, sort="reward; DROP TABLE episodes")


def test_search_finds_every_turn_and_goes_on_where_it_stopped(run):
    wanted = [(r["episode_id"], turn["number"]) for r in records_of(run).values() for turn in r["turns"] if "plus " in turn["text"]]
    found, after = [], 0
    while after is not None:
        answer = search(run, "PLUS ", after=after, limit=4)
        found += [(match["episode"], match["turn"]) for match in answer["matches"] if match["where"] == "text"]
        after = answer["next"]
    assert found == wanted
    assert search(run, "PLUS ", case=True)["matches"] == []
    assert search(run, "")["next"] is None
    assert {match["where"] for match in search(run, "How much?")["matches"]} == {"prompt"}


def test_search_finds_letters_that_json_writes_in_another_way(tmp_path):
    made = MadeRun(tmp_path / "run")
    made.group(1, members=1, text='Ünïcode "quoted" \\ ok')
    run = RunReader(made.close()).open()
    for text in ("ünÏcode", '"Quoted" \\', "OK"):
        assert search(run, text)["matches"], text


def test_tasks_are_ordered_by_how_they_went(run):
    rows = {row["task"]: row for row in task_list(run)["rows"]}
    rewards = {}
    for record in records_of(run).values():
        rewards.setdefault(record["task"]["id"], {}).setdefault(record["group_id"], []).append(record["reward"])
    for task, groups in rewards.items():
        assert rows[task]["reward"] == pytest.approx(np.mean([np.mean(values) for values in groups.values()]))
        assert (rows[task]["groups"], rows[task]["episodes"]) == (len(groups), 4 * len(groups))
    hardest = [row["reward"] for row in task_list(run, sort="hardest")["rows"]]
    assert hardest == sorted(hardest)
    assert task_list(run, text="task-2")["chosen"] == 1
    task = one_task(run, "task-3")
    assert ([group["group"] for group in task["groups"]], task["info"]["prompt"]) == ([3, 8], "How much?")


def test_settings_that_differ_are_named_with_their_flags(tmp_path):
    one, other = (RunReader(small_run(tmp_path / name)) for name in ("one", "other"))
    other.settings["learner"]["learning_rate"] = 0.5
    [row] = settings_differ([one, other])
    assert (row["name"], row["flag"], row["values"][1]) == ("learner.learning_rate", "--learning-rate", 0.5)
    assert settings_differ([one, one]) == []


def test_a_run_is_running_killed_or_finished(tmp_path):
    path = small_run(tmp_path / "run")
    assert RunReader(path).status() == "running"  # it was written by this process
    launches = (path / "launches.jsonl").read_text()
    (path / "launches.jsonl").write_text(json.dumps({**json.loads(launches), "process_s": 1.0}) + "\n")
    assert RunReader(path).status() == "killed"
    (path / "launches.jsonl").write_text(json.dumps({**json.loads(launches), "host": "elsewhere"}) + "\n")
    assert RunReader(path).status() == "unknown"
    (path / "summary.json").write_text(json.dumps({"status": "finished", "steps": 3}))
    assert RunReader(path).status() == "finished"
    (path / "launches.jsonl").unlink()
    (path / "summary.json").unlink()
    assert RunReader(path).status() == "running"  # of an older version: it was written to just now


def test_the_overview_and_the_version_for_polling(run):
    answer = run_answer(run, "small")
    assert (answer["episodes"], answer["annotations"], answer["steps"], answer["tasks"], answer["recorded"]) == (36, 16, 3, 5, "all")
    assert answer["account"] == {"episodes": 36, "played": 36}
    assert "run.agent" in answer["changed"]
    assert "track.tensorboard" not in answer["changed"]
    assert changes_answer(run)["version"] == changes_answer(run)["version"]
    assert record_answer(run, "0-0-0")["records"] == [records_of(run)["0-0-0"]]


def test_what_is_not_recorded_is_a_config_error(run):
    for ask in (
        lambda: find_records(run, "99-0-0"),
        lambda: group_answer(run, 99),
        lambda: one_task(run, "none"),
        lambda: token_answer(run, 1, "x"),
    ):
        with pytest.raises(ConfigError):
            ask()


def test_an_old_record_without_spans_or_numbers_opens(tmp_path):
    path = tmp_path / "old"
    path.mkdir()
    turn = {"prompt_text": "p", "text": "t", "prompt_ids": [1], "token_ids": [2], "logprobs": [-0.5], "versions": [0], "reward": 1.0}
    rows = [
        {
            "trajectory_id": "0-0-0",
            "episode_id": "0-0-0",
            "group_id": 0,
            "status": "finished",
            "reward": 1.0,
            "turns": [turn],
            "task": {"id": "t"},
        },
        {"clipped": True, "bytes": 9},
    ]
    (path / "trajectories.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = RunReader(Path(path)).open()
    answer = episode_answer(run, "0-0-0")
    assert (answer["turns"][0]["tokens"]["logprob"], answer["spans"], answer["step"]) == (-0.5, [], None)
    assert episode_list(run, {})["of"] == 2
    assert floats([1.0])[0] == 1.0
