"""Schemes of ``--agent``: the word before the colon, what it loads, and what the rest of agentrl has to know before that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

FLAG = "--agent"
JUDGE, REWARD = "#judge=", "#reward="
"""Beginnings of the judge of a program in its specification."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Programs:
    """Programs that a specification runs, which always need a sandbox.

    Attributes:
        needs_container: True if they run in containers, whatever ``--sandbox`` says.
        calls_model: True if a program is the agent and asks the endpoint of the model; else the model uses the sandbox.
    """

    needs_container: bool = False
    calls_model: bool = True


def no_programs(spec: str) -> Programs | None:
    """Return `None`: an environment of classes and functions runs no programs."""
    return None


def in_sandbox(spec: str) -> Programs:
    """Return one program, the agent, in a sandbox of the kind that ``--sandbox`` says."""
    return Programs()


def accept(spec: str) -> None:
    """Accept every specification until it is loaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A scheme with its facts.

    Rules read the facts before an environment loads, so the module of a scheme imports its suite inside functions only.

    Attributes:
        name: Word before the colon.
        load: Returns what a whole specification stands for: a class, a reward function, or a text that ``--agent`` may name.
        check: Refuses specifications of which it is known, without loading anything, that no run can use them, by `ConfigError`.
        programs: Returns the programs that a specification runs; `None` if it runs none.
        takes_reward: True if ``--reward`` may name the function that judges its episodes; the function goes behind ``#reward=``.
        has_pictures: True if ``--observe pixels`` shows its pictures, by an option ``observe``.
        is_remote: True if it is on a server, or its package takes long to load: ``agentrl check`` then plays nothing in a second process.
        form: Form of a specification, for the documentation; empty for one that other flags stand for.
        about: Environments that it has, in Markdown.
        needs: Packages and programs that it needs besides agentrl's own, in Markdown.
    """

    name: str
    load: Callable[[str], Any]
    check: Callable[[str], None] = accept
    programs: Callable[[str], Programs | None] = no_programs
    takes_reward: bool = False
    has_pictures: bool = False
    is_remote: bool = False
    form: str = ""
    about: str = ""
    needs: str = ""
