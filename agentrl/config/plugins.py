"""The files of a user that a configuration names: found, compared with the copies in a run directory, and listed."""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Iterator
from pathlib import Path

from agentrl.config.schema import TrainConfig
from agentrl.config.sections import flag as flag_of
from agentrl.core.errors import ConfigError
from agentrl.core.plugins import is_plugin, plugin_copies, resolve_plugin

PLUGIN_FIELDS = (
    *(("algo", "advantage_estimator"), ("algo", "policy_loss"), ("algo", "off_policy")),
    *(("flow", "group_filter"), ("track", "callback")),
)
"""Section and field of the settings that may name a function or class of a user's file, ``file.py:name``, or a tuple of them."""


def resolve_plugins(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the absolute path of every plug-in's file, so that each process finds it.

    Raises:
        ConfigError: If a file is not there.
    """
    for section, field in PLUGIN_FIELDS:
        part = getattr(config, section)
        value = getattr(part, field)
        resolved = tuple(_resolved(config, field, item) for item in value) if isinstance(value, tuple) else _resolved(config, field, value)
        if resolved != value:
            config = dataclasses.replace(config, **{section: dataclasses.replace(part, **{field: resolved})})
    return config


def _resolved(config: TrainConfig, field: str, value: str) -> str:
    if not is_plugin(value):
        return value
    try:
        return resolve_plugin(flag_of(field), value)
    except ConfigError as error:
        resumed = config.run.run_dir if config.run.resume == "auto" else config.run.resume
        file = Path(value.rpartition(":")[0])
        copy = plugin_copies([value], Path(resumed or "")).get(file)
        if resumed and not file.exists() and copy is not None and copy.exists():
            raise ConfigError(error.field, value, "there is no such file any more", f"Restore it: cp {copy} {file}") from None
        raise


def check_files_unchanged(config: TrainConfig, run_dir: Path, may_change: Container[str]) -> None:
    """Compare the file of each plug-in, but of the fields that `may_change`, with the copy that the run made when it began.

    Raises:
        ConfigError: If a file was changed.
    """
    found = list(plugins(config))
    copies = plugin_copies((spec for _, spec in found), run_dir)
    for name, spec in found:
        file = Path(spec.rpartition(":")[0])
        copy = copies[file]
        if name.removeprefix("--").replace("-", "_") not in may_change and copy.exists() and copy.read_bytes() != file.read_bytes():
            problem = f"the file was changed since the run began with it as {copy}"
            raise ConfigError(name, spec, problem, f"Restore it: cp {copy} {file}. To go on with the changed file, remove the copy.")


def plugins(config: TrainConfig) -> Iterator[tuple[str, str]]:
    """Yield the flag and the value of each plug-in of the configuration."""
    for section, field in PLUGIN_FIELDS:
        value = getattr(getattr(config, section), field)
        for item in value if isinstance(value, tuple) else (value,):
            if is_plugin(item):
                yield flag_of(field), item
