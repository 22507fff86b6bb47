"""Commands and files of other systems as words with values: shell scripts, calls in Python, YAML and TOML. Nothing of them is run."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from agentrl.config.mapping import read_file
from agentrl.config.translate import System, num_values, systems
from agentrl.core.errors import ConfigError

PROGRAM = re.compile(r"^(openrlhf|verl|skyrl|skyrl_train|prime_rl|trl|examples|main)\b.*\.|\.py$|^(sft|dpo|grpo|kto|orpo|rloo|reward|rl)$")
SETTING = re.compile(r"^(--?[A-Za-z]|[+~]{0,2}[A-Za-z_]\w*(\.[\w*-]+)*=)")
PLACES = {"r": "--lora-r", "target_modules": "--lora-target-modules", "path": "--dataset-name", "split": "--dataset-train-split"}
"""Arguments of peft's and datasets' functions, as TRL's scripts name them."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A run of another system.

    Attributes:
        program: Name of what is started, or of the class of its settings; empty for a file of settings.
        given: Its words, each with its values.
        unread: Words whose values only running the file would tell.
    """

    program: str = ""
    given: dict[str, list[str]] = field(default_factory=dict)
    unread: list[str] = field(default_factory=list)

    def command(self, system: System) -> str:
        """Return the command here that does what the program does."""
        names = [self.program.lower()] if self.program else [system.key(word) for word in self.given]
        return next((command for pattern, command in system.commands.items() if any(fnmatchcase(name, pattern) for name in names)), "train")


def read_launch(source: str) -> Launch:
    """Read a command line, or the file of that name.

    Raises:
        ConfigError: If it holds no settings.
    """
    path = Path(source).expanduser()
    if "\n" in source or " " in source or not path.is_file():
        launch = _of_shell(source)
    elif path.suffix == ".py":
        launch = _of_python(path.read_text(encoding="utf-8"))
    elif path.suffix in (".toml", ".yaml", ".yml", ".json"):
        launch = Launch(given=dict(_of_file(path)))
    else:
        launch = _of_shell(path.read_text(encoding="utf-8"))
    if not launch.given:
        raise ConfigError(
            "SOURCE", source[:80], "holds no settings of another system", "Give a command in quotes, a script, or a file of settings."
        )
    return launch


def _of_file(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Settings of a file; those without sections are flags."""
    data = read_file(path)
    nested = path.suffix == ".toml" or any(isinstance(value, dict) for value in data.values())
    for key, value in _leaves(data):
        yield key if nested else f"--{key.replace('_', '-')}", _texts(value)


