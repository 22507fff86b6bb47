"""Settings of a command from defaults < file < flags or Python, checked at each step; every error names the field, the value, the remedy.

One loader reads every command whose settings are sections. Nothing here imports torch, ray, vllm or deepspeed: a wrong flag is answered
within a second.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from agentrl.algo.plan import KINDS, built_in_options
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
from agentrl.config.methods import METHODS
from agentrl.config.schema import TrainConfig
from agentrl.config.sections import Setting, sections_of, settings_of
from agentrl.config.translate import OwnWords, answer, common, num_rows, own_words
from agentrl.config.words import ENVIRONMENT, Word, choices, flags_of, parse
from agentrl.core.errors import ConfigError, UnknownFlagError
from agentrl.core.settings import Alias, flag

C = TypeVar("C")

ALGORITHMS = (*(part.setting for part in KINDS), "loss")
NEAR = 0.86
"""Likeness from which a word is taken for a slip in one of ours; what is less alike means something else as a rule."""
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


def aliases(settings: type[Any], command: str = "train") -> Mapping[str, str]:
    """Return the further flags of a command, each with the flag that it stands for; a setting's own flag is none."""
    table = settings_of(settings)
    notes = ((setting, note) for setting in table.values() for note in setting.notes if isinstance(note, Alias))
    found = {name: flag(setting.name) for setting, note in notes if note.command in ("", command) for name in note.flags}
    return {name: own for name, own in found.items() if name[2:].replace("-", "_") not in table}


def expand_aliases(args: Sequence[str], known: Mapping[str, str]) -> list[str]:
    """Return the words with every alias, ``--flag value`` or ``--flag=value``, ``_`` or ``-``, replaced by our flag."""
    words = []
    for word in args:
        name, equals, value = word.partition("=")
        name = name.replace("_", "-") if name.startswith("--") else name
        words.append(known.get(name, name) + equals + value)
    return words


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
    own = _own_words(command, words, saved)
    form, rest = _form(command, own.line(), saved)
    # Before unknown words are refused, among which `--help` would be.
    answer_help(rest, command, form)
    refuse_unknown(rest, command, form, own.refused)
    own.show()
    values = parse(rest, command.prog, settings_of(form), command.words)
    config = _checked(command, form, command.begin(_chosen(saved, _choices(rest)), path), values)
    return Loaded(settings=config, sources={**sources, **dict.fromkeys(values, "flag")}, saved=saved)


def _own_words(command: Command[Any], words: Sequence[str], saved: Mapping[str, Any]) -> OwnWords:
    """The words with ours in the place of those of other systems; an option of a user's own algorithm is no such word."""
    form, expanded = _form(command, words, saved)
    # A loss of a user's own has other options than the method, whose flags are refused as such.
    own_flags = flags_of(settings_of(command.settings), command.words) | flags_of(settings_of(form), command.words)
    known = {*own_flags, *command.also, "--help", "--completion"}
    # The commands on given rows share names with other systems that mean something else in training.
    options = set() if command.name in METHODS else {*map(flag, built_in_options()), *map(flag, settings_of(TrainConfig))}
    own = own_words(expanded, command.name, known, options, num_rows)
    # A setting of an earlier version of ours says more than the word of another system that it was named after.
    return replace(own, refused=[(word, _earlier(word) or _usual(word, known) or why) for word, why in own.refused])


def _earlier(word: str) -> str:
    """Return what has become of a flag of an earlier version; empty if there was none."""
    return answer_of(word[2:].removeprefix("no-").replace("-", "_"))


def _usual(word: str, known: Iterable[str]) -> str:
    """Return the flag that a word which people try first may mean; empty if it is none of these."""
    meant = next((name for name in common().get(word, ()) if name in known), "")
    return f"did you mean {meant}?" if meant else ""


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
    rest = _own_names(command, rest, saved)
    choices = {name: str(rest[name]) for name in CHOOSING if name in rest}
    form = schema_of(command.settings, {**saved, **choices})
    values = _named_values(rest, form, command)
    config = _checked(command, form, command.begin(_chosen(saved, choices), path), values)
    return Loaded(settings=config, sources={**sources, **dict.fromkeys(values, "python")}, saved=saved)


