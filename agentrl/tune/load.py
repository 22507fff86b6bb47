"""From words, a file or Python arguments to the checked settings of a method; nothing heavy is imported."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.config.load import Command, Loaded, flag_value
from agentrl.config.load import load as load_command
from agentrl.config.load import load_given as load_given_command
from agentrl.config.mapping import differences
from agentrl.config.mapping import to_json as settings_json
from agentrl.core.errors import ConfigError
from agentrl.tune.methods import METHODS, Method
from agentrl.tune.rules import check, with_best, with_learning_rate
from agentrl.tune.settings import TuneConfig

AUTO = "auto"


class TuneCommand(Command[TuneConfig]):
    """The command of a method."""

    def __init__(self, method: Method) -> None:
        intro = f"{(method.config.__doc__ or '').strip()} Settings come from the defaults, then from --config FILE, then from flags."
        super().__init__(method.command, method.config, intro, words=(), also=("--config", "--dry-run"))
        self.method = method

    def finish(self, loaded: Loaded[TuneConfig]) -> TuneConfig:
        """Fill in the learning rate and what evaluations are judged by, and apply the rules of the method."""
        return check(self.method, with_best(with_learning_rate(self.method, loaded.settings)))


@cache
def _command(name: str) -> TuneCommand:
    return TuneCommand(METHODS[name])


def load(method: Method, words: Sequence[str]) -> TuneConfig:
    """Read the words after a command, and the file that ``--config`` or the run that ``--resume`` names.

    Raises:
        ConfigError: If a setting is unknown, out of range or contradicts another.
        SystemExit: With code 2 for a malformed flag, 0 for ``--help`` (raised by the flag parser).
    """
    saved = saved_settings(flag_value(words, "--resume") or "") if flag_value(words, "--config") is None else None
    return load_command(_command(method.command), words, saved)


def load_given(method: Method, given: Mapping[str, Any]) -> TuneConfig:
    """Return the checked settings that Python code gives by name, over those of the file ``config`` or the run ``resume``.

    Raises:
        ConfigError: If one is unknown, out of range or contradicts another.
    """
    saved = saved_settings(str(given.get("resume", ""))) if "config" not in given else None
    return load_given_command(_command(method.command), given, saved)


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


def to_json(method: Method, config: TuneConfig) -> str:
    """Return the resolved settings as indented JSON, by section, with the command that they belong to."""
    return settings_json(config, command=method.command)


def check_unchanged(saved: Mapping[str, Any], config: TuneConfig) -> None:
    """Check that a run can go on with these settings.

    Raises:
        ConfigError: If a setting differs that decides what is learned.
    """
    if others := differences(saved, config, () if config.optim.lr_schedule == "constant" else ("num_steps", "num_epochs")):
        problem = "cannot go on, because it would be another run with " + ", ".join(others)
        raise ConfigError("--resume", config.run.resume, problem, "Leave these as they were, or start a new run.")
