"""Suites on the real stack: a data set of reasoning-gym against the best constant answer, games, and the scheme of an installed package."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from agentrl.suites.load import load_agent
from tests.e2e.everywhere import runs_everywhere
from tests.e2e.runs import ROOT, command, succeeded, train
from tests.sandboxes import needs_sandbox
from tests.unit.suites.packages import install

BITS = "reasoning-gym:count_bits?max_n=63&ask="
MARGIN = 0.15  # over the constant answer, as docs/benchmarks.md promises


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_training_beats_the_best_constant_answer_at_counting_bits(tmp_path: Path) -> None:
    pytest.importorskip("reasoning_gym", exc_type=ImportError)
    cls = load_agent(BITS).load()
    constant = Counter(cls.make_item(seed)["answer"] for seed in range(1000)).most_common(1)[0][1] / 1000
    assert 0.25 < constant < 0.35
    arguments = ("--num-steps", "60", "--groups-per-step", "16", "--n-samples-per-prompt", "16", "--max-new-tokens", "8", "--seed", "1")
    run = succeeded(train(tmp_path / "run", "--runtime", "local", "--no-save-model", *arguments, agent=BITS, timeout_s=1100))
    rewards = [row["reward/mean"] for row in run.metrics]
    assert sum(rewards[-5:]) / 5 >= constant + MARGIN
    assert sum(rewards[-5:]) >= sum(rewards[:5]) + 5 * 0.25


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("spec", "package"),
    [
        ("gem:game:GuessTheNumber-v0-easy", "gem.envs"),
        ("textarena:GuessTheNumber-v0", "textarena"),
        ("textarena:TicTacToe-v0", "textarena"),
        ("textarena:Blackjack-v0", "textarena"),
    ],
)
def test_games_train(tmp_path: Path, spec: str, package: str) -> None:
    pytest.importorskip(package, exc_type=ImportError)
    arguments = ("--num-steps", "2", "--groups-per-step", "2", "--n-samples-per-prompt", "4", "--max-new-tokens", "8", "--max-turns", "8")
    run = succeeded(train(tmp_path / "run", "--runtime", "local", "--no-save-model", *arguments, agent=spec))
    ledger = run.summary["ledger"]
    assert (ledger["submitted"], ledger["trained"]) == (4, 4), run.output
    assert {row["failures/retries"] for row in run.metrics} == {0}


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_sandbox
def test_task_folders_of_harbor_are_checked_evaluated_and_trained(tmp_path: Path) -> None:
    runs_everywhere(tmp_path, f"harbor:{ROOT}/examples/harbor#agent={sys.executable} {ROOT}/examples/command_line/agent.py {{prompt}}")


SPELLING = """
from agentrl import AgentInstance, StepResult, Task

class Spelling(AgentInstance):
    words = ()

    @classmethod
    def tasks(cls):
        return [Task(f"Spell {word}.", label=word) for word in cls.words]

    def step(self, state):
        return StepResult(float(state.label in state.action_text), terminated=True)

def make(text):
    return type("Spelling", (Spelling,), {"words": text.split("+"), "__module__": __name__})
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_scheme_of_an_installed_package_works_in_every_command_and_on_ray(tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    install(site, "spelling-suite", {"spelling_suite": SPELLING}, {"spell": "spelling_suite:make"})
    env = {"PYTHONPATH": f"{site}:{ROOT}"}
    runs_everywhere(tmp_path, "spell:one+two", env=env)
    sizes = ("--num-steps", "2", "--groups-per-step", "2", "--n-samples-per-prompt", "2", "--max-new-tokens", "8", "--no-save-model")
    places = ("--runtime", "ray", "--env-isolation", "process")
    assert succeeded(train(tmp_path / "ray", *sizes, *places, agent="spell:one+two", env=env)).summary["ledger"]["trained"] == 4
    code = f"import agentrl; print(agentrl.evaluate('spell:one+two', runtime='local', max_new_tokens=8, output={str(tmp_path / 'own')!r}))"
    for words, text in (command("play", "spell:one+two"), "It is one.\n"), ([sys.executable, "-c", code], ""):
        done = subprocess.run(words, input=text, capture_output=True, text=True, cwd=ROOT, env={**os.environ, **env}, timeout=200)
        assert done.returncode == 0, done.stderr
        assert not text or "reward 1" in done.stdout
