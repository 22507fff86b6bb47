"""Settings from the tables of a file, and back: names, types and ranges are checked; every error names the place, the value, the remedy."""

from __future__ import annotations

import dataclasses
import difflib
import json
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from agentrl.algo.plan import built_in_options, foreign_option, is_default
from agentrl.config.earlier import REMOVED, renewed
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import Setting, sections_of, settings_of
from agentrl.config.tune import TuneConfig
from agentrl.core.errors import ConfigError
from agentrl.core.paths import absolute_names
from agentrl.core.redaction import HIDDEN, redacted_values
from agentrl.core.settings import flag

C = TypeVar("C")

COMMAND, SOURCES = "command", "sources"
"""Keys of a file of settings that name the command they belong to, and where a run had each of them from."""


def read_file(path: Path) -> dict[str, Any]:
    """Parse a TOML, YAML or JSON file by its ending.

    Raises:
        ConfigError: If it is missing, malformed or not a table.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            data: Any = tomllib.loads(text)
        elif path.suffix == ".json":
            # YAML's reader takes 1e-06 for a text.
            data = json.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            # `safe_load` makes no objects of Python of what a file says.
            data = yaml.safe_load(text)
        else:
            raise ConfigError("--config", str(path), f"unknown kind of file {path.suffix!r}", "Use .toml, .yaml or .json.")
    except OSError as error:
        raise ConfigError("--config", str(path), f"cannot be read: {error.strerror}", "Check the path.") from error
    except (tomllib.TOMLDecodeError, json.JSONDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("--config", str(path), f"cannot be parsed: {error}", "Correct the file at this place.") from error
    if not isinstance(data, dict):
        raise ConfigError("--config", str(path), "holds no table of settings", "Write `key = value` lines, in [sections] if you like.")
    return data


def from_mapping(
    settings: type[C], data: Mapping[str, Any], *, source: str = "config", command: str = "train", ignored: tuple[type[Any], ...] = ()
) -> C:
    """Build settings from sections (``{"algo": {"gamma": 1.0}}``), flat keys (``{"gamma": 1.0}``) or a mix.

    Args:
        settings: Dataclass of the sections.
        data: The values.
        source: Place that the keys come from, for messages.
        command: The command that has the settings, for messages.
        ignored: Other dataclasses of sections, whose settings may be among the keys and are left out.

    Raises:
        ConfigError: If a key is unknown (the nearest one is named), is given twice, or a value has the wrong type.
    """
    given = flattened(data, source)
    form = schema_of(settings, given)
    homes = settings_of(form)
    sections: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        if name in homes:
            setting = homes[name]
            if value is not None or setting.takes_none or name not in built_in_options():  # earlier versions saved options as unset
                sections.setdefault(setting.section, {})[name] = value
        elif (
            name not in REMOVED
            and not is_default(name, value)
            and not ((usual := _replaced(form, name)) is not None and usual.is_default(value))
            and not any(name in settings_of(schema_of(other, given)) for other in ignored)
        ):
            refuse_foreign(form, name, value, given)
            raise ConfigError(f"{source}: {name}", value, "is not a setting", suggest(name, homes, f"agentrl {command}"))
    return plain(settings, build(form, sections, source, command))


def schema_of(settings: type[Any], given: Mapping[str, Any]) -> type[Any]:
    """Return the sections in which the settings of a command are loaded: its own, and those of the algorithms that `given` chooses."""
    return settings.schema(given) if issubclass(settings, TrainConfig | TuneConfig) else settings


def plain(settings: type[C], loaded: Any) -> C:
    """Return settings from the form in which they were loaded; see `schema_of`."""
    return settings.loaded(loaded) if issubclass(settings, TrainConfig) else loaded  # type: ignore[return-value]


def _replaced(form: type[Any], name: str) -> Setting | None:
    """Return an option of a method that has no effect beside a user's loss, in whose sections `form` is loaded."""
    return settings_of(form.__mro__[1]).get(name) if issubclass(form, TuneConfig) else None


def refuse_foreign(form: type[Any], name: str, value: Any, given: Mapping[str, Any]) -> None:
    """Refuse an option of a built-in algorithm that is not chosen.

    Raises:
        ConfigError: If `name` is such an option.
    """
    if _replaced(form, name) is not None:
        raise ConfigError(flag(name), value, f"has no effect on --loss {given['loss']}", "Leave it out.")
    if "loss" in sections_of(form) and name in built_in_options():
        raise foreign_option(name, value, given)


def read_saved(data: Mapping[str, Any], source: str) -> TrainConfig:
    """Return the settings that a run of this version or an earlier one saved, in the form of training.

    Files of the user that it names are not imported, options are taken as they are, and what is no setting of training is left out.

    Raises:
        ConfigError: If a value has the wrong type.
    """
    homes, sections = settings_of(TrainConfig), dict[str, dict[str, Any]]()
    own = (data.get("algo") or {}).get("options") or {}
    options: dict[str, Any] = {}
    for name, value in flattened(data, source).items():
        if name in homes:
            sections.setdefault(homes[name].section, {})[name] = value
        elif name in own or (name in built_in_options() and value is not None):
            options[name] = tuple(value) if isinstance(value, list) else value
    sections.setdefault("algo", {})["options"] = options
    return build(TrainConfig, sections, source, "train")


