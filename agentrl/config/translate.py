"""Words of other systems, and what each is here: one table per system in ``other_systems/``.

Nothing here knows the settings of a command; a caller says which flags it has.
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.config import quantities
from agentrl.config.methods import METHODS
from agentrl.config.quantities import Given, product

TABLES = Path(__file__).with_name("other_systems")


EXACT = 3
"""Weight of a word that a table names as it is, where it is asked which system a command line is of; a pattern has 1."""
ENVIRONMENT = re.compile(r"\.py$|^[^/]*(?<!\w):\w|\w:[A-Za-z_]\w*$")
"""Form of the word that names an environment, where another one might stand."""
RowCount = Callable[[str], int | None]
"""Number of rows of a data set by its name; `None` if it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """The table of a system.

    Attributes:
        name: Its name.
        flags: It has flags, which our commands take as well; else its settings are written as ``key=value``.
        words: Word -> its meaning in `agentrl train`; a key may hold ``*``. See ``other_systems/openrlhf.toml`` for the grammar.
        tune: The same for the commands on given rows, where it is another one.
        quantities: Name of a number, such as ``prompts``, -> the words whose product it is.
        defaults: Command here -> word -> its value where it is not written, if that is another one than here.
        renamed: Word -> the one whose meaning it has.
        commands: Part of the name of a program -> the command here.
    """

    name: str
    flags: bool = False
    words: Mapping[str, Any]
    tune: Mapping[str, Any] = field(default_factory=dict)
    quantities: Mapping[str, Sequence[str]] = field(default_factory=dict)
    defaults: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, str] = field(default_factory=dict)

    def key(self, word: str) -> str:
        """Return a word as the table writes it: of a flag with ``-`` between its parts, and the name that it had before it was renamed."""
        word = word.replace("_", "-") if self.flags else word.lstrip("+~-")
        return self.renamed.get(word, word)

    def quantity(self, word: str) -> str:
        """Return the name of the number that a word is a factor of; empty if it is none."""
        return next((name for name, words in self.quantities.items() if self.key(word) in words), "")

    def meaning(self, word: str, command: str) -> Any:
        """Return what the table says of a word; `None` if it is not there."""
        return self._found(word, command)[0]

    def knows(self, word: str, command: str = "train") -> bool:
        """Return True for a word of this system."""
        return self.likeness(word, command) > 0

    def likeness(self, word: str, *commands: str) -> int:
        """Return 0 for a word that this system does not have for one of the commands, and more for one that the table names as it is."""
        return EXACT if self.quantity(word) else max(self._found(word, command)[1] for command in commands)

    def _found(self, word: str, command: str) -> tuple[Any, int]:
        key = self.key(word)
        for table in (self.tune, self.words) if command in METHODS else (self.words,):
            fitting = [name for name in table if "*" in name and fnmatchcase(key, name)]
            if key in table:
                return table[key], EXACT
            if fitting:
                return table[max(fitting, key=len)], 1  # the longest pattern says most
        # Some words of the commands on given rows are those of another system in training.
        return ("none a setting of the commands on given rows: agentrl sft, dpo, reward-model", 1) if word in self.renamed else (None, 0)


def num_rows(data: str) -> int | None:
    """Return the number of rows of a file of JSON lines or Parquet; `None` of other data."""
    path = Path(data).expanduser()
    if path.suffix == ".parquet" and path.is_file():
        from pyarrow.parquet import read_metadata

        return int(read_metadata(path).num_rows)
    if path.suffix == ".jsonl" and path.is_file():
        with path.open("rb") as lines:
            return sum(1 for line in lines if line.strip())
    return None


@cache
def systems() -> Mapping[str, System]:
    """Return the tables by the names of their files."""
    files = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(TABLES.glob("*.toml"))}
    return {name: System(**table) for name, table in files.items() if "name" in table}


