"""Settings of a command from defaults < file < flags or Python, checked at each step; every error names the field, the value, the remedy.

One loader reads every command whose settings are sections. Nothing here imports torch, ray, vllm or deepspeed: a wrong flag is answered
within a second.
"""

from __future__ import annotations

import difflib
import json
import os
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from agentrl.algo.plan import KINDS
from agentrl.config.earlier import answer_of, refuse_removed
from agentrl.config.help import help_text
from agentrl.config.mapping import (
    SOURCES,
    build,
    flattened,
    from_mapping,
    plain,
    read_file,
    refuse_foreign,
    refuse_hidden,
    schema_of,
    suggest,
)
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import Setting, sections_of, settings_of
from agentrl.config.words import ENVIRONMENT, Word, choices, flags_of, parse
from agentrl.core.errors import ConfigError, UnknownFlagError
from agentrl.core.settings import Alias, flag

C = TypeVar("C")

ALGORITHMS = (*(part.setting for part in KINDS), "loss")
CHOOSING = (*ALGORITHMS, "resume", "run_dir")
"""Settings that decide which others there are: the algorithms, and the run that brings the files of a user's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded(Generic[C]):
    """Settings of a command whose types and ranges are right, before anything follows from them.

    Attributes:
        settings: The settings.
        sources: Where each setting that somebody gave comes from, by name: ``"flag"``, ``"python"``, ``"file"``. Others have their default.
        saved: Settings of the file, by name.
    """

    settings: C
    sources: Mapping[str, str]
    saved: Mapping[str, Any]


class Command(Generic[C]):
    """A command whose settings are sections.

    Attributes:
        name: Name of the command.
        settings: Dataclass whose fields are its sections.
        intro: What it does, for ``--help``.
        main: Settings that ``--help`` shows first; empty: it shows all of them.
        words: Settings that words without flags set, in their order.
        also: Flags that it has beside its settings: ``--config``, ``--dry-run``.
        ignored: Commands whose settings a file may hold as well.
    """

    def __init__(
        self,
        name: str,
        settings: type[C],
        intro: str,
        *,
        main: tuple[str, ...] = (),
        words: tuple[Word, ...] = (ENVIRONMENT,),
        also: tuple[str, ...] = ("--config",),
        ignored: tuple[type[Any], ...] = (),
    ) -> None:
        self.name, self.settings, self.intro = name, settings, intro
        self.main, self.words, self.also, self.ignored = main, words, also, ignored

    @property
    def prog(self) -> str:
        """The words that call it."""
        return f"agentrl {self.name}"

    def begin(self, saved: Mapping[str, Any], path: Path | None) -> C:
        """Return the settings to begin with: the defaults, and those that the file `path` holds."""
        refuse_removed(saved, str(path))
        return from_mapping(self.settings, saved, source=str(path or ""), command=self.name, ignored=self.ignored)

    def finish(self, loaded: Loaded[C]) -> C:
        """Return the checked settings with what follows from other settings filled in.

        Raises:
            ConfigError: For the first rule that does not hold.
        """
        return loaded.settings


@cache
def other_systems() -> dict[str, Any]:
    """Return the tables of names in other systems that have no setting of the same meaning here."""
    return tomllib.loads(Path(__file__).with_name("other_systems.toml").read_text(encoding="utf-8"))


def aliases(settings: type[Any], command: str = "train") -> Mapping[str, tuple[str, ...]]:
    """Return the further flags of a command, each with the flag or flags that it stands for; a setting's own flag is none.

    A flag with a value, ``--flag=value``, is set beside those that take the value of the alias.
    """
    table = settings_of(settings)
    found: dict[str, tuple[str, ...]] = {}
    for setting in table.values():
        for alias in (note for note in setting.notes if isinstance(note, Alias) and note.command in ("", command)):
            own = f"{flag(setting.name)}={alias.value}" if alias.value else flag(setting.name)
            for name in alias.flags:
                if name[2:].replace("-", "_") not in table:
                    found[name] = (*found.get(name, ()), own, *(f"{flag(other)}={value}" for other, value in alias.sets.items()))
    return found


def expand_aliases(args: Sequence[str], known: Mapping[str, Sequence[str]]) -> list[str]:
    """Return the words with every alias, ``--flag value`` or ``--flag=value``, ``_`` or ``-``, replaced by our flag or flags."""
    words: list[str] = []
    rest, sets = list(args), list[str]()
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        given = [target for target in known.get(name, ()) if "=" in target]
        targets = [target for target in known.get(name, ()) if "=" not in target]
        follows = next(iter(rest), "") if targets else "1"
        if _is_on(value if equals else follows):
            sets += given
        if not targets:
            words += [] if given else [name + equals + value]
        elif name == "--use-tensorboard":
            words += targets
            rest = rest[1:] if rest and not rest[0].startswith("-") else rest  # OpenRLHF's takes a directory
        elif equals:
            (sets if len(targets) > 1 else words).extend(f"{target}={value}" for target in targets)
        elif len(targets) > 1 and rest:
            value = rest.pop(0)
            sets += [f"{target}={value}" for target in targets]
        else:
            words += targets
    # In front, so that a flag of a single setting counts, wherever it stands.
    return [*sets, *words]


def _is_on(value: Any) -> bool:
    """Return False for a value that switches a setting off, in Python or as a word."""
    return str(value).lower() != "false" and _typed(str(value)) != 0


def load(command: Command[C], args: Sequence[str], path: Path | None = None) -> C:
    """Read flags, and the file that ``--config`` names or else `path`, into checked settings.

    Raises:
        ConfigError: If a file key is unknown, a value is out of range or two settings contradict each other.
        SystemExit: With code 2 for a malformed flag, 0 for ``--help`` (raised by the flag parser).
    """
    config = command.finish(read_flags(command, args, path))
    refuse_hidden(config)
    return config


def read_flags(command: Command[C], args: Sequence[str], path: Path | None = None) -> Loaded[C]:
    """Read flags as `load` does, without the rules that concern several fields, files or this machine."""
    named, words = take_config_flag(list(args))
    path, saved, sources = _saved("--config", named, path)
    form, rest = _form(command, words, saved)
    # Before unknown words are refused, among which `--help` would be.
    answer_help(rest, command, form)
    refuse_unknown(rest, command, form)
    values = parse(rest, command.prog, settings_of(form), command.words)
    config = _checked(command, form, command.begin(_chosen(saved, _choices(rest)), path), values)
    return Loaded(settings=config, sources={**sources, **dict.fromkeys(values, "flag")}, saved=saved)


def _checked(command: Command[C], form: type[Any], default: C, values: Mapping[str, Any]) -> C:
    """The settings to begin with, and values over them, types and ranges checked."""
    loaded = as_loaded(default, form)
    kinds = sections_of(form).items()
    sections = {name: {item.name: getattr(getattr(loaded, name), item.name) for item in fields(kind)} for name, kind in kinds}
    for name, value in values.items():
        sections[settings_of(form)[name].section][name] = value
    return plain(command.settings, build(form, sections, "", command.name))


def _saved(setting: str, named: str | os.PathLike[str] | None, path: Path | None) -> tuple[Path | None, dict[str, Any], dict[str, str]]:
    """The file of settings that `setting` names, or else `path`, what it holds, and where each of these settings comes from.

    The file of a run says that itself. What the run took from its machine is left out where another machine may decide otherwise.
    """
    if named is not None and path is not None:
        raise ConfigError(setting, str(named), "a run brings its own settings", "Leave out one of the two.")
    path = path if named is None else Path(named)
    if path is None:
        return None, {}, {}
    data = read_file(path)
    values, sources = flattened(data, str(path)), data.get(SOURCES)
    if sources is None:
        return path, values, dict.fromkeys(values, "file")
    table = settings_of(TrainConfig)
    again = {name for name, source in sources.items() if source == "machine" and name in table and table[name].may_change}
    kept = {name: value for name, value in values.items() if name not in again}
    return path, kept, {name: source for name, source in sources.items() if name in kept}


def _form(command: Command[Any], words: Sequence[str], saved: Mapping[str, Any]) -> tuple[type[Any], list[str]]:
    """The sections to read words into, and the words with our names in them."""
    # Words are read twice: the algorithms that they choose decide which other flags and aliases there are.
    form = schema_of(command.settings, {**saved, **_choices(expand_aliases(words, aliases(command.settings, command.name)))})
    return form, expand_aliases(words, aliases(form, command.name))


def _choices(words: Sequence[str]) -> dict[str, str]:
    """The algorithms that words choose, and the run that they go on with."""
    chosen = {name: flag_value(words, flag(name)) for name in CHOOSING}
    return {name: value for name, value in chosen.items() if value is not None}


def _chosen(saved: Mapping[str, Any], choices: Mapping[str, str]) -> dict[str, Any]:
    """The settings of a file, with other algorithms in the place of its own."""
    return {**saved, **{name: choices[name] for name in ALGORITHMS if name in choices}}


def as_loaded(config: Any, form: type[Any]) -> Any:
    """Return settings in the form in which they are loaded."""
    return config.to_load(form) if isinstance(config, TrainConfig) else config


def load_given(command: Command[C], given: Mapping[str, Any], path: Path | None = None) -> C:
    """Return the checked settings that Python code gives by name or alias, over those of the file ``config`` or else `path`.

    Raises:
        ConfigError: If a name is unknown (the nearest one is named), is given twice, or a value is wrong.
    """
    finished = command.finish(read_given(command, given, path))
    refuse_hidden(finished)
    return finished


def read_given(command: Command[C], given: Mapping[str, Any], path: Path | None = None) -> Loaded[C]:
    """Read settings as `load_given` does, without the rules that concern several fields, files or this machine."""
    rest = dict(given)
    named = rest.pop("config", None)
    path, saved, sources = _saved("config", named, path)
    choices = {name: str(rest[name]) for name in CHOOSING if name in rest}
    form = schema_of(command.settings, {**saved, **choices})
    values = _named_values(rest, form, command)
    config = _checked(command, form, command.begin(_chosen(saved, choices), path), values)
    return Loaded(settings=config, sources={**sources, **dict.fromkeys(values, "python")}, saved=saved)


def _named_values(given: Mapping[str, Any], form: type[Any], command: Command[Any]) -> dict[str, Any]:
    """The values that Python code gives, by the names of the settings."""
    homes, other_names = settings_of(form), aliases(form, command.name)
    values, sets = dict[str, Any](), dict[str, Any]()
    for key, value in given.items():
        targets = _fields_named(key, other_names)
        several = sum(not fixed for _, fixed in targets) > 1
        for name, fixed in targets:
            if fixed:
                sets |= {name: fixed.split() if " " in fixed else fixed} if _is_on(value) else {}
                continue
            if name not in homes:
                refuse_foreign(form, name, value, given)
                known = ["async_" if field == "asynchronous" else field for field in homes]
                raise ConfigError(key, value, "is not a setting", suggest(key, known, command.prog))
            if several:
                sets[name] = value
                continue
            if name in values:
                first = next(other for other in given if (name, "") in _fields_named(other, other_names))
                raise ConfigError(key, value, f"is given twice, also as {first}", "Keep one of the two.")
            values[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return {**sets, **values}


def _fields_named(key: str, other_names: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """The fields that a name in Python stands for, each with the value that it sets; empty for those that take the value given."""
    words = [word.partition("=") for word in other_names.get("--" + key.replace("_", "-"), (key,))]
    # `async` is a keyword of Python, so that the name of this setting ends with an underscore there.
    names = [(word.removeprefix("--").replace("-", "_").rstrip("_"), value) for word, _, value in words]
    return [("asynchronous" if name == "async" else name, value) for name, value in names]


def answer_help(words: Sequence[str], command: Command[Any], form: type[Any]) -> None:
    """Print the help that ``--help``, ``--help SECTION`` or ``--help all`` asks for, or the flags for ``--completion``.

    Raises:
        ConfigError: If there is no such section.
        SystemExit: With code 0, after printing.
    """
    if "--completion" in words:
        sys.stdout.write("".join(f"{line}\n" for line in completion(settings_of(form), command)))
        raise SystemExit(0)
    at = next((index for index, word in enumerate(words) if word in ("-h", "--help")), None)
    if at is None:
        return
    topic = next((word for word in words[at + 1 : at + 2] if not word.startswith("-")), "")
    sections = sections_of(form)
    if topic not in ("", "all", *sections):
        raise ConfigError("--help", topic, "is no section of the settings", f"Sections: {', '.join(sections)}, all.")
    page = help_text(form, command.prog, command.intro, words=command.words, main=command.main, also=command.also, topic=topic)
    sys.stdout.write(page)
    raise SystemExit(0)


def completion(table: Mapping[str, Setting], command: Command[Any]) -> list[str]:
    """Return each flag of a command, and behind it the choices of its value."""
    flags = flags_of(table, command.words)
    return [*(" ".join([name, *choices(setting.hint)]) for name, (setting, _) in flags.items()), *command.also, "--help"]


def refuse_unknown(words: Sequence[str], command: Command[Any], form: type[Any]) -> None:
    """Answer every flag that is no setting with one line.

    Raises:
        ConfigError: If one is an option of an algorithm that is not chosen.
        UnknownFlagError: If there is such a word.
    """
    known = sorted(flags_of(settings_of(form), command.words))
    unknown = []
    for word in words:
        name = word.partition("=")[0]
        if name.startswith("--") and name not in known:
            refuse_foreign(form, name[2:].removeprefix("no-").replace("-", "_"), _typed(flag_value(words, name)), _choices(words))
            unknown.append((name, _answer(name, known, command)))
        elif "=" in word and name.lstrip("+") in other_systems()["verl"]:
            unknown.append((name, _answer(name.lstrip("+"), known, command)))
    if unknown:
        raise UnknownFlagError(command.prog, tuple(unknown))


def _typed(word: str | None) -> Any:
    """A word as the number that it is, for messages."""
    try:
        return json.loads(word or "")
    except ValueError:
        return word


def _answer(name: str, known: Sequence[str], command: Command[Any]) -> str:
    """Return one line that says what to write instead of a word that is no flag of ours."""
    for system in ("OpenRLHF", "TRL", "verl"):
        if answer := other_systems()[system].get(name):
            return f"{system}; here: {answer}"
    if meant := next((flag for flag in other_systems()["common"].get(name, ()) if flag in known), ""):
        return f"did you mean {meant}?"
    if became := answer_of(name[2:].removeprefix("no-").replace("-", "_")):
        return became
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
