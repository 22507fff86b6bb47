"""The plan of a supervised or preference training, from words, a file or Python arguments; nothing heavy is imported.

Nothing after it rewrites or completes a setting. ``--dry-run`` prints the plan, and the run writes it into ``config.json``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from agentrl.assets import model_path
from agentrl.config.load import Command, Loaded, flag_value, read_flags, read_given
from agentrl.config.mapping import differences, refuse_hidden, to_json
from agentrl.config.methods import METHODS, Method
from agentrl.config.plugins import check_files_unchanged, resolve_plugins
from agentrl.config.sections import changed
from agentrl.config.tune import TuneConfig
from agentrl.core.directories import held_directory, held_new_directory
from agentrl.core.errors import ConfigError
from agentrl.core.fingerprints import ACCEPT
from agentrl.core.paths import absolute_path
from agentrl.core.process import cuda_device_count
from agentrl.learner.plan import LearnerConfig
from agentrl.resolve.directories import default_directory
from agentrl.resolve.inputs import InputPlan
from agentrl.resolve.ranks import holds_directory
from agentrl.resolve.saved import AUTO
from agentrl.resolve.steps import Steps
from agentrl.resolve.tune_rules import (
    check,
    check_models,
    earlier_words,
    learner_of,
    named_models,
    num_ranks,
    with_best,
    with_learning_rate,
)


class TuneCommand(Command[TuneConfig]):
    """The command of a method."""

    def __init__(self, method: Method) -> None:
        intro = f"{(method.config.__doc__ or '').strip()} Settings come from the defaults, then from --config FILE, then from flags."
        super().__init__(method.command, method.config, intro, words=(), also=("--config", "--dry-run", ACCEPT))


@cache
def command_of(name: str) -> TuneCommand:
    """Return the command of a method."""
    return TuneCommand(METHODS[name])


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """The ranks of a run.

    Attributes:
        num_ranks: Ranks.
        device: Device on which the ranks exchange gradients.
    """

    num_ranks: int
    device: Literal["cpu", "cuda"]


@dataclass(frozen=True, kw_only=True)
class TunePlan:
    """A run of a method, decided.

    Attributes:
        method: The method.
        settings: Every setting as the run has it.
        sources: Where each setting that does not have its plain default comes from; see `Steps`.
        ranks: The ranks.
        unnamed: The directory of the run was chosen here, since nobody named one.
        accepts_changes: The run goes on although its data are not what they were.
    """

    method: Method
    settings: TuneConfig
    sources: Mapping[str, str]
    ranks: RankPlan
    unnamed: bool
    accepts_changes: bool = False

    @classmethod
    def of(cls, method: Method, loaded: Loaded[TuneConfig]) -> TunePlan:
        """Decide everything about a run that can be known before its rows and its models are read.

        Raises:
            ConfigError: If settings contradict each other or this machine, or a file is missing.
        """
        steps = Steps(loaded.settings, loaded.sources)
        steps = steps.follow("model", with_learning_rate(method, steps.settings))
        steps = steps.follow("settings", with_best(steps.settings))
        steps = steps.rewrite(resolve_plugins(steps.settings))
        device: Literal["cpu", "cuda"] = "cuda" if cuda_device_count() else "cpu"
        check(method, steps.settings, device)
        refuse_hidden(steps.settings)
        run = steps.settings.run
        path = run.run_dir if run.resume in ("", AUTO) else Path(run.resume)
        config = changed(steps.settings, run_dir=absolute_path(path or default_directory(method.command)))
        ranks = RankPlan(num_ranks=num_ranks(config), device=device)
        return cls(method=method, settings=config, sources=steps.sources, ranks=ranks, unnamed=path is None)

    @property
    def run_dir(self) -> Path:
        """The directory of the run."""
        return Path(self.settings.run.run_dir or "")

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines that say what earlier words among the settings mean now."""
        return earlier_words(self.settings)

    @property
    def on_ray(self) -> bool:
        """True if the ranks run on a Ray cluster."""
        run = self.settings.run
        return run.runtime == "ray" or (run.runtime == "auto" and bool(run.ray_address))

    @property
    def learner(self) -> LearnerConfig:
        """The settings of the learner."""
        return learner_of(self.settings, self.ranks.device)

    def to_json(self) -> str:
        """Return the plan as ``--dry-run`` prints it and ``config.json`` holds it; without ``resume``, which is no part of the run."""
        sources = {name: source for name, source in self.sources.items() if name != "resume"}
        return to_json(changed(self.settings, resume=""), sources=sources, command=self.method.command)

    @property
    def inputs(self) -> InputPlan:
        """The plan of what it reads besides its data."""
        models = {**dict(named_models(self.settings)), "--model": model_path(self.settings.model.model)}
        return InputPlan(agent="", models=models, chat_template=self.settings.model.chat_template)

    def check_models(self) -> None:
        """Check the named models as `agentrl.resolve.tune_rules.check_models` does."""
        check_models(self.settings)

    @contextmanager
    def in_directory(self) -> Iterator[TunePlan]:
        """Hold the directory of the run, the resumed one or a new one, and yield the plan that names it; one rank holds it for all.

        Raises:
            ConfigError: If it cannot be made, another process writes to it, or its run cannot go on with these settings.
        """
        resume = self.settings.run.resume
        flag = "--run-dir" if resume in ("", AUTO) else "--resume"
        holding: AbstractContextManager[Path] = nullcontext(self.run_dir)
        if holds_directory():
            holding = held_new_directory(self.run_dir) if self.unnamed else held_directory(self.run_dir, flag)
        with holding as path:
            if resume:
                check_unchanged(self.settings)
                check_files_unchanged(self.settings, path)
            yield replace(self, settings=changed(self.settings, run_dir=path))