@cache
def common() -> Mapping[str, Sequence[str]]:
    """Return words that people try first, each with the settings that it may mean."""
    return tomllib.loads((TABLES / "common.toml").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Translation:
    """Meaning of words of a system.

    Attributes:
        words: The command line here.
        taken: Each word as it was written, with its value, and our words for it.
        anyway: Words for which nothing has to be written, and why.
        refused: Each word that has no meaning here, and why.
    """

    words: list[str] = field(default_factory=list)
    taken: list[tuple[str, str]] = field(default_factory=list)
    anyway: list[tuple[str, str]] = field(default_factory=list)
    refused: list[tuple[str, str]] = field(default_factory=list)


def arity(meaning: Any, quantity: bool = False) -> int | None:
    """Return the number of values that follow a flag; -1: it may have a value of true or false; `None`: the table leaves it open."""
    if quantity:
        return 1
    if isinstance(meaning, Mapping):
        parts = {key: part for key, part in meaning.items() if key != "of"}
        if "of" in meaning:
            counts = [arity(part) for part in parts.values()]
            return None if None in counts else max(counts, key=lambda count: count or 0)
        return -1 if "true" in parts or "false" in parts else 1
    if meaning.partition(" ")[0] in ("always", "none") or "{,}" in meaning or "{*}" in meaning:
        return None
    return 2 if "{1}" in meaning else 1 if "{}" in meaning else -1


def num_values(system: System, word: str, command: str, rest: Sequence[str]) -> int:
    """Return how many of the words behind a flag of a system are its values."""
    count = arity(system.meaning(word, command) or "always", bool(system.quantity(word)))
    free = next((at for at, other in enumerate(rest) if other.startswith("--")), len(rest))
    if count == -1:
        return int(bool(free) and rest[0].lower() in ("true", "false"))
    if count is None:  # what looks like an environment is none of its values
        return next((at for at, other in enumerate(rest[:free]) if ENVIRONMENT.search(other)), free)
    return min(count, free)


def translate(system: System, given: Given, command: str, ours: Given, *, rows: RowCount = lambda _: None) -> Translation:
    """Return what words of a system are for a command here.

    Args:
        system: The system.
        given: Its words with their values, in their order.
        command: The command here.
        ours: Flags of ours that are given beside them.
        rows: Number of rows of a data set.
    """
    made = Translation()
    keyed = {**ours, **{system.key(word): values for word, values in given.items()}}
    for word, values in given.items():
        is_number = bool(system.quantity(word))
        if not is_number or product([values]) is None:
            meaning = "none it is not a number" if is_number else _chosen(system.meaning(word, command), list(values), keyed)
            _note(made, " ".join([word, *values]), meaning, values)
    counts = {name: product(keyed.get(word, ()) for word in words) for name, words in system.quantities.items()}
    numbers = {name: count for name, count in counts.items() if count is not None}
    if numbers:
        have = {**ours, **dict(_flags(made.words))}
        counted = rows("".join(have.get("--prompts", have.get("--data", ()))[:1]))
        derived = quantities.in_rows(numbers, have, counted) if command in METHODS else quantities.in_steps(numbers, have, counted)
        for name, meaning in derived.items():
            theirs = (" ".join([word, *values]) for word, values in given.items() if system.quantity(word) == name and product([values]))
            _note(made, ", ".join(theirs), meaning, ())
    return made


def _chosen(meaning: Any, values: Sequence[str], keyed: Given) -> str:
    """Return what a table says, for these values and the other words."""
    while isinstance(meaning, Mapping):
        of = keyed.get(meaning["of"], [""]) if "of" in meaning else values
        value = (of[0] if of else "" if "of" in meaning else "true").lower()
        meaning = meaning.get(value, meaning.get("*", "none of the values that are known here"))
    text = str(meaning)
    off = len(values) == 1 and values[0].lower() == "false" and "{" not in text and text.startswith("--")
    return "always off" if off else text


def _note(made: Translation, theirs: str, meaning: str, values: Sequence[str]) -> None:
    """Add a word to a translation, by what its table says."""
    kind, _, why = meaning.partition(" ")
    if kind == "none":
        made.refused.append((theirs, f"none {why}" if why.startswith("of ") else why or "nothing here takes its place"))
    elif kind == "always":
        made.anyway.append((theirs, why or "always so"))
    else:
        words = _filled(meaning, values)
        # A word for several settings goes first, so that one for a single setting counts, wherever it stands.
        at = 0 if meaning.count("{}") > 1 else len(made.words)
        made.words[at:at] = words
        made.taken.append((theirs, " ".join(words)))


def _filled(template: str, values: Sequence[str]) -> list[str]:
    """Words of ours with values in their places."""
    parts = list(values) if len(values) > 1 else re.split(r"[\s,\[\]()]+", values[0].strip("[]() ")) if values else []
    words = list[str]()
    for word in template.split(" "):
        if word == "{*}":
            words += parts
        else:
            joined = {"{}": " ".join(values), "{,}": ",".join(part.strip("'\"") for part in parts)}
            for place, text in {**joined, **{f"{{{at}}}": part for at, part in enumerate(parts)}}.items():
                word = word.replace(place, text)
            words.append(word)
    return words


def _flags(words: Iterable[str]) -> Iterable[tuple[str, list[str]]]:
    """Yield each flag of ours with its values."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found.append((name, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
    return found


def nearest(words: Iterable[str], *commands: str, flags: bool = False) -> list[System]:
    """Return the systems that know some of the words, first the one that knows most.

    Args:
        words: The words.
        commands: The commands here for which they may stand.
        flags: Leave out systems without flags.
    """
    words = list(words)
    counts = [
        (sum(system.likeness(word, *commands) for word in words), system) for system in systems().values() if system.flags or not flags
    ]
    return [system for count, system in sorted(counts, key=lambda row: -row[0]) if count]


@dataclass(frozen=True, slots=True)
class OwnWords:
    """A command line with our words in the place of those of other systems.

    Attributes:
        words: What became of theirs.
        mine: The words that were ours.
        theirs: Those of other systems.
        taken: One line for each system on what its words were taken for.
        refused: Words that have no meaning for this command, each with the reason.
    """

    words: list[str]
    mine: list[str]
    theirs: list[str]
    taken: list[str]
    refused: list[tuple[str, str]]

    def line(self) -> list[str]:
        """Return the command line, ours behind theirs; a word without a flag stays in front, where no flag takes it for a value."""
        free = next((at for at, word in enumerate(self.mine) if word.startswith("-")), len(self.mine))
        return [*self.mine[:free], *self.words, *self.mine[free:]]

    def show(self) -> None:
        """Write to standard error what words of other systems were taken for."""
        sys.stderr.write("".join(f"agentrl: {line}\n" for line in self.taken))


def own_words(words: Sequence[str], command: str, known: Set[str], options: Set[str], rows: RowCount) -> OwnWords:
    """Return a command line in which the flags of other systems are ours; ours count more, wherever they stand.

    Args:
        words: The words.
        command: The command, for which a word may mean something else than for another.
        known: Flags that are the command's own.
        options: Flags that are its own with certain algorithms.
        rows: Number of rows of a data set.
    """
    mine, theirs = _split(words, command, known, options)
    own, ours = OwnWords([], mine, [word.replace("_", "-") for word in theirs], [], []), dict(_flags(mine))
    if environment := [word for at, word in enumerate(mine) if ENVIRONMENT.search(word) or (at == 0 and not word.startswith("-"))]:
        ours.setdefault("--agent", environment[:1])
    for system in nearest(theirs, command, flags=True):
        given = {word: theirs.pop(word) for word in list(theirs) if system.knows(word, command)}
        part = translate(system, given, command, ours, rows=rows)
        own.taken.extend(_line(system, part))
        own.refused.extend((word.partition(" ")[0], f"{system.name}; not here: {why}") for word, why in part.refused)
        strange = [
            (word, meaning) for word, meaning in part.taken if meaning.startswith("--") and meaning.split()[0] not in (known | options)
        ]
        own.refused.extend(
            (word.partition(" ")[0], f"{system.name}; no setting of agentrl {command}: {meaning}") for word, meaning in strange
        )
        own.words.extend(word for name, values in _flags(part.words) if name in known | options for word in (name, *values))
    return own


def _line(system: System, part: Translation) -> Iterator[str]:
    """One line on what words were taken for."""
    # Numbers that are counted otherwise have a reason that differs from run to run.
    counted = [f"{word} ({why})" for word, why in part.anyway if system.quantity(word.split()[0])]
    anyway = [word.split()[0] for word, _ in part.anyway if not system.quantity(word.split()[0])]
    taken = [f"{word} as {ours}" for word, ours in part.taken]
    parts = [", ".join(taken), ", ".join(counted), f"nothing to write for {', '.join(anyway)}" if anyway else ""]
    if any(parts):
        yield f"words of {system.name}: {'; '.join(filter(None, parts))}".replace("\n", "\\n")


def _split(words: Sequence[str], command: str, known: Container[str], options: Container[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Our words, and those of other systems with their values."""
    mine, theirs, rest = list[str](), dict[str, list[str]](), list(words)
    while rest:
        word, equals, value = rest.pop(0).partition("=")
        name = word.replace("_", "-")
        foreign = nearest([word], command, flags=True) if name.startswith("--") and name not in known and name not in options else []
        if not foreign:
            mine.append(word + equals + value)
            continue
        count = 0 if equals else num_values(foreign[0], word, command, rest)
        theirs[word] = [value] if equals else rest[:count]
        rest = rest[count:]
    return mine, theirs


def answer(word: str, value: str, command: str) -> str:
    """Return one line on a setting of another system, ``key=value`` or a flag; empty if no system has it."""
    for system in nearest([word], command):
        part = translate(system, {word: [value] if value else []}, command, {})
        here = [meaning for _, meaning in [*part.taken, *part.anyway]] or [f"not at all: {why}" for _, why in part.refused]
        return f"{system.name}; here: {'; '.join(here)}"
    return ""
