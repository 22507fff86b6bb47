"""Settings of a command from defaults < file < flags or Python, checked at each step; every error names the field, the value, the remedy.

One loader reads every command whose settings are sections. Nothing here imports torch, ray, vllm or deepspeed: a wrong flag is answered
within a second.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import tomllib
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import tyro

from agentrl.config.help import help_text
from agentrl.config.mapping import REMOVED, build, flattened, from_mapping, read_file, refuse_removed, suggest, validated
from agentrl.config.sections import flag, sections_of, settings_of
from agentrl.core.errors import ConfigError, UnknownFlagError

C = TypeVar("C")

TYRO = (tyro.conf.OmitArgPrefixes,)


class Command(Generic[C]):
    """A command whose settings are sections.

    Attributes:
        name: Name of the command.
        settings: Dataclass whose fields are its sections.
        intro: What it does, for ``--help``.
        main: Settings that ``--help`` shows first; empty: it shows all of them.
        first: Setting that a first word without dashes names; empty: there is none.
        ignored: Commands whose settings a file may hold as well.
    """

    def __init__(
        self,
        name: str,
        settings: type[C],
        intro: str,
        *,
        main: tuple[str, ...] = (),
        first: str = "agent",
        ignored: tuple[type[Any], ...] = (),
    ) -> None:
        self.name, self.settings, self.intro, self.main, self.first, self.ignored = name, settings, intro, main, first, ignored

    @property
    def prog(self) -> str:
        """The words that call it."""
        return f"agentrl {self.name}"

    def begin(self, saved: Mapping[str, Any], path: Path | None) -> C:
        """Return the settings to begin with: the defaults, and those that the file `path` holds."""
        refuse_removed(saved, str(path))
        return from_mapping(self.settings, saved, source=str(path), command=self.name, ignored=self.ignored)

    def complete(self, config: C, given: Container[str]) -> C:
        """Return the settings with defaults that depend on others in the place of those that are not in `given`."""
        del given
        return config

    def finish(self, config: C, given: Container[str], saved: Mapping[str, Any]) -> C:
        """Return the checked settings with what follows from other settings filled in.

        Args:
            config: Settings whose types and ranges are right.
            given: Names of the settings that flags, Python code or a file set.
            saved: Settings of the file, by name.

        Raises:
            ConfigError: For the first rule that does not hold.
        """
        return config


@cache
def other_systems() -> dict[str, Any]:
    """Return the tables of names in other systems that have no setting of the same meaning here."""
    return tomllib.loads(Path(__file__).with_name("other_systems.toml").read_text(encoding="utf-8"))


def aliases(settings: type[Any], command: str = "train") -> Mapping[str, tuple[str, ...]]:
    """Return the further flags of a command, each with the flag or flags that it stands for; a setting's own flag is none."""
    table = settings_of(settings)
    found: dict[str, tuple[str, ...]] = {}
    for setting in table.values():
        for name in setting.aliases(command):
            if name[2:].replace("-", "_") not in table:
                found[name] = (*found.get(name, ()), flag(setting.name))
    return found


def expand_aliases(args: Sequence[str], command: Command[Any]) -> list[str]:
    """Return the words with every alias, ``--flag value`` or ``--flag=value``, ``_`` or ``-``, replaced by our flag or flags."""
    known = aliases(command.settings, command.name)
    words: list[str] = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        targets = known.get(name)
        if targets is None:
            words.append(name + equals + value)
        elif name == "--use-tensorboard":
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


def load(command: Command[C], args: Sequence[str], path: Path | None = None) -> C:
    """Read flags, and the file that ``--config`` names or else `path`, into checked settings.

    Raises:
        ConfigError: If a file key is unknown, a value is out of range or two settings contradict each other.
        SystemExit: With code 2 for a malformed flag, 0 for ``--help`` (raised by the flag parser).
    """
    return command.finish(*read_flags(command, args, path))


def read_flags(command: Command[C], args: Sequence[str], path: Path | None = None) -> tuple[C, set[str], Mapping[str, Any]]:
    """Read flags as `load` does, without the rules that concern several fields, files or this machine.

    Returns:
        The settings, the names of those that were given, and the settings of the file.
    """
    words = expand_aliases(args, command)
    answer_help(words, command)
    named, rest = take_config_flag(words)
    if named is not None and path is not None:
        raise ConfigError("--config", str(named), "a run brings its own settings", "Leave out one of the two.")
    path, rest = named or path, with_first_flag(rest, command.first)
    refuse_unknown(rest, command)
    saved = flattened(read_file(path), str(path)) if path else {}
    default = command.begin(saved, path)
    for name in _appended(command.settings, rest):  # flags replace what a file says; tyro would append to it
        section = settings_of(command.settings)[name].section
        default = dataclasses.replace(default, **{section: dataclasses.replace(getattr(default, section), **{name: ()})})  # type: ignore[type-var]
    config = validated(
        tyro.cli(command.settings, prog=command.prog, args=rest, default=default, config=TYRO, description=command.intro), command.name
    )
    given = given_names(rest) | saved.keys()
    return command.complete(config, given), given, saved


