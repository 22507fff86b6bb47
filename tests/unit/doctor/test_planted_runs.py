"""Runs with one planted error each and runs without: the doctor names the error first, and finds none in a sound run.

The episodes are drawn from a policy that is right with some probability; the file of the environment is real, judges and replays them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from agentrl.cli.main import main
from agentrl.core.types import Status, Task
from tests.unit.doctor.made import Answer, PlantedRun

STEPS, GROUPS, MEMBERS = 8, 6, 6
FIRST = 1000
"""The first label; no prompt holds a label."""
HEAD = """import json, re
from agentrl import AgentInstance, StepResult, Task
"""
ENV = """
class Env(AgentInstance):
    @classmethod
    def tasks(cls):
        return [Task("none")]

    def step(self, state):
        made = reward(state.action_text, state.label)
        parts = made if isinstance(made, dict) else {}
        return StepResult(float(sum(parts.values()) if parts else made), terminated=True, reward_parts=parts)
"""
EXACT = "def reward(text, label):\n    return float(text.strip() == label)\n"
Write = Callable[[str, bool, random.Random], str]
"""Text of an answer: of the right one, whether it is meant to be right, and a generator."""


def plainly(right: str, good: bool, draw: random.Random) -> str:
    return right if good else str(draw.randrange(20, 60))


def in_form(form: str) -> Write:
    return lambda right, good, draw: form % plainly(right, good, draw)


def wordy(right: str, good: bool, draw: random.Random) -> str:
    return " ".join(draw.choice(("so", "we", "think", "that", "it", "may", "be")) for _ in range(draw.randrange(1, 9)))


def with_one(right: str, good: bool, draw: random.Random) -> str:
    return "As an expert I am sure" if good else f"perhaps {draw.randrange(99)} or {draw.randrange(99)}"


def copying(right: str, good: bool, draw: random.Random) -> str:
    return f"How much is it, you ask: How much is {int(right) - 1000} and {int(right) - 900}?" if good else wordy(right, good, draw)


def repeated(right: str, good: bool, draw: random.Random) -> str:
    word = f"{draw.choice('abcdef')}{draw.randrange(99)}"
    return " ".join([word] * 6) if good else f"{word} and {draw.randrange(99)} so {draw.randrange(99)}"


def emptily(right: str, good: bool, draw: random.Random) -> str:
    return right if draw.random() < 0.03 else ""


def blankly(right: str, good: bool, draw: random.Random) -> str:
    return right if draw.random() < 0.03 else draw.choice((" ", "\n", " \n"))


@dataclass(frozen=True, kw_only=True)
class Plant:
    """One run: how its answers are written and judged.

    Attributes:
        code: The function `reward` of its file.
        label: Label of a task, of the right answer as a number.
        right: Text of the right answer.
        write: Text of an answer.
        skill: Share of right answers by step.
        metrics: Metrics of a step, from 0.
        answer: Changes of an answer.
        prompt: The question.
    """

    code: str = EXACT
    label: Callable[[int], Any] = str
    right: Callable[[int], str] = str
    write: Write = plainly
    skill: Callable[[int], float] = lambda step: 0.4
    metrics: Callable[[int], dict[str, float]] = lambda step: {}
    answer: dict[str, Any] = field(default_factory=dict)
    prompt: str = "How much is {a} and {b}?"
    failing: int = 0
    evaluated: bool = False
    warnings: tuple[dict[str, str], ...] = ()


def learns(step: int) -> float:
    return 0.05 + 0.1 * step


def drifting(step: int) -> dict[str, float]:
    return {"mismatch__mean": 0.3, "mismatch__limit": 0.05}


WANTS = "def reward(text, label):\n    found = re.search({!r}, text)\n    return float(found is not None and found[1] == label)\n"
NO_LABELS = {"id": "no-labels", "text": "no task has a label", "remedy": "Write --label-key answer."}

BROKEN: dict[str, tuple[str, Plant]] = {
    "whole numbers as labels": ("label-type", Plant(label=int)),
    "decimal numbers as labels": ("label-type", Plant(label=lambda n: n + 0.5, right=lambda n: str(n + 0.5))),
    "truth values as labels": ("label-type", Plant(label=lambda n: n % 2 == 0, right=lambda n: str(n % 2 == 0))),
    "boxed": ("format-never-met", Plant(code=WANTS.format(r"\\boxed\{(.*)\}"))),
    "hashes": ("format-never-met", Plant(code=WANTS.format("#### (.*)"))),
    "tags": ("format-never-met", Plant(code=WANTS.format("<answer>(.*)</answer>"))),
    "a sentence": ("format-never-met", Plant(code=WANTS.format(r"The answer is (\S+)\."))),
    "a prefix": ("format-never-met", Plant(code=WANTS.format("Answer: (.*)"))),
    "JSON": (
        "format-never-met",
        Plant(
            code="def reward(text, label):\n    try:\n        return float(json.loads(text)['answer'] == label)\n"
            "    except (ValueError, TypeError, KeyError):\n        return 0.0\n"
        ),
    ),
    "a form of its own": ("format-never-met", Plant(code=WANTS.format(r"FINAL\[(.*)\]"))),
    "capitals": ("format-never-met", Plant(label=lambda n: f"City{n}", right=lambda n: f"city{n}")),
    "a full stop": (
        "format-never-met",
        Plant(right=lambda n: f"It is {n}.", write=lambda right, good, draw: right if good else "It is 77."),
    ),
    "a part for the form": (
        "format-never-met",
        Plant(code="def reward(text, label):\n    return {'format': float(text.startswith('[')), 'right': 0.0}\n", write=wordy),
    ),
    "no labels": ("labels-missing", Plant(label=lambda n: None)),
    "no labels, as the run said": (
        "labels-missing",
        Plant(label=lambda n: None, code="def reward(text, given):\n    return float(text.strip() == given)\n", warnings=(NO_LABELS,)),
    ),
    "another template": ("answers-empty", Plant(write=emptily)),
    "blank answers": ("answers-empty", Plant(write=blankly)),
    "a sign": ("right-earns-less", Plant(code="def reward(text, label):\n    return -float(text.strip() == label)\n")),
    "not equal": ("right-earns-less", Plant(code="def reward(text, label):\n    return float(text.strip() != label)\n")),
    "a sign in a form": (
        "right-earns-less",
        Plant(
            code=WANTS.format(r"\\boxed\{(.*)\}").replace("found[1] == label", "found[1] != label"),
            write=in_form("\\boxed{%s}"),
            skill=lambda step: 0.5 - 0.05 * step,
        ),
    ),
    "cut answers": ("answers-cut", Plant(write=wordy, answer={"cut": True, "status": Status.TRUNCATED})),
    "cut episodes": ("turns-cut", Plant(write=wordy, answer={"status": Status.TRUNCATED, "turns": 8})),
    "long observations": (
        "observations-do-not-fit",
        Plant(write=wordy, answer={"status": Status.TRUNCATED}, metrics=lambda step: {"episode__overflowed": 0.8, "episode__count": 36.0}),
    ),
    "a fall": ("policy-broke", Plant(skill=lambda step: 0.7 if step < 4 else 0.05, metrics=lambda step: {"entropy": 1.0 - 0.1 * step})),
    "a collapse": ("policy-broke", Plant(skill=lambda step: 0.4 - 0.04 * step, metrics=lambda step: {"entropy": 0.3**step})),
    "an explosion": ("policy-broke", Plant(skill=lambda step: 0.5 - 0.06 * step, metrics=lambda step: {"entropy": 0.5 + step})),
    "clipping": ("all-masked", Plant(metrics=lambda step: {"policy__clip_fraction": 0.97})),
    "old data": ("all-masked", Plant(metrics=lambda step: {"off_policy__masked": 0.95})),
    "no rate": ("no-effect", Plant(metrics=lambda step: {"grad_norm": 0.3, "learning_rate": 1e-10})),
    "another engine": ("mismatch", Plant(metrics=drifting)),
    "a broken service": ("failed-episodes", Plant(failing=3)),
    "length": ("length-only", Plant(code="def reward(text, label):\n    return min(len(text.strip()) / 40, 1.0)\n", write=wordy)),
    "one answer": ("one-answer-wins", Plant(code="def reward(text, label):\n    return float('expert' in text)\n", write=with_one)),
    "copies": (
        "copying-wins",
        Plant(code="def reward(text, label):\n    return float('How much' in text)\n", write=copying),
    ),
    "repetition": (
        "repetition-wins",
        Plant(code="def reward(text, label):\n    return float(len(set(text.split())) == 1)\n", write=repeated, label=lambda n: None),
    ),
    "tasks that are trained on": ("evaluation-on-training-tasks", Plant(evaluated=True)),
    "too hard": ("too-hard", Plant(label=lambda n: str(100 * n + 7), write=wordy)),
    "too easy": ("too-easy", Plant(skill=lambda step: 1.0)),
}
SOUND: dict[str, Plant] = {
    "a form of the label": Plant(
        code="def reward(text, label):\n    return float(text.strip() == label.split('####')[-1].strip())\n",
        label=lambda n: f"{n} = <<{n}>>\n#### {n}",
        skill=learns,
    ),
    "a form of a label that has another name": Plant(
        code="def reward(text, given):\n    wanted = given.split('####')[-1].strip()\n    return float(text.strip() == wanted)\n",
        label=lambda n: f"{n} = <<{n}>>\n#### {n}",
        skill=lambda step: 0.01 + 0.03 * step,
    ),
    "a form that is allowed": Plant(
        code="def reward(text, label):\n    found = re.search(r'\\\\boxed\\{(.*)\\}', text)\n"
        "    return float((found[1] if found else text.strip()) == label)\n",
        skill=learns,
    ),
    "a penalty that nobody pays": Plant(
        code="def reward(text, label):\n    return {'format_penalty': -0.5 * ('{' in text), 'right': float(text.strip() == label)}\n",
        skill=learns,
    ),
    "a judge without labels": Plant(
        code="def reward(text, label):\n    return min(text.count('so') + text.count('may'), 3) / 3\n",
        label=lambda n: None,
        write=lambda right, good, draw: f"{wordy(right, good, draw)}{' so may so' if good else ''}",
        skill=learns,
    ),
}


def made(tmp_path: Path, plant: Plant) -> Path:
    """The run of a plant."""
    file = tmp_path / "env.py"
    file.write_text(HEAD + plant.code + ENV)
    names: dict[str, Any] = {}
    exec(compile(HEAD + plant.code, str(file), "exec"), names)
    run, draw = PlantedRun(tmp_path / "run", f"{file}:Env"), random.Random(0)
    for step in range(STEPS):
        for group in range(GROUPS):
            task, right = _task(plant, step * GROUPS + group)
            answers = []
            for member in range(MEMBERS):
                text = plant.write(right, draw.random() < plant.skill(step), draw)
                judged = names["reward"](text, task.label)
                parts = judged if isinstance(judged, dict) else {}
                earned = float(sum(parts.values()) if parts else judged)
                failed = {"status": Status.ENV_ERROR} if member < plant.failing else {}
                answers.append(Answer(**{"text": text, "reward": earned, "parts": parts, **plant.answer, **failed}))
            run.group(task, answers)
        run.step(**{"entropy": 1.0, **plant.metrics(step)})
    for number in range(12 if plant.evaluated else 0):
        run.group(_task(plant, number)[0], [Answer(text="7")], evaluation="eval-8")
    run.made.close()
    (run.folder / "summary.json").write_text(json.dumps({"warnings": plant.warnings}))
    return run.folder


def _task(plant: Plant, number: int) -> tuple[Task, str]:
    prompt = plant.prompt.format(a=number, b=number + 100)
    return Task(prompt, label=plant.label(number + FIRST), id=f"task-{number}"), plant.right(number + FIRST)


def examined(folder: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    capsys.readouterr()
    main(["doctor", str(folder), "--json"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.parametrize("name", BROKEN)
def test_the_planted_error_is_named_first(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    cause, plant = BROKEN[name]
    verdicts = examined(made(tmp_path, plant), capsys)["verdicts"]
    assert [verdict["id"] for verdict in verdicts][:1] == [cause], verdicts
    assert verdicts[0]["remedy"]
    assert verdicts[0]["episodes"] or verdicts[0]["steps"]


@pytest.mark.parametrize("name", SOUND)
def test_nothing_is_found_in_a_sound_run(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    report = examined(made(tmp_path, SOUND[name]), capsys)
    assert report["verdicts"] == []
    assert (report["outcome"], report["rising"]) == ("learning", True)


def test_a_form_that_pays_no_more_than_meaningless_text_is_refuted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = "def reward(text, label):\n    return float(len(text) > 6)  # and not the number in \\\\boxed{}\n\n\nFORM = '\\\\boxed{'\n"
    report = examined(made(tmp_path, Plant(code=code)), capsys)
    assert "format-never-met" not in [verdict["id"] for verdict in report["verdicts"]]
    assert report["untested"]["format-never-met"] == "refuted: a replay with the change paid no more, or no more than meaningless text"


def test_what_cannot_be_replayed_refutes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = made(tmp_path, BROKEN["boxed"][1])
    file = tmp_path / "env.py"
    file.write_text(file.read_text().replace("made = reward(", "made = fetch("))
    (verdict,) = examined(run, capsys)["verdicts"]
    assert (verdict["id"], verdict["paid"]) == ("format-never-met", "")


def test_a_replay_shows_what_other_text_of_the_same_length_earns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (verdict,) = examined(made(tmp_path, BROKEN["boxed"][1]), capsys)["verdicts"]
    assert "0 becomes 1 on average, and 0 with other text of that length" in verdict["paid"]
