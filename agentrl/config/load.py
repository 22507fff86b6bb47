"""Defaults < file < flags, checked at each step; every error names the field, the value and the remedy.

Nothing here imports torch, ray, vllm or deepspeed: a wrong flag is answered within a second.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tyro
import yaml
from pydantic import TypeAdapter, ValidationError

from agentrl.config.help import help_text
from agentrl.config.model_defaults import with_defaults
from agentrl.config.rules import check
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import changed, flag
from agentrl.core.errors import ConfigError, UnknownFlagError


@cache
def other_systems() -> dict[str, Any]:
    """Return the tables of names in other systems, ``aliases`` among them."""
    return tomllib.loads(Path(__file__).with_name("other_systems.toml").read_text(encoding="utf-8"))


def aliases() -> dict[str, list[str]]:
    """Return the names that other systems have for our settings, each with the flag or flags that it stands for."""
    return other_systems()["aliases"]  # type: ignore[no-any-return]


def expand_aliases(args: Sequence[str]) -> list[str]:
    """Return the words with every alias, ``--flag value`` or ``--flag=value``, ``_`` or ``-``, replaced by our flag or flags."""
    words: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        targets = aliases().get(name.replace("_", "-")) if name.startswith("--") else None
        if targets is None:
            words.append(word)
        elif name.replace("_", "-") == "--use-tensorboard":
            words += targets
            rest = rest[1:] if rest and not rest[0].startswith("-") else rest  # OpenRLHF's takes a directory
        elif equals:
            words += [f"{target}={value}" for target in targets]
        elif len(targets) > 1 and rest:
            value = rest.pop(0)
            words += [part for target in targets for part in (target, value)]
        else:
            words += targets
    return words


TYRO = (tyro.conf.OmitArgPrefixes,)


def load_config(args: Sequence[str], *, prog: str = "agentrl train") -> TrainConfig:
    """Read flags (and the file that ``--config`` names) into a configuration whose ranges and cross-field rules are checked.

    Raises:
        ConfigError: If a file key is unknown, a value is out of range or two settings contradict each other.
        SystemExit: With code 2 for a malformed flag, 0 for ``--help`` (raised by the flag parser).
    """
    return check(read_flags(args, prog=prog))


def read_flags(args: Sequence[str], *, prog: str) -> TrainConfig:
    """Read flags as `load_config` does, without the rules that concern several fields, files or this machine."""
    words = expand_aliases(args)
    answer_help(words, prog)
    path, rest = take_config_flag(words)
    rest = with_agent_flag(rest)
    refuse_unknown(rest, prog)
    data = read_file(path) if path else {}
    refuse_removed(data, str(path))
    default = from_mapping(data, source=str(path))
    appended = {name: () for name in ("callback", "sink") if flag_value(rest, f"--{name}") is not None}
    default = changed(default, **appended)  # flags replace what a file says; tyro would append to it
    config = validate(tyro.cli(TrainConfig, prog=prog, args=rest, default=default, config=TYRO))
    return with_defaults(config, given_names(rest, data))


def given_names(words: Iterable[str], data: Mapping[str, Any]) -> set[str]:
    """Return the names of the settings that flags or a file set."""
    flags = {word.partition("=")[0].replace("_", "-") for word in words if word.startswith("--")}
    named = {word.removeprefix("--no-").removeprefix("--").replace("-", "_") for word in flags}
    return named | {key.replace("-", "_") for key, _ in _flatten(data)}


def with_agent_flag(words: list[str]) -> list[str]:
    """Return the words with the flag before an environment that stands first, as in ``agentrl train FILE``."""
    named = words and not words[0].startswith("-") and "=" not in words[0]
    return ["--agent", *words] if named else words


def answer_help(words: Sequence[str], prog: str) -> None:
    """Print the help that ``--help``, ``--help SECTION`` or ``--help all`` asks for.

    Raises:
        ConfigError: If there is no such section.
        SystemExit: With code 0, after printing.
    """
    at = next((index for index, word in enumerate(words) if word in ("-h", "--help")), None)
    if at is None:
        return
    topic = next((word for word in words[at + 1 : at + 2] if not word.startswith("-")), "")
    sections = [section.name for section in dataclasses.fields(TrainConfig)]
    if topic not in ("", "all", *sections):
        raise ConfigError("--help", topic, "is no section of the settings", f"Sections: {', '.join(sections)}, all.")
    sys.stdout.write(help_text(TrainConfig(), prog, _INTRO, topic))
    raise SystemExit(0)


_INTRO = "Train a language-model agent in an environment. Settings come from the defaults, then from --config, then from flags."


def refuse_unknown(words: Sequence[str], prog: str) -> None:
    """Answer every word that is no setting with one line.

    Raises:
        UnknownFlagError: If there is such a word.
    """
    known = [flag(name) for name in field_homes()]
    known = sorted([*known, *(f"--no-{name[2:]}" for name in known), "--tyro-print-completion", "--tyro-write-completion"])
    found = []
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and len(name) > 2 and (name := name.replace("_", "-")) not in known:
            found.append((name, _answer(name, known)))
        elif "=" in word and name.lstrip("+") in other_systems()["verl"]:
            found.append((name, _answer(name.lstrip("+"), known)))
    if found:
        raise UnknownFlagError(prog, tuple(found))


def _answer(name: str, known: Sequence[str]) -> str:
    """Return one line that says what to write instead of a word that is no flag of ours."""
    for system in ("OpenRLHF", "TRL", "verl"):
        if answer := other_systems()[system].get(name):
            return f"{system}; here: {answer}"
    if (removed := name[2:].replace("-", "_")) in REMOVED:
        return REMOVED[removed][1]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else "unknown; `agentrl train --help all` lists every setting"


def flag_value(words: Iterable[str], name: str) -> str | None:
    """Return the word after the flag `name`, also after an equals sign; `None` if the flag is not there."""
    words = list(words)
    for word, following in zip(words, [*words, ""][1:], strict=True):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def take_config_flag(args: list[str]) -> tuple[Path | None, list[str]]:
    """The file that ``--config`` names, if any, and the other words.

    Raises:
        ConfigError: If the name is missing.
    """
    at = next((i for i, word in enumerate(args) if word.partition("=")[0] == "--config"), None)
    if at is None:
        return None, args
    _, equals, value = args[at].partition("=")
    if not equals and at + 1 == len(args):
        raise ConfigError("--config", "", "needs a file name", "Give a TOML, YAML or JSON file.")
    return Path(value if equals else args[at + 1]), args[:at] + args[at + (1 if equals else 2) :]


def read_file(path: Path) -> dict[str, Any]:
    """Parse a TOML, YAML or JSON file by its ending.

    Raises:
        ConfigError: If it is missing, malformed or not a table.
    """
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".toml":
            data: Any = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml", ".json"):
            data = yaml.safe_load(text)
        else:
            raise ConfigError("--config", str(path), f"unknown kind of file {path.suffix!r}", "Use .toml, .yaml or .json.")
    except OSError as error:
        raise ConfigError("--config", str(path), f"cannot be read: {error.strerror}", "Check the path.") from error
    except (tomllib.TOMLDecodeError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError("--config", str(path), f"cannot be parsed: {error}", "Correct the file at this place.") from error
    if not isinstance(data, dict):
        raise ConfigError("--config", str(path), "holds no table of settings", "Write `key = value` lines, in [sections] if you like.")
    return data


def from_mapping(data: Mapping[str, Any], *, source: str = "config") -> TrainConfig:
    """Build a configuration from sections (``{"algo": {"gamma": 1.0}}``), flat keys (``{"gamma": 1.0}``) or a mix.

    Raises:
        ConfigError: If a key is unknown (the nearest one is named), is given twice, or a value has the wrong type.
    """
    homes = field_homes()
    sections: dict[str, dict[str, Any]] = {}
    for key, value in _flatten(data):
        name = key.replace("-", "_")
        name = "asynchronous" if name == "async" else name
        if name in REMOVED:  # in the files of old runs
            continue
        if name not in homes:
            raise ConfigError(f"{source}: {key}", value, "is not a setting", suggest(key, homes))
        fields = sections.setdefault(homes[name], {})
        if name in fields:
            raise ConfigError(f"{source}: {key}", value, "is given twice", "Keep one of the two.")
        fields[name] = value
    return _build(sections, source)


REMOVED: dict[str, tuple[object, str]] = {
    "learner_parts": (1, "was removed: a step is trained when all of its groups are there; --async overlaps generation and training"),
}
"""Settings of earlier versions: the value with which a run is the same without them, and what has become of them."""


def refuse_removed(data: Mapping[str, Any], source: str) -> None:
    """Refuse a removed setting with which a training would be another one than without it.

    Raises:
        ConfigError: If there is one.
    """
    for key, value in _flatten(data):
        neutral, problem = REMOVED.get(key.replace("-", "_"), (value, ""))
        if value != neutral:
            raise ConfigError(f"{source}: {key}", value, problem, f"Delete it there, or set it to {neutral}.")


def _flatten(data: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    sections = {f.name for f in dataclasses.fields(TrainConfig)}
    for key, value in data.items():
        yield from value.items() if key in sections and isinstance(value, Mapping) else ((key, value),)


def validate(config: TrainConfig) -> TrainConfig:
    """Check every field's type and range.

    Raises:
        ConfigError: For the first field that is wrong.
    """
    return _build(dataclasses.asdict(config), "")


def _build(sections: Mapping[str, Any], source: str) -> TrainConfig:
    try:
        return _adapter().validate_python(sections)
    except ValidationError as error:
        raise field_error(error, "train", source) from None


def field_error(error: ValidationError, command: str, source: str = "") -> ConfigError:
    """The first field that is wrong, named as its flag, or as the key of the file `source`."""
    first = error.errors()[0]
    name = str(first["loc"][1] if len(first["loc"]) > 1 else first["loc"][0])
    problem = first["msg"].replace("Input should be", "must be").replace("valid number", "number")
    return ConfigError(f"{source}: {name}" if source else flag(name), first.get("input"), problem, f"See `agentrl {command} --help`.")


@cache
def _adapter() -> TypeAdapter[TrainConfig]:
    return TypeAdapter(TrainConfig)


@cache
def field_homes() -> dict[str, str]:
    """Field name -> section that holds it; names are unique over all sections."""
    config = TrainConfig()
    return {item.name: section.name for section in dataclasses.fields(config) for item in dataclasses.fields(getattr(config, section.name))}


def suggest(given: str, known: Iterable[str]) -> str:
    """A remedy that names the nearest known name, or where to find them all."""
    near = difflib.get_close_matches(given.replace("-", "_"), list(known), n=1, cutoff=0.5)
    return f"Did you mean `{near[0]}`?" if near else "`agentrl train --help all` lists every setting."


def to_json(config: TrainConfig) -> str:
    """The resolved configuration as indented JSON, sections and field names as in the schema."""
    return json.dumps(dataclasses.asdict(config), indent=2, default=str)