def _own_names(command: Command[Any], given: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """The values that Python code gives, with those by names of other systems under the names of our settings."""
    own = _own_words(command, [word for name, value in given.items() for word in _as_words(flag(name.rstrip("_")), value)], saved)
    if own.refused:
        raise UnknownFlagError(command.prog, tuple(own.refused))
    own.show()
    chosen = {name: str(value) for name, value in given.items() if name in CHOOSING}
    form = schema_of(command.settings, {**saved, **_choices(own.words), **chosen})
    translated = parse(own.words, command.prog, settings_of(form))
    return {**translated, **{name: value for name, value in given.items() if f"--{name.replace('_', '-')}" not in own.theirs}}


def _as_words(name: str, value: Any) -> list[str]:
    """Return a value that Python code gives as the words of a command line."""
    if isinstance(value, bool):
        return [name] if value else [name + "=false"]
    return [name, *map(str, value if isinstance(value, list | tuple) else [value])]


def _named_values(given: Mapping[str, Any], form: type[Any], command: Command[Any]) -> dict[str, Any]:
    """The values that Python code gives, by the names of the settings."""
    homes, other_names, values = settings_of(form), aliases(form, command.name), dict[str, Any]()
    for key, value in given.items():
        name = _field_named(key, other_names)
        if name not in homes:
            refuse_foreign(form, name, value, given)
            known = ["async_" if field == "asynchronous" else field for field in homes]
            raise ConfigError(key, value, "is not a setting", suggest(key, known, command.prog))
        if name in values:
            first = next(other for other in given if _field_named(other, other_names) == name)
            raise ConfigError(key, value, f"is given twice, also as {first}", "Keep one of the two.")
        values[name] = os.fspath(value) if isinstance(value, os.PathLike) else value
    return values


def _field_named(key: str, other_names: Mapping[str, str]) -> str:
    """The field that a name in Python stands for."""
    # `async` is a keyword of Python, so that the name of this setting ends with an underscore there.
    name = other_names.get("--" + key.replace("_", "-"), key).removeprefix("--").replace("-", "_").rstrip("_")
    return "asynchronous" if name == "async" else name


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


def refuse_unknown(words: Sequence[str], command: Command[Any], form: type[Any], refused: Sequence[tuple[str, str]] = ()) -> None:
    """Answer every flag that is no setting with one line.

    Args:
        words: The words, with our flags in the place of those of other systems.
        command: The command.
        form: Its sections.
        refused: Words of other systems that have no meaning here, each with the reason.

    Raises:
        ConfigError: If one is an option of an algorithm that is not chosen.
        UnknownFlagError: If there is such a word.
    """
    known = sorted(flags_of(settings_of(form), command.words))
    unknown = list(refused)
    for word in words:
        name, _, value = word.partition("=")
        if name.startswith("--") and name not in known:
            refuse_foreign(form, name[2:].removeprefix("no-").replace("-", "_"), _typed(flag_value(words, name)), _choices(words))
            unknown.append((name, _answer(name, known, command)))
        elif "=" in word and re.fullmatch(r"[+~]{0,2}\w+(\.[\w*]+)+", name) and (meant := answer(name, value, command.name)):
            unknown.append((name, meant))
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
    if command.name not in METHODS and name[2:].replace("-", "_") in {**settings_of(TrainConfig), **built_in_options()}:
        return "a setting of agentrl train"
    if became := _usual(name, known) or _earlier(name) or answer(name, "", command.name):
        return became
    near = difflib.get_close_matches(name, known, n=1, cutoff=NEAR)
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
