"""The recipes for small machines: their configurations, and the judge of the one for SmolLM2."""

from __future__ import annotations

import json
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl import StepState, Task
from agentrl.assets import tiny_model_path
from agentrl.cli.main import main
from agentrl.resolve.commands import load_config
from agentrl.suites.load import load_agent
from tests.benchmarks import recipes, trl_side_by_side
from tests.e2e.runs import ROOT

CONFIGS = sorted(ROOT.glob("examples/recipes/*/*.toml"))
Instructions = load_agent(str(ROOT / "examples/recipes/smollm2/instructions.py")).load()
TASKS: dict[str, Task] = {task.id: task for task in (*Instructions.tasks(), *Instructions.eval_tasks())}


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_a_recipe_passes_a_dry_run_and_its_page_has_its_command(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    name = config.relative_to(ROOT)
    made = {
        "distillation": ["--teacher", "runs/teacher/model"],
        "recipe": ["--model", str(tiny_model_path())],
    }  # by the page's other command
    assert main(["train", "--config", str(name), "--dry-run", *made.get(config.stem, [])]) == 0
    resolved = json.loads(capsys.readouterr().out.partition("\nagentrl:")[0])
    agent = tomllib.loads(config.read_text())["agent"]
    assert resolved["run"]["agent"] == (agent if agent.startswith("gym:") else str(ROOT / agent))
    does = "eval" if config.stem in recipes.RECIPES and recipes.RECIPES[config.stem].passes else "train"
    assert f"agentrl {does} --config {name}" in (ROOT / "docs" / "recipes.md").read_text()


@pytest.mark.parametrize("name", [name for name, recipe in recipes.RECIPES.items() if recipe.chats])
def test_a_recipe_that_imitates_first_has_the_commands_of_its_script(name: str) -> None:
    recipe, page = recipes.RECIPES[name], (ROOT / "docs" / "recipes.md").read_text()
    assert f"python examples/demonstrations.py {recipes.agent_of(name)} {recipe.chats} demonstrations.jsonl" in page
    passes = ("--num-epochs", str(max(recipe.passes))) if recipe.passes else ()
    assert f"agentrl sft --data demonstrations.jsonl {' '.join((*recipe.imitate, *passes))} --run-dir" in page


def test_every_recipe_for_this_machine_is_run_by_the_script() -> None:
    assert {path.stem for path in CONFIGS if path.parent.name == "cpu"} == set(recipes.RECIPES)
    assert {path.stem for path in recipes.PICTURES.glob("*.svg")} == {*recipes.RECIPES, "smollm2"}


def judged(task: str, answer: str) -> tuple[float, float | None]:
    result = Instructions().step(StepState(task=TASKS[task], label=TASKS[task].label, action_text=answer))
    assert result.terminated
    return result.reward, result.score


@pytest.mark.parametrize(
    ("task", "right", "wrong"),
    [
        ("commas-fruits-3", "apple, Pear, cherries.", {"apple, pear": 0.375, "apple, pear, pear": 0.375, "apple, pear, dog": 0.375}),
        ("numbered-planets-2", "1. Mars\n2. Venus", {"Mars\nVenus": 0.375, "1. Mars\n3. Venus": 0.375, "1. Mars": 0.375}),
        ("repeat-dog-3", "dog dog dog", {"dog dog": 0.375, "dog dog dog.": 0.25, "cat": 0.0}),
        ("capitals-the-old-dog", "THE OLD DOG.", {"the old dog": 0.0, "THE OLD CAT": 0.25, "AN OLD DOG": 0.25}),
        ("json-Peter-Rome", '{"city": "Rome", "name": "Peter"}', {'{"name": "Peter"}': 0.25, "Peter": 0.0, '{"name": "Peter"': 0.125}),
        ("sentence-river-4", "The river is wide.", {"The river is wide": 0.375, "A wide river.": 0.375, "river river river river.": 0.375}),
    ],
)
def test_the_reward_is_half_for_conditions_and_half_for_all_of_them(task: str, right: str, wrong: dict[str, float]) -> None:
    assert judged(task, right) == (1.0, 1.0)
    assert {answer: judged(task, answer) for answer in wrong} == {answer: (reward, 0.0) for answer, reward in wrong.items()}
    assert judged(task, "")[0] == 0.0


def test_the_examples_in_the_prompt_are_right_and_no_task_has_them() -> None:
    (system, *shots), last = TASKS["repeat-dog-3"].prompt[:-1], TASKS["repeat-dog-3"].prompt[-1]
    assert (system["role"], last["content"]) == ("system", 'Write the word "dog" 3 times, separated by spaces.')
    asked = {task.prompt[-1]["content"] for task in TASKS.values()}
    assert len(shots) == 12
    assert not asked & {shot["content"] for shot in shots}


def test_what_is_evaluated_is_never_trained_on() -> None:
    train, held_out = ({task.label[1] for task in tasks()} for tasks in (Instructions.tasks, Instructions.eval_tasks))
    assert train
    assert held_out
    assert not train & held_out
    kinds = [task.label[0] for task in Instructions.eval_tasks()]
    assert {kind: kinds.count(kind) for kind in kinds} == dict.fromkeys(("repeat", "sentence", "capitals", "json", "commas", "numbered"), 8)


def test_a_drawn_curve_has_the_steps_their_means_and_the_evaluations(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"step": 0, "eval/score": 0.25}]
    rows += [{"step": step, "reward/mean": step / 20} for step in range(1, 21)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    curve = recipes.read(tmp_path, "reward/mean")
    assert (len(curve.points), curve.evaluations) == (20, [(0, 0.25)])
    assert curve.smooth[0] == (10, pytest.approx(0.275))
    assert curve.smooth[-1] == (20, pytest.approx(0.775))
    picture = ElementTree.fromstring(recipes.draw([curve], "reward/mean"))
    thin, thick = picture.findall("{*}polyline")
    ends = [point.split(",") for point in thin.get("points", "").split()]
    bottom, top, right = recipes.HEIGHT - recipes.BOTTOM, recipes.TOP, recipes.WIDTH - recipes.RIGHT
    assert [float(number) for number in ends[-1]] == [right, top]
    assert float(ends[0][1]) == pytest.approx(bottom - (bottom - top) / 20, abs=0.1)
    assert (len(ends), len(thick.get("points", "").split()), len(picture.findall("{*}circle"))) == (20, 11, 1)


def test_the_comparison_with_trl_has_the_sizes_of_the_recipe() -> None:
    settings = tomllib.loads((ROOT / "examples/recipes/smollm2/recipe.toml").read_text())
    work, rollout = trl_side_by_side.TASKS["instructions"], settings["rollout"]
    assert work.agent == str(ROOT / settings["agent"])
    assert (work.groups, work.samples) == (rollout["groups_per_step"], rollout["n_samples_per_prompt"])
    assert (work.new_tokens, work.temperature) == (rollout["max_new_tokens"], rollout["temperature"])
    assert work.learning_rate == settings["learner"]["learning_rate"]
    flags = trl_side_by_side.agentrl_flags(replace(work, model=str(tiny_model_path())), "out", 1, 5)
    config = load_config(["--config", str(ROOT / "examples/recipes/smollm2/recipe.toml"), *flags])
    assert (config.flow.groups_per_step, config.sampling.temperature, config.training.num_steps) == (work.groups, work.temperature, 5)