def load_given(command: Command[C], given: Mapping[str, Any], path: Path | None = None) -> C:
    """Return the checked settings that Python code gives by name or alias, over those of the file ``config`` or else `path`.

    Raises:
        ConfigError: If a name is unknown (the nearest one is named), is given twice, or a value is wrong.
    """
    rest = dict(given)
    named = rest.pop("config", None)
    if named is not None and path is not None:
        raise ConfigError("config", str(named), "a run brings its own settings", "Leave out one of the two.")
    path = Path(named) if named is not None else path
    saved = flattened(read_file(path), str(path)) if path else {}
    names = {name for key in rest for name in fields_named(key, command)} | saved.keys()
    config = command.complete(with_given(command.begin(saved, path), rest, command), names)
    return command.finish(config, names, saved)


def with_given(default: C, given: Mapping[str, Any], command: Command[C]) -> C:
    """Return settings with some of them changed, types and ranges checked; see `load_given`."""
    values, homes = dataclasses.asdict(default), settings_of(command.settings)  # type: ignore[call-overload]
    seen: dict[str, str] = {}
    for key, value in given.items():
        for name in fields_named(key, command):
            if name not in homes:
                known = ["async_" if field == "asynchronous" else field for field in homes]
                raise ConfigError(key, value, "is not a setting", suggest(key, known, command.prog))
            if name in seen:
                raise ConfigError(key, value, f"is given twice, also as {seen[name]}", "Keep one of the two.")
            seen[name] = key
            values[homes[name].section][name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return build(command.settings, values, "", command.name)


def fields_named(key: str, command: Command[Any]) -> Iterator[str]:
    """Yield the fields that a name in Python stands for."""
    for word in aliases(command.settings, command.name).get("--" + key.replace("_", "-"), (key,)):
        name = word.removeprefix("--").replace("-", "_").rstrip("_")
        yield "asynchronous" if name == "async" else name


def given_names(words: Iterable[str]) -> set[str]:
    """Return the names of the settings that flags set."""
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    return {word.removeprefix("--no-").removeprefix("--").replace("-", "_") for word in flags}


def with_first_flag(words: list[str], setting: str) -> list[str]:
    """Return the words with the flag before a setting that stands first without it, as in ``agentrl train FILE``."""
    named = setting and words and not words[0].startswith("-") and "=" not in words[0]
    return [flag(setting), *words] if named else words


def _appended(settings: type[Any], words: Sequence[str]) -> list[str]:
    """The settings that may be given several times, and are given."""
    several = (item.name for item in settings_of(settings).values() if tyro.conf.UseAppendAction[int].__metadata__[0] in item.notes)  # type: ignore[attr-defined]
    return [name for name in several if flag_value(words, flag(name)) is not None]


def answer_help(words: Sequence[str], command: Command[Any]) -> None:
    """Print the help that ``--help``, ``--help SECTION`` or ``--help all`` asks for.

    Raises:
        ConfigError: If there is no such section.
        SystemExit: With code 0, after printing.
    """
    at = next((index for index, word in enumerate(words) if word in ("-h", "--help")), None)
    if at is None:
        return
    topic = next((word for word in words[at + 1 : at + 2] if not word.startswith("-")), "")
    sections = sections_of(command.settings)
    if topic not in ("", "all", *sections):
        raise ConfigError("--help", topic, "is no section of the settings", f"Sections: {', '.join(sections)}, all.")
    sys.stdout.write(help_text(command.settings, command.prog, command.intro, main=command.main, topic=topic))
    raise SystemExit(0)


def refuse_unknown(words: Sequence[str], command: Command[Any]) -> None:
    """Answer every word that is no setting with one line.

    Raises:
        UnknownFlagError: If there is such a word.
    """
    known = [flag(name) for name in settings_of(command.settings)]
    known = sorted([*known, *(f"--no-{name[2:]}" for name in known), "--tyro-print-completion", "--tyro-write-completion"])
    unknown = []
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and len(name) > 2 and name not in known:
            unknown.append((name, _answer(name, known, command)))
        elif "=" in word and name.lstrip("+") in other_systems()["verl"]:
            unknown.append((name, _answer(name.lstrip("+"), known, command)))
    if unknown:
        raise UnknownFlagError(command.prog, tuple(unknown))


def _answer(name: str, known: Sequence[str], command: Command[Any]) -> str:
    """Return one line that says what to write instead of a word that is no flag of ours."""
    for system in ("OpenRLHF", "TRL", "verl"):
        if answer := other_systems()[system].get(name):
            return f"{system}; here: {answer}"
    if (removed := name[2:].replace("-", "_")) in REMOVED:
        return REMOVED[removed][1]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"did you mean {near[0]}?" if near else f"unknown; `{command.prog} --help all` lists every setting"


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