def load(method: Method, words: Sequence[str]) -> TunePlan:
    """Read the words after a command, and the file that ``--config`` or the run that ``--resume`` names.

    `ACCEPT` among them is no setting: it lets a run go on although its data are not what they were.

    Raises:
        ConfigError: If a setting is unknown, out of range or contradicts another.
        SystemExit: With code 2 for a malformed flag, 0 for ``--help`` (raised by the flag parser).
    """
    saved = saved_settings(flag_value(words, "--resume") or "") if flag_value(words, "--config") is None else None
    settings = [word for word in words if word != ACCEPT]
    return replace(TunePlan.of(method, read_flags(command_of(method.command), settings, saved)), accepts_changes=ACCEPT in words)


def load_given(method: Method, given: Mapping[str, Any]) -> TunePlan:
    """Return the plan of settings that Python code gives by name, over those of the file ``config`` or the run ``resume``.

    Raises:
        ConfigError: If one is unknown, out of range or contradicts another.
    """
    saved = saved_settings(str(given.get("resume", ""))) if "config" not in given else None
    return TunePlan.of(method, read_given(command_of(method.command), given, saved))


def saved_settings(resume: str) -> Path | None:
    """Return the file with the settings of the run that ``--resume`` names; `None` if it names none.

    Raises:
        ConfigError: If the directory holds no run.
    """
    if resume in ("", AUTO):
        return None
    saved = Path(resume).expanduser() / "config.json"
    if not saved.is_file():
        raise ConfigError("--resume", resume, "holds no run", "Name a run's directory, as printed at its end.")
    return saved


def check_unchanged(config: TuneConfig) -> None:
    """Check that the run in ``run_dir``, if there is one, can go on with these settings.

    Raises:
        ConfigError: If a setting differs that decides what is learned.
    """
    path = Path(config.run.run_dir or "") / "config.json"
    saved = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    # The other schedules spread over all steps of a run, so that another number of them would change the learning rates.
    fixed = () if config.optim.lr_schedule == "constant" else ("num_steps", "num_epochs")
    if saved and (others := differences(saved, config, fixed)):
        problem = "cannot go on, because it would be another run with " + ", ".join(others)
        raise ConfigError("--resume", config.run.resume, problem, "Leave these as they were, or start a new run.")
