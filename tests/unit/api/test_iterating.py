"""The words of each phase, what is refused, and rounds that are done once; the phases themselves are stood in for."""

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.api import iterating
from agentrl.api.iterating import PhaseError, check_phases, iterate
from agentrl.config.iterate import IterateConfig, given_iterate, load_iterate
from agentrl.core.errors import ConfigError

AGENT = "envs/arithmetic.py"


def words_of(words: Sequence[str], flag: str) -> str:
    return words[list(words).index(flag) + 1]


class Phases:
    """Writes what the phases would; `fail` makes one of them end with a code."""

    def __init__(self, fail: tuple[str, int] = ("", 0), rows: int = 5) -> None:
        self.calls: list[tuple[str, list[str]]] = []
        self.fail, self.rows = fail, rows

    def __call__(self, words: Sequence[str]) -> int:
        command, rest = words[3], list(words[4:])
        self.calls.append((command, rest))
        if self.fail == (command, self.fail[1]) and self.fail[1]:
            return self.fail[1]
        if command == "sample":
            folder = Path(words_of(rest, "--output"))
            folder.mkdir(parents=True, exist_ok=True)
            counts = {"num_rows": self.rows, "num_episodes": 9, "reward": 0.5, "best_reward": 1.0, "left_out": {"why": 2}, "path": "x"}
            (folder / "summary.json").write_text(json.dumps(counts))
        elif command == "eval":
            folder = Path(words_of(rest, "--output"))
            folder.mkdir(parents=True)
            done = sum(name == "eval" for name, _ in self.calls)
            (folder / "eval.json").write_text(json.dumps({"model": {"overall": {"reward": {"value": 0.1 * done}}}}))
        else:
            (Path(words_of(rest, "--run-dir")) / "model").mkdir(parents=True)
        return 0


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[Phases], Phases]:
    def use(phases: Phases) -> Phases:
        monkeypatch.setattr(iterating, "_run", phases)
        return phases

    return use


def run(config: IterateConfig) -> iterating.Iterated:
    return iterate(config, Console(file=io.StringIO()))


def config(folder: Path, *more: str) -> IterateConfig:
    return load_iterate(["dpo", AGENT, "--run-dir", str(folder), "--rounds", "2", "--sample.num-tasks", "4", *more])


def test_each_round_goes_on_with_the_model_of_the_last(tmp_path: Path, stand_in: Callable[[Phases], Phases]) -> None:
    phases = stand_in(Phases())
    result = run(config(tmp_path / "it", "--train.num-steps", "3"))
    assert [name for name, _ in phases.calls] == ["eval", "sample", "dpo", "eval", "sample", "dpo", "eval"]
    first = str(tmp_path / "it" / "round-01" / "train" / "model")
    sampled, trained = phases.calls[4][1], phases.calls[5][1]
    assert words_of(sampled, "--model") == words_of(trained, "--model") == first
    assert (words_of(sampled, "--select"), words_of(sampled, "--num-tasks"), words_of(trained, "--num-steps")) == ("pairs", "4", "3")
    assert words_of(trained, "--data") == str(tmp_path / "it" / "round-02" / "data" / "data.jsonl")
    assert words_of(phases.calls[1][1], "--seed") != words_of(sampled, "--seed")
    assert "--model" not in phases.calls[0][1]
    assert [round(done.metrics["reward"], 1) for done in result.rounds] == [0.1, 0.2, 0.3]
    assert result.model == str(tmp_path / "it" / "round-02" / "train" / "model")
    assert result.rounds[1].sampled == {"num_rows": 5, "num_episodes": 9, "reward": 0.5, "best_reward": 1.0}


def test_what_is_done_is_not_done_again(tmp_path: Path, stand_in: Callable[[Phases], Phases]) -> None:
    stand_in(Phases(fail=("dpo", 1)))
    with pytest.raises(PhaseError, match="round 1: agentrl dpo ended with code 1"):
        run(config(tmp_path / "it"))
    phases = stand_in(Phases())
    run(config(tmp_path / "it", "--resume"))
    assert [name for name, _ in phases.calls] == ["dpo", "eval", "sample", "dpo", "eval"]
    more = stand_in(Phases())
    result = run(load_iterate(["dpo", AGENT, "--run-dir", str(tmp_path / "it"), "--rounds", "3", "--sample.num-tasks", "4", "--resume"]))
    assert [name for name, _ in more.calls] == ["sample", "dpo", "eval"]
    assert len(result.rounds) == 4


def test_a_signal_in_a_phase_interrupts_the_run(tmp_path: Path, stand_in: Callable[[Phases], Phases]) -> None:
    stand_in(Phases(fail=("sample", 130)))
    with pytest.raises(KeyboardInterrupt):
        run(config(tmp_path / "it"))


def test_a_round_without_data_says_why(tmp_path: Path, stand_in: Callable[[Phases], Phases]) -> None:
    stand_in(Phases(rows=0))
    with pytest.raises(PhaseError, match=r"round 1 has no data to train on \(2 tasks: why\)"):
        run(config(tmp_path / "it"))


def test_another_run_in_the_directory_is_refused(tmp_path: Path, stand_in: Callable[[Phases], Phases]) -> None:
    stand_in(Phases())
    run(config(tmp_path / "it"))
    with pytest.raises(ConfigError, match="holds a run already"):
        run(config(tmp_path / "it"))
    with pytest.raises(ConfigError, match=r"another run with train \(was \[\], now \['--num-steps', '7'\]\)"):
        run(config(tmp_path / "it", "--resume", "--train.num-steps", "7"))


def test_mistakes_are_told_with_the_phase_before_anything_starts() -> None:
    for words, problem in (
        (["--train.num-stps", "3"], r"--train.*did you mean --num-steps"),
        (["--sample.min-reward", "0.5"], r"--sample.min-reward = 0.5: has no effect with --select pairs"),
        (["--eval.eval-samples", "0"], r"--eval.eval-samples"),
    ):
        with pytest.raises(ConfigError, match=problem):
            check_phases(load_iterate(["dpo", AGENT, *words]))
    with pytest.raises(ConfigError, match=r"--train.model.*is decided by the rounds"):
        load_iterate(["dpo", AGENT, "--train.model", "x"])
    with pytest.raises(ConfigError, match="no environment is named"):
        load_iterate(["dpo"])
    check_phases(load_iterate(["sft", AGENT, "--train.num-steps", "3"]))


def test_a_file_and_python_say_the_same_as_flags(tmp_path: Path) -> None:
    file = tmp_path / "it.toml"
    file.write_text("[sample]\nnum_tasks = 4\n[train]\nnum_steps = 3\n")
    flags = load_iterate(["sft", AGENT, "--sample.num-tasks", "4", "--train.num-steps", "3"])
    assert load_iterate(["sft", AGENT, "--config", str(file)]) == flags
    assert given_iterate("sft", AGENT, {"sample": {"num_tasks": 4}, "train": {"num_steps": 3}}) == flags
    with pytest.raises(ConfigError, match="turns = 3: is not a setting"):
        given_iterate("sft", AGENT, {"turns": 3})
