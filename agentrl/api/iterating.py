"""Rounds of sampling, training and evaluation: iterative DPO, and rejection sampling with fine-tuning (RAFT)."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from agentrl.config.iterate import IterateConfig
from agentrl.config.mapping import differences, to_json
from agentrl.core.adapter_files import holds_adapter
from agentrl.core.directories import held_directory, held_new_directory
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.core.exit_codes import INCOMPLETE, INTERRUPTED
from agentrl.core.files import write_text
from agentrl.core.paths import shown_path
from agentrl.core.process import handling_signals, refuse_import
from agentrl.core.types import derive_seed
from agentrl.resolve.directories import default_directory, keep_settings
from agentrl.track.console import open_console
from agentrl.track.jsonl import encode, encode_indented
from agentrl.track.text import number

SETTINGS, ROUNDS, SUMMARY = "iterate.json", "rounds.jsonl", "summary.json"
SELECT = {"dpo": "pairs", "sft": "best"}


class PhaseError(AgentRLError, RuntimeError):
    """A phase of a round failed; its own message stands before this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round; round 0 is the evaluation of the model to begin with.

    Attributes:
        round: Its number.
        model: The model after the round.
        metrics: Figures of its evaluation: ``reward``, ``score``, ``pass@1``, and so on.
        sampled: Figures of its data set: ``reward``, ``best_reward``, ``num_rows``; empty for round 0.
        seconds: Time that the round took, without interruptions.
    """

    round: int
    model: str
    metrics: Mapping[str, float]
    sampled: Mapping[str, Any]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Iterated:
    """A run of several rounds.

    Attributes:
        path: Its directory.
        rounds: The rounds, with round 0 first.
    """

    path: Path
    rounds: Sequence[Round]

    @property
    def model(self) -> str:
        """Directory of the model after the last round."""
        return self.rounds[-1].model


def iterate(config: IterateConfig, console: Console | None = None) -> Iterated:
    """Run the rounds that are not done yet, each phase in a process of its own, which frees all memory for the next one.

    Consumes the phases' directories where an earlier command left them. Waits for one phase at a time; unblocked by its end. A signal goes
    to the phase, which saves what it has.

    Raises:
        ConfigError: If a setting of a phase is wrong, or the directory holds another run; nothing has been started by then.
        PhaseError: If a phase failed.
        KeyboardInterrupt: If a signal ended a phase.
    """
    refuse_import()
    check_phases(config)
    default = default_directory(f"iterate-{_name(config)}")
    with held_directory(config.iterate.run_dir) if config.iterate.run_dir else held_new_directory(default) as path:
        return _all_rounds(config, path, console or open_console())


def _all_rounds(config: IterateConfig, path: Path, console: Console) -> Iterated:
    others = partial(_changed, config=config)
    keep_settings(path / SETTINGS, to_json(config), resume=config.iterate.resume, flag="--run-dir", kind="run", others=others)
    rounds = read_rounds(path)
    for index in range(len(rounds), config.iterate.rounds + 1):
        before = rounds[-1].model if rounds else config.iterate.model
        rounds.append(_Round(config, path, index, before, console).run())
        write_text(path / ROUNDS, "".join(encode(asdict(done)) + "\n" for done in rounds))
    result = Iterated(path=path, rounds=rounds)
    summary = {"status": "finished", "model": result.model, "rounds": [asdict(done) for done in rounds]}
    write_text(path / SUMMARY, encode_indented(summary))
    _show(console, result)
    return result


def check_phases(config: IterateConfig) -> None:
    """Read the settings of every phase as the phase itself will, so that a mistake is told before the first round.

    Raises:
        ConfigError: If one is wrong; the message says of which phase.
    """
    from agentrl.config.methods import METHODS
    from agentrl.resolve.commands import load_eval, load_sample
    from agentrl.resolve.tune import load as load_method

    # Round 1 stands for all of them, because the others differ in names, seeds and models alone.
    plan = _Round(config, Path("runs") / "iterate", 1, config.iterate.model, Console(quiet=True))
    checks: dict[str, Callable[[], object]] = {
        "sample": lambda: load_sample(plan.sample_words()),
        # The data set is not sampled yet: a file that exists takes its place.
        "train": lambda: load_method(METHODS[config.iterate.method], plan.train_words(Path(__file__))),
        "eval": lambda: load_eval(plan.eval_words()),
    }
    for phase, check in checks.items():
        try:
            check()
        except ConfigError as error:
            name = error.field if error.field.startswith("--") else f"--{error.field}"
            raise ConfigError(f"--{phase}.{name[2:]}", error.value, error.problem, error.remedy) from error


def read_rounds(path: Path) -> list[Round]:
    """Return the rounds that are done."""
    file = path / ROUNDS
    lines = file.read_text(encoding="ascii").splitlines() if file.exists() else []
    return [Round(**json.loads(line)) for line in lines]


@dataclass(slots=True)
class _Round:
    """One round: its words, its directories, and its phases in order."""

    config: IterateConfig
    path: Path
    index: int
    model: str  # model before the round, "" for the bundled one
    console: Console

    @property
    def folder(self) -> Path:
        return self.path / f"round-{self.index:02d}"

    @property
    def seed(self) -> str:
        return str(derive_seed(self.config.iterate.seed, "round", self.index) % 2**31)

    def run(self) -> Round:
        """Do the phases that are not done yet."""
        start = time.monotonic()
        title = f"round {self.index} of {self.config.iterate.rounds}" if self.index else "the model to begin with"
        self.console.print(Text(f"\n{title}", style="bold"))
        sampled: dict[str, Any] = {}
        if self.index:
            data, trained = self.folder / "data", self.folder / "train" / "model"
            self._phase("sample", self.sample_words(), data / "summary.json")
            sampled = _json(data / "summary.json")
            if not sampled["num_rows"]:
                left = "; ".join(f"{count} tasks: {reason}" for reason, count in sampled["left_out"].items())
                raise PhaseError(f"round {self.index} has no data to train on ({left}); --rounds ends where nothing is left to learn")
            self._phase("train", self.train_words(data / "data.jsonl"), trained, method=self.config.iterate.method)
            self.model = self._whole_model(trained)
        self._phase("eval", self.eval_words(), self.folder / "eval" / "eval.json")
        overall = _json(self.folder / "eval" / "eval.json")["model"]["overall"]
        metrics = {name: float(estimate["value"]) for name, estimate in overall.items()}
        kept: dict[str, Any] = {
            str(name): sampled[name] for name in ("num_rows", "num_episodes", "reward", "best_reward") if name in sampled
        }
        return Round(round=self.index, model=self.model, metrics=metrics, sampled=kept, seconds=time.monotonic() - start)

    def sample_words(self) -> list[str]:
        own = ["--output", str(self.folder / "data"), "--resume", "--select", SELECT[self.config.iterate.method], "--seed", self.seed]
        return [*self._agent_words(), *self._model_words(), *own, *self.config.phases["sample"]]

    def train_words(self, data: Path) -> list[str]:
        own = ["--data", str(data), "--run-dir", str(self.folder / "train"), "--seed", self.seed]
        return [*self._model_words(), *own, "--resume", "auto", *self.config.phases["train"]]

    def eval_words(self) -> list[str]:
        return [*self._agent_words(), *self._model_words(), "--output", str(self.folder / "eval"), *self.config.phases["eval"]]

    def _agent_words(self) -> list[str]:
        return ["--agent", self.config.iterate.agent] if self.config.iterate.agent else []

    def _model_words(self) -> list[str]:
        return ["--model", self.model] if self.model else []

    def _whole_model(self, trained: Path) -> str:
        """The model of the round; an adapter is merged into the model that it was trained on."""
        merged = self.folder / "merged"
        if not holds_adapter(trained):
            return str(trained)
        base = ["--base", self.model] if self.model else []
        self._phase("merge", [str(trained), *base, "--output", str(merged)], merged / "config.json")
        return str(merged)

    def _phase(self, phase: str, words: Sequence[str], done: Path, *, method: str = "") -> None:
        """Run a command unless the file that it ends with is there."""
        if done.exists():
            return
        if phase == "eval":
            shutil.rmtree(self.folder / "eval", ignore_errors=True)  # an evaluation begins anew
        command = method or phase
        self.console.print(Text(f"\n{phase}: agentrl {command}", style="bold cyan"), soft_wrap=True)
        code = _run([sys.executable, "-m", "agentrl", command, *words])
        # A phase that the signal ended before it could handle it has a negative code.
        if code == INTERRUPTED or code == -signal.SIGINT:
            raise KeyboardInterrupt
        if code not in (0, INCOMPLETE) or not done.exists():
            raise PhaseError(f"round {self.index}: agentrl {command} ended with code {code}; go on with --resume once the cause is gone")


def _run(words: Sequence[str]) -> int:
    """Run a command and return its exit code; a SIGTERM is passed on, and Ctrl-C reaches the whole group of processes by itself."""
    process = subprocess.Popen(words)
    try:
        with handling_signals(lambda number: process.send_signal(number) if number == signal.SIGTERM else None):
            return process.wait()
    finally:
        if process.poll() is None:
            process.kill()


def _changed(was: Mapping[str, Any], config: IterateConfig) -> list[str]:
    """Return the settings and the words of phases in which a run would be another one than that with the settings `was`."""
    before, now = was.get("phases", {}), json.loads(to_json(config))["phases"]
    words = [f"{name} (was {before.get(name)!r}, now {each!r})" for name, each in now.items() if before.get(name) != each]
    return differences({"iterate": was.get("iterate", {})}, config) + words


def _name(config: IterateConfig) -> str:
    return Path(config.iterate.agent.partition(":")[0]).stem or "run"


def _json(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _show(console: Console, result: Iterated) -> None:
    """The curve: a line per round."""
    names = [name for name in ("reward", "score", "pass@1") if name in result.rounds[0].metrics]
    console.print(Text("\nround  " + "".join(f"{name:>8}" for name in names) + "    rows  model", style="bold"))
    for done in result.rounds:
        figures = "".join(f"{number(done.metrics.get(name, float('nan'))):>8}" for name in names)
        rows = str(done.sampled.get("num_rows", ""))
        console.print(Text(f"{done.round:>5}  {figures}{rows:>8}  {done.model or 'the bundled tiny model'}"), soft_wrap=True)
    console.print(Text(f"\nsaved      {shown_path(result.path / ROUNDS)}"), soft_wrap=True)
