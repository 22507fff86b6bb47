"""Commands of the documentation, as a reader would type them, and the way in which a test can try each one."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from agentrl.check.findings import CHECK
from agentrl.cli import (
    doctor,
    export,
    get_model,
    inspect,
    merge,
    new,
    plan,
    profile,
    replay,
    scale,
    serve_reward_model,
    serve_sandboxes,
    translate,
    view,
)
from agentrl.cli.certify import CERTIFY
from agentrl.config.iterate import load_iterate
from agentrl.config.load import Command, read_flags
from agentrl.config.methods import METHODS
from agentrl.config.sections import settings_of
from agentrl.config.words import others
from agentrl.resolve.commands import EVAL, PLAY, SAMPLE, SERVE, TRAIN
from agentrl.resolve.tune import TuneCommand

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    page
    for folder, pattern in ((".", "*.md"), ("docs", "*.md"), ("docs/tune", "*.md"), ("examples", "**/README*"))
    for page in (ROOT / folder).glob(pattern)
    if page.name != "CHANGELOG.md"
)
COMMANDS: dict[str, Command[Any]] = {
    command.name: command
    for command in (
        *(
            TRAIN,
            EVAL,
            SAMPLE,
            PLAY,
            SERVE,
            CHECK,
            CERTIFY,
            doctor.DOCTOR,
            export.EXPORT,
            get_model.GET_MODEL,
            inspect.INSPECT,
            merge.MERGE,
        ),
        *(
            new.NEW,
            profile.PROFILE,
            replay.REPLAY,
            scale.SCALE,
            serve_reward_model.SERVE_REWARD_MODEL,
            serve_sandboxes.SERVE_SANDBOXES,
            translate.TRANSLATE,
            view.VIEW,
        ),
        *(TuneCommand(method) for method in METHODS.values()),
    )
}
"""Every command but ``plan`` and ``iterate``, which read the settings of others as well."""
DRY = {"train", "eval", "sample", "iterate", *METHODS}
"""Commands with ``--dry-run``."""
OTHER_PROGRAMS = [
    "make",
    "python",
    "pip",
    "npm",
    "export",
    "source",
    "ray",
    "sbatch",
    "docker",
    "tensorboard",
    "kubectl",
    "torchrun",
    "apt-get",
    "cp",
    "sed",
]
_START = re.compile(rf"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:agentrl|{'|'.join(OTHER_PROGRAMS)}) ")


@dataclass(frozen=True, slots=True)
class Shown:
    """One command of a page.

    Attributes:
        page: Name of the page.
        text: The command in one line, as the page has it.
        words: Its words, without what goes before the program.
    """

    page: str
    text: str
    words: tuple[str, ...]

    @property
    def program(self) -> str:
        """Return the name of the program."""
        return Path(self.words[0]).name

    @property
    def agentrl(self) -> list[str]:
        """Return the words after the command's name."""
        return list(self.words[2:])


def shown_commands(page: Path) -> Iterator[Shown]:
    """Yield the commands of a page: lines of its shell blocks, lines after a dollar sign, and indented ones."""
    pending = ""
    for line in _lines(page.read_text(encoding="utf-8").replace("\\\n", " ")):
        try:
            words = shlex.split(pending + line, comments=True)
        except ValueError:  # a quotation that ends in another line
            pending += f"{line}\n"
            continue
        pending = ""
        words = words[len(words) - words[::-1].index("|") :] if "|" in words else words  # the last program of a pipe
        while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
            words = words[1:]
        if words:
            yield Shown(page.relative_to(ROOT).as_posix(), " ".join(line.split()), tuple(words))


def _lines(text: str) -> Iterator[str]:
    kind = None
    for line in text.splitlines():
        if fence := re.match(r" *```(\w*)", line):
            kind = None if kind is not None else fence[1]
        elif kind in ("bash", "sh", "shell") and not line.startswith("#"):
            yield line
        elif line.startswith("$ "):
            yield line[2:]
        elif kind is None and line.startswith("    ") and _START.match(line.strip()):
            yield line.strip()


def read(name: str, words: list[str]) -> None:
    """Read the words of an agentrl command as the command does, types and ranges checked; nothing is run.

    Raises:
        ConfigError: If a flag is unknown or a value is wrong.
    """
    words = [word for word in words if word not in ("--dry-run", "--help")]
    if name == "plan":
        own, rest = others(words, settings_of(plan.PlanConfig))
        read_flags(plan.PLAN, own)
        read_flags(TRAIN, rest)
    elif name == "iterate":
        config = load_iterate(words)
        for phase, command in (("sample", "sample"), ("train", config.iterate.method), ("eval", "eval")):
            read(command, list(config.phases[phase]))
    else:
        read_flags(COMMANDS[name], words)


@dataclass(frozen=True, slots=True)
class OnlyRead:
    """Commands that are only read, and the reason why they are not tried.

    Attributes:
        match: Expression that is found in ``PAGE: COMMAND``.
        reason: The reason.
    """

    match: str
    reason: str

    def __contains__(self, shown: Shown) -> bool:
        """Return True if a command is among them."""
        return re.search(self.match, f"{shown.page}: {shown.text}") is not None


@cache
def only_read() -> tuple[OnlyRead, ...]:
    """Return the table of commands that are not tried, in its order."""
    table = tomllib.loads((ROOT / "tests" / "doc_commands.toml").read_text(encoding="utf-8"))
    return tuple(OnlyRead(match, row["reason"]) for row in table["only_read"] for match in row["match"])
