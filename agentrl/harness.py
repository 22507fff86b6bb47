"""Agent programs that train as they are: how each starts without a terminal, learns its model's address, and keeps its prompts short.

One table of ``harnesses.toml`` is all that agentrl knows about a program. Versions are pinned there and nowhere else: these are the ones
that ``make test-clients`` installs and that docs/harnesses.md was measured with.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from pydantic import TypeAdapter

DIALECTS = {"chat": "Chat Completions", "responses": "Responses", "messages": "Messages"}
"""Names of the APIs that programs speak."""
BRIEF = "You are a coding agent. Work with the tools until the task is done."
"""System prompt in place of a program's own, where short prompts are wanted."""

Calls: TypeAlias = tuple[tuple[str, Mapping[str, Any]], ...]
"""Calls of tools by name and arguments."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Words, environment variables and files with which a program starts.

    In each of them these stand for values of the episode: ``{prompt}``, ``{task_id}``, ``{folder}`` (the working folder), ``{home}``,
    ``{model}`` and ``{named}`` (the model's name as the program wants it), ``{base_url}`` (of OpenAI's APIs), ``{anthropic_base_url}``,
    ``{address}`` (that of the dialect), ``{api}`` (the program's own name for the dialect), ``{api_key}``, ``{context}`` (tokens that a
    conversation may have) and ``{answer}`` (tokens that the program should leave for one answer).

    Attributes:
        words: Arguments.
        variables: Environment variables.
        files: Content of files by their paths below the home of the episode.
    """

    words: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The session that a scripted model plays to find out how a program behaves.

    In texts and arguments ``{file}`` and ``{other}`` stand for two files, ``{folder}`` for theirs, ``{old}`` and ``{new}`` for lines.

    Attributes:
        read: Calls that read the two files side by side; none if the program shows no files to its model by itself.
        edit: Calls of an edit, or the text of one.
        end: Calls or text of the last answer.
        together: True if one answer holds all edits, because the program works on one answer only.
    """

    read: Calls = ()
    edit: Calls | str
    end: Calls | str = "All done."
    together: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Harness:
    """An agent program, as ``--agent harness:NAME`` starts it.

    Attributes:
        title: Name for people.
        program: Name of its executable.
        package: Package that has it.
        version: Version of the package that was tried.
        installer: Program that installs it.
        dialects: APIs that it speaks, by what it calls them; the first is the default.
        start: How it starts, without a terminal and without questions.
        task: Its last arguments, which tell it the task.
        brief: What is added for a short first request: another system prompt, and few tools.
        script: A session for ``agentrl check harness:NAME``.
        named: Name of the model as the program wants it.
        writes: Files that it leaves in its home or, if they begin with ``./``, in the working folder.
        memory_mib: Memory that it needs at least.
        processes: Processes and threads that it needs at least.
    """

    title: str
    program: str
    package: str
    version: str
    installer: Literal["npm", "pip"] = "npm"
    dialects: Mapping[str, str]
    start: Setup
    script: Script
    task: tuple[str, ...] = ("--", "{prompt}")
    brief: Setup = Setup()
    named: str = "{model}"
    writes: tuple[str, ...] = ()
    memory_mib: int = 2048
    processes: int = 256

    @property
    def install(self) -> str:
        """The command that installs it."""
        return f"npm install -g {self.package}@{self.version}" if self.installer == "npm" else f"pip install {self.package}=={self.version}"


def _read_table() -> dict[str, Harness]:
    text = (Path(__file__).parent / "harnesses.toml").read_text(encoding="utf-8")
    return TypeAdapter(dict[str, Harness]).validate_python(tomllib.loads(text.replace("{brief}", BRIEF)))


HARNESSES: Mapping[str, Harness] = _read_table()
"""The programs by the names that follow ``harness:``."""
