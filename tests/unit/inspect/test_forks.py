"""Episodes that were forked: which from which, and at which turn."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.cli import inspect
from agentrl.core.callbacks import GroupJudged
from agentrl.core.summaries import summarize
from agentrl.core.types import Group, GroupRequest, Status, Task
from agentrl.inspect.episode import episode_answer, group_answer
from agentrl.inspect.reader import RunReader
from agentrl.rollout.records import group_records
from agentrl.track.index import index_path, read_index
from agentrl.track.text import Screen
from tests.run_files import MadeRun


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Episodes 0-0-1 and 0-0-2 share two turns with 0-0-0; 0-0-3 was played from its beginning."""
    made = MadeRun(tmp_path_factory.mktemp("runs") / "run")
    root, *others = (made._episode(0, index, 1, 3, 4, Status.FINISHED, "") for index in range(4))
    forks = [replace(one, turns=(*root.turns[:2], one.turns[2]), forked_from="0-0-0", forked_turns=2) for one in others[:2]]
    group = Group(group_id=0, task=Task("q", id="t"), trajectories=(root, *forks, others[2]))
    group_request = GroupRequest(group_id=0, task=group.task, n_samples_per_prompt=4, version=0, record=4)
    summary = summarize(group, seconds=0.5, records=group_records(group_request, group))
    made.judged(GroupJudged(group_id=0, attempt=0, task=group.task, verdict="kept", reason="", summary=summary))
    return made.close()


def printed(run: Path, *words: str, monkeypatch: pytest.MonkeyPatch) -> str:
    out = io.StringIO()
    monkeypatch.setattr(inspect, "Screen", lambda: Screen(Console(file=out, width=200)))
    assert inspect.main([str(run), *words]) == 0
    return out.getvalue()


def test_the_viewer_is_told_which_episode_was_forked_from_which(run: Path) -> None:
    reader = RunReader(run).open()
    root, fork = episode_answer(reader, "0-0-0"), episode_answer(reader, "0-0-2")
    assert (root["forked_from"], root["forks"]) == (None, [{"episode": "0-0-1", "turns": 2}, {"episode": "0-0-2", "turns": 2}])
    assert (fork["forked_from"], fork["forked_turns"], fork["forks"]) == ("0-0-0", 2, [])
    members = {member["episode"]: (member["forked_from"], member["forked_turns"]) for member in group_answer(reader, 0)["members"]}
    assert members == {"0-0-0": (None, 0), "0-0-1": ("0-0-0", 2), "0-0-2": ("0-0-0", 2), "0-0-3": (None, 0)}


def test_inspect_names_forks_and_the_turns_they_share(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = printed(run, "0-0-0", monkeypatch=monkeypatch)
    assert "0-0-1, 0-0-2 go on after 2 turns" in root
    assert "shared" not in root
    fork = printed(run, "0-0-1", monkeypatch=monkeypatch)
    assert "from 0-0-0 after 2 turns" in fork
    assert [line.split("  ")[1].strip() for line in fork.splitlines() if line.startswith("turn ")][:2] == ["shared with 0-0-0"] * 2
    assert fork.count("shared with 0-0-0") == 2
    table = printed(run, monkeypatch=monkeypatch)
    assert "forked from" in table
    assert table.count("0-0-0, 2 turns") == 2


def test_an_index_without_forks_is_read_anew_from_the_records(run: Path, tmp_path: Path) -> None:
    """As one that an earlier version wrote."""
    old = tmp_path / "old"
    old.mkdir()
    for path in run.iterdir():
        (old / path.name).write_bytes(path.read_bytes())
    index = index_path(old / "trajectories.jsonl")
    head, *rows = (json.loads(line) for line in index.read_text().splitlines())
    head["columns"] = head["columns"][:-5]
    index.write_text("".join(json.dumps(line) + "\n" for line in (head, *(row[:-5] for row in rows))))
    assert not list(read_index(old / "trajectories.jsonl"))
    assert episode_answer(RunReader(old).open(), "0-0-0")["forks"][0]["episode"] == "0-0-1"
