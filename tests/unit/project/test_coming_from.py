"""The pages for users of other systems: their examples play, their flags exist, and their metrics are those of the list."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl import Task
from agentrl.config.load import read_flags
from agentrl.config.sections import changed
from agentrl.config.translate import systems
from agentrl.resolve.commands import TRAIN, load_config
from agentrl.suites.load import load_agent
from agentrl.track.glossary import glossary
from tests.scripted_engine import ScriptedEngine
from tests.unit.rollout.scenes import PATIENT, Scene, says

DOCS = Path(__file__).parents[3] / "docs"
NAMES = ("from_trl", "from_verl", "from_prime_rl", "migrating")
EARLIER = {
    "actor_rollout_ref.actor.router_replay.mode",
    "actor_rollout_ref.rollout.limit_images",
    "actor_rollout_ref.rollout.multi_turn.interaction_config_path",
    "reward_model.reward_kwargs.overlong_buffer_cfg.len",
    "reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",
    "trainer.use_legacy_worker_impl",
}
"""Keys that verl's example scripts set, and that its configuration has not by itself."""
PAGES = {name: (DOCS / f"{name}.md").read_text(encoding="utf-8") for name in NAMES}


def command(page: str) -> list[str]:
    (line,) = re.findall(r"^    agentrl train (.*)$", PAGES[page], re.MULTILINE)
    return shlex.split(line)


def example(page: str, folder: Path) -> tuple[Path, str]:
    """The file of a page's example, under its own name, and the specification of its command."""
    (code,) = re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)
    words = command(page)
    spec = words[next(at for at, word in enumerate(words) if word in ("--agent", "--agent_func_path")) + 1]
    path = folder / spec.partition(":")[0]
    path.write_text(code)
    return path, f"{folder}/{spec}"


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("page", "answers", "reward"),
    [
        ("from_trl", ["7"], 1.0),
        ("from_trl", ["8"], 0.0),
        ("from_verl", ["7"], 1.0),
        ("from_verl", ["8"], 0.0),
        ("from_prime_rl", ["2", "1"], 1.1),
        ("from_prime_rl", ["x", "2", "3"], 0.1),
        ("migrating", ["7"], 1.0),
    ],
)
async def test_the_example_plays(page: str, answers: list[str], reward: float, tmp_path: Path) -> None:
    _, spec = example(page, tmp_path)
    cls = load_agent(spec).load()
    task = Task("What is 3+4?", label="7", id="t")
    if page != "migrating":
        task = next(task for task in cls.tasks() if task.prompt == "What is 3+4?" or task.label == 1)
    engine = ScriptedEngine(answer=says(*answers), max_model_len=1000)
    limits = changed(PATIENT, max_turns=3, max_new_tokens=400)
    scene = Scene(cls, engine, limits, replace(Scene.group_request, task=replace(task, id="t", seed=0)))
    trajectory = await scene.play()
    assert trajectory.error is None
    assert trajectory.reward == pytest.approx(reward)


@pytest.mark.parametrize("page", NAMES)
def test_the_command_is_understood(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    example(page, tmp_path)
    (tmp_path / "sums.jsonl").write_text('{"question": "What is 3+4?", "answer": "7"}\n')
    monkeypatch.chdir(tmp_path)
    assert load_config(command(page)).sampling.n_samples_per_prompt == 8


@pytest.mark.parametrize("page", ["from_trl", "from_verl", "from_prime_rl"])
def test_metrics_exist(page: str) -> None:
    _, _, rest = PAGES[page].partition("## Metrics")
    for row in re.findall(r"^\| `.*\| (.*) \|$", rest, re.MULTILINE):
        for name in re.findall(r"`([\w/<>@]+)`", row):
            assert glossary().find(name.replace("<function>", "x")) is not None, name


def test_settings_of_verl_are_those_of_the_installed_version() -> None:
    import verl
    import yaml

    folder = Path(verl.__path__[0]) / "trainer" / "config"
    configs = [yaml.safe_load((folder / f"_generated_ppo_{kind}trainer.yaml").read_text(encoding="utf-8")) for kind in ("", "megatron_")]
    words = [word for word in systems()["verl"].words if "*" not in word and "-" not in word]
    missing = [word for word in words if not any(reaches(config, word.split(".")) for config in configs)]
    assert len(words) > 100
    assert set(missing) <= {name for name in missing if name.startswith(("async_training.", "rollout."))} | EARLIER


def reaches(config: object, keys: list[str]) -> bool:
    for key in keys:
        if not isinstance(config, dict) or key not in config:
            return False
        config = config[key]
    return True


def test_flags_of_openrlhf_in_the_command_become_ours() -> None:
    assert read_flags(TRAIN, ["--pretrain", "m", "--n_samples_per_prompt", "4"]).settings.sampling.n_samples_per_prompt == 4
