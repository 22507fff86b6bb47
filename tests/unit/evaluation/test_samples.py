"""Rows of a sampled data set, and the journal that survives a crash."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.mapping import differences, to_json
from agentrl.core.errors import ConfigError
from agentrl.core.types import Task
from agentrl.evaluation.plan import SelectConfig
from agentrl.evaluation.samples import Journal, check_tasks, select, task_entry
from agentrl.resolve.commands import load_sample

AGENT = "envs/arithmetic.py"
PAIRS = SelectConfig(select="pairs", keep=3)


def record(reward: float | None, answer: str = "4", *, status: str = "finished", turns: int = 1, raw: bool = False) -> dict[str, Any]:
    """A recorded episode of "2+2?"; with several turns the environment asks again."""
    messages = [{"role": "user", "content": "2+2?"}]
    for number in range(turns):
        messages += [{"role": "user", "content": "sure?"}] if number else []
        messages += [{"role": "assistant", "content": answer}]
    return {
        "episode_id": f"sample-0-0-{answer}",
        "agent": "",
        "frozen": False,
        "status": status,
        "error": None if reward is not None else "ValueError: no",
        "reward": reward,
        "score": reward,
        "reward_parts": {},
        "model_scores": {"rm": [0.5]},
        "turns": [{"prompt_text": "<u>2+2?<a>", "text": f"{answer}<e>", "token_ids": [1, 2]}] * turns,
        "messages": [] if raw else messages,
    }


def entry(*records: dict[str, Any], position: int = 0) -> dict[str, Any]:
    return task_entry(Task("2+2?", label=4, id=f"task-{position}", position=position), records)


def test_the_best_episodes_of_each_task_are_kept_in_the_order_of_the_tasks() -> None:
    entries = [entry(record(0.2, "a"), record(0.9, "b"), record(0.9, "c"), position=1), entry(record(0.1, "d"), position=0)]
    found = select(entries, SelectConfig(keep=2, min_reward=0.15))
    assert [row["messages"][-1]["content"] for row in found.rows] == ["b", "c"]
    assert found.rows[0] == {
        "messages": [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "b"}],
        "task_id": "task-1",
        "reward": 0.9,
        "score": 0.9,
        "model_scores": {"rm": [0.5]},
    }
    assert found.left_out == {"no reward reaches --min-reward": 1}
    assert [row["task_id"] for row in select(entries, SelectConfig()).rows] == ["task-0", "task-1"]


def test_a_pair_is_the_best_and_the_worst_with_its_margin() -> None:
    found = select([entry(record(0.5, "a"), record(1.0, "b"), record(0.25, "c"))], SelectConfig(select="pairs"))
    (row,) = found.rows
    assert row["prompt"] == [{"role": "user", "content": "2+2?"}]
    assert (row["chosen"], row["rejected"], row["reward_margin"]) == ("b", "c", 0.75)
    assert (row["chosen_reward"], row["rejected_score"]) == (1.0, 0.25)
    several = select([entry(*(record(value, name) for value, name in ((0.0, "d"), (0.9, "b"), (1.0, "a"), (0.1, "c"))))], PAIRS)
    assert [(row["chosen"], row["rejected"]) for row in several.rows] == [("a", "d"), ("b", "c")]
    same = select([entry(record(1.0, "a"), record(1.0, "a"), record(0.0, "d"), record(0.0, "d"))], PAIRS)
    assert len(same.rows) == 1
    equal = select([entry(record(0.5, "a"), record(0.5, "b"))], SelectConfig(select="pairs"))
    assert (equal.rows, equal.left_out) == ([], {"rewards do not differ enough": 1})
    near = SelectConfig(select="pairs", min_margin=0.75)
    assert select([entry(record(1.0, "b"), record(0.25, "c"))], near).rows == []


def test_episodes_of_several_turns_are_rows_and_no_pairs() -> None:
    entries = [entry(record(1.0, "a", turns=2), record(0.0, "b", turns=2))]
    (row,) = select(entries, SelectConfig()).rows
    assert [message["content"] for message in row["messages"]] == ["2+2?", "a", "sure?", "a"]
    assert select(entries, SelectConfig(select="pairs")).left_out == {"episodes of several turns make no pairs": 1}


def test_turns_that_differ_at_the_end_alone_make_no_pair() -> None:
    other = record(0.0, "4", turns=2)
    other["messages"][-1] = {"role": "assistant", "content": "5"}
    both = [entry(record(1.0, "4", turns=2), other)]
    assert select(both, SelectConfig(select="pairs")).left_out == {"episodes of several turns make no pairs": 1}


def test_an_entry_holds_what_the_policy_answered_and_nothing_after_it() -> None:
    frozen = {**record(1.0, "b"), "frozen": True}
    cut = record(1.0, "a", turns=2)
    cut["messages"].append({"role": "user", "content": "Once more?"})
    (kept,) = entry(frozen, cut)["episodes"]
    assert (kept["num_turns"], kept["num_tokens"], kept["messages"][-1]["content"]) == (2, 4, "a")
    (raw,) = entry(record(1.0, "a", turns=2, raw=True))["episodes"]
    assert raw["rendered"] == ["<u>2+2?<a>", "a<e><u>2+2?<a>a<e>"]


def test_a_reward_at_the_bound_is_kept_and_pairs_are_as_many_as_asked_for() -> None:
    assert len(select([entry(record(0.5))], SelectConfig(select="all", min_reward=0.5)).rows) == 1
    four = [entry(*(record(value, str(value)) for value in (0.0, 0.3, 0.6, 1.0)))]
    assert [len(select(four, SelectConfig(select="pairs", keep=count)).rows) for count in (1, 2, 3)] == [1, 2, 2]


def test_raw_text_makes_rendered_rows() -> None:
    entries = [entry(record(1.0, "a", raw=True), record(0.0, "b"))]
    assert [row["text"] for row in select(entries, SelectConfig()).rows] == ["<u>2+2?<a>a<e>"]
    both = [entry(record(1.0, "a", raw=True), record(0.0, "b", raw=True))]
    (pair,) = select(both, SelectConfig(select="pairs")).rows
    assert (pair["prompt"], pair["chosen"], pair["rejected"]) == ("<u>2+2?<a>", "a<e>", "b<e>")


def test_empty_answers_make_no_rows() -> None:
    found = select([entry(record(1.0, " "), record(0.5, "a"), record(0.0, "b"))], SelectConfig())
    assert [row["messages"][-1]["content"] for row in found.rows] == ["a"]
    assert select([entry(record(1.0, ""))], SelectConfig()).left_out == {"every answer is empty": 1}


def test_what_failed_is_counted_and_never_a_row() -> None:
    failed = record(None, "x", status="env_error")
    made = entry(failed, record(0.5, "a"))
    assert made["failures"] == ["env_error: ValueError: no"]
    assert len(made["episodes"]) == 1
    found = select([entry(failed)], SelectConfig(select="all"))
    assert (found.rows, found.left_out) == ([], {"every episode failed": 1})


def test_a_journal_drops_the_line_that_a_crash_cut_and_keeps_each_task_once(tmp_path: Path) -> None:
    path = tmp_path / "episodes.jsonl"
    journal = Journal(path)
    for position in range(3):
        journal.add(entry(record(0.5), position=position))
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    again = Journal(path)
    assert sorted(again.entries) == [0, 1]
    again.add(entry(record(0.5), position=2))
    with pytest.raises(ValueError, match="in the journal already"):
        again.add(entry(record(0.7), position=2))
    again.close()
    assert path.read_bytes() == whole


def test_tasks_that_changed_are_named() -> None:
    entries = {0: entry(record(0.5))}
    check_tasks(entries, [Task("2+2?", id="task-0", position=0)])
    with pytest.raises(ConfigError, match=r"'task-0' at place 0 is 'other' now"):
        check_tasks(entries, [Task("?", id="other", position=0)])
    with pytest.raises(ConfigError, match="is gone"):
        check_tasks(entries, [])


def test_settings_are_checked_and_compared() -> None:
    config = load_sample([AGENT, "--select", "pairs", "--n-samples-per-prompt", "4", "--output", "out"])
    assert (config.sampling.n_samples_per_prompt, config.run.runtime, config.sampling.temperature) == (4, "local", 1.0)
    saved = json.loads(to_json(config))
    assert differences(saved, load_sample([AGENT, "--select", "pairs", "--n-samples-per-prompt", "4", "--output", "o", "--resume"])) == []
    other = load_sample([AGENT, "--select", "pairs", "--n-samples-per-prompt", "4", "--seed", "3"])
    assert differences(saved, other) == ["--seed (was 0, now 3)"]
    for words, problem in (
        (["--min-margin", "0.5"], r"--min-margin = 0.5: has no effect with --select best"),
        (["--select", "all", "--keep", "2"], r"--keep = 2: has no effect with --select all"),
        (["--select", "pairs", "--n-samples-per-prompt", "1"], r"gives no pairs"),
        (["--resume"], r"needs to know which data set"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_sample([AGENT, *words])