def flattened(data: Mapping[str, Any], source: str = "config") -> dict[str, Any]:
    """Return the settings of a file by name, whatever tables they stand in; in place of those of earlier versions stand those of this one.

    Raises:
        ConfigError: If one is given twice.
    """
    flat: dict[str, Any] = {}
    for key, value in _pairs({key: value for key, value in data.items() if key != SOURCES}):
        if (name := _name(key)) in flat:
            raise ConfigError(f"{source}: {key}", value, "is given twice", "Keep one of the two.")
        flat[name] = value
    return renewed({name: value for name, value in flat.items() if name != COMMAND})


def _pairs(data: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _pairs(value)
        else:
            yield key, value


def _name(key: str) -> str:
    name = key.replace("-", "_")
    return "asynchronous" if name == "async" else name


def build(settings: type[C], sections: Mapping[str, Any], source: str, command: str) -> C:
    """Return settings made of sections of values, types and ranges checked; see `from_mapping`."""
    try:
        schema: Any = settings
        built: C = _adapter(schema).validate_python(sections)
    except ValidationError as error:
        raise field_error(error, command, source) from None
    return built


def field_error(error: ValidationError, command: str, source: str = "") -> ConfigError:
    """The first field that is wrong, named as its flag, or as the key of the file `source`."""
    first = error.errors()[0]
    if isinstance(own := first.get("ctx", {}).get("error"), ConfigError):  # a section's own rule
        return own
    name = str(first["loc"][1] if len(first["loc"]) > 1 else first["loc"][0])
    problem = first["msg"].partition(", unable to")[0].replace("Input should be", "must be").replace("valid number", "number")
    return ConfigError(f"{source}: {name}" if source else flag(name), first.get("input"), problem, f"See `agentrl {command} --help`.")


@cache
def _adapter(settings: Any) -> TypeAdapter[Any]:
    return TypeAdapter(settings)


def suggest(given: str, known: Iterable[str], prog: str = "agentrl train") -> str:
    """A remedy that names the nearest known name, or where to find them all."""
    near = difflib.get_close_matches(given.replace("-", "_"), list(known), n=1, cutoff=0.5)
    return f"Did you mean `{near[0]}`?" if near else f"`{prog} --help all` lists every setting."


def refuse_hidden(config: Any) -> None:
    """Refuse settings of a file in which credentials were left out.

    Raises:
        ConfigError: For the first one.
    """
    for name, setting in reversed(list(settings_of(type(config)).items())):  # what the user wrote comes after what was made of it
        value = getattr(getattr(config, setting.section), name)
        if isinstance(value, str) and HIDDEN in value:
            raise ConfigError(flag(name), value, "lacks its credentials, which are written to no file", "Give it again, with them.")


def to_json(config: Any, *, sources: Mapping[str, str] | None = None, command: str = "") -> str:
    """Return resolved settings as indented JSON, sections and field names as in the schema, without credentials in addresses.

    Args:
        config: The settings.
        sources: Where settings come from, by name.
        command: Name of the command that they belong to; empty where readers know it.
    """
    before = {COMMAND: command} if command else {}
    behind = {} if sources is None else {SOURCES: dict(sorted(sources.items()))}
    return json.dumps(redacted_values({**before, **dataclasses.asdict(config), **behind}), indent=2, default=str)


def _same(before: Any, now: Any) -> bool:
    """True for equal values; the paths of a run that an earlier version began may be relative."""
    before = redacted_values(before)
    return bool(before == now or (isinstance(before, str) and absolute_names(before) == now))


def differences(saved: Mapping[str, Any], config: Any, fixed: Container[str] = ()) -> list[str]:
    """Return the settings, with both values, in which a run cannot go on because it would become another one.

    Args:
        saved: Settings of the run as its file holds them; one that is newer than the run has its default.
        config: The settings to go on with.
        fixed: Settings that must stay as well, though they may change elsewhere.
    """
    table = settings_of(type(config))
    before, now = flattened(saved), json.loads(to_json(config))
    plain = {name: json.loads(json.dumps(setting.default, default=str)) for name, setting in table.items()}
    chosen: Mapping[str, Any] = now.get("algo", {}).get("options", {})
    others = [  # an option that is not there has its default, which an earlier version left out
        f"{flag(name)} (was {before[name]!r}, now {value!r})"
        for name, value in chosen.items()
        if before.get(name) is not None and before[name] != value
    ]
    return others + [
        f"{flag(name)} (was {before.get(name, plain[name])!r}, now {now[setting.section][name]!r})"
        for name, setting in table.items()
        if (name in fixed or not setting.may_change) and not _same(before.get(name, plain[name]), now[setting.section][name])
    ]
