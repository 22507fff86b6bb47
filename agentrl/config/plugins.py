"""The files of a user that a configuration names: found, compared with the copies in a run directory, and listed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from agentrl.config.sections import Setting, changed, settings_of
from agentrl.core.errors import ConfigError
from agentrl.core.plugins import is_plugin, plugin_copies, resolve_plugin, restorable
from agentrl.core.settings import UserFile, flag
from agentrl.track.plan import is_service

Config = TypeVar("Config")


def resolve_plugins(config: Config) -> Config:
    """Return the configuration with the absolute path of every plug-in's file, so that each process finds it.

    Raises:
        ConfigError: If a file is not there.
    """
    return changed(config, **user_files(config, partial(_resolved, config)))


def user_files(config: Any, rename: Callable[[str, str], str]) -> dict[str, Any]:
    """Return the settings that may name a user's file, each value being what `rename` makes of the name and the present one."""
    new: dict[str, Any] = {}
    for setting in _user_files(config):
        value, other = _value(config, setting), partial(rename, setting.name)
        new[setting.name] = tuple(map(other, value)) if isinstance(value, tuple) else other(value)
    return new


def _user_files(config: Any) -> list[Setting]:
    return [setting for setting in settings_of(type(config)).values() if UserFile in setting.notes]


def _value(config: Any, setting: Setting) -> Any:
    return getattr(getattr(config, setting.section), setting.name)


def _resolved(config: Any, field: str, value: str) -> str:
    if not _is_file(value):
        return value
    try:
        return resolve_plugin(flag(field), value)
    except ConfigError as error:
        resume, run_dir = (_value(config, settings_of(type(config))[name]) for name in ("resume", "run_dir"))
        resumed = run_dir if resume == "auto" else resume
        raise restorable(error, Path(resumed)) if resumed else error from None


def check_files_unchanged(config: Any, run_dir: Path) -> None:
    """Compare the file of each plug-in, but of settings that may change on resumption, with the copy that the run made when it began.

    Raises:
        ConfigError: If a file was changed.
    """
    copies = plugin_copies((spec for _, spec in plugins(config)), run_dir)
    for setting, spec in _named(config):
        file = Path(spec.rpartition(":")[0])
        copy = copies[file]
        if not setting.may_change and copy.exists() and copy.read_bytes() != file.read_bytes():
            problem = f"the file was changed since the run began with it as {copy}"
            remedy = f"Restore it: cp {copy} {file}. To go on with the changed file, remove the copy."
            raise ConfigError(flag(setting.name), spec, problem, remedy)


def plugins(config: Any) -> Iterator[tuple[str, str]]:
    """Yield the flag and the value of each plug-in of the configuration."""
    for setting, spec in _named(config):
        yield flag(setting.name), spec


def _named(config: Any) -> Iterator[tuple[Setting, str]]:
    for setting in _user_files(config):
        value = _value(config, setting)
        for item in value if isinstance(value, tuple) else (value,):
            if _is_file(item):
                yield setting, item


def _is_file(value: str) -> bool:
    return is_plugin(value) and not is_service(value)