def _leaves(data: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in data.items():
        name = f"{before}{key}"
        parts = value if isinstance(value, list) and value and isinstance(value[0], dict) else [value]
        for part in parts:
            if isinstance(part, dict) and part:
                yield from _leaves(part, f"{name}.")
            else:
                yield name, True if part == {} else part


def _texts(value: Any) -> list[str]:
    """A value as the words that a command line would have for it."""
    if isinstance(value, list | tuple):
        return [str(part) for part in value]
    return ["null"] if value is None else [str(value).lower() if isinstance(value, bool) else str(value)]


def _of_python(source: str) -> Launch:
    """The arguments of the calls that hold TRL's settings: of a class ``...Config``, a trainer and ``load_dataset``."""
    tree = ast.parse(source)
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    # TRL's examples show their settings as a command in the docstring.
    launch, names = _of_shell(ast.get_docstring(tree) or ""), list[str]()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = call.func.id if isinstance(call.func, ast.Name) else call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if not (name.endswith(("Config", "Trainer")) or name == "load_dataset"):
            continue
        names += [name] if name not in ("LoraConfig", "ModelConfig", "load_dataset") else []
        arguments = {key.arg: key.value for key in call.keywords if key.arg}
        if name == "load_dataset" and call.args:
            arguments = {"path": call.args[0], **arguments}
        for key, node in arguments.items():
            _take(
                launch, PLACES.get(key, f"--{key.replace('_', '-')}"), constants.get(node.id, node) if isinstance(node, ast.Name) else node
            )
    return Launch(next(iter(names), launch.program), launch.given, launch.unread)


def _take(launch: Launch, word: str, node: ast.AST) -> None:
    try:
        launch.given[word] = _texts(ast.literal_eval(node))
    except ValueError:
        if word in ("--reward-funcs", "--environment-factory", "--tools", "--rollout-func"):
            launch.given[word] = [ast.unparse(node)]
        elif any(system.knows(word) for system in systems().values() if system.flags):
            launch.unread.append(word)


def _of_shell(text: str) -> Launch:
    """The command of a script that has most settings."""
    best = Launch()
    for words in _commands(text):
        launch = _launch(words)
        if len(launch.given) > len(best.given):
            best = launch
    return best


def _launch(words: Sequence[str]) -> Launch:
    """A command line as settings; those of the program that starts the processes are left out unless a system has them."""
    rest = list(words)
    if "--" in rest:  # `ray job submit ... -- COMMAND`
        rest = rest[len(rest) - rest[::-1].index("--") :]
    at = next((at for at, word in enumerate(rest) if PROGRAM.search(word)), 0)
    program = rest[at] if rest else ""
    given, launcher = dict[str, list[str]](), rest[:at]
    given |= {word: values for word, values in _pairs(launcher) if any(system.knows(word) for system in systems().values())}
    for word, values in _pairs(rest[at:]):
        if word in ("--config", "@") and values and Path(values[0]).is_file():
            given |= dict(_of_file(Path(values[0])))
        else:
            given[word] = values
    return Launch(program, given)


def _pairs(words: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Words with their values; a value ends before the next setting, or where the table of a system says so."""
    rest = list(words)
    while rest:
        word, equals, value = rest.pop(0).partition("=")
        if word == "@" and rest:
            yield word, [rest.pop(0)]
        elif equals and SETTING.match(f"{word}="):
            yield word, [value.strip("'\"")]
        elif re.match(r"--[A-Za-z]", word):
            free = next((at for at, other in enumerate(rest) if SETTING.match(other) and not re.match(r"-\d", other)), len(rest))
            known = [system for system in systems().values() if system.flags and system.knows(word)]
            count = num_values(known[0], word, "train", rest[:free]) if known else min(free, 1)
            yield word, rest[:count]
            rest = rest[count:]


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a script, with the variables that it sets in their places."""
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)
    known = {"@": "", "*": ""}
    for name, _, body in re.findall(r"read +-r +-d +'' +(\w+) *<<-? *['\"]?(\w+)['\"]?\n(.*?)\n\s*\2", text, re.DOTALL):
        known[name] = body.replace("\\\n", " ").replace("\n", " ")
    # A line break within $'...' must not end the line.
    text = re.sub(r"\$'((?:[^'\\]|\\.)*)'", lambda match: shlex.quote(match[1].replace("\\n", "\0")), text.replace("\\\n", " "))
    text = re.sub(r"=\(\s*\n(.*?)\n\s*\)", lambda match: f"=({match[1]})".replace("\n", " "), text, flags=re.DOTALL)
    for line in text.splitlines():
        if assigned := re.fullmatch(r"\s*(?:export\s+)?(\w+)=(\(.*\)|\"[^\"]*\"|'[^']*'|[^\s(]\S*|)\s*(?:#.*)?", line):
            known[assigned[1]] = _filled(assigned[2][1:-1] if assigned[2][:1] in ("(", "'", '"') else assigned[2], known)
            continue
        try:
            words = [word.replace("\0", "\n") for word in shlex.split(_filled(line, known), comments=True)]
        except ValueError:  # half of a construct that is no command
            continue
        if words:
            yield words


def _filled(text: str, known: Mapping[str, str]) -> str:
    """A line with the values of variables; one that only the shell knows which runs it stays as it is."""
    text = re.sub(r"\"?\$\{(\w+)\[@\]\}\"?", lambda match: known.get(match[1], ""), text)
    before = ""
    while text != before:  # a default may hold variables itself
        before = text
        text = re.sub(r"\$\{(\w+)(?::?-([^{}]*))?\}", lambda match: known.get(match[1], match[2] or f"${match[1]}"), text)
    return re.sub(r"\$(\w+|@|\*)", lambda match: known.get(match[1], match[0]), text)
